"""A namespace captured by eBPF: what its programs can be told, and what they then decide. Pure.

The programs turn connections at the socket and see no packets, interfaces or marks, so a few
settings are not theirs. The rest they decide as the rules of `agent.model.plan` do: `verdict` is
that decision, once more in words, and the tests hold both against it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TypeVar

from agent.model import numbers
from agent.model.packet import Kind, Packet, Verdict
from agent.model.settings import Settings
from agent.model.values import EVERYTHING, Address, Network, Networks, Selection, Span, below

# How much of everything an entry of the programs' map holds (bpf/capture.h).
MAX_SPANS = 64
MAX_NETWORKS = 64
MAX_SERVERS = 16
MAX_PLACES = 64

# Raised with every change of a map's layout: what older versions pinned is then written anew
# (READABLE in agent/formats/bpf_capture.py says which), and what newer ones pinned is not touched.
LAYOUT = 3

Item = TypeVar("Item", Span, Network, Address)


# Faults of the node's programs that say nothing of one namespace, and the end of those that let
# nothing past.
HALF_LOADED = "the programs are loaded half"
IDLE = "the programs are loaded for nobody"
OTHER_VERSION = "of this version of the agent"


@dataclass(frozen=True, slots=True)
class Enrolment:
    """What is loaded for one namespace.

    `settings` are those that the programs work by, None where there are only remains. `faults` are
    sentences on whatever else is not as it should be, and `stale` on addresses and routes that came
    or went since; they do so at any time, so they make no difference between what was written and
    what is read back. `foreign` has sentences on others' programs that have a say. `listened` says
    that the proxy has listened since, be it once: whatever gate there was is closed for good.
    """

    settings: Settings | None
    faults: tuple[str, ...] = ()
    stale: tuple[str, ...] = field(default=(), compare=False)
    foreign: tuple[str, ...] = field(default=(), compare=False)
    listened: bool = field(default=False, compare=False)

    @property
    def is_of_namespace(self) -> bool:
        """Whether anything of it is the namespace's own."""
        return self.settings is not None or not set(self.faults) <= {HALF_LOADED, IDLE}

    @property
    def gaps(self) -> tuple[str, ...]:
        """The faults by which a part of the traffic is not captured."""
        return tuple(fault for fault in self.faults if not fault.endswith(OTHER_VERSION))

    @property
    def shut(self) -> bool:
        """Whether the gate is closed for good.

        While a gate for some lets nobody pass, the first to listen may be no proxy: a container of
        Istio's tries the capture so, before all others.
        """
        told = self.settings
        nobody = told is not None and told.gate == "listener" and not told.init_cgroups
        return self.listened and not nobody

    @property
    def in_force(self) -> Settings | None:
        """What the programs go by now: with the gate closed once the proxy has listened."""
        if self.settings is None or not self.listened:
            return self.settings
        return replace(self.settings, gate="closed", init_cgroups=())


@dataclass(frozen=True, slots=True)
class Place:
    """Destinations, the address that the namespace has towards them, and whether they are its own.

    No `source` means that it is not known.
    """

    network: Network
    source: Address | None
    local: bool


@dataclass(frozen=True, slots=True)
class IdRange:
    """Ids of a user namespace, from `inside` on, and which they are on the node."""

    inside: int
    outside: int
    count: int


NODE_IDS = IdRange(0, 0, 0)
"""Stands for the node's own ids: nothing is translated."""


@dataclass(frozen=True, slots=True)
class Site:
    """What the programs must know of a namespace besides its settings."""

    places: tuple[Place, ...] = ()
    users: IdRange = NODE_IDS
    groups: IdRange = NODE_IDS


def enrolment(settings: Settings) -> Enrolment:
    """Return what should be loaded for these settings."""
    return Enrolment(effective(settings))


def refusals(settings: Settings) -> tuple[str, ...]:
    """Return a sentence for each setting that cannot be honoured without netfilter."""
    if settings.ambient:
        return (
            "mode: an ambient capture knows its proxy by packet mark and routes the answers of the "
            "application back to it, and eBPF turns connections at the socket and sees no packets",
        )
    found = []
    if settings.tproxy:
        found.append(
            "inbound_interception_mode: TPROXY takes packets, and eBPF turns connections at the "
            "socket (the proxy sees the client's address with REDIRECT, too)"
        )
    if settings.exclude_interfaces:
        found.append(
            "exclude_interfaces: by which interface a connection goes is not known at the socket"
        )
    if settings.reroute_virtual_interfaces:
        found.append(
            "reroute_virtual_interfaces: what a machine behind the pod sends is forwarded and "
            "meets no socket here"
        )
    if settings.drop_invalid:
        found.append("drop_invalid: only conntrack calls a packet invalid, and it is not in use")
    for key, most in _CAPACITY.items():
        count = len(_items(getattr(effective(settings), key)))
        if count > most:
            found.append(f"{key}: {count} entries, and the programs hold {most}")
    servers = len(settings.dns_servers_v4) + len(settings.dns_servers_v6)
    if servers > MAX_SERVERS:
        found.append(f"dns_servers: {servers} servers, and the programs hold {MAX_SERVERS}")
    return tuple(found)


