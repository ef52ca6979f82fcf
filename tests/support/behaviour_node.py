"""One process of the behaviour tests: listens, sends, and says what it saw.

It is started inside a network namespace as a plain file, so it imports the standard library only.
It takes the credentials of its specification, opens its listeners, and then obeys one JSON command
a line on an inherited socket until that socket closes; so it never outlives whoever started it.

Every accepted TCP connection is answered at once with `[who, original destination, peer address]`
and answered again for every byte that follows; every UDP datagram likewise, with no destination,
because the kernel keeps none for UDP.
"""

import contextlib
import ctypes
import errno
import itertools
import json
import os
import selectors
import socket
import struct
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

SO_ORIGINAL_DST = 80  # also IP6T_SO_ORIGINAL_DST
SO_MARK = 36
SOL_IPV6 = 41
IP_TRANSPARENT = 19
IPV6_TRANSPARENT = 75
TCP_REPAIR, TCP_REPAIR_QUEUE, TCP_QUEUE_SEQ = 19, 20, 21
PR_SET_KEEPCAPS = 8
CAP_NET_ADMIN, CAP_NET_RAW = 12, 13
RESET_ON_CLOSE = struct.pack("ii", 1, 0)

Answer = tuple[str, str | None, str | None]


def take_credentials(uid: int, gid: int, groups: list[int]) -> None:
    """Become that user with NET_ADMIN and NET_RAW kept, as a proxy under TPROXY has them."""
    os.setgroups(groups)
    os.setresgid(gid, gid, gid)
    if not uid:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0)
    os.setresuid(uid, uid, uid)
    kept = 1 << CAP_NET_ADMIN | 1 << CAP_NET_RAW
    header = struct.pack("Ii", 0x20080522, 0)
    if libc.capset(header, struct.pack("IIIIII", kept, kept, 0, 0, 0, 0)):
        raise OSError(ctypes.get_errno(), "capset")


