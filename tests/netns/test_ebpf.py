"""The eBPF backend: what it loads and takes away, what it notices, and what cannot undo it.

What it does to connections is compared with the other backends in test_behaviour.
"""

import contextlib
import ctypes
import errno
import ipaddress
import json
import os
import random
import shlex
import signal
import struct
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from agent.backends.session import reading
from agent.capture.apply import apply, remove
from agent.capture.check import check
from agent.capture.observe import observe
from agent.capture.probing.probe import probe
from agent.explain.render import summary
from agent.explain.trace import trace
from agent.formats.bpf_capture import COOKIE
from agent.kernel import bpf, bpf_loader, bpf_pins
from agent.kernel.netns import Netns
from agent.kernel.topology import read_host
from agent.model.enrolment import LAYOUT
from agent.model.errors import EnvironmentLacks, InvalidSettings, RolledBack, StateUnreadable
from agent.model.packet import Packet
from agent.model.settings import parse
from agent.model.state import EBPF
from tests.support.agent import RESULT, running, wait_for
from tests.support.capturing import EVERYTHING, TPROXY, Raw, command
from tests.support.conformance import cli
from tests.support.ebpf import (
    capture,
    checked,
    cookie,
    detach,
    found_wrong,
    own_node,
    pinned,
    release,
    run_killed,
)
from tests.support.escape import DIRECT, Lab, lab
from tests.support.netns import inside, namespace, path_of, run, snapshot

pytestmark = pytest.mark.netns

KILLS = int(os.environ.get("INTERCEPT_EBPF_KILLS", "8"))
CONNECT4 = 10  # BPF_CGROUP_INET4_CONNECT
RULES = ("nftables", "iptables-nft", "iptables-legacy")


@pytest.fixture(autouse=True)
def node(tmp_path: Path) -> Iterator[None]:
    with own_node(tmp_path):
        yield


# --- what is loaded and what is left --------------------------------------------------------------


def test_capture_is_complete_and_loads_no_rules(netns: str) -> None:
    before = snapshot(netns)
    done = capture(netns)
    assert (done.backend, done.changed) == (EBPF, True)
    assert checked(netns).in_sync
    after = snapshot(netns)
    assert {key for key in before if before[key] != after[key]} == {"addresses", "routes6"}


def test_applying_again_writes_nothing(netns: str) -> None:
    capture(netns)
    assert not capture(netns).changed
    assert not capture(netns, backend="auto").changed


def test_removal_of_the_last_leaves_nothing_at_all(netns: str) -> None:
    before = snapshot(netns)
    with namespace("other") as other:
        capture(netns)
        capture(other)
        release(netns)
        assert checked(other).in_sync
        release(other)
    assert pinned() == set()
    assert snapshot(netns) == before


def test_dry_run_writes_nothing(netns: str) -> None:
    with Netns.open(path_of(netns)) as opened:
        done = apply(opened, parse(EVERYTHING), backend=EBPF, dry_run=True)
    assert any("enrol" in step for step in done.steps)
    assert pinned() == set()


def test_host_is_refused_whoever_asks() -> None:
    with Netns.open("/proc/self/ns/net") as host, pytest.raises(RolledBack, match="node's own"):
        apply(host, parse({**EVERYTHING, "enable_ipv6": False}), backend=EBPF)
    assert not (bpf_pins.base() / "pods").exists() or not pinned() & {"pods/"}


def test_cgroup2_is_found_or_mounted_for_the_moment(
    netns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bpf_pins, "cgroup_root", lambda: None)
    capture(netns)
    assert checked(netns).in_sync


def test_without_the_programs_the_reason_is_said(
    netns: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bpf_pins, "OBJECTS", tmp_path)
    with pytest.raises(EnvironmentLacks, match="install clang"):
        capture(netns)
    assert capture(netns, backend="auto").backend == "nftables"


# --- settings that it cannot honour ---------------------------------------------------------------


def test_refused_settings_touch_nothing_and_auto_takes_another(netns: str) -> None:
    capture(netns)
    with pytest.raises(InvalidSettings, match="inbound_interception_mode"):
        capture(netns, TPROXY)
    assert checked(netns).in_sync
    done = capture(netns, TPROXY, backend="auto")
    assert done.backend == "nftables"
    assert any("nftables takes the place of ebpf: inbound_intercep" in w for w in done.warnings)
    assert pinned() == set()


# --- what is noticed and put right ----------------------------------------------------------------


