"""What labels and annotations say of a pod's place in the mesh, as Istio's injector reads them."""

from agent.model import annotations as names
from agent.model.pod import Namespace, Pod


def outside_the_mesh(namespace: Namespace) -> str:
    """Return why no pod of a namespace is expected to be injected, or nothing."""
    if namespace.name in names.NEVER_INJECTED:
        return f"Istio never injects pods of namespace {namespace.name}"
    if namespace.labels is None:
        return ""
    injection = namespace.labels.get(names.INJECTION)
    if injection == "disabled":
        return f"label {names.INJECTION} of namespace {namespace.name} is 'disabled'"
    marks = (injection, namespace.labels.get(names.REVISION))
    if any(marks) or namespace.labels.get(names.DATAPLANE_MODE) == "ambient":
        return ""
    return (
        f"namespace {namespace.name} has neither label {names.INJECTION} nor label {names.REVISION}"
    )


def inject_word(pod: Pod) -> tuple[str, str | None]:
    """Return what says whether a sidecar is wanted: the label, or else the annotation."""
    label = pod.label(names.INJECT)
    if label is not None:
        return "label", label
    return "annotation", pod.annotation(names.INJECT)


def templates(pod: Pod) -> frozenset[str]:
    """Return the templates that the pod asks the injector for."""
    listed = (pod.annotation(names.TEMPLATES) or "").split(",")
    return frozenset(item.strip() for item in listed)
