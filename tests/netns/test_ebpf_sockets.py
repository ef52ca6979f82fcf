"""What applications and the proxy do with sockets when eBPF turns their connections."""

import errno
import json
import socket
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent.capture.apply import apply, remove
from agent.kernel.netns import Netns
from agent.model.settings import parse
from agent.model.state import EBPF
from tests.support import ebpf_proxy
from tests.support.ebpf import built
from tests.support.netns import inside, namespace, path_of

pytestmark = pytest.mark.netns

SETTINGS = {
    "inbound_ports_include": "*",
    "outbound_ip_ranges_include": "*",
    "enable_ipv6": True,
    "redirect_dns": True,
    "capture_all_dns": True,
}
POD, POD6, PEER, PEER6 = "10.81.0.2", "fd81::2", "10.81.0.1", "fd81::1"


class Pod:
    """A captured pod with a proxy in it, and a peer next to it."""

    def __init__(self, name: str, peer: str, proxy: subprocess.Popen[str]) -> None:
        self.name = name
        self.peer = peer
        self._proxy = proxy

    def tell(self, command: str) -> None:
        """Tell the proxy something and wait until it is done."""
        assert self._proxy.stdin is not None
        assert self._proxy.stdout is not None
        self._proxy.stdin.write(f"{command}\n")
        self._proxy.stdin.flush()
        assert self._proxy.stdout.readline() == "done\n"

    def app(self, code: str, *, uid: int = 1000) -> Any:
        """Run a piece of Python as an application; return what it prints as JSON."""
        start = f"import os, json, socket, struct\nos.setgid({uid}); os.setuid({uid})\n"
        start += "socket.setdefaulttimeout(20)\n"
        command = (sys.executable, "-I", "-S", "-c", start + textwrap.dedent(code))
        return json.loads(inside(self.name, *command))

    def arrive(self, count: int) -> Counter[str]:
        """Connect from outside so often; return which listener answered, or what happened."""
        code = f"""
            import json, socket
            found = []
            for _ in range({count}):
                try:
                    with socket.create_connection(("{POD}", 8080), 5) as made:
                        found.append(json.loads(made.recv(200))[2])
                except OSError as error:
                    found.append(type(error).__name__)
            print(json.dumps(found))
        """
        command = (sys.executable, "-I", "-S", "-c", textwrap.dedent(code))
        return Counter(json.loads(inside(self.peer, *command)))


