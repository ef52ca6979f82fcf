"""Which connections prove a capture. Pure: the settings and what is known of the namespace decide.

An attempt is chosen so that the settings leave no doubt about it: they capture it, or they exempt
it, whatever else they say. Where they capture nothing of a kind, nothing of that kind is attempted,
and a result says so. Chance (`rng`) only chooses among addresses and ports that are equally good.
"""

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

from agent.capture.probing.attempt import (
    Attempt,
    Facts,
    Outcome,
    ProbePlan,
    ProbeResult,
    Way,
)
from agent.capture.probing.space import (
    ALL_ADDRESSES,
    ALL_IDS,
    ALL_PORTS,
    DOCUMENTATION,
    LOOPBACK,
    NOT_OUTSIDE,
    address_of,
    common,
    link_for,
    minus,
    pick,
    size,
    span_of,
    spans_of,
    within,
)
from agent.kernel.probe_net import Link
from agent.kernel.sockets import Owner
from agent.model import numbers
from agent.model.ruleset import Family
from agent.model.settings import Settings
from agent.model.values import Span, network_text

LINK_NAME = "icpt-probe"

# From so many addresses on, one taken at random is taken to be nobody's. A host route to it may
# then be open to everyone in the pod, and so catches what a live proxy does with the connection.
MANY_ADDRESSES = 256
MAX_RANGES = 8  # included networks that are probed, taken at random if there are more
MAX_SERVERS = 3  # as many as a resolver asks
APPLICATION_IDS = (1000, 1001, 10001, 0)
HIGH_PORTS = (Span(20000, 32000),)  # below the ephemeral ports, above what services use

Found = Attempt | ProbeResult
T = TypeVar("T")


# --- the choice -----------------------------------------------------------------------------------


def choose(settings: Settings, facts: Facts, rng: random.Random) -> ProbePlan:
    """Return the attempts that prove this capture in this namespace."""
    links = tuple(
        link_for(family, facts.surroundings, settings.dns_servers(family), rng)
        for family in settings.families
        if family is Family.IPV4 or facts.surroundings.ipv6
    )
    found: list[Found] = []
    if settings.enable_ipv6 and not facts.surroundings.ipv6:
        why = "new interfaces of the namespace have no IPv6, so the probe has none"
        found.append(ProbeResult(name="ipv6", outcome=Outcome.SKIPPED, detail=why))
    for link in links:
        choice = _Choice(settings, facts, rng, link)
        found += (*choice.outbound(), *choice.inbound(), *choice.dns())
    return ProbePlan(
        name=_link_name(settings),
        links=links,
        attempts=tuple(f for f in found if isinstance(f, Attempt)),
        skipped=tuple(f for f in found if isinstance(f, ProbeResult)),
    )


def _link_name(settings: Settings) -> str:
    """Return a name that no rule of the capture is about.

    It is the same one wherever it can be: the kernel then lets only one probe at a time into a
    namespace.
    """
    taken = {*settings.exclude_interfaces, *settings.reroute_virtual_interfaces}
    names = (LINK_NAME, *(f"{LINK_NAME}{n}" for n in range(1, len(taken) + 1)))
    return next(name for name in names if name not in taken)


