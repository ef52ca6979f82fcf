"""The probe on a real kernel: it passes what is captured, notices what is not, leaves nothing."""

import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agent.capture.probing.plan import LINK_NAME
from agent.capture.probing.probe import Outcome, ProbeResult, passed, probe
from agent.kernel.netns import Netns
from agent.kernel.sockets import (
    Conntrack,
    Owner,
    SocketTable,
    acting_as,
    endpoint,
    make_transparent,
    open_socket,
    original_destination,
)
from agent.model.ruleset import Family
from tests.support.capturing import BACKENDS, capture, settings, state
from tests.support.netns import inside, path_of, run

ROOT = Path(__file__).parents[2]
PROXY = Owner(1337, 1337)
POD_UP = (
    "ip link add eth0 type veth peer name x0",
    "ip link set x0 addrgenmode none up",
    "ip link set eth0 addrgenmode none up",
    "ip addr add 10.77.0.2/24 dev eth0",
    "ip addr add fd00:77::2/64 dev eth0 nodad",
    "ip route add default via 10.77.0.1",
    "ip route add default via fd00:77::1",
)

REDIRECT: dict[str, Any] = {
    "inbound_ports_include": "*",
    "inbound_ports_exclude": "15020,15021,15090",
    "outbound_ip_ranges_include": "*",
    "outbound_ip_ranges_exclude": "10.9.0.0/16,fd99::/16",
    "outbound_ports_exclude": "15020",
    "redirect_dns": True,
    "capture_all_dns": True,
    "enable_ipv6": True,
}
# Real servers, listed ranges and ports, one group: every road is for the probe alone.
LISTED: dict[str, Any] = {
    "inbound_ports_include": "8080,9090",
    "outbound_ip_ranges_include": "10.96.0.0/28,10.77.0.3/32,fd96::/125",
    "outbound_ports_include": "9000",
    "owner_groups_include": "1000,2000-3000",
    "redirect_dns": True,
    "dns_servers_v4": "10.96.0.10,127.0.0.53",
    "dns_servers_v6": "fd96::2",
    "enable_ipv6": True,
}
TPROXY: dict[str, Any] = {**REDIRECT, "inbound_interception_mode": "TPROXY"}
ONLY_V4: dict[str, Any] = {**REDIRECT, "enable_ipv6": False, "outbound_ip_ranges_exclude": ""}
MODES = {"redirect": REDIRECT, "tproxy": TPROXY, "listed": LISTED}


@pytest.fixture
def pod(netns: str) -> str:
    """A namespace as a pod has it: an interface, an address of each family, default routes."""
    for line in POD_UP:
        inside(netns, *line.split())
    deadline = time.monotonic() + 5
    while json.loads(inside(netns, "ip", "-j", "link", "show", "eth0"))[0]["operstate"] != "UP":
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return netns


def probed(name: str, raw: dict[str, Any]) -> tuple[ProbeResult, ...]:
    with Netns.open(path_of(name)) as opened:
        return probe(opened, settings(raw))


def by_outcome(results: tuple[ProbeResult, ...], outcome: Outcome) -> dict[str, str]:
    return {result.name: result.detail for result in results if result.outcome is outcome}


def failures(results: tuple[ProbeResult, ...]) -> dict[str, str]:
    return by_outcome(results, Outcome.FAILED)


def sockets(name: str) -> list[tuple[str, ...]]:
    """Return protocol, state and both ends of every socket; what waits in its queues is its own."""
    rows = (line.split() for line in inside(name, "ss", "-HantuO").splitlines())
    return sorted((row[0], row[1], *row[4:6]) for row in rows)


@contextlib.contextmanager
def nothing_left(name: str) -> Iterator[None]:
    """Check that the block changes nothing in the namespace."""
    before, held = state(name), sockets(name)
    yield
    assert state(name) == before
    deadline = time.monotonic() + 5  # the kernel itself keeps a half-open connection for a second
    while sockets(name) != held and time.monotonic() < deadline:
        time.sleep(0.05)
    assert sockets(name) == held


