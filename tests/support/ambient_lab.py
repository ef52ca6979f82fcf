"""An ambient pod with its application and a stand-in for ztunnel, and a peer next to it."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support import ztunnel_node
from tests.support.netns import inside, namespace, path_of, run

POD = {4: "10.83.0.2", 6: "fd83::2"}
PEER = {4: "10.83.0.1", 6: "fd83::1"}
PROBE = {4: "169.254.7.127", 6: "fd16:9254:7127:1337:ffff:ffff:ffff:ffff"}
SERVER = {4: "10.83.0.53", 6: "fd83::53"}  # addresses of the peer, where DNS is answered
PORT = 8080
PREFIX = {4: 24, 6: 64}

# Answers each connection with its name and the client's address, then echoes; queries with itself.
SERVE = """
import socket, sys, threading
name, port, udp = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "dns"
def one(conn):
    conn.sendall(f"{name} {conn.getpeername()[0]}\\n".encode())
    while data := conn.recv(512):
        conn.sendall(data)
def tcp(family):
    sock = socket.socket(family)
    if family == socket.AF_INET6: sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("", port)); sock.listen(64)
    while True:
        threading.Thread(target=one, args=(sock.accept()[0],), daemon=True).start()
def dns(address):
    sock = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM)
    sock.bind((address, 53))
    while True:
        query, client = sock.recvfrom(512)
        sock.sendto(b"server " + query, client)
for family in (socket.AF_INET, socket.AF_INET6):
    threading.Thread(target=tcp, args=(family,), daemon=True).start()
for address in sys.argv[4:] if udp else ():
    threading.Thread(target=dns, args=(address,), daemon=True).start()
print("ready", flush=True); sys.stdin.read()
"""

# Says what it is answered, or what happened; by its mark, if it has one, it is the proxy.
DIAL = """
import socket, sys
kind, to, port, source, mark = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4], sys.argv[5]
family = socket.AF_INET6 if ":" in to else socket.AF_INET
sock = socket.socket(family, socket.SOCK_DGRAM if kind == "udp" else socket.SOCK_STREAM)
sock.settimeout(float(sys.argv[6]))
if int(mark): sock.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, int(mark))
if source: sock.bind((source, 0))
try:
    sock.connect((to, port))
    if kind != "tcp": sock.send(b"query")
    said = sock.recv(512)
    while kind == "tcp" and said.startswith((b"out", b"in")) and said.count(b"\\n") < 2:
        said += sock.recv(512)
    print(said.decode().strip().replace("\\n", ", "))
except OSError as error:
    print(type(error).__name__)
"""


@dataclass(frozen=True, slots=True)
class AmbientLab:
    """The two namespaces; everybody in them listens."""

    pod: str
    peer: str

    def dial(
        self,
        space: str,
        to: str,
        port: int = PORT,
        *,
        kind: str = "tcp",
        source: str = "",
        mark: int = 0,
        timeout_s: float = 10.0,
    ) -> str:
        """Connect and return what is answered. `kind` is tcp, udp, or ask: a query over TCP."""
        words = (kind, to, str(port), source, str(mark), str(timeout_s))
        return inside(space, sys.executable, "-I", "-S", "-c", DIAL, *words).strip()


@contextlib.contextmanager
def ambient_lab() -> Iterator[AmbientLab]:
    with contextlib.ExitStack() as stack:
        pod, peer = (stack.enter_context(namespace(label)) for label in ("amb", "ambp"))
        ends = ("peer", "name", "eth0", "netns", peer)
        run("ip", "link", "add", "eth0", "netns", pod, "type", "veth", *ends)
        for space, hosts in ((pod, (POD,)), (peer, (PEER, SERVER))):
            for version in (4, 6):
                for host in hosts:
                    _add(space, f"{host[version]}/{PREFIX[version]}")
            inside(space, "ip", "link", "set", "eth0", "up")
        for version, length in ((4, 32), (6, 128)):
            _add(peer, f"{PROBE[version]}/{length}")
            way = (f"-{version}", "route", "add", PROBE[version], "via", PEER[version])
            inside(pod, "ip", *way)
        for space, words in ((pod, ("app",)), (peer, ("service",))):
            kind = "dns" if space == peer else "-"
            program = ("-c", SERVE, *words, str(PORT), kind, *SERVER.values())
            stack.enter_context(_running(space, *program))
        stack.enter_context(_running(pod, str(Path(ztunnel_node.__file__)), *SERVER.values()))
        yield AmbientLab(pod, peer)


def _add(space: str, address: str) -> None:
    trial = ("nodad",) if ":" in address else ()
    inside(space, "ip", "addr", "add", address, "dev", "eth0", *trial)


@contextlib.contextmanager
def _running(space: str, *program: str) -> Iterator[None]:
    command = ("nsenter", f"--net={path_of(space)}", "--", sys.executable, "-I", "-S", *program)
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as running:
        try:
            assert running.stdout is not None
            assert running.stdout.readline() == "ready\n"
            yield
        finally:
            running.kill()
