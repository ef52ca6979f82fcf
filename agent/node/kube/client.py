"""Asks the API server: one request, one connection; whatever comes back is bounded.

h11 keeps the protocol. A server that is slow, silent, endless or says what is no JSON costs a
deadline or a limit and ends that request only.
"""

import asyncio
import contextlib
import json
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlencode

import h11
import msgspec

from agent.kernel import package
from agent.model.errors import AgentError
from agent.model.values import shown
from agent.node.kube.access import Access, Credentials
from agent.node.kube.errors import (
    FORBIDDEN,
    UNAUTHORIZED,
    ApiError,
    ApiGarbled,
    ApiRefused,
    ApiUnreachable,
)

JSON = "application/json"
MERGE_PATCH = "application/merge-patch+json"

CONNECT_S = 5.0
DEADLINE_S = 15.0
LARGEST_HEAD = 64 * 1024
LARGEST_BODY = 32 * 1024 * 1024
LARGEST_LINE = 8 * 1024 * 1024  # etcd keeps no object of more than 1.5 MiB, a fifth of that in JSON
LONGEST_WORDS = 400  # of a refusal: who may not do what, and of what
CHUNK = 64 * 1024
LONGEST_RETRY_AFTER_S = 30.0
# A host that is gone without a word is missed by the kernel within half a minute.
KEEPALIVE = ((socket.TCP_KEEPIDLE, 15), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))
USER_TIMEOUT_MS = 30_000

Query = Mapping[str, str]
Document = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request. `path` is unquoted and starts with a slash."""

    method: str
    path: str
    query: Query
    body: bytes = b""
    content_type: str = JSON

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


class ApiClient:
    """The one door to the API server. `credentials` are read for each request."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials
        self._agent = f"{package.NAME}/{package.version()}"

    async def get(
        self, path: str, query: Query | None = None, *, deadline_s: float = DEADLINE_S
    ) -> Document:
        """Return a document. Raises: ApiRefused, ApiUnreachable."""
        return await self._ask(Call(method="GET", path=path, query=query or {}), deadline_s)

    async def send(
        self, method: str, path: str, document: Document, content_type: str = JSON
    ) -> Document:
        """Write something and return the answer. Raises: ApiRefused, ApiUnreachable."""
        body = json.dumps(document).encode()
        call = Call(method=method, path=path, query={}, body=body, content_type=content_type)
        return await self._ask(call, DEADLINE_S)

    async def _ask(self, call: Call, deadline_s: float) -> Document:
        try:
            async with asyncio.timeout(deadline_s), self._answer(call) as parts:
                body = bytearray()
                async for part in parts:
                    body += part
                    if len(body) > LARGEST_BODY:
                        raise ApiGarbled(f"{call}: the answer is longer than {LARGEST_BODY} B")
        except TimeoutError as error:
            raise ApiUnreachable(f"{call}: no answer within {deadline_s:g} s") from error
        return decoded(bytes(body), call)

    async def watch(
        self,
        path: str,
        query: Query,
        *,
        began: Callable[[], None],
        hear: Callable[[Document], None],
        silence_s: float,
    ) -> None:
        """Hand on what the server tells, from its consent, which is told to `began`, to its end.

        Raises: ApiRefused; ApiUnreachable, also if nothing was heard for `silence_s` seconds.
        """
        call = Call(method="GET", path=path, query=query)
        loop, rest = asyncio.get_running_loop(), bytearray()
        try:
            async with asyncio.timeout(DEADLINE_S) as patience, self._answer(call) as parts:
                began()
                patience.reschedule(loop.time() + silence_s)
                async for part in parts:
                    patience.reschedule(loop.time() + silence_s)
                    rest += part
                    for line in _lines(rest):
                        hear(decoded(line, call))
                    if len(rest) > LARGEST_LINE:
                        raise ApiGarbled(f"{call}: a line is longer than {LARGEST_LINE} B")
        except TimeoutError as error:
            raise ApiUnreachable(f"{call}: the server has gone silent") from error

    @contextlib.asynccontextmanager
    async def _answer(self, call: Call) -> AsyncIterator[AsyncIterator[bytes]]:
        """Send a request and yield the parts of the answer's body. Raises: ApiError."""
        try:
            access = await asyncio.to_thread(self._credentials.read)
        except AgentError as error:
            raise ApiUnreachable(str(error)) from error
        reader, writer = await _connect(access)
        protocol = h11.Connection(h11.CLIENT, max_incomplete_event_size=LARGEST_HEAD)
        try:
            writer.write(_wire(protocol, call, access, self._agent))
            head = await _head(protocol, reader)
            if not 200 <= head.status_code < 300:
                raise await _refusal(protocol, reader, head, call, access)
            yield _body(protocol, reader)
        except (h11.RemoteProtocolError, OSError) as error:
            raise ApiUnreachable(f"{access.address}: {call}: {_said(error)}") from error
        finally:
            writer.transport.abort()


