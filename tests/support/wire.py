"""Programs that put real packets on the wire and say who received them. Standard library only.

Run inside a namespace: `wire.py listen NAME` answers on every port of `PORTS`, and
`wire.py send UID GID` sends what it is told. Every packet carries a nonce, so that it is known by
who received it, whatever its addresses became on the way.
"""

import contextlib
import json
import os
import selectors
import socket
import struct
import sys
import threading
from dataclasses import asdict, dataclass

PORTS = (53, 80, 443, 8080, 9090, 15001, 15006, 15008, 15053, 20080)
CONNECT_S = 0.8

IP_TRANSPARENT = 19
IPV6_TRANSPARENT = 75
SO_MARK = 36
RESET_ON_CLOSE = struct.pack("ii", 1, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shot:
    """One packet to send: a UDP datagram, or the first segment of a TCP connection."""

    nonce: str
    protocol: str
    destination: str
    port: int
    source: str = ""
    source_port: int = 0
    mark: int = 0

    def line(self) -> str:
        return json.dumps(asdict(self)) + "\n"


def listen(name: str) -> None:
    """Print `{"who", "port", "nonce"}` for every packet received, after a line `ready`."""
    selector = selectors.DefaultSelector()
    for port in PORTS:
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
            selector.register(_listener(kind, port), selectors.EVENT_READ, port)
    print("ready", flush=True)
    while True:
        for key, _ in selector.select():
            connection = key.fileobj
            assert isinstance(connection, socket.socket)
            if _accepts(connection):
                accepted, _ = connection.accept()
                selector.register(accepted, selectors.EVENT_READ, key.data)
                continue
            _report(name, connection, key.data)
            if connection.type == socket.SOCK_STREAM:
                selector.unregister(connection)
                connection.close()


def _listener(kind: socket.SocketKind, port: int) -> socket.socket:
    found = socket.socket(socket.AF_INET6, kind)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    found.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    # TPROXY hands packets to transparent sockets only.
    found.setsockopt(socket.IPPROTO_IPV6, IPV6_TRANSPARENT, 1)
    found.setsockopt(socket.IPPROTO_IP, IP_TRANSPARENT, 1)
    found.bind(("::", port))
    if kind == socket.SOCK_STREAM:
        found.listen(512)
    return found


def _accepts(found: socket.socket) -> bool:
    return bool(found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _report(name: str, connection: socket.socket, port: int) -> None:
    with contextlib.suppress(OSError):
        nonce = connection.recv(64).decode()
        if nonce:
            print(json.dumps({"who": name, "port": port, "nonce": nonce}), flush=True)


def send(uid: int, gid: int) -> None:
    """Become a user, print `ready`, and send each shot that standard input names."""
    os.setgroups([])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
    print("ready", flush=True)
    for line in sys.stdin:
        shot = Shot(**json.loads(line))
        threading.Thread(target=_shoot, args=(shot,)).start()


def _shoot(shot: Shot) -> None:
    family = socket.AF_INET6 if ":" in shot.destination else socket.AF_INET
    kind = socket.SOCK_STREAM if shot.protocol == "tcp" else socket.SOCK_DGRAM
    # What the rules refuse shows as an error here; what counts is who received the nonce.
    with contextlib.suppress(OSError), socket.socket(family, kind) as out:
        if shot.mark:
            out.setsockopt(socket.SOL_SOCKET, SO_MARK, shot.mark)
        if shot.source or shot.source_port:
            out.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            out.bind((shot.source, shot.source_port))
        out.settimeout(CONNECT_S)
        if kind == socket.SOCK_DGRAM:
            out.sendto(shot.nonce.encode(), (shot.destination, shot.port))
            return
        out.connect((shot.destination, shot.port))
        out.sendall(shot.nonce.encode())
        out.recv(1)  # the listener closes: so the segment with the nonce was not reset away
        out.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)


if __name__ == "__main__":
    if sys.argv[1] == "listen":
        listen(sys.argv[2])
    else:
        send(int(sys.argv[2]), int(sys.argv[3]))