# --- a capture that is as it should be ------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_healthy_capture_passes_every_probe(pod: str, backend: str, mode: str) -> None:
    raw = MODES[mode]
    capture(pod, raw, backend)
    probed(pod, raw)  # what is loaded once is not counted
    with nothing_left(pod):
        results = probed(pod, raw)
    assert results
    assert not [r for r in results if r.outcome is not Outcome.OK]
    names = {r.name for r in results}
    for family in Family:
        assert names >= {f"inbound {family}", f"exempt {family} proxy uid", f"exempt {family} dns"}
        assert (f"tproxy return {family}" in names) == (mode == "tproxy")


def test_strict_reverse_path_filters_do_not_disturb_it(pod: str) -> None:
    for which in ("all", "default"):
        inside(pod, "sysctl", "-qw", f"net.ipv4.conf.{which}.rp_filter=1")
    capture(pod, LISTED, "nftables")
    assert not failures(probed(pod, LISTED))


def test_a_datagram_that_is_lost_is_no_failure(pod: str) -> None:
    capture(pod, REDIRECT, "iptables-nft")
    for line in (
        "add table inet it-lossy",
        "add set inet it-lossy seen { type inet_service . inet_service; flags dynamic; }",
        "add chain inet it-lossy in { type filter hook input priority 0; }",
        "add rule inet it-lossy in udp sport . udp dport != @seen"
        " add @seen { udp sport . udp dport } drop",
    ):
        inside(pod, "nft", line)
    results = probed(pod, REDIRECT)
    assert {r.outcome for r in results if "dns" in r.name} == {Outcome.OK}, failures(results)


def test_a_capture_of_ipv4_alone_brings_no_ipv6_into_the_pod(pod: str) -> None:
    capture(pod, ONLY_V4, "nftables")
    with Netns.open(path_of(pod)) as opened:
        results = probe(opened, settings(ONLY_V4))
    assert {r.outcome for r in results} == {Outcome.OK}
    assert not any("ipv6" in r.name for r in results)


def test_ipv6_that_new_interfaces_come_without_is_switched_on_for_the_link_alone(pod: str) -> None:
    inside(pod, "sysctl", "-qw", "net.ipv6.conf.default.disable_ipv6=1")
    capture(pod, REDIRECT, "nftables")
    assert {r.outcome for r in probed(pod, REDIRECT)} == {Outcome.OK}
    assert inside(pod, "sysctl", "-n", "net.ipv6.conf.default.disable_ipv6").strip() == "1"


def test_a_pod_without_addresses_of_its_own_is_probed_too(netns: str) -> None:
    capture(netns, TPROXY, "iptables-nft")
    assert {r.outcome for r in probed(netns, TPROXY)} == {Outcome.OK}


