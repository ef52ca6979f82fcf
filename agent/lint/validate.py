"""Lints manifests: for every document what is decided about its pods, and every mistake in it.

The decision is the daemon's (`agent.model.decision`), foreseen for pods that are not injected yet;
so are the settings and most of what is said of them. Here they get their places, and what only a
manifest can have wrong comes on top. Pure: bytes in, a report out. No cluster is asked.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agent.formats import kube
from agent.formats import pod as pods
from agent.lint import admission, metadata, proxy_config
from agent.lint import pods as pod_checks
from agent.lint.manifest import Manifest, manifests
from agent.lint.report import Problem, Report, Severity, Verdict
from agent.model import ambient_pod, remarks
from agent.model import annotations as names
from agent.model.decision import Decision, Reason
from agent.model.injection import asks, foresee
from agent.model.note import Note, Place
from agent.model.pod import AUTO, Namespace, Pod, Policy, parsable
from agent.model.settings import dump, parse
from agent.model.values import AMBIENT

# Pods that are captured, or would be if they were described rightly.
_CAPTURED = frozenset({Reason.INJECTED, Reason.INVALID_ANNOTATIONS, Reason.RUNTIME_CLASS})
MAX_ANNOTATIONS = 256 * 1024  # bytes of names and values together (TotalAnnotationSizeLimitB)
NO_POD = "no-pod"
INVALID = "invalid-manifest"


def validate(
    files: Iterable[tuple[str, bytes]], *, namespace: str = "default", policy: Policy | None = None
) -> Report:
    """Return what is found in files, each given by its name and its bytes.

    `namespace` is that of documents which name none. Never raises.
    """
    problems: list[Problem] = []
    order: dict[str, int] = {}
    found: list[Manifest] = []
    written = False
    for file, data in files:
        order.setdefault(file, len(order))
        found += manifests(file, data, problems)
        written = written or bool(data.strip())
    if order and not written:
        problems.append(_nothing(next(iter(order))))
    known = dict(_namespaces(found))
    verdicts = []
    for manifest in found:
        own = _Check(manifest, known, namespace, policy or Policy())
        verdicts.append(own.verdict())
        problems += own.problems
    ordered = sorted(dict.fromkeys(problems), key=lambda one: (order[one.file], one.line))
    return Report(tuple(verdicts), tuple(ordered))


def _nothing(file: str) -> Problem:
    """Return the warning about input that is empty: what should have made it failed, mostly."""
    return Problem(
        severity=Severity.WARNING,
        file=file,
        line=1,
        path="",
        message="there is nothing here: no document was judged",
    )


def _namespaces(found: Sequence[Manifest]) -> Iterator[tuple[str, Mapping[str, str]]]:
    for manifest in found:
        if manifest.kind == "Namespace" and manifest.name:
            labels = manifest.metadata.get("labels")
            texts = labels.items() if isinstance(labels, Mapping) else ()
            yield manifest.name, {k: v for k, v in texts if isinstance(v, str)}


@dataclass(frozen=True, slots=True)
class _Found:
    """A pod as far as it can be read, what is wrong with its values, and what is decided."""

    pod: Pod
    mistakes: tuple[Note, ...]
    decision: Decision
    ambient: bool  # asks for the node's proxy

    @property
    def captured(self) -> bool:
        return self.decision.reason in _CAPTURED and not self.ambient

    @property
    def may_be(self) -> bool:
        """Whether somebody may still capture it: the injector by what is not written here."""
        open_end = self.decision.reason is Reason.NOT_INJECTED and not self.decision.certain
        return self.captured or open_end or self.decision.reason is Reason.INIT_CONTAINER


class _Check:
    """Looks at one document."""

    def __init__(
        self,
        manifest: Manifest,
        namespaces: Mapping[str, Mapping[str, str]],
        default: str,
        policy: Policy,
    ) -> None:
        self.problems: list[Problem] = []
        self._manifest = manifest
        self._policy = policy
        name = manifest.word("namespace") or default
        self._namespace = Namespace(name=name, labels=namespaces.get(name))

    def _add(self, severity: Severity, notes: Iterable[Note], within: Place = ()) -> None:
        self.problems += (self._manifest.problem(severity, note, within) for note in notes)

    def verdict(self) -> Verdict:
        """Return the verdict; the problems are then in `problems`."""
        manifest = self._manifest
        pod_at = pods.place_of_pod(manifest.content)
        self._add(Severity.WARNING, metadata.misplaced(manifest, pod_at))
        if pod_at is not None:
            return self._of_pod(pod_at)
        if manifest.kind == "Namespace":
            self._of_namespace()
        text = f"a {manifest.kind} has no pods"
        if manifest.kind in pods.PLACES:
            place = pods.PLACES[manifest.kind]
            text = f"there is no pod template in this {manifest.kind}"
            self._add(Severity.ERROR, [Note(message=text, at=place)])
        return self._said(None, NO_POD, text)

    def _said(
        self,
        captured: bool | None,
        reason: str,
        text: str,
        settings: Mapping[str, object] | None = None,
    ) -> Verdict:
        manifest = self._manifest
        return Verdict(
            file=manifest.file,
            line=manifest.line,
            kind=manifest.kind,
            namespace=manifest.word("namespace"),
            name=manifest.name,
            captured=captured,
            reason=reason,
            text=text,
            settings=settings,
        )

    def _of_namespace(self) -> None:
        found = [self._manifest.metadata.get(key) for key in ("labels", "annotations")]
        labels, annotations = (one if isinstance(one, Mapping) else {} for one in found)
        self._add(Severity.WARNING, metadata.of_namespace(labels, annotations))

    # --- pods ------------------------------------------------------------------------------------

    def _of_pod(self, at: Place) -> Verdict:
        document = pods.pod_of(self._manifest.content) or {}
        pod, unreadable = kube.pod_and_mistakes(document)
        oversize = _oversize(pod)
        if oversize:
            unreadable = (*unreadable, oversize)
            pod = replace(pod, annotations={})
        self._add(Severity.ERROR, unreadable, at)
        found = self._decide(self._identified(pod))
        self._add(Severity.ERROR, found.mistakes, at)
        self._add(Severity.WARNING, metadata.of_pod(found.pod, document), at)
        spec = document.get("spec")
        self._add(Severity.WARNING, _warnings(found, spec if isinstance(spec, Mapping) else {}), at)
        if isinstance(spec, Mapping) and found.decision.captured:
            self._add(Severity.INFO, pod_checks.remarks(found.pod, spec), at)
        if unreadable:
            return self._said(None, INVALID, "Kubernetes refuses it: see its errors")
        decision = found.decision
        settings = _shown(decision.settings) if decision.settings is not None else None
        return self._said(decision.captured, decision.reason.value, decision.text, settings)

    def _identified(self, pod: Pod) -> Pod:
        """Return a pod by the name of its workload, in the workload's namespace."""
        return replace(pod, name=self._manifest.name, namespace=self._namespace.name)

    def _decide(self, pod: Pod) -> _Found:
        # Unlike a running pod's, a manifest without labels or annotations is known to have none.
        pod = replace(pod, labels=pod.labels or {}, annotations=pod.annotations or {})
        pod = replace(pod, containers=pod.containers or ())
        decision = foresee(pod, self._namespace, self._policy, proxy_config.variables(pod))
        ambient = self._policy.mode == AMBIENT and not asks(pod, self._namespace)
        if ambient and ambient_pod.asks(pod, self._namespace):
            return _Found(pod, ambient_pod.mistakes(pod), decision, ambient=True)
        raw = names.raw_settings(pod, self._policy.defaults)
        mistakes = names.mistakes(pod, raw)
        none = {one.at for one in names.given(pod) if one.value == "NONE"}
        mistakes = tuple(note for note in mistakes if note.at not in none)  # a mode, if no capture
        return _Found(pod, mistakes, decision, ambient=False)


