"""A server that is closed while another takes its place: nobody who connects is cut off."""

import asyncio
import socket
import threading
import time

import pytest

from agent.kernel import connections
from agent.kernel.connections import Connections
from tests.support.agent import free_port


async def _greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"hello")
    await writer.drain()


def test_who_comes_right_before_the_close_is_with_the_next_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    port = free_port()
    heard: list[bytes] = []
    queued = connections._queued

    def dial() -> None:
        with socket.create_connection(("127.0.0.1", port), 10) as client:
            heard.append(client.recv(5))

    client = threading.Thread(target=dial)

    def looked_and_waited(server: socket.socket) -> list[socket.socket]:
        found = queued(server)
        client.start()
        time.sleep(0.3)
        return found

    monkeypatch.setattr(connections, "_queued", looked_and_waited)

    async def exchange() -> None:
        old, new = Connections(_greet, 8), Connections(_greet, 8)
        leaving = await asyncio.start_server(old.serve, "127.0.0.1", port, reuse_port=True)
        staying = await asyncio.start_server(new.serve, "0.0.0.0", port, reuse_port=True)
        await old.close(leaving, 1.0)
        await asyncio.to_thread(client.join)
        await new.close(staying)

    asyncio.run(exchange())
    assert heard == [b"hello"]
