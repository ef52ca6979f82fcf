"""A digest of all packet-filter rules in a namespace, in both of the kernel's subsystems.

Equal digests mean equal rules, so what was read once need not be read again: the digest costs half
a millisecond, reading and parsing everything about twenty. Only counters are left out. It is taken
from the kernel's own dumps, handles included, so it can only be too careful: whatever changes, the
digest changes with it.

Looking leaves no trace: a legacy table is asked for only if the namespace has it already.
"""

import errno
import hashlib
import re
import sys
from typing import NamedTuple

from agent.kernel.legacy_tables import LegacyEye
from agent.kernel.netlink import NETLINK_NETFILTER, NetlinkSocket, attributes

# linux/netfilter/nfnetlink.h and nf_tables.h
NFNL_SUBSYS_NFTABLES = 10
NFT_MSG_GETTABLE, NFT_MSG_GETCHAIN, NFT_MSG_GETRULE, NFT_MSG_GETSET = 1, 4, 7, 10
NFGENMSG_SIZE = 4
NFTA_TABLE_FLAGS = 2
NFTA_CHAIN_NAMES = (1, 3)  # of its table, and its own
NFTA_TABLE_NAME, NFTA_CHAIN_HOOK = 1, 4
# linux/netfilter.h, by the names that nft gives to them.
NFT_FAMILIES = {1: "inet", 2: "ip", 3: "arp", 5: "netdev", 7: "bridge", 10: "ip6"}
XTABLES_FAMILIES = ("ip", "ip6")
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


class NftChain(NamedTuple):
    """A chain of nf_tables, and whether the kernel calls it (a base chain)."""

    family: str
    table: str
    name: str
    hooked: bool


class FilterEye:
    """Looks at the rules of the namespace of the thread that makes it; usable from any thread."""

    def __init__(self) -> None:
        self.netfilter = NetlinkSocket(NETLINK_NETFILTER)
        try:
            self.legacy = LegacyEye()
        except BaseException:
            self.netfilter.close()
            raise

    def digest(self) -> bytes:
        """Return the digest of everything.

        Raises: OSError.
        """
        found = hashlib.blake2b(digest_size=16)
        for kind in (NFT_MSG_GETTABLE, NFT_MSG_GETCHAIN, NFT_MSG_GETRULE, NFT_MSG_GETSET):
            found.update(self._nft_objects(kind))
        for version, tables in self.legacy.tables().items():
            for name in sorted(tables):
                found.update(f"|{version}{name}|".encode())
                found.update(self.legacy.entries(version, name))
        return found.digest()

    def capture_signs(self, prefix: str, table: str) -> frozenset[str]:
        """Return the backends in which the kernel holds a chain named PREFIX*, or `inet TABLE`.

        No tool is needed for this, so it tells of captures that the tools here cannot show.

        Raises: OSError.
        """
        found = set()
        for family, place, chain, _ in self.nft_chains():
            if (family, place) == ("inet", table):
                found.add("nftables")
            elif family in XTABLES_FAMILIES and chain.startswith(prefix):
                found.add("iptables-nft")
        for version, tables in self.legacy.tables().items():
            if any(prefix.encode() in self.legacy.entries(version, name) for name in tables):
                found.add("iptables-legacy")
        return frozenset(found)

    def nft_tables(self) -> list[tuple[str, str]]:
        """Return family and name of every table. Raises: OSError."""
        found = []
        for payload in self._nft_dump(NFT_MSG_GETTABLE):
            name = attributes(payload, NFGENMSG_SIZE)[NFTA_TABLE_NAME]
            found.append((_family(payload), name.rstrip(b"\0").decode()))
        return found

    def nft_chains(self) -> list[NftChain]:
        """Return every chain. Raises: OSError."""
        chains = []
        for payload in self._nft_dump(NFT_MSG_GETCHAIN):
            found = attributes(payload, NFGENMSG_SIZE)
            table, chain = (found[n].rstrip(b"\0").decode() for n in NFTA_CHAIN_NAMES)
            chains.append(NftChain(_family(payload), table, chain, NFTA_CHAIN_HOOK in found))
        return chains

    def _nft_dump(self, kind: int) -> list[bytes]:
        """Return the messages of a dump; none from a kernel without nf_tables."""
        try:
            messages = self.netfilter.dump(NFNL_SUBSYS_NFTABLES << 8 | kind, bytes(NFGENMSG_SIZE))
        except OSError as error:
            if error.errno in NO_NFTABLES:
                return []
            raise
        return [message.payload for message in messages]

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

    def close(self) -> None:
        self.netfilter.close()
        self.legacy.close()


def _family(payload: bytes) -> str:
    return NFT_FAMILIES.get(payload[0], str(payload[0]))


def _owner(part: bytes) -> bytes:
    """Return family and table of an object: its first attribute is the table's name."""
    return part[: 1 + int.from_bytes(part[1:3], sys.byteorder)]


def _fixed(found: re.Match[bytes]) -> bytes:
    """Return what was matched without the numbers that traffic moves."""
    return b"".join(found.groups())
