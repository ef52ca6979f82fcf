"""From settings to what the kernel should hold. Pure: no I/O, no clock, no environment.

The rules are those of `istio-iptables`, in its order and with its chain names, spelled as
iptables-save prints them. Where Istio's own rule could not be loaded (more than 49 owner groups in
one rule) an equivalent takes its place.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache

from agent.model import ambient, numbers, standing
from agent.model.ruleset import (
    Family,
    Match,
    Rule,
    Ruleset,
    Rulesets,
    Target,
    basic,
    connmark,
    match,
    ruleset_of,
    target,
    without_bare_matches,
)
from agent.model.settings import Settings
from agent.model.values import MAX_PORT, Network, Span, address_text, network_text

OUTPUT_GROUPS = "ISTIO_OUTPUT_GROUPS"

RETURN = Target("RETURN")
DIVERT = Target("ISTIO_DIVERT")
TPROXY_CHAIN = Target("ISTIO_TPROXY")
IN_REDIRECT = Target("ISTIO_IN_REDIRECT")
REDIRECT = Target("ISTIO_REDIRECT")

WHOLE_MARK = 0xFFFFFFFF


@dataclass(frozen=True, slots=True, order=True)
class PolicyRule:
    """`ip rule`: packets with this mark, of the bits in `mask`, are routed by this table.

    `priority` is known of one that is there, and says nothing about whether two are the same.
    """

    family: Family
    mark: int
    table: int
    priority: int | None = field(default=None, compare=False)
    mask: int = WHOLE_MARK

    def command(self, verb: str = "add") -> str:
        mark = str(self.mark)
        if self.mask != WHOLE_MARK:  # a sidecar's rule takes the preference that the kernel gives
            pref = "" if self.priority is None else f" pref {self.priority}"
            mark = f"{self.mark:#x}/{self.mask:#x}{pref}"
        return f"ip -{self.family.version} rule {verb} fwmark {mark} lookup {self.table}"


@dataclass(frozen=True, slots=True, order=True)
class LocalRoute:
    """A local default route through lo: whatever the table routes is delivered here."""

    family: Family
    table: int
    replaces: bool = field(default=False, compare=False)  # in the words of the command only

    def command(self, verb: str = "add") -> str:
        everything = "0.0.0.0/0" if self.family is Family.IPV4 else "::/0"
        version = self.family.version
        verb = "replace" if self.replaces and verb == "add" else verb
        return f"ip -{version} route {verb} local {everything} dev lo table {self.table}"


@dataclass(frozen=True, slots=True, order=True)
class LoopbackAddress:
    """An address on lo that the proxy binds to.

    The kernel takes an address once, whatever its prefix, so that makes no difference.
    """

    family: Family
    address: str
    prefix: int = field(default=128, compare=False)

    def command(self, verb: str = "add") -> str:
        return f"ip -{self.family.version} addr {verb} {self.address}/{self.prefix} dev lo"


PASSTHROUGH = LoopbackAddress(Family.IPV6, numbers.PASSTHROUGH_V6.partition("/")[0])
Route = PolicyRule | LocalRoute | LoopbackAddress


@dataclass(frozen=True, slots=True)
class CapturePlan:
    """Everything a capture consists of: rules by family, what routing needs besides, and a guard.

    The guard's rules stand apart from the others, in a table of their own. `native` is how nftables
    has the rules. Where there are to be no rules, the settings say all.
    """

    settings: Settings
    rulesets: Rulesets
    routes: tuple[Route, ...] = ()
    guard: Rulesets = field(default_factory=dict)
    native: Rulesets = field(default_factory=dict)

    def rule_count(self) -> int:
        rulesets = (*self.rulesets.values(), *self.guard.values())
        return sum(ruleset.rule_count() for ruleset in rulesets)


@lru_cache(maxsize=256)
def plan(settings: Settings) -> CapturePlan:
    """Return the capture that `settings` describes. Most pods of a node have the same."""
    rulesets = {family: _ruleset(settings, family) for family in settings.families}
    guards: Rulesets = {}
    if settings.guarded:
        found = {family: standing.standing(ruleset) for family, ruleset in rulesets.items()}
        guards = {family: guard for family, guard in found.items() if guard is not None}
    native = {family: without_bare_matches(ruleset) for family, ruleset in rulesets.items()}
    return CapturePlan(settings, rulesets, routes(settings), guards, native)


def routes(settings: Settings) -> tuple[Route, ...]:
    """Return addresses, policy rules and routes in the order in which they must be made."""
    needed: list[Route] = []
    if settings.ambient:
        (mark, mask, table), chosen = numbers.AMBIENT_POLICY, numbers.AMBIENT_PREFERENCE
        needed += [LocalRoute(family, table, replaces=True) for family in settings.families]
        needed += [PolicyRule(f, mark, table, chosen, mask) for f in settings.families]
        return tuple(needed)
    if settings.enable_ipv6:
        needed.append(PASSTHROUGH)
    if settings.tproxy and settings.inbound_ports_include:
        mark, table = settings.inbound_tproxy_mark, settings.inbound_tproxy_route_table
        needed += [PolicyRule(family, mark, table) for family in settings.families]
        needed += [LocalRoute(family, table) for family in settings.families]
    return tuple(needed)


class _Rules:
    """Collects the rules of one family by table and chain."""

    def __init__(self) -> None:
        self.tables: dict[str, dict[str, list[Rule]]] = {}

    def add(self, table: str, chain: str, verdict: Target, *matches: Match | None) -> None:
        self._chain(table, chain).append(_rule(verdict, matches))

    def insert(self, index: int, table: str, chain: str, verdict: Target, *matches: Match) -> None:
        """Insert at a zero-based index."""
        self._chain(table, chain).insert(index, _rule(verdict, matches))

    def _chain(self, table: str, chain: str) -> list[Rule]:
        return self.tables.setdefault(table, {}).setdefault(chain, [])


def _rule(verdict: Target, matches: Iterable[Match | None]) -> Rule:
    return Rule(tuple(m for m in matches if m is not None and m.options), verdict)


def _ruleset(settings: Settings, family: Family) -> Ruleset:
    if settings.ambient:
        return ambient.ruleset(settings, family)
    rules = _Rules()
    _interfaces(rules, settings)
    _drop_invalid(rules, settings)
    _redirect_chains(rules, settings)
    _inbound(rules, settings, family)
    _output(rules, settings, family)
    if settings.dns_active:
        _dns_zones(rules, settings, family)
    if settings.tproxy:
        _tproxy(rules, settings, family)
    return ruleset_of(family, rules.tables)


def _interfaces(rules: _Rules, settings: Settings) -> None:
    for table in ("nat", "mangle") if settings.tproxy else ("nat",):
        for name in settings.exclude_interfaces:
            rules.add(table, "PREROUTING", RETURN, basic(in_interface=name))
            rules.add(table, "OUTPUT", RETURN, basic(out_interface=name))
    for name in settings.reroute_virtual_interfaces:
        rules.insert(0, "nat", "PREROUTING", RETURN, basic(in_interface=name))


def _drop_invalid(rules: _Rules, settings: Settings) -> None:
    if settings.drop_invalid:
        invalid = match("conntrack", "--ctstate", "INVALID")
        rules.add("mangle", "PREROUTING", Target("ISTIO_DROP"), invalid)
        rules.add("mangle", "ISTIO_DROP", Target("DROP"))


def _redirect_chains(rules: _Rules, settings: Settings) -> None:
    tunnel = tcp_port(Span(settings.inbound_tunnel_port, settings.inbound_tunnel_port))
    rules.add("nat", "ISTIO_INBOUND", RETURN, basic(protocol="tcp"), tunnel)
    for chain, port in (
        ("ISTIO_REDIRECT", settings.proxy_port),
        ("ISTIO_IN_REDIRECT", settings.inbound_capture_port),
    ):
        to_port = target("REDIRECT", to_ports=str(port))
        rules.add("nat", chain, to_port, basic(protocol="tcp"))


def _inbound(rules: _Rules, settings: Settings, family: Family) -> None:
    include = settings.inbound_ports_include
    if not include:
        return
    tcp = basic(protocol="tcp")
    table = "mangle" if settings.tproxy else "nat"
    rules.add(table, "PREROUTING", Target("ISTIO_INBOUND"), tcp)
    if include.everything:
        for port in settings.inbound_ports_exclude:
            rules.add(table, "ISTIO_INBOUND", RETURN, tcp, tcp_port(port))
    conditions = (None,) if include.everything else tuple(tcp_port(p) for p in include.items)
    for condition in conditions:
        if settings.tproxy:
            known = match("conntrack", "--ctstate", "RELATED,ESTABLISHED")
            rules.add(table, "ISTIO_INBOUND", DIVERT, tcp, condition, known)
            rules.add(table, "ISTIO_INBOUND", TPROXY_CHAIN, tcp, condition)
        else:
            rules.add(table, "ISTIO_INBOUND", IN_REDIRECT, tcp, condition)


def _output(rules: _Rules, settings: Settings, family: Family) -> None:
    rules.add("nat", "OUTPUT", Target("ISTIO_OUTPUT"))
    for cgroup in settings.passing:
        rules.add("nat", "ISTIO_OUTPUT", RETURN, match("cgroup", "--path", cgroup))
    for port in settings.outbound_ports_exclude:
        for protocol in ("tcp", "udp"):
            condition = port_match(protocol, "--dport", port)
            rules.add("nat", "ISTIO_OUTPUT", RETURN, basic(protocol=protocol), condition)
    passthrough = numbers.PASSTHROUGH_V4 if family is Family.IPV4 else numbers.PASSTHROUGH_V6
    rules.add("nat", "ISTIO_OUTPUT", RETURN, basic(source=passthrough, out_interface="lo"))
    _owners(rules, settings, family)
    _output_rest(rules, settings, family, chain=_owner_groups(rules, settings))


def _owners(rules: _Rules, settings: Settings, family: Family) -> None:
    """Write the three rules per proxy id, which keep the proxy from feeding itself.

    The rule for others' loopback traffic is left out when a loopback range is to be captured.
    """
    loopback = settings.loopback(family)
    lo_captured = any(
        network.network_address.is_loopback for network in settings.outbound_ip_ranges_include.items
    )
    tunnel = settings.inbound_tunnel_port
    for kind, ids in (("--uid-owner", settings.proxy_uid), ("--gid-owner", settings.proxy_gid)):
        for owner in ids:
            ours = match("owner", kind, owner.text("-"))
            others = match("owner", kind, owner.text("-"), negated=True)
            if settings.dns_active and kind == "--uid-owner":
                ports = match("multiport", "--dports", f"{numbers.DNS_PORT},{tunnel}", negated=True)
            else:
                ports = match("tcp", "--dport", str(tunnel), negated=True)
            to_self = basic(not_destination=loopback, out_interface="lo", protocol="tcp")
            rules.add("nat", "ISTIO_OUTPUT", IN_REDIRECT, to_self, ports, ours)
            if not lo_captured and settings.dns_active:
                not_dns = match("tcp", "--dport", str(numbers.DNS_PORT), negated=True)
                on_lo = basic(out_interface="lo", protocol="tcp")
                rules.add("nat", "ISTIO_OUTPUT", RETURN, on_lo, not_dns, others)
            elif not lo_captured:
                rules.add("nat", "ISTIO_OUTPUT", RETURN, basic(out_interface="lo"), others)
            rules.add("nat", "ISTIO_OUTPUT", RETURN, ours)


def _owner_groups(rules: _Rules, settings: Settings) -> str:
    """Write the owner-group rules; return the chain in which the rest of ISTIO_OUTPUT goes on."""
    include = settings.owner_groups_include
    groups = [group.text("-") for group in include.items]
    if include.everything:
        for excluded in settings.owner_groups_exclude:
            owner = match("owner", "--gid-owner", excluded.text("-"))
            rules.add("nat", "ISTIO_OUTPUT", RETURN, owner)
        return "ISTIO_OUTPUT"
    ranges = any(group.first != group.last for group in include.items)
    limit = numbers.MAX_RANGES_PER_RULE if ranges else numbers.MAX_MATCHES_PER_RULE
    if len(groups) <= limit:
        outside = [match("owner", "--gid-owner", group, negated=True) for group in groups]
        rules.add("nat", "ISTIO_OUTPUT", RETURN, *outside)
        return "ISTIO_OUTPUT"
    # "In none of the groups" said the other way round: whoever is in one goes on in another chain,
    # and what is left returns. A goto returns to the caller of ISTIO_OUTPUT, as before.
    for group in groups:
        go_on = Target(OUTPUT_GROUPS, goto=True)
        rules.add("nat", "ISTIO_OUTPUT", go_on, match("owner", "--gid-owner", group))
    rules.add("nat", "ISTIO_OUTPUT", RETURN)
    return OUTPUT_GROUPS


def _output_rest(rules: _Rules, settings: Settings, family: Family, chain: str) -> None:
    if settings.captures_dns(family):
        rules.add("nat", chain, Target("ISTIO_OUTPUT_DNS"))
        for protocol in ("tcp", "udp"):
            to_proxy = target("REDIRECT", to_ports=str(numbers.DNS_PROXY_PORT))
            query = match(protocol, "--dport", str(numbers.DNS_PORT))
            for server in _servers(settings, family):
                condition = basic(destination=server, protocol=protocol)
                rules.add("nat", "ISTIO_OUTPUT_DNS", to_proxy, condition, query)
    rules.add("nat", chain, RETURN, basic(destination=settings.loopback(family)))
    for network in settings.outbound_ip_ranges_exclude:
        if network.version == family.version:
            rules.add("nat", chain, RETURN, basic(destination=_destination(network)))
    for port in settings.outbound_ports_include:
        rules.add("nat", chain, REDIRECT, basic(protocol="tcp"), tcp_port(port))
    include = settings.outbound_ip_ranges_include
    for included in (None,) if include.everything else include.of(family):
        destination = _destination(included) if included else None
        for name in settings.reroute_virtual_interfaces:
            condition = basic(destination=destination, in_interface=name)
            rules.insert(0, "nat", "PREROUTING", REDIRECT, condition)
        rules.add("nat", chain, REDIRECT, basic(destination=destination))


def _dns_zones(rules: _Rules, settings: Settings, family: Family) -> None:
    """Keep the client's query and the proxy's own in conntrack zones of their own.

    Else the proxy's query to the same server would be the reply direction of the client's entry.
    """
    udp = basic(protocol="udp")
    to_upstream = target("CT", zone=str(numbers.ZONE_PROXY_TO_UPSTREAM))
    to_client = target("CT", zone=str(numbers.ZONE_CLIENT_TO_PROXY))
    query = match("udp", "--dport", str(numbers.DNS_PORT))
    answer = match("udp", "--sport", str(numbers.DNS_PORT))
    from_proxy = match("udp", "--sport", str(numbers.DNS_PROXY_PORT))
    rules.add("raw", "OUTPUT", Target("ISTIO_OUTPUT_DNS"))
    for kind, ids in (("--uid-owner", settings.proxy_uid), ("--gid-owner", settings.proxy_gid)):
        for owner in ids:
            ours = match("owner", kind, owner.text("-"))
            rules.add("raw", "ISTIO_OUTPUT_DNS", to_upstream, udp, query, ours)
            rules.add("raw", "ISTIO_OUTPUT_DNS", to_client, udp, from_proxy, ours)
    if not settings.captures_dns(family):
        return
    rules.add("raw", "PREROUTING", Target("ISTIO_INBOUND"))
    for server in _servers(settings, family):
        to_server = basic(destination=server, protocol="udp")
        from_server = basic(source=server, protocol="udp")
        rules.add("raw", "ISTIO_OUTPUT_DNS", to_client, to_server, query)
        rules.add("raw", "ISTIO_INBOUND", to_upstream, from_server, answer)


def _tproxy(rules: _Rules, settings: Settings, family: Family) -> None:
    loopback = settings.loopback(family)
    tcp = basic(protocol="tcp")
    mark = settings.inbound_tproxy_mark
    whole_mark = f"{mark:#x}/0xffffffff"
    any_address = "0.0.0.0" if family is Family.IPV4 else "::"
    port = str(settings.inbound_capture_port)
    capture = target("TPROXY", on_port=port, on_ip=any_address, tproxy_mark=whole_mark)
    marked = match("mark", "--mark", f"{mark:#x}")
    if settings.inbound_ports_include:
        rules.add("mangle", "ISTIO_DIVERT", target("MARK", set_xmark=whole_mark))
        rules.add("mangle", "ISTIO_DIVERT", Target("ACCEPT"))
        not_loopback = basic(not_destination=loopback, protocol="tcp")
        rules.add("mangle", "ISTIO_TPROXY", capture, not_loopback)
    rules.add("mangle", "PREROUTING", connmark("--save-mark"), tcp, marked)
    on_lo = basic(out_interface="lo", protocol="tcp")
    rules.add("mangle", "OUTPUT", RETURN, on_lo, marked)
    to_self = basic(not_destination=loopback, out_interface="lo", protocol="tcp")
    self_mark = target("MARK", set_xmark=f"{numbers.TPROXY_SELF_MARK:#x}/0xffffffff")
    for kind, ids in (("--uid-owner", settings.proxy_uid), ("--gid-owner", settings.proxy_gid)):
        for owner in ids:
            ours = match("owner", kind, owner.text("-"))
            rules.add("mangle", "OUTPUT", self_mark, to_self, ours)
    connection_marked = match("connmark", "--mark", f"{mark:#x}")
    rules.add("mangle", "OUTPUT", connmark("--restore-mark"), tcp, connection_marked)
    passthrough = numbers.PASSTHROUGH_V4 if family is Family.IPV4 else numbers.PASSTHROUGH_V6
    from_proxy = basic(source=passthrough, in_interface="lo", protocol="tcp")
    from_lo = basic(in_interface="lo", protocol="tcp")
    not_self = match("mark", "--mark", f"{numbers.TPROXY_SELF_MARK:#x}", negated=True)
    for index, matches in enumerate(((tcp, marked), (from_proxy,), (from_lo, not_self))):
        rules.insert(index, "mangle", "ISTIO_INBOUND", RETURN, *matches)


def port_match(protocol: str, name: str, port: Span) -> Match | None:
    """Return the match on a port or range; every port needs none, and iptables-save prints none."""
    if (port.first, port.last) == (0, MAX_PORT):
        return None
    return match(protocol, name, port.text(":"))


def tcp_port(port: Span) -> Match | None:
    return port_match("tcp", "--dport", port)


def _servers(settings: Settings, family: Family) -> tuple[str | None, ...]:
    """Return the name servers whose queries are captured; None stands for any server."""
    if settings.capture_all_dns:
        return (None,)
    prefix = 32 if family is Family.IPV4 else 128
    return tuple(f"{address_text(server)}/{prefix}" for server in settings.dns_servers(family))


def _destination(network: Network) -> str | None:
    """Return the network as a condition; all addresses need none, and iptables-save prints none."""
    return network_text(network) if network.prefixlen else None
