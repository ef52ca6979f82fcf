"""What a pod's manifest says that is valid and probably not meant, as sentences for its event."""

import difflib
import ipaddress
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

from agent.model import annotations as names
from agent.model import values
from agent.model.istio_names import BY_PREFIX
from agent.model.note import Note
from agent.model.numbers import PROXY_ID
from agent.model.pod import MESH_CONTAINERS, PROXY, Container, Pod, parsable
from agent.model.settings import Settings, counts_as, parse
from agent.model.values import (
    FALSE_WORDS,
    TRUE_WORDS,
    Network,
    Span,
    address_text,
    network_text,
    shown,
)

# A pod may have thousands of annotations, of any length, and comparing words is slow.
MAX_OF_A_KIND = 20
MAX_NAMES = 100
MAX_COMPARED = 100
MAX_NETWORKS = 100
CLOSE = 0.8

POWERS = frozenset({"ALL", "NET_ADMIN", "SYS_ADMIN"})
AMBIENT = ("ambient.istio.io/bypass-inbound-capture", "ambient.istio.io/dns-capture")

# Of prefixes other than Istio's, only these last words give a slip away: few others have them.
_COMMON = frozenset({"inject", "port", "status"})
_BY_LAST_WORD = {name.rpartition("/")[2].casefold(): name for name in sorted(names.CAPTURE_NAMES)}
# Prefixes of which every name is known; others may have names that are newer than this list.
_WHOLE_PREFIXES = frozenset(
    {
        *("inject.istio.io", "proxy.istio.io", "readiness.status.sidecar.istio.io"),
        *("sidecar.istio.io", "status.sidecar.istio.io", "traffic.sidecar.istio.io"),
    }
)


def remarks(pod: Pod, raw: Mapping[str, object] | None) -> tuple[str, ...]:
    """Return what is odd about a pod; `raw` are its settings if it is captured, and they parse."""
    return tuple(note.text for note in notes(pod, raw))


def notes(pod: Pod, raw: Mapping[str, object] | None) -> tuple[Note, ...]:
    """Return the same with the place of each in the pod's manifest."""
    found = [_unknown_names(pod), _misplaced(pod), _words(pod)]
    if raw is not None:
        settings = parse(parsable(raw))
        found += (_proxy(pod, settings), _collisions(pod, settings), _deprecated(pod))
        found += (_inbound(pod, settings), _outbound(pod, settings))
        found += (_networks(pod, settings), _masked(pod))
    return tuple(note for kind in found for note in islice(kind, MAX_OF_A_KIND))


def risks(pod: Pod, raw: Mapping[str, object]) -> tuple[str, ...]:
    """Return how traffic of a captured pod may get past its proxy, as its manifest shows."""
    settings = parse(parsable(raw))
    # The node's own proxy is known by a mark, and not by who it is.
    collisions = () if settings.mode == values.AMBIENT else _collisions(pod, settings)
    found = (*collisions, *_powers(pod))
    return tuple(note.text for note in islice(found, MAX_OF_A_KIND))


# --- names ----------------------------------------------------------------------------------------


def _unknown_names(pod: Pod) -> Iterator[Note]:
    """Misspelt annotations do nothing, and nobody else says so (field report 58)."""
    for kind, written in (("annotation", pod.annotations), ("label", pod.labels)):
        odd = (name for name in written or () if name not in names.KNOWN_NAMES and _meshy(name))
        for name in islice(odd, MAX_NAMES):
            if note := misspelt(name, kind):
                yield note


def _meshy(name: str) -> bool:
    return "istio" in name or name.rpartition("/")[2].casefold() in _BY_LAST_WORD


def misspelt(name: str, kind: str = "annotation") -> Note | None:
    """Return a note if a name looks like one of Istio's and is none; its place is in a pod."""
    if name in names.KNOWN_NAMES:
        return None
    prefix, _, last = name.rpartition("/")
    near = _nearest(prefix, last)
    if not near and prefix not in _WHOLE_PREFIXES:
        return None
    return Note(
        message=f"{kind} {_name(name)} is not known and has no effect",
        hint=f"did you mean {near}?" if near else "",
        at=("metadata", f"{kind}s", name),
        key=True,
    )


