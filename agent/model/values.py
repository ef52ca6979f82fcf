"""The values that settings are made of, and the parser of each.

A parser takes what a user wrote and returns a typed value or raises `BadValue` with a sentence that
says what is allowed. No raw text ever reaches the kernel: iptables stores UDP port 70000 as 4464
and takes `8000:9000` reversed without a word.
"""

import ipaddress
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from agent.model import numbers
from agent.model.ruleset import Family

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Address = ipaddress.IPv4Address | ipaddress.IPv6Address

MAX_PORT = 65535
MAX_ID = 2**32 - 2  # 2^32-1 means "no id" to the kernel, and iptables refuses it
MAX_OWNER_GROUPS = 64
GUARDS = ("off", "standing")
GATES = ("closed", "open", "listener")
MODES = SIDECAR, AMBIENT = ("sidecar", "ambient")
MAX_INTERFACE_NAME = 15
MAX_CGROUP = 500  # a rule holds a path of 511 bytes

INTERFACE_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*")
# Python takes netmasks, wildcards and zones besides, of which nobody here means anything.
NETWORK = re.compile(r"[0-9A-Fa-f:.]+(/(0|[1-9][0-9]*))?")
_CGROUP = re.compile(r"(?!\.\.?$)[A-Za-z0-9_.:@-]+")


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


EVERYTHING = Selection(everything=True)
NOTHING = Selection()
NO_NETWORKS = Networks()


def one(number: int) -> tuple[Span, ...]:
    return (Span(number, number),)


def network_text(network: Network) -> str:
    """Return `address/prefix` as inet_ntop spells it, which is how iptables-save prints it."""
    return f"{address_text(network.network_address)}/{network.prefixlen}"


def without_length(network: str) -> str:
    """Return the network as iptables-save prints it of a connection: an address stands alone."""
    return network.removesuffix("/128" if ":" in network else "/32")


