"""What a process in the pod can and cannot do about a capture by eBPF."""

import contextlib
import errno
import json
import os
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.capture.apply import apply
from agent.capture.check import check
from agent.kernel import bpf, bpf_pins
from agent.kernel.netns import Netns
from agent.model.settings import parse
from agent.model.state import EBPF
from tests.support.ebpf import own_node
from tests.support.ebpf_pod import PREAMBLE, PYTHON, SETTINGS, Pod, captured_pod, free_pod
from tests.support.netns import inside, path_of, run

pytestmark = pytest.mark.netns

DIAL = 'made = socket.socket()\nmade.connect(("10.96.0.1", 80))\n'
SAY = "print(json.dumps(json.loads(made.recv(200))[0]))\n"
CAPTURED, PAST = ["10.96.0.1", 80], ["world", 0]


@pytest.fixture(scope="module")
def pod(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pod]:
    with captured_pod("undo", tmp_path_factory.mktemp("undo")) as made:
        yield made


# --- nothing of this helps ------------------------------------------------------------------------


def test_flushing_and_deleting_every_rule(pod: Pod) -> None:
    inside(pod.name, "nft", "flush", "ruleset")
    for tool in ("iptables-legacy", "ip6tables-legacy"):
        inside(pod.name, tool, "-t", "nat", "-F")
    inside(pod.name, "ip", "rule", "flush", check=False)
    inside(pod.name, "ip", "rule", "add", "from", "all", "lookup", "local", "pref", "0")
    inside(pod.name, "ip", "rule", "add", "from", "all", "lookup", "main", "pref", "32766")
    assert pod.app(DIAL + SAY) == CAPTURED


@pytest.mark.parametrize("protocol", [6, 262], ids=["tcp", "mptcp"])
@pytest.mark.parametrize("host", ["0.0.0.0", "10.81.0.2", "::", "::ffff:0.0.0.0"])
def test_taking_the_proxys_ports(pod: Pod, host: str, protocol: int) -> None:
    """However the port is named; a free one, also one that the kernel chooses, may be taken."""
    family = "AF_INET6" if ":" in host else "AF_INET"
    taken = pod.app(
        f"""
        taken = []
        for port in (15001, 15006, 15053, 0, 15099):
            made = socket.socket(socket.{family}, socket.SOCK_STREAM, {protocol})
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            try:
                made.bind(({host!r}, port))
                made.listen()
                taken.append(port)
            except PermissionError:
                pass
        print(json.dumps(taken))
        """,
        uid=0,
    )
    assert taken == [0, 15099]


def test_taking_the_port_for_dns_by_udp(pod: Pod) -> None:
    code = """
        made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            made.bind(("127.0.0.1", 15053)); print('"taken"')
        except PermissionError:
            print('"refused"')
    """
    assert pod.app(code, uid=0) == "refused"


@pytest.mark.parametrize("port", [15001, 15006])
def test_calling_the_proxys_ports_oneself(pod: Pod, port: int) -> None:
    """What was dialled is what the proxy is told: its own port, and nobody else's destination."""
    pod.tell("open a")
    told = pod.app(
        f"""
        told = []
        for _ in range(20):
            made = socket.socket()
            made.connect(("127.0.0.1", {port}))
            told.append(tuple(json.loads(made.recv(200))[0]))
        print(json.dumps(sorted(set(told))))
        """
    )
    pod.tell("close a")
    assert told == [["127.0.0.1", port]]


def test_dialling_odd_ports(pod: Pod) -> None:
    """Also those that mean something in the pod itself."""
    ports = [1, 22, 443, 15001, 15006, 15008, 15020, 15053, 65535]
    told = pod.app(
        f"""
        told = []
        for port in {ports}:
            made = socket.socket()
            made.connect(("10.96.0.1", port))
            told.append(json.loads(made.recv(200))[0])
        print(json.dumps(told))
        """
    )
    assert told == [["10.96.0.1", port] for port in ports]


