"""Files: those that the agent keeps for itself, and those that others have a say in.

The first are replaced as a whole or not at all. The second are read so that nobody can make the
agent wait for ever, read without an end, or read what he could not read himself.
"""

import contextlib
import ctypes
import errno
import os
import stat
from pathlib import Path

from agent.model.errors import EnvironmentLacks

OPENAT2 = 437  # on every architecture; Linux 5.6
RESOLVE_IN_ROOT = 0x10  # linux/openat2.h

_libc = ctypes.CDLL(None, use_errno=True)


def read(path: Path, most: int, *, root: Path | None = None) -> bytes:
    """Return what an ordinary file holds.

    With `root` the path is one below it, and no link leads out of there.

    Raises: OSError, also for a file that is no ordinary one or has more than `most` bytes.
    """
    # Without O_NONBLOCK a fifo would be waited for.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
    fd = os.open(path, flags) if root is None else _open_below(root, path, flags)
    with open(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "it is no ordinary file", str(path))
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"it is larger than {most} bytes", str(path))
    return data


def _open_below(root: Path, path: Path, flags: int) -> int:
    """Open a file below a folder. Kernels before 5.6 follow no link at its end, and others."""
    how = (ctypes.c_uint64 * 3)(flags, 0, RESOLVE_IN_ROOT)  # struct open_how
    top = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        name = ctypes.c_char_p(os.fsencode(path))
        fd = int(_libc.syscall(OPENAT2, top, name, ctypes.byref(how), ctypes.sizeof(how)))
        if fd >= 0:
            return fd
        number = ctypes.get_errno()
        if number not in (errno.ENOSYS, errno.EPERM):  # EPERM: a seccomp filter knows no such call
            raise OSError(number, os.strerror(number), str(path))
        return os.open(path, flags | os.O_NOFOLLOW, dir_fd=top)
    finally:
        os.close(top)


def replace(path: Path, data: bytes) -> None:
    """Write a file atomically, for root alone; folders that are missing are made.

    Raises: EnvironmentLacks if it cannot be written.
    """
    draft = f"{path}.{os.getpid()}.tmp"
    try:
        _write(draft, data)
        os.rename(draft, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(draft)
        raise EnvironmentLacks(f"cannot write {path}: {error.strerror}") from error


def _write(path: str, data: bytes) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    try:
        fd = os.open(path, flags, 0o600)
    except FileNotFoundError:
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        fd = os.open(path, flags, 0o600)
    with open(fd, "wb") as file:
        file.write(data)
