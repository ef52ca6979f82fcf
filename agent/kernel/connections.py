"""The connections of an asyncio server: bounded in number, and ended with the server."""

import asyncio
import contextlib
import itertools
import os
import socket
from collections.abc import Awaitable, Callable, Iterator

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

BROKEN = (asyncio.IncompleteReadError, ConnectionError, TimeoutError, asyncio.CancelledError)

# How many may wait to be accepted while the event loop is busy; the kernel allows somaxconn.
BACKLOG = 1024
# The event loop needs some turns between an accept and the client's own task.
ACCEPTING_S = 0.02
# What was sent last may still be on its way; after this it is not waited for.
HANG_UP_S = 2.0


class Connections:
    """Talks to each client in its own task; what breaks in one ends that one only.

    When there are too many, the one that has kept us waiting for longest is dropped for the new
    one: who holds connections open and does nothing keeps nobody else out.
    """

    def __init__(self, talk: Talk, limit: int) -> None:
        self._talk = talk
        self._limit = limit
        self._tasks: set[asyncio.Task[object]] = set()
        self._waiting: dict[asyncio.Task[object], None] = {}  # in the order of their coming

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Give this to asyncio.start_server."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            if len(self._tasks) <= self._limit or self._make_room():
                with contextlib.suppress(*BROKEN):
                    await self._talk(reader, writer)
        finally:
            try:
                await _hang_up(writer)
            finally:
                self._tasks.discard(task)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Put into this what waits for the client; while it does, the client may be dropped."""
        task = asyncio.current_task()
        assert task is not None
        self._waiting[task] = None
        try:
            yield
        finally:
            self._waiting.pop(task, None)

    def _make_room(self) -> bool:
        task = next(iter(self._waiting), None)
        if task is None:
            return False
        del self._waiting[task]
        self._tasks.discard(task)
        task.cancel()
        return True

    async def _serve_late(self, client: socket.socket) -> None:
        await self.serve(*await asyncio.open_connection(sock=client))

    async def close(self, server: asyncio.Server, patience_s: float = 0.0) -> None:
        """End the server, and every connection that has not ended by itself within `patience_s`.

        Accepting stops first: a server that closes while a connection is half accepted leaves that
        one's socket open (Python 3.11, Server._attach).
        """
        loop = asyncio.get_running_loop()
        for sock in server.sockets:
            loop.remove_reader(sock.fileno())
        await asyncio.sleep(ACCEPTING_S)
        late = [_queued(sock.fileno()) for sock in server.sockets] if patience_s else []
        server.close()
        for client in itertools.chain(*late):
            self._tasks.add(asyncio.create_task(self._serve_late(client)))
        if patience_s and self._tasks:
            await asyncio.wait(self._tasks, timeout=patience_s)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _hang_up(writer: asyncio.StreamWriter) -> None:
    """Close a connection, at last without what its client does not take."""
    writer.close()
    try:
        async with asyncio.timeout(HANG_UP_S):
            await writer.wait_closed()
    except BROKEN:
        writer.transport.abort()


def _queued(fd: int) -> list[socket.socket]:
    """Accept whoever has connected to a listening socket by now; closing it would cut them off."""
    found = []
    with socket.socket(fileno=os.dup(fd)) as listening, contextlib.suppress(OSError):
        while True:
            client, _ = listening.accept()  # it does not wait: the socket is asyncio's
            client.setblocking(False)
            found.append(client)
    return found
