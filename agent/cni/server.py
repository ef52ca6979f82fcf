"""The agent's socket: the door of the CNI plugin and of the command line.

Every connection is checked for the peer's credentials, bounded in size, number and time, and
answered by handlers that the daemon gives; a slow or bad client ends alone.
"""

import asyncio
import contextlib
import fcntl
import logging
import os
import socket
import struct
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from agent.cni import frames
from agent.kernel.connections import BACKLOG, Connections
from agent.model.errors import AgentError, EnvironmentLacks

log = logging.getLogger(__name__)

MAX_CLIENTS = 256
# What the connection of a gRPC client starts with (RFC 9113, section 3.4). As a frame it would be
# one of 1.3 GB, so none starts like this.
HTTP2 = b"PRI * HTTP/2.0"[: frames.HEADER.size]
# A plugin waits for a pod to be captured; sending its request must not take this long.
REQUEST_TIMEOUT_S = 10.0
UCRED = struct.Struct("=iII")  # struct ucred: pid, uid, gid

Handler = Callable[[Mapping[str, Any]], Awaitable[object]]
"""Answers one request; raises AgentError for what it refuses."""

Http2 = Callable[[bytes, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
"""Takes over a connection that speaks HTTP/2, and what has been read of it; it ends on return."""


class Server:
    """Serves one unix socket until it is closed."""

    def __init__(
        self, path: Path, handlers: Mapping[str, Handler], http2: Http2 | None = None
    ) -> None:
        self._path = path
        self._handlers = handlers
        self._http2 = http2
        self._clients = Connections(self._talk, MAX_CLIENTS)
        self._server: asyncio.Server | None = None
        self._claim = contextlib.ExitStack()

    async def start(self) -> None:
        """Listen. A socket left by an agent that died is replaced; one that is served is not.

        Raises: EnvironmentLacks.
        """
        with contextlib.ExitStack() as claim:
            claim.callback(os.close, await asyncio.to_thread(_lock, self._path))
            sock = await asyncio.to_thread(_listen, self._path)
            self._claim = claim.pop_all()
        serve = self._clients.serve
        self._server = await asyncio.start_unix_server(serve, sock=sock, backlog=BACKLOG)

    async def close(self, patience_s: float = 0.0) -> None:
        """Let nobody in any more, and end every connection after at most `patience_s`."""
        if self._server is not None:
            with self._claim, contextlib.suppress(OSError):
                os.unlink(self._path)  # while it is still ours: what is there next may be another's
            await self._clients.close(self._server, patience_s)

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if _peer_uid(writer) == 0:
            await self._converse(reader, writer)

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with self._clients.waiting():
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                head = await reader.readexactly(len(HTTP2))
        if head == HTTP2 and self._http2 is not None:
            await self._http2(head, reader, writer)
            return
        while True:
            try:
                with self._clients.waiting():
                    async with asyncio.timeout(REQUEST_TIMEOUT_S):
                        request, head = await frames.read(reader, header=head), b""
            except frames.BadFrame as error:
                await frames.write(writer, _refusal(error))
                return
            reply = await self._answer(request)
            with self._clients.waiting():
                async with asyncio.timeout(REQUEST_TIMEOUT_S):
                    await frames.write(writer, reply)

    async def _answer(self, request: object) -> object:
        if not isinstance(request, dict) or request.get("do") not in self._handlers:
            known = ", ".join(sorted(self._handlers))
            return _refusal(AgentError(f"a request names what to do, one of {known}"))
        try:
            return {"result": await self._handlers[request["do"]](request)}
        except AgentError as error:
            return _refusal(error)
        except Exception:  # a bug in one answer must not end the connection without a word
            log.exception("a request failed", extra={"do": request["do"]})
            return _refusal(AgentError("the agent failed to answer; its log says why"))


def _refusal(error: AgentError) -> dict[str, object]:
    return {"error": {"message": str(error), "exit_code": error.exit_code}}


def _peer_uid(writer: asyncio.StreamWriter) -> int:
    sock = writer.get_extra_info("socket")
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, UCRED.size)
    return int(UCRED.unpack(raw)[1])


def _lock(path: Path) -> int:
    """Be the only agent behind this path until the descriptor is closed or the process ends.

    Connecting alone does not tell: of two that start at once each would replace the other's socket.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise EnvironmentLacks(f"cannot write {path}.lock: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise EnvironmentLacks(f"another agent serves {path}; end it first") from None
    return lock


def _listen(path: Path) -> socket.socket:
    try:
        with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(OSError):
            probe.connect(str(path))
            raise EnvironmentLacks(f"another agent serves {path}; end it first")
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        sock = socket.socket(socket.AF_UNIX)  # closed by the server that takes it over
        previous = os.umask(0o177)  # so that there is no moment at which others could connect
        try:
            sock.bind(str(path))
        finally:
            os.umask(previous)
        sock.listen(BACKLOG)
    except OSError as error:
        raise EnvironmentLacks(f"cannot listen on {path}: {error.strerror or error}") from error
    return sock
