"""The standing guard: whatever somebody does to the capture's tables, nobody gets past the proxy.

That it does not drop what a whole capture lets through is shown in `test_behaviour`, where one of
the backends always has it.
"""

import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from agent.backends import registry
from agent.backends.protocol import Step
from tests.support.agent import Agent, running, wait_for
from tests.support.capturing import (
    BACKENDS,
    SETTINGS,
    STATE_DIR,
    assert_in_sync,
    capture,
    command,
    release,
    report,
    state,
)
from tests.support.escape import DIRECT, POD, PROXY_PORTS, SERVICE_PORT, Lab, lab
from tests.support.netns import inside

pytestmark = pytest.mark.netns

PROXIES = frozenset(f"proxy-{port}" for port in PROXY_PORTS)
MODES = ("redirect", "tproxy", "redirect-dns", "tproxy-dns", "ambient")
STANDING = {name: {**SETTINGS[name], "guard": "standing"} for name in MODES}


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STATE_DIR, str(tmp_path))


@pytest.fixture(scope="module")
def pod_and_peer() -> Iterator[Lab]:
    with lab("guard") as made:
        yield made


@pytest.fixture
def pod(pod_and_peer: Lab) -> Iterator[Lab]:
    """A pod that is uncaptured before and after."""
    try:
        yield pod_and_peer
    finally:
        pod_and_peer.stop()
        pod_and_peer.release()
        release(pod_and_peer.pod)


# --- what people and other tools do to rules ------------------------------------------------------


def tools(backend: str) -> tuple[str, str]:
    flavour = backend.removeprefix("iptables-")
    return f"iptables-{flavour}", f"ip6tables-{flavour}"


def flush_nat(name: str, backend: str) -> None:
    for tool in () if backend == "nftables" else tools(backend):
        inside(name, tool, "-t", "nat", "-F")
    if backend == "nftables":
        inside(name, "nft", "delete", "table", "inet", "intercept-agent")


def flush_everything(name: str, backend: str) -> None:
    """Everything of the backend's own; what `nft flush ruleset` does besides is another matter."""
    if backend == "nftables":
        inside(name, "nft", "flush", "table", "inet", "intercept-agent")
        return
    for tool in tools(backend):
        for table in ("raw", "mangle", "nat"):
            inside(name, tool, "-t", table, "-F")
            inside(name, tool, "-t", table, "-X")


def accept_ahead(name: str, backend: str) -> None:
    if backend == "nftables":
        for family in ("v4", "v6"):
            for chain in ("nat-PREROUTING", "nat-OUTPUT", "mangle-PREROUTING"):
                rule = ("insert", "rule", "inet", "intercept-agent", f"{family}-{chain}", "accept")
                inside(name, "nft", *rule, check=False)
        return
    for tool in tools(backend):
        for chain in ("PREROUTING", "OUTPUT"):
            inside(name, tool, "-t", "nat", "-I", chain, "-j", "ACCEPT")
        inside(name, tool, "-t", "mangle", "-I", "PREROUTING", "-j", "ACCEPT")


def translate_ahead(name: str) -> None:
    """Send what the pod dials elsewhere, before our rules are asked."""
    for tool, away in (("iptables-nft", "10.79.0.1"), ("ip6tables-nft", "[fd00:79::1]")):
        dnat = ("-p", "tcp", "-j", "DNAT", "--to-destination", f"{away}:8001")
        inside(name, tool, "-t", "nat", "-I", "OUTPUT", *dnat)
    inside(name, "nft", "add", "table", "inet", "theirs")
    chain = "{ type nat hook output priority -150; }"
    inside(name, "nft", "add", "chain", "inet", "theirs", "out", chain)
    for protocol, away in (("ip", "10.79.0.1"), ("ip6", "[fd00:79::1]")):
        rule = f"tcp dport {SERVICE_PORT} dnat {protocol} to {away}:8001"
        inside(name, "nft", "add", "rule", "inet", "theirs", "out", rule)


