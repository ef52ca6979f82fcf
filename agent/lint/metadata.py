"""Labels and annotations in places where nothing reads them (field report 58)."""

from collections.abc import Iterator, Mapping
from typing import Any

from agent.formats import pod as pods
from agent.lint.manifest import Manifest
from agent.model import annotations as names
from agent.model.injection import NATIVE
from agent.model.istio_names import BY_PREFIX
from agent.model.note import Note, Place, path
from agent.model.pod import Pod
from agent.model.remarks import misspelt
from agent.model.values import FALSE_WORDS, TRUE_WORDS, shown

# Prefixes under which every name is one of pods.
_POD_PREFIXES = (
    *("inject.istio.io", "proxy.istio.io", "readiness.status.sidecar.istio.io"),
    *("sidecar.istio.io", "status.sidecar.istio.io"),
)
POD_NAMES = names.CAPTURE_NAMES | {
    f"{prefix}/{name}" for prefix in _POD_PREFIXES for name in BY_PREFIX[prefix].split()
}
# Kinds of which it is certain that they hand their own labels and annotations to no pod.
_PASSING_NOTHING_ON = frozenset({*pods.PLACES, "Namespace", "Service", "ServiceAccount"}) - {"Pod"}
_MAX_OF_A_KIND = 100
KINDS = ("annotations", "labels")


def misplaced(manifest: Manifest, pod_at: Place | None) -> Iterator[Note]:
    """Yield what stands on the document, or beside `metadata`, and belongs to its pods."""
    if manifest.kind in _PASSING_NOTHING_ON:
        for holder in _holders(pod_at):
            yield from _on_another(manifest, holder, pod_at)
    for at in dict.fromkeys(
        ((), ("spec",), *(() if pod_at is None else (pod_at, (*pod_at, "spec"))))
    ):
        yield from _beside(_at(manifest.content, at), at)


def _holders(pod_at: Place | None) -> tuple[Place, ...]:
    """Return what has metadata of its own and is no pod: a CronJob's jobs, too."""
    return ((), pods.JOB_TEMPLATE[:2]) if pod_at == pods.JOB_TEMPLATE else ((),)


def _at(content: object, place: Place) -> Mapping[str, Any]:
    for step in place:
        content = content.get(step) if isinstance(content, Mapping) else None
    return content if isinstance(content, Mapping) else {}


def _on_another(manifest: Manifest, holder: Place, pod_at: Place | None) -> Iterator[Note]:
    for kind in KINDS:
        at = (*holder, "metadata", kind)
        of_pod = {} if pod_at is None else _at(manifest.content, (*pod_at, "metadata", kind))
        for name in list(_at(manifest.content, at))[:_MAX_OF_A_KIND]:
            if not isinstance(name, str) or (name in of_pod and name in names.KNOWN_NAMES):
                continue
            place = (*at, name)
            if name in POD_NAMES:
                yield _elsewhere(manifest, place, name, kind[:-1], pod_at)
            elif wrong := misspelt(name, kind[:-1]):
                yield Note(message=wrong.message, hint=wrong.hint, at=place, key=True)


def _elsewhere(manifest: Manifest, at: Place, name: str, kind: str, pod_at: Place | None) -> Note:
    right = "labels" if name == names.INJECT else "annotations"
    hint = ""
    if pod_at is not None:
        hint = f"put it under {path((*manifest.top, *pod_at, 'metadata', right))}"
    elif manifest.kind == "Namespace":
        hint = f"a namespace is asked for injection by its label {names.INJECTION}"
    message = f"{kind} {name} has no effect on a {manifest.kind}: it belongs to pods"
    return Note(message=message, hint=hint, at=at, key=True)