def address_text(address: Address) -> str:
    """Return the address as inet_ntop spells it: `::127.0.0.53`, not `::7f00:35`."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    return socket.inet_ntop(family, address.packed)


class BadValue(Exception):
    """One mistake in one value; the message says what is allowed."""


SHOWN = 60


def shown(value: object, longest: int = SHOWN) -> str:
    """Return a value as a sentence can quote it: on one line, and not too long."""
    if isinstance(value, int) and abs(value) >= 10**SHOWN:
        return f"a number of more than {SHOWN} digits"  # Python refuses to print very long ones
    text = repr(value)
    return text if len(text) <= longest else f"{text[:longest]}... ({len(text)} characters)"


def split(value: object) -> list[str]:
    """Split a comma list, or take a real one; empty items are dropped, as Istio does.

    Raises: BadValue for anything else than text, whole numbers and lists of them.
    """
    if isinstance(value, str):
        return [item for item in value.split(",") if item]
    if isinstance(value, (list, tuple)):
        return [text for item in value if (text := _text(item))]
    return [_text(value)]


def _text(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise BadValue(f"{shown(value)} is neither text nor a whole number")
    if isinstance(value, int) and abs(value) >= 10**SHOWN:
        raise BadValue(f"{shown(value)} is out of any range")
    return str(value)


def _number(value: object, low: int, high: int, what: str) -> int:
    digits = _text(value)
    # str.isdigit accepts other scripts and superscripts; int() accepts blanks and underscores.
    if not re.fullmatch(r"[0-9]+", digits):
        raise BadValue(
            f"{shown(digits)} is not {what}: write a decimal number from {low} to {high}"
        )
    if len(digits) > 1 and digits[0] == "0":
        raise BadValue(f"{shown(digits)} has a leading zero; {what} is from {low} to {high}")
    if len(digits) > len(str(high)) or not low <= int(digits) <= high:
        raise BadValue(f"{shown(digits)} is out of range: {what} is from {low} to {high}")
    return int(digits)


def within(text: str, low: int, high: int) -> int | None:
    """Return a decimal number, None for what is none or out of range (Python refuses long ones)."""
    digits = text.lstrip("0") or "0"
    if not re.fullmatch(r"[0-9]+", text) or len(digits) > len(str(high)):
        return None
    return int(digits) if low <= int(digits) <= high else None


def port(value: object) -> int:
    return _number(value, 1, MAX_PORT, "a port")


def _span(item: str, separators: str, low: int, high: int, what: str) -> Span:
    if not re.search(f"[{re.escape(separators)}]", item):
        number = _number(item, low, high, what)
        return Span(number, number)
    found = re.fullmatch(f"([0-9]+)[{re.escape(separators)}]([0-9]+)", item)
    if found is None:
        raise BadValue(f"{shown(item)} is no range: write FIRST-LAST, from {low} to {high}")
    # Zero is a legal lower bound of a range: 0-65535 is how people write "all of them".
    first, last = (
        _number(part, 0, high, f"{what} (here in {shown(item)})") for part in found.groups()
    )
    if first > last:
        raise BadValue(f"{shown(item)} is reversed; write {last}-{first}")
    return Span(first, last)


def each(items: list[str], parse_item: Callable[[str], Span]) -> tuple[Span, ...]:
    """Parse every item and report all the bad ones together."""
    good, bad = [], []
    for item in items:
        try:
            good.append(parse_item(item))
        except BadValue as mistake:
            bad.append(str(mistake))
    if bad:
        raise BadValue("; ".join(bad))
    return tuple(good)


def _port_item(item: str) -> Span:
    if item == "*":
        raise BadValue("'*' cannot be mixed with ports or stand in this list")
    return _span(item, "-:", 1, MAX_PORT, "a port")


def ports(value: object) -> tuple[Span, ...]:
    return each(split(value), _port_item)


def port_selection(value: object) -> Selection:
    items = split(value)
    if items == ["*"]:
        return Selection(everything=True)
    return Selection(items=each(items, _port_item))


def id_item(kind: str, lookup: Callable[[str], int | None]) -> Callable[[str], Span]:
    def parse_item(item: str) -> Span:
        if item == "*":
            raise BadValue("'*' cannot be mixed with ids or stand in this list")
        if re.fullmatch(r"[0-9-]+", item) and item[0] != "-":
            return _span(item, "-", 0, MAX_ID, f"a {kind} id")
        number = lookup(item) if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.-]*\$?", item) else None
        if number is None:
            raise BadValue(
                f"{shown(item)} is neither a {kind} id from 0 to {MAX_ID} nor a {kind} known here"
            )
        return Span(number, number)

    return parse_item


def _network(text: str) -> Network:
    """Return the network; bits behind the prefix count for nothing, as to the kernel."""
    if text == "*":
        raise BadValue("'*' cannot be mixed with networks or stand in this list")
    if text != text.strip():
        raise BadValue(f"{shown(text)} has blanks around it; write {shown(text.strip())}")
    try:
        if NETWORK.fullmatch(text):
            return ipaddress.ip_network(text, strict=False)
    except ValueError:
        pass
    raise BadValue(
        f"{shown(text)} is not a network; write ADDRESS/PREFIX, such as 10.0.0.0/8 or fd00::/8"
    )


def _network_list(items: list[str]) -> tuple[Network, ...]:
    good: list[Network] = []
    bad = []
    for item in items:
        try:
            good.append(_network(item))
        except BadValue as mistake:
            bad.append(str(mistake))
    if bad:
        raise BadValue("; ".join(bad))
    return tuple(good)


def networks(value: object) -> tuple[Network, ...]:
    return _network_list(split(value))


def network_selection(value: object) -> Networks:
    items = split(value)
    if items == ["*"]:
        return Networks(everything=True)
    return Networks(items=_network_list(items))


def loopback_network(value: object) -> Network:
    text = _text(value)
    allowed = "write an IPv4 loopback network with a prefix from 8 to 32, such as 127.0.0.1/32"
    try:
        found = ipaddress.IPv4Interface(text)
    except ValueError:
        raise BadValue(f"{shown(text)} is not an IPv4 network; {allowed}") from None
    if not found.ip.is_loopback or not 8 <= found.network.prefixlen <= 32 or "/" not in text:
        raise BadValue(f"{shown(text)} is not inside 127.0.0.0/8; {allowed}")
    return found.network


def addresses(version: int) -> Callable[[object], tuple[Address, ...]]:
    def parse_value(value: object) -> tuple[Address, ...]:
        good: list[Address] = []
        bad = []
        for item in split(value):
            try:
                address = ipaddress.ip_address(item)
            except ValueError:
                bad.append(f"{shown(item)} is not an IPv{version} address")
                continue
            if address.version != version:
                bad.append(
                    f"{shown(item)} is an IPv{address.version} address in the IPv{version} list"
                )
            elif address.version == 6 and "%" in item:
                bad.append(f"{shown(item)} names an interface; give the address alone")
            else:
                good.append(address)
        if bad:
            raise BadValue("; ".join(bad))
        return tuple(good)

    return parse_value


def interfaces(value: object) -> tuple[str, ...]:
    bad = [
        f"{shown(item)} is not an interface name: 1 to {MAX_INTERFACE_NAME} characters, a letter "
        "first, then letters, digits, '_', '.' or '-'"
        for item in split(value)
        if len(item) > MAX_INTERFACE_NAME or not INTERFACE_NAME.fullmatch(item)
    ]
    if bad:
        raise BadValue("; ".join(bad))
    return tuple(split(value))


TRUE_WORDS = frozenset({"1", "t", "T", "TRUE", "true", "True"})
FALSE_WORDS = frozenset({"0", "f", "F", "FALSE", "false", "False"})


def boolean(value: object) -> bool:
    if isinstance(value, bool):
        return value
    text = _text(value)
    if text in TRUE_WORDS:
        return True
    if text in FALSE_WORDS:
        return False
    raise BadValue(f"{shown(value)} is neither true nor false")


def interception_mode(value: object) -> str:
    if value in ("", "REDIRECT"):
        return "REDIRECT"
    if value == "TPROXY":
        return "TPROXY"
    if value == "NONE":
        raise BadValue(
            "'NONE' means no capture at all: use the command remove (REDIRECT or TPROXY here)"
        )
    raise BadValue(f"{shown(value)} is not a mode; write REDIRECT or TPROXY in capitals")


def guard(value: object) -> str:
    if value is False or value == "":  # YAML reads a bare `off` as false
        return "off"
    if value in GUARDS:
        return str(value)
    raise BadValue(f"{shown(value)} is no guard; write {' or '.join(GUARDS)}")


def gate(value: object) -> str:
    if value in GATES:
        return str(value)
    raise BadValue(f"{shown(value)} is no gate; write {', '.join(GATES)}")


def cgroups(value: object) -> tuple[str, ...]:
    """Return paths in the hierarchy of cgroup2, each from its root on: `/kubepods/pod1/abc`."""
    return tuple(dict.fromkeys(map(_cgroup, split(value))))


def _cgroup(text: str) -> str:
    parts = text.removeprefix("/").split("/")
    if len(text) > MAX_CGROUP or not all(_CGROUP.fullmatch(part) for part in parts):
        raise BadValue(f"{shown(text)} is no path of a cgroup, such as /kubepods/pod1/abc")
    return "/" + "/".join(parts)


def below(path: str, top: str) -> bool:
    """Whether a cgroup is another one or below it."""
    return f"{path.strip('/')}/".startswith(f"{top.strip('/')}/".lstrip("/"))


def packet_mark(value: object) -> int:
    mark = _number(value, 1, 2**32 - 1, "a packet mark")
    if mark == numbers.TPROXY_SELF_MARK:
        raise BadValue(f"{mark} is the mark of the proxy's calls to its own pod; take another")
    return mark


def route_table(value: object) -> int:
    table = _number(value, 0, 2**32 - 1, "a route table")
    if table in numbers.RESERVED_ROUTE_TABLES:
        raise BadValue(f"{table} is one of the system's own tables; take another, such as 133")
    return table