def spoil_settings(name: str) -> None:
    with bpf.Map.at(bpf_pins.base() / "maps" / "captures") as captures:
        key = COOKIE.pack(cookie(name))
        entry = captures.lookup(key)
        assert entry is not None
        captures.update(key, entry[:4] + (16001).to_bytes(2, sys.byteorder) + entry[6:])


def forget_addresses(name: str) -> None:
    inside(name, "ip", "addr", "add", "10.3.3.4/32", "dev", "lo")
    capture(name)
    with bpf.Map.at(bpf_pins.base() / "maps" / "own_addresses") as own:
        for key in list(own.keys()):
            own.delete(key)


DRIFT: Mapping[str, tuple[Callable[[str], object], str]] = {
    "a hook is detached": (
        lambda name: detach(bpf_pins.base() / "links" / "connect4"),
        "connect4 was detached from the root of cgroup2",
    ),
    "a hook's pin is gone": (
        lambda name: (bpf_pins.base() / "links" / "recvmsg6").unlink(),
        "recvmsg6 is not attached",
    ),
    "the namespace's program is detached": (
        lambda name: detach(bpf_pins.base() / "pods" / str(cookie(name))),
        "the program for inbound connections was detached",
    ),
    "the namespace's pin is gone": (
        lambda name: (bpf_pins.base() / "pods" / str(cookie(name))).unlink(),
        "the program for inbound connections is not attached",
    ),
    "a setting is another": (
        spoil_settings,
        "proxy_port: 16001 is loaded, and not 15001",
    ),
    "an own address is forgotten": (
        forget_addresses,
        "the program for inbound connections does not know the namespace's addresses",
    ),
    "an address is new": (
        lambda name: inside(name, "ip", "addr", "add", "10.3.3.3/32", "dev", "lo"),
        "the programs do not know that 10.3.3.3/32 is an address of the namespace, from 10.3.3.3",
    ),
}


@pytest.mark.parametrize("about", DRIFT)
def test_drift_is_named_and_put_right(netns: str, about: str) -> None:
    spoil, sentence = DRIFT[about]
    capture(netns)
    spoil(netns)
    assert sentence in found_wrong(netns)
    assert capture(netns).changed
    assert found_wrong(netns) == []


def test_a_missing_entry_is_no_capture(netns: str) -> None:
    capture(netns)
    with bpf.Map.at(bpf_pins.base() / "maps" / "captures") as captures:
        captures.delete(COOKIE.pack(cookie(netns)))
    assert "the namespace is not enrolled" in found_wrong(netns)
    capture(netns)
    assert found_wrong(netns) == []
    release(netns)
    assert pinned() == set()


def test_layout_of_another_version_is_not_touched(netns: str) -> None:
    capture(netns)
    with bpf.Map.at(bpf_pins.base() / "maps" / "about") as about:
        about.update(bytes(4), (LAYOUT + 1).to_bytes(4, sys.byteorder) + bytes(20))
    before = pinned()
    with pytest.raises(
        StateUnreadable, match=rf"another version of the agent \(layout {LAYOUT + 1}"
    ):
        capture(netns)
    with namespace("other") as other:
        done = capture(other, backend="nftables")
        assert any("another version" in warning for warning in done.warnings)
    assert pinned() == before


# --- no moment without a capture ------------------------------------------------------------------


@pytest.fixture(scope="module")
def pod_and_peer() -> Iterator[Lab]:
    with lab("ebpf") as made:
        yield made


@pytest.fixture
def pod(pod_and_peer: Lab) -> Iterator[Lab]:
    yield pod_and_peer
    release(pod_and_peer.pod)


def test_nothing_escapes_while_backends_take_turns(pod: Lab) -> None:
    capture(pod.pod)
    before = pod.direct()
    pod.flood()
    try:
        for backend in (*RULES, EBPF, *RULES):
            capture(pod.pod, backend=backend)
            capture(pod.pod, {**EVERYTHING, "proxy_port": 15101}, backend=EBPF)
            capture(pod.pod, {**EVERYTHING, "inbound_capture_port": 15106}, backend=EBPF)
    finally:
        seen = pod.stop()
    assert pod.direct() == before
    assert not {who for who in seen if who in DIRECT}
    assert sum(count for who, count in seen.items() if who.startswith("proxy-")) > 20


