"""The labels, annotations and variables by which a pod says how it is captured: the one table.

`given` reads them as Istio's CNI plugin does and keeps where each value stands, so that a complaint
can name what the user wrote. Blanks around items are taken away, because a running pod may have
them: the kernel tools accept them. A port of 0, which matches nothing, is dropped for that reason.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from agent.model import istio_names
from agent.model.errors import InvalidSettings
from agent.model.note import Note, Place
from agent.model.numbers import PROXY_ID
from agent.model.pod import MESH_CONTAINERS, PROXY, Container, Pod, parsable
from agent.model.settings import parse
from agent.model.values import (
    FALSE_WORDS,
    MAX_PORT,
    TRUE_WORDS,
    BadValue,
    Span,
    port_selection,
    ports,
)

SIDECAR = "sidecar.istio.io/"
TRAFFIC = "traffic.sidecar.istio.io/"
MODE = f"{SIDECAR}interceptionMode"
INJECT = f"{SIDECAR}inject"
STATUS = f"{SIDECAR}status"
STATUS_PORT = "status.sidecar.istio.io/port"
REROUTE = "istio.io/reroute-virtual-interfaces"
KUBEVIRT = f"{TRAFFIC}kubevirtInterfaces"
EXCLUDE_INBOUND = f"{TRAFFIC}excludeInboundPorts"
INCLUDE_INBOUND = f"{TRAFFIC}includeInboundPorts"
EXCLUDE_NETWORKS = f"{TRAFFIC}excludeOutboundIPRanges"
INCLUDE_NETWORKS = f"{TRAFFIC}includeOutboundIPRanges"
EXCLUDE_OUTBOUND = f"{TRAFFIC}excludeOutboundPorts"
INCLUDE_OUTBOUND = f"{TRAFFIC}includeOutboundPorts"
TEMPLATES = "inject.istio.io/templates"
DATAPLANE_MODE = "istio.io/dataplane-mode"
INJECTION = "istio-injection"
REVISION = "istio.io/rev"

# Istio's injector passes these namespaces over, whatever their labels.
NEVER_INJECTED = ("kube-system", "kube-public", "kube-node-lease", "local-path-storage")

# Ports of the proxy itself: excluded inbound whatever the annotations say (field report 56).
ALWAYS_EXCLUDED = ("15020", "15021", "15090")

ANNOTATIONS: Mapping[str, str] = {
    MODE: "inbound_interception_mode",
    INCLUDE_NETWORKS: "outbound_ip_ranges_include",
    EXCLUDE_NETWORKS: "outbound_ip_ranges_exclude",
    INCLUDE_INBOUND: "inbound_ports_include",
    EXCLUDE_INBOUND: "inbound_ports_exclude",
    INCLUDE_OUTBOUND: "outbound_ports_include",
    EXCLUDE_OUTBOUND: "outbound_ports_exclude",
    f"{TRAFFIC}excludeInterfaces": "exclude_interfaces",
}
# Everything else that says how a pod is captured, or whether.
CAPTURE_NAMES = frozenset({*ANNOTATIONS, REROUTE, KUBEVIRT, STATUS_PORT, INJECT, STATUS})

KNOWN_NAMES = CAPTURE_NAMES | istio_names.NAMES

PORT_LISTS = frozenset(
    {
        "inbound_ports_include",
        "inbound_ports_exclude",
        "outbound_ports_include",
        "outbound_ports_exclude",
    }
)

DEFAULTS: Mapping[str, object] = MappingProxyType(
    {
        "inbound_ports_include": "*",
        "inbound_ports_exclude": ",".join(ALWAYS_EXCLUDED),
        "outbound_ip_ranges_include": "*",
        "outbound_ports_exclude": "15020",
    }
)

DISABLE_ENVOY = "DISABLE_ENVOY"
MODE_VARIABLE = "ISTIO_META_INTERCEPTION_MODE"
MODES = ("REDIRECT", "TPROXY", "NONE")
SWITCHES: Mapping[str, tuple[str, ...]] = {
    "ISTIO_META_DNS_CAPTURE": ("redirect_dns", "capture_all_dns"),
    "ISTIO_DUAL_STACK": ("dual_stack",),
    "INVALID_DROP": ("drop_invalid",),
}


@dataclass(frozen=True, slots=True)
class Given:
    """One raw setting that a pod gives, and where it stands."""

    key: str
    value: object
    source: str
    at: Place


def annotation_at(name: str) -> Place:
    return ("metadata", "annotations", name)


def given(pod: Pod) -> Iterator[Given]:
    """Yield what a pod says, in no other order than that of the table."""
    written = pod.annotations or {}
    for name, key in ANNOTATIONS.items():
        if name in written:
            value = _list(written[name], key)
            yield Given(key, value, f"annotation {name}", annotation_at(name))
    port = written.get(STATUS_PORT, "").strip()
    if port not in ("", "0"):
        source = f"annotation {STATUS_PORT}"
        yield Given("inbound_ports_exclude", port, source, annotation_at(STATUS_PORT))
    for name in (REROUTE, KUBEVIRT):  # the first wins even when it is empty
        if name in written:
            value = _list(written[name], "")
            source = f"annotation {name}"
            yield Given("reroute_virtual_interfaces", value, source, annotation_at(name))
            break
    if pod.proxy is not None:
        yield from _of_proxy(pod.proxy, mode=MODE not in written)


def _list(text: str, key: str) -> str:
    items = [item.strip() for item in text.split(",")]
    return ",".join(item for item in items if not (key in PORT_LISTS and item == "0"))


def _of_proxy(proxy: Container, *, mode: bool) -> Iterator[Given]:
    for key, number, name in (
        ("proxy_uid", proxy.run_as_user, "runAsUser"),
        ("proxy_gid", proxy.run_as_group, "runAsGroup"),
    ):
        # 0 means "not said" here, as it does to Istio: root is no identity to exempt.
        if number:
            at = (*proxy.at, "securityContext", name)
            yield Given(key, str(number), f"securityContext.{name} of container {PROXY}", at)
    for name, keys in SWITCHES.items():
        value = switch(proxy, name)
        for key in keys if value is not None else ():
            yield Given(
                key, value, f"variable {name} of container {PROXY}", proxy.variable_at(name)
            )
    # The injector writes both; where only the variable is there, it is what the proxy goes by.
    said = proxy.env.get(MODE_VARIABLE)
    if mode and said in MODES:
        source = f"variable {MODE_VARIABLE} of container {PROXY}"
        yield Given("inbound_interception_mode", said, source, proxy.variable_at(MODE_VARIABLE))


def switch(proxy: Container, name: str) -> bool | None:
    """Return what a variable of the proxy says, or None where it says neither true nor false."""
    value = proxy.env.get(name)
    if value in TRUE_WORDS:
        return True
    return False if value in FALSE_WORDS else None


def raw_settings(pod: Pod, defaults: Mapping[str, object] | None = None) -> dict[str, object]:
    """Return the raw settings of a pod: Istio's defaults, then `defaults`, then what it says.

    The values may be wrong: `problems` tells.
    """
    values = {**DEFAULTS, **(defaults or {})}
    extra: list[str] = []
    if pod.proxy is not None or pod.containers is None:
        values.setdefault("proxy_uid", str(PROXY_ID))
        values.setdefault("proxy_gid", str(PROXY_ID))
    for found in given(pod):
        if found.source.endswith(STATUS_PORT):
            extra.append(str(found.value))
        else:
            values[found.key] = found.value
    listed = (*_items(values["inbound_ports_exclude"]), *extra, *ALWAYS_EXCLUDED)
    excluded = ",".join(dict.fromkeys(port for port in listed if port))
    values["inbound_ports_exclude"] = excluded
    values["inbound_ports_include"] = _without(values["inbound_ports_include"], excluded)
    return values


def origins(pod: Pod, defaults: Mapping[str, object] | None = None) -> dict[str, str]:
    """Return in words what decided each of the raw settings; of those left out, nothing did."""
    found = dict.fromkeys(DEFAULTS, "Istio's default for a sidecar")
    found |= dict.fromkeys(defaults or {}, "the agent's configuration")
    said: dict[str, list[str]] = {}
    for one in given(pod):
        said.setdefault(one.key, []).append(one.source)
    return found | {key: " and ".join(sources) for key, sources in said.items()}


def _items(value: object) -> list[str]:
    if isinstance(value, (list, tuple)):
        return [str(item) for item in value]
    return str("" if value is None else value).split(",")


def _without(include: object, exclude: str) -> object:
    """Take the excluded ports out of an include list: what is excluded wins (field report 56)."""
    try:
        wanted, unwanted = port_selection(include), ports(exclude)
    except BadValue:
        return include  # it is refused anyway
    left = covered(wanted.items)
    before = bytes(left)
    for hole in unwanted:
        left[hole.first : hole.last + 1] = bytes(hole.last + 1 - hole.first)
    if wanted.everything or left == before:
        return include
    runs = (Span(run.start(), run.end() - 1) for run in re.finditer(b"\x01+", left))
    return ",".join(span.text("-") for span in runs)


def covered(spans: Iterable[Span]) -> bytearray:
    """Return a map with a 1 for every port in the list: a pod may list each of them, and twice."""
    found = bytearray(MAX_PORT + 1)
    done = -1  # what is behind this port is not looked at yet
    for span in sorted(set(spans)):
        first = max(span.first, done + 1)
        if first <= span.last:
            found[first : span.last + 1] = b"\x01" * (span.last + 1 - first)
            done = span.last
    return found


def listed_ports(text: str) -> tuple[Span, ...]:
    """Return the ports of an annotation's list; none of one that is wrong or has no ports in it."""
    try:
        return ports(_list(text, "inbound_ports_include"))
    except BadValue:
        return ()


