"""What applications and the proxy do with sockets when eBPF turns their connections."""

import errno
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.ebpf_pod import PEER6, POD, POD6, Pod, captured_pod
from tests.support.netns import inside
from tests.support.pod import wait_for

pytestmark = pytest.mark.netns


@pytest.fixture(scope="module")
def pod(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pod]:
    with captured_pod("sock", tmp_path_factory.mktemp("sock")) as made:
        yield made


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
    assert fast_opens(Path(f"/proc/{pod.proxy_pid}/net/netstat").read_text()) > 0


def fast_opens(netstat: str) -> int:
    names, values = (line.split() for line in netstat.splitlines() if line.startswith("TcpExt"))
    return int(values[names.index("TCPFastOpenPassive")])


@pytest.mark.parametrize("own", ["", POD, POD6], ids=["unbound", "bound", "bound IPv6"])
def test_nothing_lingers_when_a_client_closes_before_the_proxy_answers(pod: Pod, own: str) -> None:
    """The kernel answers for the client then, which it must find a way for."""
    families = [("AF_INET", "10.96.0.1"), ("AF_INET6", "fd96::1")]
    dialled = [each for each in families if not own or (":" in own) == (":" in each[1])]
    os.kill(pod.proxy_pid, signal.SIGSTOP)
    try:
        pod.app(
            f"""
            for family, host in {dialled}:
                for _ in range(8):
                    made = socket.socket(getattr(socket, family))
                    made.bind(("{own}", 0)) if "{own}" else None
                    made.connect((host, 8080))
                    made.close()
            print(0)
            """
        )
    finally:
        os.kill(pod.proxy_pid, signal.SIGCONT)
    wait_for(lambda: not inside(pod.name, *LINGERING).strip(), "every end is gone")


LINGERING = ("ss", "-Htn", "state", "last-ack", "state", "close-wait", "state", "established")


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


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "::ffff:0.0.0.0"])
def test_whoever_dials_nobody_dials_himself(pod: Pod, host: str) -> None:
    family, own = ("AF_INET6", "::1") if host == "::" else ("AF_INET", "127.0.0.1")
    told = pod.app(
        f"""
        there = socket.socket(socket.{family})
        there.bind(("{own}", 0))
        there.listen()
        made = socket.socket(socket.{"AF_INET6" if ":" in host else "AF_INET"})
        made.connect(("{host}", there.getsockname()[1]))
        print(json.dumps(there.accept()[1][0]))
        """
    )
    assert told == own


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
    effective, real = pod.app(
        """
        made = socket.socket()
        os.setresgid(1000, 1337, 0)
        os.setresuid(1000, 1337, 0)
        made.connect(("10.96.0.5", 80))
        effective = json.loads(made.recv(200))[0]
        os.setresuid(-1, 0, -1)
        os.setresgid(1337, 0, 0)
        made = socket.socket()
        made.connect(("10.96.0.5", 80))
        print(json.dumps([effective, json.loads(made.recv(200))[0]]))
        """,
        uid=0,
    )
    assert (effective, real) == (["10.96.0.5", 80], ["world", 0])


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


def test_a_new_proxy_that_ends_at_once_leaves_the_old_one_its_connections(pod: Pod) -> None:
    """However often, such as by a new configuration that is wrong each time."""
    for name in ("old1", "old2"):
        pod.tell(f"open {name}")
    for _ in range(60):
        pod.tell("open new")
        pod.tell("close new")
    assert set(pod.arrive(10)) <= {"old1", "old2"}
    for name in ("old1", "old2"):
        pod.tell(f"close {name}")


def test_processes_of_the_node_are_left_alone(pod: Pod) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as serving,
        socket.create_connection(serving.getsockname()) as made,
    ):
        assert made.getpeername() == serving.getsockname()
