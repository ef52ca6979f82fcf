"""The agent's socket and its HTTP pages: bounded, and one bad client harms no other."""

import asyncio
import contextlib
import json
import os
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from agent.cli.agent_client import AgentClient
from agent.cli.main import main
from agent.cni import frames
from agent.cni.server import MAX_CLIENTS, Server
from agent.kernel import connections
from agent.model.errors import AgentError, EnvironmentLacks
from agent.observe import http
from agent.observe.http import Answer, HttpServer, Request

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


KNOCK = """
import os, socket, sys
os.setuid(int(sys.argv[3]))
with socket.socket(socket.AF_UNIX) as sock:
    sock.connect(sys.argv[1])
    try:
        sock.sendall(bytes.fromhex(sys.argv[2]))
        print("answered" if sock.recv(1) else "sent away")
    except ConnectionError:
        print("sent away")
"""


@needs_root
@pytest.mark.parametrize("first", [frames.encode({"do": "echo"}), b"PRI * HTTP/2.0"])
def test_other_users_are_not_answered_even_where_the_file_would_let_them_in(first: bytes) -> None:
    taken_over = []

    async def http2(head: bytes, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        taken_over.append(head)
        writer.write(b"!")

    async def knock(path: Path, user: int) -> bytes:
        command = (sys.executable, "-I", "-S", "-c", KNOCK, str(path), first.hex(), str(user))
        knocking = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        return (await knocking.communicate())[0]

    async def run(path: Path) -> None:
        server = Server(path, {"echo": echo}, http2)
        await server.start()
        os.chmod(path, 0o666)
        try:
            assert await knock(path, 65534) == b"sent away\n"
            assert taken_over == []
            assert await knock(path, 0) == b"answered\n"
        finally:
            await server.close()

    with tempfile.TemporaryDirectory(prefix="it-") as folder:
        os.chmod(folder, 0o711)
        asyncio.run(run(Path(folder) / "agent.sock"))


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
def test_clients_that_ask_nothing_make_room_for_one_that_does(tmp_path: Path) -> None:
    path = tmp_path / "agent.sock"

    async def part() -> None:
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(MAX_CLIENTS + 50):
                _, writer = await asyncio.open_unix_connection(str(path))
                stack.callback(writer.close)
            assert await ask(path, {"do": "echo", "said": 1}) == {"result": 1}

    with_server(path, part)


@needs_root
def test_clients_that_are_being_answered_are_not_dropped_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent.cni.server.MAX_CLIENTS", 3)
    path, go_on = tmp_path / "agent.sock", asyncio.Event()

    async def slowly(request: Mapping[str, Any]) -> object:
        await go_on.wait()
        return request["said"]

    async def run() -> None:
        server = Server(path, {"slow": slowly})
        await server.start()
        asked = [asyncio.create_task(ask(path, {"do": "slow", "said": n})) for n in range(3)]
        await asyncio.sleep(0.1)
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await ask(path, {"do": "slow"})
        go_on.set()
        assert await asyncio.gather(*asked) == [{"result": n} for n in range(3)]
        await server.close()

    asyncio.run(run())


@needs_root
def test_second_agent_is_refused_and_a_dead_ones_socket_replaced(tmp_path: Path) -> None:
    path = tmp_path / "agent.sock"

    async def part() -> None:
        with pytest.raises(EnvironmentLacks, match="another agent"):
            await Server(path, {}).start()

    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with_server(path, part)


@needs_root
def test_server_that_moves_away_answers_those_who_had_connected(tmp_path: Path) -> None:
    path = tmp_path / "agent.sock"

    async def run() -> None:
        server = Server(path, {"echo": echo})
        await server.start()
        with contextlib.ExitStack() as stack:
            clients = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(3)]
            for number, client in enumerate(clients):  # the server has no turn meanwhile
                client.connect(str(path))
                client.sendall(frames.encode({"do": "echo", "said": number}))
            closing = asyncio.create_task(server.close(10))
            for number, client in enumerate(clients):
                reader, writer = await asyncio.open_unix_connection(sock=client)
                assert await frames.read(reader) == {"result": number}
                writer.close()
            await closing
        assert not path.exists()

    asyncio.run(run())


@needs_root
def test_agent_that_follows_while_the_last_one_ends_keeps_its_socket(tmp_path: Path) -> None:
    path = tmp_path / "agent.sock"

    async def follow() -> Server:
        while True:
            with contextlib.suppress(EnvironmentLacks):
                server = Server(path, {"echo": echo})
                await server.start()
                return server
            await asyncio.sleep(0)

    async def run() -> None:
        last = Server(path, {"echo": echo})
        await last.start()
        following = asyncio.create_task(follow())
        await last.close()
        server = await following
        assert await ask(path, {"do": "echo", "said": 1}) == {"result": 1}
        await server.close()
        assert not path.exists()

    for _ in range(20):
        asyncio.run(run())


