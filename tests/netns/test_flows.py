"""The live view of connections, held against who really answered them."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.flows.watcher import PROGRAMS
from agent.kernel import bpf, bpf_pins
from agent.kernel.netns import Netns
from agent.model.numbers import AMBIENT_MARK
from agent.model.state import EBPF
from tests.support.capturing import (
    BACKENDS,
    EVERYTHING,
    STATE_DIR,
    assert_in_sync,
    capture,
    command,
    release,
)
from tests.support.ebpf import built
from tests.support.escape import PEER, POD, Lab, Node, lab
from tests.support.flows import DEADLINE_S, ROOT, Document, flowing
from tests.support.netns import inside, namespace, path_of
from tests.support.pod import wait_for

pytestmark = pytest.mark.netns

ALL = (*BACKENDS, EBPF)
COMMAND = ("agent.cli.main", "flows")
MANY = 12_000  # more than wait to be read
EXCLUDED = {4: "10.98.0.1", 6: "fd00:98::1"}
SETTINGS = {
    **EVERYTHING,
    "outbound_ports_exclude": "8001",
    "outbound_ip_ranges_exclude": "10.98.0.0/24,fd00:98::/64",
    "inbound_ports_exclude": "9090",
    "redirect_dns": True,
    "capture_all_dns": True,
}
DNS = """
import socket
for family, host in ((socket.AF_INET, "10.79.0.1"), (socket.AF_INET6, "fd00:79::1")):
    with socket.socket(family, socket.SOCK_DGRAM) as connected:
        connected.connect((host, 53))
        connected.send(b"?")
    with socket.socket(family, socket.SOCK_DGRAM) as made:
        made.sendto(b"?", (host, 53))
        made.sendto(b"?", (host, 5353))
"""
DNS_AS_USER = """
import contextlib, os, socket
os.setuid(1000)
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as made, contextlib.suppress(OSError):
    made.sendto(b"?", ("10.79.0.1", 53))
"""
WORKER = """
import ctypes, socket, sys, threading
def dial():
    ctypes.CDLL(None).prctl(15, b"wrk:worker_0")
    socket.create_connection(("10.79.0.1", 8000)).close()
threading.Thread(target=dial).start()
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STATE_DIR, str(tmp_path))


@pytest.fixture(scope="module")
def made_pod() -> Iterator[Lab]:
    built()
    with lab("flow") as made:
        for version, address in EXCLUDED.items():
            inside(made.outside, "ip", "addr", "add", address, "dev", "lo")
            inside(made.pod, "ip", f"-{version}", "route", "add", address, "via", PEER[version])
        with Node(made.pod, 1000, {9090: "other"}):
            yield made


@pytest.fixture
def pod(made_pod: Lab) -> Iterator[Lab]:
    try:
        yield made_pod
    finally:
        release(made_pod.pod)


