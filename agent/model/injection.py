"""What becomes of a pod that the injector has not seen yet: the pod of a manifest.

The injector is Istio's webhook. Which pods it is asked about, and what it then goes by, stands in
its configuration (namespace and object selectors) and in `injectRequired` of its code.
"""

from collections.abc import Mapping
from dataclasses import replace

from agent.model import annotations as names
from agent.model.decision import Decision, Reason, decide
from agent.model.mesh import inject_word, templates
from agent.model.pod import PROXY, Container, Namespace, Pod, Policy
from agent.model.values import TRUE_WORDS

NATIVE = f"{names.SIDECAR}nativeSidecar"
GRPC_AGENT, GATEWAY, SIDECAR = "grpc-agent", "gateway", "sidecar"


def foresee(
    pod: Pod, namespace: Namespace, policy: Policy, variables: Mapping[str, str] | None = None
) -> Decision:
    """Return what will be decided about the pod of a manifest. Pure, and never raises.

    A pod that has a sidecar is decided as it is. Of others it is told whether the injector will add
    one, and decided what that makes of it. `variables` are those that the manifest asks the
    injector to give to the proxy.
    """
    if pod.host_network or pod.annotation(names.STATUS) is not None:
        return decide(pod, namespace, policy)
    asked = asks(pod, namespace)
    if asked:
        found = decide(_injected(pod, variables or {}), namespace, policy)
        text = f"{asked}, so the injector adds a sidecar" if found.captured else found.text
        return replace(found, text=text)
    found = decide(pod, namespace, policy)
    open_to = inject_word(pod)[1] != "false"
    if found.reason is Reason.NOT_INJECTED and namespace.labels is None and open_to:
        where = f"namespace {namespace.name}" if namespace.name else "its namespace"
        text = f"{found.text}; one is added if {where} has label {names.INJECTION}=enabled"
        return replace(found, text=text, certain=False)
    return found


def asks(pod: Pod, namespace: Namespace) -> str:
    """Return what makes the injector add a sidecar, as text, or nothing.

    A word that is neither true nor false leaves it to the namespace.
    """
    of_namespace = namespace.labels or {}
    if inject_word(pod)[1] == "false" or of_namespace.get(names.INJECTION) == "disabled":
        return ""
    if of_namespace.get(names.INJECTION) == "enabled":
        return f"label {names.INJECTION} of namespace {namespace.name} is 'enabled'"
    if of_namespace.get(names.REVISION):
        return f"namespace {namespace.name} has label {names.REVISION}"
    if pod.label(names.INJECT) == "true":
        return f"label {names.INJECT} of the pod is 'true'"
    return f"the pod has label {names.REVISION}" if pod.label(names.REVISION) else ""


def _injected(pod: Pod, variables: Mapping[str, str]) -> Pod:
    asked = templates(pod)
    gateway = GATEWAY in asked and SIDECAR not in asked
    env: dict[str, str | None] = {**variables}
    if GRPC_AGENT in asked:
        env[names.DISABLE_ENVOY] = "true"
    native = pod.annotation(NATIVE) in TRUE_WORDS
    written = pod.proxy
    own = written or Container(name=PROXY, init=native, restart_policy="Always" if native else "")
    proxy = replace(
        own, args=own.args or ("proxy", "router" if gateway else SIDECAR), env={**env, **own.env}
    )
    others = tuple(one for one in pod.containers or () if one is not written)
    return replace(
        pod,
        annotations={**(pod.annotations or {}), names.STATUS: ""},
        containers=(proxy, *others) if native else (*others, proxy),
    )
