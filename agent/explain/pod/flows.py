"""What becomes of new connections now: canonical packets, walked through the loaded rules. Pure."""

import ipaddress
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from agent.explain import render
from agent.explain.effects import endpoint
from agent.explain.pod.facts import Facts, Listener
from agent.explain.trace import trace
from agent.model import numbers
from agent.model.host import LOOPBACK, Host, Route
from agent.model.packet import Kind, Outcome, Packet, Trace
from agent.model.ruleset import Family
from agent.model.settings import Settings
from agent.model.state import EBPF, NamespaceState
from agent.model.values import Address

# Documentation addresses (RFC 5737, RFC 3849): nobody's, so they stand for anybody outside.
OUTSIDE = {
    Family.IPV4: ipaddress.ip_address("192.0.2.1"),
    Family.IPV6: ipaddress.ip_address("2001:db8::1"),
}
EVERYWHERE = (ipaddress.ip_network("0.0.0.0/0"), ipaddress.ip_network("::/0"))
NO_INTERFACE = "none"
OUTSIDE_PORT = 80
APP_UID = 1000
APP_PORT = 8080
DEBUG_PORT = 15004  # of pilot-agent
DIRECTIONS = ("out", "in", "dns", "proxy")
MAX_INBOUND = 16  # ports that are looked at


class Fate(StrEnum):
    """What becomes of a connection, in one word."""

    PROXIED = "proxied"  # somebody listens where the rules send it
    REFUSED = "refused"  # nobody listens there
    DIRECT = "direct"  # no rule takes it: it goes where it was going
    DROPPED = "dropped"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """One kind of connection: `direction` is out, in, dns or proxy (what the proxy sends).

    `result` says in few words what happens, `text` says it as a sentence with the rule that
    decides, `setting` is where that rule comes from.
    """

    direction: str
    family: str
    packet: str
    fate: Fate
    port: int | None
    result: str
    text: str
    rule: str
    setting: str | None


@dataclass(frozen=True, slots=True)
class Walked:
    """One kind of connection with its walk."""

    flow: Flow
    trace: Trace


def flows(facts: Facts) -> tuple[Flow, ...]:
    """Return what happens to new connections; nothing where the rules could not be seen."""
    return tuple(one.flow for one in walked(facts))


def walked(facts: Facts) -> tuple[Walked, ...]:
    """Return the same with every step of the way there."""
    if facts.state is None or facts.host is None:
        return ()
    packets = sorted(_packets(facts), key=lambda found: DIRECTIONS.index(found[0]))
    return tuple(_walked(facts, facts.state, facts.host, *found) for found in packets)


def _walked(
    facts: Facts, state: NamespaceState, host: Host, direction: str, packet: Packet
) -> Walked:
    """Return one walk. Where no route leads out, it is what the rules would do if one did."""
    inbound = direction == "in"
    if inbound or host.lookup(packet.destination) is not None:
        way = trace(state, host, packet, inbound=inbound)
        return Walked(judged(facts, way, direction), way)
    everywhere = tuple(Route(network, NO_INTERFACE) for network in EVERYWHERE)
    way = trace(state, replace(host, routes=(*host.routes, *everywhere)), packet, inbound=False)
    found = judged(facts, way, direction)
    found = replace(found, result=f"{found.result} (if a route led there: none does)")
    return Walked(found, way)


def judged(facts: Facts, walked: Trace, direction: str) -> Flow:
    """Return what a walk means where the listeners are known, too."""
    end = _end(facts, walked)
    outcome = walked.outcomes[0]
    step = outcome.decided_by
    rule = f"{step.backend} {step.table} {step.chain} rule {step.number}" if step else ""
    return Flow(
        direction=direction,
        family=walked.packet.family.value,
        packet=_title(walked),
        fate=end.fate,
        port=walked.verdict.port,
        result=end.result,
        text=_sentence(facts, walked, end.more),
        rule=rule if step and step.table and step.number else "",
        setting=step.setting if step else None,
    )


# --- which packets --------------------------------------------------------------------------------


def app_uid(facts: Facts) -> int:
    """Return a user of the namespace whose traffic is meant to be captured: 1000 if there is none.

    Root counts last: it is also whoever looks into a pod with a shell.
    """
    found = {p.uid for p in facts.processes or () if not is_among(p.uid, facts.proxy_uids)}
    return min(found, key=lambda uid: (uid == 0, uid), default=APP_UID)


