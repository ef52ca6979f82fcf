"""What one pod's capture should be, as typed values, and the parser that makes them.

Every key is a key of the capture-rule reference. `parse` reports all mistakes at once, each naming
the setting, the value and what is allowed, so that no raw text ever reaches the kernel: iptables
stores UDP port 70000 as 4464 and takes `8000:9000` reversed without a word.
"""

import ipaddress
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Protocol

from agent.model import numbers
from agent.model.errors import InvalidSettings
from agent.model.ruleset import Family

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Address = ipaddress.IPv4Address | ipaddress.IPv6Address

MAX_PORT = 65535
MAX_ID = 2**32 - 2  # 2^32-1 means "no id" to the kernel, and iptables refuses it
MAX_OWNER_GROUPS = 64
MAX_INTERFACE_NAME = 15

INTERFACE_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*")


class Names(Protocol):
    """Looks up user and group names; kept out of the parser so that parsing stays pure."""

    def uid(self, name: str) -> int | None: ...
    def gid(self, name: str) -> int | None: ...


class NoNames:
    """Knows no names: only numbers are accepted."""

    def uid(self, name: str) -> int | None:
        return None

    def gid(self, name: str) -> int | None:
        return None


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """An inclusive range of ports or ids; one number is a range of one."""

    first: int
    last: int

    def text(self, separator: str) -> str:
        if self.first == self.last:
            return str(self.first)
        return f"{self.first}{separator}{self.last}"

    def __contains__(self, number: object) -> bool:
        return isinstance(number, int) and self.first <= number <= self.last


@dataclass(frozen=True, slots=True)
class Selection:
    """Either everything (`*`) or the listed items, which may be none at all."""

    everything: bool = False
    items: tuple[Span, ...] = ()

    def __bool__(self) -> bool:
        return self.everything or bool(self.items)


@dataclass(frozen=True, slots=True)
class Networks:
    """Either every address of both families (`*`) or the listed networks."""

    everything: bool = False
    items: tuple[Network, ...] = ()

    def __bool__(self) -> bool:
        return self.everything or bool(self.items)

    def of(self, family: Family) -> tuple[Network, ...]:
        return tuple(n for n in self.items if n.version == family.version)


def one(number: int) -> tuple[Span, ...]:
    return (Span(number, number),)


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
    inbound_ports_include: Selection = Selection()
    inbound_ports_exclude: tuple[Span, ...] = ()
    outbound_ip_ranges_include: Networks = Networks()
    outbound_ip_ranges_exclude: tuple[Network, ...] = ()
    outbound_ports_include: tuple[Span, ...] = ()
    outbound_ports_exclude: tuple[Span, ...] = ()
    owner_groups_include: Selection = Selection(everything=True)
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

    @property
    def tproxy(self) -> bool:
        return self.inbound_interception_mode == "TPROXY"

    @property
    def families(self) -> tuple[Family, ...]:
        return (Family.IPV4, Family.IPV6) if self.enable_ipv6 else (Family.IPV4,)

    @property
    def dns_active(self) -> bool:
        """DNS is captured only if it is known whose: without any server there is nothing to match."""
        known = self.capture_all_dns or self.dns_servers_v4 or self.dns_servers_v6
        return self.redirect_dns and bool(known)

    def dns_servers(self, family: Family) -> tuple[Address, ...]:
        return self.dns_servers_v4 if family is Family.IPV4 else self.dns_servers_v6

    def captures_dns(self, family: Family) -> bool:
        return self.dns_active and (self.capture_all_dns or bool(self.dns_servers(family)))

    def loopback(self, family: Family) -> str:
        if family is Family.IPV6:
            return numbers.LOOPBACK_V6
        return network_text(self.host_ipv4_loopback_cidr)

    def warnings(self) -> tuple[str, ...]:
        """Sentences about settings that are valid and probably not meant."""
        found = []
        outbound = self.outbound_ip_ranges_include or self.outbound_ports_include
        if not (self.inbound_ports_include or outbound or self.dns_active):
            found.append(
                "nothing is captured: no inbound ports (--istio-inbound-ports), no outbound ranges "
                "(--istio-service-cidr) and no outbound ports (--istio-outbound-ports) are included"
            )
        if self.inbound_ports_exclude and not self.inbound_ports_include.everything:
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


