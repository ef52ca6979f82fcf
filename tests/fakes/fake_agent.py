"""An agent's socket that answers as a test likes: rightly, wrongly, slowly or not at all."""

import contextlib
import json
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HEADER = struct.Struct("!IB")
Talk = Callable[[socket.socket], None]


def receive(client: socket.socket) -> Any:
    """Return the request that a client sends."""
    with client.makefile("rb") as stream:
        size, version = HEADER.unpack(stream.read(HEADER.size))
        assert version == 1
        return json.loads(stream.read(size))


def frame(document: object, *, version: int = 1) -> bytes:
    payload = document if isinstance(document, bytes) else json.dumps(document).encode()
    return HEADER.pack(len(payload), version) + payload


def answering(data: bytes, seen: list[Any] | None = None) -> Talk:
    """Take a request, send these bytes and hang up."""

    def talk(client: socket.socket) -> None:
        request = receive(client)
        if seen is not None:
            seen.append(request)
        client.sendall(data)

    return talk


@contextlib.contextmanager
def fake_agent(path: Path, talk: Talk) -> Iterator[None]:
    """Listen on a path; whoever connects is talked to, one after the other."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    client, _ = server.accept()
                    with client, contextlib.suppress(OSError, struct.error):
                        talk(client)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()
