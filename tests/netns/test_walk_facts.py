"""The facts of the kernel that a packet walk must know: the rules loaded, the packets sent.

For each fact of the list (tests/support/walk_facts.py) three things must agree: what is written
there, where the kernel brings the packet, and what the walk says.
"""

import ipaddress
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest

from agent.explain.walk import Layer, walk
from agent.model.native import NativeHook
from agent.model.packet import Kind, Packet
from agent.model.ruleset import Family
from tests.netns.test_walk_against_kernel import LEGACY, NFT, Case, load
from tests.support.netns import path_of
from tests.support.walk_facts import AWAY, FACTS, PLACES, PORTS_OF_A_FACT, Fact, Sent, text_of
from tests.support.wire_lab import CLIENT, HOST, WIRE, Lab, Shot, lab

BACKENDS = (LEGACY, NFT)
# Source ports of each run, so that no two packets share a connection.
FIRST_PORT, PORTS_OF_A_RUN = 21_000, 1_000
GIDS = {0: 0, 1000: 1000, 1337: 1337, 2000: 3000}


@dataclass(frozen=True, slots=True)
class Result:
    """One packet of a fact: what the walk says, and by whom it was received."""

    sent: Sent
    case: Case


Results = dict[tuple[str, Family, int], list[Result]]