DEEDS = (flush_nat, flush_everything, accept_ahead)


def undo(name: str, backend: str) -> None:
    """Take away what `accept_ahead` left in built-in chains: a repair leaves others' rules."""
    for tool in () if backend == "nftables" else tools(backend):
        for table, chains in (("nat", ("PREROUTING", "OUTPUT")), ("mangle", ("PREROUTING",))):
            for chain in chains:
                inside(name, tool, "-t", table, "-D", chain, "-j", "ACCEPT", check=False)


# --- tests ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("deed", DEEDS, ids=lambda deed: deed.__name__)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mode", ["redirect", "tproxy-dns", "ambient"])
def test_nobody_gets_past_the_proxy_while_the_rules_are_altered(
    pod: Lab, backend: str, mode: str, deed: object
) -> None:
    assert callable(deed)
    capture(pod.pod, STANDING[mode], backend)
    assert set(pod.dial()) <= PROXIES
    before = pod.direct()
    pod.flood()
    deed(pod.pod, backend)
    meanwhile = pod.dial()
    assert not report(pod.pod, STANDING[mode], backend).in_sync
    capture(pod.pod, STANDING[mode], backend)
    undo(pod.pod, backend)
    counts = pod.stop()
    assert not DIRECT & {*meanwhile, *counts}
    assert pod.direct() == before
    assert set(pod.dial()) <= PROXIES
    assert_in_sync(pod.pod, STANDING[mode], backend)


DIAL_AS_PROXY = """
import os, socket, sys
os.setgroups([]); os.setgid(1337); os.setuid(1000)
made = socket.socket(socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET)
made.settimeout(0.4)
made.bind((sys.argv[2], 0))
try:
    made.connect((sys.argv[1], 8080))
    print(made.recv(32).decode(), end="")
except TimeoutError:
    print("timeout", end="")
"""


def proxy_dials_itself(name: str) -> tuple[str, ...]:
    """Return who answers a proxy that is known by its group, also from its own addresses."""
    dial = (sys.executable, "-I", "-S", "-c", DIAL_AS_PROXY)
    ways = ((POD[4], POD[4]), (POD[6], POD[6]), (POD[4], "127.0.0.6"), (POD[6], "::6"))
    return tuple(inside(name, *dial, *way) for way in ways)


@pytest.mark.parametrize("backend", BACKENDS)
def test_proxy_does_not_get_past_itself_without_the_mark_that_tproxy_needs(
    pod: Lab, backend: str
) -> None:
    """nat does not know this one: Istio's proxy in TPROXY mode has the group and not the user."""
    capture(pod.pod, STANDING["tproxy"], backend)
    whole = ("proxy-15006", "proxy-15006", "app", "app")
    assert proxy_dials_itself(pod.pod) == whole
    flush_everything(pod.pod, backend)
    assert proxy_dials_itself(pod.pod) == ("timeout", "timeout", "app", "app")
    capture(pod.pod, STANDING["tproxy"], backend)
    assert proxy_dials_itself(pod.pod) == whole


@pytest.mark.parametrize("backend", ["iptables-legacy", "iptables-nft"])
def test_without_a_guard_a_flushed_table_lets_everything_past(pod: Lab, backend: str) -> None:
    """That the clients of these tests would be seen if they got through."""
    capture(pod.pod, SETTINGS["redirect"], backend)
    flush_nat(pod.pod, backend)
    assert set(pod.dial()) == DIRECT


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_family_that_was_not_touched_goes_on(pod: Lab, backend: str) -> None:
    capture(pod.pod, STANDING["redirect"], backend)
    if backend == "nftables":
        for chain in ("nat-OUTPUT", "nat-PREROUTING"):
            inside(pod.pod, "nft", "flush", "chain", "inet", "intercept-agent", f"v6-{chain}")
    else:
        inside(pod.pod, tools(backend)[1], "-t", "nat", "-F")
    out4, out6, in4, in6 = pod.dial()
    assert {out4, in4} <= PROXIES
    assert {out6, in6} == {"timeout"}


