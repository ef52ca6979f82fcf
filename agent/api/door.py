"""Passes the connections of gRPC clients on to the gRPC server, which is started for the first.

Most agents are never asked over gRPC, and where no container runtime is asked over it either, it
need not be loaded at all: that saves 11 MiB. Beside a runtime's client the server costs one.
"""

import asyncio
import contextlib
import importlib
import logging
from asyncio import StreamReader, StreamWriter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from agent.api.known import Known
from agent.model.errors import AgentError

if TYPE_CHECKING:
    from agent.api.server import GrpcServer

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 32
CHUNK = 64 * 1024
# How long one piece may wait for whoever it is for; keepalive ends the connection before that.
STALLED_S = 120.0


class GrpcDoor:
    """One gRPC server that may never be needed. For one event loop."""

    def __init__(self, known: Known, ready: Callable[[], bool], folder: Path) -> None:
        """`folder` must be there, and root's, when the first client comes."""
        self.folder = folder
        self._known = known
        self._ready = ready
        self._starting = asyncio.Lock()
        self._server: GrpcServer | None = None
        self.connections = 0

    async def serve(self, head: bytes, reader: StreamReader, writer: StreamWriter) -> None:
        """Serve one connection, of which `head` has been read, until it ends.

        Who connects must have been checked by now.
        """
        if self.connections >= MAX_CONNECTIONS:
            log.warning("a gRPC client is refused", extra={"connections": self.connections})
            return
        self.connections += 1
        try:
            server = await self._running()
            theirs, ours = await asyncio.open_unix_connection(server.path)
            ours.write(head)
            await _splice((reader, ours), (theirs, writer))
        except (AgentError, OSError) as error:
            log.warning("a gRPC client is not served", extra={"cause": str(error)})
        finally:
            self.connections -= 1

    def changed(self) -> None:
        """Tell those who watch the health: the agent may be ready now, or not any more."""
        if self._server is not None:
            self._server.health.changed()

    async def close(self) -> None:
        async with self._starting:
            if self._server is not None:
                await self._server.close()
                self._server = None

    async def _running(self) -> "GrpcServer":
        async with self._starting:
            if self._server is None:
                # It takes a while, and pods may start meanwhile.
                await asyncio.to_thread(importlib.import_module, "agent.api.server")
                from agent.api.server import GrpcServer
                from agent.api.service import Agent

                server = GrpcServer(Agent(self._known), self._ready)
                await server.start(self.folder)
                self._server = server
            return self._server


Way = tuple[StreamReader, StreamWriter]


async def _splice(*ways: Way) -> None:
    """Pass on in both directions until either side ends."""
    tasks = [asyncio.create_task(_pass_on(*way)) for way in ways]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for _, writer in ways:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


async def _pass_on(reader: StreamReader, writer: StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(CHUNK):
            writer.write(data)
            async with asyncio.timeout(STALLED_S):
                await writer.drain()