@dataclass
class _Choice:
    """The choice for one family."""

    settings: Settings
    facts: Facts
    rng: random.Random
    link: Link

    def __post_init__(self) -> None:
        self.family = self.link.family
        # A proxy that is known by its mark may be anybody, and anybody may have its ids.
        uids, gids = self.settings.proxy_uid, self.settings.proxy_gid
        uids, gids = ((), ()) if self.settings.ambient else (uids, gids)
        self.uids = minus(ALL_IDS, uids)
        groups = self.settings.owner_groups_include
        excluded = self.settings.owner_groups_exclude if groups.everything else ()
        included = ALL_IDS if groups.everything else groups.items
        self.gids = minus(included, (*excluded, *gids))
        own = (Span(int(a), int(a)) for a in self.facts.own(self.family))
        ends = (int(self.link.pod), int(self.link.far))
        self.unusable = (*spans_of(NOT_OUTSIDE[self.family]), *own, *(Span(e, e) for e in ends))

    def _skip(self, name: str, why: str) -> ProbeResult:
        return ProbeResult(name=name, outcome=Outcome.SKIPPED, detail=why)

    def _application(self) -> Owner | None:
        """Return a user and group whose traffic is captured, if there is any."""
        if not self.uids or not self.gids:
            return None
        return Owner(_preferred(self.uids), _preferred(self.gids))

    # outbound

    def outbound(self) -> Iterator[Found]:
        name = f"outbound {self.family}"
        ranges = self.settings.outbound_ip_ranges_include
        if not (
            ranges.everything or ranges.of(self.family) or self.settings.outbound_ports_include
        ):
            yield self._skip(name, f"the settings capture nothing outbound over {self.family}")
            return
        owner = self._application()
        if owner is None:
            yield self._skip(name, "the settings capture no process: see owner_groups_include")
            return
        found = tuple((*self._by_range(name, owner), *self._by_port(name, owner)))
        for one in found:
            yield self._skip_leaking(one) if isinstance(one, Attempt) else one
        captured = next((one for one in found if isinstance(one, Attempt)), None)
        if captured:
            yield from self._exempt(captured, owner)

    def _skip_leaking(self, attempt: Attempt) -> Found:
        if not attempt.live or attempt.everyone:
            return attempt
        return self._skip(
            attempt.name,
            f"the proxy is listening and would call {attempt.destination}, which may be somebody's",
        )

    def _usable(self, spans: tuple[Span, ...]) -> tuple[Span, ...]:
        """Return the addresses outside among these that no exclusion is about."""
        excluded = self.settings.outbound_ip_ranges_exclude
        mine = (span_of(n) for n in excluded if n.version == self.family.version)
        return minus(spans, (*self.unusable, *mine))

    def _anywhere(self) -> tuple[Span, ...]:
        documentation = self._usable(spans_of(DOCUMENTATION[self.family]))
        return documentation or self._usable(ALL_ADDRESSES[self.family])

    def _ports(self) -> tuple[Span, ...]:
        """Return the ports that no rule of the capture is about; queries go their own way."""
        dns = Span(numbers.DNS_PORT, numbers.DNS_PORT)
        return minus(ALL_PORTS, (*self.settings.outbound_ports_exclude, dns))

    def _by_range(self, name: str, owner: Owner) -> Iterator[Found]:
        free = self._ports()
        ports = minus(free, self.settings.outbound_ports_include) or free
        if self.settings.outbound_ip_ranges_include.everything:
            yield self._outside(name, owner, self._anywhere(), ports)
            return
        networks = _once(self.settings.outbound_ip_ranges_include.of(self.family))
        chosen = self.rng.sample(networks, min(MAX_RANGES, len(networks)))
        for network in sorted(chosen, key=networks.index):
            label = f"{name} {network_text(network)}"
            if network.prefixlen == 0:
                yield self._outside(label, owner, self._anywhere(), ports)
            else:
                yield self._outside(label, owner, self._usable((span_of(network),)), ports)

    def _by_port(self, name: str, owner: Owner) -> Iterator[Found]:
        """Prove the included ports, at an address that is not captured anyway."""
        included = self.settings.outbound_ports_include
        ranges = self.settings.outbound_ip_ranges_include
        if ranges.everything or not included:
            return
        ports = common(self._ports(), included)
        captured = tuple(span_of(network) for network in ranges.of(self.family))
        addresses = minus(self._anywhere(), captured)
        addresses = addresses or self._usable(minus(ALL_ADDRESSES[self.family], captured))
        yield self._outside(f"{name} by port", owner, addresses, ports)

    def _outside(
        self, name: str, owner: Owner, addresses: tuple[Span, ...], ports: tuple[Span, ...]
    ) -> Found:
        """Return an attempt at one of these addresses and ports, which must be captured."""
        number = pick(self.rng, addresses)
        port = pick(self.rng, common(ports, HIGH_PORTS), ports)
        if number is None or port is None:
            what = "address outside the namespace" if number is None else "port"
            return self._skip(name, f"no {what} is left that this captures")
        capture = self.settings.proxy_port
        return Attempt(
            name=name,
            family=self.family,
            protocol="tcp",
            way=Way.OUT,
            destination=address_of(self.family, number),
            port=port,
            lands=capture,
            owner=owner,
            everyone=size(addresses) >= MANY_ADDRESSES,
            live=self.facts.live("tcp", LOOPBACK[self.family], capture),
        )

    def _exempt(self, captured: Attempt, owner: Owner) -> Iterator[Attempt]:
        """Turn an attempt that is captured into ones that are exempt, for one reason each."""
        name = f"exempt {self.family}"
        base = replace(captured, lands=None, live=False)
        if self.settings.ambient:
            yield replace(base, name=f"{name} proxy mark", mark=numbers.AMBIENT_MARK)
            return
        by_uid = Owner(self.settings.proxy_uid[0].first, owner.gid)
        by_gid = Owner(owner.uid, self.settings.proxy_gid[0].first)
        yield replace(base, name=f"{name} proxy uid", owner=by_uid)
        yield replace(base, name=f"{name} proxy gid", owner=by_gid)
        groups = minus(minus(ALL_IDS, self.gids), self.settings.proxy_gid)
        if groups:
            outsider = Owner(owner.uid, _preferred(groups))
            yield replace(base, name=f"{name} group", owner=outsider)
        ports = common(self.settings.outbound_ports_exclude, ALL_PORTS)
        if (port := pick(self.rng, ports)) is not None:
            yield replace(base, name=f"{name} port", port=port)
        yield from self._exempt_range(name, base)

    def _exempt_range(self, name: str, base: Attempt) -> Iterator[Attempt]:
        """Take an address that only its exclusion exempts."""
        include = self.settings.outbound_ip_ranges_include
        captured = tuple(span_of(network) for network in include.of(self.family))
        ports = self.settings.outbound_ports_include
        if include.everything or any(base.port in span for span in ports):
            captured = ALL_ADDRESSES[self.family]
        excluded = self.settings.outbound_ip_ranges_exclude
        networks = [span_of(n) for n in excluded if n.version == self.family.version]
        for network in self.rng.sample(networks, len(networks)):
            spans = minus(common((network,), captured), self.unusable)
            number = pick(self.rng, spans)
            if number is not None:
                destination = address_of(self.family, number)
                everyone = size(spans) >= MANY_ADDRESSES
                yield replace(
                    base, name=f"{name} range", destination=destination, everyone=everyone
                )
                return

    # inbound

    def inbound(self) -> Iterator[Found]:
        name = f"inbound {self.family}"
        include = self.settings.inbound_ports_include
        if not include:
            yield self._skip(name, "the settings capture nothing inbound")
            return
        excluded = self.settings.inbound_ports_exclude if include.everything else ()
        captured = minus(ALL_PORTS if include.everything else include.items, excluded)
        captured = minus(common(captured, ALL_PORTS), self._own_ports())
        port = self._quiet(captured)
        if port is None:
            yield self._skip(name, "the settings leave no inbound port that is captured")
            return
        yield self._inside(name, port, self.settings.inbound_capture_port)
        exempt = excluded if include.everything else minus(ALL_PORTS, include.items)
        port = self._quiet(minus(common(exempt, ALL_PORTS), self._own_ports()))
        if port is not None:
            yield self._inside(f"exempt {self.family} inbound port", port, None)
        if self.settings.ambient:
            tunnel = self.settings.inbound_tunnel_port
            yield self._inside(f"exempt {self.family} tunnel", tunnel, None)
            yield self._back("return", numbers.AMBIENT_MARK)
        if self.settings.tproxy:
            yield self._back("tproxy return", self.settings.inbound_tproxy_mark)

    def _own_ports(self) -> tuple[Span, ...]:
        """Return the ports that the proxy itself lives on: a connection there proves nothing."""
        own = (
            self.settings.proxy_port,
            self.settings.inbound_capture_port,
            self.settings.inbound_tunnel_port,
            numbers.DNS_PROXY_PORT,
        )
        return tuple(Span(port, port) for port in own)

    def _quiet(self, ports: tuple[Span, ...]) -> int | None:
        """Return one of the ports, on which nobody listens if there is such a one."""
        quiet = minus(ports, self.facts.busy_ports())
        return pick(self.rng, common(quiet, HIGH_PORTS), quiet, ports)

    def _inside(self, name: str, port: int, lands: int | None) -> Attempt:
        outside = spans_of(NOT_OUTSIDE[self.family])
        own = (a for a in self.facts.own(self.family) if not within(a, outside))
        live = lands is not None and self.facts.live("tcp", self.link.pod, lands)
        return Attempt(
            name=name,
            family=self.family,
            protocol="tcp",
            way=Way.IN,
            destination=next(own, self.link.pod),
            port=port,
            lands=lands,
            live=live,
        )

    def _back(self, what: str, mark: int) -> Found:
        name = f"{what} {self.family}"
        owner = self._application() or Owner(_preferred(ALL_IDS), _preferred(ALL_IDS))
        port = self._quiet(HIGH_PORTS)
        ranges = self.settings.outbound_ip_ranges_include.items
        if port is None or any(network.network_address.is_loopback for network in ranges):
            return self._skip(name, "loopback ranges are captured, which would catch the probe too")
        return Attempt(
            name=name,
            family=self.family,
            protocol="tcp",
            way=Way.BACK,
            destination=self.link.pod,
            port=port,
            lands=port,
            owner=owner,
            mark=mark,
        )

    # DNS

    def dns(self) -> Iterator[Found]:
        name = f"dns {self.family}"
        if not self.settings.redirect_dns:
            return
        if not self.settings.captures_dns(self.family):
            yield self._skip(name, f"the settings name no DNS server of {self.family}")
            return
        owner = self._application()
        excluded = self.settings.outbound_ports_exclude
        if owner is None or any(numbers.DNS_PORT in span for span in excluded):
            why = "port 53 is excluded" if owner else "the settings capture no process"
            yield self._skip(name, why)
            return
        attempts = tuple(self._queries(name, owner))
        yield from attempts
        for attempt in attempts:
            if isinstance(attempt, Attempt) and not attempt.local and attempt.protocol == "udp":
                ids = Owner(self.settings.proxy_uid[0].first, self.settings.proxy_gid[0].first)
                exempt = replace(attempt, name=f"exempt {self.family} dns", lands=None, live=False)
                if self.settings.ambient:
                    yield replace(exempt, mark=numbers.AMBIENT_MARK)
                else:
                    yield replace(exempt, owner=ids)
                return

    def _queries(self, name: str, owner: Owner) -> Iterator[Found]:
        servers = _once(self.settings.dns_servers(self.family))[:MAX_SERVERS]
        everyone = self.settings.capture_all_dns
        if everyone:
            number = pick(self.rng, self._anywhere(), spans_of(DOCUMENTATION[self.family])) or 0
            servers = (address_of(self.family, number),)
        loopback = spans_of(NOT_OUTSIDE[self.family])
        for server in servers:
            own = server.is_loopback or server in tuple(self.facts.own(self.family))
            label = name if everyone else f"{name} {server}"
            if not own and within(server, loopback):
                yield self._skip(label, f"{server} cannot be reached over the probe's link")
                continue
            for protocol in ("udp", "tcp"):
                yield Attempt(
                    name=f"{label} {protocol}",
                    family=self.family,
                    protocol=protocol,
                    way=Way.OUT,
                    destination=server,
                    port=numbers.DNS_PORT,
                    lands=numbers.DNS_PROXY_PORT,
                    owner=owner,
                    everyone=everyone,
                    local=own,
                    live=self.facts.live(protocol, LOOPBACK[self.family], numbers.DNS_PROXY_PORT),
                )


def _preferred(ids: tuple[Span, ...]) -> int:
    """Return an id that an application may well have."""
    usual = (i for i in APPLICATION_IDS if any(i in span for span in ids))
    return next(usual, ids[0].first)


def _once(items: Iterable[T]) -> tuple[T, ...]:
    return tuple(dict.fromkeys(items))
