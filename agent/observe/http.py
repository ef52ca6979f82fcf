"""A small HTTP server on asyncio streams, for health, metrics and status. GET only, bounded.

h11 keeps the protocol; what stands here are the limits: number of clients, size of a request, time
to send one and to take an answer. A slow client ends alone.
"""

import asyncio
import contextlib
import ipaddress
import json
import logging
import socket
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import parse_qsl

import h11

from agent.kernel.connections import BACKLOG, Connections
from agent.model.errors import EnvironmentLacks

log = logging.getLogger(__name__)

MAX_CLIENTS = 64
REQUEST_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 10.0
STREAM_TIMEOUT_S = 60.0
MAX_REQUEST_BYTES = 16 * 1024
MAX_PARAMETERS = 16
CHUNK = 4096


class Stream(Protocol):
    """The parts of a long body; closed when they were sent, or when the client is gone."""

    def __iter__(self) -> Iterator[bytes]: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Answer:
    """A status, a body and its type. `more` follows the body part by part, `headers` are added."""

    status: int
    body: bytes
    content_type: str = "application/json"
    more: Stream | None = None
    headers: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, document: object, status: int = 200) -> "Answer":
        return cls(status, json.dumps(document).encode() + b"\n")


@dataclass(frozen=True, slots=True)
class Request:
    """What a page is asked for; of a parameter that is given twice the last counts.

    `own_name` says that the client called this host by an address or by its own name. A browser
    that was led here by somebody else's name (DNS rebinding) does not. `local` says that it is on
    this host besides.
    """

    path: str
    query: Mapping[str, str]
    own_name: bool
    local: bool


Page = Callable[[Request], Awaitable[Answer]]


class HttpServer:
    """Serves pages by path; those in `local` only to clients of this host."""

    def __init__(self, pages: Mapping[str, Page], local: Mapping[str, Page] | None = None) -> None:
        self._pages = pages
        self._local = local or {}
        self._clients = Connections(self._talk, MAX_CLIENTS)
        self._server: asyncio.Server | None = None

    async def start(self, address: str, port: int, instead: Iterable["HttpServer"] = ()) -> int:
        """Listen and return the port. Port 0 takes any free one.

        `instead` are servers that are closed after this one was started: it may have their ports.

        Raises: EnvironmentLacks, naming address and port, if it cannot be had.
        """
        leaving = [sock for other in instead if other._server for sock in other._server.sockets]
        try:
            serve, shared = self._clients.serve, bool(leaving)
            with _shared(leaving):
                self._server = await asyncio.start_server(
                    serve, address, port, backlog=BACKLOG, reuse_port=shared
                )
        except OSError as error:
            raise EnvironmentLacks(
                f"cannot listen on {address}:{port}: {error.strerror}; `ss -ltnp` shows who does; "
                "choose another port in the configuration, or 0 for none"
            ) from error
        _share(self._server.sockets, on=False)
        return int(self._server.sockets[0].getsockname()[1])

    @property
    def url(self) -> str | None:
        """Where it listens; None if it does not."""
        if self._server is None or not self._server.sockets:
            return None
        address, port = self._server.sockets[0].getsockname()[:2]
        return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"

    async def close(self, patience_s: float = 0.0) -> None:
        """Let nobody in any more, and end every connection after at most `patience_s`."""
        if self._server is not None:
            await self._clients.close(self._server, patience_s)

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        protocol = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_REQUEST_BYTES)
        try:
            with self._clients.waiting():
                async with asyncio.timeout(REQUEST_TIMEOUT_S):
                    request = await _request(protocol, reader)
        except h11.RemoteProtocolError as error:
            answer, with_body = Answer.of({"error": str(error)}, error.error_status_hint), True
        else:
            if request is None:
                return
            answer, with_body = await self._answer(request, writer), request.method != b"HEAD"
        with contextlib.closing(answer.more) if answer.more else contextlib.nullcontext():
            async with asyncio.timeout(STREAM_TIMEOUT_S if answer.more else ANSWER_TIMEOUT_S):
                for data in _wire(protocol, answer, with_body=with_body):
                    writer.write(data)
                    with self._clients.waiting():
                        await writer.drain()

    async def _answer(self, request: h11.Request, writer: asyncio.StreamWriter) -> Answer:
        try:
            return await self._page(request, writer)
        except Exception:  # a bug in one page must not end the connection without a word
            log.exception("a page failed", extra={"target": request.target.decode("ascii")})
            return Answer.of({"error": "the agent failed to answer; its log says why"}, 500)

    async def _page(self, request: h11.Request, writer: asyncio.StreamWriter) -> Answer:
        path, _, query = request.target.decode("ascii", "replace").partition("?")
        if request.method not in (b"GET", b"HEAD"):
            return Answer.of({"error": "only GET is answered here"}, 405)
        page = self._local.get(path) or self._pages.get(path)
        if page is None:
            return Answer.of({"error": f"there is no {path}"}, 404)
        own_name = _is_own_name(dict(request.headers).get(b"host", b""))
        local = own_name and _from_this_host(writer)
        if path in self._local and not local:
            return Answer.of({"error": f"{path} is answered to this host only"}, 403)
        return await page(Request(path, _parameters(query), own_name, local))


