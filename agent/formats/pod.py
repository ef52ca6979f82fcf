"""A pod's annotations to raw settings, as Istio's CNI plugin reads them.

Blanks around items are taken away here, because a running pod may have them: the kernel tools
accept them. A port of 0, which matches nothing, is dropped for the same reason.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from agent.model.errors import InvalidSettings
from agent.model.values import FALSE_WORDS, TRUE_WORDS

TRAFFIC = "traffic.sidecar.istio.io/"
MODE = "sidecar.istio.io/interceptionMode"
REROUTE = "istio.io/reroute-virtual-interfaces"
KUBEVIRT = f"{TRAFFIC}kubevirtInterfaces"
STATUS_PORT = "status.sidecar.istio.io/port"

# Ports of the proxy itself: excluded inbound whatever the annotations say (field report 56).
ALWAYS_EXCLUDED = ("15020", "15021", "15090")

ANNOTATIONS: Mapping[str, str] = {
    MODE: "inbound_interception_mode",
    f"{TRAFFIC}includeOutboundIPRanges": "outbound_ip_ranges_include",
    f"{TRAFFIC}excludeOutboundIPRanges": "outbound_ip_ranges_exclude",
    f"{TRAFFIC}includeInboundPorts": "inbound_ports_include",
    f"{TRAFFIC}excludeInboundPorts": "inbound_ports_exclude",
    f"{TRAFFIC}includeOutboundPorts": "outbound_ports_include",
    f"{TRAFFIC}excludeOutboundPorts": "outbound_ports_exclude",
    f"{TRAFFIC}excludeInterfaces": "exclude_interfaces",
}
PORT_LISTS = frozenset(
    {
        "inbound_ports_include",
        "inbound_ports_exclude",
        "outbound_ports_include",
        "outbound_ports_exclude",
    }
)

DEFAULTS: Mapping[str, object] = {
    "inbound_ports_include": "*",
    "inbound_ports_exclude": ",".join(ALWAYS_EXCLUDED),
    "outbound_ip_ranges_include": "*",
    "outbound_ports_exclude": "15020",
}

PROXY_CONTAINER = "istio-proxy"
SWITCHES: Mapping[str, tuple[str, ...]] = {
    "ISTIO_META_DNS_CAPTURE": ("redirect_dns", "capture_all_dns"),
    "ISTIO_DUAL_STACK": ("dual_stack",),
    "INVALID_DROP": ("drop_invalid",),
}


def pod_of(document: object) -> Mapping[str, Any] | None:
    """Return the pod, or the pod template, in a manifest; None if it holds neither."""
    if not isinstance(document, Mapping):
        return None
    if document.get("kind") == "Pod":
        return document
    spec = document.get("spec")
    if not isinstance(spec, Mapping):
        return None
    if isinstance(spec.get("template"), Mapping):
        return dict(spec["template"])
    if isinstance(spec.get("jobTemplate"), Mapping):
        return pod_of(spec["jobTemplate"])
    return None


def settings(pod: Mapping[str, Any]) -> dict[str, object]:
    """Return the raw settings of a pod: its annotations, and its proxy container's environment.

    Raises: InvalidSettings if the manifest has another shape than a pod's.
    """
    values = dict(DEFAULTS)
    annotations = _mapping(_mapping(pod, "metadata"), "annotations")
    for annotation, key in ANNOTATIONS.items():
        if annotation in annotations:
            values[key] = _list(str(annotations[annotation] or ""), key)
    if REROUTE in annotations:  # wins even when it is empty
        values["reroute_virtual_interfaces"] = _list(str(annotations[REROUTE] or ""), "")
    elif KUBEVIRT in annotations:
        values["reroute_virtual_interfaces"] = _list(str(annotations[KUBEVIRT] or ""), "")
    excluded = str(values["inbound_ports_exclude"]).split(",")
    status_port = str(annotations.get(STATUS_PORT) or "0")
    extra = () if status_port == "0" else (status_port,)
    ports = dict.fromkeys(p for p in (*excluded, *extra, *ALWAYS_EXCLUDED) if p)
    values["inbound_ports_exclude"] = ",".join(ports)
    for container in _containers(pod):
        if container.get("name") == PROXY_CONTAINER:
            values |= _proxy_settings(container)
    return values


def _list(text: str, key: str) -> str:
    items = [item.strip() for item in text.split(",")]
    return ",".join(item for item in items if not (key in PORT_LISTS and item == "0"))


def _proxy_settings(container: Mapping[str, Any]) -> dict[str, object]:
    found: dict[str, object] = {}
    context = _mapping(container, "securityContext")
    for key, name in (("proxy_uid", "runAsUser"), ("proxy_gid", "runAsGroup")):
        # 0 means "not said" here, as it does to Istio: root is no identity to exempt.
        found[key] = str(context.get(name) or 1337)
    environment = container.get("env") or []
    for entry in environment if isinstance(environment, list) else []:
        if not isinstance(entry, Mapping):
            continue
        value = str(entry.get("value", ""))
        for key in SWITCHES.get(str(entry.get("name")), ()):
            if value in TRUE_WORDS or value in FALSE_WORDS:
                found[key] = value in TRUE_WORDS
    return found


def _containers(pod: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    spec = _mapping(pod, "spec")
    for key in ("initContainers", "containers"):
        for container in spec.get(key) or []:
            if isinstance(container, Mapping):
                yield container


def _mapping(parent: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = parent.get(key) or {}
    if not isinstance(found, Mapping):
        raise InvalidSettings((f"{key}: a mapping is expected, not {type(found).__name__}",))
    return found
