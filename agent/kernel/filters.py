"""A digest of all packet-filter rules in a namespace, in both of the kernel's subsystems.

Equal digests mean equal rules, so what was read once need not be read again: the digest costs half
a millisecond, reading and parsing everything about twenty. Only counters are left out. It is taken
from the kernel's own dumps, handles included, so it can only be too careful: whatever changes, the
digest changes with it.

Looking leaves no trace: a legacy table is asked for only if the namespace has it already.
"""

import ctypes
import errno
import hashlib
import os
import re
import socket
import struct
import sys
from dataclasses import dataclass

from agent.kernel.netlink import NETLINK_NETFILTER, NetlinkSocket, attributes

# linux/netfilter/nfnetlink.h and nf_tables.h
NFNL_SUBSYS_NFTABLES = 10
NFT_MSG_GETTABLE, NFT_MSG_GETCHAIN, NFT_MSG_GETRULE, NFT_MSG_GETSET = 1, 4, 7, 10
NFGENMSG_SIZE = 4
NFTA_TABLE_FLAGS = 2
NFTA_CHAIN_NAMES = (1, 3)  # of its table, and its own
NFPROTO_INET, XTABLES_FAMILIES = 1, (2, 10)  # linux/netfilter.h; IPv4 and IPv6
NO_NFTABLES = (errno.EINVAL, errno.EOPNOTSUPP, errno.EPROTONOSUPPORT)

# A counter expression: its name, then bytes and packets as big-endian 64-bit numbers. Whether the
# attribute around them has the flag for nesting (0x8000) set differs between kernels.
NFT_COUNTER = re.compile(
    rb"(\x0c\x00\x01\x00counter\x00\x1c\x00\x02[\x00\x80]\x0c\x00\x01\x00).{8}(\x0c\x00\x02\x00).{8}",
    re.DOTALL,
)

# The counters of a base chain, which iptables-nft-restore asks for (packets come first here).
NFT_CHAIN_COUNTERS = re.compile(
    rb"(\x1c\x00\x08[\x00\x80]\x0c\x00\x02\x00).{8}(\x0c\x00\x01\x00).{8}", re.DOTALL
)
# What a quota has used up.
NFT_QUOTA = re.compile(
    rb"(\x0a\x00\x01\x00quota\x00\x00\x00.{4}\x0c\x00\x01\x00.{8}\x0c\x00\x04\x00).{8}", re.DOTALL
)

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


