"""What a pod's manifest says that is valid and probably not meant, as sentences for its event."""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

from agent.model import annotations as names
from agent.model.numbers import PROXY_ID
from agent.model.pod import INIT, PROXY, Container, Pod, parsable
from agent.model.settings import Settings, parse
from agent.model.values import FALSE_WORDS, TRUE_WORDS, Network, Span, network_text, shown

# A pod may have thousands of annotations, of any length, and comparing words is slow.
MAX_OF_A_KIND = 20
MAX_NAMES = 100
MAX_COMPARED = 100
MAX_NETWORKS = 100
CLOSE = 0.8

# The mesh's own containers run as the proxy's user on purpose.
MESH_CONTAINERS = frozenset({PROXY, INIT, "istio-validation", "enable-core-dump"})
AMBIENT = ("ambient.istio.io/bypass-inbound-capture", "ambient.istio.io/dns-capture")

_BY_LAST_WORD = {name.rpartition("/")[2].casefold(): name for name in sorted(names.KNOWN_NAMES)}
_OUR_PREFIXES = frozenset(name.rpartition("/")[0] for name in names.KNOWN_NAMES) - {"istio.io"}
# Last words that other annotations have too, so that these alone do not give a slip away.
_COMMON = frozenset({"port", "status"})


def remarks(pod: Pod, raw: Mapping[str, object] | None) -> tuple[str, ...]:
    """Return what is odd about a pod; `raw` are its settings if it is captured, and they parse."""
    found = [_unknown_names(pod), _misplaced(pod), _words(pod)]
    if raw is not None:
        settings = parse(parsable(raw))
        found += (_proxy(pod, settings), _collisions(pod, settings), _deprecated(pod))
        found += (_inbound(pod, settings), _outbound(pod, settings), _networks(settings))
    return tuple(sentence for kind in found for sentence in islice(kind, MAX_OF_A_KIND))


# --- names ----------------------------------------------------------------------------------------


def _unknown_names(pod: Pod) -> Iterator[str]:
    """Misspelt annotations do nothing, and nobody else says so (field report 58)."""
    for kind, written in (("annotation", pod.annotations), ("label", pod.labels)):
        odd = (name for name in written or () if name not in names.KNOWN_NAMES and _meshy(name))
        for name in islice(odd, MAX_NAMES):
            if sentence := misspelt(name, kind):
                yield sentence


def _meshy(name: str) -> bool:
    return "istio" in name or name.rpartition("/")[2].casefold() in _BY_LAST_WORD


def misspelt(name: str, kind: str = "annotation") -> str:
    """Return a sentence if a name looks like one of the sidecar's and is none, else nothing."""
    if name in names.KNOWN_NAMES:
        return ""
    prefix, _, last = name.rpartition("/")
    near = _nearest(last, exact="istio" not in prefix)
    ours = prefix in _OUR_PREFIXES
    if not ours and (not near or last.casefold() in _COMMON):
        return ""
    meant = f"; did you mean {near}?" if near else ""
    return f"{kind} {_name(name)} is not known and has no effect{meant}"


def _nearest(word: str, *, exact: bool) -> str:
    """Return the known name with that last word, or with one very like it."""
    folded = word.casefold()
    if exact or folded in _BY_LAST_WORD or len(word) > MAX_COMPARED:
        return _BY_LAST_WORD.get(folded, "")
    found = difflib.get_close_matches(folded, _BY_LAST_WORD, n=1, cutoff=CLOSE)
    return _BY_LAST_WORD[found[0]] if found else ""


def _name(name: str) -> str:
    plain = name.isascii() and name.isprintable() and " " not in name
    return name if plain and len(name) <= MAX_COMPARED else shown(name)


def _misplaced(pod: Pod) -> Iterator[str]:
    for name in sorted(names.CAPTURE_NAMES - {names.INJECT}):
        if name in (pod.labels or {}):
            yield f"label {name} has no effect: only an annotation of that name has"
    if names.DATAPLANE_MODE in (pod.annotations or {}):
        yield f"annotation {names.DATAPLANE_MODE} has no effect: only a label of that name has"


def _words(pod: Pod) -> Iterator[str]:
    """Switches that say neither yes nor no, and so do not do what was meant."""
    for kind, value in (
        ("label", pod.label(names.INJECT)),
        ("annotation", pod.annotation(names.INJECT)),
    ):
        if value is not None and value not in TRUE_WORDS | FALSE_WORDS:
            yield f"{kind} {names.INJECT} is {shown(value)}, which does not count as 'false'"
    if pod.proxy is None:
        return
    for name in (*names.SWITCHES, names.DISABLE_ENVOY):
        if name not in pod.proxy.env or names.switch(pod.proxy, name) is not None:
            continue
        value = pod.proxy.env[name]
        if value is None:
            yield f"variable {name} of container {PROXY} has no value of its own and is not read"
        elif value:
            yield (
                f"variable {name} of container {PROXY} is {shown(value)}, which is neither true "
                "nor false, so it has no effect"
            )


def _deprecated(pod: Pod) -> Iterator[str]:
    written = pod.annotations or {}
    if names.KUBEVIRT in written:
        effect = ", which is there too and wins" if names.REROUTE in written else ""
        yield f"annotation {names.KUBEVIRT} is deprecated in favour of {names.REROUTE}{effect}"
    for name in AMBIENT:
        if name in written:
            yield f"annotation {name} has no effect on a pod with a sidecar"


