"""The tables of iptables-legacy as the kernel holds them, read by socket options and no tool.

Looking leaves no trace: a table is asked for only if the namespace has it already.
"""

import ctypes
import errno
import os
import socket
import struct
from dataclasses import dataclass

# linux/netfilter_ipv4/ip_tables.h; IPv6 has the same numbers one level further.
SO_GET_INFO = 64
SO_GET_ENTRIES = 65
INFO = struct.Struct("=32sI5I5III")
ENTRIES_HEADER = struct.Struct("=32sI4x")


@dataclass(frozen=True, slots=True)
class Layout:
    """Where an entry of a legacy table keeps its size and its counters, in bytes from its start."""

    level: int
    next_offset: int
    counters: int


ABSENT = (errno.ENOENT, errno.EAFNOSUPPORT, errno.EPROTONOSUPPORT)

LAYOUTS = {
    4: Layout(socket.IPPROTO_IP, next_offset=90, counters=96),
    6: Layout(socket.IPPROTO_IPV6, next_offset=142, counters=152),
}
COUNTERS_SIZE = 16

_libc = ctypes.CDLL(None, use_errno=True)


class LegacyEye:
    """Looks at the tables of the namespace of the thread that makes it; usable from any thread."""

    def __init__(self) -> None:
        self._raw: dict[int, socket.socket] = {}
        self._names: dict[int, int] = {}
        self.find()

    @property
    def complete(self) -> bool:
        """Whether the kernel has legacy tables of both families; a module may bring them later."""
        return len(self._names) == len(LAYOUTS)

    def find(self) -> None:
        """Open the way to what was not there before. For a thread in the namespace."""
        for version, kind in ((4, socket.AF_INET), (6, socket.AF_INET6)):
            if version in self._names:
                continue
            name = "ip_tables_names" if version == 4 else "ip6_tables_names"
            try:
                self._names[version] = os.open(f"/proc/thread-self/net/{name}", os.O_RDONLY)
                if version not in self._raw:
                    self._raw[version] = socket.socket(kind, socket.SOCK_RAW, socket.IPPROTO_RAW)
            except OSError as error:
                # A kernel without legacy tables, or without IPv6. Anything else hides rules.
                if error.errno not in ABSENT or not os.path.isdir("/proc/thread-self/net"):
                    self.close()
                    raise

    def tables(self) -> dict[int, tuple[str, ...]]:
        """Return the tables that exist, by IP version. Asking iptables would create them."""
        return {
            version: tuple(os.pread(fd, 4096, 0).decode().split())
            for version, fd in self._names.items()
        }

    def entries(self, version: int, table: str) -> bytes:
        """Return a table as the kernel holds it, without its counters. Raises: OSError."""
        layout = LAYOUTS[version]
        info = self._info(version, table)
        size = INFO.unpack(info)[-1]
        answer = bytearray(ENTRIES_HEADER.pack(table.encode(), size)) + bytearray(size)
        self._ask(version, SO_GET_ENTRIES, answer)
        at = ENTRIES_HEADER.size
        while at < len(answer):
            (step,) = struct.unpack_from("=H", answer, at + layout.next_offset)
            if step == 0:
                raise OSError(errno.EBADMSG, f"table {table} has an entry of no size")
            counters = at + layout.counters
            answer[counters : counters + COUNTERS_SIZE] = bytes(COUNTERS_SIZE)
            at += step
        return bytes(info) + bytes(answer)

    def sizes(self) -> bytes:
        """Return how much each table holds: cheap, and changed by most of what is done to one.

        Raises: OSError.
        """
        tables = self.tables().items()
        return b"".join(bytes(self._info(v, name)) for v, names in tables for name in sorted(names))

    def _info(self, version: int, table: str) -> bytearray:
        info = bytearray(INFO.pack(table.encode(), *[0] * 13))
        self._ask(version, SO_GET_INFO, info)
        return info

    def _ask(self, version: int, option: int, buffer: bytearray) -> None:
        """getsockopt with an argument, which Python's own cannot pass."""
        raw = (ctypes.c_char * len(buffer)).from_buffer(buffer)
        size = ctypes.c_uint(len(buffer))
        fd = self._raw[version].fileno()
        if _libc.getsockopt(fd, LAYOUTS[version].level, option, raw, ctypes.byref(size)) < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))

    def close(self) -> None:
        for raw in self._raw.values():
            raw.close()
        for fd in self._names.values():
            os.close(fd)