@needs_root
def test_second_agent_is_refused_also_before_the_first_listens(tmp_path: Path) -> None:
    path = tmp_path / "agent.sock"

    async def run() -> None:
        servers = [Server(path, {"echo": echo}) for _ in range(8)]
        started = await asyncio.gather(
            *(server.start() for server in servers), return_exceptions=True
        )
        assert [type(one) for one in started if one] == [EnvironmentLacks] * 7
        assert await ask(path, {"do": "echo", "said": 1}) == {"result": 1}
        await servers[started.index(None)].close()

    asyncio.run(run())


LARGE = bytes(30_000_000)


async def page(_: Request) -> Answer:
    return Answer.of({"ok": True})


async def large(_: Request) -> Answer:
    return Answer(200, LARGE)


async def broken(_: Request) -> Answer:
    raise KeyError("oops")


async def fetch(port: int, raw: str | bytes) -> tuple[int, bytes]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(raw.encode() if isinstance(raw, str) else raw)
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


async def long_page(_: Request) -> Answer:
    return Answer(200, b"first\n", "text/plain", PARTS)


async def get(port: int, path: str) -> tuple[int, bytes]:
    return await fetch(port, f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n")


async def asked(request: Request) -> Answer:
    return Answer.of({**request.query, "own_name": request.own_name, "local": request.local})


def with_http(part: Callable[[int], Awaitable[None]]) -> None:
    async def run() -> None:
        pages = {
            "/page": page,
            "/long": long_page,
            "/large": large,
            "/broken": broken,
            "/asked": asked,
        }
        server = HttpServer(pages, {"/local": page})
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
    ("host", "own"),
    [
        ("127.0.0.1:15020", True),
        ("[::1]:15020", True),
        ("::1", True),
        ("localhost:15020", True),
        ("node1", True),
        (socket.gethostname(), True),
        ("evil.example", False),
        ("EVIL.example:15020", False),
        ("127.0.0.1.evil.example", False),
        ("localhost.evil.example:80", False),
    ],
)
def test_pages_for_this_host_are_not_for_who_was_led_here_by_a_strange_name(
    host: str, own: bool
) -> None:
    async def part(port: int) -> None:
        request = f"GET %s HTTP/1.1\r\nHost: {host}\r\n\r\n"
        status, _ = await fetch(port, request % "/local")
        assert status == (200 if own else 403)
        assert (await fetch(port, request % "/page"))[0] == 200  # Prometheus has such names
        _, body = await fetch(port, request % "/asked")
        assert json.loads(body) == {"own_name": own, "local": own}

    with_http(part)


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("?a=1&b=x%20y+z", {"a": "1", "b": "x y z"}),
        ("?a=1&a=2", {"a": "2"}),
        ("?a=%ff%00%E2%98%83", {"a": "\ufffd\0\u2603"}),
        ("?" + "&".join(f"k{number}=v" for number in range(100)), {}),
        ("?&&=&%", {}),
    ],
)
def test_parameters_are_those_of_the_query(query: str, found: dict[str, str]) -> None:
    async def part(port: int) -> None:
        status, body = await get(port, f"/asked{query}")
        assert (status, json.loads(body)) == (200, {**found, "own_name": True, "local": True})

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


GET = b"GET /page HTTP/1.1\r\nHost: x\r\n"


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"\xff\x00" * 100 + b"\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
        (b"GET /page HTTP/1.1\r\n\r\n", 400),  # without a host
        (b"GET /page\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 405),
        (GET + b"A: " + b"x" * 100_000, 431),
        (GET + b"A: b\r\n" * 100_000, 431),
        (GET + b"Content-Length: nope\r\n\r\n", 400),
        (GET + b"Content-Length: 1000000\r\n\r\nhalf a body", 200),
        (b"POST" + GET[3:] + b"Content-Length: 1000000\r\n\r\nhalf a body", 405),
        (b"POST" + GET[3:] + b"Transfer-Encoding: chunked\r\n\r\nnope", 405),
        (GET + b"Expect: 100-continue\r\n\r\n", 200),
        (GET + b"Upgrade: h2c\r\nConnection: upgrade\r\n\r\n", 200),
        (b"GET ../../etc/passwd HTTP/1.1\r\nHost: x\r\n\r\n", 404),
        (b"GET //page HTTP/1.1\r\nHost: x\r\n\r\n", 404),
        (b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n", 405),
    ],
)
def test_odd_request_gets_its_status_and_ends_alone(raw: bytes, status: int) -> None:
    async def part(port: int) -> None:
        with contextlib.suppress(ConnectionError):  # it may be cut off while it still sends
            assert (await fetch(port, raw))[0] == status
        assert (await get(port, "/page"))[0] == 200

    with_http(part)