_CAPACITY = {
    **dict.fromkeys(
        (
            *("proxy_uid", "proxy_gid", "owner_groups_include", "owner_groups_exclude"),
            *("outbound_ports_include", "outbound_ports_exclude"),
        ),
        MAX_SPANS,
    ),
    "outbound_ip_ranges_include": MAX_NETWORKS,
    "outbound_ip_ranges_exclude": MAX_NETWORKS,
}


def _items(value: Selection | Networks | tuple[object, ...]) -> tuple[object, ...]:
    return value if isinstance(value, tuple) else value.items


def effective(settings: Settings) -> Settings:
    """Return the settings that have the same effect, with nothing in them that has none.

    What the programs are told can be read back only as such.
    """
    ipv6, dns = settings.enable_ipv6, settings.dns_active
    inbound, groups = settings.inbound_ports_include, settings.owner_groups_include
    include = settings.outbound_ip_ranges_include
    listed = dns and not settings.capture_all_dns
    return Settings(
        proxy_port=settings.proxy_port,
        inbound_capture_port=settings.inbound_capture_port,
        inbound_tunnel_port=settings.inbound_tunnel_port,
        # The first user alone is sent in again when it calls its own pod: it stays the first.
        proxy_uid=(settings.proxy_uid[0], *_sorted(settings.proxy_uid[1:])),
        proxy_gid=_sorted(settings.proxy_gid),
        inbound_ports_include=(
            EVERYTHING if inbound.everything else Selection(items=_merged(inbound.items))
        ),
        inbound_ports_exclude=_merged(settings.inbound_ports_exclude if inbound.everything else ()),
        outbound_ip_ranges_include=replace(include, items=_networks(include.items, ipv6)),
        outbound_ip_ranges_exclude=_networks(settings.outbound_ip_ranges_exclude, ipv6),
        outbound_ports_include=_sorted(settings.outbound_ports_include),
        outbound_ports_exclude=_sorted(settings.outbound_ports_exclude),
        owner_groups_include=_selection(groups),
        owner_groups_exclude=_sorted(settings.owner_groups_exclude if groups.everything else ()),
        redirect_dns=dns,
        capture_all_dns=dns and settings.capture_all_dns,
        dns_servers_v4=_sorted(settings.dns_servers_v4 if listed else ()),
        dns_servers_v6=_sorted(settings.dns_servers_v6 if listed else ()),
        enable_ipv6=ipv6,
        host_ipv4_loopback_cidr=settings.host_ipv4_loopback_cidr,
        gate=settings.gate,
        init_cgroups=tuple(sorted(settings.passing)),
    )


def _sorted(items: Iterable[Item]) -> tuple[Item, ...]:
    return tuple(sorted(set(items)))


def _selection(selection: Selection) -> Selection:
    return EVERYTHING if selection.everything else Selection(items=_sorted(selection.items))


