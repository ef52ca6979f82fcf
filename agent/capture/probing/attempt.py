"""What a probe tries, what it knows before, and what it reports. Values only."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from agent.capture.probing.space import ANY, LOOPBACK
from agent.kernel.probe_net import Link, Road, Surroundings
from agent.kernel.sockets import Endpoint, KernelSocket, Owner
from agent.model.ruleset import Family
from agent.model.settings import Settings
from agent.model.values import Address, Span


class Outcome(StrEnum):
    """How a probe ended. `skipped` says nothing about the capture."""

    OK = "ok"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """One probe: `detail` is a sentence on what was sent, where it landed, and what that means."""

    name: str
    outcome: Outcome
    detail: str


class Way(StrEnum):
    """Which way an attempt goes."""

    OUT = "out"
    IN = "in"
    # What a proxy does that speaks to the application from the client's own address.
    BACK = "back"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One connection, or one datagram, and the port where the settings make it land.

    `lands` None means that it must not be captured. `owner` is None for what comes from outside.
    `mark` is that of the socket. `live` tells that somebody else listens where it must land.
    `local` destinations need no road, and the road of an `everyone` one is open to everyone in the
    pod.
    """

    name: str
    family: Family
    protocol: str
    way: Way
    destination: Address
    port: int
    lands: int | None
    owner: Owner | None = None
    mark: int = 0
    everyone: bool = False
    local: bool = False
    live: bool = False

    @property
    def goal(self) -> Endpoint:
        return self.destination, self.port


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbePlan:
    """Everything that a probe does. `skipped` are the results of what it does not do."""

    name: str
    links: tuple[Link, ...]
    attempts: tuple[Attempt, ...]
    skipped: tuple[ProbeResult, ...]

    def roads(self) -> tuple[Road, ...]:
        """Return what must lead outside; for everyone if one of the attempts says so."""
        found: dict[Address, bool] = {}
        for attempt in self.attempts:
            if attempt.way is Way.OUT and not attempt.local:
                found[attempt.destination] = found.get(attempt.destination, False) or (
                    attempt.everyone
                )
        return tuple(Road(address, everyone) for address, everyone in found.items())

    def link(self, family: Family) -> Link:
        return next(link for link in self.links if link.family is family)

    def landing(self, attempt: Attempt, settings: Settings) -> Endpoint | None:
        """Return the address and port that a captured attempt arrives at, None for an exempt one.

        REDIRECT takes the loopback address for what leaves, and an address of the interface for
        what comes in. TPROXY takes what listens there or, if the address is not a preferred one,
        at the destination: hence any address.
        """
        if attempt.lands is None:
            return None
        if attempt.way is Way.OUT:
            return LOOPBACK[attempt.family], attempt.lands
        if attempt.way is Way.IN and settings.tproxy:
            return ANY[attempt.family], attempt.lands
        return self.link(attempt.family).pod, attempt.lands


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What the choice depends on besides the settings.

    `enrolled` tells that eBPF captures: then what arrives keeps its address, and conntrack knows
    nothing.
    """

    surroundings: Surroundings = field(default_factory=Surroundings)
    listeners: tuple[KernelSocket, ...] = ()
    enrolled: bool = False

    def own(self, family: Family) -> Iterator[Address]:
        for interface in self.surroundings.addresses:
            if interface.version == family.version:
                yield interface.ip

    def busy_ports(self) -> tuple[Span, ...]:
        return tuple(Span(s.local[1], s.local[1]) for s in self.listeners)

    def live(self, protocol: str, address: Address, port: int) -> bool:
        """Tell whether somebody listens for what arrives there."""
        return any(
            s.protocol == protocol and s.local[1] == port and s.accepts(address)
            for s in self.listeners
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What became of an attempt.

    `answered_by` is the receiver of the probe whose nonce came back, `arrived` the one that got the
    attempt, `outside` whether that one stands outside, and `original` the destination that it was
    told. Of others' sockets the kernel names the one that `accepted` the connection, and conntrack
    the end that it was `translated` to. `unbound` is why the probe could not listen there itself.
    """

    answered_by: Endpoint | None = None
    outside: bool = False
    arrived: Endpoint | None = None
    original: Endpoint | None = None
    accepted: KernelSocket | None = None
    translated: Endpoint | None = None
    connected: bool = False
    error: int = 0
    unbound: int = 0
