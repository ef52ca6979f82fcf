"""Sets of addresses, ports and ids as spans of numbers, and the ones that a probe may use. Pure."""

import ipaddress
import random
from collections.abc import Iterable

from agent.kernel.probe_net import Link, Surroundings
from agent.model.ruleset import Family
from agent.model.values import MAX_ID, MAX_PORT, Address, Network, Span

LOOPBACK: dict[Family, Address] = {
    Family.IPV4: ipaddress.IPv4Address("127.0.0.1"),
    Family.IPV6: ipaddress.IPv6Address("::1"),
}
ANY: dict[Family, Address] = {
    Family.IPV4: ipaddress.IPv4Address("0.0.0.0"),
    Family.IPV6: ipaddress.IPv6Address("::"),
}
ALL_ADDRESSES = {Family.IPV4: (Span(0, 2**32 - 1),), Family.IPV6: (Span(0, 2**128 - 1),)}
ALL_PORTS = (Span(1, MAX_PORT),)
ALL_IDS = (Span(0, MAX_ID),)
# Where an address is taken from if any will do: RFC 5737, RFC 3849. Nobody lives there.
DOCUMENTATION = {
    Family.IPV4: ("192.0.2.0/24", "198.51.100.0/24", "203.0.113.0/24"),
    Family.IPV6: ("2001:db8::/32",),
}
# What cannot be the other end of a connection that leaves over a link: this network, loopback,
# link-local IPv6 (it needs a scope), IPv4 in IPv6, multicast and reserved.
NOT_OUTSIDE = {
    Family.IPV4: ("0.0.0.0/8", "127.0.0.0/8", "224.0.0.0/3"),
    Family.IPV6: ("::/95", "fe80::/10", "ff00::/8"),
}
# For the link itself: RFC 3927, else RFC 2544; RFC 4193. Shorter routes than these prefixes lead to
# so many addresses that one taken at random is nobody's.
LINK_NETWORKS = {
    Family.IPV4: ("169.254.0.0/16", "198.18.0.0/15"),
    Family.IPV6: ("fd00::/8",),
}
LINK_PREFIX = {Family.IPV4: 30, Family.IPV6: 126}
LINK_SIZE = 4
CROWDED_PREFIX = {Family.IPV4: 16, Family.IPV6: 48}


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
    cut = (Span(max(a.first, b.first), min(a.last, b.last)) for a in tuple(spans) for b in others)
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


def spans_of(texts: Iterable[str]) -> tuple[Span, ...]:
    return tuple(span_of(ipaddress.ip_network(text)) for text in texts)


def address_of(family: Family, number: int) -> Address:
    if family is Family.IPV4:
        return ipaddress.IPv4Address(number)
    return ipaddress.IPv6Address(number)


def within(address: Address, spans: tuple[Span, ...]) -> bool:
    return any(int(address) in span for span in spans)


def link_for(
    family: Family, surroundings: Surroundings, servers: Iterable[Address], rng: random.Random
) -> Link:
    """Return addresses for the link that no route of the namespace is about."""
    crowded = [
        span_of(network)
        for network in surroundings.networks
        if network.version == family.version and network.prefixlen >= CROWDED_PREFIX[family]
    ]
    crowded += [Span(int(server), int(server)) for server in servers]
    blocks = []
    for text in LINK_NETWORKS[family]:
        free = minus(spans_of((text,)), crowded)
        whole = (Span(-(-s.first // LINK_SIZE), (s.last + 1) // LINK_SIZE - 1) for s in free)
        blocks.append(tuple(block for block in whole if block.first <= block.last))
    chosen = pick(rng, *blocks, spans_of(LINK_NETWORKS[family][:1]))
    first = (chosen or 0) * LINK_SIZE
    return Link(
        family=family,
        pod=address_of(family, first + 1),
        far=address_of(family, first + 2),
        prefix=LINK_PREFIX[family],
    )