class Runner:
    """Loads rules, sends packets one after another, and keeps what the walk says of them."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.runs = 0
        self._sent = 0

    def ports(self) -> int:
        """Return the first source port of a new run."""
        self.runs += 1
        return FIRST_PORT + (self.runs - 1) * PORTS_OF_A_RUN

    def send(
        self,
        layers: Sequence[Layer],
        family: Family,
        sent: Sent,
        port: int,
        native: Sequence[NativeHook] = (),
    ) -> Result:
        self._sent += 1
        shot = Shot(
            nonce=f"f{self._sent}",
            protocol="udp",
            destination=PLACES[family][sent.to],
            port=sent.port,
            source_port=port,
            mark=sent.mark,
        )
        packet = Packet(
            protocol="udp",
            destination=ipaddress.ip_address(shot.destination),
            dport=shot.port,
            source=ipaddress.ip_address(CLIENT[family]) if sent.uid is None else None,
            sport=port,
            uid=sent.uid,
            gid=None if sent.uid is None else GIDS[sent.uid],
            mark=sent.mark,
        )
        trace = walk(layers, packet, HOST, inbound=sent.uid is None, native=native)
        return Result(sent, Case(shot=shot, trace=trace))

    def shoot(self, results: Sequence[Result]) -> None:
        """Send the packets; when this returns all are sent, so that rules may change."""
        for uid in {result.sent.uid for result in results}:
            lines = "".join(r.case.shot.line() for r in results if r.sent.uid == uid)
            space = self.lab.client if uid is None else self.lab.pod
            identity = (str(uid or 0), str(GIDS[uid or 0]))
            command = ["nsenter", f"--net={path_of(space)}", "--", sys.executable, "-I", str(WIRE)]
            subprocess.run([*command, "send", *identity], input=lines, text=True, check=True)

    def seen(self, results: Sequence[Result]) -> None:
        expected = {result.case.shot.nonce for result in results if result.sent.by}
        self.lab.gather(expected, timeout_s=10.0, grace_s=0.3)


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    with lab() as found:
        yield Runner(found)


@pytest.fixture(scope="module")
def results(runner: Runner) -> Results:
    """Everything that was sent through the rules of all facts, by backend, family and fact."""
    found: Results = {}
    for backend in BACKENDS:
        for family in Family:
            first = runner.ports()
            facts = [(i, fact) for i, fact in enumerate(FACTS) if family in fact.families]
            lines = [
                line
                for index, fact in facts
                for line in fact.lines(index, family, first + index * PORTS_OF_A_FACT)
            ]
            layer = load(runner.lab.pod, backend, family, text_of(lines))
            here: list[Result] = []
            for index, fact in facts:
                port = first + index * PORTS_OF_A_FACT
                made = [
                    runner.send([layer], family, sent, port + at)
                    for at, sent in enumerate(fact.sent)
                ]
                found[backend, family, index] = made
                here += made
            runner.shoot(here)
            load(runner.lab.pod, backend, family, text_of([]))
            runner.seen(here)
    return found


def assert_agreed(runner: Runner, result: Result) -> None:
    place = result.sent.by.partition(":")
    wanted = (place[0], int(place[2])) if result.sent.by else None
    seen = runner.lab.received.get(result.case.shot.nonce)
    assert seen == wanted, "the fact: " + result.case.story(seen)
    assert result.case.expected() == [wanted], "the walk: " + result.case.story(seen)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "index", range(len(FACTS)), ids=[f"{fact.number}: {fact.name}" for fact in FACTS]
)
def test_fact(index: int, backend: str, results: Results, runner: Runner) -> None:
    fact: Fact = FACTS[index]
    for family in fact.families:
        for result in results[backend, family, index]:
            assert_agreed(runner, result)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("rule", "sent"),
    [
        ("-p udp -m udp --dport 53 -j RETURN", Sent(port=53)),
        ("-p udp -m udp --dport 53 -j ACCEPT", Sent(by="peer:53", port=53)),
        ("-p udp -m udp --dport 53 -g FACT", Sent(port=53)),
    ],
)
def test_fact_7_a_policy_of_drop_counts(
    backend: str, rule: str, sent: Sent, runner: Runner
) -> None:
    lines = [("filter", "OUTPUT", rule), ("filter", "FACT", "-p udp -m udp --dport 80 -j ACCEPT")]
    text = text_of(lines, policy=("filter", "OUTPUT"))
    layer = load(runner.lab.pod, backend, Family.IPV4, text)
    try:
        result = runner.send([layer], Family.IPV4, sent, runner.ports())
        runner.shoot([result])
    finally:
        load(runner.lab.pod, backend, Family.IPV4, text_of([]))
    runner.seen([result])
    assert_agreed(runner, result)


@pytest.mark.parametrize("last", BACKENDS)
def test_fact_11_the_flavour_that_was_programmed_last_handles_the_packet(
    last: str, runner: Runner
) -> None:
    first = next(backend for backend in BACKENDS if backend != last)
    for family in Family:
        with lab() as fresh:  # the order is that in which the tables came into being
            own = Runner(fresh)
            own.runs = runner.runs
            layers = [
                load(
                    fresh.pod,
                    backend,
                    family,
                    text_of([("nat", "OUTPUT", f"-p udp -j REDIRECT --to-ports {port}")]),
                )
                for backend, port in ((first, 15001), (last, 15006))
            ]
            result = own.send(layers[::-1], family, Sent(by="pod:15006"), own.ports())
            own.shoot([result])
            own.seen([result])
            assert_agreed(own, result)


@pytest.mark.parametrize("backend", BACKENDS)
def test_to_note_a_source_down_is_a_match_whether_it_was_noted_before_or_not(
    backend: str, runner: Runner
) -> None:
    name = f"{backend}-{runner.runs}"
    noted = f"-p udp -m udp --dport 53 -m recent --set --name {name} --mask 255.255.255.255"
    lines = [
        ("nat", "OUTPUT", f"{noted} --rsource -j REDIRECT --to-ports 15053"),
        ("filter", "OUTPUT", f"-p udp -m udp --dport 80 -m recent ! --set --name {name} -j DROP"),
    ]
    layer = load(runner.lab.pod, backend, Family.IPV4, text_of(lines))
    first = runner.ports()
    try:
        sent = (Sent(by="pod:15053", port=53), Sent(by="pod:15053", port=53), AWAY)
        results = [
            runner.send([layer], Family.IPV4, one, first + at) for at, one in enumerate(sent)
        ]
        runner.shoot(results)
    finally:
        load(runner.lab.pod, backend, Family.IPV4, text_of([]))
    runner.seen(results)
    for result in results:
        assert_agreed(runner, result)


SEND_AS_ANOTHER = """
import os, socket, sys
out = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
out.bind(("", int(sys.argv[2])))
os.setresuid(2000, 2000, 2000)
out.sendto(sys.argv[1].encode(), ("8.8.8.8", 80))
"""


@pytest.mark.parametrize("backend", BACKENDS)
def test_fact_9_the_owner_is_who_made_the_socket(backend: str, runner: Runner) -> None:
    rule = "-p udp -m owner --uid-owner 0 -j DNAT --to-destination 8.8.8.8:443"
    layer = load(runner.lab.pod, backend, Family.IPV4, text_of([("nat", "OUTPUT", rule)]))
    result = runner.send([layer], Family.IPV4, Sent(by="peer:443", uid=0), runner.ports())
    shot = result.case.shot
    command = ["nsenter", f"--net={path_of(runner.lab.pod)}", "--", sys.executable, "-Ic"]
    try:
        subprocess.run([*command, SEND_AS_ANOTHER, shot.nonce, str(shot.source_port)], check=True)
    finally:
        load(runner.lab.pod, backend, Family.IPV4, text_of([]))
    runner.seen([result])
    assert_agreed(runner, result)


@pytest.mark.parametrize("backend", BACKENDS)
def test_fact_15_a_match_on_a_cgroup_is_loaded_and_cannot_be_foreseen(
    backend: str, runner: Runner
) -> None:
    rule = "-p udp -m cgroup --path / -j DROP"
    layer = load(runner.lab.pod, backend, Family.IPV4, text_of([("filter", "OUTPUT", rule)]))
    try:
        result = runner.send([layer], Family.IPV4, Sent(), runner.ports())
        runner.shoot([result])
    finally:
        load(runner.lab.pod, backend, Family.IPV4, text_of([]))
    runner.seen([result])
    assert result.case.trace.verdict.kind is Kind.MAYBE
    assert runner.lab.received.get(result.case.shot.nonce) in result.case.expected()
