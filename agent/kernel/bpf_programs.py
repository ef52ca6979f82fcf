"""The eBPF programs that the kernel holds, by name; a program lives as long as something uses it.

That is a pin, a file descriptor, or a hook that it is attached to: a cgroup, an interface (tc), a
link. So a program of somebody who is gone is one that still works.
"""

import ctypes
import os
import platform
import struct
from collections.abc import Iterator
from dataclasses import dataclass

# asm/unistd.h; linux/bpf.h enum bpf_cmd and struct bpf_prog_info.
NUMBERS = {"x86_64": 321, "aarch64": 280}
PROG_GET_NEXT_ID, PROG_GET_FD_BY_ID, OBJ_GET_INFO_BY_FD = 11, 13, 15
IDS = struct.Struct("=III")  # from, next, flags
INFO = struct.Struct("=IIQ")  # descriptor, size, address
NAME_OFFSET, NAME_SIZE, INFO_SIZE = 64, 16, 256

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True, order=True)
class Program:
    """A loaded program. The kernel keeps 15 letters of a name."""

    name: str
    id: int


def programs() -> tuple[Program, ...]:
    """Return every program that has a name; none where this may not be asked."""
    return tuple(sorted(_programs()))


def bpf(command: int, attributes: bytes) -> tuple[int, bytes]:
    """Make the system call; return what it returned (-1 for an error) and the attributes after."""
    number = NUMBERS.get(platform.machine())
    if number is None:
        return -1, attributes
    buffer = ctypes.create_string_buffer(attributes, len(attributes))
    return int(_libc.syscall(number, command, buffer, len(attributes))), buffer.raw


def _programs() -> Iterator[Program]:
    last = 0
    while True:
        result, answer = bpf(PROG_GET_NEXT_ID, IDS.pack(last, 0, 0))
        if result < 0:
            return
        last = IDS.unpack(answer)[1]
        fd, _ = bpf(PROG_GET_FD_BY_ID, IDS.pack(last, 0, 0))
        if fd < 0:
            continue  # it ended meanwhile
        try:
            if name := _name(fd):
                yield Program(name, last)
        finally:
            os.close(fd)


def _name(fd: int) -> str:
    info = ctypes.create_string_buffer(INFO_SIZE)
    result, _ = bpf(OBJ_GET_INFO_BY_FD, INFO.pack(fd, INFO_SIZE, ctypes.addressof(info)))
    if result < 0:
        return ""
    raw = info.raw[NAME_OFFSET : NAME_OFFSET + NAME_SIZE]
    return raw.split(b"\0", 1)[0].decode(errors="replace")