# --- lists ----------------------------------------------------------------------------------------


def _inbound(pod: Pod, settings: Settings) -> Iterator[str]:
    """What is excluded wins; beside a list of included ports nothing else can be excluded."""
    written = pod.annotations or {}
    include = written.get(names.INCLUDE_INBOUND, "*").strip()
    if include == "*":
        return
    listed = names.listed_ports(include)
    excluded = names.covered(settings.inbound_ports_exclude)
    both = [span for span in listed if any(excluded[span.first : span.last + 1])]
    if both:
        yield f"inbound {_ports(both)} both included and excluded, so not captured"
    included = names.covered(listed)
    idle = [
        hole
        for hole in names.listed_ports(written.get(names.EXCLUDE_INBOUND, ""))
        if not any(included[hole.first : hole.last + 1])
    ]
    if idle:
        yield (
            f"annotation {names.EXCLUDE_INBOUND} has no effect where {names.INCLUDE_INBOUND} does "
            f"not include the port: {_text(idle)}"
        )


def _outbound(pod: Pod, settings: Settings) -> Iterator[str]:
    outbound = settings.outbound_ip_ranges_include or settings.outbound_ports_include
    anything = outbound or settings.dns_active
    for name in (names.EXCLUDE_OUTBOUND, names.EXCLUDE_NETWORKS):
        if (pod.annotation(name) or "").strip(" ,") and not anything:
            yield f"annotation {name} has no effect: no outbound traffic is captured"
    excluded = names.covered(settings.outbound_ports_exclude)
    both = [
        span
        for span in settings.outbound_ports_include
        if any(excluded[span.first : span.last + 1])
    ]
    if both:
        yield f"outbound {_ports(both)} both included and excluded, so not captured"
    if not (anything or settings.inbound_ports_include):
        yield "nothing is captured: no inbound ports, no outbound networks and no outbound ports"


def _ports(spans: list[Span]) -> str:
    single = len(spans) == 1 and spans[0].first == spans[0].last
    return f"port {_text(spans)} is" if single else f"ports {_text(spans)} are (at least in part)"


def _networks(settings: Settings) -> Iterator[str]:
    include = settings.outbound_ip_ranges_include
    excluded = settings.outbound_ip_ranges_exclude
    if max(len(include.items), len(excluded)) > MAX_NETWORKS:
        return
    for network in include.items:
        if any(_inside(network, hole) for hole in excluded):
            text = network_text(network)
            yield f"outbound network {text} is included and excluded, so it is not captured"
    if include.everything or not include.items or settings.outbound_ports_include:
        return
    for hole in excluded:
        if not any(_inside(hole, one) or _inside(one, hole) for one in include.items):
            yield (
                f"annotation {names.EXCLUDE_NETWORKS} has no effect on {network_text(hole)}, which "
                "is in no included network"
            )


def _inside(inner: Network, outer: Network) -> bool:
    if inner.version == 4 and outer.version == 4:
        return inner.subnet_of(outer)
    if inner.version == 6 and outer.version == 6:
        return inner.subnet_of(outer)
    return False


# --- identities -----------------------------------------------------------------------------------


def _proxy(pod: Pod, settings: Settings) -> Iterator[str]:
    """A proxy that is not exempt gets its own traffic back, in a circle."""
    proxy = pod.proxy
    if proxy is None:
        return
    if proxy.init and not proxy.native_sidecar:
        yield (
            f"container {PROXY} is an init container without restartPolicy Always: it ends before "
            "the others start, and their traffic then goes nowhere"
        )
    user, group = pod.user_of(proxy), pod.group_of(proxy)
    exempt = user is None or _among(user, settings.proxy_uid)
    if exempt or (group is not None and _among(group, settings.proxy_gid)):
        return
    yield (
        f"container {PROXY} runs as user {user}, but user {_text(settings.proxy_uid)} is exempt, "
        f"so its own traffic is captured again; set its securityContext.runAsUser to {PROXY_ID}"
    )


def _collisions(pod: Pod, settings: Settings) -> Iterator[str]:
    """An app that runs as the proxy's user or group is not captured (field reports 97 and 98)."""
    for container in pod.containers or ():
        if container.name in MESH_CONTAINERS:
            continue
        for kind, field, number, exempt in (
            ("user", "runAsUser", pod.user_of(container), settings.proxy_uid),
            ("group", "runAsGroup", pod.group_of(container), settings.proxy_gid),
        ):
            if number is not None and _among(number, exempt):
                yield (
                    f"container {_name(container.name)} runs as {kind} {number} like the proxy, so "
                    f"its traffic bypasses the mesh; give it another {field}{_whose(container)}"
                )


def _whose(container: Container) -> str:
    return " (it is an init container)" if container.init else ""


def _among(number: int, spans: tuple[Span, ...]) -> bool:
    return any(number in span for span in spans)


def _text(spans: Sequence[Span]) -> str:
    shown_ones = ", ".join(span.text("-") for span in spans[:MAX_OF_A_KIND])
    return f"{shown_ones}, ..." if len(spans) > MAX_OF_A_KIND else shown_ones
