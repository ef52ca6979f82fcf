"""Runs iptables tools inside a namespace: private mounts, numeric only, bounded in time.

The tools look names up through NSS, which may ask the network; inside a pod that hangs until a
resolver that cannot be reached times out (field report 92). So each run sees an empty
nsswitch.conf, in a mount namespace that ends with it. Where that is not allowed, as to an init
container that has NET_ADMIN and no SYS_ADMIN, the tools see the container's own.
"""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from agent.kernel import libc
from agent.kernel.netns import Netns
from agent.model.errors import EnvironmentLacks

NSSWITCH = Path("/etc/nsswitch.conf")
TIMEOUT_S = 20.0
SEARCH_PATH = "/usr/local/sbin:/usr/sbin:/sbin:/usr/local/bin:/usr/bin:/bin"


@dataclass(frozen=True, slots=True)
class Call:
    """One run of a tool: its words and what it reads."""

    command: tuple[str, ...]
    stdin: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended."""

    call: Call
    status: int
    stdout: str
    stderr: str

    def failure(self) -> str:
        """Return what the tool said, on one line."""
        lines = [line.strip() for line in self.stderr.splitlines() if line.strip()]
        said = " / ".join(line for line in lines if not line.startswith("Try `"))
        return f"{self.call.command[0]} exit {self.status}: {said or 'no message'}"


def find(name: str) -> str | None:
    """Return the full path of a tool, or None if the node does not have it."""
    path = os.environ.get("PATH", "")
    return shutil.which(name, path=f"{path}:{SEARCH_PATH}" if path else SEARCH_PATH)


def require(name: str, package: str) -> str:
    """Return the full path of a tool.

    Raises: EnvironmentLacks, naming the package to install.
    """
    found = find(name)
    if found is None:
        raise EnvironmentLacks(f"{name} is not installed; install the package {package}")
    return found


def run(netns: Netns, calls: Sequence[Call], lock_fd: int | None = None) -> list[Outcome]:
    """Run all calls at the same time inside the namespace and wait for every one of them.

    The tools inherit `lock_fd`, so that a lock outlives this process until they have ended.

    Raises: EnvironmentLacks if a tool cannot be started or does not end in time.
    """
    kept = () if lock_fd is None else (lock_fd,)
    return netns.run(lambda: _run_here(calls, kept), timeout_s=2 * TIMEOUT_S)


def _run_here(calls: Sequence[Call], kept_fds: tuple[int, ...]) -> list[Outcome]:
    with contextlib.suppress(PermissionError):  # the one that is refused is the last to be tried
        libc.unshare(libc.CLONE_NEWNS)
        libc.mount("none", "/", libc.MS_REC | libc.MS_PRIVATE)
        if NSSWITCH.exists():
            libc.mount("/dev/null", str(NSSWITCH), libc.MS_BIND)
    with contextlib.ExitStack() as stack:
        children = [stack.enter_context(_start(call, kept_fds)) for call in calls]
        stack.callback(_kill, children)
        return [_finish(call, child) for call, child in zip(calls, children, strict=True)]


def _kill(children: Sequence[subprocess.Popen[bytes]]) -> None:
    for child in children:
        if child.poll() is None:
            child.kill()


def _start(call: Call, kept_fds: tuple[int, ...]) -> subprocess.Popen[bytes]:
    # Input comes from memory, not from a pipe: all tools then run at the same time by themselves.
    stdin = os.memfd_create("stdin", os.MFD_CLOEXEC)
    try:
        os.write(stdin, call.stdin.encode(errors="surrogateescape"))
        os.lseek(stdin, 0, os.SEEK_SET)
        return subprocess.Popen(
            call.command,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={"PATH": SEARCH_PATH, "LC_ALL": "C"},
            cwd="/",
            pass_fds=kept_fds,
        )
    except OSError as error:
        raise EnvironmentLacks(f"cannot start {call.command[0]}: {error.strerror}") from error
    finally:
        os.close(stdin)


def _finish(call: Call, child: subprocess.Popen[bytes]) -> Outcome:
    try:
        out, err = child.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise EnvironmentLacks(
            f"{call.command[0]} did not end within {TIMEOUT_S:.0f} seconds and was killed"
        ) from None
    # Not as text, which would make a carriage return in somebody's comment the end of a line.
    said = (each.decode(errors="surrogateescape") for each in (out, err))
    return Outcome(call, child.returncode, *said)
