"""Sockets of other processes, found by inode and copied into this one."""

import contextlib
import ctypes
import os
import socket
from collections.abc import Iterator

from agent.kernel.holders import pids, sockets_of

PIDFD_GETFD = 438  # on every architecture, Linux 5.6

_libc = ctypes.CDLL(None, use_errno=True)


@contextlib.contextmanager
def borrowed(inodes: frozenset[int]) -> Iterator[tuple[socket.socket, ...]]:
    """Copy the sockets for as long as the block lasts; those that nobody shows are left out.

    It takes to see the processes (/proc of the node) and the right to trace them.
    """
    with contextlib.ExitStack() as stack:
        found = []
        for pid, fd in _holders(inodes):
            with contextlib.suppress(OSError):
                found.append(stack.enter_context(_copy(pid, fd)))
        yield tuple(found)


def _holders(inodes: frozenset[int]) -> Iterator[tuple[int, int]]:
    """Yield one process and descriptor for each inode."""
    wanted = set(inodes)
    for pid in pids():
        with contextlib.suppress(OSError):
            for fd, inode in sockets_of(pid):
                if inode in wanted:
                    wanted.remove(inode)
                    yield pid, fd
        if not wanted:
            return


def _copy(pid: int, fd: int) -> socket.socket:
    process = os.pidfd_open(pid)
    try:
        copy = _libc.syscall(PIDFD_GETFD, process, fd, 0)
        if copy < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        return socket.socket(fileno=copy)
    finally:
        os.close(process)
