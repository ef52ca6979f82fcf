"""The expressions of one rule in libnftables' JSON, back into conditions and a target.

Every pattern here is exact: an expression with one more key than expected is not understood, and
what is not understood is kept as a match of the module "nft" that holds the JSON.
"""

import ipaddress
import json
import re
from collections.abc import Callable, Mapping, Sequence

from agent.formats.nft_shape import ALL_BITS, CT_STATES, PROTOCOLS
from agent.model.ruleset import BASIC, Family, Match, Option, match
from agent.model.values import network_text, without_length

ALL_STATES = sum(CT_STATES.values())
# Names as iptables-save has them, by number and by every spelling of nft.
PROTOCOL_NAMES: Mapping[object, str] = {
    **{number: name for name, number in PROTOCOLS.items()},
    **{name: name for name in PROTOCOLS},
    "icmpv6": "ipv6-icmp",
}
FAMILY_SPELLINGS = {Family.IPV4: ("ipv4", 2), Family.IPV6: ("ipv6", 10)}


def foreign(option: str, value: object) -> Match:
    """Return the match that stands for something which is not as `nft_text` writes it."""
    return match("nft", option, json.dumps(value, sort_keys=True, separators=(",", ":")))


def conditions(
    family: Family, expressions: Sequence[object]
) -> tuple[tuple[Match, ...], list[object]]:
    """Return the conditions at the start of a rule, and the expressions behind them."""
    found = _Matches()
    for at, expression in enumerate(expressions):
        if not isinstance(expression, dict) or set(expression) != {"match"}:
            return found.all(), list(expressions[at:])
        found.add(_condition(family, expression["match"]), expression)
    return found.all(), []


# --- values --------------------------------------------------------------------------------------


def number_of(value: object, limit: int = ALL_BITS) -> int | None:
    if isinstance(value, str) and re.fullmatch(r"[0-9]{1,10}", value):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if 0 <= value <= limit else None


def span_of(value: object, separator: str, limit: int) -> str | None:
    """Return a number or `{"range": [first, last]}` as iptables-save writes it."""
    if isinstance(value, dict):
        bounds = value.get("range")
        if set(value) != {"range"} or not isinstance(bounds, list) or len(bounds) != 2:
            return None
        first, last = number_of(bounds[0], limit), number_of(bounds[1], limit)
        return None if first is None or last is None else f"{first}{separator}{last}"
    number = number_of(value, limit)
    return None if number is None else str(number)


def _port(value: object) -> str | None:
    return span_of(value, ":", 65535)


def _id(value: object) -> str | None:
    return span_of(value, "-", ALL_BITS)


def _elements(value: object) -> list[object] | None:
    """Return the elements of an anonymous set."""
    if not isinstance(value, dict) or set(value) != {"set"}:
        return None
    return value["set"] if isinstance(value["set"], list) else [value["set"]]


def _port_list(value: object) -> str | None:
    ports = [_port(element) for element in _elements(value) or ()]
    known = [port for port in ports if port]
    return ",".join(known) if known and known == ports else None


def _network(family: Family, value: object) -> str | None:
    length: object = 32 if family is Family.IPV4 else 128
    if isinstance(value, dict):
        inner = value.get("prefix")
        if set(value) != {"prefix"} or not isinstance(inner, dict) or len(inner) != 2:
            return None
        value, length = inner.get("addr"), inner.get("len")
    if not isinstance(value, str) or number_of(length) is None:
        return None
    try:
        network = ipaddress.ip_network(f"{value}/{length}")
    except ValueError:
        return None
    return network_text(network) if network.version == family.version else None


def _interface(value: object) -> str | None:
    """Return the name; a last `*` is iptables' `+`. A name with either in it is none of ours."""
    if not isinstance(value, str) or not re.fullmatch(r"[^*+\\]+\*?", value):
        return None
    return f"{value[:-1]}+" if value.endswith("*") else value