@pytest.fixture(scope="module")
def pod() -> Iterator[Pod]:
    built()
    with namespace("sock") as name, namespace("sockp") as peer:
        inside(
            name,
            *("ip", "-batch", "-"),
            stdin=f"""
link add eth0 type veth peer name eth0 netns {peer}
addr add {POD}/24 dev eth0
addr add {POD6}/64 dev eth0 nodad
link set eth0 up
""",
        )
        addresses = f"addr add {PEER}/24 dev eth0\naddr add {PEER6}/64 dev eth0 nodad\n"
        inside(peer, "ip", "-batch", "-", stdin=f"{addresses}link set eth0 up\n")
        routes = f"route add default via {PEER}\nroute add default via {PEER6}\n"
        inside(name, "ip", "-batch", "-", stdin=routes)
        with Netns.open(path_of(name)) as opened:
            apply(opened, parse(SETTINGS), backend=EBPF)
            command = (sys.executable, "-I", "-S", str(Path(ebpf_proxy.__file__)))
            proxy = subprocess.Popen(
                ("nsenter", f"--net={path_of(name)}", "--", *command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            with proxy:
                assert proxy.stdout is not None
                assert proxy.stdout.readline() == "ready\n"
                yield Pod(name, peer, proxy)
            remove(opened)


# --- TCP ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "dialled", "meant", "own"),
    [
        ("AF_INET", "10.96.0.1", "10.96.0.1", POD),
        ("AF_INET6", "fd96::1", "fd96::1", POD6),
        ("AF_INET6", "::ffff:10.96.0.1", "10.96.0.1", f"::ffff:{POD}"),
    ],
)
def test_everyone_sees_whom_the_application_dialled(
    pod: Pod, family: str, dialled: str, meant: str, own: str
) -> None:
    told, here, there = pod.app(
        f"""
        made = socket.socket(socket.{family})
        made.connect(("{dialled}", 8080))
        told = json.loads(made.recv(200))
        print(json.dumps([told, made.getsockname()[:2], made.getpeername()[:2]]))
        """
    )
    assert told[0] == [meant, 8080]
    assert told[1] == own.removeprefix("::ffff:")
    assert here[0] == own
    assert there == [dialled, 8080]


def test_connecting_without_waiting(pod: Pod) -> None:
    code, error, told = pod.app(
        """
        import select
        made = socket.socket()
        made.setblocking(False)
        code = made.connect_ex(("10.96.0.2", 80))
        select.select([], [made], [], 5)
        error = made.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        select.select([made], [], [], 5)
        print(json.dumps([code, error, json.loads(made.recv(200))[0]]))
        """
    )
    assert (code, error, told) == (errno.EINPROGRESS, 0, ["10.96.0.2", 80])


def test_one_source_port_for_ever_new_destinations(pod: Pod) -> None:
    """What was published for an earlier connection of that port must not count for a later one."""
    wrong = pod.app(
        """
        wrong = []
        for number in range(1, 201):
            made = socket.socket()
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            made.bind(("", 34567))
            made.connect((f"10.96.1.{number}", 1000 + number))
            told = json.loads(made.recv(200))[:2]
            if told != [[f"10.96.1.{number}", 1000 + number], "10.81.0.2"]:
                wrong.append(told)
            made.close()
        print(json.dumps(wrong))
        """
    )
    assert wrong == []


def test_a_refused_connection_leaves_nothing_to_the_next(pod: Pod) -> None:
    """The proxy's own call to its port, from a source port whose handshake came to nothing."""
    told = pod.app(
        """
        def dial(host, port):
            made = socket.socket()
            made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind(("127.0.0.1", 34568))
            try:
                made.connect((host, port))
                return json.loads(made.recv(200))[0]
            finally:
                made.close()
        try:
            dial("10.81.0.2", 15006)    # the inbound port, where nobody listens yet
        except ConnectionRefusedError:
            pass
        print(json.dumps(dial("127.0.0.1", 15001)))
        """,
        uid=1337,
    )
    assert told == ["127.0.0.1", 15001]


def test_fast_open_knows_the_destination(pod: Pod) -> None:
    inside(pod.name, "sysctl", "-q", "-w", "net.ipv4.tcp_fastopen=1027")
    told = pod.app(
        """
        told = []
        for number in (1, 2, 3):
            made = socket.socket()
            made.setblocking(True)
            made.sendto(b"data", socket.MSG_FASTOPEN, (f"10.96.2.{number}", 80))
            told.append(json.loads(made.recv(200))[0])
            made.close()
        print(json.dumps(told))
        """
    )
    assert told == [[f"10.96.2.{number}", 80] for number in (1, 2, 3)]
    with open(f"/proc/{inside_pid(pod)}/net/netstat") as file:
        assert fast_opens(file.read()) > 0


def inside_pid(pod: Pod) -> int:
    return pod._proxy.pid


def fast_opens(netstat: str) -> int:
    names, values = (line.split() for line in netstat.splitlines() if line.startswith("TcpExt"))
    return int(values[names.index("TCPFastOpenPassive")])


def test_a_socket_may_connect_again_elsewhere(pod: Pod) -> None:
    told, peer = pod.app(
        """
        serving = socket.create_server(("127.0.0.1", 0))
        made = socket.socket()
        made.connect(("10.96.0.3", 80))
        told = json.loads(made.recv(200))[0]
        made.close()
        made = socket.socket()
        made.connect(serving.getsockname())
        print(json.dumps([told, made.getpeername() == serving.getsockname()]))
        """
    )
    assert (told, peer) == (["10.96.0.3", 80], True)


def test_a_socket_bound_to_a_device_reaches_the_proxy(pod: Pod) -> None:
    """Of root. Others may not release it, and wait in vain as they do with rules."""
    told = pod.app(
        """
        made = socket.socket()
        made.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"eth0")
        made.connect(("10.96.0.4", 80))
        print(json.dumps(json.loads(made.recv(200))[0]))
        """,
        uid=0,
    )
    assert told == ["10.96.0.4", 80]


def test_a_process_is_known_by_its_real_ids(pod: Pod) -> None:
    """Not by the effective ones, which rules look at, nor by those that made the socket."""
    told, refused = pod.app(
        """
        made = socket.socket()
        os.setresgid(1000, 1337, 0)
        os.setresuid(1000, 1337, 0)
        made.connect(("10.96.0.5", 80))
        told = json.loads(made.recv(200))[0]
        os.setresuid(-1, 0, -1)
        os.setresgid(1337, 0, 0)
        try:
            socket.socket().connect(("10.81.0.1", 80))
        except ConnectionRefusedError:
            print(json.dumps([told, True]))
        """,
        uid=0,
    )
    assert (told, refused) == (["10.96.0.5", 80], True)


def test_a_destination_without_a_route_is_answered_by_the_proxy(pod: Pod) -> None:
    inside(pod.name, "ip", "-6", "route", "del", "default")
    try:
        told = pod.app(
            """
            made = socket.socket(socket.AF_INET6)
            made.connect(("2001:db8::1", 80))
            print(json.dumps(json.loads(made.recv(200))[0]))
            """
        )
    finally:
        inside(pod.name, "ip", "-6", "route", "add", "default", "via", PEER6)
    assert told == ["2001:db8::1", 80]


def test_link_local_destinations_are_left_alone(pod: Pod) -> None:
    shown = inside(pod.peer, "ip", "-o", "-6", "addr", "show", "dev", "eth0", "scope", "link")
    address = shown.split()[3].partition("/")[0]
    refused = pod.app(
        f"""
        made = socket.socket(socket.AF_INET6)
        error = made.connect_ex(("{address}", 80, 0, socket.if_nametoindex("eth0")))
        print(error)
        """
    )
    assert refused == errno.ECONNREFUSED


# --- DNS ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "first", "second"),
    [
        ("AF_INET", "10.96.0.53", "10.96.0.54"),
        ("AF_INET6", "fd96::53", "fd96::54"),
        ("AF_INET6", "::ffff:10.96.0.53", "::ffff:10.96.0.54"),
    ],
)
def test_an_answer_comes_from_the_server_that_was_asked(
    pod: Pod, family: str, first: str, second: str
) -> None:
    unconnected, connected = pod.app(
        f"""
        found = []
        made = socket.socket(socket.{family}, socket.SOCK_DGRAM)
        for server in ("{first}", "{second}"):
            made.sendto(b"ping", (server, 53))
            data, source = made.recvfrom(100)
            found.append([data.decode(), source[0], source[1]])
        made = socket.socket(socket.{family}, socket.SOCK_DGRAM)
        made.connect(("{first}", 53))
        made.send(b"pong")
        data, source = made.recvfrom(100)
        peer = made.getpeername()
        print(json.dumps([found, [data.decode(), source[0], source[1], peer[0], peer[1]]]))
        """
    )
    assert unconnected == [["ping", first, 53], ["ping", second, 53]]
    assert connected == ["pong", first, 53, first, 53]


