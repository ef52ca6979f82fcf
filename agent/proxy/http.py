"""A small HTTP client on a socket that somebody else has opened. GET only, bounded.

h11 keeps the protocol; what stands here are the limits. The other side is a pod's, so it may be
dead, slow, endless or no HTTP server at all. Every wait is cancelled by the caller's deadline.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import h11

from agent.model.errors import EnvironmentLacks

MAX_HEAD_BYTES = 64 * 1024
CHUNK = 32 * 1024
OK = 200
MIB = 1 << 20


class ProxyUnreadable(EnvironmentLacks):
    """What answers there is not what it should be, too slow or too long."""


Take = Callable[[bytes], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer; `server` is the header of that name. `body` is empty where it was handed on."""

    status: int
    server: str
    body: bytes = b""


async def fetch(sock: socket.socket, path: str, *, deadline_s: float, max_bytes: int) -> Reply:
    """Return the answer to a GET. The socket is closed.

    Raises: ProxyUnreadable.
    """
    parts: list[bytes] = []

    async def take(data: bytes) -> None:
        parts.append(data)

    head = await _bounded(sock, _request(path), take, deadline_s, max_bytes)
    return Reply(head.status, head.server, b"".join(parts))


async def stream(
    sock: socket.socket,
    path: str,
    take: Take,
    *,
    deadline_s: float,
    max_bytes: int,
    accept: str,
) -> None:
    """Give the body of an answer of status 200 to `take` as it comes. The socket is closed.

    The time that `take` needs is not the other side's and does not count.

    Raises: ProxyUnreadable, also for any other status, and what `take` raises.
    """
    await _bounded(sock, _request(path, accept), take, deadline_s, max_bytes, only=OK)


async def _bounded(
    sock: socket.socket,
    request: h11.Request,
    take: Take,
    deadline_s: float,
    max_bytes: int,
    only: int | None = None,
) -> Reply:
    try:
        async with asyncio.timeout(deadline_s) as deadline:
            with sock:
                return await _exchange(sock, request, _uncounted(take, deadline), max_bytes, only)
    except TimeoutError:
        raise ProxyUnreadable(f"did not answer in full within {deadline_s:g} seconds") from None
    except h11.RemoteProtocolError as error:
        raise ProxyUnreadable(f"does not answer as an HTTP server does ({error})") from error
    except OSError as error:
        raise ProxyUnreadable(f"broke the connection: {error.strerror or error}") from error


def _request(path: str, accept: str = "*/*") -> h11.Request:
    headers = [
        ("host", "localhost"),
        ("user-agent", "intercept-agent"),
        ("accept", accept),
        ("connection", "close"),
    ]
    return h11.Request(method="GET", target=path, headers=headers)


def _uncounted(take: Take, deadline: asyncio.Timeout) -> Take:
    loop = asyncio.get_running_loop()

    async def taking(data: bytes) -> None:
        started = loop.time()
        await take(data)
        when = deadline.when()
        if when is not None:
            deadline.reschedule(when + loop.time() - started)

    return taking


async def _exchange(
    sock: socket.socket,
    request: h11.Request,
    take: Take,
    max_bytes: int,
    only: int | None,
) -> Reply:
    loop = asyncio.get_running_loop()
    protocol = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD_BYTES)
    sent = protocol.send(request), protocol.send(h11.EndOfMessage())
    await loop.sock_sendall(sock, b"".join(part or b"" for part in sent))
    head, size = Reply(0, ""), 0
    while True:
        event = protocol.next_event()
        if event is h11.NEED_DATA:
            protocol.receive_data(await loop.sock_recv(sock, CHUNK))
        elif isinstance(event, h11.Response):
            head = _head(event)
            if only not in (None, head.status):
                raise ProxyUnreadable(f"answers with status {head.status}")
        elif isinstance(event, h11.Data):
            size += len(event.data)
            if size > max_bytes:
                raise ProxyUnreadable(f"answers with more than {max_bytes // MIB} MiB")
            await take(bytes(event.data))
        elif isinstance(event, h11.EndOfMessage):
            return head
        elif not isinstance(event, h11.InformationalResponse):
            raise ProxyUnreadable("closed the connection without an answer")


def _head(response: h11.Response) -> Reply:
    servers = (value for name, value in response.headers if name == b"server")
    return Reply(response.status_code, bytes(next(servers, b"")).decode("latin-1"))
