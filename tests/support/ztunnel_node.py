"""Stands in for ztunnel in an ambient pod: real sockets with its mark, in both directions.

It is started inside the pod's network namespace as a plain file, so it imports the standard library
only. It prints `ready` and runs until its stdin closes. A connection that it is given is told first
what happened (`out`, `in` or `tunnel`, and the original destination), and then forwarded: outbound
to where it was going, inbound to the application from the client's own address. A DNS query is
answered with `dns` and what the server, which it asks itself, says.
"""

import contextlib
import os
import socket
import struct
import sys
import threading

MARK = 0x539
OUTBOUND, INBOUND, TUNNEL, DNS = 15001, 15006, 15008, 15053
IP_TRANSPARENT, IPV6_TRANSPARENT = 19, 75
SO_ORIGINAL_DST = 80  # IP6T_SO_ORIGINAL_DST is the same
FAMILIES = (socket.AF_INET, socket.AF_INET6)
PATIENCE_S = 10.0

Place = tuple[str, int]


def marked(family: socket.AddressFamily, kind: int = socket.SOCK_STREAM) -> socket.socket:
    made = socket.socket(family, kind)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, MARK)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.settimeout(PATIENCE_S)
    return made


def listener(
    family: socket.AddressFamily, port: int, kind: int = socket.SOCK_STREAM
) -> socket.socket:
    made = marked(family, kind)
    made.settimeout(None)
    if family == socket.AF_INET6:
        made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    loopback = "127.0.0.1" if family == socket.AF_INET else "::1"
    made.bind((loopback if port == DNS else "", port))
    if kind == socket.SOCK_STREAM:
        made.listen(64)
    return made


def original(conn: socket.socket) -> Place:
    if conn.family == socket.AF_INET:
        raw = conn.getsockopt(socket.SOL_IP, SO_ORIGINAL_DST, 16)
        return socket.inet_ntop(socket.AF_INET, raw[4:8]), struct.unpack("!H", raw[2:4])[0]
    raw = conn.getsockopt(socket.IPPROTO_IPV6, SO_ORIGINAL_DST, 28)
    return socket.inet_ntop(socket.AF_INET6, raw[8:24]), struct.unpack("!H", raw[2:4])[0]


def pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(4096):
            sink.sendall(data)
    for end in (source, sink):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def forward(conn: socket.socket, port: int) -> None:
    with conn, contextlib.suppress(OSError):
        if port == TUNNEL:
            conn.sendall(b"tunnel\n")
            return
        to = original(conn)
        onward = marked(conn.family)
        if port == INBOUND:
            level, option = socket.SOL_IP, IP_TRANSPARENT
            if conn.family == socket.AF_INET6:
                level, option = socket.IPPROTO_IPV6, IPV6_TRANSPARENT
            onward.setsockopt(level, option, 1)
            onward.bind((conn.getpeername()[0], 0))
        with onward:
            onward.connect(to)
            onward.settimeout(None)
            way = "in" if port == INBOUND else "out"
            conn.sendall(f"{way} {to[0]} {to[1]}\n".encode())
            back = threading.Thread(target=pump, args=(onward, conn), daemon=True)
            back.start()
            pump(conn, onward)
            back.join()


def serve(family: socket.AddressFamily, port: int) -> None:
    sock = listener(family, port)
    while True:
        conn, _ = sock.accept()
        threading.Thread(target=forward, args=(conn, port), daemon=True).start()


def ask(family: socket.AddressFamily, query: bytes) -> bytes:
    """Ask the server as the proxy itself does: over UDP, with the mark."""
    with marked(family, socket.SOCK_DGRAM) as upstream:
        upstream.connect((sys.argv[1 + FAMILIES.index(family)], 53))
        upstream.send(query)
        return b"dns " + upstream.recv(512)


def answer(family: socket.AddressFamily) -> None:
    sock = listener(family, DNS, socket.SOCK_DGRAM)
    while True:
        query, client = sock.recvfrom(512)
        if query != b"query":  # like every server, it ignores what is none
            continue
        with contextlib.suppress(OSError):
            sock.sendto(ask(family, query), client)


def answer_over_tcp(family: socket.AddressFamily) -> None:
    sock = listener(family, DNS)
    while True:
        conn, _ = sock.accept()
        with conn, contextlib.suppress(OSError):
            conn.sendall(ask(family, conn.recv(512)))


def main() -> None:
    for family in FAMILIES:
        for port in (OUTBOUND, INBOUND, TUNNEL):
            threading.Thread(target=serve, args=(family, port), daemon=True).start()
        for work in (answer, answer_over_tcp):
            threading.Thread(target=work, args=(family,), daemon=True).start()
    print("ready", flush=True)
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main()
