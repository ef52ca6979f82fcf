"""The eBPF programs that the kernel holds, by name; a program lives as long as something uses it.

That is a pin, a file descriptor, or a hook that it is attached to: a cgroup, an interface (tc), a
link. So a program of somebody who is gone is one that still works.
"""

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from agent.kernel import bpf

# linux/bpf.h, enum bpf_cmd and struct bpf_prog_info
PROG_GET_NEXT_ID = 11
IDS = struct.Struct("=III")  # from, next, flags
NAME_OFFSET, NAME_SIZE = 64, 16

# How the names of those programs of ours begin that look on and change nothing (agent/flows).
LOOKING_ON = "flows_"


@dataclass(frozen=True, slots=True, order=True)
class Program:
    """A loaded program. The kernel keeps 15 letters of a name."""

    name: str
    id: int


def programs() -> tuple[Program, ...]:
    """Return every program that has a name; none where this may not be asked."""
    return tuple(sorted(_programs()))


def _programs() -> Iterator[Program]:
    last = 0
    while True:
        try:
            _, answer = bpf.call(PROG_GET_NEXT_ID, IDS.pack(last, 0, 0))
        except OSError:  # that was the last one, or this may not be asked
            return
        last = IDS.unpack_from(answer)[1]
        try:
            fd, _ = bpf.call(bpf.PROG_GET_FD_BY_ID, IDS.pack(last, 0, 0))
        except OSError:
            continue  # it ended meanwhile
        try:
            if name := _name(fd):
                yield Program(name, last)
        finally:
            os.close(fd)


def _name(fd: int) -> str:
    try:
        told = bpf.info(fd, NAME_OFFSET + NAME_SIZE)
    except OSError:
        return ""
    return told[NAME_OFFSET:].split(b"\0", 1)[0].decode(errors="replace")
