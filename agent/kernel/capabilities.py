"""Gives up capabilities for good, as far as this process itself is concerned.

They leave the effective, permitted, inheritable and ambient sets. The bounding set keeps them, so
that root can execute a helper that has them: that is how the daemon's worker is started again.
"""

import ctypes
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

# linux/capability.h
NUMBERS: Mapping[str, int] = {
    "CAP_SETGID": 6,
    "CAP_SETUID": 7,
    "CAP_NET_ADMIN": 12,
    "CAP_NET_RAW": 13,
    "CAP_SYS_MODULE": 16,
    "CAP_SYS_RAWIO": 17,
    "CAP_SYS_ADMIN": 21,
    "CAP_SYS_BOOT": 22,
    "CAP_SYS_TIME": 25,
    "CAP_PERFMON": 38,
    "CAP_BPF": 39,
}
VERSION_3 = 0x20080522
PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 47, 4

_libc = ctypes.CDLL(None, use_errno=True)


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Data(ctypes.Structure):
    _fields_ = (
        ("effective", ctypes.c_uint32),
        ("permitted", ctypes.c_uint32),
        ("inheritable", ctypes.c_uint32),
    )


def drop(names: Iterable[str]) -> None:
    """Give up capabilities in this thread; call it before other threads are started.

    Raises: OSError.
    """
    header = _Header(VERSION_3, 0)
    data = (_Data * 2)()
    _check(_libc.capget(ctypes.byref(header), data), "capget")
    for name in names:
        half, bit = divmod(NUMBERS[name], 32)
        for field, _ in _Data._fields_:
            setattr(data[half], field, getattr(data[half], field) & ~(1 << bit))
    _libc.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    _check(_libc.capset(ctypes.byref(header), data), "capset")


def effective() -> frozenset[str]:
    """Return which of the capabilities named here this thread has."""
    for line in Path("/proc/thread-self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            bits = int(line.split()[1], 16)
            return frozenset(name for name, number in NUMBERS.items() if bits >> number & 1)
    return frozenset()


def _check(result: int, what: str) -> None:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), what)
