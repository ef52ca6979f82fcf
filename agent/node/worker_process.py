"""One worker as the front has it: started by the front itself, or by systemd behind a socket."""

import asyncio
import contextlib
import os
import socket
import sys
from asyncio.subprocess import Process
from dataclasses import dataclass
from pathlib import Path

from agent.model.errors import AgentError

PACKAGE_ROOT = str(Path(__file__).resolve().parents[2])
CONNECT_TIMEOUT_S = 5.0


class WorkerGone(AgentError):
    """The worker died or was killed while it did a job; the job may be half done. Try again."""


@dataclass(slots=True)
class Worker:
    """A worker and the socket to it.

    Without `process` it belongs to systemd (systemd/intercept-agent@.service) and has rights that
    the front cannot have again. It ends by itself when the socket is closed.
    """

    socket: socket.socket
    process: Process | None = None

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process else None

    @property
    def alive(self) -> bool:
        return self.process is None or self.process.returncode is None

    def end(self) -> None:
        self.socket.close()
        if self.process is not None and self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()

    async def wait(self) -> None:
        if self.process is not None:
            await self.process.wait()


async def start(state_dir: Path | None) -> Worker:
    """Start a process that keeps its records of captures in `state_dir`."""
    ours, theirs = socket.socketpair()
    # One arena: with one a thread the C library keeps what each thread once used.
    environment = {**os.environ, "PYTHONPATH": PACKAGE_ROOT, "MALLOC_ARENA_MAX": "1"}
    if state_dir is not None:
        environment["INTERCEPT_STATE_DIR"] = str(state_dir)
    with theirs:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "agent.node.worker", str(theirs.fileno())),
            pass_fds=(theirs.fileno(),),
            stdin=asyncio.subprocess.DEVNULL,
            env=environment,
        )
    return Worker(ours, process)


async def join(door: Path) -> Worker:
    """Have systemd start one, by connecting to its socket.

    Raises: WorkerGone if nobody listens there.
    """
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(CONNECT_TIMEOUT_S)
    try:
        await asyncio.to_thread(sock.connect, str(door))
    except OSError as error:
        sock.close()
        raise WorkerGone(
            f"no worker can be had from {door}: {error.strerror or error}; "
            "see `systemctl status intercept-agent.socket`"
        ) from error
    sock.settimeout(None)
    return Worker(sock)
