"""How an ambient pod says by its annotations that it is captured otherwise than its node's others.

As Istio's node agent reads them: a switch that says neither yes nor no counts for nothing, and of a
list blanks and empty items are dropped.
"""

from collections.abc import Iterator, Mapping

from agent.model import annotations as names
from agent.model.annotations import Given, annotation_at
from agent.model.errors import InvalidSettings
from agent.model.note import Note
from agent.model.pod import Namespace, Pod, parsable
from agent.model.settings import parse
from agent.model.values import AMBIENT, FALSE_WORDS, TRUE_WORDS, shown

BYPASS = "ambient.istio.io/bypass-inbound-capture"
DNS = "ambient.istio.io/dns-capture"
REDIRECTION = "ambient.istio.io/redirection"
SWITCHES = (BYPASS, DNS)
# Annotations that only the capture of a sidecar goes by.
OF_SIDECARS = (*names.ANNOTATIONS, names.KUBEVIRT, names.STATUS_PORT)


def asks(pod: Pod, namespace: Namespace) -> str:
    """Return the label that asks for the node's proxy (ambient mode), as text, or nothing.

    What is in the pod counts more than labels: one with a sidecar has its own (field report 49).
    """
    if _has_sidecar(pod):
        return ""
    own = pod.label(names.DATAPLANE_MODE)
    if own == AMBIENT:
        return f"label {names.DATAPLANE_MODE} of the pod is 'ambient'"
    # The namespace's label selects every pod whose own label is not `none`, whatever else it is.
    if own != "none" and (namespace.labels or {}).get(names.DATAPLANE_MODE) == AMBIENT:
        return f"label {names.DATAPLANE_MODE} of namespace {namespace.name} is 'ambient'"
    return ""


def enrolled(pod: Pod) -> str:
    """Return the note of Istio's node agent that it has captured the pod, or nothing."""
    if _has_sidecar(pod) or pod.label(names.DATAPLANE_MODE) == "none":
        return ""
    noted = pod.annotation(REDIRECTION) == "enabled"
    return f"annotation {REDIRECTION} is 'enabled'" if noted else ""


def may_ask(pod: Pod, namespace: Namespace) -> bool:
    """Whether labels that are not known could ask for it."""
    if _has_sidecar(pod) or asks(pod, namespace):
        return False
    opted_out = pod.label(names.DATAPLANE_MODE) == "none"
    return pod.labels is None or (namespace.labels is None and not opted_out)


def _has_sidecar(pod: Pod) -> bool:
    there = pod.proxy is not None or pod.annotation(names.STATUS) is not None
    return bool(pod.host_network) or there


def given(pod: Pod) -> Iterator[Given]:
    """Yield what a pod says, in no other order than that of the settings."""
    written = pod.annotations or {}
    dns, bypass = written.get(DNS), written.get(BYPASS)
    if dns in TRUE_WORDS | FALSE_WORDS:
        yield Given("redirect_dns", dns in TRUE_WORDS, f"annotation {DNS}", annotation_at(DNS))
    if bypass in TRUE_WORDS:
        yield Given("inbound_ports_include", "", f"annotation {BYPASS}", annotation_at(BYPASS))
    if names.REROUTE in written:
        items = (item.strip() for item in written[names.REROUTE].split(","))
        listed = ",".join(item for item in items if item)
        at = annotation_at(names.REROUTE)
        yield Given("reroute_virtual_interfaces", listed, f"annotation {names.REROUTE}", at)


def raw_settings(pod: Pod, defaults: Mapping[str, object] | None = None) -> dict[str, object]:
    """Return the raw settings of a pod: those of its node, then what it says."""
    return {"mode": AMBIENT, **(defaults or {}), **{one.key: one.value for one in given(pod)}}


def overrides(pod: Pod) -> dict[str, object]:
    """Return what a pod says so that it outweighs what its node says, whoever is heard last."""
    found = {one.key: one.value for one in given(pod)}
    dns = found.pop("redirect_dns", None)
    return found if dns is None else {**found, "dns_proxy": "enabled" if dns else "disabled"}


def origins(pod: Pod, defaults: Mapping[str, object]) -> dict[str, str]:
    """Return in words what decided each of the raw settings; of those left out, nothing did."""
    found = dict.fromkeys(("mode", *defaults), "the agent's configuration")
    return found | {one.key: one.source for one in given(pod)}


def mistakes(pod: Pod) -> tuple[Note, ...]:
    """Return every mistake in what a pod says, each naming where it stands."""
    found = []
    for one in given(pod):
        try:
            parse(parsable({"mode": AMBIENT, one.key: one.value}))
        except InvalidSettings as refused:
            for sentence in refused.problems:
                said = sentence.removeprefix(f"{one.key}: ")
                found.append(Note(message=f"{one.source}: {said}", at=one.at))
    return tuple(found)


def notes(pod: Pod) -> Iterator[Note]:
    """Yield what a pod says that is valid and probably not meant."""
    written = pod.annotations or {}
    for name in SWITCHES:
        if name in written and written[name] not in TRUE_WORDS | FALSE_WORDS:
            message = (
                f"annotation {name} is {shown(written[name])}, which is neither true nor false"
            )
            yield Note(message=f"{message}, so it has no effect", at=annotation_at(name))
    for name in OF_SIDECARS:
        if name in written:
            message = f"annotation {name} has no effect on an ambient pod"
            yield Note(message=message, at=annotation_at(name), key=True)
