"""Loads a table of nf_tables from the kernel's own form of it, copied where it was loaded before.

Parsing and evaluating a script is most of what loading a capture costs (1.6 of 1.9 ms). Pods of a
node mostly get the same table, and what the kernel dumps for a rule is what it takes to make one.
So the first load goes by script; its dump, less handles and counters, is kept and sent as it is to
the next namespace, as one transaction. Whoever loads it reads it back, as after any other write.
"""

import struct
from collections.abc import Iterable

from agent.kernel.filters import NFT_COUNTER
from agent.kernel.netlink import (
    NLM_F_CREATE,
    NLM_F_EXCL,
    Batch,
    NetlinkSocket,
    attribute,
    attributes,
)

NFPROTO_INET = 1

# linux/netfilter/nfnetlink.h and nf_tables.h
NFNL_SUBSYS_NFTABLES = 10
NFNL_MSG_BATCH_BEGIN, NFNL_MSG_BATCH_END = 16, 17
NFT_MSG_NEWTABLE, NFT_MSG_DELTABLE, NFT_MSG_NEWCHAIN, NFT_MSG_NEWRULE = 0, 2, 3, 6
NFT_MSG_GETCHAIN, NFT_MSG_GETRULE, NFT_MSG_GETSET = 4, 7, 10
NFGENMSG = struct.Struct("=BB2s")
NLM_F_APPEND = 0x800

NFTA_TABLE_NAME = 1
NFTA_CHAIN_TABLE, NFTA_CHAIN_NAME, NFTA_CHAIN_HOOK = 1, 3, 4
NFTA_CHAIN_POLICY, NFTA_CHAIN_TYPE = 5, 7
NFTA_RULE_TABLE, NFTA_RULE_CHAIN, NFTA_RULE_EXPRESSIONS, NFTA_RULE_USERDATA = 1, 2, 4, 7
NFTA_SET_TABLE = 1
NLA_F_NESTED = 0x8000

# What says how a thing is to be made; the rest (handles, use counts) says where it is.
CHAIN_PARTS = (
    NFTA_CHAIN_TABLE,
    NFTA_CHAIN_NAME,
    NFTA_CHAIN_HOOK,
    NFTA_CHAIN_POLICY,
    NFTA_CHAIN_TYPE,
)
RULE_PARTS = (NFTA_RULE_TABLE, NFTA_RULE_CHAIN, NFTA_RULE_EXPRESSIONS, NFTA_RULE_USERDATA)
NESTED = {NFT_MSG_NEWCHAIN: NFTA_CHAIN_HOOK, NFT_MSG_NEWRULE: NFTA_RULE_EXPRESSIONS}


def copy_table(socket: NetlinkSocket, table: str) -> Batch | None:
    """Return what makes the table `inet TABLE` as it is now; None if it holds sets.

    Raises: OSError.
    """
    name = table.encode() + b"\0"
    if any(found.get(NFTA_SET_TABLE) == name for found in _dump(socket, NFT_MSG_GETSET)):
        return None
    head = NFGENMSG.pack(NFPROTO_INET, 0, b"\0\0")
    made = NLM_F_CREATE | NLM_F_EXCL
    messages = [(NFT_MSG_NEWTABLE, made, head + attribute(NFTA_TABLE_NAME, name))]
    messages += (
        (NFT_MSG_NEWCHAIN, made, head + _parts(found, NFT_MSG_NEWCHAIN))
        for found in _dump(socket, NFT_MSG_GETCHAIN)
        if found.get(NFTA_CHAIN_TABLE) == name
    )
    messages += (
        (NFT_MSG_NEWRULE, NLM_F_CREATE | NLM_F_APPEND, head + _parts(found, NFT_MSG_NEWRULE))
        for found in _dump(socket, NFT_MSG_GETRULE)
        if found.get(NFTA_RULE_TABLE) == name
    )
    return _framed(messages)


def load(socket: NetlinkSocket, batch: Batch) -> None:
    """Send a batch as one transaction.

    Raises: OSError with the kernel's errno; then nothing of it was applied.
    """
    socket.transaction(batch)


def _framed(messages: Iterable[tuple[int, int, bytes]]) -> Batch:
    frame = NFGENMSG.pack(0, 0, NFNL_SUBSYS_NFTABLES.to_bytes(2, "big"))
    return Batch.of(
        [
            (NFNL_MSG_BATCH_BEGIN, 0, frame),
            *((NFNL_SUBSYS_NFTABLES << 8 | kind, flags, body) for kind, flags, body in messages),
            (NFNL_MSG_BATCH_END, 0, frame),
        ]
    )


def delete_table(socket: NetlinkSocket, table: str) -> None:
    """Delete the table `inet TABLE`.

    Raises: OSError with the kernel's errno.
    """
    name = attribute(NFTA_TABLE_NAME, table.encode() + b"\0")
    head = NFGENMSG.pack(NFPROTO_INET, 0, b"\0\0")
    load(socket, _framed([(NFT_MSG_DELTABLE, 0, head + name)]))


def _dump(socket: NetlinkSocket, kind: int) -> list[dict[int, bytes]]:
    request = NFGENMSG.pack(NFPROTO_INET, 0, b"\0\0")
    messages = socket.dump(NFNL_SUBSYS_NFTABLES << 8 | kind, request)
    return [attributes(message.payload, NFGENMSG.size) for message in messages]


def _parts(found: dict[int, bytes], kind: int) -> bytes:
    parts = CHAIN_PARTS if kind == NFT_MSG_NEWCHAIN else RULE_PARTS
    return b"".join(
        attribute(part | (NLA_F_NESTED if part == NESTED[kind] else 0), _uncounted(found[part]))
        for part in parts
        if part in found
    )


def _uncounted(data: bytes) -> bytes:
    """Return the data with its counters at zero: packets may have passed meanwhile."""
    return NFT_COUNTER.sub(rb"\1" + bytes(8) + rb"\2" + bytes(8), data)
