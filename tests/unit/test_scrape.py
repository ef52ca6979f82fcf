"""Asking many proxies at once: one that is dead, slow or lies costs only itself."""

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable

import pytest

from agent.model.errors import AgentError
from agent.proxy import scrape
from agent.proxy.merge import Merge
from agent.proxy.scrape import Outcome, Scraper, Subject

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
DEADLINE_S = 0.5
GOOD = b"# TYPE c counter\nc 1\n"


def answer(body: bytes, status: int = 200) -> Talk:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n" % (status, len(body)) + body)

    return talk


async def mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(60)


async def half(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 X\r\ncontent-length: 100\r\n\r\n" + GOOD)


async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 X\r\n\r\n")
    while True:
        writer.write(b"# nothing\n" * 10_000)
        await writer.drain()


async def abrupt(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Close with the request unread, which resets the connection."""


async def rude(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"220 mail.example ESMTP\r\n")


class Node:
    """Proxies by name; who was connected to is noted."""

    def __init__(self, **talks: Talk | None) -> None:
        self.asked: list[str] = []
        self._talks = talks
        self._tasks: list[asyncio.Task[None]] = []

    def subjects(self) -> list[Subject]:
        return [Subject("shop", name, self._connect(name)) for name in self._talks]

    def _connect(self, name: str) -> Callable[[], Awaitable[socket.socket]]:
        async def connect() -> socket.socket:
            self.asked.append(name)
            talk = self._talks[name]
            if talk is None:
                raise AgentError("nobody listens")
            ours, theirs = socket.socketpair()
            self._tasks.append(asyncio.create_task(self._serve(theirs, talk)))
            ours.setblocking(False)
            return ours

        return connect

    async def _serve(self, sock: socket.socket, talk: Talk) -> None:
        reader, writer = await asyncio.open_connection(sock=sock)
        with contextlib.closing(writer), contextlib.suppress(OSError):
            await talk(reader, writer)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def ask(node: Node, *, times: int = 1, total_s: float = 30.0) -> tuple[list[Outcome], str]:
    """Ask all proxies of a node, `times` over; return what came of the last time."""

    async def run() -> tuple[list[Outcome], str]:
        scraper = Scraper(reserved="intercept_", deadline_s=DEADLINE_S, total_s=total_s)
        try:
            for _ in range(times):
                with contextlib.closing(Merge()) as merge:
                    outcomes = await scraper.scrape(node.subjects(), merge)
                    text = b"".join(merge).decode()
            return outcomes, text
        finally:
            await node.close()

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("talk", "problem"),
    [
        (None, "nobody listens"),
        (mute, "did not answer in full within 0.5 seconds"),
        (half, "does not answer as an HTTP server does"),
        (endless, "MiB"),
        (abrupt, "broke the connection: Connection reset by peer"),
        (rude, "does not answer as an HTTP server does"),
        (answer(GOOD, 503), "status 503"),
        (answer(GOOD + b"c{ 1\n"), "no sample"),
        (answer(b"\xff"), "UTF-8"),
    ],
    ids=["dead", "mute", "half", "endless", "abrupt", "rude", "503", "garbage", "bytes"],
)
def test_proxy_that_fails_costs_only_itself(
    talk: Talk | None, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scrape, "MAX_BYTES", 1 << 20)
    outcomes, text = ask(Node(first=answer(GOOD), bad=talk, last=answer(GOOD)))
    first, bad, last = outcomes
    assert (first.problem, last.problem) == ("", "")
    assert problem in bad.problem
    assert text == (
        '# TYPE c counter\nc{namespace="shop",pod="first"} 1\nc{namespace="shop",pod="last"} 1\n'
    )


def test_node_without_proxies_says_nothing() -> None:
    assert ask(Node()) == ([], "")


def test_proxy_whose_turn_did_not_come_is_asked_before_those_that_were_slow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scrape, "AT_ONCE", 2)
    node = Node(a=mute, b=mute, c=mute, d=mute, web=answer(GOOD))
    # Time for two turns, and not for the third.
    outcomes, _ = ask(node, times=2, total_s=DEADLINE_S * 1.5)
    assert node.asked[:5] == ["a", "b", "c", "d", "web"]
    assert [bool(one.problem) for one in outcomes] == [True, True, True, True, False]


def test_all_together_have_a_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrape, "MAX_TOTAL_BYTES", 100)
    monkeypatch.setattr(scrape, "AT_ONCE", 1)  # so that the second comes after the first
    big = answer(b"".join(b'c{a="%d"} 1\n' % number for number in range(100)))
    outcomes, text = ask(Node(a=big, b=big))
    assert [one.problem for one in outcomes] == ["", "all proxies together answer with too much"]
    assert text.count("\n") == 101