class FilterEye:
    """Looks at the rules of the namespace of the thread that makes it; usable from any thread."""

    def __init__(self) -> None:
        self.netfilter = NetlinkSocket(NETLINK_NETFILTER)
        self._raw: dict[int, socket.socket] = {}
        self._names: dict[int, int] = {}
        for version, kind in ((4, socket.AF_INET), (6, socket.AF_INET6)):
            name = "ip_tables_names" if version == 4 else "ip6_tables_names"
            try:
                self._names[version] = os.open(f"/proc/thread-self/net/{name}", os.O_RDONLY)
                self._raw[version] = socket.socket(kind, socket.SOCK_RAW, socket.IPPROTO_RAW)
            except OSError as error:
                # A kernel without legacy tables, or without IPv6. Anything else hides rules.
                if error.errno not in ABSENT or not os.path.isdir("/proc/thread-self/net"):
                    self.close()
                    raise

    def legacy_tables(self) -> dict[int, tuple[str, ...]]:
        """Return the legacy tables that exist, by IP version. Asking iptables would create them."""
        return {
            version: tuple(os.pread(fd, 4096, 0).decode().split())
            for version, fd in self._names.items()
        }

    def digest(self) -> bytes:
        """Return the digest of everything.

        Raises: OSError.
        """
        found = hashlib.blake2b(digest_size=16)
        for kind in (NFT_MSG_GETTABLE, NFT_MSG_GETCHAIN, NFT_MSG_GETRULE, NFT_MSG_GETSET):
            found.update(self._nft_objects(kind))
        for version, tables in self.legacy_tables().items():
            for name in sorted(tables):
                found.update(f"|{version}{name}|".encode())
                found.update(self._legacy_entries(version, name))
        return found.digest()

    def capture_signs(self, prefix: str, table: str) -> frozenset[str]:
        """Return the backends in which the kernel holds a chain named PREFIX*, or `inet TABLE`.

        No tool is needed for this, so it tells of captures that the tools here cannot show.

        Raises: OSError.
        """
        found = set()
        for family, place, chain in self._nft_chains():
            if (family, place) == (NFPROTO_INET, table):
                found.add("nftables")
            elif family in XTABLES_FAMILIES and chain.startswith(prefix):
                found.add("iptables-nft")
        for version, tables in self.legacy_tables().items():
            if any(prefix.encode() in self._legacy_entries(version, name) for name in tables):
                found.add("iptables-legacy")
        return frozenset(found)

    def _nft_chains(self) -> list[tuple[int, str, str]]:
        """Return family, table and name of every chain; none from a kernel without nf_tables."""
        kind = (NFNL_SUBSYS_NFTABLES << 8) | NFT_MSG_GETCHAIN
        try:
            messages = self.netfilter.dump(kind, bytes(NFGENMSG_SIZE))
        except OSError as error:
            if error.errno in NO_NFTABLES:
                return []
            raise
        chains = []
        for message in messages:
            found = attributes(message.payload, NFGENMSG_SIZE)
            table, chain = (found[n].rstrip(b"\0").decode() for n in NFTA_CHAIN_NAMES)
            chains.append((message.payload[0], table, chain))
        return chains

    def _nft_objects(self, kind: int) -> bytes:
        request = bytes(NFGENMSG_SIZE)
        try:
            messages = self.netfilter.dump((NFNL_SUBSYS_NFTABLES << 8) | kind, request)
        except OSError as error:
            if error.errno in NO_NFTABLES:
                return b"|none|"  # a kernel without nf_tables
            raise
        # The generic header ends in the generation number, which every transaction changes. Which
        # of two tables was made first means nothing; within a table the order is kept.
        parts = sorted((m.payload[:1] + m.payload[NFGENMSG_SIZE:] for m in messages), key=_owner)
        if kind == NFT_MSG_GETTABLE:
            parts = [
                _owner(part) + attributes(part, 1).get(NFTA_TABLE_FLAGS, b"") for part in parts
            ]
        whole = b"".join(parts)
        for moving in (NFT_COUNTER, NFT_CHAIN_COUNTERS, NFT_QUOTA):
            whole = moving.sub(_fixed, whole)
        return b"|%d|" % kind + whole

    def _legacy_entries(self, version: int, table: str) -> bytes:
        layout = LAYOUTS[version]
        name = table.encode()
        info = bytearray(INFO.pack(name, *[0] * 13))
        self._ask(version, SO_GET_INFO, info)
        size = INFO.unpack(info)[-1]
        answer = bytearray(ENTRIES_HEADER.pack(name, size)) + bytearray(size)
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

    def _ask(self, version: int, option: int, buffer: bytearray) -> None:
        """getsockopt with an argument, which Python's own cannot pass."""
        raw = (ctypes.c_char * len(buffer)).from_buffer(buffer)
        size = ctypes.c_uint(len(buffer))
        fd = self._raw[version].fileno()
        if _libc.getsockopt(fd, LAYOUTS[version].level, option, raw, ctypes.byref(size)) < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))

    def close(self) -> None:
        self.netfilter.close()
        for raw in self._raw.values():
            raw.close()
        for fd in self._names.values():
            os.close(fd)


def _owner(part: bytes) -> bytes:
    """Return family and table of an object: its first attribute is the table's name."""
    return part[: 1 + int.from_bytes(part[1:3], sys.byteorder)]


def _fixed(found: re.Match[bytes]) -> bytes:
    """Return what was matched without the numbers that traffic moves."""
    return b"".join(found.groups())