async def _connect(access: Access) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    name = (access.server_name or access.host) if access.tls else None
    try:
        async with asyncio.timeout(CONNECT_S):
            reader, writer = await asyncio.open_connection(
                access.host, access.port, ssl=access.tls, server_hostname=name, limit=CHUNK
            )
    except TimeoutError as error:
        raise ApiUnreachable(f"{access.address} does not answer") from error
    except (OSError, ssl.SSLError, UnicodeError) as error:
        raise ApiUnreachable(f"{access.address} cannot be reached: {_said(error)}") from error
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, seconds in KEEPALIVE:
        sock.setsockopt(socket.IPPROTO_TCP, option, seconds)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MS)
    return reader, writer


def _wire(protocol: h11.Connection, call: Call, access: Access, agent: str) -> bytes:
    target = quote(access.prefix + call.path)
    if call.query:
        target += f"?{urlencode(call.query)}"
    headers = [
        ("host", access.address),
        ("accept", JSON),
        ("user-agent", agent),
        ("connection", "close"),
    ]
    if access.token:
        headers.append(("authorization", f"Bearer {access.token}"))
    if call.body:
        headers += [("content-type", call.content_type), ("content-length", str(len(call.body)))]
    parts = [
        protocol.send(h11.Request(method=call.method, target=target, headers=headers)),
        protocol.send(h11.Data(data=call.body)) if call.body else b"",
        protocol.send(h11.EndOfMessage()),
    ]
    return b"".join(part for part in parts if part)


async def _next(protocol: h11.Connection, reader: asyncio.StreamReader) -> Any:
    while True:
        event = protocol.next_event()
        if event is not h11.NEED_DATA:
            return event
        protocol.receive_data(await reader.read(CHUNK))


async def _head(protocol: h11.Connection, reader: asyncio.StreamReader) -> h11.Response:
    while True:
        event = await _next(protocol, reader)
        if isinstance(event, h11.Response):
            return event
        if not isinstance(event, h11.InformationalResponse):
            raise h11.RemoteProtocolError("the connection was closed without an answer")


async def _body(protocol: h11.Connection, reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while isinstance(event := await _next(protocol, reader), h11.Data):
        yield bytes(event.data)


async def _refusal(
    protocol: h11.Connection,
    reader: asyncio.StreamReader,
    head: h11.Response,
    call: Call,
    access: Access,
) -> ApiRefused:
    """Return an error with the server's own words, as far as they can be read."""
    body = b""
    with contextlib.suppress(h11.RemoteProtocolError, OSError):
        async for part in _body(protocol, reader):
            body += part
            if len(body) > LARGEST_HEAD:
                break
    said = ""
    with contextlib.suppress(ApiError):
        said = str(decoded(body, call).get("message") or "")
    hint = ""
    if head.status_code == UNAUTHORIZED:
        hint = f"; the credentials of the agent are refused ({access.about or 'there are none'})"
    elif head.status_code == FORBIDDEN:
        hint = "; the agent lacks this right (RBAC)"
    headers = dict(head.headers)
    wait = headers.get(b"retry-after", b"").decode("ascii", "replace")
    after_s = min(float(wait), LONGEST_RETRY_AFTER_S) if wait.isdigit() else 0.0
    text = f"{call}: {head.status_code}{f' {shown(said, LONGEST_WORDS)}' if said else ''}{hint}"
    return ApiRefused(head.status_code, text, after_s)


def decoded(data: bytes, call: Call) -> Document:
    """Return a JSON object. Raises: ApiGarbled for anything else."""
    try:
        found = msgspec.json.decode(data)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise ApiGarbled(f"{call}: what came back is no JSON: {_said(error)}") from error
    if not isinstance(found, dict):
        raise ApiGarbled(f"{call}: what came back is no JSON object")
    return found


def _lines(rest: bytearray) -> list[bytes]:
    """Take the whole lines out of what has come so far; empty ones do not count."""
    end = rest.rfind(b"\n")
    if end < 0:
        return []
    whole = bytes(rest[:end])
    del rest[: end + 1]
    return [line for line in whole.split(b"\n") if line.strip()]


def _said(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
