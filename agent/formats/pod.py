"""Manifests that people write: the pod in them, its settings, and what is in the wrong place."""

from collections.abc import Mapping
from typing import Any

from agent.formats import kube
from agent.model.annotations import ANNOTATIONS, CAPTURE_NAMES, DEFAULTS, raw_settings

__all__ = ["ANNOTATIONS", "DEFAULTS", "misplaced", "pod_of", "settings"]


def pod_of(document: object) -> Mapping[str, Any] | None:
    """Return the pod, or the pod template, in a manifest; None if it holds neither."""
    if not isinstance(document, Mapping):
        return None
    if document.get("kind") == "Pod":
        return document
    spec = document.get("spec")
    if isinstance(spec, Mapping) and isinstance(spec.get("jobTemplate"), Mapping):
        spec = spec["jobTemplate"].get("spec")  # a CronJob's, whose jobs have the template
    if isinstance(spec, Mapping) and isinstance(spec.get("template"), Mapping):
        return dict(spec["template"])
    return None


def settings(pod: Mapping[str, Any]) -> dict[str, object]:
    """Return the raw settings of a pod: its annotations, and its proxy container's environment.

    Raises: InvalidSettings if the manifest has another shape than a pod's.
    """
    return raw_settings(kube.pod(pod))


def misplaced(document: object) -> tuple[str, ...]:
    """Return a sentence for every annotation that stands on the workload and not on its pods.

    Nothing reads it there, and nobody else says so (field report 58).
    """
    template = pod_of(document)
    if template is None or template is document or not isinstance(document, Mapping):
        return ()
    found = []
    for kind in ("annotations", "labels"):
        metadata = document.get("metadata")
        written = metadata.get(kind) if isinstance(metadata, Mapping) else None
        there = written if isinstance(written, Mapping) else {}
        found += [
            f"metadata.{kind}: {name} has no effect here: it belongs to the pod template"
            for name in sorted(CAPTURE_NAMES)
            if name in there
        ]
    return tuple(found)