def is_among(number: int, ranges: tuple[tuple[int, int], ...]) -> bool:
    return any(first <= number <= last for first, last in ranges)


def _packets(facts: Facts) -> Iterator[tuple[str, Packet]]:
    for family in facts.families or (Family.IPV4,):
        to = _outside(facts, family)
        yield "out", _of_app(facts, "tcp", to, OUTSIDE_PORT)
        own = facts.own_address(family)
        if own is not None:
            for port in app_ports(facts):
                yield "in", Packet(protocol="tcp", destination=own, dport=port, source=to)
    for server in facts.name_servers[:1]:
        yield "dns", _of_app(facts, "udp", ipaddress.ip_address(server), numbers.DNS_PORT)
    yield "proxy", _of_proxy(facts)


def _of_app(facts: Facts, protocol: str, to: Address, port: int) -> Packet:
    uid = app_uid(facts)
    gid = _group(facts, uid)
    return Packet(protocol=protocol, destination=to, dport=port, uid=uid, gid=gid, cgroup="/")


def _of_proxy(facts: Facts) -> Packet:
    """Return a connection of the proxy itself, as who it really is."""
    to = _outside(facts, (*facts.families, Family.IPV4)[0])
    sent = Packet(protocol="tcp", destination=to, dport=OUTSIDE_PORT, uid=0, cgroup="/")
    if facts.ambient:
        return replace(sent, mark=numbers.AMBIENT_MARK)
    port = facts.settings.proxy_port if facts.settings else numbers.PROXY_PORT
    who = next((p for one in facts.listening(port) for p in one.processes), None)
    uid, gid = (who.uid, who.gid) if who else (facts.proxy_uids[0][0], facts.proxy_gids[0][0])
    return replace(sent, uid=uid, gid=gid)


def _group(facts: Facts, uid: int) -> int:
    """Return a group of an application: its own one, or one that is nobody's."""
    found = (p.gid for p in facts.processes or () if p.uid == uid)
    return next((gid for gid in found if not is_among(gid, facts.proxy_gids)), APP_UID)


def _outside(facts: Facts, family: Family) -> Address:
    """Return an address outside: one that the settings include, if they include only some."""
    settings = facts.settings
    include = settings.outbound_ip_ranges_include if settings else None
    if settings is not None and include and not include.everything:
        for network in include.of(family):
            candidate = network.network_address + (1 if network.num_addresses > 1 else 0)
            if not any(
                candidate in hole
                for hole in settings.outbound_ip_ranges_exclude
                if hole.version == candidate.version
            ):
                return candidate
    return _reachable(facts, family)


def _reachable(facts: Facts, family: Family) -> Address:
    """Return an address outside, or of a neighbour where no route leads further."""
    far = OUTSIDE[family]
    if facts.host is None or facts.host.lookup(far) is not None:
        return far
    for interface in facts.host.interfaces:
        for own in interface.addresses if interface.name != LOOPBACK else ():
            if own.version == far.version and own.network.num_addresses > 3:
                first = own.network.network_address + 1
                return first if first != own.ip else first + 1
    return far


def app_ports(facts: Facts) -> tuple[int, ...]:
    """Return the TCP ports on which the application waits for others, or one that stands for it."""
    mesh = mesh_ports(facts)
    found = {
        listener.port
        for listener in facts.listeners or ()
        if listener.socket.protocol == "tcp"
        and listener.port not in mesh
        and not listener.socket.local[0].is_loopback
    }
    return tuple(sorted(found)[:MAX_INBOUND]) or (APP_PORT,)


def mesh_ports(facts: Facts) -> Mapping[int, str]:
    """Return the ports of a mesh's proxy and what each is for."""
    settings = facts.settings or Settings()
    return {
        settings.proxy_port: "outbound",
        settings.inbound_capture_port: "inbound",
        settings.inbound_tunnel_port: "tunnel",
        numbers.DNS_PROXY_PORT: "DNS",
        numbers.HEALTH_PORT: "health",
        numbers.ENVOY_METRICS_PORT: "metrics",
        numbers.STATUS_PORT: "status",
        numbers.ENVOY_ADMIN_PORT: "admin",
        DEBUG_PORT: "debug",
    }


