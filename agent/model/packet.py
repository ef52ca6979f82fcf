"""One packet, what the rules did to it, and what became of it. Pure values, nothing else.

A `Packet` is the packet as one hook sees it: a walk starts with what the user asked about and makes
a changed copy whenever a rule or the kernel's routing changes something.
"""

import ipaddress
from dataclasses import dataclass, field
from enum import StrEnum

from agent.model.ruleset import Family

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

SYN = frozenset({"SYN"})


class Tracking(StrEnum):
    """What conntrack knows of a packet, which decides what `ctstate` and `connmark` see."""

    UNSEEN = "unseen"  # before conntrack: in the raw table of the first hook
    TEMPLATE = "template"  # the same, after a CT rule chose a zone or helper
    TRACKED = "tracked"
    UNTRACKED = "untracked"


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """The conntrack entry; `dnat` and `snat` say that a translation changed something.

    `original` is where the packet was going before its destination was translated, None if it was
    not.
    """

    state: str = "NEW"
    mark: int = 0
    dnat: bool = False
    snat: bool = False
    original: tuple[Address, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Packet:
    """A TCP or UDP packet. Ports are in host byte order.

    What may be left out: `source` (taken from the route, or an address that no rule names), `sport`
    (some port of the ephemeral range), `gid` (the same number as the uid). `uid` None means that
    no local socket belongs to the packet: it came from outside, or is behind the loopback hop.
    `cgroup` is the path of the sender's, None if it is not known. An
    empty interface name is chosen by routing, and is what rules see where there is no interface.
    """

    protocol: str
    destination: Address
    dport: int
    source: Address | None = None
    sport: int | None = None
    uid: int | None = None
    gid: int | None = None
    cgroup: str | None = None
    in_interface: str = ""
    out_interface: str = ""
    mark: int = 0
    connection: Connection = field(default_factory=Connection)
    tracking: Tracking = Tracking.UNSEEN
    tcp_flags: frozenset[str] = SYN

    def __post_init__(self) -> None:
        if self.source is not None and self.source.version != self.destination.version:
            raise ValueError(f"{self.source} and {self.destination} are of different families")
        if self.protocol not in ("tcp", "udp"):
            raise ValueError(f"protocol {self.protocol!r} is neither tcp nor udp")

    @property
    def family(self) -> Family:
        return Family.IPV4 if self.destination.version == 4 else Family.IPV6

    @property
    def tracked(self) -> bool:
        """Whether there is a conntrack entry that rules can see and change."""
        return self.tracking is Tracking.TRACKED and self.connection.state != "INVALID"

    @property
    def states(self) -> frozenset[str]:
        """What `--ctstate` compares with."""
        if self.tracking is Tracking.UNSEEN:
            return frozenset({"INVALID"})
        if self.tracking is Tracking.UNTRACKED:
            return frozenset({"UNTRACKED"})
        if self.tracking is Tracking.TEMPLATE:
            return frozenset({"NEW"})
        found = {self.connection.state}
        if self.tracked and self.connection.dnat:
            found.add("DNAT")
        if self.tracked and self.connection.snat:
            found.add("SNAT")
        return frozenset(found)


class Kind(StrEnum):
    """What became of a packet, in one word."""

    REDIRECT = "redirect"  # REDIRECT, DNAT or TPROXY
    ACCEPT = "accept"  # an ACCEPT in the nat table exempts it
    DROP = "drop"
    PASS = "pass"  # nothing redirected or dropped it
    MAYBE = "maybe"  # a match or target decides that nobody can foresee


@dataclass(frozen=True, slots=True)
class Verdict:
    """The end of a walk; `port` is where a redirected packet arrives, else None."""

    kind: Kind
    port: int | None = None


class Hit(StrEnum):
    """Whether a rule matched."""

    YES = "yes"
    NO = "no"
    MAYBE = "maybe"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One rule that was looked at, or one thing that the kernel did without a rule.

    `number` counts from 1 within the chain; it is None for a policy and for what the kernel does by
    itself (then `table` is empty too). `setting` is the key of `Settings` that the rule comes from,
    None for a rule that is not of a capture. `branch` is 1 until an unforeseeable match parts ways.
    """

    hook: str
    family: Family
    backend: str = ""
    table: str = ""
    chain: str = ""
    number: int | None = None
    text: str = ""
    hit: Hit = Hit.YES
    why: str = ""
    setting: str | None = None
    branch: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How one branch ended: the packet as it was at its end, and the step that explains it.

    `local` says whether it was delivered to a socket of this namespace.
    """

    verdict: Verdict
    packet: Packet
    local: bool
    branch: int
    decided_by: Step | None = None
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A whole walk: `packet` as it started, source and interface filled in, and what followed."""

    packet: Packet
    inbound: bool
    verdict: Verdict
    outcomes: tuple[Outcome, ...]
    steps: tuple[Step, ...]