def endpoint(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def what(found: Document) -> tuple[object, ...]:
    """Return what became of a connection, without what differs from run to run."""
    return (found["became"], found["port"], found["setting"], found["result"])


def undo(name: str, backend: str) -> None:
    """Take the capture away behind the agent's back, as somebody with the rights to do so can."""
    if backend == EBPF:
        with Netns.open(path_of(name)) as opened:
            cookie = opened.cookie()
        assert cookie is not None
        with bpf.Map.at(bpf_pins.base() / "maps" / "captures") as captures:
            captures.delete(cookie.to_bytes(8, sys.byteorder))
        (bpf_pins.base() / "pods" / str(cookie)).unlink()
    elif backend == "nftables":
        inside(name, "nft", "flush", "table", "inet", "intercept-agent")
    else:
        for tool in (backend, backend.replace("iptables", "ip6tables")):
            inside(name, tool, "-t", "nat", "-F")


# --- what became of connections -------------------------------------------------------------------


@pytest.mark.parametrize("backend", ALL)
def test_connections_are_shown_with_what_became_of_them(pod: Lab, backend: str) -> None:
    capture(pod.pod, SETTINGS, backend)
    with flowing(pod.pod) as flows:
        assert all(name.startswith("proxy") for name in pod.dial())
        dialled = [(host, port) for host in PEER.values() for port in (8000, 8001)]
        dialled += [(host, 8000) for host in EXCLUDED.values()]
        answers = pod.client.ask("dial", targets=dialled, timeout_s=DEADLINE_S)
        pod.client.ask("dial", targets=[("::ffff:10.79.0.1", 8000)], timeout_s=DEADLINE_S)
        pod.proxy.ask("dial", targets=dialled[:1], timeout_s=DEADLINE_S)
        pod.peer.ask("dial", targets=[(h, 9090) for h in POD.values()], timeout_s=DEADLINE_S)
        inside(pod.pod, sys.executable, "-I", "-S", "-c", DNS)
        found = flows.documents()
    proxied = ("proxied", 15001, None, "connected")
    assert answers == ["proxy-15001", "ConnectionRefusedError"] * 2 + ["service"] * 2
    for version in (4, 6):
        there = endpoint(PEER[version], 8000)
        mine = [what(d) for d in found if (d["destination"], d["uid"]) == (there, 1000)]
        assert mine == [proxied] * (3 if version == 4 else 2)
        refused_there = ("exempt", None, "outbound_ports_exclude", "refused")
        assert the(found, "out", endpoint(PEER[version], 8001)) == refused_there
        excluded = ("exempt", None, "outbound_ip_ranges_exclude", "connected")
        assert the(found, "out", endpoint(EXCLUDED[version], 8000)) == excluded
        arrived = ("proxied", 15006, None, "connected")
        assert the(found, "in", endpoint(POD[version], 8080)) == arrived
        past = ("exempt", None, "inbound_ports_exclude", "connected")
        assert the(found, "in", endpoint(POD[version], 9090)) == past
        asked = [what(d) for d in found if d["destination"] == endpoint(PEER[version], 53)]
        assert asked == [("proxied", 15053, None, "sent")] * 2
    own = [what(d) for d in found if d["uid"] == 1337 and d["direction"] == "out"]
    assert own == [("exempt", None, "proxy_uid", "connected")]
    assert not [d for d in found if d["destination"].endswith(":5353")]
    accepting = {d["destination"].rpartition(":")[2]: d for d in found if d["direction"] == "in"}
    assert [(p, d["uid"]) for p, d in sorted(accepting.items())] == [("8080", 1337), ("9090", 1000)]
    assert all(d["pid"] and d["process"].startswith("python") for d in found)


def the(found: list[Document], direction: str, destination: str) -> tuple[object, ...]:
    """Return what became of the only connection that went there."""
    (one,) = [d for d in found if (d["direction"], d["destination"]) == (direction, destination)]
    return what(one)


@pytest.mark.parametrize("backend", ALL)
def test_connections_past_an_undone_capture_are_shown_as_bypassed(pod: Lab, backend: str) -> None:
    capture(pod.pod, SETTINGS, backend)
    with flowing(pod.pod, "--bypassed") as flows:
        assert all(name.startswith("proxy") for name in pod.dial())
        undo(pod.pod, backend)
        assert pod.dial() == ("service", "service", "app", "app")
        pod.proxy.ask("dial", targets=[(PEER[4], 8000)], timeout_s=DEADLINE_S)
        found = flows.documents()
    assert {d["destination"] for d in found} == {
        *(endpoint(host, 8000) for host in PEER.values()),
        *(endpoint(host, 8080) for host in POD.values()),
    }
    assert {(d["direction"], *what(d)) for d in found} == {
        ("out", "bypassed", None, "outbound_ip_ranges_include", "connected"),
        ("in", "bypassed", None, "inbound_ports_include", "connected"),
    }


def test_connection_of_a_thread_is_shown_under_the_name_of_its_process(pod: Lab) -> None:
    command = ("ip", "netns", "exec", pod.pod, sys.executable, "-I", "-S", "-c", WORKER)
    with flowing(pod.pod) as flows, subprocess.Popen(command, stdin=subprocess.PIPE) as worker:
        found = flows.next()
    assert (found["pid"], found["process"][:6]) == (worker.pid, "python")


def test_rules_of_istio_are_explained_without_a_record(pod: Lab, tmp_path: Path) -> None:
    capture(pod.pod, {**SETTINGS, "redirect_dns": False}, "iptables-legacy")
    for record in tmp_path.iterdir():
        record.unlink()
    with flowing(pod.pod) as flows:
        for port in (8000, 8001):
            pod.client.ask("dial", targets=[(PEER[4], port)], timeout_s=DEADLINE_S)
        found = flows.documents()
    assert [what(d) for d in found] == [
        ("proxied", 15001, None, "connected"),
        ("exempt", None, "outbound_ports_exclude", "refused"),
    ]


def test_transparent_proxy_is_seen_to_accept_for_the_application(pod: Lab) -> None:
    capture(pod.pod, {**EVERYTHING, "inbound_interception_mode": "TPROXY"}, "nftables")
    with flowing(pod.pod) as flows:
        assert all(name.startswith("proxy") for name in pod.dial())
        found = flows.documents()
    for version in (4, 6):
        arrived = ("proxied", 15006, None, "connected")
        assert the(found, "in", endpoint(POD[version], 8080)) == arrived


def test_destination_that_conntrack_has_forgotten_is_not_made_up(pod: Lab) -> None:
    capture(pod.pod, SETTINGS, "nftables")
    with flowing(pod.pod) as flows:
        (watcher,) = children(flows.process.pid)
        os.kill(watcher, signal.SIGSTOP)
        pod.peer.ask("dial", targets=[(POD[4], 8080)], timeout_s=DEADLINE_S)
        inside(pod.pod, "conntrack", "-F")
        os.kill(watcher, signal.SIGCONT)
        found = flows.next()
    assert (found["destination"], *what(found)) == (None, "proxied", 15006, None, "connected")


def test_proxy_of_an_ambient_pod_is_known_by_its_mark(pod: Lab) -> None:
    capture(pod.pod, {"mode": "ambient", "enable_ipv6": True}, "nftables")
    marked = f"made.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, {AMBIENT_MARK:#x})"
    with flowing(pod.pod) as flows:
        for line in ("", marked):
            code = (
                f"import socket; made = socket.socket(); {line}\nmade.connect(('{PEER[4]}', 8000))"
            )
            inside(pod.pod, sys.executable, "-I", "-S", "-c", code)
        found = [what(d) for d in flows.documents()]
    assert found == [
        ("proxied", 15001, None, "connected"),
        ("exempt", None, "mode", "connected"),
    ]


@pytest.mark.parametrize("backend", ALL)
def test_gate_and_guard_are_named_for_what_they_refuse(backend: str) -> None:
    built()
    with lab("flog", proxy=False) as pod:
        try:
            capture(pod.pod, {**SETTINGS, "guard": "standing"}, backend)
            with flowing(pod.pod, "--uid", "1000") as flows:
                assert pod.dial() == ("ConnectionRefusedError",) * 4
                if backend != EBPF:  # it has no rules that could be flushed, and needs no guard
                    undo(pod.pod, backend)
                    # The first packet has to be sent again before it is known that it is lost.
                    held = [(host, 8000) for host in PEER.values()]
                    pod.client.ask("dial", targets=held, timeout_s=1.5)
                    inside(pod.pod, sys.executable, "-I", "-S", "-c", DNS_AS_USER)
                found = [what(d) for d in flows.documents()]
        finally:
            release(pod.pod)
    gate = ("refused", 15001, "gate", "refused")
    assert found[:2] == [gate] * 2
    guard = [("refused", None, "guard", result) for result in ("unanswered",) * 2 + ("failed",)]
    assert found[2:] == ([] if backend == EBPF else guard)


def test_open_gate_is_named_for_what_it_lets_past() -> None:
    built()
    with lab("flow", proxy=False) as pod:
        try:
            capture(pod.pod, {**SETTINGS, "gate": "open"}, EBPF)
            with flowing(pod.pod) as flows:
                assert pod.dial() == ("service", "service", "app", "app")
                found = {what(d) for d in flows.documents()}
        finally:
            release(pod.pod)
    assert found == {("exempt", None, "gate", "connected")}


def test_gate_that_was_closed_excuses_nothing(pod: Lab) -> None:
    capture(pod.pod, {**SETTINGS, "gate": "open"}, EBPF)
    with flowing(pod.pod, "--port", "8000") as flows:
        assert pod.dial()[:2] == ("proxy-15001", "proxy-15001")
        for hook in ("connect4", "connect6"):
            (bpf_pins.links() / hook).unlink()
        wait_for(lambda: pod.dial()[:2] == ("service",) * 2, "the programs are detached")
        became = [d["became"] for d in flows.documents()]
    assert (became[0], became[-1], {*became}) == ("proxied", "bypassed", {"proxied", "bypassed"})


@pytest.mark.parametrize("backend", ["nftables", EBPF])
def test_every_connection_of_many_is_told_of_once(pod: Lab, backend: str) -> None:
    capture(pod.pod, SETTINGS, backend)
    with flowing(pod.pod) as flows:
        pod.flood()
        time.sleep(0.5)
        made = pod.stop()
        found = flows.documents()
    assert sum(d.get("lost", 1) for d in found) == sum(made.values())
    assert {d["became"] for d in found if "lost" not in d} == {"proxied"}


def test_capture_that_comes_later_is_seen_as_well(pod: Lab) -> None:
    """The programs of eBPF are then called after those that look on."""
    with flowing(pod.pod, "--port", "8000,8001") as flows:
        assert pod.dial()[:2] == ("service", "service")
        before = [what(flows.next())[:3] for _ in range(2)]
        capture(pod.pod, SETTINGS, EBPF)
        assert pod.dial()[:2] == ("proxy-15001", "proxy-15001")
        pod.client.ask("dial", targets=[(PEER[4], 8001)], timeout_s=DEADLINE_S)
        assert_in_sync(pod.pod, SETTINGS, EBPF)
        found = [what(d)[:3] for d in flows.documents()]
    assert before == [("uncaptured", None, None)] * 2
    assert found == [
        *[("proxied", 15001, None)] * 2,
        ("exempt", None, "outbound_ports_exclude"),
    ]


# --- who and when ---------------------------------------------------------------------------------


def test_process_is_named_though_it_has_ended(pod: Lab) -> None:
    with flowing(pod.pod) as flows:
        before = time.time()
        code = f"import os, socket; os.setuid(4711); socket.socket().connect(('{PEER[4]}', 8000))"
        done = subprocess.Popen(
            ("nsenter", f"--net={path_of(pod.pod)}", sys.executable, "-I", "-S", "-c", code)
        )
        assert done.wait(DEADLINE_S) == 0
        found = flows.next()
    assert (found["pid"], found["uid"]) == (done.pid, 4711)
    assert found["process"].startswith("python")
    assert found["pod"] == pod.pod
    shown = time.strptime(found["time"][:19], "%Y-%m-%dT%H:%M:%S")
    assert abs(time.mktime(shown) - time.mktime(time.gmtime(before))) < DEADLINE_S


DIAL_THERE = """
import ctypes, os, socket
for kind in ("user", "net"):
    if ctypes.CDLL(None).setns(os.open("/proc/{pid}/ns/" + kind, os.O_RDONLY), 0):
        raise SystemExit("setns")
made = socket.socket()
os.setuid({uid})
made.connect_ex(("127.0.0.1", 81))
"""


def test_users_are_those_of_the_pods_own_user_namespace(user_namespace: int) -> None:
    inside(f"/proc/{user_namespace}/ns/net", "ip", "link", "set", "lo", "up")
    with flowing(f"pid:{user_namespace}", "--uid", "1337,1000") as flows:
        for uid in (7, 1337, 1000):
            code = DIAL_THERE.format(pid=user_namespace, uid=uid)
            subprocess.run((sys.executable, "-I", "-S", "-c", code), check=True)
        assert [d["uid"] for d in flows.documents()] == [1337, 1000]


# --- what is asked for ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        (("--uid", "1337"), {("out", 1337, 8000), ("out", 1337, 8001)}),
        (("--uid", "1,1000", "--port", "8000"), {("out", 1000, 8000)}),
        (("--port", "8001,9090"), {("out", 1000, 8001), ("out", 1337, 8001), ("in", 1000, 9090)}),
    ],
)
def test_filters_leave_only_what_is_asked_for(
    pod: Lab, options: tuple[str, ...], shown: set[tuple[str, int, int]]
) -> None:
    with flowing(pod.pod, *options) as flows:
        for node in (pod.client, pod.proxy):
            targets = [(PEER[4], 8000), (PEER[4], 8001)]
            node.ask("dial", targets=targets, timeout_s=DEADLINE_S)
        pod.peer.ask("dial", targets=[(POD[4], 9090)], timeout_s=DEADLINE_S)
        found = flows.documents()
    ports = ((d["direction"], d["uid"], int(d["destination"].rpartition(":")[2])) for d in found)
    assert set(ports) == shown