# --- what it means --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _End:
    """What becomes of a connection: `result` stands alone, `more` goes on after the rule's name."""

    fate: Fate
    result: str
    more: str = ""


def _end(facts: Facts, walked: Trace) -> _End:
    outcome, kind = walked.outcomes[0], walked.verdict.kind
    if kind is Kind.MAYBE:
        return _End(Fate.UNKNOWN, "depends on a rule that nobody can foresee")
    if kind is Kind.DROP:
        step = outcome.decided_by
        by_rule = f"dropped by {step.table} {step.chain}" if step and step.table else ""
        return _End(Fate.DROPPED, by_rule or f"dropped: {outcome.why}")
    if kind is Kind.REDIRECT:
        return _redirected(facts, walked, outcome)
    exempt = _exempt(outcome)
    if not outcome.local:
        return _End(Fate.DIRECT, f"not redirected{exempt}, leaves as it is")
    taken, who = _taken(facts, outcome.packet, transparent=False)
    if taken is Fate.REFUSED:
        return _End(Fate.DIRECT, f"not redirected{exempt}; {who} there: refused", f"; {who} there")
    return _End(Fate.DIRECT, f"not redirected{exempt}, reaches {who}", f", and reaches {who}")


def _exempt(outcome: Outcome) -> str:
    step = outcome.decided_by
    return f" ({step.setting})" if step and step.setting else ""


def _redirected(facts: Facts, walked: Trace, outcome: Outcome) -> _End:
    port = walked.verdict.port or outcome.packet.dport
    if not outcome.local:
        ends = dict.fromkeys(endpoint(o.packet.destination, port) for o in walked.outcomes)
        return _End(Fate.UNKNOWN, f"redirected to {render.some(tuple(ends))}")
    elsewhere = port != outcome.packet.dport  # TPROXY and eBPF leave the packet as it was
    program = outcome.decided_by is not None and outcome.decided_by.backend == EBPF
    transparent = elsewhere and not program  # a program hands it to any listener
    fate, who = _taken(facts, outcome.packet, transparent=transparent, port=port)
    if fate is Fate.REFUSED:
        lost = "dropped, so it times out" if transparent else "refused"
        return _End(fate, f"redirected to {port}, where {who}: {lost}", f", where {who}: {lost}")
    return _End(fate, f"redirected to {port}, {who}", f", where {who} takes it")


def _taken(
    facts: Facts, packet: Packet, *, transparent: bool, port: int | None = None
) -> tuple[Fate, str]:
    """Return whether somebody takes the packet, and who."""
    if facts.listeners is None:
        return Fate.UNKNOWN, "whoever listens there (not seen)"
    where = packet.destination if port in (None, packet.dport) else None
    found = facts.listening(port or packet.dport, protocol=packet.protocol, address=where)
    able = [one for one in found if one.socket.transparent or not transparent]
    if able:
        return Fate.PROXIED, able[0].who
    if found:
        return Fate.REFUSED, f"{found[0].who} listens without IP_TRANSPARENT"
    return Fate.REFUSED, _nobody(facts, packet, port or packet.dport)


def _nobody(facts: Facts, packet: Packet, port: int) -> str:
    others = facts.listening(port, protocol=packet.protocol)
    if not others:
        return "nobody listens"
    text = endpoint(others[0].socket.local[0], port)
    return f"{others[0].who} listens on {text} only"


def _title(walked: Trace) -> str:
    packet = walked.packet
    to = f"{packet.protocol.upper()} to {endpoint(packet.destination, packet.dport)}"
    if packet.mark:
        return f"{to} with mark {packet.mark:#x}"
    return to if packet.uid is None else f"{to} from UID {packet.uid}"


def _sentence(facts: Facts, walked: Trace, more: str) -> str:
    """Return the whole of it: what, by which rule and setting, who wrote that, and who takes it."""
    step = walked.outcomes[0].decided_by
    source = facts.sources.get(step.setting) if step and step.setting else None
    from_where = f" [{step.setting} is from {source}]" if step and source else ""
    return f"{render.summary(walked).rstrip('.')}{from_where}{more}."


def listener_text(listeners: tuple[Listener, ...]) -> str:
    """Return who listens on one port, each process once."""
    return ", ".join(dict.fromkeys(listener.who for listener in listeners)) or "nobody"
