"""Whether a pod is captured, how, and why: pure, total, and the only place where it is decided.

The rules stand in `_RULES` in Istio's order, the first hit wins. Where Istio is known to be wrong
(capture mode NONE, host network, runtimes that no rule reaches, pods that cannot be looked up) the
field report that shows it is named at the rule.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from agent.model import ambient_pod
from agent.model import annotations as names
from agent.model.mesh import inject_word, outside_the_mesh, templates
from agent.model.pod import INIT, PROXY, Namespace, Pod, Policy
from agent.model.remarks import remarks
from agent.model.values import AMBIENT, FALSE_WORDS, TRUE_WORDS, shown


class Reason(StrEnum):
    """Why a pod is captured or not. Stable: metrics, events and scripts go by these words."""

    INJECTED = "injected"
    NOT_INJECTED = "not-injected"
    OWN_AGENT = "own-agent"
    EXCLUDED_NAMESPACE = "excluded-namespace"
    HOST_NETWORK = "host-network"
    NOT_KUBERNETES = "not-kubernetes"
    UNKNOWN_POD = "unknown-pod"
    INIT_CONTAINER = "init-container-captures"
    PROXY_DISABLED = "proxy-disabled"
    PROXY_TYPE = "proxy-type"
    INJECT_FALSE = "inject-false"
    NAMESPACE_LEFT = "namespace-left"
    AMBIENT = "ambient"
    NOT_ENROLLED = "not-enrolled"  # as not-injected, and certainly no ambient pod either
    UNKNOWN_LABELS = "unknown-labels"
    MODE_NONE = "mode-none"
    RUNTIME_CLASS = "runtime-class"
    INVALID_ANNOTATIONS = "invalid-annotations"


# Pods that have nothing to do with the mesh: nobody wants to hear about their annotations.
_QUIET = frozenset(
    {
        Reason.OWN_AGENT,
        Reason.EXCLUDED_NAMESPACE,
        Reason.HOST_NETWORK,
        Reason.NOT_KUBERNETES,
        Reason.UNKNOWN_POD,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What is to be done about one pod.

    `settings` are raw settings, there if and only if the pod is captured. `refuse` means that ADD
    must fail; of a pod that already runs it means that what is there stays as it is. `certain` is
    false where more knowledge of the pod could change the outcome or the settings: look it up.
    """

    captured: bool
    reason: Reason
    text: str
    settings: Mapping[str, object] | None = None
    refuse: bool = False
    problems: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    certain: bool = True

    @property
    def message(self) -> str:
        """What the pod's event and the CNI error say when the pod is refused, else nothing."""
        return f"The pod is not started: {self.text}" if self.refuse else ""


def decide(pod: Pod, namespace: Namespace, policy: Policy) -> Decision:
    """Return what is to be done about a pod. Pure, and never raises."""
    for rule in _RULES:
        found = rule(pod, namespace, policy)
        if found is not None:
            if found.reason in _QUIET:
                return found
            return replace(found, warnings=(*remarks(pod, None), *found.warnings))
    return _captured(pod, policy)


def _left(reason: Reason, text: str, *, certain: bool = True, refuse: bool = False) -> Decision:
    return Decision(captured=False, reason=reason, text=text, certain=certain, refuse=refuse)


# --- what needs no look at the pod ----------------------------------------------------------------


def _own_agent(pod: Pod, namespace: Namespace, policy: Policy) -> Decision | None:
    """Decided by the name alone, so that the agent can always start (field report 17)."""
    own = policy.own_namespace and pod.namespace == policy.own_namespace
    if not own or not pod.name.startswith(policy.own_name_prefix):
        return None
    return _left(
        Reason.OWN_AGENT,
        f"{pod.title} is a pod of this agent: its name starts with {policy.own_name_prefix!r} and "
        f"{policy.own_namespace} is the agent's namespace",
    )


def _excluded(pod: Pod, namespace: Namespace, policy: Policy) -> Decision | None:
    if not pod.namespace or pod.namespace not in policy.exclude_namespaces:
        return None
    return _left(
        Reason.EXCLUDED_NAMESPACE,
        f"namespace {pod.namespace} is listed in exclude_namespaces of the agent's configuration",
    )


def _host_network(pod: Pod, namespace: Namespace, policy: Policy) -> Decision | None:
    """Istio does not look: the rules would be the node's (field report 101)."""
    if not pod.host_network:
        return None
    return _left(
        Reason.HOST_NETWORK,
        "hostNetwork is true: the pod uses the node's network, which is never captured",
    )


def _unknown(pod: Pod, namespace: Namespace, policy: Policy) -> Decision | None:
    """A pod of which nothing is known is never passed over in silence (field reports 17 and 26)."""
    if pod.annotations is not None:
        return None
    if not (pod.name and pod.namespace):
        return _left(
            Reason.NOT_KUBERNETES,
            "K8S_POD_NAME and K8S_POD_NAMESPACE are missing: this is no pod of Kubernetes",
        )
    unknown = f"the annotations of {pod.title} are not known here and it could not be looked up"
    outside = outside_the_mesh(namespace)
    if outside:
        text = f"{unknown}, but {outside}, so it starts and is looked at again"
    elif policy.closed:
        text = f"{unknown}, so it starts only once it can be (failure policy closed)"
    else:
        text = f"{unknown}; it starts uncaptured (failure policy open) and is looked at again"
    refuse = policy.closed and not outside
    return _left(Reason.UNKNOWN_POD, text, certain=False, refuse=refuse)