def _oversize(pod: Pod) -> Note | None:
    """Kubernetes has a limit, and what is beyond it need not be looked at."""
    size = sum(
        len(f"{name}{text}".encode(errors="replace")) for name, text in _annotations(pod).items()
    )
    if size <= MAX_ANNOTATIONS:
        return None
    message = f"the annotations have {size} bytes together, and at most {MAX_ANNOTATIONS} may be"
    return Note(message=message, at=("metadata", "annotations"))


def _annotations(pod: Pod) -> Mapping[str, str]:
    return pod.annotations or {}


def _warnings(found: _Found, spec: Mapping[str, Any]) -> Iterator[Note]:
    pod, decision = found.pod, found.decision
    if found.ambient:
        yield from (*remarks.notes(pod, None), *ambient_pod.notes(pod))
        return
    right, raw = _without_mistakes(found)
    yield from remarks.notes(right, raw if found.may_be else None)
    if found.may_be:
        yield from admission.refused(right)
        yield from proxy_config.refused(right)
        yield from pod_checks.ports(pod, spec)
    else:
        yield from _without_effect(pod, decision)
    if found.captured and raw is not None:
        yield from pod_checks.warnings(pod, spec, parse(parsable(raw)))
    if decision.refuse and not found.mistakes:
        yield Note(message=decision.text, at=("spec", "runtimeClassName"))


def _without_mistakes(found: _Found) -> tuple[Pod, Mapping[str, object] | None]:
    """Return a pod without the annotations that are wrong, and its settings if they are right."""
    wrong = {note.at for note in found.mistakes}
    written = _annotations(found.pod).items()
    right = {name: value for name, value in written if names.annotation_at(name) not in wrong}
    pod = replace(found.pod, annotations=right)
    raw = names.raw_settings(pod)
    return pod, None if names.mistakes(pod, raw) else raw


def _without_effect(pod: Pod, decision: Decision) -> Iterator[Note]:
    """What asks for a capture on a pod that gets none."""
    if decision.reason is Reason.HOST_NETWORK and asks(pod, Namespace(name=pod.namespace)):
        message = "hostNetwork is true: the pod uses the node's network, and no sidecar is added"
        yield Note(message=message, at=("spec", "hostNetwork"))
    if decision.reason is Reason.MODE_NONE:
        return
    for name in _annotations(pod):
        if name in names.ANNOTATIONS or name in (names.REROUTE, names.KUBEVIRT):
            message = f"annotation {name} has no effect, for the pod is not captured"
            yield Note(message=message, hint=decision.text, at=names.annotation_at(name), key=True)


def _shown(raw: Mapping[str, object]) -> dict[str, object]:
    """Return the settings as `plan` prints them; what only the pod's network tells stays open."""
    shown: dict[str, object] = dump(parse(parsable(raw)))
    if raw.get("enable_ipv6", AUTO) == AUTO:
        shown["enable_ipv6"] = AUTO
    return shown
