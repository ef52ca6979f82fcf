"""What one pod's capture should be, as typed values, and the parser that makes them.

Every key is a key of the capture-rule reference. `parse` reports all mistakes at once, each naming
the setting, the value and what is allowed.
"""

import ipaddress
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace

from agent.model import numbers, profile, values
from agent.model.errors import InvalidSettings
from agent.model.ruleset import Family
from agent.model.values import (
    EVERYTHING,
    NO_NETWORKS,
    NOTHING,
    Address,
    Names,
    Network,
    Networks,
    NoNames,
    Selection,
    Span,
    address_text,
    network_text,
    one,
)

PROBE_SOURCE_V4: Address = ipaddress.ip_address(numbers.PROBE_SOURCE_V4)
PROBE_SOURCE_V6: Address = ipaddress.ip_address(numbers.PROBE_SOURCE_V6)
OWN_PORTS = (numbers.STATUS_PORT, numbers.HEALTH_PORT, numbers.ENVOY_METRICS_PORT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The capture of one namespace. Ports are in host byte order.

    The defaults are those of `istio-iptables`: nothing is captured until an include says so.
    """

    proxy_port: int = numbers.PROXY_PORT
    inbound_capture_port: int = numbers.INBOUND_CAPTURE_PORT
    inbound_tunnel_port: int = numbers.INBOUND_TUNNEL_PORT
    proxy_uid: tuple[Span, ...] = one(numbers.PROXY_ID)
    proxy_gid: tuple[Span, ...] = one(numbers.PROXY_ID)
    inbound_interception_mode: str = "REDIRECT"
    inbound_tproxy_mark: int = numbers.TPROXY_MARK
    inbound_tproxy_route_table: int = numbers.TPROXY_ROUTE_TABLE
    inbound_ports_include: Selection = NOTHING
    inbound_ports_exclude: tuple[Span, ...] = ()
    outbound_ip_ranges_include: Networks = NO_NETWORKS
    outbound_ip_ranges_exclude: tuple[Network, ...] = ()
    outbound_ports_include: tuple[Span, ...] = ()
    outbound_ports_exclude: tuple[Span, ...] = ()
    owner_groups_include: Selection = EVERYTHING
    owner_groups_exclude: tuple[Span, ...] = ()
    exclude_interfaces: tuple[str, ...] = ()
    reroute_virtual_interfaces: tuple[str, ...] = ()
    redirect_dns: bool = False
    capture_all_dns: bool = False
    dns_servers_v4: tuple[Address, ...] = ()
    dns_servers_v6: tuple[Address, ...] = ()
    drop_invalid: bool = False
    dual_stack: bool = False
    enable_ipv6: bool = False
    host_ipv4_loopback_cidr: Network = ipaddress.ip_network(numbers.LOOPBACK_V4)
    mode: str = values.SIDECAR
    host_probe_snat_ip: Address = PROBE_SOURCE_V4
    host_probe_snat_ipv6: Address = PROBE_SOURCE_V6
    guard: str = "off"
    gate: str = "closed"
    init_cgroups: tuple[str, ...] = ()

    @property
    def tproxy(self) -> bool:
        return self.inbound_interception_mode == "TPROXY"

    @property
    def ambient(self) -> bool:
        """Whether the node's proxy captures, and not one in the pod; see `agent.model.profile`."""
        return self.mode == values.AMBIENT

    @property
    def guarded(self) -> bool:
        """Whether a standing guard is to be kept; see `agent.model.standing`."""
        return self.guard == "standing"

    @property
    def passing(self) -> tuple[str, ...]:
        """The cgroups whose processes are let pass: those of init containers, at their gate."""
        return self.init_cgroups if self.gate == "listener" else ()

    @property
    def families(self) -> tuple[Family, ...]:
        return (Family.IPV4, Family.IPV6) if self.enable_ipv6 else (Family.IPV4,)

    @property
    def dns_active(self) -> bool:
        """Whether DNS is captured: without any known server there is nothing to match."""
        known = self.capture_all_dns or self.dns_servers_v4 or self.dns_servers_v6
        return self.redirect_dns and bool(known)

    def dns_servers(self, family: Family) -> tuple[Address, ...]:
        return self.dns_servers_v4 if family is Family.IPV4 else self.dns_servers_v6

    def captures_dns(self, family: Family) -> bool:
        return self.dns_active and (self.capture_all_dns or bool(self.dns_servers(family)))

    def probe_source(self, family: Family) -> Address:
        """Return where the node's probes of an ambient pod come from."""
        return self.host_probe_snat_ip if family is Family.IPV4 else self.host_probe_snat_ipv6

    def without_ipv6(self) -> "Settings":
        """Return the settings for where there is no IPv6, of which nothing can then escape."""
        include = self.outbound_ip_ranges_include
        left = Networks(include.everything, include.of(Family.IPV4))
        return replace(self, enable_ipv6=False, outbound_ip_ranges_include=left)

    def loopback(self, family: Family) -> str:
        if family is Family.IPV6:
            return numbers.LOOPBACK_V6
        return network_text(self.host_ipv4_loopback_cidr)

    @property
    def captures(self) -> bool:
        """Whether they capture anything at all."""
        outbound = self.outbound_ip_ranges_include or self.outbound_ports_include
        return bool(self.inbound_ports_include or outbound or self.dns_active)

    def warnings(self) -> tuple[str, ...]:
        """Sentences about settings that are valid and probably not meant."""
        if self.ambient:
            return ()
        found = []
        outbound = self.outbound_ip_ranges_include or self.outbound_ports_include
        if not self.captures:
            found.append(
                "nothing is captured: no inbound ports (--istio-inbound-ports), no outbound ranges "
                "(--istio-service-cidr) and no outbound ports (--istio-outbound-ports) are included"
            )
        elif not (self.inbound_ports_include or outbound):
            found.append(
                "only DNS is captured: no inbound ports (--istio-inbound-ports) and no outbound "
                "ranges or ports (--istio-service-cidr, --istio-outbound-ports) are included"
            )
        # The proxy's own ports are excluded by every istio-init and plugin, whatever is included.
        holes = {*self.inbound_ports_exclude} - {span for p in OWN_PORTS for span in one(p)}
        if holes and not self.inbound_ports_include.everything:
            found.append(
                "inbound_ports_exclude has no effect: it only narrows inbound_ports_include '*'"
            )
        if not self.owner_groups_include:
            found.append(
                "owner_groups_include is empty: no process has its outbound traffic captured"
            )
        if self.owner_groups_exclude and not self.owner_groups_include.everything:
            found.append("owner_groups_exclude has no effect: owner_groups_include is a list")
        if self.redirect_dns and not self.dns_active:
            found.append("DNS is not captured: no name server is known and capture_all_dns is off")
        if self.capture_all_dns and not self.redirect_dns:
            found.append("capture_all_dns has no effect without redirect_dns")
        return tuple(found)


def _parsers(names: Names) -> dict[str, Callable[[object], object]]:
    user = values.id_item("user", names.uid)
    group = values.id_item("group", names.gid)

    def users(value: object) -> tuple[Span, ...]:
        return values.each(values.split(value), user) or one(numbers.PROXY_ID)

    def groups(value: object) -> tuple[Span, ...]:
        return values.each(values.split(value), group)

    def proxy_groups(value: object) -> tuple[Span, ...]:
        return groups(value) or one(numbers.PROXY_ID)

    def group_selection(value: object) -> Selection:
        items = values.split(value)
        if items == ["*"]:
            return Selection(everything=True)
        if len(items) > values.MAX_OWNER_GROUPS:
            raise values.BadValue(
                f"{len(items)} groups are listed; at most {values.MAX_OWNER_GROUPS} are allowed"
            )
        return Selection(items=values.each(items, group))

    return {
        "proxy_port": values.port,
        "inbound_capture_port": values.port,
        "inbound_tunnel_port": values.port,
        "proxy_uid": users,
        "proxy_gid": proxy_groups,
        "inbound_interception_mode": values.interception_mode,
        "inbound_tproxy_mark": values.packet_mark,
        "inbound_tproxy_route_table": values.route_table,
        "inbound_ports_include": values.port_selection,
        "inbound_ports_exclude": values.ports,
        "outbound_ip_ranges_include": values.network_selection,
        "outbound_ip_ranges_exclude": values.networks,
        "outbound_ports_include": values.ports,
        "outbound_ports_exclude": values.ports,
        "owner_groups_include": group_selection,
        "owner_groups_exclude": groups,
        "exclude_interfaces": values.interfaces,
        "reroute_virtual_interfaces": values.interfaces,
        "redirect_dns": values.boolean,
        "capture_all_dns": values.boolean,
        "dns_servers_v4": values.addresses(4),
        "dns_servers_v6": values.addresses(6),
        "drop_invalid": values.boolean,
        "dual_stack": values.boolean,
        "enable_ipv6": values.boolean,
        "host_ipv4_loopback_cidr": values.loopback_network,
        "mode": profile.mode,
        "host_probe_snat_ip": profile.address(4),
        "host_probe_snat_ipv6": profile.address(6),
        "guard": values.guard,
        "gate": values.gate,
        "init_cgroups": values.cgroups,
    }


KEYS = tuple(field.name for field in fields(Settings))
NETWORKS = ("outbound_ip_ranges_include", "outbound_ip_ranges_exclude", "host_ipv4_loopback_cidr")


def parse(raw: Mapping[str, object], names: Names | None = None) -> Settings:
    """Return the settings that `raw` describes; keys that are absent keep their defaults.

    Lists are comma-separated text or real lists; an empty list is different from an absent key.

    Raises: InvalidSettings with every mistake in it. Nothing else is raised for any input.
    """
    parsers = _parsers(names or NoNames())
    ambient = raw.get("mode") == values.AMBIENT
    parsers |= profile.OVERRIDES if ambient else {}
    parsed: dict[str, object] = {}
    problems: list[str] = []
    for key, value in raw.items():
        if key not in parsers:
            name = key if key.isidentifier() else values.shown(key)
            known = ", ".join((*KEYS, *(profile.OVERRIDES if ambient else ())))
            problems.append(f"{name}: no such setting; known are {known}")
            continue
        try:
            parsed[key] = parsers[key]("" if value is None else value)
        except values.BadValue as mistake:
            problems.append(f"{key}: {mistake}")
    if problems:
        raise InvalidSettings(tuple(problems))
    if ambient:
        parsed = {**profile.AMBIENT, **profile.folded(parsed)}
    settings = Settings(**parsed)  # type: ignore[arg-type]  # each parser returns its field's type
    if contradictions := _contradictions(settings):
        raise InvalidSettings(contradictions)
    return settings


def _contradictions(settings: Settings) -> tuple[str, ...]:
    """Return what is wrong between values that are each right by themselves."""
    found = []
    lost = settings.outbound_ip_ranges_include.of(Family.IPV6)
    if lost and not settings.enable_ipv6:
        found.append(
            f"outbound_ip_ranges_include: {network_text(lost[0])} is IPv6, which is off here, so "
            "it would not be captured; turn IPv6 on (--enable-ipv6 true) or take it out"
        )
    return (*found, *_of_another_mode(settings))


def _of_another_mode(settings: Settings) -> Iterator[str]:
    """Yield the values that only the other kind of capture can have."""
    usual = Settings()
    if settings.ambient:
        usual = Settings(**profile.AMBIENT)  # type: ignore[arg-type]  # values of these fields
    for key in KEYS:
        if getattr(settings, key) == getattr(usual, key):
            continue
        if settings.ambient and key not in profile.CHOICES:
            choices = ", ".join(profile.CHOICES)
            yield f"{key}: an ambient capture has no choice of it; it has of {choices}"
        if not settings.ambient and key in profile.ONLY_AMBIENT:
            yield f"{key}: only an ambient capture has it (--mode ambient)"
    if settings.ambient and settings.inbound_ports_include.items:
        yield "inbound_ports_include: an ambient capture takes all of them (*) or none"


def counts_as(item: str) -> tuple[Network, Address] | None:
    """Return the network that ADDRESS/PREFIX counts as, and the address, where bits are dropped."""
    text = item.strip()
    if "/" not in text or not values.NETWORK.fullmatch(text):
        return None
    try:
        found = ipaddress.ip_interface(text)
    except ValueError:
        return None
    dropped = found.ip != found.network.network_address
    return (found.network, found.ip) if dropped else None


def widened(raw: Mapping[str, object]) -> tuple[str, ...]:
    """Return sentences about networks in raw settings that parse: wider ones than they look."""
    found = []
    for key in NETWORKS:
        for item in values.split(raw.get(key) or ""):
            if wide := counts_as(item):
                counts, address = network_text(wide[0]), address_text(wide[1])
                found.append(
                    f"{key}: {values.shown(item)} has bits set behind its prefix and counts as "
                    f"{counts}; write that or, for the one address, {address}"
                )
    return tuple(found)


def dump(settings: Settings) -> dict[str, object]:
    """Return the settings as plain values that `parse` turns back into the same settings."""
    return {key: _plain(getattr(settings, key)) for key in KEYS}


def _plain(value: object) -> object:
    if isinstance(value, (Selection, Networks)):
        return "*" if value.everything else _plain(value.items)
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Span):
        return value.text("-")
    if isinstance(value, (ipaddress.IPv4Network, ipaddress.IPv6Network)):
        return network_text(value)
    if isinstance(value, (ipaddress.IPv4Address, ipaddress.IPv6Address)):
        return address_text(value)
    return value