def _cgroup(value: object) -> str | None:
    """Return the path; of a cgroup that is gone nft knows the number only."""
    if not isinstance(value, str):
        return None
    return value if value.isdecimal() else f"/{value}"


def _protocol(value: object) -> str | None:
    number = number_of(value, 255)
    if number is not None:
        return PROTOCOL_NAMES.get(number, str(number))
    return PROTOCOL_NAMES.get(value) if isinstance(value, str) else None


def _states(value: object) -> str | None:
    """Return connection states: one, a list, a set, or a disjunction of names or numbers."""
    bits = 0
    for item in _alternatives(value):
        named = CT_STATES.get(item.upper()) if isinstance(item, str) else None
        bit = named or number_of(item, ALL_STATES)
        if not bit or bit & ~ALL_STATES:
            return None
        bits |= bit
    return ",".join(state for state, bit in CT_STATES.items() if bits & bit) or None


def _alternatives(value: object) -> list[object]:
    if isinstance(value, list):
        return value
    if isinstance(value, dict) and set(value) == {"|"} and isinstance(value["|"], list):
        return [leaf for item in value["|"] for leaf in _alternatives(item)]
    elements = _elements(value)
    return [value] if elements is None else elements


# --- conditions ----------------------------------------------------------------------------------

Atom = tuple[str, Option]
"""A match module and one option of it."""

# A condition that is always true where it stands.
NOTHING: Atom = (BASIC, Option(""))

_SIMPLE: Mapping[str, tuple[str, str, Callable[[object], str | None]]] = {
    "meta iifname": (BASIC, "-i", _interface),
    "meta oifname": (BASIC, "-o", _interface),
    "meta l4proto": (BASIC, "-p", _protocol),
    "tcp sport": ("tcp", "--sport", _port),
    "tcp dport": ("tcp", "--dport", _port),
    "udp sport": ("udp", "--sport", _port),
    "udp dport": ("udp", "--dport", _port),
    "meta skuid": ("owner", "--uid-owner", _id),
    "meta skgid": ("owner", "--gid-owner", _id),
    "socket cgroupv2": ("cgroup", "--path", _cgroup),
    "original proto-dst": ("conntrack", "--ctorigdstport", _port),
}
MARKS = {"meta mark": "mark", "ct mark": "connmark"}


def field_of(value: object) -> str:
    """Return `meta mark`, `ct state`, `ip saddr` and the like; nothing for all else."""
    if not isinstance(value, dict) or len(value) != 1:
        return ""
    match next(iter(value.items())):
        case ("payload", {"protocol": str(protocol), "field": str(name)} as inner):
            return f"{protocol} {name}" if len(inner) == 2 else ""
        case ("meta" | "ct" as kind, {"key": str(name)} as inner) if len(inner) == 1:
            return f"{kind} {name}"
        case ("socket", {"key": "cgroupv2"} as inner) if inner.keys() <= {"key", "level"}:
            return "socket cgroupv2"
        case ("ct", {"key": str(name), "dir": "original" | 0} as inner) if len(inner) == 2:
            return f"original {name}"
    return ""


def _condition(family: Family, body: object) -> Atom | None:
    """Return what one match expression means, None if it is not understood."""
    if not isinstance(body, dict) or set(body) != {"op", "left", "right"}:
        return None
    left, right, operator = body["left"], body["right"], body["op"]
    name = field_of(left)
    if name == "ct state":
        return _state_atom(operator, right)
    if operator not in ("==", "!="):
        return None
    negated = operator == "!="
    if name == "meta nfproto":
        own = not isinstance(right, bool) and right in FAMILY_SPELLINGS[family]
        return NOTHING if own and not negated else None
    if name in MARKS or (isinstance(left, dict) and set(left) == {"&"}):
        return _mark_atom(left, right, negated)
    protocol, _, key = name.removeprefix("original ").partition(" ")
    if protocol == ("ip" if family is Family.IPV4 else "ip6") and key in ("saddr", "daddr"):
        network = _network(family, right)
        if name != f"original {protocol} daddr":
            return _atom(BASIC, f"-{key[0]}", network, negated) if name[0] == "i" else None
        return _atom("conntrack", "--ctorigdst", network and without_length(network), negated)
    if name in _SIMPLE:
        return _simple_atom(name, right, negated)
    return None


