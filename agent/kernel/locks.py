"""Locks between processes: one per namespace for our own work, and the xtables lock of the node.

Ours is an open-file-description lock on one byte of one file, the byte's offset being the
namespace's inode: no file per pod is left behind. A tool that is started while it is held inherits
it, so that a run whose parent was killed still keeps the next one waiting.
"""

import contextlib
import fcntl
import os
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from agent.kernel.netns import NetnsId
from agent.model.errors import EnvironmentLacks

RUN_DIR = Path("/run/intercept-agent")
LOCK_FILE = RUN_DIR / "netns.lock"
XTABLES_LOCK = "/run/xtables.lock"
POLL_S = 0.005


@contextlib.contextmanager
def namespace_lock(netns: NetnsId, *, timeout_s: float = 30.0) -> Iterator[int]:
    """Hold the lock of a namespace; yields the descriptor that children must inherit.

    Raises: EnvironmentLacks if another run holds it for longer than `timeout_s`.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    try:
        try:
            fd = os.open(LOCK_FILE, flags, 0o600)
        except FileNotFoundError:
            RUN_DIR.mkdir(parents=True, exist_ok=True)
            fd = os.open(LOCK_FILE, flags, 0o600)
    except OSError as error:
        raise EnvironmentLacks(f"cannot open {LOCK_FILE}: {error.strerror}; run as root") from error
    try:
        request = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, netns.ino, 1, 0)
        _wait(
            lambda: fcntl.fcntl(fd, fcntl.F_OFD_SETLK, request),
            timeout_s,
            f"another run is changing this namespace and did not end in {timeout_s:.0f} seconds",
        )
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def xtables_lock(*, timeout_s: float) -> Iterator[None]:
    """Hold the lock that iptables-legacy takes on this node; libiptc ignores it by itself.

    Raises: EnvironmentLacks, naming the holder, if it is not free within `timeout_s`.
    """
    fd = os.open(XTABLES_LOCK, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        _wait(
            lambda: fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB),
            timeout_s,
            f"{XTABLES_LOCK} was not free within {timeout_s:.0f} seconds{_held_by(fd)}",
        )
        yield
    finally:
        os.close(fd)


def _wait(attempt: Callable[[], object], timeout_s: float, complaint: str) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            attempt()
        except (BlockingIOError, PermissionError):  # EAGAIN or EACCES: somebody holds it
            if time.monotonic() >= deadline:
                raise EnvironmentLacks(complaint) from None
            time.sleep(POLL_S)
        else:
            return


def xtables_lock_holder() -> int | None:
    """Return the process that holds the lock of the iptables tools now, without touching it.

    None if nobody does, or nobody that /proc/locks shows.
    """
    with contextlib.suppress(OSError):
        return _holder(os.stat(XTABLES_LOCK).st_ino)
    return None


def _held_by(fd: int) -> str:
    """Return `; process N holds it` if /proc/locks tells, else nothing."""
    with contextlib.suppress(OSError):
        holder = _holder(os.fstat(fd).st_ino)
        return f"; process {holder} holds it" if holder is not None else ""
    return ""


def _holder(inode: int) -> int | None:
    for line in Path("/proc/locks").read_text().splitlines():
        words = line.split()
        if len(words) > 5 and words[1] != "->" and words[5].rsplit(":", 1)[-1] == str(inode):
            return int(words[4])
    return None