def test_programs_are_exchanged_under_connections(
    pod: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other builds, one after the other: no connection is refused, none goes past the proxy."""
    capture(pod.pod)
    assert pod.hold() == ("proxy-15001", "proxy-15001", "proxy-15006", "proxy-15006")
    before = pod.direct()
    pod.flood()
    for number in range(8):
        monkeypatch.setattr(bpf_pins, "build", lambda n=number: bytes([n]) * 20)
        assert "the programs are not those of this version of the agent" in found_wrong(pod.pod)
        assert capture(pod.pod).changed
        assert found_wrong(pod.pod) == []
    seen = pod.stop()
    assert pod.direct() == before
    # The clients wait for 0.15 seconds, which is short where the machine is emulated or busy.
    assert set(seen) - {"timeout"} == {"proxy-15001", "proxy-15006"}, seen
    assert set(pod.ping()) == {"alive"}
    pod.release()


def test_a_killed_run_leaves_it_captured_or_as_it_was(pod: Lab) -> None:
    captured = ("proxy-15001", "proxy-15001", "proxy-15006", "proxy-15006")
    free = ("service", "service", "app", "app")
    chance = random.Random(1)
    for number in range(KILLS):
        enrolled = number % 2 == 0
        run_killed("apply" if enrolled else "remove", pod.pod, chance.uniform(0.15, 1.0))
        assert pod.dial() in (captured, free)
        if enrolled:
            capture(pod.pod)
            assert found_wrong(pod.pod) == []
            assert pod.dial() == captured
        else:
            release(pod.pod)
            assert pinned() == set()
            assert pod.dial() == free


# --- what a process in the pod cannot do ----------------------------------------------------------


@pytest.mark.parametrize("port", [15001, 15006])
def test_only_the_proxy_may_take_its_ports(netns: str, port: int) -> None:
    capture(netns)
    assert bind_as(netns, 1000, port) == errno.EPERM
    assert bind_as(netns, 0, port) == errno.EPERM
    assert bind_as(netns, 1337, port) == 0
    assert bind_as(netns, 1000, 15020) == 0
    release(netns)
    assert bind_as(netns, 1000, port) == 0


BIND = """
import os, socket
os.setgid({uid}); os.setuid({uid})
made = socket.socket()
made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
try:
    made.bind(("0.0.0.0", {port})); print(0)
except OSError as error:
    print(error.errno)
"""


def bind_as(name: str, uid: int, port: int) -> int:
    code = BIND.format(uid=uid, port=port)
    return int(inside(name, sys.executable, "-I", "-S", "-c", code))


def test_flushing_every_rule_changes_nothing(pod: Lab) -> None:
    capture(pod.pod)
    inside(pod.pod, "nft", "flush", "ruleset")
    for tool in ("iptables-legacy", "ip6tables-legacy"):
        inside(pod.pod, tool, "-t", "nat", "-F")
    assert pod.dial() == ("proxy-15001", "proxy-15001", "proxy-15006", "proxy-15006")
    assert checked(pod.pod).in_sync


# --- trace ----------------------------------------------------------------------------------------


def test_trace_says_what_the_programs_do(pod: Lab) -> None:
    capture(pod.pod, {**EVERYTHING, "outbound_ports_exclude": "443"})
    with Netns.open(path_of(pod.pod)) as opened, reading(opened) as session:
        state, host = observe(session), read_host(opened)

    def said(to: str, port: int, uid: int | None = 1000) -> str:
        sent = Packet(
            protocol="tcp",
            destination=ipaddress.ip_address(to),
            dport=port,
            uid=uid,
            gid=uid,
            source=ipaddress.ip_address("10.79.0.1") if uid is None else None,
        )
        return summary(trace(state, host, sent, inbound=uid is None))

    assert said("10.79.0.1", 8000) == (
        "TCP to 10.79.0.1:8000 from uid 1000 is redirected to port 15001 by the eBPF program "
        "connect4 (outbound_ip_ranges_include)."
    )
    assert said("fd00:79::1", 443).endswith(
        "is not redirected: the eBPF program connect6 (outbound_ports_exclude) exempts it."
    )
    assert said("10.79.0.2", 8080, 1337).endswith(
        "is redirected to port 15006 by the eBPF program connect4 (proxy_uid)."
    )
    assert said("10.79.0.2", 8080, None) == (
        "TCP to 10.79.0.2:8080 from 10.79.0.1 is redirected to port 15006 by the eBPF program "
        "inbound (inbound_ports_include)."
    )


# --- probe ----------------------------------------------------------------------------------------


def outcomes(name: str, raw: Raw) -> dict[str, str]:
    with Netns.open(path_of(name)) as opened:
        return {result.name: result.outcome.value for result in probe(opened, parse(raw))}


def test_probe_proves_it_with_and_without_a_proxy(netns: str, pod: Lab) -> None:
    raw = {**EVERYTHING, "redirect_dns": True, "capture_all_dns": True}
    for name in (netns, pod.pod):
        capture(name, raw)
        found = outcomes(name, raw)
        assert [each for each in found.items() if each[1] != "ok"] == []
        for kind in ("outbound", "inbound", "dns"):
            assert {f"{kind} ipv4", f"{kind} ipv4 tcp"} & found.keys(), found


@pytest.mark.parametrize("words", [("check", "--netns"), ("explain",)])
def test_command_that_puts_it_right_keeps_the_open_gate(
    words: tuple[str, ...], netns: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("INTERCEPT_SOCKET", str(tmp_path / "agent.sock"))
    monkeypatch.setenv("INTERCEPT_CRI_ENDPOINT", "none")
    given = ("--netns", netns, "--backend", EBPF, "--gate", "open", "-b", "8080")
    assert cli("apply", *given).code == 0
    detach(bpf_pins.base() / "links" / "connect4")
    (advised,) = {
        line.strip()
        for line in cli(*words, netns).stdout.splitlines()
        if line.strip().startswith("-> intercept-agent apply")
    }
    assert cli(*shlex.split(advised)[2:]).code == 0
    assert cli("check", *given).code == 0
    with Netns.open(path_of(netns)) as opened, reading(opened) as session:
        enrolment = observe(session).enrolment
    assert enrolment is not None
    assert enrolment.settings is not None
    assert enrolment.settings.gate == "open"


@pytest.mark.parametrize(
    ("hook", "lost"), [("links/connect6", "outbound ipv6"), ("links/original_dst", "outbound ipv4")]
)
def test_probe_tells_which_way_is_open(netns: str, hook: str, lost: str) -> None:
    capture(netns)
    detach(bpf_pins.base() / hook)
    found = outcomes(netns, EVERYTHING)
    assert found[lost] == "failed", found


def test_probe_tells_when_nothing_arrives(netns: str) -> None:
    capture(netns)
    detach(bpf_pins.base() / "pods" / str(cookie(netns)))
    found = outcomes(netns, EVERYTHING)
    assert {name for name, outcome in found.items() if outcome == "failed"} == {
        "inbound ipv4",
        "inbound ipv6",
    }


# --- the daemon -----------------------------------------------------------------------------------


def test_daemon_captures_keeps_and_repairs(tmp_path: Path, netns: str) -> None:
    with running(tmp_path, backend=EBPF) as agent:
        assert agent.cni("ADD", netns) == (0, RESULT)
        assert agent.cni("CHECK", netns) == (0, None)
        wait_for(lambda: agent.state("web") == "in-sync")
        pod = agent.pod("web")
        assert pod is not None
        assert pod["backend"] == EBPF
        assert inside(netns, "nft", "list", "ruleset") == ""
        detach(bpf_pins.base() / "links" / "connect4")
        assert agent.cni("CHECK", netns)[0] == 1
        assert agent.cni("ADD", netns) == (0, RESULT)
        assert agent.cni("CHECK", netns) == (0, None)
        before = pinned()
        agent.stop(signal.SIGKILL)
        assert pinned() == before
        agent.start()
        wait_for(lambda: agent.state("web") == "in-sync")
        assert agent.kinds() == []
        inside(netns, "ip", "addr", "add", "10.4.4.4/32", "dev", "lo")
        inside(netns, "ip", "route", "add", "10.5.0.0/16", "dev", "lo")
        wait_for(lambda: "drift-repaired" in agent.kinds())
        # On a slow machine the address is put right first, and the route by a second write.
        wait_for(lambda: agent.cni("CHECK", netns) == (0, None))


# --- a user namespace -----------------------------------------------------------------------------


BIND_THERE = """
import ctypes, os
for kind in {kinds}:
    if ctypes.CDLL(None).setns(os.open("/proc/{pid}/ns/" + kind, os.O_RDONLY), 0):
        raise SystemExit("setns")
"""


def test_ids_are_those_of_the_pods_own_user_namespace(user_namespace: int) -> None:
    def bind(uid: int, *kinds: str) -> int:
        enter = BIND_THERE.format(kinds=kinds, pid=user_namespace)
        code = f"import socket\n{enter}{BIND.format(uid=uid, port=15001)}"
        return int(run(sys.executable, "-I", "-S", "-c", code))

    with Netns.open(f"/proc/{user_namespace}/ns/net") as opened:
        settings = parse({**EVERYTHING, "enable_ipv6": False})
        apply(opened, settings, backend=EBPF)
        assert check(opened, settings).in_sync
        assert bind(1337, "user", "net") == 0
        assert bind(1000, "user", "net") == errno.EPERM
        assert bind(0, "user", "net") == errno.EPERM
        assert bind(1337, "net") == errno.EPERM  # another user, with the same number on the node
        assert bind(101337, "net") == 0
        remove(opened)
    assert pinned() == set()


# --- a proxy that listens already -----------------------------------------------------------------


@pytest.mark.parametrize("how", ["by the iterator", "by its descriptor"])
def test_a_proxy_that_listens_already_is_found(
    pod: Lab, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """The iterator needs the kernel's type information; without it the socket is borrowed."""
    if how == "by its descriptor":
        monkeypatch.setattr(bpf_pins, "load", load_without_iterator(bpf_pins.load))
    capture(pod.pod)
    assert (bpf_pins.base() / "adopt").exists() is (how == "by the iterator")
    assert found_wrong(pod.pod) == []
    assert pod.dial() == ("proxy-15001", "proxy-15001", "proxy-15006", "proxy-15006")


def load_without_iterator(load: Callable[[], None]) -> Callable[[], None]:
    def loaded() -> None:
        load()
        (bpf_pins.base() / "adopt").unlink()

    return loaded


# --- others' programs -----------------------------------------------------------------------------


@contextlib.contextmanager
def load_balancer(flags: int) -> Iterator[None]:
    """Attach somebody's program to connect4 that does nothing."""
    code = struct.pack("<BBhiBBhi", 0xB7, 0, 0, 1, 0x95, 0, 0, 0)  # r0 = 1; exit
    held, words = ctypes.create_string_buffer(code, 16), ctypes.create_string_buffer(b"GPL")
    loading = struct.pack("=IIQQ", 18, 2, ctypes.addressof(held), ctypes.addressof(words))
    loading += struct.pack("=IIQII16sII", 0, 0, 0, 0, 0, b"other_lb", 0, CONNECT4)
    program = bpf.call(bpf.PROG_LOAD, loading)[0]
    root = bpf_pins.cgroup_root()
    assert root is not None
    target = os.open(root, os.O_RDONLY)
    link = bpf.call(bpf.LINK_CREATE, struct.pack("=IIII", program, target, CONNECT4, flags))[0]
    try:
        yield
    finally:
        for fd in (link, target, program):
            os.close(fd)


PREORDER = tuple(int(part) for part in os.uname().release.split(".")[:2]) >= (6, 15)


@pytest.mark.alone
def test_a_program_that_runs_first_is_named(netns: str) -> None:
    with load_balancer(bpf_loader.BPF_F_PREORDER if PREORDER else 0):
        capture(netns)
        (sentence,) = checked(netns).foreign
        assert sentence.startswith("cgroup connect4: the program other_lb (id ")
        assert not checked(netns).differences
    assert checked(netns).in_sync


@pytest.mark.alone
def test_a_program_that_was_there_before_runs_after(netns: str) -> None:
    """On kernels that can be asked for it (6.15); on others it is named, too."""
    with load_balancer(0):
        capture(netns)
        assert bool(checked(netns).foreign) is not PREORDER


def test_a_program_that_chooses_who_takes_what_arrives_is_named(netns: str) -> None:
    """A process of the pod may attach one with the rights `BPF` and `NET_ADMIN`."""
    capture(netns)
    code = struct.pack("<BBhiBBhi", 0xB7, 0, 0, 1, 0x95, 0, 0, 0)  # r0 = 1; exit
    with (
        Netns.open(path_of(netns)) as opened,
        bpf.opened(bpf.load_sk_lookup(code, "other_one")) as program,
        bpf.opened(bpf.link(program, opened.fd, bpf.ATTACH_SK_LOOKUP)),
    ):
        (sentence,) = checked(netns).foreign
        assert sentence.startswith("sk_lookup: the program other_one (id ")
    assert not checked(netns).foreign


def test_explain_and_scan_know_what_the_programs_were_told(netns: str) -> None:
    capture(netns)
    code, out, _ = command("explain", netns)
    assert code == 0
    assert "ebpf, ipv4 and ipv6" in out
    assert "users 1337; groups 1337" in out
    assert "NOT captured" not in out
    code, out, _ = command("scan", "--netns", netns, "-o", "json")
    assert (code, [each["kind"] for each in json.loads(out)["findings"]]) == (1, ["blackhole"])
