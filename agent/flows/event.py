"""What the programs tell of one connection, and the stream in which it comes. Pure.

Each record of the stream has the size of `struct event` (programs.c); two kinds are not the
programs' own: the watch has begun, and so many connections were lost.
"""

import ipaddress
import struct
from dataclasses import dataclass
from enum import IntEnum

from agent.model.values import Address

Endpoint = tuple[Address, int]

EVENT = struct.Struct("=QQQIIII16s16s16sHHHHBBB5x16s")
LOST = struct.Struct("=Q")


class Kind(IntEnum):
    """What a record is of; from OUT_TCP to IN_TCP as programs.c has it."""

    LOST = 0
    OUT_TCP = 1
    OUT_UDP = 2
    IN_TCP = 3
    READY = 255


class Result(IntEnum):
    """How far a connection came; of UDP nothing is known but that it was sent."""

    SENT = 0
    CONNECTED = 1
    REFUSED = 2  # the other side answered, and not to accept
    UNANSWERED = 3  # the first packet was sent again
    FAILED = 4  # given up before an answer came


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One connection. Times are CLOCK_MONOTONIC in nanoseconds, `netns` is a cookie.

    Outbound, `asked` is where the process wanted to go and `went` where its first packet was sent
    to behind all translations, if it was `left` out at all. Inbound, `went` is the local end and
    `listening` the port of the socket that accepted it, 0 where that is not known. Ids and pid are
    the node's, 0 inbound, and so is the socket's `mark`. `name` is that of the thread.
    """

    at_ns: int
    took_ns: int
    netns: int
    pid: int
    uid: int
    gid: int
    mark: int
    source: Endpoint
    asked: Endpoint
    went: Endpoint
    listening: int
    kind: Kind
    result: Result
    left: bool
    name: str

    @property
    def inbound(self) -> bool:
        return self.kind is Kind.IN_TCP

    @property
    def protocol(self) -> str:
        return "udp" if self.kind is Kind.OUT_UDP else "tcp"


@dataclass(frozen=True, slots=True)
class Lost:
    """So many connections more were not told of: they came faster than they could be read."""

    count: int


@dataclass(frozen=True, slots=True)
class Ready:
    """From now on every connection is seen."""


def lost(count: int) -> bytes:
    return LOST.pack(count).ljust(EVENT.size, b"\0")


def ready() -> bytes:
    return bytes(_KIND_AT) + bytes([Kind.READY]) + bytes(EVENT.size - _KIND_AT - 1)


_KIND_AT = struct.calcsize("=QQQIIII16s16s16sHHHH")


def decode(record: bytes) -> Event | Lost | Ready:
    """Raises: ValueError for what the programs never write."""
    kind = Kind(record[_KIND_AT])
    if kind is Kind.LOST:
        return Lost(LOST.unpack_from(record)[0])
    if kind is Kind.READY:
        return Ready()
    at, took, netns, pid, uid, gid, mark, *rest = EVENT.unpack(record)
    source, asked, went, source_port, asked_port, went_port, listening, _, result, left, name = rest
    return Event(
        at_ns=at,
        took_ns=took,
        netns=netns,
        pid=pid,
        uid=uid,
        gid=gid,
        mark=mark,
        source=(_address(source), source_port),
        asked=(_address(asked), asked_port),
        went=(_address(went), went_port),
        listening=listening,
        kind=kind,
        result=Result(result),
        left=bool(left),
        name=name.split(b"\0", 1)[0].decode(errors="replace"),
    )


def _address(raw: bytes) -> Address:
    found = ipaddress.IPv6Address(raw)
    return found.ipv4_mapped or found
