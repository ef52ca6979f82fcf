"""The daemon's end of the worker: starts it, asks it, and starts it again when it died or hung.

The front holds no network-administration capability of its own. The worker gets them back by being
executed by root, which is why the front must not set no_new_privs, or has them from systemd.
"""

import asyncio
import contextlib
import itertools
import json
import socket
import struct
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any

from agent.model.errors import AgentError
from agent.node import worker_process
from agent.node.worker_process import Worker, WorkerGone

HEADER = struct.Struct("!I")
MAX_REPLY = 64 * 1024 * 1024
DEADLINE_S = 30.0


class JobFailed(AgentError):
    """The worker answered with an error; `kind` is the class of error that it was."""

    def __init__(self, kind: str, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.kind = kind
        self.code = exit_code


class WorkerClient:
    """One worker process and the jobs that it has been given. For one event loop."""

    def __init__(self, state_dir: Path | None = None, door: Path | None = None) -> None:
        """`state_dir` is where the worker keeps its records of captures; None: the usual place.

        `door` is the socket at which systemd starts one, which knows its own place; None: it is
        started here.
        """
        self._state_dir = state_dir
        self._door = door
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._worker: Worker | None = None
        self._reader: asyncio.Task[None] | None = None
        self._sending = asyncio.Lock()
        self.restarts = -1

    @property
    def pid(self) -> int | None:
        return self._worker.pid if self._worker else None

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
            sock = (await self._running()).socket
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

    async def renew(self, state_dir: Path, door: Path | None) -> None:
        """Have further jobs done by a new worker that keeps its records, or is had, elsewhere.

        The jobs under way are waited for, by new ones, too; what was watched ends.
        """
        self._state_dir, self._door = state_dir, door
        async with self._sending:
            under_way = [future for future in self._waiting.values() if not future.done()]
            if under_way:
                await asyncio.wait(under_way, timeout=DEADLINE_S)
            if self._worker is not None:
                self._kill()
                self.restarts -= 1  # nothing went wrong

    async def close(self) -> None:
        """End the worker; captures stay as they are."""
        worker = self._worker
        self._kill()
        if worker is not None:
            await worker.wait()
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.wait([self._reader])

    async def _running(self) -> Worker:
        if self._worker is None or not self._worker.alive:
            self._kill()
            self._worker = await self._new()
            self.restarts += 1
            reader, writer = await asyncio.open_connection(sock=self._worker.socket.dup())
            self._reader = asyncio.create_task(self._read(reader, writer, self._worker))
        return self._worker

    async def _new(self) -> Worker:
        if self._door is not None:
            return await worker_process.join(self._door)
        return await worker_process.start(self._state_dir)

    async def _read(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        worker: Worker,
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
        if worker is self._worker:
            self._fail("the worker died")

    def _fail(self, why: str) -> None:
        self._kill()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(WorkerGone(f"{why}; it is started again"))

    def _kill(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.end()


async def _to_the_end(sending: Coroutine[Any, Any, object]) -> None:
    """Await what must not be left half way: the descriptors that it sends are closed afterwards."""
    task = asyncio.ensure_future(sending)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