def test_two_servers_at_once_look_like_the_last(pod: Pod) -> None:
    """Inherent: the program sees no payload, so it cannot know which query an answer is for."""
    sources = pod.app(
        """
        made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        for server in ("10.96.0.53", "10.96.0.54"):
            made.sendto(b"ping", (server, 53))
        print(json.dumps([made.recvfrom(100)[1][0] for _ in range(2)]))
        """
    )
    assert sources == ["10.96.0.54", "10.96.0.54"]


def test_resolver_of_the_c_library(pod: Pod, tmp_path: Path) -> None:
    file = tmp_path / "resolv.conf"
    file.write_text("nameserver 10.96.0.53\nnameserver fd96::53\noptions timeout:5 attempts:1\n")
    look_up = "import socket; print(sorted({a[4][0] for a in socket.getaddrinfo('web.test', 80)}))"
    script = f'mount --bind {file} /etc/resolv.conf && exec {sys.executable} -I -S -c "$0"'
    found = inside(pod.name, "unshare", "--mount", "sh", "-c", script, look_up).strip()
    assert found == "['192.0.2.7', '2001:db8::7']"


# --- the proxy's listeners ------------------------------------------------------------------------


def test_listeners_of_a_proxy_that_restarts(pod: Pod) -> None:
    """Old and new processes share the port; whoever is there is found, whichever came first."""
    assert pod.arrive(3) == {"ConnectionRefusedError": 3}
    pod.tell("open a")
    pod.tell("open b")
    both = pod.arrive(60)
    assert set(both) == {"a", "b"}
    pod.tell("close b")
    assert set(pod.arrive(10)) == {"a"}
    pod.tell("open c")
    pod.tell("close a")
    assert set(pod.arrive(10)) == {"c"}
    pod.tell("close c")
    assert pod.arrive(3) == {"ConnectionRefusedError": 3}


def test_processes_of_the_node_are_left_alone(pod: Pod) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as serving,
        socket.create_connection(serving.getsockname()) as made,
    ):
        assert made.getpeername() == serving.getsockname()
