"""Locks between processes: one per namespace for our own work, and the xtables lock of the node.

Ours is an open-file-description lock on one byte of one file, the byte's offset being the
namespace's inode: no file per pod is left behind. A tool that is started while it is held inherits
it, so that a run whose parent was killed still keeps the next one waiting.

In a container whose root is read-only, such as an init container, there is nothing to make a file
in. Its files are its own, so the locks would be, too: there the namespace itself is locked, which
is not done elsewhere because every process of the pod can do that.
"""

import contextlib
import errno
import fcntl
import os
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from agent.kernel.netns import Netns
from agent.model.errors import EnvironmentLacks

RUN_DIR = Path("/run/intercept-agent")
LOCK_FILE = RUN_DIR / "netns.lock"
XTABLES_LOCK = "/run/xtables.lock"
POLL_S = 0.005


@contextlib.contextmanager
def namespace_lock(netns: Netns, *, timeout_s: float = 30.0) -> Iterator[int]:
    """Hold the lock of a namespace; yields the descriptor that children must inherit.

    Raises: EnvironmentLacks if another run holds it for longer than `timeout_s`.
    """
    fd, attempt = _lock_of(netns)
    try:
        _wait(
            attempt,
            timeout_s,
            f"another run is changing this namespace and did not end in {timeout_s:.0f} seconds",
        )
        yield fd
    finally:
        os.close(fd)


def _lock_of(netns: Netns) -> tuple[int, Callable[[], object]]:
    """Return what is to be locked, and how."""
    try:
        fd = _lock_file()
    except OSError as error:
        if error.errno == errno.EROFS:
            own = os.open(f"/proc/self/fd/{netns.fd}", os.O_RDONLY | os.O_CLOEXEC)
            return own, lambda: fcntl.flock(own, fcntl.LOCK_EX | fcntl.LOCK_NB)
        hint = "; run as root" if isinstance(error, PermissionError) else ""
        raise EnvironmentLacks(f"cannot open {LOCK_FILE}: {error.strerror}{hint}") from error
    request = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, netns.id.ino, 1, 0)
    return fd, lambda: fcntl.fcntl(fd, fcntl.F_OFD_SETLK, request)


def _lock_file() -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    try:
        return os.open(LOCK_FILE, flags, 0o600)
    except FileNotFoundError:
        RUN_DIR.mkdir(parents=True, exist_ok=True)
        return os.open(LOCK_FILE, flags, 0o600)


@contextlib.contextmanager
def xtables_lock(*, timeout_s: float) -> Iterator[None]:
    """Hold the lock that iptables-legacy takes on this node; libiptc ignores it by itself.

    Raises: EnvironmentLacks, naming the holder, if it is not free within `timeout_s`.
    """
    try:
        fd = os.open(XTABLES_LOCK, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno != errno.EROFS:
            raise
        yield  # no other tool in this container can have it either
        return
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
