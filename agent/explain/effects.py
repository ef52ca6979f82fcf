"""What the target of a rule that matched does to a packet. Pure; jumps and RETURN are the walk's.

Each effect is that of the kernel's target of the same name. A target that is not here, or whose
options are not understood, ends as `Ends.UNKNOWN`: whether the packet goes on cannot be foreseen.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto
from ipaddress import ip_address
from types import MappingProxyType

from agent.explain.conditions import masked, number, span
from agent.model.host import Host, loopback
from agent.model.packet import Address, Packet, Tracking
from agent.model.ruleset import Target
from agent.model.values import Span


class Ends(Enum):
    """What follows in the same table."""

    GOES_ON = auto()  # with the next rule
    ACCEPTED = auto()  # the packet leaves this table, and only this
    DROPPED = auto()
    UNKNOWN = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """The packet afterwards and what happened, in words.

    `translated`: nat has decided about the connection, so that no other nat table is asked.
    """

    packet: Packet
    why: str
    ends: Ends = Ends.GOES_ON
    translated: bool = False
    tproxy_port: int | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """Where the rule stands; targets do different things at different hooks."""

    hook: str
    table: str
    host: Host


# Targets after which the next rule is looked at and which change nothing that a walk depends on.
PASSIVE = frozenset(
    {"AUDIT", "CHECKSUM", "CLASSIFY", "CONNSECMARK", "DSCP", "ECN", "HL", "IDLETIMER", "LED"}
    | {"LOG", "NFLOG", "RATEEST", "SECMARK", "SET", "TCPMSS", "TCPOPTSTRIP", "TEE", "TOS"}
    | {"TRACE", "TTL", "ULOG"}
)
DNAT_HOOKS = frozenset({"PREROUTING", "OUTPUT"})
SNAT_HOOKS = frozenset({"INPUT", "POSTROUTING"})


def is_passive(target: Target | None) -> bool:
    """Whether it makes no difference to the walk if a rule with this target matches."""
    return target is None or target.name in PASSIVE


def effect(target: Target | None, packet: Packet, place: Place) -> Effect:
    """Return what `target`, which is no chain and not RETURN, does to `packet`."""
    if target is None:
        return Effect(packet=packet, why="only counts")
    if target.name in PASSIVE:
        return Effect(packet=packet, why=f"{target.name} changes nothing here")
    known = EFFECTS.get(target.name)
    found = known(target, packet, place) if known else None
    if found is not None:
        return found
    why = f"nobody can foresee what {target.name} does here"
    return Effect(packet=packet, why=why, ends=Ends.UNKNOWN)


def _value(target: Target, *names: str) -> str | None:
    """Return the value of the first option that has one of the names and exactly one value."""
    for option in target.options:
        if option.name in names and len(option.values) == 1:
            return option.values[0]
    return None


def _flags(target: Target) -> frozenset[str]:
    return frozenset(option.name for option in target.options)


# --- verdicts ------------------------------------------------------------------------------------


def _accept(target: Target, packet: Packet, place: Place) -> Effect:
    return Effect(packet=packet, why=f"leaves the {place.table} table", ends=Ends.ACCEPTED)


def _drop(target: Target, packet: Packet, place: Place) -> Effect:
    why = "rejected" if target.name == "REJECT" else "dropped"
    return Effect(packet=packet, why=why, ends=Ends.DROPPED)


# --- marks ---------------------------------------------------------------------------------------


def _new_mark(target: Target, old: int) -> int | None:
    """Return `old` after --set-xmark, --set-mark, --and-mark, --or-mark or --xor-mark."""
    for option in target.options:
        parsed = masked(option.values[0]) if len(option.values) == 1 else None
        if parsed is None:
            return None
        value, mask = parsed
        match option.name:
            case "--set-xmark":
                return (old & ~mask) ^ value
            case "--set-mark":
                return (old & ~(value | mask)) | value
            case "--and-mark":
                return old & value
            case "--or-mark":
                return old | value
            case "--xor-mark":
                return old ^ value
    return None


def _mark(target: Target, packet: Packet, place: Place) -> Effect | None:
    mark = _new_mark(target, packet.mark)
    if mark is None:
        return None
    return Effect(packet=replace(packet, mark=mark), why=f"the mark is now {mark:#x}")


def _connmark(target: Target, packet: Packet, place: Place) -> Effect | None:
    if not packet.tracked:
        return Effect(packet=packet, why="no connection is tracked: nothing to mark")
    packet_mask, connection_mask = (
        number(_value(target, name, "--mask") or "0xffffffff") for name in ("--nfmask", "--ctmask")
    )
    if packet_mask is None or connection_mask is None:
        return None
    connection = packet.connection
    flags = _flags(target)
    if "--restore-mark" in flags:
        mark = (packet.mark & ~packet_mask) ^ (connection.mark & connection_mask)
        restored = replace(packet, mark=mark)
        return Effect(packet=restored, why=f"the mark is now {mark:#x}, from the connection")
    if "--save-mark" in flags:
        new: int | None = (connection.mark & ~connection_mask) ^ (packet.mark & packet_mask)
    else:
        new = _new_mark(target, connection.mark)
    if new is None:
        return None
    changed = replace(packet, connection=replace(connection, mark=new))
    return Effect(packet=changed, why=f"the connection's mark is now {new:#x}")


# --- conntrack -----------------------------------------------------------------------------------


def _conntrack(target: Target, packet: Packet, place: Place) -> Effect:
    if packet.tracking is not Tracking.UNSEEN:
        # xt_ct leaves a packet alone that conntrack or an earlier CT rule has seen.
        return Effect(packet=packet, why="no effect: conntrack has seen the packet already")
    if target.name == "NOTRACK" or "--notrack" in _flags(target):
        untracked = replace(packet, tracking=Tracking.UNTRACKED)
        return Effect(packet=untracked, why="is not tracked: no nat rule will see it")
    zone = _value(target, "--zone", "--zone-orig")
    why = f"is tracked in zone {zone}" if zone else "is tracked with options"
    return Effect(packet=replace(packet, tracking=Tracking.TEMPLATE), why=why)


# --- translation ---------------------------------------------------------------------------------

PLACE_V4 = re.compile(r"(?P<first>[0-9.]+)?(?:-(?P<last>[0-9.]+))?(?::(?P<ports>[0-9-]+))?")
PLACE_V6 = re.compile(
    r"\[?(?P<first>[0-9a-fA-F:.]+)(?:-(?P<last>[0-9a-fA-F:.]+))?(?:\](?::(?P<ports>[0-9-]+))?)?"
    r"|\[?\]?:(?P<only>[0-9-]+)"
)


def _destination(text: str, version: int) -> tuple[Address | None, Span | None] | None:
    """Return address and ports of `--to-destination`; None if it names several addresses."""
    found = (PLACE_V4 if version == 4 else PLACE_V6).fullmatch(text)
    if found is None:
        return None
    parts = found.groupdict()
    if parts["last"] is not None and parts["last"] != parts["first"]:
        return None  # which one is taken depends on a hash
    ports_text = parts["ports"] or parts.get("only")
    found_ports = span(ports_text, "-", 65535) if ports_text else None
    if ports_text and (found_ports is None or found_ports.last > 65535):
        return None
    try:
        address = ip_address(parts["first"]) if parts["first"] else None
    except ValueError:
        return None
    return address, found_ports


def _chosen(wanted: Span | None, now: int) -> int:
    """Return the port the kernel takes: the present one if it is in the range, else the first."""
    return now if wanted is None or now in wanted else wanted.first


def _translated(packet: Packet, address: Address, port: int) -> Effect:
    changed = (address, port) != (packet.destination, packet.dport)
    connection = packet.connection
    if changed:  # a translation to what the packet already has sets no status (kernel fact 4)
        before = connection.original or (packet.destination, packet.dport)
        connection = replace(connection, dnat=True, original=before)
    translated = replace(packet, destination=address, dport=port, connection=connection)
    why = f"redirected to {endpoint(address, port)}"
    return Effect(packet=translated, why=why, ends=Ends.ACCEPTED, translated=True)


def _redirect(target: Target, packet: Packet, place: Place) -> Effect | None:
    text = _value(target, "--to-ports", "--to-port")
    wanted = span(text, "-", 65535) if text else None
    if place.hook not in DNAT_HOOKS or place.table != "nat" or (text and wanted is None):
        return None
    if wanted and (wanted.last > 65535 or (wanted.first < wanted.last and _randomised(target))):
        return None
    if place.hook == "OUTPUT":
        address: Address | None = loopback(packet.destination)
    else:
        address = place.host.own(packet.in_interface, packet.destination)
    if address is None:
        why = f"dropped: {packet.in_interface or 'the interface'} has no address to redirect to"
        return Effect(packet=packet, why=why, ends=Ends.DROPPED)
    return _translated(packet, address, _chosen(wanted, packet.dport))


def _randomised(target: Target) -> bool:
    return bool(_flags(target) & {"--random", "--random-fully"})


def _dnat(target: Target, packet: Packet, place: Place) -> Effect | None:
    text = _value(target, "--to-destination")
    if place.hook not in DNAT_HOOKS or place.table != "nat" or text is None:
        return None
    found = _destination(text, packet.destination.version)
    if found is None or (found[0] and found[0].version != packet.destination.version):
        return None
    address, wanted = found
    if wanted and wanted.first < wanted.last and _randomised(target):
        return None
    return _translated(packet, address or packet.destination, _chosen(wanted, packet.dport))


def _snat(target: Target, packet: Packet, place: Place) -> Effect | None:
    if place.hook not in SNAT_HOOKS or place.table != "nat":
        return None
    found = None
    if target.name == "MASQUERADE":
        source = place.host.masquerade(packet.out_interface, packet.destination)
        if source is None:
            why = "dropped: there is no address to masquerade as"
            return Effect(packet=packet, why=why, ends=Ends.DROPPED)
    else:
        found = _destination(_value(target, "--to-source") or "", packet.destination.version)
        source = found[0] or packet.source if found else None
        if source is not None and source.version != packet.destination.version:
            return None
    connection = replace(packet.connection, snat=source is None or source != packet.source)
    sport = None if _flags(target) - {"--to-source", "--persistent"} else packet.sport
    if found and found[1]:
        sport = found[1].first if found[1].first == found[1].last else None
    translated = replace(packet, source=source, sport=sport, connection=connection)
    why = f"the source is now {source}" if source else "the source is now one of several"
    return Effect(packet=translated, why=why, ends=Ends.ACCEPTED, translated=True)


def _tproxy(target: Target, packet: Packet, place: Place) -> Effect | None:
    port = number(_value(target, "--on-port") or "0")
    change = masked(_value(target, "--tproxy-mark") or "0x0/0x0")
    if place.hook != "PREROUTING" or place.table != "mangle" or port is None or change is None:
        return None
    value, mask = change
    port = port or packet.dport
    return Effect(
        packet=replace(packet, mark=(packet.mark & ~mask) ^ value),
        why=f"handed to the transparent listener on port {port}, taken to be there (else: dropped)",
        ends=Ends.ACCEPTED,
        tproxy_port=port,
    )


def endpoint(address: Address, port: int) -> str:
    """Return `address:port`, with brackets around an IPv6 address."""
    return f"[{address}]:{port}" if address.version == 6 else f"{address}:{port}"


EFFECTS: Mapping[str, Callable[[Target, Packet, Place], Effect | None]] = MappingProxyType(
    {
        "ACCEPT": _accept,
        "DROP": _drop,
        "REJECT": _drop,
        "MARK": _mark,
        "CONNMARK": _connmark,
        "CT": _conntrack,
        "NOTRACK": _conntrack,
        "REDIRECT": _redirect,
        "DNAT": _dnat,
        "SNAT": _snat,
        "MASQUERADE": _snat,
        "TPROXY": _tproxy,
    }
)