@pytest.mark.parametrize(
    ("options", "mistake"),
    [
        (("--uid", "root"), "--uid 'root' is not a number from 0 to"),
        (("--uid", ""), "--uid '' is not a number"),
        (("--port", "0"), "--port '0' is not a number from 1 to 65535"),
        (("--port", "80,65536"), "--port '65536' is not"),
        (("--port", ",".join(map(str, range(1, 66)))), "65 values, and 64 are the most"),
        (("--count", "0"), "--count '0' is not"),
        (("--count", "1,2"), "--count '1,2' is not one number"),
        (("--for", "-1"), "--for '-1' is not a number of seconds above 0"),
        (("--for", "nan"), "--for 'nan' is not"),
    ],
)
def test_wrong_filters_are_refused(options: tuple[str, ...], mistake: str) -> None:
    code, out, err = command("flows", *options)
    assert (code, out) == (2, "")
    assert mistake in err


@pytest.mark.parametrize("target", ["it-nowhere", "host", "pid:0", "shop/none"])
def test_what_is_no_pod_is_refused(target: str) -> None:
    code, out, err = command("flows", target)
    assert (code, out) == (3, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1


# --- every pod of the node ------------------------------------------------------------------------


def test_pods_are_followed_as_they_come_and_go(pod: Lab) -> None:
    code = "import socket; socket.socket().connect_ex(('127.0.0.1', 81))"
    with flowing() as flows, namespace("late") as name:
        for each, backend in ((pod.pod, "nftables"), (name, "iptables-nft")):
            capture(each, SETTINGS, backend)
        seen: set[str] = set()

        def both() -> bool:
            for each in (pod.pod, name):
                inside(each, sys.executable, "-I", "-S", "-c", code)
            seen.update(d["pod"] for d in flows.by_now())
            return {pod.pod, name} <= seen

        wait_for(both, "both pods are watched", timeout_s=DEADLINE_S)
        inode = os.stat(path_of(name)).st_ino
        subprocess.run(("ip", "netns", "del", name), check=True)
        wait_for(
            lambda: inode not in files_of(flows.process.pid),
            "the namespace is let go",
            timeout_s=DEADLINE_S,
        )
        flows.end()


def files_of(pid: int) -> set[int]:
    """Return the inodes of what a process holds open."""
    found = set()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.add(path.stat().st_ino)
    return found


def test_watch_ends_with_the_only_pod(tmp_path: Path) -> None:
    with namespace("short") as name, flowing(name) as flows:
        subprocess.run(("ip", "netns", "del", name), check=True)
        assert flows.ended() == []


# --- beginning and end ----------------------------------------------------------------------------


def test_watch_ends_cleanly_on_ctrl_c(pod: Lab) -> None:
    """The other tests end theirs by SIGTERM."""
    with flowing(pod.pod) as flows:
        pod.client.ask("dial", targets=[(PEER[4], 8000)], timeout_s=DEADLINE_S)
        assert len(flows.end(signal.SIGINT)) == 1


def test_killed_watch_leaves_no_program_behind(pod: Lab) -> None:
    capture(pod.pod, SETTINGS, EBPF)
    with flowing(pod.pod) as flows:
        (watcher,) = children(flows.process.pid)
        mine = programs_held_by(watcher)
        assert len(mine & attached()) == len(PROGRAMS)
        flows.process.kill()
        wait_for(lambda: not Path(f"/proc/{watcher}").exists(), "its watcher ends")
    assert not mine & attached()
    assert all(name.startswith("proxy") for name in pod.dial())


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def programs_held_by(pid: int) -> set[int]:
    held = (path.read_text() for path in Path(f"/proc/{pid}/fdinfo").iterdir())
    return {int(number) for text in held for number in re.findall(r"prog_id:\s*(\d+)", text)}


def attached() -> set[int]:
    """Return the programs that every process meets, of whomever."""
    root = bpf_pins.cgroup_root()
    assert root is not None
    fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return {each for _, where in PROGRAMS.values() for each in bpf.attached(fd, where)}
    finally:
        os.close(fd)


def test_death_of_the_process_that_watches_is_told(pod: Lab) -> None:
    with flowing(pod.pod) as flows:
        (watcher,) = children(flows.process.pid)
        os.kill(watcher, signal.SIGKILL)
        assert flows.process.wait(DEADLINE_S) == 3
        assert flows.process.stderr is not None
        assert "the process that watches ended" in flows.process.stderr.read()


def test_count_and_duration_end_the_watch(pod: Lab) -> None:
    with flowing(pod.pod, "--count", "2") as flows:
        pod.client.ask("dial", targets=[(PEER[4], 8000)] * 5, timeout_s=DEADLINE_S)
        assert len(flows.ended()) == 2
    with flowing(pod.pod, "--for", "0.2") as flows:
        assert flows.ended() == []


def test_table_is_for_people(pod: Lab) -> None:
    capture(pod.pod, SETTINGS, "nftables")
    with flowing(pod.pod, "--count", "1", table=True) as flows:
        pod.client.ask("dial", targets=[(PEER[6], 8000)], timeout_s=DEADLINE_S)
        head, line = flows.ended()
    assert head.split()[:5] == ["TIME", "POD", "WAY", "PROCESS", "UID"]
    assert f"1000  {endpoint(PEER[6], 8000)}" in line
    assert line.endswith("to the proxy, port 15001\n")
    assert "\033" not in head + line


def test_connections_that_were_too_many_are_counted(pod: Lab) -> None:
    with flowing(pod.pod, "--port", "53") as flows:
        (watcher,) = children(flows.process.pid)
        os.kill(watcher, signal.SIGSTOP)
        code = f"import socket\ns = socket.socket(2, 2)\nfor _ in range({MANY}):\n"
        code += f"    s.sendto(b'?', ('{POD[4]}', 53))"
        inside(pod.pod, sys.executable, "-I", "-S", "-c", code)
        os.kill(watcher, signal.SIGCONT)
        shown, lost = 0, 0
        while shown + lost < MANY:
            found = flows.next()
            shown, lost = shown + ("lost" not in found), lost + found.get("lost", 0)
        assert shown + lost == MANY
        assert min(shown, lost) > 0
        flows.end()


# --- what is missing ------------------------------------------------------------------------------


def test_missing_compiler_is_said_with_how_to_install_it(netns: str, tmp_path: Path) -> None:
    folder = "/usr/lib/python3/dist-packages"
    done = without(folder, tmp_path, *COMMAND, netns)
    assert done.returncode == 3
    assert done.stdout == ""
    assert "flows needs bcc" in done.stderr
    assert "apt-get install python3-bpfcc" in done.stderr
    assert done.stderr.count("\n") == 1


def test_another_program_of_that_name_is_not_taken_for_it(netns: str, tmp_path: Path) -> None:
    (tmp_path / "bcc").mkdir()
    (tmp_path / "bcc" / "__init__.py").write_text("lattice = 1")
    done = without("/usr/lib/python3/dist-packages", tmp_path, *COMMAND, netns)
    assert done.returncode == 3
    assert "is another program" in done.stderr


def without(folder: str, instead: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command where it sees another folder in that place."""
    script = 'mount --bind "$1" "$2" && shift 2 && exec "$@"'
    program = (sys.executable, "-m", *arguments)
    return subprocess.run(
        ("unshare", "--mount", "sh", "-c", script, "sh", str(instead), folder, *program),
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_S,
        cwd=ROOT,
    )


def test_whoever_is_not_root_is_told() -> None:
    done = subprocess.run(
        (*("setpriv", "--reuid", "1000", "--clear-groups"), sys.executable, "-m", *COMMAND),
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert (done.returncode, done.stdout) == (3, "")
    assert "needs root" in done.stderr
