"""The statements of one rule in libnftables' JSON, back into a target; see `nft_rule_json`."""

import ipaddress
from collections.abc import Mapping, Sequence

from agent.formats.nft_rule_json import MARKS, field_of, number_of, span_of
from agent.formats.nft_shape import ALL_BITS, model_place
from agent.model.ruleset import Family, Option, Target, target
from agent.model.values import address_text


def target_of(family: Family, table: str, expressions: Sequence[object]) -> Target | None:
    """Return the target that the expressions behind the conditions make, None if none of ours."""
    parts = [next(iter(e.items())) for e in expressions if isinstance(e, dict) and len(e) == 1]
    if len(parts) != len(expressions):
        return None
    match parts:
        case [("tproxy", dict() as proxy), ("mangle", mangle), ("accept", None)]:
            return _tproxy(family, proxy, mangle)
        case [("mangle", mangle)]:
            return _mangle(mangle)
        case [("redirect", {"port": port} as options)] if len(options) == 1:
            ports = span_of(port, "-", 65535)
            return target("REDIRECT", to_ports=ports) if ports else None
        case [("accept" | "drop" | "return" | "redirect" as verdict, None)]:
            return Target(verdict.upper())
        case [("notrack", None)]:
            return Target("CT", (Option("--notrack"),))
        case [("jump" | "goto" as verb, {"target": str(name)} as options)] if len(options) == 1:
            return _jump(family, table, name, goto=verb == "goto")
    return None


def _jump(family: Family, table: str, name: str, *, goto: bool) -> Target | None:
    """A jump into another family's or table's chain is none of ours."""
    place = model_place(name)
    if place is None or place[:2] != (family, table):
        return None
    return Target("/".join(part for part in place[2:] if part), goto=goto)


def _linear(value: object) -> tuple[str, int, int] | None:
    """Return (source, keep, flip) for an expression that means `(source & keep) ^ flip`.

    nft prints what it was given in other operations than it was given them, so only the function
    counts. A constant has no source and keeps nothing.
    """
    constant = number_of(value)
    if constant is not None:
        return "", 0, constant
    if name := field_of(value):
        return name, ALL_BITS, 0
    if not isinstance(value, dict) or len(value) != 1:
        return None
    ((operator, operands),) = value.items()
    if not isinstance(operands, list) or not operands:
        return None
    function = _linear(operands[0])
    for operand in operands[1:]:
        number = number_of(operand)
        if function is None or number is None:
            return None
        function = _apply(function, operator, number)
    return function


def _apply(
    function: tuple[str, int, int], operator: object, number: int
) -> tuple[str, int, int] | None:
    source, keep, flip = function
    if operator == "&":
        return source, keep & number, flip & number
    if operator == "|":
        return source, keep & ~number, flip | number
    return (source, keep, flip ^ number) if operator == "^" else None


def _set_bits(name: str, function: tuple[str, int, int], own: str) -> Target | None:
    source, keep, flip = function
    if source not in ("", own):
        return None
    return target(name, set_xmark=f"{flip:#x}/{ALL_BITS & ~keep:#x}")


def _mangle(body: object) -> Target | None:
    if not isinstance(body, dict) or set(body) != {"key", "value"}:
        return None
    key, function = field_of(body["key"]), _linear(body["value"])
    if function is None:
        return None
    source, keep, flip = function
    if key == "ct zone" and not source and flip <= 65535:
        return target("CT", zone=str(flip))
    if key == "meta mark" and source == "ct mark" and not flip:
        return _connmark("--restore-mark", ALL_BITS, keep)
    if key == "ct mark" and source == "meta mark" and not flip:
        return _connmark("--save-mark", keep, ALL_BITS)
    if key in MARKS:
        return _set_bits("MARK" if key == "meta mark" else "CONNMARK", function, key)
    return None


def _connmark(action: str, packet: int, connection: int) -> Target:
    masks = (Option("--nfmask", (f"{packet:#x}",)), Option("--ctmask", (f"{connection:#x}",)))
    return Target("CONNMARK", (Option(action), *masks))


def _tproxy(family: Family, proxy: Mapping[str, object], mangle: object) -> Target | None:
    """TPROXY is three statements; without an address the kernel takes the interface's."""
    marking = _mangle(mangle)
    own, unset = ("ip", "0.0.0.0") if family is Family.IPV4 else ("ip6", "::")
    port, address = number_of(proxy.get("port"), 65535), proxy.get("addr", unset)
    if set(proxy) - {"family", "port", "addr"} or proxy.get("family") != own or port is None:
        return None
    if marking is None or marking.name != "MARK" or not isinstance(address, str):
        return None
    try:
        shown = address_text(ipaddress.ip_address(address))
    except ValueError:
        return None
    mark = marking.options[0].values[0]
    return target("TPROXY", on_port=str(port), on_ip=shown, tproxy_mark=mark)