def _nearest(prefix: str, word: str) -> str:
    """Return the known name with that last word or, under a prefix of Istio's, with one like it."""
    folded = word.casefold()
    if "istio" not in f"{prefix}/{word}":
        return "" if folded in _COMMON else _BY_LAST_WORD.get(folded, "")
    known = {name.casefold(): f"{prefix}/{name}".strip("/") for name in _siblings(prefix)}
    known = {**_BY_LAST_WORD, **known} if prefix else known
    if folded in known or len(word) > MAX_COMPARED:
        return known.get(folded, "")
    found = difflib.get_close_matches(folded, known, n=1, cutoff=CLOSE)
    return known[found[0]] if found else ""


def _siblings(prefix: str) -> list[str]:
    return BY_PREFIX.get(prefix, "").split()


def _name(name: str) -> str:
    plain = name.isascii() and name.isprintable() and " " not in name
    return name if plain and len(name) <= MAX_COMPARED else shown(name)


def _misplaced(pod: Pod) -> Iterator[Note]:
    for name in sorted(names.CAPTURE_NAMES - {names.INJECT}):
        if name in (pod.labels or {}):
            yield Note(
                message=f"label {name} has no effect: only an annotation of that name has",
                at=("metadata", "labels", name),
                key=True,
            )
    if names.DATAPLANE_MODE in (pod.annotations or {}):
        name = names.DATAPLANE_MODE
        message = f"annotation {name} has no effect: only a label of that name has"
        yield Note(message=message, at=names.annotation_at(name), key=True)


def _words(pod: Pod) -> Iterator[Note]:
    """Switches that say neither yes nor no, and so do not do what was meant."""
    for kind, value in (
        ("label", pod.label(names.INJECT)),
        ("annotation", pod.annotation(names.INJECT)),
    ):
        if value is not None and value not in TRUE_WORDS | FALSE_WORDS:
            yield Note(
                message=f"{kind} {names.INJECT} is {shown(value)}, which does not count as "
                "'false', nor as 'true' to the injector",
                at=("metadata", f"{kind}s", names.INJECT),
            )
    if pod.proxy is None:
        return
    for name in (*names.SWITCHES, names.DISABLE_ENVOY):
        if name not in pod.proxy.env or names.switch(pod.proxy, name) is not None:
            continue
        value = pod.proxy.env[name]
        said = f"variable {name} of container {PROXY}"
        if value is None:
            message = f"{said} has no value of its own and is not read"
            yield Note(message=message, at=(*pod.proxy.at, "env", name))
        elif value:
            message = f"{said} is {shown(value)}, which is neither true nor false"
            yield Note(message=f"{message}, so it has no effect", at=pod.proxy.variable_at(name))


def _deprecated(pod: Pod) -> Iterator[Note]:
    written = pod.annotations or {}
    if names.KUBEVIRT in written:
        effect = ", which is there too and wins" if names.REROUTE in written else ""
        message = f"annotation {names.KUBEVIRT} is deprecated in favour of {names.REROUTE}{effect}"
        yield Note(message=message, at=names.annotation_at(names.KUBEVIRT), key=True)
    for name in AMBIENT:
        if name in written:
            message = f"annotation {name} has no effect on a pod with a sidecar"
            yield Note(message=message, at=names.annotation_at(name), key=True)


# --- lists ----------------------------------------------------------------------------------------