@contextlib.contextmanager
def cgroups() -> Iterator[Path]:
    """Yield the root of cgroup2, mounted for the moment where it is nowhere."""
    if root := bpf_pins.cgroup_root():
        yield Path(root)
        return
    where = Path(run("mktemp", "-d", "-p", "/run", "it-cgroup-XXXXXX").strip())
    run("mount", "-t", "cgroup2", "none", str(where))
    try:
        yield where
    finally:
        run("umount", str(where))
        where.rmdir()


def test_another_cgroup(pod: Pod) -> None:
    """A process may go anywhere below the root of cgroup2, or start there, and take a socket along.

    It may also hide the rest of the hierarchy from itself.
    """
    with cgroups() as root:
        group = root / f"it-undo-{os.getpid()}"
        group.mkdir()
        try:
            move = f'open("{group}/cgroup.procs", "w").write(str(os.getpid()))\n'
            made, connect = DIAL.splitlines(keepends=True)
            told = [
                pod.app(move + DIAL + SAY, uid=0),
                pod.app(made + move + connect + SAY, uid=0),
                pod.app(STARTED_IN_THERE.format(group=group) + DIAL + SAY, uid=0),
                pod.app(move + DIAL + SAY, uid=0, under=("unshare", "--cgroup", "--mount")),
            ]
        finally:
            group.rmdir()
    assert told == [CAPTURED] * 4


STARTED_IN_THERE = """
class Arguments(ctypes.Structure):  # of clone3, as far as it is used
    _fields_ = [(name, ctypes.c_uint64) for name in "abcdefghijk"]
given = Arguments(a=0x200000000, e=17, k=os.open("{group}", os.O_RDONLY))  # CLONE_INTO_CGROUP
child = ctypes.CDLL(None).syscall(435, ctypes.byref(given), ctypes.sizeof(given))
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) if child > 0 else 1)
"""


def test_a_namespace_inside_the_pod_has_no_way_out(pod: Pod) -> None:
    """It has a loopback of its own; a socket of the pod that is used there is captured."""
    alone, brought = pod.app(
        """
        made = socket.socket()
        if ctypes.CDLL(None).unshare(0x10000000 | 0x40000000):
            raise SystemExit("unshare")
        try:
            socket.socket().connect(("10.96.0.1", 80))
        except OSError as error:
            alone = error.errno
        made.connect(("10.96.0.1", 80))
        print(json.dumps([alone, json.loads(made.recv(200))[0]]))
        """
    )
    assert (alone, brought) == (101, CAPTURED)


def test_a_socket_that_was_handed_in_or_out(pod: Pod) -> None:
    """Whose namespace the socket is of counts, not where the process is that uses it."""
    code = f"""
    made = socket.socket()
    there = os.open({str(path_of(pod.name))!r}, os.O_RDONLY)
    if ctypes.CDLL(None).setns(there, 0x40000000):
        raise SystemExit("setns")
    mine = socket.socket()
    home = os.open({str(path_of(pod.world))!r}, os.O_RDONLY)
    if ctypes.CDLL(None).setns(home, 0x40000000):
        raise SystemExit("setns")
    told = []
    for each in (made, mine):
        each.connect(("10.96.0.1", 80))
        told.append(json.loads(each.recv(200))[0])
    print(json.dumps(told))
    """
    script = PREAMBLE + "\n".join(line.removeprefix("    ") for line in code.splitlines())
    found = json.loads(inside(pod.world, *PYTHON, "-c", script))
    assert found == [PAST, CAPTURED]


def test_a_program_that_is_executed_and_its_children(pod: Pod) -> None:
    """The descriptor and the process outlive exec, and so does the capture."""
    script = PREAMBLE + "made = socket.socket(fileno=int(sys.argv[1]))\n"
    script += 'made.connect(("10.96.0.1", 80))\n' + SAY
    told = pod.app(
        f"""
        made = socket.socket()
        os.set_inheritable(made.fileno(), True)
        if os.fork() == 0:
            os.execv(sys.executable, [sys.executable, "-I", "-S", "-c", {script!r},
                                      str(made.fileno())])
        os.wait()
        """,
        uid=0,
    )
    assert told == CAPTURED