@pytest.mark.parametrize("backend", BACKENDS)
def test_live_connections_outlive_a_flush_and_the_repair(pod: Lab, backend: str) -> None:
    """Kernel fact 10: with the last rule that needs it conntrack goes, and they would be reset."""
    capture(pod.pod, STANDING["redirect"], backend)
    assert set(pod.hold()) <= PROXIES
    flush_nat(pod.pod, backend)
    assert set(pod.ping()) == {"alive"}
    capture(pod.pod, STANDING["redirect"], backend)
    assert set(pod.ping()) == {"alive"}


def test_a_translation_of_others_ahead_of_ours_does_not_lead_past_the_proxy(pod: Lab) -> None:
    capture(pod.pod, STANDING["redirect"], "iptables-nft")
    translate_ahead(pod.pod)
    try:
        assert set(pod.dial()[:2]) == {"timeout"}
    finally:
        inside(pod.pod, "nft", "flush", "ruleset")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mode", MODES)
def test_a_guarded_capture_repeats_for_free_and_leaves_nothing(
    netns: str, backend: str, mode: str
) -> None:
    if backend == "iptables-legacy":  # its tables stay for good, and removal is to be compared
        for tool in tools(backend):
            for table in ("raw", "mangle", "nat"):
                inside(netns, tool, "-t", table, "-S")
    before = state(netns)
    capture(netns, STANDING[mode], backend)
    assert registry.GUARD_TABLE in inside(netns, "nft", "list", "tables")
    assert_in_sync(netns, STANDING[mode], backend)
    assert not capture(netns, STANDING[mode], backend).changed
    release(netns)
    assert state(netns) == before


def test_a_guard_that_somebody_deleted_is_a_difference_and_is_put_back(netns: str) -> None:
    capture(netns, STANDING["redirect"], "nftables")
    inside(netns, "nft", "delete", "table", "inet", registry.GUARD_TABLE)
    found = report(netns, STANDING["redirect"], "nftables")
    assert {difference.backend for difference in found.differences} == {"guard"}
    assert capture(netns, STANDING["redirect"], "nftables").changed
    assert_in_sync(netns, STANDING["redirect"], "nftables")


def test_turning_the_guard_off_takes_its_table_away(netns: str) -> None:
    capture(netns, STANDING["redirect"], "iptables-nft")
    capture(netns, SETTINGS["redirect"], "iptables-nft")
    assert registry.GUARD_TABLE not in inside(netns, "nft", "list", "tables")
    assert_in_sync(netns, SETTINGS["redirect"], "iptables-nft")


@pytest.mark.parametrize("backend", ["iptables-legacy", "iptables-nft"])
def test_without_nftables_the_guard_is_in_the_filter_table(
    pod: Lab, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry.GUARD_BACKEND, "missing", lambda: "not here", raising=False)
    capture(pod.pod, STANDING["tproxy-dns"], backend)
    assert_in_sync(pod.pod, STANDING["tproxy-dns"], backend)
    assert registry.GUARD_TABLE not in inside(pod.pod, "nft", "list", "tables")
    assert set(pod.dial()) <= PROXIES
    flush_everything(pod.pod, backend)
    assert not DIRECT & set(pod.dial())
    capture(pod.pod, STANDING["tproxy-dns"], backend)
    assert set(pod.dial()) <= PROXIES
    release(pod.pod)
    assert "GUARD" not in inside(pod.pod, f"{tools(backend)[0]}-save")


def test_without_nftables_the_wall_is_in_the_flavour_that_changes(
    netns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry.GUARD_BACKEND, "missing", lambda: "not here", raising=False)
    seen: list[str] = []

    def look(step: Step) -> None:
        seen.append(inside(netns, "iptables-nft-save", "-t", "filter"))

    capture(netns, SETTINGS["redirect"], "iptables-nft")
    capture(netns, SETTINGS["tproxy-dns"], "iptables-nft", before_step=look)
    assert any("ISTIO_GUARD" in each for each in seen)
    assert "ISTIO_GUARD" not in inside(netns, "iptables-nft-save", "-t", "filter")
    assert inside(netns, "cat", "/proc/net/ip_tables_names") == ""