def _inbound(pod: Pod, settings: Settings) -> Iterator[Note]:
    """What is excluded wins; beside a list of included ports nothing else can be excluded."""
    written = pod.annotations or {}
    include = written.get(names.INCLUDE_INBOUND, "*").strip()
    if include == "*":
        if _all(settings.inbound_ports_exclude):
            yield _at(names.EXCLUDE_INBOUND, "every inbound port is excluded: none is captured")
        return
    listed = names.listed_ports(include)
    excluded = names.covered(settings.inbound_ports_exclude)
    both = [span for span in listed if _touches(excluded, span)]
    if both:
        yield _at(
            names.INCLUDE_INBOUND,
            f"inbound {_ports(both)} both included and excluded, so not captured",
        )
    included = names.covered(listed)
    idle = [
        hole
        for hole in names.listed_ports(written.get(names.EXCLUDE_INBOUND, ""))
        if not _touches(included, hole)
    ]
    if idle and not names.are_injectors(pod):
        yield _at(
            names.EXCLUDE_INBOUND,
            f"annotation {names.EXCLUDE_INBOUND} has no effect where {names.INCLUDE_INBOUND} does "
            f"not include the port: {_text(idle)}",
        )


def _outbound(pod: Pod, settings: Settings) -> Iterator[Note]:
    outbound = settings.outbound_ip_ranges_include or settings.outbound_ports_include
    anything = outbound or settings.dns_active
    written = () if names.are_injectors(pod) else (names.EXCLUDE_OUTBOUND, names.EXCLUDE_NETWORKS)
    for name in written:
        if (pod.annotation(name) or "").strip(" ,") and not anything:
            yield _at(name, f"annotation {name} has no effect: no outbound traffic is captured")
    excluded = names.covered(settings.outbound_ports_exclude)
    both = [span for span in settings.outbound_ports_include if _touches(excluded, span)]
    if both:
        yield _at(
            names.INCLUDE_OUTBOUND,
            f"outbound {_ports(both)} both included and excluded, so not captured",
        )
    if outbound and _all(settings.outbound_ports_exclude):
        yield _at(names.EXCLUDE_OUTBOUND, "every outbound port is excluded: none is captured")
    if not (anything or settings.inbound_ports_include):
        yield _at(
            names.INCLUDE_NETWORKS,
            "nothing is captured: no inbound ports, no outbound networks and no outbound ports",
        )


def _at(name: str, message: str) -> Note:
    return Note(message=message, at=names.annotation_at(name))


def _all(spans: Sequence[Span]) -> bool:
    return names.covered(spans).find(0, 1) < 0


def _touches(covered: bytearray, span: Span) -> bool:
    return covered.find(1, span.first, span.last + 1) >= 0


def _ports(spans: list[Span]) -> str:
    single = len(spans) == 1 and spans[0].first == spans[0].last
    return f"port {_text(spans)} is" if single else f"ports {_text(spans)} are (at least in part)"


def _networks(pod: Pod, settings: Settings) -> Iterator[Note]:
    include = settings.outbound_ip_ranges_include
    if max(len(include.items), len(settings.outbound_ip_ranges_exclude)) > MAX_NETWORKS:
        return
    excluded = _merged(settings.outbound_ip_ranges_exclude)
    for hole in excluded:
        if include.everything and not hole.prefixlen:
            yield _at(
                names.EXCLUDE_NETWORKS,
                f"every IPv{hole.version} address is excluded, so no outbound IPv{hole.version} "
                "traffic is captured",
            )
    for network in include.items:
        if any(_inside(network, hole) for hole in excluded):
            text = network_text(network)
            yield _at(
                names.INCLUDE_NETWORKS,
                f"outbound network {text} is included and excluded, so it is not captured",
            )
    if include.everything or not include.items or settings.outbound_ports_include:
        return
    if names.are_injectors(pod):
        return
    for hole in settings.outbound_ip_ranges_exclude:
        if not any(_inside(hole, one) or _inside(one, hole) for one in include.items):
            yield _at(
                names.EXCLUDE_NETWORKS,
                f"annotation {names.EXCLUDE_NETWORKS} has no effect on {network_text(hole)}, which "
                "is in no included network",
            )