def test_detaching_needs_more_than_the_right_to_administer_the_network(pod: Pod) -> None:
    """By the number of a link or a program, or at the cgroup, of which it has a descriptor."""
    with bpf.opened(bpf.get(bpf_pins.links() / "connect4")) as fd:
        link, program = struct.unpack("=4xII", bpf.info(fd, 12))
    with cgroups() as root:
        answers = pod.app(
            f"""
            libc = ctypes.CDLL(None, use_errno=True)
            def bpf(command, *words):
                raw = struct.pack(f"={{len(words)}}I", *words).ljust(120, bytes(1))
                held = ctypes.create_string_buffer(raw, len(raw))
                done = libc.syscall({SYSCALL_BPF}, command, held, len(raw))
                return done if done >= 0 else -ctypes.get_errno()
            group = os.open({str(root)!r}, os.O_RDONLY)
            by_link, by_program = bpf(30, {link}), bpf(13, {program})   # BPF_..._GET_FD_BY_ID
            at_cgroup = bpf(9, group, 0, 10, 0)                         # BPF_PROG_DETACH, connect4
            print(json.dumps([by_link, by_program, at_cgroup]))
            """,
            uid=0,
            under=("setpriv", "--bounding-set=-all,+net_admin", "--"),
        )
    assert answers[:2] == [-errno.EPERM, -errno.EPERM]
    assert answers[2] < 0
    assert pod.app(DIAL + SAY) == CAPTURED


SYSCALL_BPF = 321 if os.uname().machine == "x86_64" else 280


# --- what does, and is told -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        (
            "add table ip x; add chain ip x o { type nat hook output priority -100; }; "
            "add rule ip x o tcp dport 15001 dnat to 10.96.0.9:80",
            "nftables ip table x, chain o: 1 foreign rules at output may lead past the proxy",
        ),
        (
            "iptables-legacy -t nat -A OUTPUT -d 127.0.0.1 -p tcp -j DNAT --to 10.96.0.9:80",
            "iptables-legacy ipv4 nat: 1 foreign translations may lead past the proxy",
        ),
    ],
    ids=["nftables", "iptables-legacy"],
)
def test_rules_that_translate_what_was_turned_are_named(pod: Pod, rules: str, said: str) -> None:
    tool = ("nft", rules) if rules.startswith("add") else tuple(rules.split())
    inside(pod.name, *tool)
    try:
        assert pod.app(DIAL + SAY) == PAST
        with Netns.open(path_of(pod.name)) as opened:
            assert said in check(opened, parse(SETTINGS), backend=EBPF).foreign
    finally:
        inside(pod.name, "nft", "flush", "ruleset")
        inside(pod.name, "iptables-legacy", "-t", "nat", "-F")
    assert pod.app(DIAL + SAY) == CAPTURED


# --- sockets that were there before ---------------------------------------------------------------


def test_sockets_that_were_there_before_the_capture(tmp_path: Path) -> None:
    """What is connected stays so; what is not, bound or not, is captured when it connects."""
    with own_node(tmp_path), free_pod("early") as pod:
        pipe = subprocess.PIPE
        command = ("nsenter", f"--net={path_of(pod.name)}", "--", *PYTHON, "-c", PREAMBLE + EARLY)
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            with Netns.open(path_of(pod.name)) as opened:
                apply(opened, parse(SETTINGS), backend=EBPF)
            told = json.loads(process.communicate("go\n")[0])
        assert told == [PAST, *[["10.96.0.2", 80]] * 3, "ping"]


EARLY = """
os.setgid(1000); os.setuid(1000)
connected, fresh, bound, again = (socket.socket() for _ in range(4))
asking = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
bound.bind(("10.81.0.2", 0))
for each in (connected, again):
    each.connect(("10.96.0.1", 80))
again.recv(200)
again.shutdown(socket.SHUT_RDWR)
unspecified = struct.pack("=HH12x", socket.AF_UNSPEC, 0)
ctypes.CDLL(None).connect(again.fileno(), unspecified, 16)
print("ready", flush=True)
input()
told = [json.loads(connected.recv(200))[0]]
for each in (fresh, bound, again):
    each.connect(("10.96.0.2", 80))
    told.append(json.loads(each.recv(200))[0])
asking.sendto(b"ping", ("10.96.0.2", 53))
print(json.dumps([*told, asking.recv(100).decode()]))
"""
