"""Clients of every kind get to the proxy when eBPF turns their connections, and none past it."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.ebpf_pod import Pod, captured_pod
from tests.support.netns import inside, run

pytestmark = pytest.mark.netns

SOURCES = Path(__file__).parents[1] / "support"
MPTCP = 262
MPTCP_OPENS_FAST = tuple(int(part) for part in os.uname().release.split(".")[:2]) >= (6, 2)
V4, V6, MAPPED = ("AF_INET", "10.96.7.1"), ("AF_INET6", "fd96::7"), ("AF_INET6", "::ffff:10.96.7.1")
KINDS = pytest.mark.parametrize(("family", "host"), [V4, V6, MAPPED], ids=["v4", "v6", "mapped"])


@pytest.fixture(scope="module")
def pod(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pod]:
    with captured_pod("cli", tmp_path_factory.mktemp("cli")) as made:
        inside(made.name, "sysctl", "-q", "-w", "net.ipv4.tcp_fastopen=1027")
        yield made


def meant(host: str) -> list[object]:
    return [host.removeprefix("::ffff:"), 80]


# --- ways to connect ------------------------------------------------------------------------------


@KINDS
@pytest.mark.parametrize(
    ("protocol", "way"),
    [
        *((0, way) for way in ("connect", "sendto", "deferred", "without waiting")),
        *((MPTCP, way) for way in ("connect", "without waiting")),
        *((MPTCP, way) for way in ("sendto", "deferred") if MPTCP_OPENS_FAST),
    ],
)
def test_every_way_to_connect_leads_to_the_proxy(
    pod: Pod, family: str, host: str, protocol: int, way: str
) -> None:
    """`sendto` and `deferred` are the two of TCP Fast Open: data and SYN go out as one."""
    told = pod.app(
        f"""
        import select
        made = socket.socket(socket.{family}, socket.SOCK_STREAM, {protocol})
        made.setblocking({way == "sendto" or way == "deferred"})
        to = ({host!r}, 80)
        if {way!r} == "sendto":
            made.sendto(b"data", socket.MSG_FASTOPEN, to)
        elif {way!r} == "deferred":
            made.setsockopt(socket.IPPROTO_TCP, 30, 1)      # TCP_FASTOPEN_CONNECT
            made.connect(to)
            made.send(b"data")
        else:
            made.settimeout({None if way == "connect" else 0})
            made.connect_ex(to)
        select.select([made], [], [], 20)
        print(json.dumps(json.loads(made.recv(200))[0]))
        """
    )
    assert told == meant(host)


@pytest.mark.parametrize("forced", [0, 1], ids=["at once", "by a worker"])
def test_connecting_through_io_uring(pod: Pod, tmp_path: Path, forced: int) -> None:
    program = compiled("gcc", "uring_connect.c", tmp_path)
    told = inside(pod.name, *as_user(1000), program, "10.96.7.2", "80", str(forced))
    assert told.startswith('[["10.96.7.2", 80], "10.81.0.2", "out"')


def test_two_connections_from_one_source_port_at_once(pod: Pod) -> None:
    """The proxy's queue is full, so the first hangs in its handshake while the second is made."""
    told = pod.app(
        f"""
        import select, signal
        def dial(host, port, source=0):
            made = socket.socket()
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind(("10.81.0.2", source))
            made.setblocking(False)
            made.connect_ex((host, port))
            return made
        os.kill({pod.proxy_pid}, signal.SIGSTOP)
        try:
            waiting = [dial("10.96.3.1", 80) for _ in range(70)]
            first = dial("10.96.3.2", 80, 20001)
            stuck = not select.select([], [first], [], 0)[1]
            second = dial("10.96.3.3", 53, 20001)
            stuck = stuck and bool(select.select([], [second], [], 20)[1])
        finally:
            os.kill({pod.proxy_pid}, signal.SIGCONT)
        for each in waiting:
            each.close()
        select.select([first], [], [], 20)
        print(json.dumps([stuck, json.loads(first.recv(200))[0]]))
        """,
        uid=0,
    )
    assert told == [True, ["10.96.3.2", 80]]


def test_a_socket_made_before_the_process_became_another_user(pod: Pod) -> None:
    """Also one that was handed over: who connects counts, not who made it."""
    told = pod.app(
        """
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        if os.fork() == 0:
            os.setgid(1337); os.setuid(1337)
            made = socket.socket()
            socket.send_fds(there, [b"x"], [made.fileno()])
            os._exit(0)
        os.wait()
        _, (fd,), _, _ = socket.recv_fds(here, 1, 1)
        os.setgid(1000); os.setuid(1000)
        made = socket.socket(fileno=fd)
        made.connect(("10.96.7.3", 80))
        print(json.dumps(json.loads(made.recv(200))[0]))
        """,
        uid=0,
    )
    assert told == ["10.96.7.3", 80]


