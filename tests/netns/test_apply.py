"""Applying a capture, and looking at one: what is written, what is seen, what is left alone."""

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from agent.kernel.netns import Netns
from agent.model.state import EBPF, IPTABLES_LEGACY
from tests.support.capturing import (
    BACKENDS,
    EVERYTHING,
    RICH,
    SETTINGS,
    STATE_DIR,
    assert_in_sync,
    capture,
    command,
    generation,
    heard,
    release,
    report,
    routing_monitor,
    started,
    state,
    words,
)
from tests.support.escape import Lab, lab
from tests.support.foreign import TOOLS, handles
from tests.support.netns import inside, namespace, path_of, run

pytestmark = pytest.mark.netns

XTABLES_LOCK = "/run/xtables.lock"
GONE_S = 5.0


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STATE_DIR, str(tmp_path))


def traffic(name: str) -> None:
    """Make every counter on the way out of a namespace count."""

    def dial() -> None:
        for host in ("127.0.0.1", "::1"):
            with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as door:
                door.connect_ex((host, 9))

    with Netns.open(path_of(name)) as opened:
        opened.run(dial)


def counted(name: str, backend: str) -> str:
    if backend == "nftables":
        return inside(name, "nft", "list", "table", "inet", "intercept-agent")
    flavour = backend.removeprefix("iptables-")
    texts = (inside(name, f"{tool}-{flavour}-save", "-c") for tool in TOOLS.values())
    # The comment lines hold the time of day.
    return "".join(line for t in texts for line in t.splitlines(True) if not line.startswith("#"))


# --- applying again ------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_applying_again_writes_nothing(netns: str, backend: str) -> None:
    """Told by the kernel, not by us; legacy has no generation, but a write there takes a lock."""
    capture(netns, RICH, backend)
    traffic(netns)
    before = (generation(netns), handles(netns), counted(netns, backend), state(netns))
    with open(XTABLES_LOCK) as lock, routing_monitor(netns) as monitor:
        fcntl.flock(lock, fcntl.LOCK_EX)
        again = capture(netns, RICH, backend)
        assert heard(monitor) == 0
    assert (generation(netns), handles(netns), counted(netns, backend), state(netns)) == before
    assert not again.changed


@pytest.mark.parametrize("backend", BACKENDS)
def test_only_what_differs_is_written(netns: str, backend: str) -> None:
    """The counters of rules that stay as they are go on counting, nftables apart."""
    capture(netns, EVERYTHING, backend)
    with routing_monitor(netns) as monitor:
        capture(netns, {**EVERYTHING, "outbound_ports_exclude": "22"}, backend)
        assert heard(monitor) == 0  # ::6 stays
    assert_in_sync(netns, {**EVERYTHING, "outbound_ports_exclude": "22"}, backend)


# --- what a check finds --------------------------------------------------------------------------

Tampering = Callable[[str], object]


def everywhere(table: str, *arguments: str, versions: tuple[int, ...] = (4, 6)) -> Tampering:
    """Return a tampering by the iptables tool of a backend, whose flavour stands for `{}`."""

    def tamper(where: str) -> None:
        name, flavour = where.split()
        for version in versions:
            inside(name, f"{TOOLS[version]}-{flavour}", "-t", table, *arguments)

    return tamper


def reordered(where: str) -> None:
    name, flavour = where.split()
    tool = f"iptables-{flavour}"
    inside(name, tool, "-t", "nat", "-D", "ISTIO_OUTPUT", "1")
    rule = ("-s", "127.0.0.6/32", "-o", "lo", "-j", "RETURN")
    inside(name, tool, "-t", "nat", "-I", "ISTIO_OUTPUT", "2", *rule)


def without_ipv6(where: str) -> None:
    name, flavour = where.split()
    for table in ("nat", "mangle", "raw"):
        inside(name, f"ip6tables-{flavour}", "-t", table, "-F")
        inside(name, f"ip6tables-{flavour}", "-t", table, "-X")


def in_table(*arguments: str) -> Tampering:
    return lambda where: inside(where.split()[0], "nft", *arguments)


def ip(*arguments: str) -> Tampering:
    return lambda where: inside(where.split()[0], "ip", *arguments)


OURS = ("inet", "intercept-agent")
BASE = "{ type nat hook output priority -105; policy accept; }"