def _ambient(pod: Pod, namespace: Namespace, policy: Policy) -> Decision | None:
    """Pods of the node's own proxy; those with a sidecar are captured with it, as elsewhere."""
    asked = ambient_pod.asks(pod, namespace) if policy.mode == AMBIENT else ""
    if not asked:
        return None
    if uncapturable := _runtime_class(pod, namespace, policy):
        return uncapturable
    said = tuple(note.text for note in ambient_pod.notes(pod))
    if problems := tuple(note.text for note in ambient_pod.mistakes(pod)):
        return _invalid(pod, problems, said, certain=True)
    return Decision(
        captured=True,
        reason=Reason.AMBIENT,
        text=asked,
        settings=ambient_pod.raw_settings(pod, policy.ambient),
        warnings=said,
        certain=pod.labels is not None,  # its own may say none
    )


# --- what the pod has in it -----------------------------------------------------------------------


def _listed(pod: Pod) -> frozenset[str] | None:
    """Return the names of its containers; None where neither they nor the injector's list are."""
    if pod.containers is not None:
        return frozenset(container.name for container in pod.containers)
    return names.injected_names(pod.annotation(names.STATUS) or "")


def _init_container(pod: Pod, namespace: Namespace, policy: Policy) -> Decision | None:
    listed = _listed(pod)
    if listed is None or INIT not in listed:
        return None
    return _left(
        Reason.INIT_CONTAINER,
        f"container {INIT} is in the pod{_as_listed(pod)}: it sets up the capture itself",
        certain=pod.containers is not None,
    )


def _as_listed(pod: Pod) -> str:
    return "" if pod.containers is not None else f" (annotation {names.STATUS} lists it)"


def _proxy_disabled(pod: Pod, namespace: Namespace, policy: Policy) -> Decision | None:
    if pod.containers is None and "grpc-agent" in templates(pod):
        return _by_template(pod, Reason.PROXY_DISABLED, "its proxy does not run")
    if pod.proxy is None or not names.switch(pod.proxy, names.DISABLE_ENVOY):
        return None
    value = shown(pod.proxy.env[names.DISABLE_ENVOY])
    return _left(
        Reason.PROXY_DISABLED,
        f"variable {names.DISABLE_ENVOY} of container {PROXY} is {value}: there is no proxy to "
        "send traffic to",
    )


def _no_proxy(pod: Pod, namespace: Namespace, policy: Policy) -> Decision | None:
    status = pod.annotation(names.STATUS)
    listed = _listed(pod)
    if pod.containers is None and status is None:
        text = f"annotation {names.STATUS} is missing: no sidecar was injected"
    elif listed is None or PROXY in listed:
        return None
    elif pod.containers is None:
        text = f"annotation {names.STATUS} is {shown(status)}, which lists no container {PROXY}"
    else:
        text = f"no container is named {PROXY}"
    certain = pod.containers is not None or status is None
    if ambient := ambient_pod.asks(pod, namespace) or ambient_pod.enrolled(pod):
        text = f"{ambient}, and this agent captures pods with a sidecar only (capture); {text}"
        return _left(Reason.AMBIENT, text, certain=certain)
    if policy.mode == AMBIENT and ambient_pod.may_ask(pod, namespace):
        text = f"{text}, and whether a label asks for ambient is not known here"
        return _left(Reason.UNKNOWN_LABELS, text, certain=False)
    reason = Reason.NOT_ENROLLED if policy.mode == AMBIENT else Reason.NOT_INJECTED
    return _left(reason, text + _why_not_injected(pod, namespace), certain=certain)


def _why_not_injected(pod: Pod, namespace: Namespace) -> str:
    kind, value = inject_word(pod)
    if value in FALSE_WORDS:
        return f" ({kind} {names.INJECT} is {shown(value)})"
    if pod.label(names.DATAPLANE_MODE) == "none":
        return f" (label {names.DATAPLANE_MODE} is 'none')"
    outside = outside_the_mesh(namespace)
    return f" ({outside})" if outside else ""


def _proxy_type(pod: Pod, namespace: Namespace, policy: Policy) -> Decision | None:
    """Gateways and waypoints: their proxy serves others and takes nothing from its own pod."""
    if pod.containers is None:
        asked = templates(pod)
        if "gateway" in asked and "sidecar" not in asked:
            return _by_template(pod, Reason.PROXY_TYPE, "it is a gateway")
        return None
    args = pod.proxy.args if pod.proxy else ()
    # `proxy` alone, or with flags behind it, is a sidecar: that is the default of its command line.
    if len(args) < 2 or args[0] != "proxy" or args[1] in ("", "sidecar") or args[1].startswith("-"):
        return None
    return _left(
        Reason.PROXY_TYPE,
        f"args of container {PROXY} are 'proxy' {shown(args[1])}: it is no sidecar",
    )