def mistakes(pod: Pod, raw: Mapping[str, object]) -> tuple[Note, ...]:
    """Return every mistake in what a pod says, each naming where it stands; empty if `raw` parses.

    `raw` is what `raw_settings` made of the pod.
    """
    found = [note for one in given(pod) for note in _mistakes({one.key: one.value}, one)]
    if found:
        return tuple(dict.fromkeys(found))
    sources = {one.key: one for one in given(pod)}
    try:
        parse(parsable(raw))
    except InvalidSettings as refused:  # the values are right, but not together
        said = refused.problems
        return tuple(_reworded(text, sources.get(text.partition(":")[0])) for text in said)
    return ()


def _mistakes(raw: Mapping[str, object], source: Given) -> Iterator[Note]:
    try:
        parse(parsable(raw))
    except InvalidSettings as refused:
        yield from (_reworded(sentence, source) for sentence in refused.problems)


def _reworded(sentence: str, source: Given | None) -> Note:
    if source is None:
        return Note(message=sentence)
    said = sentence.removeprefix(f"{source.key}: ")
    return Note(message=f"{source.source}: {said}", at=source.at)


def injected_names(status: str) -> frozenset[str] | None:
    """Return the containers that the injector says it added; None where it does not say.

    The annotation may hold anything: only its presence means something to Istio.
    """
    lists = [_injected(status, key) for key in ("initContainers", "containers")]
    found = [one for one in lists if one is not None]
    return frozenset().union(*found) if found else None


def are_injectors(pod: Pod) -> bool:
    """Whether the lists are what the injector wrote, for the mesh as a whole or for the pod.

    Beside a CNI plugin it writes these four into each pod, with its own ports among them.
    """
    written = pod.annotations or {}
    return all(name in written for name in (STATUS, MODE, INCLUDE_INBOUND, EXCLUDE_INBOUND))


def _injected(status: str, key: str) -> frozenset[str] | None:
    try:
        document = json.loads(status)
    except (ValueError, RecursionError):
        return None
    found = document.get(key) if isinstance(document, dict) else None
    if not isinstance(found, list):
        return None
    return frozenset(name for name in found if isinstance(name, str))


def init_names(pod: Pod) -> tuple[str, ...]:
    """Return the init containers that are known, but for the mesh's own.

    Where the pod's containers are not known, those that the injector added are. One of Istio's own
    tries the capture, and so must not be let past it.
    """
    if pod.containers is not None:
        found = frozenset(one.name for one in pod.containers if one.init)
    else:
        status = pod.annotation(STATUS) or ""
        others = _injected(status, "containers") or frozenset()
        found = (_injected(status, "initContainers") or frozenset()) - others
    return tuple(sorted(found - MESH_CONTAINERS))
