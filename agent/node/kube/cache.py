"""What the API server has said of this node's pods and of all namespaces, also over a restart.

It is a cache in the plain sense: while the API server cannot be reached, decisions go on from it.
Only what decisions are made of is kept: no environment but that of the proxy, no arguments, no copy
of a manifest in an annotation. The file can be lost without harm.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from agent.formats import kube
from agent.kernel import files
from agent.model import annotations as names
from agent.model.errors import AgentError, InvalidSettings
from agent.model.mesh import outside_the_mesh
from agent.model.pod import PROXY, Container, Namespace, Pod
from agent.node.kube.client import Document
from agent.node.source import Described

log = logging.getLogger(__name__)

FILE = "kubernetes.json"
# The kubelet's own pods have a twin in the API, whose uid the runtime has never heard of.
CONFIG_HASH = "kubernetes.io/config.hash"
MIRROR = "kubernetes.io/config.mirror"
DROPPED_ANNOTATIONS = frozenset({"kubectl.kubernetes.io/last-applied-configuration"})
KEPT_VARIABLES = frozenset({names.DISABLE_ENVOY, names.MODE_VARIABLE, *names.SWITCHES})
KEPT_NAMESPACE_LABELS = (names.INJECTION, names.REVISION, names.DATAPLANE_MODE)

Name = tuple[str, str]
"""Namespace and name of a pod."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownPod:
    """A pod as the API server has it.

    `uids` are those by which the runtime and the API server may call it. `replaced` tells that
    a controller would make another one if it were deleted, `ending` that it was deleted, and has
    until its grace period is over.
    """

    pod: Pod
    uids: tuple[str, ...]
    replaced: bool
    ending: bool
    created: float  # seconds since the epoch

    @property
    def name(self) -> Name:
        return self.pod.namespace, self.pod.name


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownNamespace:
    """A namespace; `was_in` tells that its labels have asked for injection at some time."""

    name: str
    uid: str
    labels: Mapping[str, str]
    was_in: bool

    def namespace(self) -> Namespace:
        found = Namespace(name=self.name, labels=self.labels)
        return replace(found, left=self.was_in and bool(outside_the_mesh(found)))


class _Kept(msgspec.Struct):
    """The file."""

    node: str
    pods: list[KnownPod]
    namespaces: list[KnownNamespace]


class Cache:
    """All that is known. `changed` is told of every change that may matter to a decision."""

    def __init__(self, node: str, changed: Callable[[Described], None]) -> None:
        self.node = node
        self.known_pods: dict[Name, KnownPod] = {}
        self.known_namespaces: dict[str, KnownNamespace] = {}
        self.pods = PodKeeper(self)
        self.namespaces = NamespaceKeeper(self)
        self._changed = changed

    def tell(self, pods: Iterable[Name] = (), namespaces: Iterable[str] = ()) -> None:
        """Say what is new or another. That one is gone changes nothing: what is decided stays."""
        self._changed(Described(pods=frozenset(pods), namespaces=frozenset(namespaces)))

    # --- what decisions are made of (see agent.node.source.Facts) ---------------------------------

    def pod(self, namespace: str, name: str, uid: str) -> Pod | None:
        """Return the pod, if it is the one that is called so; one without a uid is."""
        known = self.known(namespace, name, uid)
        return known.pod if known else None

    def known(self, namespace: str, name: str, uid: str) -> KnownPod | None:
        known = self.known_pods.get((namespace, name))
        return known if known and (not uid or uid in known.uids) else None

    def namespace(self, name: str) -> Namespace:
        known = self.known_namespaces.get(name)
        return known.namespace() if known else Namespace(name=name)

    # --- the file ---------------------------------------------------------------------------------

    def load(self, folder: Path) -> None:
        """Take in what was known before the agent was started; whatever is odd is passed over."""
        try:
            kept = msgspec.json.decode((folder / FILE).read_bytes(), type=_Kept)
        except (OSError, msgspec.MsgspecError, RecursionError, ValueError):
            return
        if kept.node == self.node:
            self.known_pods = {pod.name: pod for pod in kept.pods}
            self.known_namespaces = {found.name: found for found in kept.namespaces}

    def save(self, folder: Path) -> None:
        """Write the file. That it cannot be written is logged: it would only have saved time."""
        kept = _Kept(
            node=self.node,
            pods=list(self.known_pods.values()),
            namespaces=list(self.known_namespaces.values()),
        )
        try:
            files.replace(folder / FILE, msgspec.json.encode(kept))
        except AgentError as error:
            log.warning("pods are not remembered over a restart", extra={"cause": str(error)})