def test_the_command_line_takes_a_guard_and_leaves_the_capture_as_it_is_without(netns: str) -> None:
    code, _, err = command("apply", "--netns", netns, "--guard", "standing")
    assert (code, err) == (0, "")
    assert "15001" in inside(netns, "nft", "list", "ruleset")
    assert command("check", "--netns", netns)[0] == 0
    same = ("-b", "*", "-d", "15020,15021,15090", "-i", "*", "-o", "15020")
    assert command("check", "--netns", netns, *same) == (0, f"{netns}: in sync (nftables)\n", "")
    assert command("check", "--netns", netns, "--guard", "off")[0] == 1
    assert command("apply", "--netns", netns, "--guard", "stnading")[0] == 2


def test_trace_names_the_guard_that_drops(pod: Lab) -> None:
    capture(pod.pod, STANDING["redirect"], "iptables-nft")
    packet = ("--uid", "1000", "--to", f"10.79.0.1:{SERVICE_PORT}", "-o", "json")
    code, out, _ = command("trace", "--netns", pod.pod, *packet)
    assert (code, json.loads(out)["verdict"]) == (0, "redirect")
    inside(pod.pod, "iptables-nft", "-t", "nat", "-F")
    code, out, _ = command("trace", "--netns", pod.pod, *packet)
    assert (code, json.loads(out)["verdict"]) == (0, "drop")
    assert "guard" in {step["setting"] for step in json.loads(out)["steps"]}


def test_trace_does_not_foresee_what_a_torn_capture_does(pod: Lab) -> None:
    capture(pod.pod, SETTINGS["redirect"], "nftables")
    packet = ("--uid", "1000", "--to", f"10.79.0.1:{SERVICE_PORT}", "-o", "json")
    inside(pod.pod, "nft", "flush", "chain", "inet", "intercept-agent", "v4-nat-ISTIO_OUTPUT")
    code, out, _ = command("trace", "--netns", pod.pod, *packet)
    assert (code, json.loads(out)["verdict"]) == (0, "maybe")


# --- the agent that keeps it ----------------------------------------------------------------------


def flush_ipv6(name: str, backend: str) -> None:
    if backend == "nftables":
        for chain in ("nat-OUTPUT", "nat-PREROUTING"):
            inside(name, "nft", "flush", "chain", "inet", "intercept-agent", f"v6-{chain}")
    else:
        inside(name, tools(backend)[1], "-t", "nat", "-F")


def repaired(agent: Agent, times: int) -> bool:
    return agent.kinds().count("drift-repaired") >= times


@pytest.mark.parametrize("backend", BACKENDS)
def test_agent_repairs_what_was_done_and_nobody_got_past_the_proxy(
    pod: Lab, tmp_path: Path, backend: str
) -> None:
    plain = {key: value for key, value in SETTINGS["redirect-dns"].items() if key != "guard"}
    static = [{"name": "shop", "netns": f"/run/netns/{pod.pod}", "settings": plain}]
    with running(tmp_path, static=static, backend=backend) as agent:
        wait_for(lambda: agent.state("shop") == "in-sync")
        assert set(pod.hold()) <= PROXIES
        before = pod.direct()
        pod.flood()
        for number, deed in enumerate((*DEEDS, flush_ipv6), start=1):
            deed(pod.pod, backend)
            wait_for(partial(repaired, agent, number))
            undo(pod.pod, backend)
            wait_for(lambda: set(pod.dial()) <= PROXIES)
        counts = pod.stop()
        assert not DIRECT & counts.keys()
        assert pod.direct() == before
        assert set(pod.ping()) == {"alive"}
        events = [e for e in agent.ask("events", since=0) if e["kind"] == "drift-repaired"]
        assert {event["pod"] for event in events} == {"static/shop"}
        assert all(event["message"] for event in events)
