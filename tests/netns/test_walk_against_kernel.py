"""The packet walk against the kernel: random rules, real packets, and who received them.

Every difference is a wrong answer of `trace`. The seed and the number of packets come from the
environment (INTERCEPT_WALK_SEED, INTERCEPT_WALK_PACKETS), so that long runs need no other code.
"""

import ipaddress
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import pytest

from agent.explain.render import to_text
from agent.explain.walk import Layer, walk
from agent.formats.iptables_save import parse
from agent.model.packet import Hit, Kind, Outcome, Packet, Trace
from agent.model.ruleset import Family
from tests.support.netns import inside
from tests.support.wire_lab import CLIENT, HOST, PORTS, USERS, Lab, Shot, lab
from tests.support.wire_rules import ADDRESSES, DEPTH, MARKS, OWN_SOURCES, Rules

# Read when the module is imported: the tests themselves run without the caller's settings.
PACKETS = int(os.environ.get("INTERCEPT_WALK_PACKETS", "2000"))
SEED = int(os.environ.get("INTERCEPT_WALK_SEED", "1"))
PER_RULESET = 25
# Packets of one laboratory: behind them source ports would be used again.
PER_LAB = 800
FIRST_PORT = 20100

NFT, LEGACY = "iptables-nft", "iptables-legacy"
TOOL = {Family.IPV4: "iptables", Family.IPV6: "ip6tables"}

# Targets that some packet must have met, or that much was not compared.
USED = frozenset({"ACCEPT", "CONNMARK", "DNAT", "DROP", "MARK", "REDIRECT", "RETURN", "TPROXY"})