def _beside(parent: Mapping[str, Any], at: Place) -> Iterator[Note]:
    for kind in KINDS:
        found = parent.get(kind)
        known = [name for name in found if name in POD_NAMES] if isinstance(found, Mapping) else []
        for name in known[:_MAX_OF_A_KIND]:
            message = f"{kind[:-1]} {name} has no effect here: {kind} belong into metadata"
            yield Note(message=message, at=(*at, kind, name), key=True)


# --- pods ----------------------------------------------------------------------------------------


def of_pod(pod: Pod, document: Mapping[str, Any]) -> Iterator[Note]:
    """Yield what stands on a pod and is read from its namespace, or from its labels only."""
    raw = _at(document, ("metadata", "annotations"))
    for name in sorted(names.CAPTURE_NAMES & set(raw)):
        if raw[name] is None:
            yield Note(
                message=f'annotation {name} has no value, which counts as ""',
                hint='write "" if that is meant, or else the value',
                at=names.annotation_at(name),
            )
    for kind, written in (("annotation", pod.annotations), ("label", pod.labels)):
        if names.INJECTION in (written or {}):
            yield Note(
                message=f"{kind} {names.INJECTION} has no effect on a pod: it is for namespaces",
                hint=f'for one pod there is the label {names.INJECT}: "true"',
                at=("metadata", f"{kind}s", names.INJECTION),
                key=True,
            )
    label, annotation = pod.label(names.INJECT), pod.annotation(names.INJECT)
    if label in TRUE_WORDS and label != "true":
        yield Note(
            message=f"label {names.INJECT} is {shown(label)}: the injector goes by 'true' alone",
            hint='write "true"',
            at=("metadata", "labels", names.INJECT),
        )
    if annotation is None:
        return
    at = names.annotation_at(names.INJECT)
    if label is None:
        yield Note(
            message=f"annotation {names.INJECT} is deprecated: where a namespace asks for no "
            "injection, only a label of that name makes the injector look at the pod",
            hint=f"move it to metadata.labels as {names.INJECT}: {_quoted(annotation)}",
            at=at,
            key=True,
        )
    elif label != annotation:
        message = f"annotation {names.INJECT} is {shown(annotation)}, but the label {shown(label)}"
        yield Note(message=f"{message} wins", hint="take the annotation out", at=at)


def _quoted(text: str) -> str:
    return f'"{text}"' if text in TRUE_WORDS | FALSE_WORDS else shown(text)


def native_sidecar(pod: Pod) -> bool:
    """Whether the pod asks for a proxy that starts before its init containers."""
    return pod.annotation(NATIVE) in TRUE_WORDS


# --- namespaces ----------------------------------------------------------------------------------


def of_namespace(labels: Mapping[str, Any], annotations: Mapping[str, Any]) -> Iterator[Note]:
    """Yield what a namespace says that does not do what is meant."""
    for name in (names.INJECTION, names.REVISION, names.DATAPLANE_MODE):
        if name in annotations:
            message = f"annotation {name} has no effect: only a label of that name has"
            yield Note(message=message, at=names.annotation_at(name), key=True)
    injection = labels.get(names.INJECTION)
    if injection is not None and injection not in ("enabled", "disabled"):
        meant = "disabled" if injection in (*FALSE_WORDS, False) else "enabled"
        yield Note(
            message=f"label {names.INJECTION} is {shown(injection)}, which means nothing",
            hint=f"did you mean {meant}?",
            at=("metadata", "labels", names.INJECTION),
        )
    if injection == "enabled" and names.REVISION in labels:
        yield Note(
            message=f"label {names.REVISION} has no effect beside {names.INJECTION}",
            hint="keep one of the two",
            at=("metadata", "labels", names.REVISION),
            key=True,
        )
    mode = labels.get(names.DATAPLANE_MODE)
    if mode is not None and mode not in ("ambient", "none"):
        yield Note(
            message=f"label {names.DATAPLANE_MODE} is {shown(mode)}, which counts as 'none'",
            hint="write ambient or none",
            at=("metadata", "labels", names.DATAPLANE_MODE),
        )
