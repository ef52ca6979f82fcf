"""The daemon's end of the worker: starts it, asks it, and starts it again when it died or hung.

The front holds no network-administration capability of its own; the worker gets them back by being
executed by root, which is why the front must not set no_new_privs.
"""

import asyncio
import contextlib
import itertools
import json
import os
import socket
import struct
import sys
from asyncio.subprocess import Process
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any

from agent.model.errors import AgentError

PACKAGE_ROOT = str(Path(__file__).resolve().parents[2])

HEADER = struct.Struct("!I")
MAX_REPLY = 64 * 1024 * 1024
DEADLINE_S = 30.0


class WorkerGone(AgentError):
    """The worker died or was killed while it did a job; the job may be half done. Try again."""


class JobFailed(AgentError):
    """The worker answered with an error; `kind` is the class of error that it was."""

    def __init__(self, kind: str, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.kind = kind
        self.code = exit_code


class WorkerClient:
    """One worker process and the jobs that it has been given. For one event loop."""

    def __init__(self, state_dir: Path | None = None) -> None:
        """`state_dir` is where the worker keeps its records of captures; None: the usual place."""
        self._state_dir = state_dir
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._process: Process | None = None
        self._socket: socket.socket | None = None
        self._reader: asyncio.Task[None] | None = None
        self._sending = asyncio.Lock()
        self.restarts = -1

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    async def job(
        self,
        job: str,
        netns_fd: int,
        *pipe: int,
        deadline_s: float = DEADLINE_S,
        **request: object,
    ) -> Mapping[str, Any]:
        """Have a job done in the namespace behind `netns_fd` and return its result.

        `pipe` is the end to write to, for the job that goes on telling of changes.

        Raises: JobFailed with the worker's sentence; WorkerGone if it died, or was killed because
        it did not answer within `deadline_s` seconds.
        """
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        number = next(self._ids)
        async with self._sending:
            sock = await self._running()
            self._waiting[number] = future
            payload = json.dumps({"id": number, "job": job, **request}).encode()
            data = HEADER.pack(len(payload)) + payload
            try:
                await _to_the_end(
                    asyncio.to_thread(socket.send_fds, sock, [data], [netns_fd, *pipe])
                )
            except OSError as error:
                self._fail(f"the worker cannot be reached: {error.strerror}")
        try:
            async with asyncio.timeout(deadline_s):
                reply = await future
        except TimeoutError:
            self._kill()
            raise WorkerGone(
                f"{job} did not end within {deadline_s:.0f} seconds; the worker was killed"
            ) from None
        finally:
            self._waiting.pop(number, None)
        if "error" in reply:
            said = reply["error"]
            raise JobFailed(said["kind"], said["message"], said["exit_code"])
        result: Mapping[str, Any] = reply["result"]
        return result

    async def renew(self, state_dir: Path) -> None:
        """Have further jobs done by a new worker that keeps its records elsewhere.

        The jobs under way are waited for, by new ones, too; what was watched ends.
        """
        self._state_dir = state_dir
        async with self._sending:
            under_way = [future for future in self._waiting.values() if not future.done()]
            if under_way:
                await asyncio.wait(under_way, timeout=DEADLINE_S)
            if self._process is not None:
                self._kill()
                self.restarts -= 1  # nothing went wrong

    async def close(self) -> None:
        """End the worker; captures stay as they are."""
        process = self._process
        self._kill()
        if process is not None:
            await process.wait()
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.wait([self._reader])

    async def _running(self) -> socket.socket:
        if self._socket is None or self._process is None or self._process.returncode is not None:
            self._kill()
            await self._start()
        assert self._socket is not None
        return self._socket

    async def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "agent.node.worker", str(theirs.fileno())),
                pass_fds=(theirs.fileno(),),
                stdin=asyncio.subprocess.DEVNULL,
                env=self._environment(),
            )
        self._socket = ours
        self.restarts += 1
        reader, writer = await asyncio.open_connection(sock=ours.dup())
        self._reader = asyncio.create_task(self._read(reader, writer, self._process))

    def _environment(self) -> dict[str, str]:
        # One arena: with one a thread the C library keeps what each thread once used.
        found = {**os.environ, "PYTHONPATH": PACKAGE_ROOT, "MALLOC_ARENA_MAX": "1"}
        if self._state_dir is not None:
            found["INTERCEPT_STATE_DIR"] = str(self._state_dir)
        return found

    async def _read(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        process: Process,
    ) -> None:
        broken = (asyncio.IncompleteReadError, ConnectionError, ValueError)
        with contextlib.closing(writer), contextlib.suppress(*broken):
            while True:
                (size,) = HEADER.unpack(await reader.readexactly(HEADER.size))
                if size > MAX_REPLY:
                    break
                reply = json.loads(await reader.readexactly(size))
                future = self._waiting.get(reply["id"])
                if future is not None and not future.done():
                    future.set_result(reply)
        if process is self._process:
            self._fail("the worker died")

    def _fail(self, why: str) -> None:
        self._kill()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(WorkerGone(f"{why}; it is started again"))

    def _kill(self) -> None:
        process, self._process = self._process, None
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()


async def _to_the_end(sending: Coroutine[Any, Any, object]) -> None:
    """Await what must not be left half way: the descriptors that it sends are closed afterwards."""
    task = asyncio.ensure_future(sending)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