def test_link_local_destinations_are_captured(pod: Pod) -> None:
    """As they are by rules; the scope is lost on the way to the proxy, as it is there."""
    shown = inside(pod.world, "ip", "-o", "-6", "addr", "show", "dev", "eth0", "scope", "link")
    host = shown.split()[3].partition("/")[0]
    by_tcp, by_udp, unconnected = pod.app(
        f"""
        there = socket.if_nametoindex("eth0")
        made = socket.socket(socket.AF_INET6)
        made.connect(("{host}", 80, 0, there))
        told = json.loads(made.recv(200))[0]
        asking = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
        asking.connect(("{host}", 53, 0, there))
        asking.send(b"ping")
        answer = asking.recv(100).decode()
        asking = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
        asking.settimeout(0.5)
        try:    # its interface is chosen before the program runs: it gets nowhere
            asking.sendto(b"ping", ("{host}", 53, 0, there))
            unconnected = asking.recv(100).decode()
        except OSError as error:
            unconnected = type(error).__name__
        print(json.dumps([told, answer, unconnected]))
        """
    )
    assert (by_tcp, by_udp, unconnected) == ([host, 80], "ping", "TimeoutError")


# --- DNS ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compiler", ["gcc", "musl-gcc"])
def test_resolvers_of_both_c_libraries(pod: Pod, tmp_path: Path, compiler: str) -> None:
    program = compiled(compiler, "look_up.c", tmp_path)
    file = tmp_path / "resolv.conf"
    file.write_text("nameserver 10.96.0.53\nnameserver fd96::53\noptions timeout:5 attempts:2\n")
    script = f"mount --bind {file} /etc/resolv.conf && exec {program} web.test"
    found = inside(pod.name, "unshare", "--mount", "sh", "-c", script)
    assert sorted(found.split()) == ["192.0.2.7", "2001:db8::7"]


@pytest.mark.parametrize("server", ["10.96.0.53", "fd96::53"])
@pytest.mark.parametrize("transport", ["+notcp", "+tcp"])
def test_dig(pod: Pod, server: str, transport: str) -> None:
    """It does not take an answer from anybody but the server that it asked."""
    command = ("dig", f"@{server}", "web.test", "A", "+short", "+timeout=20", "+tries=1", transport)
    assert inside(pod.name, *as_user(1000), *command) == "192.0.2.7\n"


@KINDS
def test_a_query_of_a_socket_that_is_bound_to_a_device_does_not_get_past(
    pod: Pod, family: str, host: str
) -> None:
    """Its way is chosen before the program runs, so it is refused; root's next one gets there."""
    first, second = pod.app(query_from_eth0(family, host), uid=0)
    assert (first, second) == (errno.EPERM, "ping")
    first, second = pod.app(query_from_eth0(family, host))
    assert (first, second) == (errno.EPERM, errno.EPERM)


def query_from_eth0(family: str, host: str) -> str:
    return f"""
        made = socket.socket(socket.{family}, socket.SOCK_DGRAM)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"eth0")
        found = []
        for _ in range(2):
            try:
                made.sendto(b"ping", ({host!r}, 53))
                found.append(made.recv(100).decode())
            except OSError as error:
                found.append(error.errno)
        print(json.dumps(found))
    """


@KINDS
def test_a_socket_that_also_asks_dns_keeps_its_peer(pod: Pod, family: str, host: str) -> None:
    peer, answer = pod.app(
        f"""
        made = socket.socket(socket.{family}, socket.SOCK_DGRAM)
        made.connect(({host!r}, 9999))
        made.sendto(b"ping", ({host!r}, 53))
        print(json.dumps([made.getpeername()[:2], "sent"]))
        """
    )
    assert (peer, answer) == ([host, 9999], "sent")


def test_other_protocols_with_the_port_of_dns_are_left_alone(pod: Pod) -> None:
    """A socket for pings has no ports, and yet it may be connected to one."""
    inside(pod.name, "sysctl", "-q", "-w", "net.ipv4.ping_group_range=0 2000")
    source = pod.app(
        """
        made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM, socket.IPPROTO_ICMP)
        made.connect(("10.96.7.4", 53))
        made.send(struct.pack("!BBHHH", 8, 0, 0, 0, 1))
        print(json.dumps(made.recvfrom(100)[1][0]))
        """
    )
    assert source == "10.96.7.4"


# --- help -----------------------------------------------------------------------------------------


def compiled(compiler: str, source: str, folder: Path) -> str:
    """Compile a program that every user may run."""
    folder = Path(run("mktemp", "-d", "-p", str(folder)).strip())
    target = folder / source.removesuffix(".c")
    run(compiler, "-Wall", "-Werror", "-O1", "-o", str(target), str(SOURCES / source))
    return str(target)


def as_user(uid: int) -> tuple[str, ...]:
    return ("setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--")
