"""The proxy of the eBPF socket tests: says what it recovered, and answers DNS.

A plain file, started in a pod's namespace; it becomes user 1337, prints `ready`, and ends with its
standard input. A connection is answered with `original destination, peer, own name`, a query for
an address with 192.0.2.7 or 2001:db8::7. Commands on standard input: `open NAME`, `close NAME` make
and end members of the group of listeners on the inbound port.
"""

import contextlib
import json
import os
import selectors
import socket
import struct
import sys

SOL_IPV6 = 41
SO_ORIGINAL_DST = 80
TCP_FASTOPEN = 23


def original(conn: socket.socket) -> list[object]:
    if conn.family == socket.AF_INET:
        raw = conn.getsockopt(socket.SOL_IP, SO_ORIGINAL_DST, 16)
        return [socket.inet_ntoa(raw[4:8]), *struct.unpack("!H", raw[2:4])]
    raw = conn.getsockopt(SOL_IPV6, SO_ORIGINAL_DST, 28)
    return [socket.inet_ntop(socket.AF_INET6, raw[8:24]), *struct.unpack("!H", raw[2:4])]


def listener(family: int, port: int) -> socket.socket:
    made = socket.socket(family)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    made.setsockopt(socket.IPPROTO_TCP, TCP_FASTOPEN, 16)
    if family == socket.AF_INET6:
        made.setsockopt(SOL_IPV6, socket.IPV6_V6ONLY, 1)
    made.bind(("", port))
    made.listen(64)
    return made


def dns_answer(query: bytes) -> bytes:
    """Return a response with one address of the kind that was asked for."""
    end = query.index(b"\0", 12) + 5
    (kind,) = struct.unpack_from("!H", query, end - 4)
    address = {1: socket.inet_aton("192.0.2.7")}.get(kind)
    if kind == 28:
        address = socket.inet_pton(socket.AF_INET6, "2001:db8::7")
    head = query[:2] + struct.pack("!HHHHH", 0x8180, 1, 1 if address else 0, 0, 0)
    record = b""
    if address:
        record = b"\xc0\x0c" + struct.pack("!HHIH", kind, 1, 60, len(address)) + address
    return head + query[12:end] + record


class Proxy:
    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self.group: dict[str, socket.socket] = {}

    def serve(self, family: int, port: int, name: str) -> socket.socket:
        made = listener(family, port)

        def accept() -> None:
            conn, peer = made.accept()
            self.selector.register(conn, selectors.EVENT_READ, lambda: drain(conn))
            with contextlib.suppress(OSError):
                conn.sendall(json.dumps([original(conn), peer[0], name]).encode())

        def drain(conn: socket.socket) -> None:
            """Close when the client does: with data unread, its answer would be lost to a reset."""
            with contextlib.suppress(OSError):
                if conn.recv(4096):
                    return
            self.selector.unregister(conn)
            conn.close()

        self.selector.register(made, selectors.EVENT_READ, accept)
        return made

    def resolve(self, family: int, host: str) -> None:
        self.resolve_streams(family, host)
        made = socket.socket(family, socket.SOCK_DGRAM)
        made.bind((host, 15053))

        def answer() -> None:
            query, peer = made.recvfrom(2048)
            with contextlib.suppress(OSError):
                made.sendto(dns_answer(query) if len(query) > 12 else query, peer)

        self.selector.register(made, selectors.EVENT_READ, answer)

    def resolve_streams(self, family: int, host: str) -> None:
        """Answer one query a connection, in which its length comes first."""
        made = socket.create_server((host, 15053), family=family)

        def accept() -> None:
            conn, _ = made.accept()
            self.selector.register(conn, selectors.EVENT_READ, lambda: answer(conn))

        def answer(conn: socket.socket) -> None:
            self.selector.unregister(conn)
            with conn, contextlib.suppress(OSError):
                query = conn.recv(2048)
                if len(query) > 14:
                    found = dns_answer(query[2:])
                    conn.sendall(struct.pack("!H", len(found)) + found)

        self.selector.register(made, selectors.EVENT_READ, accept)

    def obey(self) -> None:
        words = sys.stdin.readline().split()
        if not words:
            sys.exit()
        if words[0] == "open":
            self.group[words[1]] = self.serve(socket.AF_INET, 15006, words[1])
        else:
            gone = self.group.pop(words[1])
            self.selector.unregister(gone)
            gone.close()
        print("done", flush=True)

    def run(self) -> None:
        for family in (socket.AF_INET, socket.AF_INET6):
            self.serve(family, 15001, "out")
        self.resolve(socket.AF_INET, "127.0.0.1")
        self.resolve(socket.AF_INET6, "::1")
        self.selector.register(sys.stdin, selectors.EVENT_READ, self.obey)
        print("ready", flush=True)
        while True:
            for key, _ in self.selector.select():
                key.data()


if __name__ == "__main__":
    os.setgid(1337)
    os.setuid(1337)
    Proxy().run()
