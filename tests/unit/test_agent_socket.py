"""The agent's socket and its HTTP pages: bounded, and one bad client harms no other."""

import asyncio
import contextlib
import json
import os
import socket
import stat
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from agent.cni import frames
from agent.cni.server import Server
from agent.model.errors import AgentError, EnvironmentLacks
from agent.observe.http import Answer, HttpServer

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="the socket answers root only")


async def echo(request: Mapping[str, Any]) -> object:
    if request.get("fail"):
        raise AgentError("as you asked")
    return request.get("said")


def with_server(path: Path, part: Callable[[], Awaitable[None]]) -> None:
    async def run() -> None:
        server = Server(path, {"echo": echo})
        await server.start()
        try:
            await part()
        finally:
            await server.close()

    asyncio.run(run())


async def ask(path: Path, document: object) -> Any:
    reader, writer = await asyncio.open_unix_connection(str(path))
    try:
        await frames.write(writer, document)
        return await frames.read(reader)
    finally:
        writer.close()


@needs_root
def test_requests_are_answered_and_refused_in_words(tmp_path: Path) -> None:
    path = tmp_path / "agent.sock"

    async def part() -> None:
        assert await ask(path, {"do": "echo", "said": 5}) == {"result": 5}
        refused = await ask(path, {"do": "echo", "fail": True})
        assert refused["error"]["message"] == "as you asked"
        for odd in ({"do": "nothing"}, [1], "x", None):
            assert "echo" in (await ask(path, odd))["error"]["message"]

    with_server(path, part)
    assert not path.exists()


@needs_root
def test_socket_is_for_root_only(tmp_path: Path) -> None:
    path = tmp_path / "agent.sock"

    async def part() -> None:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600

    with_server(path, part)


@needs_root
@pytest.mark.parametrize(
    "raw",
    [
        frames.HEADER.pack(frames.MAX_REQUEST + 1, frames.VERSION),
        frames.HEADER.pack(2, 99) + b"{}",
        frames.HEADER.pack(4, frames.VERSION) + b"nope",
        b"GET / HTTP/1.1\r\n\r\n",
    ],
)
def test_bad_frame_is_told_and_ends_that_connection_only(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "agent.sock"

    async def part() -> None:
        reader, writer = await asyncio.open_unix_connection(str(path))
        writer.write(raw)
        assert "error" in await frames.read(reader)
        assert await reader.read() == b""
        writer.close()
        assert await ask(path, {"do": "echo", "said": 1}) == {"result": 1}

    with_server(path, part)


@needs_root
def test_client_that_says_nothing_does_not_hold_up_others(tmp_path: Path) -> None:
    path = tmp_path / "agent.sock"

    async def part() -> None:
        _, silent = await asyncio.open_unix_connection(str(path))
        assert await ask(path, {"do": "echo", "said": 1}) == {"result": 1}
        silent.close()

    with_server(path, part)


@needs_root
def test_second_agent_is_refused_and_a_dead_ones_socket_replaced(tmp_path: Path) -> None:
    path = tmp_path / "agent.sock"

    async def part() -> None:
        with pytest.raises(EnvironmentLacks, match="another agent"):
            await Server(path, {}).start()

    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with_server(path, part)


async def page() -> Answer:
    return Answer.of({"ok": True})


async def fetch(port: int, text: str) -> tuple[int, bytes]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(text.encode())
    data = await reader.read()
    writer.close()
    head, _, body = data.partition(b"\r\n\r\n")
    return (int(head.split()[1]) if head else 0), body


class Parts:
    """A long body that notes whether it was closed."""

    def __init__(self) -> None:
        self.closed = 0

    def __iter__(self) -> Iterator[bytes]:
        yield from (b"part %d\n" % number for number in range(3))

    def close(self) -> None:
        self.closed += 1


PARTS = Parts()


async def long_page() -> Answer:
    return Answer(200, b"first\n", "text/plain", PARTS)


def with_http(part: Callable[[int], Awaitable[None]]) -> None:
    async def run() -> None:
        server = HttpServer({"/page": page, "/long": long_page}, {"/local": page})
        port = await server.start("127.0.0.1", 0)
        try:
            await part(port)
        finally:
            await server.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        ("GET /page HTTP/1.1", 200),
        ("GET /page?x=1 HTTP/1.1", 200),
        ("HEAD /page HTTP/1.1", 200),
        ("GET /local HTTP/1.1", 200),
        ("GET /none HTTP/1.1", 404),
        ("POST /page HTTP/1.1", 405),
    ],
)
def test_pages_are_answered(request_line: str, status: int) -> None:
    async def part(port: int) -> None:
        found, body = await fetch(port, f"{request_line}\r\nHost: x\r\n\r\n")
        assert found == status
        if request_line.startswith("GET /page"):
            assert json.loads(body) == {"ok": True}

    with_http(part)


@pytest.mark.parametrize(
    ("request_line", "wanted"),
    [
        ("GET /long HTTP/1.0", b"first\npart 0\npart 1\npart 2\n"),
        (
            "GET /long HTTP/1.1",
            b"6\r\nfirst\n\r\n7\r\npart 0\n\r\n7\r\npart 1\n\r\n7\r\npart 2\n\r\n0\r\n\r\n",
        ),
        ("HEAD /long HTTP/1.1", b""),
    ],
)
def test_long_page_comes_part_by_part_and_is_closed(request_line: str, wanted: bytes) -> None:
    async def part(port: int) -> None:
        before = PARTS.closed
        assert await fetch(port, f"{request_line}\r\nHost: x\r\n\r\n") == (200, wanted)
        assert PARTS.closed == before + 1

    with_http(part)


@pytest.mark.parametrize("text", ["nonsense\r\n\r\n", "GET /page HTTP/1.1\r\nA: " + "x" * 100_000])
def test_bad_or_endless_request_ends_alone(text: str) -> None:
    async def part(port: int) -> None:
        with contextlib.suppress(ConnectionError):  # it may be cut off while it still sends
            assert (await fetch(port, text))[0] != 200
        assert (await fetch(port, "GET /page HTTP/1.1\r\nHost: x\r\n\r\n"))[0] == 200

    with_http(part)


def test_port_that_is_taken_is_named() -> None:
    async def part(port: int) -> None:
        with pytest.raises(EnvironmentLacks, match=f"127.0.0.1:{port}"):
            await HttpServer({}).start("127.0.0.1", port)

    with_http(part)