IPTABLES_TAMPERINGS: dict[str, Tampering] = {
    "a rule deleted": everywhere("nat", "-D", "ISTIO_REDIRECT", "1", versions=(4,)),
    "a rule added": everywhere("nat", "-A", "ISTIO_OUTPUT", "-p", "tcp", "-j", "RETURN"),
    "order changed": reordered,
    "IPv6 deleted": without_ipv6,
    "jump deleted": everywhere("nat", "-F", "OUTPUT", versions=(6,)),
    "jump twice": everywhere("nat", "-A", "OUTPUT", "-j", "ISTIO_OUTPUT"),
    "a chain added": everywhere("nat", "-N", "ISTIO_NEW"),
    "foreign ahead": everywhere("nat", "-I", "OUTPUT", "-p", "tcp", "--dport", "7", "-j", "RETURN"),
    "DNS zone deleted": everywhere("raw", "-F", "ISTIO_OUTPUT_DNS", versions=(4,)),
}
NFT_TAMPERINGS: dict[str, Tampering] = {
    "chain flushed": in_table("flush", "chain", *OURS, "v4-nat-ISTIO_REDIRECT"),
    "a rule added": in_table("insert", "rule", *OURS, "v6-nat-ISTIO_OUTPUT", "accept"),
    "base chain flushed": in_table("flush", "chain", *OURS, "nat-OUTPUT"),
    "base chain tampered": in_table("insert", "rule", *OURS, "nat-OUTPUT", "accept"),
    "base chain with policy drop": in_table(
        "add", "chain", *OURS, "mangle-PREROUTING", "{ policy drop; }"
    ),
    "base chain added": in_table("add", "chain", *OURS, "early", BASE),
    "table dormant": in_table("add", "table", *OURS, "{ flags dormant; }"),
    "table deleted": in_table("delete", "table", *OURS),
}
ROUTING_TAMPERINGS: dict[str, Tampering] = {
    "policy rule twice": ip("rule", "add", "fwmark", "1337", "lookup", "133"),
    "policy rule missing": ip("-6", "rule", "del", "fwmark", "1337", "lookup", "133"),
    "route missing": ip("route", "flush", "table", "133"),
    "::6 missing": ip("-6", "addr", "del", "::6/128", "dev", "lo"),
}


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_check_finds_every_tampering_and_apply_repairs_it(netns: str, backend: str) -> None:
    capture(netns, RICH, backend)
    clean = normal(netns)
    flavour = backend.removeprefix("iptables-")
    rules = NFT_TAMPERINGS if backend == "nftables" else IPTABLES_TAMPERINGS
    for what, tamper in {**rules, **ROUTING_TAMPERINGS}.items():
        assert_in_sync(netns, RICH, backend)
        tamper(f"{netns} {flavour}")
        assert not report(netns, RICH, backend).in_sync, what
        assert capture(netns, RICH, backend).changed, what
        assert_in_sync(netns, RICH, backend)
        if what == "foreign ahead":
            assert "--dport 7 " in state(netns)[f"{flavour}4"]
            for tool in TOOLS.values():
                rule = ("OUTPUT", "-p", "tcp", "--dport", "7", "-j", "RETURN")
                inside(netns, f"{tool}-{flavour}", "-t", "nat", "-D", *rule)
        assert normal(netns) == clean, what


def normal(name: str) -> dict[str, list[str]]:
    """Return the state without the order in which tables were made and policy rules numbered."""
    return {
        kind: sorted(line.split(":\t")[-1] for line in text.splitlines())
        for kind, text in state(name).items()
    }


@pytest.mark.parametrize("backend", ["iptables-nft", "iptables-legacy"])
def test_a_foreign_rule_ahead_is_named(netns: str, backend: str) -> None:
    capture(netns, EVERYTHING, backend)
    tool = backend.replace("iptables", "ip6tables")
    rule = ("-p", "tcp", "-m", "owner", "--uid-owner", "4711", "-j", "RETURN")
    inside(netns, tool, "-t", "nat", "-I", "OUTPUT", *rule)
    code, out, _ = command("check", "--netns", netns, "--backend", backend, *words(EVERYTHING))
    assert code == 1
    assert "4711" in out
    assert "ipv6" in out


@pytest.mark.parametrize("backend", BACKENDS)
def test_foreign_rules_behind_ours_and_elsewhere_are_no_difference(
    netns: str, backend: str
) -> None:
    capture(netns, RICH, backend)
    for flavour in ("legacy", "nft"):
        for tool in TOOLS.values():
            for place in ("nat -A OUTPUT", "filter -A INPUT", "mangle -A FORWARD", "nat -N X"):
                table, *words_ = place.split()
                rule = () if place.endswith("X") else ("-p", "tcp", "--dport", "7", "-j", "ACCEPT")
                inside(netns, f"{tool}-{flavour}", "-t", table, *words_, *rule)
    inside(netns, "nft", "add", "table", "inet", "theirs")
    assert_in_sync(netns, RICH, backend)
    before = generation(netns)
    assert not capture(netns, RICH, backend).changed
    assert generation(netns) == before


# --- several at once -----------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_applies_at_once_end_as_one_of_them(netns: str, backend: str) -> None:
    wanted = (RICH, SETTINGS["other-ports"])
    runs = [
        started("apply", "--netns", netns, "--backend", backend, *words(raw))
        for raw in (*wanted, wanted[0])
    ]
    ends = [(process.communicate(timeout=60)[1], process.returncode) for process in runs]
    assert [code for _, code in ends] == [0, 0, 0], ends
    in_sync = [report(netns, raw, backend).in_sync for raw in wanted]
    assert sorted(in_sync) == [False, True]


