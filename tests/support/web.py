"""A small HTTP server and client that run as a process of their own inside a namespace.

Run as a script, isolated (`python -I -S web.py serve|call|follow`), because it must work as a user
who may not read the interpreter's directory: it starts as root, imports all it needs, and only then
becomes the wanted user. For the same reason it uses the standard library alone and nothing of ours.

`serve` runs until its standard input ends, and so ends with its parent; `call` takes one job a line
from there and answers each with one line; `follow` takes a list of calls in one line, reads their
answers, which never end (`TICKS`), until the next line, and says then how they fared.

Every request has a connection of its own, so that connections can be counted as requests.
"""

import argparse
import asyncio
import encodings.idna  # noqa: F401  # else imported on first use, when it can no longer be read
import json
import os
import sys
from contextlib import suppress
from typing import Any

VIA = "x-via"
READY = "ready"
RETRY_PAUSE_S = 0.02
TICKS = "/ticks"
TICK_S = 0.05
STALLED_S = 20.0


def become(uid: int, gid: int) -> None:
    """Give up root for good. Sockets made from here on belong to `uid` and `gid`."""
    if (uid, gid) == (os.getuid(), os.getgid()):
        return
    if uid or gid:
        os.setgroups([])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)


class Server(asyncio.Protocol):
    """Answers one request with what it saw, then closes."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._head = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._head += data
        if self._transport is not None and b"\r\n\r\n" in self._head:
            if self._head.split(b" ")[1] == TICKS.encode():
                self._transport.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
                self._tick(self._transport)
                return
            self._transport.write(self._answer(self._transport))
            self._transport.close()

    def _tick(self, transport: asyncio.Transport) -> None:
        if not transport.is_closing():
            transport.write(b"1\r\n.\r\n")
            asyncio.get_running_loop().call_later(TICK_S, self._tick, transport)

    def _answer(self, transport: asyncio.Transport) -> bytes:
        request, *lines = self._head.decode("latin-1").split("\r\n")
        headers = [line.partition(":") for line in lines]
        via = [value.strip() for key, _, value in headers if key.lower() == VIA]
        seen = {
            "name": self._name,
            "peer": transport.get_extra_info("peername")[0],
            "local": transport.get_extra_info("sockname")[0],
            "path": request.split(" ")[1],
            "via": [hop.strip() for value in via for hop in value.split(",")],
        }
        body = json.dumps(seen).encode()
        head = (
            "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        return head.encode() + body


async def serve(name: str, port: int) -> None:
    """Serve both families until standard input ends, which it does when the parent is gone."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: Server(name),
        ["0.0.0.0", "::"],
        port,
        backlog=1024,
    )
    async with server:
        print(READY, flush=True)
        ended = asyncio.Event()
        loop.add_reader(sys.stdin.fileno(), ended.set)
        await ended.wait()


async def request(call: dict[str, Any]) -> dict[str, Any]:
    """Send one GET and return status and body; raise OSError if there is no whole answer."""
    source = tuple(call["source"]) if call["source"] else None
    reader, writer = await asyncio.open_connection(call["address"], call["port"], local_addr=source)
    try:
        head = f"GET {call['path']} HTTP/1.1\r\nhost: {call['host']}\r\nconnection: close\r\n\r\n"
        writer.write(head.encode())
        return await _read_answer(reader)
    except asyncio.IncompleteReadError:
        raise ConnectionResetError("closed without a whole answer") from None
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


async def _read_answer(reader: asyncio.StreamReader) -> dict[str, Any]:
    """Read to the end of the answer, not of the connection: Envoy keeps that a second longer."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
    status, *lines = head.split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines if line)
    if headers.get("transfer-encoding") == "chunked":
        body = await _read_chunks(reader)
    else:
        body = await reader.readexactly(int(headers["content-length"]))
    return {"status": int(status.split(" ")[1]), "body": body.decode()}


async def _read_chunks(reader: asyncio.StreamReader) -> bytes:
    body = b""
    while size := int(await reader.readuntil(b"\r\n"), 16):
        body += await reader.readexactly(size)
        await reader.readuntil(b"\r\n")
    return body


async def outcome(call: dict[str, Any]) -> dict[str, Any]:
    """Return what became of a call: an answer, or the reason why there is none."""
    try:
        async with asyncio.timeout(call["timeout_s"]):
            while True:
                try:
                    answer = await request(call)
                    if not call["until_ok"] or answer["status"] == 200:
                        return answer
                except OSError:
                    if not call["until_ok"]:
                        raise
                await asyncio.sleep(RETRY_PAUSE_S)
    except TimeoutError:
        return {"error": "timeout"}
    except ConnectionRefusedError:
        return {"error": "refused"}
    except OSError as failure:
        return {"error": str(failure)}


async def follow(call: dict[str, Any], seen: dict[str, Any]) -> None:
    """Read an answer that never ends; `seen` says how many ticks came, or why they ended."""
    try:
        reader, writer = await asyncio.open_connection(call["address"], call["port"])
        writer.write(f"GET {TICKS} HTTP/1.1\r\nhost: {call['host']}\r\n\r\n".encode())
        head = await reader.readuntil(b"\r\n\r\n")
        seen["status"] = int(head.split(b" ")[1])
        while size := int(await reader.readuntil(b"\r\n"), 16):
            await reader.readexactly(size + len("\r\n"))
            seen["ticks"] += size  # a proxy makes one chunk of some
        seen["error"] = "ended"
    except (OSError, asyncio.IncompleteReadError) as failure:
        seen["error"] = repr(failure)


async def follow_all(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Follow every call until there is a line on standard input."""
    seen: list[dict[str, Any]] = [{"ticks": 0, "error": ""} for _ in calls]
    enough = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), enough.set)
    pairs = zip(calls, seen, strict=True)
    tasks = [asyncio.create_task(follow(call, one)) for call, one in pairs]
    await one_more(seen)
    print(READY, flush=True)
    await enough.wait()
    await one_more(seen)
    for task in tasks:
        task.cancel()
    return seen


async def one_more(seen: list[dict[str, Any]]) -> None:
    """Return when something has come on every connection, or note that nothing does any more."""
    before = [one["ticks"] for one in seen]
    try:
        async with asyncio.timeout(STALLED_S):
            for one, ticks in zip(seen, before, strict=True):
                while one["ticks"] == ticks and not one["error"]:  # noqa: ASYNC110
                    await asyncio.sleep(TICK_S)
    except TimeoutError:
        for one, ticks in zip(seen, before, strict=True):
            one["error"] = one["error"] or ("stalled" if one["ticks"] == ticks else "")


async def call_many(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Make every call of the job, at most `concurrency` at a time; results are in order."""
    slots = asyncio.Semaphore(job["concurrency"])

    async def limited(call: dict[str, Any]) -> dict[str, Any]:
        async with slots:
            return await outcome(call)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(limited(job["call"])) for _ in range(job["count"])]
    return [task.result() for task in tasks]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("serve", "call", "follow"))
    parser.add_argument("--name", default="")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--uid", type=int, default=os.getuid())
    parser.add_argument("--gid", type=int, default=os.getgid())
    options = parser.parse_args()
    become(options.uid, options.gid)
    if options.what == "serve":
        asyncio.run(serve(options.name, options.port))
    elif options.what == "follow":
        print(json.dumps(asyncio.run(follow_all(json.loads(sys.stdin.readline())))), flush=True)
    else:
        for job in sys.stdin:
            print(json.dumps(asyncio.run(call_many(json.loads(job)))), flush=True)


if __name__ == "__main__":
    main()