Place = tuple[str, int] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One packet that was sent, and what the walk says of it."""

    shot: Shot
    trace: Trace

    def expected(self) -> list[Place]:
        return [_place(outcome) for outcome in self.trace.outcomes]

    def observable(self) -> bool:
        """Whether a TCP answer can come back, without which nobody sees who received the packet."""
        packet = self.trace.packet
        lost = packet.protocol == "tcp" and str(packet.source) == "::1"
        return not (lost and any(not outcome.local for outcome in self.trace.outcomes))

    def story(self, seen: Place) -> str:
        return f"received by {seen}, expected {self.expected()}: {self.shot}\n{to_text(self.trace)}"


def _place(outcome: Outcome) -> Place:
    if outcome.verdict.kind is Kind.DROP:
        return None
    port = outcome.verdict.port or outcome.packet.dport
    return ("pod" if outcome.local else "peer", port)


class Shooter:
    """Makes random packets and sends them through whatever rules are loaded."""

    def __init__(self, lab: Lab, random: Random) -> None:
        self._lab = lab
        self._random = random
        self._count = 0
        self.cases: list[Case] = []

    def batch(self, layers: Sequence[Layer], family: Family, count: int) -> None:
        """Send `count` packets at once and wait until those that should arrive have done so."""
        awaited = set()
        for _ in range(count):
            case = self._one(layers, family)
            self.cases.append(case)
            if all(case.expected()) and case.trace.verdict.kind is not Kind.MAYBE:
                awaited.add(case.shot.nonce)
        self._lab.gather(awaited, timeout_s=2.0, grace_s=0.15)

    def _one(self, layers: Sequence[Layer], family: Family) -> Case:
        pick = self._random.choice
        self._count += 1
        user = None if self._random.random() < 0.2 else pick(USERS)
        own = OWN_SOURCES[family]
        # A client reaches no loopback address; what it sends beyond the pod is forwarded.
        targets = ADDRESSES[family] if user else (*own, *ADDRESSES[family][2:])
        # A source port of its own for each packet: no two share a conntrack entry, and none is one
        # that somebody listens on (20080).
        source_port = FIRST_PORT + self._count if self._random.random() < 0.2 else 0
        shot = Shot(
            nonce=f"n{self._count}",
            protocol=pick(("tcp", "tcp", "udp")),
            destination=pick(targets),
            port=pick(PORTS),
            source=own[1] if user and self._random.random() < 0.15 else "",
            source_port=source_port,
            mark=int(pick(MARKS), 16) if user and user[0] == 0 and pick((0, 1)) else 0,
        )
        trace = walk(layers, _packet(shot, user, family), HOST, inbound=user is None)
        self._lab.shoot(user, shot)
        return Case(shot=shot, trace=trace)

    def check(self) -> None:
        """Compare every packet with what was received, late ones too."""
        wrong = []
        for case in self.cases:
            seen = self._lab.received.get(case.shot.nonce)
            if case.observable() and seen not in case.expected():
                wrong.append(case.story(seen))
        total = len(self.cases)
        assert not wrong, f"{len(wrong)} of {total} packets went elsewhere:\n" + "\n".join(
            wrong[:3]
        )


def _packet(shot: Shot, user: tuple[int, int] | None, family: Family) -> Packet:
    source = shot.source if user else CLIENT[family]
    return Packet(
        protocol=shot.protocol,
        destination=ipaddress.ip_address(shot.destination),
        dport=shot.port,
        source=ipaddress.ip_address(source) if source else None,
        sport=shot.source_port or None,
        uid=user[0] if user else None,
        gid=user[1] if user else None,
        mark=shot.mark,
    )


def load(pod: str, backend: str, family: Family, text: str) -> Layer:
    """Load rules and return them as the tool prints them."""
    tool = backend.replace("iptables", TOOL[family])
    inside(pod, f"{tool}-restore", stdin=text)
    return Layer(backend, parse(inside(pod, f"{tool}-save"), family))


def shoot(flavours: Sequence[str], seed: int, packets: int) -> list[Case]:
    """Send packets through a series of random rule sets in each of the flavours at once."""
    random = Random(seed)
    cases: list[Case] = []
    while len(cases) < packets:
        cases += _in_one_lab(flavours, random, min(PER_LAB, packets - len(cases)))
    return cases


def _in_one_lab(flavours: Sequence[str], random: Random, packets: int) -> list[Case]:
    with lab() as found:
        shooter = Shooter(found, random)
        while len(shooter.cases) < packets:
            family = random.choice(tuple(Family))
            # The last one loaded is asked first. (nft makes its chains anew with every load.)
            layers = [
                load(found.pod, flavour, family, Rules(random, family).text())
                for flavour in reversed(flavours)
            ]
            shooter.batch(layers[::-1], family, PER_RULESET)
        found.gather(set(), timeout_s=1.0, grace_s=0.5)
        shooter.check()
        return shooter.cases


@pytest.mark.netns
@pytest.mark.parametrize("flavours", [(LEGACY,), (NFT,), (NFT, LEGACY)], ids="+".join)
def test_walk_says_who_receives_each_packet(flavours: tuple[str, ...]) -> None:
    cases = shoot(flavours, SEED, PACKETS // 3)
    kinds = Counter(case.trace.verdict.kind for case in cases)
    # Else the rules are so tame or so harsh that the comparison shows nothing.
    assert min(kinds[kind] for kind in (Kind.REDIRECT, Kind.DROP, Kind.PASS)) >= PACKETS // 60
    assert kinds[Kind.MAYBE] <= PACKETS // 15
    assert {case.trace.packet.family for case in cases} == set(Family)
    assert {case.trace.inbound for case in cases} == {True, False}
    hits = [step for case in cases for step in case.trace.steps if step.hit is Hit.YES]
    assert {step.text.split(" -j ")[-1].split()[0] for step in hits if " -j " in step.text} >= USED
    assert any(step.chain.endswith(f"D{DEPTH}") for step in hits)


@pytest.mark.netns
def test_the_flavour_programmed_last_is_asked_first() -> None:
    random = Random(SEED)
    for family in Family:
        with lab() as found:
            shooter = Shooter(found, random)
            nft, legacy = (
                load(found.pod, flavour, family, Rules(random, family).text())
                for flavour in (NFT, LEGACY)
            )
            shooter.batch([legacy, nft], family, PER_RULESET)
            found.gather(set(), timeout_s=1.0, grace_s=0.3)
            shooter.check()
