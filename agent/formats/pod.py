"""Manifests that people write: the documents and the pods in them, and their settings."""

from collections.abc import Iterator, Mapping
from typing import Any

from agent.formats import kube
from agent.model import ambient_pod
from agent.model.annotations import ANNOTATIONS, DEFAULTS, mistakes, raw_settings
from agent.model.note import Note, Place
from agent.model.values import AMBIENT, SIDECAR

__all__ = ["ANNOTATIONS", "DEFAULTS", "members", "place_of_pod", "pod_of", "settings"]

TEMPLATE: Place = ("spec", "template")
JOB_TEMPLATE: Place = ("spec", "jobTemplate", "spec", "template")
# Where the kinds of Kubernetes have their pods.
PLACES: Mapping[str, Place] = {
    "Pod": (),
    "PodTemplate": ("template",),
    "CronJob": JOB_TEMPLATE,
    **dict.fromkeys(
        ("DaemonSet", "Deployment", "Job", "ReplicaSet", "ReplicationController", "StatefulSet"),
        TEMPLATE,
    ),
}
MAX_LISTS = 10  # a list in a list


def members(document: object) -> Iterator[tuple[Place, Mapping[str, Any]]]:
    """Yield the documents in a document: itself, or what a `List` holds, with their places.

    What a `PodList` holds need not say that it is a Pod.
    """
    todo: list[tuple[Place, object]] = [((), document)]
    while todo:
        place, found = todo.pop(0)
        if not isinstance(found, Mapping):
            continue
        items = found.get("items")
        kind = str(found.get("kind"))
        if kind.endswith("List") and isinstance(items, list):
            if len(place) < 2 * MAX_LISTS:
                inner = {"kind": kind.removesuffix("List")} if kind != "List" else {}
                todo[:0] = [
                    (
                        (*place, "items", at),
                        {**inner, **item} if isinstance(item, Mapping) else item,
                    )
                    for at, item in enumerate(items)
                ]
        else:
            yield place, found


def place_of_pod(document: Mapping[str, Any]) -> Place | None:
    """Return where a document holds its pod, or its pod template; None if it has none.

    Other kinds than Kubernetes' own may have a template of pods where a Deployment has it.
    """
    kind = document.get("kind")
    place = PLACES.get(kind) if isinstance(kind, str) else None
    if place is not None and isinstance(_at(document, place), Mapping):
        return place
    for place in (TEMPLATE, JOB_TEMPLATE):
        template = _at(document, place)
        spec = template.get("spec") if isinstance(template, Mapping) else None
        if isinstance(spec, Mapping) and isinstance(spec.get("containers"), list):
            return place
    return None


def _at(document: object, place: Place) -> object:
    for step in place:
        document = document.get(step) if isinstance(document, Mapping) else None
    return document


def pod_of(document: object) -> Mapping[str, Any] | None:
    """Return the pod, or the pod template, in a manifest; None if it holds neither."""
    if not isinstance(document, Mapping):
        return None
    place = place_of_pod(document)
    found = None if place is None else _at(document, place)
    return found if isinstance(found, Mapping) else None


def settings(
    pod: Mapping[str, Any], mode: str = SIDECAR
) -> tuple[dict[str, object], tuple[Note, ...]]:
    """Return the raw settings of a pod, and what is wrong with them or with its manifest.

    They are its annotations, and its proxy container's environment; those of an ambient pod are
    what it says otherwise than its node's agent.
    """
    found, notes = kube.pod_and_mistakes(pod)
    if mode == AMBIENT:
        return ambient_pod.overrides(found), (*notes, *ambient_pod.mistakes(found))
    raw = raw_settings(found)
    return raw, (*notes, *mistakes(found, raw))