def _wire(protocol: h11.Connection, answer: Answer, *, with_body: bool) -> Iterator[bytes]:
    """Yield what is to be sent; the length is told beforehand where it is known."""
    headers = [
        ("content-type", answer.content_type),
        ("cache-control", "no-store"),
        ("x-content-type-options", "nosniff"),
        ("connection", "close"),
        *answer.headers,
    ]
    if answer.more is None:
        headers.append(("content-length", str(len(answer.body))))
    head = protocol.send(h11.Response(status_code=answer.status, headers=headers))
    if not with_body:
        yield head + protocol.send(h11.EndOfMessage())
        return
    yield head + protocol.send(h11.Data(data=answer.body))
    for part in answer.more or ():
        yield protocol.send(h11.Data(data=part))
    yield protocol.send(h11.EndOfMessage())


@contextlib.contextmanager
def _shared(sockets: Sequence[socket.socket]) -> Iterator[None]:
    """Let sockets of this process be bound to the ports of these, for as long as the block takes.

    Others get in on the way only if they are of the same user and ask to share, which few do.
    """
    _share(sockets, on=True)
    try:
        yield
    finally:
        _share(sockets, on=False)


def _share(sockets: Iterable[socket.socket], *, on: bool) -> None:
    for sock in sockets:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, on)


async def _request(protocol: h11.Connection, reader: asyncio.StreamReader) -> h11.Request | None:
    while True:
        event = protocol.next_event()
        if isinstance(event, h11.Request):
            return event
        if event is h11.NEED_DATA:
            data = await reader.read(CHUNK)
            if not data:
                return None
            protocol.receive_data(data)
        else:
            return None


def _from_this_host(writer: asyncio.StreamWriter) -> bool:
    peer = writer.get_extra_info("peername")
    return bool(peer) and ipaddress.ip_address(str(peer[0]).partition("%")[0]).is_loopback


def _is_own_name(host: bytes) -> bool:
    """Whether a Host header has an address or a name that no stranger can have registered.

    Those are names without a dot and the name of this host. Who sends no header is no browser.
    """
    text = host.decode("ascii", "replace").lower()
    name = text.partition("]")[0][1:] if text.startswith("[") else text.partition(":")[0]
    if ("." not in name and ":" not in name) or name == socket.gethostname().lower():
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _parameters(query: str) -> dict[str, str]:
    """Return the parameters of a query; of one with too many, none."""
    try:
        return dict(parse_qsl(query, max_num_fields=MAX_PARAMETERS))
    except ValueError:
        return {}
