"""The connections of an asyncio server: bounded in number, and ended with the server."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

BROKEN = (asyncio.IncompleteReadError, ConnectionError, TimeoutError, asyncio.CancelledError)

# The event loop needs some turns between an accept and the client's own task.
ACCEPTING_S = 0.02


class Connections:
    """Talks to each client in its own task; what breaks in one ends that one only."""

    def __init__(self, talk: Talk, limit: int) -> None:
        self._talk = talk
        self._limit = limit
        self._tasks: set[asyncio.Task[object]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Give this to asyncio.start_server."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            if len(self._tasks) <= self._limit:
                with contextlib.suppress(*BROKEN):
                    await self._talk(reader, writer)
        finally:
            self._tasks.discard(task)
            writer.close()
            with contextlib.suppress(*BROKEN):
                await writer.wait_closed()

    async def close(self, server: asyncio.Server) -> None:
        """End the server and every connection, and wait until they have ended.

        Accepting stops first: a server that closes while a connection is half accepted leaves that
        one's socket open (Python 3.11, Server._attach).
        """
        loop = asyncio.get_running_loop()
        for sock in server.sockets:
            loop.remove_reader(sock.fileno())
        await asyncio.sleep(ACCEPTING_S)
        server.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