def _atom(module: str, option: str, value: str | None, negated: bool) -> Atom | None:
    return None if value is None else (module, Option(option, (value,), negated))


def _simple_atom(name: str, right: object, negated: bool) -> Atom | None:
    module, option, read = _SIMPLE[name]
    if module in ("tcp", "udp") and _elements(right) is not None:
        # The protocol travels with the module until `_Matches` has seen to it.
        return _atom(f"multiport/{module}", f"{option}s", _port_list(right), negated)
    return _atom(module, option, read(right), negated)


def _state_atom(operator: object, right: object) -> Atom | None:
    states = _states(right)
    if operator == "in":
        return _atom("conntrack", "--ctstate", states, False)
    # These compare the whole; one of several states is then what only a set can mean.
    if operator not in ("==", "!=") or (states and "," in states and _elements(right) is None):
        return None
    return _atom("conntrack", "--ctstate", states, operator == "!=")


def _mark_atom(left: object, right: object, negated: bool) -> Atom | None:
    mask: int | None = ALL_BITS
    if isinstance(left, dict) and "&" in left:
        operands = left["&"]
        if not isinstance(operands, list) or len(operands) != 2:
            return None
        left, mask = operands[0], number_of(operands[1])
    module, value = MARKS.get(field_of(left)), number_of(right)
    if module is None or value is None or mask is None:
        return None
    text = f"{value:#x}" if mask == ALL_BITS else f"{value:#x}/{mask:#x}"
    return _atom(module, "--mark", text, negated)


class _Matches:
    """Groups single conditions into matches as iptables-save does."""

    def __init__(self) -> None:
        self._basic: list[Option] = []
        self._matches: list[Match] = []

    def all(self) -> tuple[Match, ...]:
        basic = (Match(BASIC, tuple(self._basic)),) if self._basic else ()
        return (*basic, *self._matches)

    def add(self, atom: Atom | None, expression: object) -> None:
        if atom is None:
            self._matches.append(foreign("--expr", expression))
        elif atom[0] == BASIC:
            if atom != NOTHING:
                self._basic.append(atom[1])
        else:
            module, _, protocol = atom[0].partition("/")
            if module in ("tcp", "udp") or protocol:
                self._imply(protocol or module)
            self._append(module, atom[1])

    def _imply(self, protocol: str) -> None:
        """nft leaves `meta l4proto tcp` out where a port of tcp says it already."""
        if not any(option.name == "-p" for option in self._basic):
            self._basic.append(Option("-p", (protocol,)))

    def _append(self, module: str, option: Option) -> None:
        self._matches[-1:] = _joined(self._matches[-1:], module, option)


# Two options of one module in the order in which iptables-save prints them.
_PAIRS = (("--sport", "--dport"), ("--uid-owner", "--gid-owner"))


def _joined(last: Sequence[Match], module: str, option: Option) -> list[Match]:
    """Return the last match, if there is one, and one more option of `module` as matches."""
    if not last:
        return [Match(module, (option,))]
    before, listed = last[0].options[-1], f"{option.name}s"
    if last[0].module == module and (before.name, option.name) in _PAIRS:
        return [Match(module, (*last[0].options, option))]
    if module in ("tcp", "udp") and option.negated and before.negated:
        # Negated ports of one field in a row are how nft_text writes a negated list.
        ports = Option(listed, (f"{before.values[0]},{option.values[0]}",), True)
        if last[0].module == "multiport" and before.name == listed:
            return [Match("multiport", (ports,))]
        if last[0].module == module and before.name == option.name:
            others = last[0].options[:-1]
            return [*([Match(module, others)] if others else ()), Match("multiport", (ports,))]
    return [*last, Match(module, (option,))]
