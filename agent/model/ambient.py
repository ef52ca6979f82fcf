"""The rules of an ambient capture: those of Istio's node agent in a pod, in its order. Pure."""

from collections.abc import Mapping, Sequence

from agent.model import numbers
from agent.model.owned import AMBIENT_CHAIN
from agent.model.ruleset import (
    Family,
    Match,
    Rule,
    Ruleset,
    Target,
    basic,
    connmark,
    match,
    ruleset_of,
    target,
)
from agent.model.settings import Settings
from agent.model.values import address_text

ARRIVING, LEAVING = AMBIENT_CHAIN, "ISTIO_OUTPUT"

_ACCEPT, _RETURN = Target("ACCEPT"), Target("RETURN")
_TCP = Match("tcp")


def _masked(mark: int) -> str:
    return f"{mark:#x}/{numbers.AMBIENT_MASK:#x}"


_PROXY = match("mark", "--mark", _masked(numbers.AMBIENT_MARK))
_NOT_PROXY = match("mark", "--mark", _masked(numbers.AMBIENT_MARK), negated=True)


def ruleset(settings: Settings, family: Family) -> Ruleset:
    """Return the rules of one family."""
    lo = settings.loopback(family)
    tables: dict[str, Mapping[str, Sequence[Rule]]] = {
        "mangle": {ARRIVING: (_mark_connection(),), LEAVING: (_restore_mark(),)},
        "nat": {
            ARRIVING: (*_rerouted(settings), *_inbound(settings, family, lo)),
            LEAVING: tuple(_outbound(settings, family, lo)),
        },
    }
    if settings.dns_active:
        tables["raw"] = _zones()
    jumps = {
        "PREROUTING": (Rule((), Target(ARRIVING)),),
        "OUTPUT": (Rule((), Target(LEAVING)),),
    }
    return ruleset_of(family, {name: {**jumps, **chains} for name, chains in tables.items()})


def _mark_connection() -> Rule:
    return Rule((_PROXY,), target("CONNMARK", set_xmark=_masked(numbers.AMBIENT_CONNMARK)))


def _restore_mark() -> Rule:
    """The answer to a connection of the proxy bears its mark, so it is routed back to it."""
    connection = match("connmark", "--mark", _masked(numbers.AMBIENT_CONNMARK))
    return Rule((connection,), connmark("--restore-mark"))


def _rerouted(settings: Settings) -> list[Rule]:
    """What a machine behind the pod sends goes out through the proxy."""
    rules = []
    for name in settings.reroute_virtual_interfaces:
        arriving = basic(in_interface=name, protocol="tcp")
        rules.append(Rule((arriving,), _redirect(settings.proxy_port)))
        rules.append(Rule((arriving,), _RETURN))
    return rules


def _inbound(settings: Settings, family: Family, lo: str) -> list[Rule]:
    """All but the node's probes, what comes through the tunnel, and the proxy's own."""
    if not settings.inbound_ports_include:
        return []
    probe = basic(source=_host(settings, family), protocol="tcp")
    others = basic(not_destination=lo, protocol="tcp")
    tunnel = match("tcp", "--dport", str(settings.inbound_tunnel_port), negated=True)
    capture = _redirect(settings.inbound_capture_port)
    return [Rule((probe, _TCP), _ACCEPT), Rule((others, tunnel, _NOT_PROXY), capture)]


def _outbound(settings: Settings, family: Family, lo: str) -> list[Rule]:
    probe = basic(destination=_host(settings, family), protocol="tcp")
    rules = [Rule((match("cgroup", "--path", path),), _RETURN) for path in settings.passing]
    rules.append(Rule((probe, _TCP), _ACCEPT))
    others = basic(not_destination=lo, protocol="tcp")
    if settings.dns_active:
        query = basic(not_out_interface="lo", protocol="udp")
        to_proxy = _redirect(numbers.DNS_PROXY_PORT)
        udp, tcp = (match(p, "--dport", str(numbers.DNS_PORT)) for p in ("udp", "tcp"))
        rules += [
            Rule((query, _NOT_PROXY, udp), to_proxy),
            Rule((others, tcp, _NOT_PROXY), to_proxy),
        ]
    answer = match("mark", "--mark", _masked(numbers.AMBIENT_CONNMARK))
    to_itself = basic(not_destination=lo, out_interface="lo")
    rules += [
        Rule((basic(protocol="tcp"), answer), _ACCEPT),
        Rule((to_itself,), _ACCEPT),
        Rule((others, _NOT_PROXY), _redirect(settings.proxy_port)),
    ]
    return rules


def _zones() -> dict[str, Sequence[Rule]]:
    """Keep the proxy's queries and their answers apart from the client's (see `plan`)."""
    udp = basic(protocol="udp")
    zone = target("CT", zone=str(numbers.ZONE_PROXY_TO_UPSTREAM))
    query, answer = (match("udp", f"--{end}port", str(numbers.DNS_PORT)) for end in "ds")
    return {
        LEAVING: (Rule((udp, _PROXY, query), zone),),
        ARRIVING: (Rule((udp, _NOT_PROXY, answer), zone),),
    }


def _redirect(port: int) -> Target:
    return target("REDIRECT", to_ports=str(port))


def _host(settings: Settings, family: Family) -> str:
    length = 32 if family is Family.IPV4 else 128
    return f"{address_text(settings.probe_source(family))}/{length}"