class PodKeeper:
    """This node's pods; see `agent.node.kube.reflector.Keeper`."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache

    def replace(self, objects: list[Document]) -> None:
        found = {pod.name: pod for pod in map(self.read, objects) if pod}
        before, self._cache.known_pods = self._cache.known_pods, found
        self._cache.tell(pods={name for name in found if before.get(name) != found[name]})

    def put(self, thing: Document) -> None:
        pod = self.read(thing)
        if pod is None:
            self.drop(thing)  # it has another node now, or nothing that can be read
        elif self._cache.known_pods.get(pod.name) != pod:
            self._cache.known_pods[pod.name] = pod
            self._cache.tell(pods=[pod.name])

    def drop(self, thing: Document) -> None:
        metadata = _mapping(thing, "metadata")
        name = (str(metadata.get("namespace")), str(metadata.get("name")))
        known = self._cache.known_pods.get(name)
        if known is not None and metadata.get("uid") in known.uids:
            del self._cache.known_pods[name]
            self._cache.tell()

    def read(self, thing: Document) -> KnownPod | None:
        """Return a pod of this node; a server that sends others, or no pods, is not believed."""
        if _mapping(thing, "spec").get("nodeName") != self._cache.node:
            return None
        with contextlib.suppress(InvalidSettings):
            pod, _ = kube.pod_and_mistakes(thing)
            if pod.namespace and pod.name and pod.uid:
                return _known(pod, _mapping(thing, "metadata"))
        return None


def _known(pod: Pod, metadata: Mapping[str, Any]) -> KnownPod:
    written = pod.annotations or {}
    uids = {pod.uid, written.get(CONFIG_HASH, "")} - {""}
    owners = metadata.get("ownerReferences")
    owned = any(
        isinstance(owner, dict) and owner.get("controller") is True and owner.get("kind") != "Node"
        for owner in (owners if isinstance(owners, list) else ())
    )
    return KnownPod(
        pod=_bare(pod),
        uids=tuple(sorted(uids)),
        replaced=owned and MIRROR not in written,
        ending=bool(metadata.get("deletionTimestamp")),
        created=_seconds(metadata.get("creationTimestamp")),
    )


def _seconds(timestamp: object) -> float:
    """Return when it was; where that cannot be told, now."""
    try:
        return datetime.fromisoformat(str(timestamp)).timestamp()
    except (ValueError, OverflowError, OSError):
        return time.time()


def _bare(pod: Pod) -> Pod:
    """Return a pod without what may be secret and no decision is made of."""
    written = {k: v for k, v in (pod.annotations or {}).items() if k not in DROPPED_ANNOTATIONS}
    containers = pod.containers
    if containers is not None:
        containers = tuple(map(_without_secrets, containers))
    return replace(pod, annotations=written, labels=pod.labels or {}, containers=containers)


def _without_secrets(container: Container) -> Container:
    if container.name != PROXY:
        return replace(container, args=(), env={})
    kept = {name: value for name, value in container.env.items() if name in KEPT_VARIABLES}
    return replace(container, env=kept)


class NamespaceKeeper:
    """All namespaces; see `agent.node.kube.reflector.Keeper`."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache

    def replace(self, objects: list[Document]) -> None:
        found = {one.name: one for one in map(self._read, objects) if one}
        before, self._cache.known_namespaces = self._cache.known_namespaces, found
        self._cache.tell(namespaces={name for name in found if before.get(name) != found[name]})

    def put(self, thing: Document) -> None:
        found = self._read(thing)
        if found and self._cache.known_namespaces.get(found.name) != found:
            self._cache.known_namespaces[found.name] = found
            self._cache.tell(namespaces=[found.name])

    def drop(self, thing: Document) -> None:
        name = str(_mapping(thing, "metadata").get("name"))
        if self._cache.known_namespaces.pop(name, None) is not None:
            self._cache.tell()

    def _read(self, thing: Document) -> KnownNamespace | None:
        try:
            found = kube.namespace(thing)
        except InvalidSettings:
            return None
        if not found.name:
            return None
        uid = str(_mapping(thing, "metadata").get("uid") or "")
        kept = {k: v for k, v in (found.labels or {}).items() if k in KEPT_NAMESPACE_LABELS}
        before = self._cache.known_namespaces.get(found.name)
        was_in = before is not None and before.uid == uid and before.was_in
        inside = not outside_the_mesh(Namespace(name=found.name, labels=kept))
        return KnownNamespace(name=found.name, uid=uid, labels=kept, was_in=was_in or inside)


def _mapping(thing: Document, key: str) -> Mapping[str, Any]:
    found = thing.get(key)
    return found if isinstance(found, dict) else {}