def _merged(networks: Sequence[Network]) -> list[Network]:
    """Return as few networks as cover the same addresses."""
    v4 = (one for one in networks if one.version == 4)
    v6 = (one for one in networks if one.version == 6)
    return [*ipaddress.collapse_addresses(v4), *ipaddress.collapse_addresses(v6)]


def _masked(pod: Pod) -> Iterator[Note]:
    """Networks that are wider than they look: the kernel drops the bits behind the prefix."""
    for name in (names.INCLUDE_NETWORKS, names.EXCLUDE_NETWORKS):
        for item in (pod.annotation(name) or "").split(",")[:MAX_NETWORKS]:
            if found := counts_as(item):
                network, address = found
                counts = network_text(network)
                yield Note(
                    message=f"annotation {name}: {shown(item.strip())} has bits set behind its "
                    f"prefix and counts as {counts}",
                    hint=f"write {counts} or, for the one address, {address_text(address)}",
                    at=names.annotation_at(name),
                )


def _inside(inner: Network, outer: Network) -> bool:
    if inner.version == 4 and outer.version == 4:
        return inner.subnet_of(outer)
    if inner.version == 6 and outer.version == 6:
        return inner.subnet_of(outer)
    return False


# --- identities -----------------------------------------------------------------------------------


def _proxy(pod: Pod, settings: Settings) -> Iterator[Note]:
    """A proxy that is not exempt gets its own traffic back, in a circle."""
    proxy = pod.proxy
    if proxy is None:
        return
    if proxy.init and not proxy.native_sidecar:
        yield Note(
            message=f"container {PROXY} is an init container without restartPolicy Always: it ends "
            "before the others start, and their traffic then goes nowhere",
            at=proxy.at,
        )
    user, group = pod.user_of(proxy), pod.group_of(proxy)
    exempt = user is None or _among(user, settings.proxy_uid)
    if exempt or (group is not None and _among(group, settings.proxy_gid)):
        return
    exempt_users = _text(settings.proxy_uid)
    yield Note(
        message=f"container {PROXY} runs as user {user}, but user {exempt_users} is exempt, so its "
        "own traffic is captured again",
        hint=f"set its securityContext.runAsUser to {PROXY_ID}",
        at=pod.identity_at(proxy, "runAsUser"),
    )


def _collisions(pod: Pod, settings: Settings) -> Iterator[Note]:
    """An app that runs as the proxy's user or group is not captured (field reports 97 and 98)."""
    for container in pod.containers or ():
        if container.name in MESH_CONTAINERS:
            continue
        for kind, field, number, exempt in (
            ("user", "runAsUser", pod.user_of(container), settings.proxy_uid),
            ("group", "runAsGroup", pod.group_of(container), settings.proxy_gid),
        ):
            if number is not None and _among(number, exempt):
                name = _name(container.name)
                yield Note(
                    message=f"container {name} runs as {kind} {number} like the proxy, so its "
                    "traffic bypasses the mesh",
                    hint=f"give it another {field}{_whose(container)}",
                    at=pod.identity_at(container, field),
                )


def _powers(pod: Pod) -> Iterator[Note]:
    """Who may change rules can undo the capture (field report 100)."""
    for container in pod.containers or ():
        held = POWERS.intersection(word.removeprefix("CAP_") for word in container.capabilities)
        if container.name in MESH_CONTAINERS or not (held or container.privileged):
            continue
        why = "is privileged" if container.privileged else f"holds {' and '.join(sorted(held))}"
        yield Note(
            message=f"container {_name(container.name)} {why}, so it can undo the capture",
            at=container.at,
        )


def _whose(container: Container) -> str:
    return " (it is an init container)" if container.init else ""


def _among(number: int, spans: tuple[Span, ...]) -> bool:
    return any(number in span for span in spans)


def _text(spans: Sequence[Span]) -> str:
    shown_ones = ", ".join(span.text("-") for span in spans[:MAX_OF_A_KIND])
    return f"{shown_ones}, ..." if len(spans) > MAX_OF_A_KIND else shown_ones
