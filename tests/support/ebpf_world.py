"""The world of the eBPF socket tests: answers whatever gets past the proxy with `world`.

A plain file, started in a namespace; it prints `ready` and ends with its standard input.
"""

import contextlib
import json
import selectors
import socket
import sys

SOL_IPV6, IPV6_V6ONLY = 41, 26
TCP_PORTS = (53, 80, 8080)
ANSWER = json.dumps([["world", 0], "world", "world"]).encode()


def opened(family: int, kind: int, port: int) -> socket.socket:
    made = socket.socket(family, kind)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if family == socket.AF_INET6:
        made.setsockopt(SOL_IPV6, IPV6_V6ONLY, 1)
    made.bind(("", port))
    if kind == socket.SOCK_STREAM:
        made.listen(64)
    return made


def answer(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        if sock.type == socket.SOCK_DGRAM:
            sock.sendto(b"world", sock.recvfrom(2048)[1])
            return
        made, _ = sock.accept()
        with made:
            made.sendall(ANSWER)


def main() -> None:
    selector = selectors.DefaultSelector()
    for family in (socket.AF_INET, socket.AF_INET6):
        for port in TCP_PORTS:
            made = opened(family, socket.SOCK_STREAM, port)
            selector.register(made, selectors.EVENT_READ, made)
        made = opened(family, socket.SOCK_DGRAM, 53)
        selector.register(made, selectors.EVENT_READ, made)
    selector.register(sys.stdin, selectors.EVENT_READ, None)
    print("ready", flush=True)
    while True:
        for key, _ in selector.select():
            if key.data is None:
                return
            answer(key.data)


if __name__ == "__main__":
    main()