def family_of(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def endpoint(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def make_transparent(sock: socket.socket, *, on: bool = True) -> None:
    if sock.family == socket.AF_INET6:
        sock.setsockopt(SOL_IPV6, IPV6_TRANSPARENT, on)
    else:
        sock.setsockopt(socket.SOL_IP, IP_TRANSPARENT, on)


def original_destination(conn: socket.socket) -> str:
    """Return where the client meant to go: conntrack's word, else the address of the socket."""
    with contextlib.suppress(OSError):
        if conn.family == socket.AF_INET:
            raw = conn.getsockopt(socket.SOL_IP, SO_ORIGINAL_DST, 16)
            return endpoint(socket.inet_ntop(conn.family, raw[4:8]), *struct.unpack("!H", raw[2:4]))
        raw = conn.getsockopt(SOL_IPV6, SO_ORIGINAL_DST, 28)
        return endpoint(socket.inet_ntop(conn.family, raw[8:24]), *struct.unpack("!H", raw[2:4]))
    host, port = conn.getsockname()[:2]
    return endpoint(host, port)


class Node:
    """Serves its listeners while it waits for commands and for the answers to its own probes."""

    def __init__(self, control: socket.socket, ports: list[int]) -> None:
        self._control = control
        self._lines = control.makefile("rwb")
        self._selector = selectors.DefaultSelector()
        self._listeners: dict[str, list[socket.socket]] = {}
        self._specs: dict[str, list[dict[str, Any]]] = {}
        self._held: dict[str, socket.socket] = {}
        self._served: Counter[str] = Counter()
        self._ports = itertools.cycle(range(*ports))

    def run(self) -> None:
        """Obey until the control socket closes."""
        self._say({"ready": os.getpid()})
        self._selector.register(self._control, selectors.EVENT_READ, None)
        while True:
            if self._pump(None):
                line = self._lines.readline()
                if not line:
                    return
                self._obey(json.loads(line))

    def _pump(self, timeout_s: float | None) -> bool:
        """Serve what is ready; return whether a command waits."""
        commanded = False
        for key, _ in self._selector.select(timeout_s):
            if key.data is None:
                commanded = True
            else:
                key.data()
        return commanded

    def _say(self, answer: object) -> None:
        self._lines.write(json.dumps(answer).encode() + b"\n")
        self._lines.flush()

    def _obey(self, command: dict[str, Any]) -> None:
        handler = getattr(self, "do_" + command.pop("op"))
        try:
            self._say({"result": handler(**command)})
        except OSError as error:
            self._say({"error": str(error)})

    # --- listening ---------------------------------------------------------------------------

    def listen(self, spec: dict[str, Any]) -> None:
        who = str(spec["who"])
        kind = socket.SOCK_STREAM if spec["proto"] == "tcp" else socket.SOCK_DGRAM
        sock = socket.socket(family_of(spec["host"]), kind)
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if sock.family == socket.AF_INET6:
            sock.setsockopt(SOL_IPV6, socket.IPV6_V6ONLY, 1)
        if spec.get("transparent"):
            make_transparent(sock)
        sock.bind((spec["host"], spec["port"]))
        serve = self._accept if spec["proto"] == "tcp" else self._answer_datagram
        if spec["proto"] == "tcp":
            sock.listen(256)
        self._listeners.setdefault(who, []).append(sock)
        self._specs.setdefault(who, []).append(spec)
        self._selector.register(sock, selectors.EVENT_READ, lambda: serve(who, sock))

    def _accept(self, who: str, sock: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                conn, peer = sock.accept()
                conn.setblocking(False)
                self._served[who] += 1
                answer = json.dumps([who, original_destination(conn), peer[0]]).encode()
                self._selector.register(
                    conn,
                    selectors.EVENT_READ,
                    lambda conn=conn, answer=answer: self._again(conn, answer),
                )
                conn.send(answer)

    def _again(self, conn: socket.socket, answer: bytes) -> None:
        with contextlib.suppress(OSError):
            if conn.recv(4096):
                conn.send(answer)
                return
        self._selector.unregister(conn)
        conn.close()

    def _answer_datagram(self, who: str, sock: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                _, peer = sock.recvfrom(4096)
                self._served[who] += 1
                sock.sendto(json.dumps([who, None, peer[0]]).encode(), peer)

    def do_deaf(self, who: str) -> None:
        """Close the listeners of that name."""
        for sock in self._listeners.pop(who):
            self._selector.unregister(sock)
            sock.close()

    def do_listen(self, who: str) -> None:
        """Open them again."""
        for spec in self._specs.pop(who):
            self.listen(spec)

    def do_transparent(self, on: bool, ports: list[int]) -> None:
        """Let the listeners on those ports take packets for any address, or no longer."""
        for sock in itertools.chain.from_iterable(self._listeners.values()):
            if sock.getsockname()[1] in ports:
                make_transparent(sock, on=on)
        for spec in itertools.chain.from_iterable(self._specs.values()):
            spec["transparent"] = on and spec["port"] in ports

    def do_served(self) -> dict[str, int]:
        """Return how often each listener was reached since the last time, and start anew."""
        served, self._served = dict(self._served), Counter()
        return served

    # --- sending -----------------------------------------------------------------------------

    def do_probe(self, probes: list[dict[str, Any]], quiet_s: float) -> dict[str, Answer]:
        """Try all at once; whoever has no answer when nothing came for `quiet_s` has timed out."""
        found: dict[str, Answer] = {}
        pending: dict[str, socket.socket] = {}
        for probe in probes:
            self._start(probe, pending, found)
        deadline = time.monotonic() + quiet_s
        while pending and (left := deadline - time.monotonic()) > 0:
            before = len(pending)
            self._pump(left)
            if len(pending) < before:
                deadline = time.monotonic() + quiet_s
        for name in list(pending):
            self._finish(name, pending, found, ("timeout", None, None))
        return {probe["name"]: found[probe["name"]] for probe in probes}

    def _start(
        self, probe: dict[str, Any], pending: dict[str, socket.socket], found: dict[str, Answer]
    ) -> None:
        name = probe["name"]
        sock = self._client(probe)
        pending[name] = sock
        self._selector.register(
            sock, selectors.EVENT_READ, lambda: self._finish(name, pending, found, _received(sock))
        )
        try:
            self._bind(sock, probe)
        except OSError:
            self._finish(name, pending, found, ("no-source", None, None))
            return
        try:
            with contextlib.suppress(BlockingIOError):
                sock.connect((probe["host"], probe["port"]))
            if probe["proto"] == "udp":
                sock.send(b"?")
        except OSError as error:
            self._finish(name, pending, found, _failed(error))

    def _bind(self, sock: socket.socket, probe: dict[str, Any]) -> None:
        """Take a port of our own for every connection.

        The kernel would give the same port to connections to different ports. Redirected to one
        port, they are told apart by NAT at INPUT alone; and if the listener is transparent, the
        first connection's socket has already claimed the second's SYN before that (seen on 6.18).
        """
        address = probe.get("source") or ("::" if sock.family == socket.AF_INET6 else "0.0.0.0")
        if probe.get("source_port"):
            sock.bind((address, probe["source_port"]))
            return
        for port in itertools.islice(self._ports, 100):  # some may be in use by kept connections
            try:
                sock.bind((address, port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                return

    def _client(self, probe: dict[str, Any]) -> socket.socket:
        kind = socket.SOCK_STREAM if probe["proto"] == "tcp" else socket.SOCK_DGRAM
        sock = socket.socket(family_of(probe["host"]), kind)
        sock.setblocking(False)
        if probe["proto"] == "tcp":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
        if probe.get("transparent"):
            make_transparent(sock)
        if probe.get("mark"):
            sock.setsockopt(socket.SOL_SOCKET, SO_MARK, probe["mark"])
        return sock

    def _finish(
        self,
        name: str,
        pending: dict[str, socket.socket],
        found: dict[str, Answer],
        answer: Answer,
    ) -> None:
        sock = pending.pop(name)
        self._selector.unregister(sock)
        sock.close()
        found[name] = answer

    def do_hold(self, probe: dict[str, Any]) -> Answer:
        """Connect and keep the connection under the probe's name."""
        sock = self._client(probe)
        sock.settimeout(2)
        self._bind(sock, probe)
        sock.connect((probe["host"], probe["port"]))
        self._held[probe["name"]] = sock
        return _received(sock)

    def do_use(self, name: str, timeout_s: float) -> Answer:
        """Send one byte on a kept connection and return the answer to it."""
        sock = self._held[name]
        sock.settimeout(timeout_s)
        try:
            sock.send(b"?")
        except OSError as error:
            return _failed(error)
        return _received(sock)

    def do_drop(self, name: str) -> None:
        """Close a kept connection, if there is one."""
        if sock := self._held.pop(name, None):
            sock.close()

    # --- odd things that need privileges -----------------------------------------------------

    def do_flush(self) -> None:
        """Forget all tracked connections of the namespace (IPCTNL_MSG_CT_DELETE without a key)."""
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 12) as netlink:  # NETLINK_NETFILTER
            netlink.send(struct.pack("=IHHIIBBH", 20, 1 << 8 | 2, 1 | 4, 1, 0, 0, 0, 0))
            netlink.recv(4096)

    def do_tracked(self) -> list[str]:
        """Return the connections that the namespace tracks, one line each."""
        return Path("/proc/self/net/nf_conntrack").read_text().splitlines()

    def do_stray(self, name: str, ahead: int) -> None:
        """Send a segment of a kept IPv4 connection whose number is `ahead` of the window."""
        sock = self._held[name]
        numbers = []
        sock.setsockopt(socket.IPPROTO_TCP, TCP_REPAIR, 1)
        for queue in (2, 1):  # what we send next, what we expect next
            sock.setsockopt(socket.IPPROTO_TCP, TCP_REPAIR_QUEUE, queue)
            packed = sock.getsockopt(socket.IPPROTO_TCP, TCP_QUEUE_SEQ, 4)
            numbers.append(struct.unpack("I", packed)[0])
        sock.setsockopt(socket.IPPROTO_TCP, TCP_REPAIR, -1)
        here, there = sock.getsockname(), sock.getpeername()
        segment = _segment(here, there, (numbers[0] + ahead) % 2**32, numbers[1])
        with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_TCP) as raw:
            raw.sendto(segment, (there[0], 0))


def _segment(here: tuple[str, int], there: tuple[str, int], seq: int, ack: int) -> bytes:
    """Return a TCP segment of one byte with its checksum."""
    data = b"x"
    ports = (here[1], there[1], seq, ack, 5 << 4, 0x18, 512)
    addresses = socket.inet_aton(here[0]) + socket.inet_aton(there[0])
    summed = addresses + struct.pack("!BBH", 0, 6, 21) + struct.pack("!HHIIBBHHH", *ports, 0, 0)
    words = struct.unpack("!17H", summed + data + b"\0")
    total = sum(words)
    total = (total & 0xFFFF) + (total >> 16)
    checksum = ~((total & 0xFFFF) + (total >> 16)) & 0xFFFF
    return struct.pack("!HHIIBBHHH", *ports, checksum, 0) + data


def _failed(error: OSError) -> Answer:
    if isinstance(error, ConnectionRefusedError):
        return "refused", None, None
    if isinstance(error, (ConnectionResetError, BrokenPipeError)):
        return "reset", None, None
    if isinstance(error, TimeoutError):
        return "timeout", None, None
    return f"error {error.errno}", None, None


def _received(sock: socket.socket) -> Answer:
    try:
        data = sock.recv(4096)
    except OSError as error:
        return _failed(error)
    if not data:
        return "closed", None, None
    who, destination, source = json.loads(data)
    return who, destination, source


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    spec = json.loads(sys.argv[2])
    take_credentials(spec["uid"], spec["gid"], spec["groups"])
    node = Node(control, spec["ports"])
    for listener in spec["listeners"]:
        node.listen(listener)
    node.run()


if __name__ == "__main__":
    main()