def test_requests_in_a_pipeline_get_one_answer() -> None:
    async def part(port: int) -> None:
        status, body = await fetch(port, (GET + b"\r\n") * 50)
        assert (status, json.loads(body)) == (200, {"ok": True})

    with_http(part)


def test_head_has_no_body() -> None:
    async def part(port: int) -> None:
        assert await fetch(port, b"HEAD" + GET[3:] + b"\r\n") == (200, b"")

    with_http(part)


def test_page_that_fails_is_told_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def part(port: int) -> None:
        status, body = await get(port, "/broken")
        assert status == 500
        assert b"its log says why" in body

    with_http(part)
    assert "oops" in caplog.text


def test_clients_that_send_nothing_make_room_for_one_that_does() -> None:
    async def part(port: int) -> None:
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(3 * http.MAX_CLIENTS):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                stack.callback(writer.close)
                writer.write(GET)  # half a request
            assert (await get(port, "/page"))[0] == 200

    with_http(part)


def test_header_that_trickles_in_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "REQUEST_TIMEOUT_S", 0.2)

    async def part(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        end = asyncio.create_task(reader.read())
        with contextlib.suppress(ConnectionError):
            while not end.done():
                writer.write(b"x")
                await writer.drain()
                await asyncio.sleep(0.02)
        with contextlib.suppress(ConnectionError):
            assert await end == b""
        writer.close()

    with_http(part)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_client_that_does_not_read_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "ANSWER_TIMEOUT_S", 0.1)
    monkeypatch.setattr(connections, "HANG_UP_S", 0.1)

    async def part(port: int) -> None:
        before = descriptors()
        with socket.create_connection(("127.0.0.1", port)) as silent:
            silent.sendall(b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n")
            await asyncio.sleep(0.05)
            assert (await get(port, "/page"))[0] == 200
            for _ in range(1000):
                if descriptors() == before + 1:
                    return
                await asyncio.sleep(0.02)
            pytest.fail("its connection is still held")

    with_http(part)


def test_large_page_arrives_whole() -> None:
    async def part(port: int) -> None:
        status, body = await get(port, "/large")
        assert (status, len(body)) == (200, len(LARGE))

    with_http(part)


def test_port_that_is_taken_is_named() -> None:
    async def part(port: int) -> None:
        with pytest.raises(EnvironmentLacks, match=f"127.0.0.1:{port}"):
            await HttpServer({}).start("127.0.0.1", port)

    with_http(part)


# --- the command line's end of the socket ---------------------------------------------------------


def ask_agent(path: Path) -> None:
    with AgentClient(path) as client:
        client.ask("pods")


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "is no agent of this version"),
        (frames.HEADER.pack(4, frames.VERSION) + b"nope", "holds no JSON"),
        (frames.HEADER.pack(frames.MAX_REPLY + 1, frames.VERSION), "is larger than"),
        (frames.HEADER.pack(4, frames.VERSION) + b"no", "ended"),
        (b"", "ended"),
    ],
)
def test_whoever_else_answers_is_named_in_a_sentence(
    tmp_path: Path, answer: bytes, said: str
) -> None:
    path = tmp_path / "agent.sock"

    async def answering(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await frames.read(reader)
        writer.write(answer)
        writer.close()

    async def run() -> None:
        server = await asyncio.start_unix_server(answering, path)
        async with server:
            with pytest.raises(EnvironmentLacks, match=said):
                await asyncio.to_thread(ask_agent, path)

    asyncio.run(run())


@pytest.mark.parametrize("command", ["pods", "status", "events"])
@pytest.mark.parametrize("by", ["--socket", "--config"])
def test_command_says_plainly_that_no_agent_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, by: str
) -> None:
    path, config = tmp_path / "agent.sock", tmp_path / "agent.yaml"
    config.write_text(f"socket: {path}\n")
    assert main([command, by, str(path if by == "--socket" else config), "-o", "json"]) == 3
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"error: no agent answers on {path}: No such file or directory")


def test_command_line_asks_without_loading_asyncio_or_grpc() -> None:
    code = "import sys, agent.cli.agent_client\n"
    code += "print(*{'asyncio', 'grpc', 'ssl'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("\n", "")