def _merged(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Return the same ports in as few spans as can be, which is how a set of bits reads."""
    found: list[Span] = []
    for span in sorted(spans):
        if found and span.first <= found[-1].last + 1:
            found[-1] = Span(found[-1].first, max(found[-1].last, span.last))
        else:
            found.append(span)
    return tuple(found)


def _networks(networks: Iterable[Network], ipv6: bool) -> tuple[Network, ...]:
    kept = {network for network in networks if network.version == 4 or ipv6}
    return tuple(sorted(kept, key=lambda n: (n.version, n.network_address, n.prefixlen)))


# --- the decision ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Decision:
    """What becomes of a connection, the setting that says so, and why in words."""

    verdict: Verdict
    setting: str | None
    why: str


def verdict(settings: Settings, packet: Packet, *, inbound: bool) -> Decision:
    """Return what the programs make of the first packet of a connection, or of a datagram.

    Of an outbound one, `out_interface` is `lo` if its destination is this namespace itself.
    """
    if packet.family not in settings.families:
        return _passes("enable_ipv6", "IPv6 is left alone")
    if settings.gate == "open":
        return _passes("gate", "the proxy has not listened yet")
    if settings.passing and not inbound:
        if packet.cgroup is None:
            return Decision(Verdict(Kind.MAYBE), "init_cgroups", "of which cgroup it is, decides")
        if any(below(packet.cgroup, path) for path in settings.passing):
            return _passes("init_cgroups", "it is of an init container, and no proxy listened yet")
    return _inbound(settings, packet) if inbound else _outbound(settings, packet)


def _passes(setting: str | None, why: str) -> Decision:
    return Decision(Verdict(Kind.PASS), setting, why)


def _goes(port: int, setting: str, why: str) -> Decision:
    return Decision(Verdict(Kind.REDIRECT, port), setting, why)


def _any(spans: Iterable[Span], number: int | None) -> bool:
    return any(number in span for span in spans)


def _inbound(settings: Settings, packet: Packet) -> Decision:
    include = settings.inbound_ports_include
    if packet.protocol != "tcp":
        return _passes(None, "only TCP is captured inbound")
    if packet.dport == settings.inbound_tunnel_port:
        return _passes("inbound_tunnel_port", "the tunnel port is never captured")
    if include.everything and _any(settings.inbound_ports_exclude, packet.dport):
        return _passes("inbound_ports_exclude", f"port {packet.dport} is excluded")
    if not include.everything and not _any(include.items, packet.dport):
        return _passes("inbound_ports_include", f"port {packet.dport} is not included")
    return _goes(
        settings.inbound_capture_port, "inbound_ports_include", f"port {packet.dport} is included"
    )


def _outbound(settings: Settings, packet: Packet) -> Decision:
    tcp, port, to = packet.protocol == "tcp", packet.dport, packet.destination
    if _any(settings.outbound_ports_exclude, port):
        return _passes("outbound_ports_exclude", f"port {port} is excluded")
    if _on_lo(packet) and packet.source is not None and str(packet.source) in _PASSTHROUGH:
        return _passes(None, f"{packet.source} is where the proxy passes inbound traffic on from")
    loopback = _is_loopback(settings, to)
    if (found := _owners(settings, packet, loopback)) is not None:
        return found
    include = settings.owner_groups_include
    if include.everything and _any(settings.owner_groups_exclude, packet.gid):
        return _passes("owner_groups_exclude", f"group {packet.gid} is excluded")
    if not include.everything and not _any(include.items, packet.gid):
        return _passes("owner_groups_include", f"group {packet.gid} is not included")
    if settings.dns_active and port == numbers.DNS_PORT:
        servers = settings.dns_servers(packet.family)
        if settings.capture_all_dns or to in servers:
            setting = (
                "capture_all_dns" if settings.capture_all_dns else f"dns_servers_v{to.version}"
            )
            return _goes(numbers.DNS_PROXY_PORT, setting, "it is a DNS query")
    if loopback:
        key = "host_ipv4_loopback_cidr" if to.version == 4 else None
        return _passes(key, f"{to} is the pod's loopback")
    for network in settings.outbound_ip_ranges_exclude:
        if to.version == network.version and to in network:
            return _passes("outbound_ip_ranges_exclude", f"{to} is in {network}, excluded")
    if not tcp:
        return _passes(None, "of UDP only DNS is captured")
    return _included(settings, to, port)


_PASSTHROUGH = frozenset(
    text.split("/")[0] for text in (numbers.PASSTHROUGH_V4, numbers.PASSTHROUGH_V6)
)


def _on_lo(packet: Packet) -> bool:
    return packet.out_interface == "lo"


def _is_loopback(settings: Settings, to: Address) -> bool:
    if to.version == 4:
        return to in settings.host_ipv4_loopback_cidr
    return to.is_loopback


def _owners(settings: Settings, packet: Packet, loopback: bool) -> Decision | None:
    """Decide what is sent by the proxy, and what stays in the pod; None: neither.

    The rules ask one id after the other, users first, and each time let go what others send over
    lo; so the first user is the only one that such traffic is compared with.
    """
    tcp, port = packet.protocol == "tcp", packet.dport
    dns = settings.dns_active
    include = settings.outbound_ip_ranges_include.items
    lo_captured = any(network.network_address.is_loopback for network in include)
    user, group = _any(settings.proxy_uid, packet.uid), _any(settings.proxy_gid, packet.gid)
    asks_dns = dns and (not tcp or port == numbers.DNS_PORT)
    if _on_lo(packet) and not lo_captured and not asks_dns:
        user = packet.uid in settings.proxy_uid[0]
        if not user:
            return _passes("proxy_uid", "it stays in the pod")
    if not user and not group:
        return None
    setting = "proxy_uid" if user else "proxy_gid"
    if not _on_lo(packet) or not tcp or loopback:
        return _passes(setting, "the proxy sends it")
    if port == settings.inbound_tunnel_port:
        return _passes("inbound_tunnel_port", "the proxy calls its tunnel port")
    if user and dns and port == numbers.DNS_PORT:
        return _passes(setting, "the proxy asks the pod's own DNS")
    return _goes(settings.inbound_capture_port, setting, "the proxy calls its own pod")


def _included(settings: Settings, to: Address, port: int) -> Decision:
    if _any(settings.outbound_ports_include, port):
        return _goes(settings.proxy_port, "outbound_ports_include", f"port {port} is included")
    include = settings.outbound_ip_ranges_include
    key = "outbound_ip_ranges_include"
    if include.everything:
        return _goes(settings.proxy_port, key, "every destination is included")
    for network in include.items:
        if to.version == network.version and to in network:
            return _goes(settings.proxy_port, key, f"{to} is in {network}, included")
    return _passes(key, f"{to} is in no included network")