def network_text(network: Network) -> str:
    """Return `address/prefix` as inet_ntop spells it, which is how iptables-save prints it."""
    return f"{address_text(network.network_address)}/{network.prefixlen}"


def address_text(address: Address) -> str:
    """Return the address as inet_ntop spells it: `::127.0.0.53`, where ipaddress has `::7f00:35`."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    return socket.inet_ntop(family, address.packed)


# --- parsing -------------------------------------------------------------------------------------


class _Bad(Exception):
    """One mistake in one value; the message says what is allowed."""


def split(value: object) -> list[str]:
    """Split a comma list (or a real list) into its items; empty items are dropped, as Istio does."""
    if isinstance(value, str):
        return [item for item in value.split(",") if item]
    if isinstance(value, Sequence):
        return [str(item) for item in value if str(item)]
    return [str(value)]


def _number(text: object, low: int, high: int, what: str) -> int:
    if isinstance(text, bool) or not isinstance(text, (int, str)):
        raise _Bad(f"{text!r} is not {what} from {low} to {high}")
    digits = str(text)
    # str.isdigit accepts other scripts and superscripts; int() accepts blanks and underscores.
    if not re.fullmatch(r"[0-9]+", digits):
        raise _Bad(f"{digits!r} is not {what}: write a decimal number from {low} to {high}")
    if len(digits) > 1 and digits[0] == "0":
        raise _Bad(f"{digits!r} has a leading zero; write {int(digits)}")
    if len(digits) > 10 or not low <= int(digits) <= high:
        raise _Bad(f"{digits} is out of range: {what} is from {low} to {high}")
    return int(digits)


def _port(value: object) -> int:
    return _number(value, 1, MAX_PORT, "a port")


def _span(item: str, separators: str, low: int, high: int, what: str) -> Span:
    parts = re.split(f"[{re.escape(separators)}]", item)
    if len(parts) == 1:
        number = _number(item, low, high, what)
        return Span(number, number)
    if len(parts) != 2:
        raise _Bad(f"{item!r} is not {what} range: write it as FIRST-LAST")
    # Zero is a legal lower bound of a range: 0-65535 is how people write "all of them".
    first, last = (_number(part, 0, high, what) for part in parts)
    if first > last:
        raise _Bad(f"{item!r} is reversed; write {last}-{first}")
    return Span(first, last)


def _each(items: list[str], parse_item: Callable[[str], Span]) -> tuple[Span, ...]:
    """Parse every item and report all the bad ones together."""
    good, bad = [], []
    for item in items:
        try:
            good.append(parse_item(item))
        except _Bad as mistake:
            bad.append(str(mistake))
    if bad:
        raise _Bad("; ".join(bad))
    return tuple(good)


def _port_item(item: str) -> Span:
    if item == "*":
        raise _Bad("'*' cannot be mixed with ports or stand in this list")
    return _span(item, "-:", 1, MAX_PORT, "a port")


def _ports(value: object) -> tuple[Span, ...]:
    return _each(split(value), _port_item)


def _port_selection(value: object) -> Selection:
    items = split(value)
    if items == ["*"]:
        return Selection(everything=True)
    return Selection(items=_each(items, _port_item))


def _id_item(kind: str, lookup: Callable[[str], int | None]) -> Callable[[str], Span]:
    def parse_item(item: str) -> Span:
        if item == "*":
            raise _Bad("'*' cannot be mixed with ids or stand in this list")
        if re.fullmatch(r"[0-9-]+", item) and item[0] != "-":
            return _span(item, "-", 0, MAX_ID, f"a {kind} id")
        number = lookup(item) if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.-]*\$?", item) else None
        if number is None:
            raise _Bad(
                f"{item!r} is neither a {kind} id from 0 to {MAX_ID} nor a {kind} known on this system"
            )
        return Span(number, number)

    return parse_item


def _network(text: str) -> Network:
    if text == "*":
        raise _Bad("'*' cannot be mixed with networks or stand in this list")
    if text != text.strip():
        raise _Bad(f"{text!r} has blanks around it; write {text.strip()!r}")
    try:
        return ipaddress.ip_network(text, strict=True)
    except ValueError:
        pass
    try:
        meant = ipaddress.ip_interface(text)
    except ValueError:
        raise _Bad(
            f"{text!r} is not a network; write ADDRESS/PREFIX, such as 10.0.0.0/8 or fd00::/8"
        ) from None
    raise _Bad(
        f"{text!r} has bits set behind its prefix; write {network_text(meant.network)} for the "
        f"network or {address_text(meant.ip)} for the one address"
    )


def _network_list(items: list[str]) -> tuple[Network, ...]:
    good: list[Network] = []
    bad = []
    for item in items:
        try:
            good.append(_network(item))
        except _Bad as mistake:
            bad.append(str(mistake))
    if bad:
        raise _Bad("; ".join(bad))
    return tuple(good)


def _networks(value: object) -> tuple[Network, ...]:
    return _network_list(split(value))


def _network_selection(value: object) -> Networks:
    items = split(value)
    if items == ["*"]:
        return Networks(everything=True)
    return Networks(items=_network_list(items))


def _loopback(value: object) -> Network:
    text = str(value)
    allowed = "write an IPv4 loopback network with a prefix from 8 to 32, such as 127.0.0.1/32"
    try:
        found = ipaddress.IPv4Interface(text)
    except ValueError:
        raise _Bad(f"{text!r} is not an IPv4 network; {allowed}") from None
    if not found.ip.is_loopback or not 8 <= found.network.prefixlen <= 32 or "/" not in text:
        raise _Bad(f"{text!r} is not inside 127.0.0.0/8; {allowed}")
    return found.network


def _addresses(version: int) -> Callable[[object], tuple[Address, ...]]:
    def parse_value(value: object) -> tuple[Address, ...]:
        good: list[Address] = []
        bad = []
        for item in split(value):
            try:
                address = ipaddress.ip_address(item)
            except ValueError:
                bad.append(f"{item!r} is not an IPv{version} address")
                continue
            if address.version != version:
                bad.append(f"{item!r} is an IPv{address.version} address in the IPv{version} list")
            elif address.version == 6 and "%" in item:
                bad.append(f"{item!r} names an interface; give the address alone")
            else:
                good.append(address)
        if bad:
            raise _Bad("; ".join(bad))
        return tuple(good)

    return parse_value


def _interfaces(value: object) -> tuple[str, ...]:
    bad = [
        f"{item!r} is not an interface name: 1 to {MAX_INTERFACE_NAME} characters, a letter first, "
        "then letters, digits, '_', '.' or '-'"
        for item in split(value)
        if len(item) > MAX_INTERFACE_NAME or not INTERFACE_NAME.fullmatch(item)
    ]
    if bad:
        raise _Bad("; ".join(bad))
    return tuple(split(value))


TRUE_WORDS = frozenset({"1", "t", "T", "TRUE", "true", "True"})
FALSE_WORDS = frozenset({"0", "f", "F", "FALSE", "false", "False"})


def _boolean(value: object) -> bool:
    if isinstance(value, bool):
        return value
    if str(value) in TRUE_WORDS:
        return True
    if str(value) in FALSE_WORDS:
        return False
    raise _Bad(f"{str(value)!r} is neither true nor false")


def _mode(value: object) -> str:
    if value in ("", "REDIRECT"):
        return "REDIRECT"
    if value == "TPROXY":
        return "TPROXY"
    if value == "NONE":
        raise _Bad("'NONE' means no capture at all: use the command remove (REDIRECT or TPROXY here)")
    raise _Bad(f"{value!r} is not a mode; write REDIRECT or TPROXY in capitals")


def _mark(value: object) -> int:
    mark = _number(value, 1, 2**32 - 1, "a packet mark")
    if mark == numbers.TPROXY_SELF_MARK:
        raise _Bad(f"{mark} is the mark of the proxy's calls to its own pod; take another")
    return mark


def _route_table(value: object) -> int:
    table = _number(value, 0, 2**32 - 1, "a route table")
    if table in numbers.RESERVED_ROUTE_TABLES:
        raise _Bad(f"{table} is one of the system's own tables; take another, such as 133")
    return table


def _parsers(names: Names) -> dict[str, Callable[[object], object]]:
    user = _id_item("user", names.uid)
    group = _id_item("group", names.gid)

    def users(value: object) -> tuple[Span, ...]:
        return _each(split(value), user) or one(numbers.PROXY_ID)

    def groups(value: object) -> tuple[Span, ...]:
        return _each(split(value), group)

    def proxy_groups(value: object) -> tuple[Span, ...]:
        return groups(value) or one(numbers.PROXY_ID)

    def group_selection(value: object) -> Selection:
        items = split(value)
        if items == ["*"]:
            return Selection(everything=True)
        if len(items) > MAX_OWNER_GROUPS:
            raise _Bad(f"{len(items)} groups are listed; at most {MAX_OWNER_GROUPS} are allowed")
        return Selection(items=_each(items, group))

    return {
        "proxy_port": _port,
        "inbound_capture_port": _port,
        "inbound_tunnel_port": _port,
        "proxy_uid": users,
        "proxy_gid": proxy_groups,
        "inbound_interception_mode": _mode,
        "inbound_tproxy_mark": _mark,
        "inbound_tproxy_route_table": _route_table,
        "inbound_ports_include": _port_selection,
        "inbound_ports_exclude": _ports,
        "outbound_ip_ranges_include": _network_selection,
        "outbound_ip_ranges_exclude": _networks,
        "outbound_ports_include": _ports,
        "outbound_ports_exclude": _ports,
        "owner_groups_include": group_selection,
        "owner_groups_exclude": groups,
        "exclude_interfaces": _interfaces,
        "reroute_virtual_interfaces": _interfaces,
        "redirect_dns": _boolean,
        "capture_all_dns": _boolean,
        "dns_servers_v4": _addresses(4),
        "dns_servers_v6": _addresses(6),
        "drop_invalid": _boolean,
        "dual_stack": _boolean,
        "enable_ipv6": _boolean,
        "host_ipv4_loopback_cidr": _loopback,
    }


KEYS = tuple(field.name for field in fields(Settings))


def parse(raw: Mapping[str, object], names: Names | None = None) -> Settings:
    """Return the settings that `raw` describes; keys that are absent keep their defaults.

    Lists are comma-separated text or real lists; an empty list is different from an absent key.

    Raises: InvalidSettings with every mistake in it. Nothing else is raised for any input.
    """
    parsers = _parsers(names or NoNames())
    values: dict[str, object] = {}
    problems = []
    for key, value in raw.items():
        if key not in parsers:
            problems.append(f"{key}: no such setting; known are {', '.join(KEYS)}")
            continue
        try:
            values[key] = parsers[key]("" if value is None else value)
        except _Bad as mistake:
            problems.append(f"{key}: {mistake}")
    if problems:
        raise InvalidSettings(tuple(problems))
    settings = Settings(**values)  # type: ignore[arg-type]  # each parser returns its field's type
    if problems := _contradictions(settings):
        raise InvalidSettings(problems)
    return settings


def _contradictions(settings: Settings) -> tuple[str, ...]:
    """Return what is wrong between values that are each right by themselves."""
    found = []
    lost = settings.outbound_ip_ranges_include.of(Family.IPV6)
    if lost and not settings.enable_ipv6:
        found.append(
            f"outbound_ip_ranges_include: {network_text(lost[0])} is IPv6, which is off here, so it "
            "would not be captured; turn IPv6 on (--enable-ipv6 true) or take it out"
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