def test_two_probes_of_a_namespace_wait_for_each_other(pod: str) -> None:
    capture(pod, REDIRECT, "nftables")
    found: list[tuple[ProbeResult, ...]] = []
    threads = [
        threading.Thread(target=lambda: found.append(probed(pod, REDIRECT))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3
    assert all(passed(results) for results in found)


# --- a proxy that listens -------------------------------------------------------------------------


class FakeProxy:
    """Listens as Envoy does, as the proxy's user, and calls the original destination at once."""

    def __init__(self, families: tuple[Family, ...], *, transparent: bool) -> None:
        self.passed_on: list[str] = []
        self._listeners: list[socket.socket] = []
        for family in families:
            for port in (15001, 15006, 15053):
                transparent_here = transparent and port == 15006
                self._listen(family, "tcp", port, transparent=transparent_here)
            self._listen(family, "udp", 15053, transparent=False)

    def _listen(self, family: Family, protocol: str, port: int, *, transparent: bool) -> None:
        with acting_as(PROXY):
            made = open_socket(family, protocol)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if transparent:
            make_transparent(made)
        made.bind(("0.0.0.0" if family is Family.IPV4 else "::", port))
        if protocol == "tcp":
            made.listen(64)
        self._listeners.append(made)

    def serve(self, stop: threading.Event) -> None:
        """Accept and close again, after a call of one's own to the original destination."""
        held = []
        while not stop.is_set():
            for listener in self._listeners:
                with contextlib.suppress(OSError):
                    accepted, _ = listener.accept()
                    port = listener.getsockname()[1]
                    if port == 15001:
                        held.append(self._pass_on(original_destination(accepted)))
                    accepted.close()
            time.sleep(0.0005)
        for made in held:
            made.close()

    def _pass_on(self, target: Any) -> socket.socket:
        family = Family.IPV4 if target[0].version == 4 else Family.IPV6
        with acting_as(PROXY):
            made = open_socket(family, "tcp")
        made.settimeout(1)
        try:
            made.connect((str(target[0]), target[1]))
            self.passed_on.append("arrived")
        except OSError as error:
            self.passed_on.append(str(error))
        return made

    def close(self) -> None:
        for listener in self._listeners:
            listener.close()


@contextlib.contextmanager
def fake_proxy(
    name: str, families: tuple[Family, ...] = tuple(Family), *, transparent: bool = False
) -> Iterator[FakeProxy]:
    stop = threading.Event()
    with Netns.open(path_of(name)) as opened:
        proxy = opened.run(lambda: FakeProxy(families, transparent=transparent))
        work = functools.partial(opened.run, lambda: proxy.serve(stop), timeout_s=60)
        thread = threading.Thread(target=work)
        thread.start()
        try:
            yield proxy
        finally:
            stop.set()
            thread.join()
            proxy.close()


@contextlib.contextmanager
def listening(name: str, port: int) -> Iterator[None]:
    """Let an application listen, that never accepts anything."""
    with Netns.open(path_of(name)) as opened, contextlib.ExitStack() as stack:
        made = stack.enter_context(opened.run(lambda: open_socket(Family.IPV4, "tcp")))
        made.bind(("0.0.0.0", port))
        made.listen()
        yield


@pytest.mark.parametrize("mode", ["redirect", "tproxy"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_live_proxy_is_proved_and_what_it_passes_on_stays_here(
    pod: str, backend: str, mode: str
) -> None:
    raw = MODES[mode]
    capture(pod, raw, backend)
    inside(pod, "nft", "add table inet it-watch")
    hook = "{ type filter hook postrouting priority 300; }"
    inside(pod, "nft", f"add chain inet it-watch out {hook}")
    inside(pod, "nft", 'add rule inet it-watch out oifname "eth0" meta l4proto {tcp,udp} counter')
    with fake_proxy(pod, transparent=mode == "tproxy") as proxy, nothing_left(pod):
        results = probed(pod, raw)
    assert results
    assert not [r for r in results if r.outcome is not Outcome.OK]
    assert proxy.passed_on == ["arrived", "arrived"]
    assert "counter packets 0 " in inside(pod, "nft", "list table inet it-watch")
    details = {r.name: r.detail for r in results}
    assert "proxy" in details["outbound ipv4"]
    assert "proxy" in details["inbound ipv6"]
    assert "conntrack" in details["dns ipv4 udp"]


def test_a_proxy_of_one_family_leaves_the_other_to_the_probe(pod: str) -> None:
    capture(pod, REDIRECT, "iptables-nft")
    with fake_proxy(pod, (Family.IPV4,)):
        results = probed(pod, REDIRECT)
    assert {r.outcome for r in results} == {Outcome.OK}
    details = {r.name: r.detail for r in results}
    assert "accepted by the proxy" in details["outbound ipv4"]
    assert "landed on port 15001" in details["outbound ipv6"]


def test_a_live_proxy_does_not_hide_that_nothing_is_captured(pod: str) -> None:
    with fake_proxy(pod):
        results = probed(pod, REDIRECT)
    assert {"outbound ipv4", "inbound ipv6", "dns ipv4 udp", "dns ipv6 tcp"} <= set(
        failures(results)
    )


def test_a_proxy_without_ip_transparent_is_named_under_tproxy(pod: str) -> None:
    capture(pod, TPROXY, "nftables")
    with fake_proxy(pod, transparent=False):
        found = failures(probed(pod, TPROXY))
    assert set(found) == {"inbound ipv4", "inbound ipv6"}
    assert "IP_TRANSPARENT" in found["inbound ipv4"]


def test_a_proxy_that_starts_during_a_probe_is_not_turned_away(pod: str) -> None:
    capture(pod, REDIRECT, "iptables-nft")
    inside(pod, "iptables-nft", "-I", "INPUT", "-p", "tcp", "-j", "DROP")  # it takes its time
    with in_another_process(pod, REDIRECT) as process:
        wait_for_link(pod)
        wait_until(lambda: ":15053" in inside(pod, "ss", "-Hlntu"))  # the last receiver is there
        with fake_proxy(pod):
            assert process.poll() is None


def test_an_applications_own_socket_is_told_from_the_proxys(pod: str) -> None:
    raw = {**TPROXY, "inbound_ports_include": "8080", "inbound_ports_exclude": ""}
    with listening(pod, 8080):
        assert "application's own socket" in failures(probed(pod, raw))["inbound ipv4"]
        capture(pod, raw, "nftables")
        assert not failures(probed(pod, raw))


# --- captures that are broken ---------------------------------------------------------------------

V4 = {"outbound ipv4", "inbound ipv4", "dns ipv4 udp", "dns ipv4 tcp"}
V6 = {name.replace("ipv4", "ipv6") for name in V4}
OUT_V4 = V4 - {"inbound ipv4"}

BROKEN: dict[str, tuple[str, dict[str, Any], tuple[str, ...], set[str]]] = {
    "legacy nat flushed": ("iptables-legacy", REDIRECT, ("iptables-legacy -t nat -F",), V4),
    "nft nat flushed": ("iptables-nft", REDIRECT, ("iptables-nft -t nat -F",), V4),
    "table deleted": ("nftables", REDIRECT, ("nft flush ruleset",), V4 | V6),
    "v6 half missing": (
        "iptables-nft",
        REDIRECT,
        ("ip6tables-nft -t nat -F", "ip6tables-nft -t nat -X"),
        V6,
    ),
    "foreign accept ahead": (
        "iptables-legacy",
        REDIRECT,
        ("iptables-legacy -t nat -I OUTPUT -m owner --uid-owner 1000 -j ACCEPT",),
        OUT_V4,
    ),
    "foreign accept ahead of inbound": (
        "iptables-nft",
        REDIRECT,
        ("iptables-nft -t nat -I PREROUTING -p tcp -j ACCEPT",),
        {"inbound ipv4"},
    ),
    "exemption of the proxy's group missing": (
        "iptables-nft",
        REDIRECT,
        ("iptables-nft -t nat -D ISTIO_OUTPUT -m owner --gid-owner 1337 -j RETURN",),
        {"exempt ipv4 proxy gid"},
    ),
    "exclusion of a port missing": (
        "iptables-nft",
        REDIRECT,
        ("iptables-nft -t nat -D ISTIO_OUTPUT -p tcp --dport 15020 -j RETURN",),
        {"exempt ipv4 port"},
    ),
    "tproxy route missing": (
        "iptables-legacy",
        TPROXY,
        ("ip -4 route flush table 133",),
        {"tproxy return ipv4"},
    ),
    "tproxy rule missing": (
        "nftables",
        TPROXY,
        ("ip -6 rule del fwmark 1337",),
        {"tproxy return ipv6"},
    ),
    "mangle flushed": (
        "iptables-nft",
        TPROXY,
        ("iptables-nft -t mangle -F",),
        {"inbound ipv4", "tproxy return ipv4"},
    ),
    "empty legacy table and no rules": ("", REDIRECT, ("iptables-legacy -t nat -L -n",), V4 | V6),
    "a base chain that runs before": (
        "nftables",
        ONLY_V4,
        (
            "nft add table ip it-first",
            "nft add chain ip it-first o { type nat hook output priority -150; }",
            "nft add rule ip it-first o meta skuid 1000 meta l4proto tcp redirect to :16001",
        ),
        {"outbound ipv4", "dns ipv4 tcp", "exempt ipv4 proxy gid", "exempt ipv4 port"},
    ),
    "a base chain that accepts before": (
        "nftables",
        ONLY_V4,
        (
            "nft add table ip it-first",
            "nft add chain ip it-first p { type filter hook prerouting priority -310; }",
            "nft add rule ip it-first p tcp dport != 15000-16000 notrack",
        ),
        {"inbound ipv4"},
    ),
    "everything dropped": (
        "iptables-legacy",
        ONLY_V4,
        ("iptables-legacy -I OUTPUT -p tcp -j DROP",),
        {
            *("outbound ipv4", "inbound ipv4", "dns ipv4 tcp", "exempt ipv4 port"),
            *("exempt ipv4 proxy uid", "exempt ipv4 proxy gid"),
        },
    ),
    "rejected": (
        "iptables-nft",
        ONLY_V4,
        ("iptables-nft -I INPUT -p tcp --dport 15001 -j REJECT --reject-with tcp-reset",),
        {"outbound ipv4"},
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_broken_is_noticed_and_nothing_else(pod: str, case: str) -> None:
    backend, raw, commands, expected = BROKEN[case]
    if backend:
        capture(pod, raw, backend)
    for line in commands:
        inside(pod, *line.split())
    with nothing_left(pod):
        results = probed(pod, raw)
    assert set(failures(results)) == expected, failures(results)
    assert not passed(results)


def test_a_foreign_redirect_is_named_by_its_port(pod: str) -> None:
    capture(pod, ONLY_V4, "nftables")
    inside(pod, "nft", "add table ip it-first")
    inside(pod, "nft", "add chain ip it-first o { type nat hook output priority -150; }")
    inside(
        pod, "nft", "add rule ip it-first o meta skuid 1000 tcp dport > 16000 redirect to :16001"
    )
    with listening(pod, 16001):
        found = failures(probed(pod, ONLY_V4))
    assert "16001" in found["outbound ipv4"]
    assert "instead of 15001" in found["outbound ipv4"]


def test_a_loopback_interface_that_is_down_is_named(pod: str) -> None:
    capture(pod, REDIRECT, "iptables-nft")
    inside(pod, "ip", "link", "set", "lo", "down")
    found = failures(probed(pod, REDIRECT))
    assert set(found) == {*OUT_V4, *(V6 - {"inbound ipv6"})}
    assert all("lo is down" in detail for detail in found.values())


def test_nothing_is_sent_where_policy_routing_leads_past_the_link(pod: str) -> None:
    capture(pod, ONLY_V4, "nftables")
    inside(pod, "ip", "route", "add", "default", "via", "10.77.0.1", "table", "200")
    inside(pod, "ip", "rule", "add", "uidrange", "1337-1337", "lookup", "200")
    results = probed(pod, ONLY_V4)
    assert not failures(results)
    skipped = by_outcome(results, Outcome.SKIPPED)
    assert {"exempt ipv4 proxy uid", "exempt ipv4 dns", "inbound ipv4"} <= set(skipped)
    assert "outbound ipv4" in by_outcome(results, Outcome.OK)


def test_answers_that_are_routed_by_their_source_make_it_call_the_links_own_address(
    pod: str,
) -> None:
    capture(pod, ONLY_V4, "nftables")
    inside(pod, "ip", "route", "add", "default", "via", "10.77.0.1", "table", "200")
    inside(pod, "ip", "rule", "add", "from", "10.77.0.2", "lookup", "200")
    results = {r.name: r for r in probed(pod, ONLY_V4)}
    assert results["inbound ipv4"].outcome is Outcome.OK
    assert "10.77.0.2" not in results["inbound ipv4"].detail


# --- killed ---------------------------------------------------------------------------------------

PROBE = """
import json, sys
from agent.capture.probing.probe import probe
from agent.kernel.netns import Netns
from agent.model.settings import parse
with Netns.open(sys.argv[1]) as opened:
    probe(opened, parse(json.loads(sys.argv[2])))
"""


@contextlib.contextmanager
def in_another_process(name: str, raw: dict[str, Any]) -> Iterator[subprocess.Popen[bytes]]:
    command = (sys.executable, "-c", PROBE, str(path_of(name)), json.dumps(raw))
    with subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}) as made:
        yield made


def has_link(name: str) -> bool:
    return LINK_NAME in inside(name, "ip", "-br", "link")


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def wait_for_link(name: str, *, there: bool = True) -> None:
    wait_until(lambda: has_link(name) == there)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_probe_that_is_killed_leaves_nothing(pod: str, number: signal.Signals) -> None:
    capture(pod, TPROXY, "iptables-nft")
    inside(pod, "iptables-nft", "-I", "OUTPUT", "-p", "tcp", "-j", "DROP")  # it takes its time
    before, held = state(pod), sockets(pod)
    with in_another_process(pod, TPROXY) as process:
        wait_for_link(pod)
        time.sleep(0.2)
        process.send_signal(number)
        process.wait(10)
    wait_for_link(pod, there=False)
    assert state(pod) == before
    deadline = time.monotonic() + 5
    while sockets(pod) != held and time.monotonic() < deadline:
        time.sleep(0.05)
    assert sockets(pod) == held


def test_the_outside_has_no_name(pod: str) -> None:
    capture(pod, REDIRECT, "nftables")
    before = run("ip", "netns", "list").split()
    probed(pod, REDIRECT)
    assert {name for name in run("ip", "netns", "list").split() if name not in before} <= {
        name for name in os.listdir("/run/netns") if name.startswith("it-")
    }


# --- the kernel's own lists -----------------------------------------------------------------------


def test_sockets_are_listed_with_owner_family_and_transparency(netns: str) -> None:
    with Netns.open(path_of(netns)) as opened, contextlib.ExitStack() as stack:

        def listen(family: Family, address: str, *, transparent: bool = False) -> socket.socket:
            with acting_as(Owner(4321, 99)):
                made = stack.enter_context(open_socket(family, "tcp"))
            if transparent:
                make_transparent(made)
            made.bind((address, 7000 + len(address)))
            made.listen()
            return made

        v4 = opened.run(lambda: listen(Family.IPV4, "0.0.0.0", transparent=True))
        v6 = opened.run(lambda: listen(Family.IPV6, "::"))
        with opened.run(SocketTable) as table:
            found = {s.local: s for s in table.listeners("tcp")}
            assert table.listeners("udp") == ()
        for made, transparent in ((v4, True), (v6, False)):
            seen = found[endpoint(made.getsockname())]
            assert (seen.uid, seen.transparent, seen.dual) == (4321, transparent, False)
            assert seen.inode


def test_a_connection_is_found_by_its_other_end(netns: str) -> None:
    with Netns.open(path_of(netns)) as opened, contextlib.ExitStack() as stack:
        server = stack.enter_context(opened.run(lambda: open_socket(Family.IPV4, "tcp")))
        client = stack.enter_context(opened.run(lambda: open_socket(Family.IPV4, "tcp")))
        server.bind(("127.0.0.1", 0))
        server.listen()
        client.connect_ex(server.getsockname())
        with opened.run(SocketTable) as table:
            (found,) = table.facing("tcp", endpoint(client.getsockname()))
        assert found.local == endpoint(server.getsockname())
        assert found.inode == 0  # nobody has accepted it


def test_conntrack_tells_who_answers(netns: str) -> None:
    capture(netns, REDIRECT, "iptables-nft")
    with Netns.open(path_of(netns)) as opened, contextlib.ExitStack() as stack:
        conntrack = stack.enter_context(opened.run(Conntrack))

        def ask() -> socket.socket:
            with acting_as(Owner(1000, 1000)):
                made = stack.enter_context(open_socket(Family.IPV4, "udp"))
            made.connect(("127.0.0.53", 53))
            made.send(b"?")
            return made

        client = opened.run(ask)
        here, there = endpoint(client.getsockname()), endpoint(client.getpeername())
        answers = conntrack.answers("udp", here, there, (0, 2))
        assert answers is not None
        assert (str(answers[0]), answers[1]) == ("127.0.0.1", 15053)
        assert conntrack.answers("udp", here, (there[0], 54), (0, 2)) is None


def test_acting_as_somebody_ends_with_the_block(netns: str) -> None:
    def identity() -> list[str]:
        status = Path("/proc/thread-self/status").read_text().splitlines()
        return [line for line in status if line.startswith(("Uid", "Gid", "CapEff"))]

    before = identity()
    with acting_as(Owner(1000, 2000)):
        assert [line.split()[4] for line in identity()[:2]] == ["1000", "2000"]
    assert identity() == before  # its capabilities, too