def test_ten_namespaces_at_once_are_all_in_sync() -> None:
    with contextlib.ExitStack() as stack:
        names = [stack.enter_context(namespace("ten")) for _ in range(10)]
        pool = stack.enter_context(ThreadPoolExecutor(len(names)))
        chosen = [BACKENDS[i % len(BACKENDS)] for i in range(len(names))]
        for raw in (RICH, SETTINGS["other-mark-and-table"]):
            jobs = [
                pool.submit(capture, name, raw, b) for name, b in zip(names, chosen, strict=True)
            ]
            for job in jobs:
                job.result()
            for name, b in zip(names, chosen, strict=True):
                assert_in_sync(name, raw, b)


# --- live connections ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pod_and_peer() -> Iterator[Lab]:
    with lab("live") as made:
        yield made


@pytest.fixture
def pod(pod_and_peer: Lab) -> Iterator[Lab]:
    try:
        yield pod_and_peer
    finally:
        pod_and_peer.release()
        release(pod_and_peer.pod)


@pytest.mark.parametrize("backend", BACKENDS)
def test_captured_connections_outlive_other_settings_and_other_backends(
    pod: Lab, backend: str
) -> None:
    """They do because conntrack stays in use throughout, and it keeps their translation.

    The kernel does not allow as much for `remove` (kernel fact 10).
    """
    for first in ("redirect", "tproxy", "ambient"):
        capture(pod.pod, SETTINGS[first], backend)
        assert set(pod.hold()) == {"proxy-15001", "proxy-15006"}
        others = (b for b in BACKENDS if b != backend)
        for chosen, raw in (
            (backend, "tproxy"),
            (backend, "redirect-dns"),
            (next(others), "other-mark-and-table"),
            (next(others), "redirect"),
            (backend, "ambient"),
            (backend, "other-ports"),
        ):
            capture(pod.pod, SETTINGS[raw], chosen)
            assert pod.ping() == ("alive",) * 4, (first, chosen, raw)
        pod.release()


@pytest.mark.parametrize(
    ("backend", "raw", "guard"),
    [
        *((backend, "redirect", "standing") for backend in BACKENDS),
        *((backend, "tproxy", "off") for backend in BACKENDS),
        (EBPF, "redirect", "off"),
    ],
)
def test_first_capture_spares_connections_that_are_open(backend: str, raw: str, guard: str) -> None:
    """Idle ones, too: conntrack is told of each before there is a rule (kernel fact 10)."""
    with lab("first") as pod:
        assert set(pod.hold()) == {"app", "service"}
        capture(pod.pod, {**SETTINGS[raw], "guard": guard}, backend)
        try:
            assert pod.ping() == ("alive",) * 4
            assert set(pod.dial()) == {"proxy-15001", "proxy-15006"}
            assert pod.ping() == ("alive",) * 4
        finally:
            release(pod.pod)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_got_past_a_flushed_capture_is_not_spared(pod: Lab, backend: str) -> None:
    capture(pod.pod, SETTINGS["redirect"], backend)
    inside(pod.pod, "nft", "flush", "ruleset")
    for tool in ("iptables-legacy", "ip6tables-legacy") * (backend == IPTABLES_LEGACY):
        inside(pod.pod, tool, "-t", "nat", "-F")
    assert set(pod.hold()) == {"app", "service"}
    capture(pod.pod, SETTINGS["redirect"], backend)
    assert "alive" not in pod.ping()


# --- looking leaves no trace ---------------------------------------------------------------------


def test_looking_at_a_namespace_leaves_no_trace(netns: str) -> None:
    before = state(netns)
    with routing_monitor(netns) as monitor:
        for words_ in (("check",), ("plan",), ("apply", "--dry-run"), ("remove",)):
            extra = () if words_[0] == "remove" else words(EVERYTHING)
            code, _, err = command(*words_, "--netns", netns, *extra)
            assert code in (0, 1), err
        for backend in BACKENDS:
            assert not report(netns, RICH, backend).in_sync
        assert heard(monitor) == 0
    assert inside(netns, "nft", "list", "ruleset") == ""
    for names in ("ip_tables_names", "ip6_tables_names"):
        assert inside(netns, "cat", f"/proc/net/{names}") == ""
    assert state(netns) == before


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_keeps_a_namespace_alive_after_an_apply(backend: str) -> None:
    with namespace("gone") as name:
        inode = os.stat(path_of(name)).st_ino
        capture(name, RICH, backend)
        assert_in_sync(name, RICH, backend)
        run("ip", "netns", "del", name)
        deadline = time.monotonic() + GONE_S
        while (holders := held_by(inode)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not holders


def held_by(inode: int) -> list[str]:
    """Return where in /proc a network namespace is still referred to."""
    wanted = f"net:[{inode}]"
    found = []
    for place in (*Path("/proc").glob("[0-9]*/task/*/ns/net"), *Path("/proc").glob("[0-9]*/fd/*")):
        try:
            if os.readlink(place) == wanted:
                found.append(str(place))
        except OSError:
            continue
    return found
