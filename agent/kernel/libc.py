"""The few C library calls that Python has no name for, each raising OSError with its errno."""

import ctypes
import os
from errno import ENOSYS
from pathlib import Path

CLONE_NEWNS = 0x00020000
CLONE_NEWNET = 0x40000000
MS_BIND = 0x1000
MS_REC = 0x4000
MS_PRIVATE = 0x40000
AT_FDCWD = -100
RENAME_EXCHANGE = 2

# CDLL(None) is the C library already in this process: no ldconfig is run to find it.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.setns.argtypes = (ctypes.c_int, ctypes.c_int)
_libc.unshare.argtypes = (ctypes.c_int,)
_libc.mount.argtypes = (
    ctypes.c_char_p,
    ctypes.c_char_p,
    ctypes.c_char_p,
    ctypes.c_ulong,
    ctypes.c_char_p,
)


def _check(result: int, what: str) -> None:
    if result < 0:
        errno = ctypes.get_errno()
        raise OSError(errno, os.strerror(errno), what)


def setns(fd: int, kind: int) -> None:
    """Move the calling thread into the namespace behind `fd`."""
    _check(_libc.setns(fd, kind), "setns")


def unshare(flags: int) -> None:
    """Give the calling thread namespaces of its own."""
    _check(_libc.unshare(flags), "unshare")


def mount(source: str, target: str, flags: int, kind: str = "") -> None:
    """Change the mount namespace of the calling thread; `kind` is the file system to mount."""
    type_name = kind.encode() or None
    _check(_libc.mount(source.encode(), target.encode(), type_name, flags, None), target)


def exchange(one: Path, other: Path) -> None:
    """Let two files, or two folders, take each other's place at once."""
    renameat2 = getattr(_libc, "renameat2", None)
    if renameat2 is None:
        raise OSError(ENOSYS, os.strerror(ENOSYS), "renameat2")
    _check(renameat2(AT_FDCWD, bytes(one), AT_FDCWD, bytes(other), RENAME_EXCHANGE), str(one))