def _by_template(pod: Pod, reason: Reason, meaning: str) -> Decision | None:
    if pod.annotation(names.STATUS) is None:
        return None
    value = shown(pod.annotation(names.TEMPLATES))
    return _left(reason, f"annotation {names.TEMPLATES} is {value}: {meaning}", certain=False)


def _inject_false(pod: Pod, namespace: Namespace, policy: Policy) -> Decision | None:
    kind, value = inject_word(pod)
    if value not in FALSE_WORDS:
        return None
    return _left(
        Reason.INJECT_FALSE,
        f"{kind} {names.INJECT} is {shown(value)}: the pod is not to be captured",
        certain=pod.labels is not None,
    )


def _no_status(pod: Pod, namespace: Namespace, policy: Policy) -> Decision | None:
    if pod.annotation(names.STATUS) is not None:
        return None
    return _left(
        Reason.NOT_INJECTED,
        f"there is a container {PROXY}, but annotation {names.STATUS} is missing: it was not put "
        "there by the injector",
    )


def _namespace_left(pod: Pod, namespace: Namespace, policy: Policy) -> Decision | None:
    """Whoever takes the label from a namespace takes its pods out of the mesh (field report 62).

    What is in the pod counts more where a namespace never had one: it was injected some other way.
    """
    asks = inject_word(pod)[1] in TRUE_WORDS or pod.label(names.REVISION)
    if not namespace.left or asks:
        return None
    return _left(
        Reason.NAMESPACE_LEFT,
        f"namespace {namespace.name} was taken out of the mesh ({outside_the_mesh(namespace)}), "
        f"and no label {names.INJECT} of the pod is 'true'",
        certain=pod.labels is not None,
    )


# --- how it is captured ---------------------------------------------------------------------------


def _mode_none(pod: Pod, namespace: Namespace, policy: Policy) -> Decision | None:
    """Istio's plugin fails such a pod although its injector lets it through (field report 61)."""
    for found in names.given(pod):
        if found.key == "inbound_interception_mode" and found.value == "NONE":
            return _left(Reason.MODE_NONE, f"{found.source} is 'NONE': no traffic is redirected")
    return None


def _runtime_class(pod: Pod, namespace: Namespace, policy: Policy) -> Decision | None:
    """Rules in the namespace look right and catch nothing: sandboxes have a stack of their own.

    The pod asks for a capture that cannot be, so it fails closed (field report 40). The class is
    the API server's word and may have any name; what it means the runtime tells, once it runs.
    """
    told = {"runtimeClassName": pod.runtime_class, "the runtime's handler": pod.runtime_handler}
    what = next((what for what, name in told.items() if _is_sandbox(name, policy)), None)
    if what is None:
        return None
    after = "" if policy.closed else "; it starts uncaptured (failure policy open)"
    return _left(
        Reason.RUNTIME_CLASS,
        f"{what} is {shown(told[what])}: such a sandbox has a network stack of its own, in which "
        f"its traffic cannot be captured{after}",
        refuse=policy.closed,
    )


def _is_sandbox(name: str | None, policy: Policy) -> bool:
    words = re.split(r"[^a-z0-9]+", (name or "").lower())
    return any(word in words for word in policy.uncapturable_runtimes)


_RULES: tuple[Callable[[Pod, Namespace, Policy], Decision | None], ...] = (
    _own_agent,
    _excluded,
    _host_network,
    _unknown,
    _ambient,
    _init_container,
    _proxy_disabled,
    _no_proxy,
    _proxy_type,
    _inject_false,
    _no_status,
    _namespace_left,
    _mode_none,
    _runtime_class,
)


def _captured(pod: Pod, policy: Policy) -> Decision:
    raw = names.raw_settings(pod, policy.defaults)
    problems = tuple(note.text for note in names.mistakes(pod, raw))
    if problems:
        certain = pod.containers is not None
        return _invalid(pod, problems, remarks(pod, None), certain=certain)
    return Decision(
        captured=True,
        reason=Reason.INJECTED,
        text=_why_captured(pod),
        settings=raw,
        warnings=remarks(pod, raw),
        certain=pod.containers is not None and pod.labels is not None,
    )


def _invalid(
    pod: Pod, problems: tuple[str, ...], warnings: tuple[str, ...], *, certain: bool
) -> Decision:
    return Decision(
        captured=False,
        reason=Reason.INVALID_ANNOTATIONS,
        text=f"the capture of {pod.title} is described wrongly: {'; '.join(problems)}",
        refuse=True,
        problems=problems,
        warnings=warnings,
        certain=certain,
    )


def _why_captured(pod: Pod) -> str:
    if pod.proxy is None:
        return (
            f"annotation {names.STATUS} says that a sidecar was injected; its containers are not "
            f"known here, so its proxy is taken to run as user and group 1337 without DNS capture"
        )
    kind = "native sidecar" if pod.proxy.native_sidecar else "container"
    return f"{kind} {PROXY} is in the pod and annotation {names.STATUS} is there"
