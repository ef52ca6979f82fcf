"""Which connections prove a capture. Pure: the settings and what is known of the namespace decide.

An attempt is chosen so that the settings leave no doubt about it: they capture it, or they exempt
it, whatever else they say. Where they capture nothing of a kind, nothing of that kind is attempted,
and a result says so. Chance (`rng`) only chooses among addresses and ports that are equally good.
"""

import ipaddress
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from agent.kernel.probe_net import Link, Road, Surroundings
from agent.kernel.sockets import Endpoint, KernelSocket, Owner
from agent.model import numbers
from agent.model.ruleset import Family
from agent.model.settings import Settings
from agent.model.values import MAX_ID, MAX_PORT, Address, Network, Span, network_text

LINK_NAME = "icpt-probe"

LOOPBACK = {
    Family.IPV4: ipaddress.ip_address("127.0.0.1"),
    Family.IPV6: ipaddress.ip_address("::1"),
}
EVERY_ADDRESS = {
    Family.IPV4: ipaddress.ip_network("0.0.0.0/0"),
    Family.IPV6: ipaddress.ip_network("::/0"),
}
# Where an address is taken from if any will do: RFC 5737, RFC 3849. Nobody lives there.
DOCUMENTATION = {
    Family.IPV4: ("192.0.2.0/24", "198.51.100.0/24", "203.0.113.0/24"),
    Family.IPV6: ("2001:db8::/32",),
}
# What cannot be the other end of a connection that leaves over a link: this network, loopback,
# link-local IPv6 (it needs a scope), IPv4 in IPv6, multicast and reserved.
NOT_OUTSIDE = {
    Family.IPV4: ("0.0.0.0/8", "127.0.0.0/8", "224.0.0.0/3"),
    Family.IPV6: ("::/96", "::ffff:0:0/96", "fe80::/10", "ff00::/8"),
}
# For the link itself: RFC 3927, then RFC 2544; RFC 4193.
LINK_NETWORKS = {
    Family.IPV4: ("169.254.0.0/16", "198.18.0.0/15"),
    Family.IPV6: ("fd00::/8",),
}
LINK_PREFIX = {Family.IPV4: 30, Family.IPV6: 126}
LINK_TRIES = 64

# From so many addresses on, one taken at random is taken to be nobody's. A host route to it may
# then be open to everyone in the pod, and so catches what a live proxy does with the connection.
MANY_ADDRESSES = 256
MAX_RANGES = 8  # included networks that are probed, taken at random if there are more
MAX_SERVERS = 3  # as many as a resolver asks
APPLICATION_IDS = (1000, 1001, 10001, 0)
HIGH_PORTS = Span(20000, 32000)  # below the ephemeral ports, above what services use


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
    # What a TPROXY proxy does: it speaks to the application from the client's own address.
    BACK = "back"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One connection, or one datagram, and the port where the settings make it land.

    `lands` None means that it must not be captured. `owner` is None for what comes from outside.
    `live` tells that somebody else listens where it must land. `local` destinations need no road,
    and the road of an `everyone` one is open to everyone in the pod.
    """

    name: str
    family: Family
    protocol: str
    way: Way
    destination: Address
    port: int
    lands: int | None
    owner: Owner | None = None
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What the choice depends on besides the settings."""

    surroundings: Surroundings = field(default_factory=Surroundings)
    listeners: tuple[KernelSocket, ...] = ()

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


# --- sets of ports, ids and addresses -------------------------------------------------------------


def minus(spans: Iterable[Span], holes: Iterable[Span]) -> tuple[Span, ...]:
    """Return what is left of spans when the holes are cut out."""
    left = list(spans)
    for hole in holes:
        parts = []
        for span in left:
            if span.first < hole.first:
                parts.append(Span(span.first, min(span.last, hole.first - 1)))
            if span.last > hole.last:
                parts.append(Span(max(span.first, hole.last + 1), span.last))
        left = parts
    return tuple(left)


def common(spans: Iterable[Span], others: Iterable[Span]) -> tuple[Span, ...]:
    """Return what is in both."""
    others = tuple(others)
    cut = (
        Span(max(a.first, b.first), min(a.last, b.last)) for a in tuple(spans) for b in others
    )
    return tuple(span for span in cut if span.first <= span.last)


def size(spans: Iterable[Span]) -> int:
    return sum(span.last - span.first + 1 for span in spans)


def pick(rng: random.Random, *choices: tuple[Span, ...]) -> int | None:
    """Return a number of the first choice that has any."""
    for spans in choices:
        if spans:
            span = rng.choice(spans)
            return rng.randint(span.first, span.last)
    return None


def span_of(network: Network) -> Span:
    return Span(int(network.network_address), int(network.broadcast_address))


def _spans(texts: Iterable[str]) -> tuple[Span, ...]:
    return tuple(span_of(ipaddress.ip_network(text)) for text in texts)


def _address(family: Family, number: int) -> Address:
    if family is Family.IPV4:
        return ipaddress.IPv4Address(number)
    return ipaddress.IPv6Address(number)


# --- the choice -----------------------------------------------------------------------------------


def choose(settings: Settings, facts: Facts, rng: random.Random) -> ProbePlan:
    """Return the attempts that prove this capture in this namespace."""
    attempts: list[Attempt] = []
    skipped: list[ProbeResult] = []
    links = tuple(_link(family, facts, rng) for family in settings.families)
    for link in links:
        choice = _Choice(settings, facts, rng, link)
        for found in (*choice.outbound(), *choice.inbound(), *choice.dns()):
            if isinstance(found, Attempt):
                attempts.append(found)
            else:
                skipped.append(found)
    return ProbePlan(
        name=link_name(settings, facts),
        links=links,
        attempts=tuple(attempts),
        skipped=tuple(skipped),
    )


def link_name(settings: Settings, facts: Facts) -> str:
    """Return a name that no rule of the capture is about.

    It is always the same one where it can be: the kernel then lets no two probes of a namespace run
    at the same time.
    """
    taken = {*settings.exclude_interfaces, *settings.reroute_virtual_interfaces}
    names = (LINK_NAME, *(f"{LINK_NAME}{n}" for n in range(1, len(taken) + 2)))
    return next(name for name in names if name not in taken)


def _link(family: Family, facts: Facts, rng: random.Random) -> Link:
    """Return addresses for the link that no route of the namespace is about."""
    known = [n for n in facts.surroundings.networks if n.version == family.version]
    prefix = LINK_PREFIX[family]
    for text in LINK_NETWORKS[family]:
        spans = minus(_spans((text,)), map(span_of, known))
        for _ in range(LINK_TRIES):
            number = pick(rng, spans)
            if number is None:
                break
            number &= ~3
            if any(span.first <= number and number + 3 <= span.last for span in spans):
                break
        else:
            continue
        if number is not None:
            break
    else:
        number = int(ipaddress.ip_network(LINK_NETWORKS[family][0]).network_address)
    return Link(
        family=family,
        pod=_address(family, number + 1),
        far=_address(family, number + 2),
        prefix=prefix,
    )
