"""What tells the daemon which pods there are: one protocol, four kinds of update.

A source is level-triggered: an update says how things are, never what happened, so one that is lost
or comes twice does no harm. What a source does not know for sure it says so; nothing may be taken
from a pod because of what a source does not know.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from agent.model.pod import Namespace, Pod
from agent.model.values import Address

STATIC = "static"
KUBERNETES = "kubernetes"
"""The names of the sources that are the configuration and the API server."""


class PodKey(NamedTuple):
    """Which pod. A pod that is made anew under its old name has another uid."""

    namespace: str
    name: str
    uid: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PodRecord:
    """One pod that runs on this node, as one source sees it.

    `sandbox_id` names the network namespace for good: another one means another namespace, even
    at the same path. `netns` is a path in the node's mount namespace, or None where there is none
    (host network) or none is known yet. A pod that is not `ready` still has its namespace.
    `settings` is set only by sources that configure the capture themselves, `network` (the name of
    a CNI network) only by the plugin.
    """

    namespace: str
    name: str
    uid: str
    sandbox_id: str
    netns: str | None
    annotations: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    host_network: bool = False
    ips: tuple[Address, ...] = ()
    runtime_handler: str = ""
    ready: bool = True
    settings: Mapping[str, object] | None = None
    network: str = ""

    @property
    def key(self) -> PodKey:
        return PodKey(self.namespace, self.name, self.uid)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Every pod that the source knows. Pods that are neither here nor in `unknown` are gone.

    `unknown` are pods that exist and about which nothing (or nothing new) can be said now: what is
    known of them stays.
    """

    source: str
    pods: tuple[PodRecord, ...]
    unknown: frozenset[PodKey] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed:
    """A pod is new or differs from what was said of it before."""

    source: str
    pod: PodRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Gone:
    """A pod is gone, and its namespace with it."""

    source: str
    key: PodKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """What is known of pods, by namespace and name, and of namespaces is another than before.

    It says nothing of what runs: whoever decided about these asks the `Facts` and decides again.
    """

    pods: frozenset[tuple[str, str]] = frozenset()
    namespaces: frozenset[str] = frozenset()


Update = Snapshot | Changed | Gone | Described


class Facts(Protocol):
    """What the API server says: all of a pod, where a sandbox shows its labels at most."""

    def pod(self, namespace: str, name: str, uid: str) -> Pod | None:
        """Return what is known of a pod, nothing for another one of that name."""

    def namespace(self, name: str) -> Namespace:
        """Return what is known of a namespace, be it only its name."""

    async def look_up(self, namespace: str, name: str, uid: str) -> Pod | None:
        """Return the same of a pod that may be too new to be known; asks, but not for long."""


class NoFacts:
    """Nothing is known but what the sources say."""

    def pod(self, namespace: str, name: str, uid: str) -> Pod | None:
        return None

    def namespace(self, name: str) -> Namespace:
        return Namespace(name=name)

    async def look_up(self, namespace: str, name: str, uid: str) -> Pod | None:
        return None


NOTHING_KNOWN = NoFacts()


class Source(Protocol):
    """One place that knows of pods.

    `connected` is true while what was said is the present state; `detail` says in one sentence how
    things stand, for people. While a source is not connected, what it said before stays.
    """

    @property
    def name(self) -> str: ...

    @property
    def connected(self) -> bool: ...

    @property
    def detail(self) -> str: ...

    async def run(self, sink: Callable[[Update], None]) -> None:
        """Tell `sink` how things are until cancelled: a Snapshot first, and after every gap.

        `sink` is called in the event loop and must not block. What it raises ends the source.
        """
