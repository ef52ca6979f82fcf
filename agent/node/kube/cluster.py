"""All that the agent has to do with the API server, as one source that runs as long as it is asked.

What the account of the agent must be allowed stands in `rights`.
"""

import asyncio
import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path

from agent.model.pod import Namespace, Pod
from agent.node.config import Kubernetes
from agent.node.feed import TooSlow
from agent.node.kube.access import Credentials
from agent.node.kube.announcer import Announcer, Subject
from agent.node.kube.around import Around
from agent.node.kube.client import ApiClient
from agent.node.kube.repair import DELETE, MARK, Repair
from agent.node.kube.source import KubeSource
from agent.node.kube.taint import TaintKeeper
from agent.node.pod import Wish
from agent.node.source import KUBERNETES, Update

HOST = "host"  # what the agent calls the node itself
NODE_NAMESPACE = "default"  # where Events about nodes are


class Cluster:
    """See `agent.node.source.Source` and `Facts`. Run it once."""

    name = KUBERNETES

    def __init__(
        self, credentials: Credentials, config: Kubernetes, state_dir: Path, around: Around
    ) -> None:
        self.node = node_name(config)
        self._config = config
        self._around = around
        self._client = ApiClient(credentials)
        self._source = KubeSource(self._client, self.node, state_dir, moved=around.moved)
        self._repair = Repair(
            self._client,
            config,
            self._source.cache,
            around.events,
            around.uncaptured,
            started=around.started,
            own_namespace=around.own_namespace,
        )
        self._announcer = Announcer(
            self._client,
            around.feed,
            self.node,
            subject=self._subject,
            connected=lambda: self.connected,
        )
        self._taint = TaintKeeper(self._client, self.node, config.taint or "", around.ready)

    @property
    def connected(self) -> bool:
        return self._source.connected

    @property
    def detail(self) -> str:
        """What is known, and what else the server does not let the agent do."""
        others = (self._source, self._repair, self._announcer, self._taint)
        return "; ".join(filter(None, (self._source.detail, *(one.problem for one in others))))

    async def run(self, sink: Callable[[Update], None]) -> None:
        """Do everything until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._source.run(sink))
            group.create_task(self._repair.run())
            group.create_task(self._hear_of_captures())
            if self._config.events:
                group.create_task(self._announcer.run())
            if self._config.taint:
                group.create_task(self._taint.run())

    def _subject(self, label: str) -> Subject | None:
        if label == HOST:
            return Subject(kind="Node", namespace=NODE_NAMESPACE, name=self.node, uid=self.node)
        namespace, _, name = label.partition("/")
        known = self._source.cache.known_pods.get((namespace, name))
        if known is None:
            return None
        return Subject(kind="Pod", namespace=namespace, name=name, uid=known.pod.uid)

    async def _hear_of_captures(self) -> None:
        while True:
            try:
                with self._around.feed.watch() as watch:
                    while True:
                        change = await watch.next()
                        if change.kind == "event" and change.what["kind"] == "captured":
                            self._repair.captured(str(change.what["pod"]))
            except TooSlow:
                continue

    # --- what others ask it -----------------------------------------------------------------------

    def late(self, wish: Wish, danger: str) -> str:
        """See `agent.node.reconciler.Remedy`."""
        return self._repair.late(wish, danger)

    async def spoke(self, patience_s: float) -> None:
        await self._source.spoke(patience_s)

    def pod(self, namespace: str, name: str, uid: str) -> Pod | None:
        return self._source.pod(namespace, name, uid)

    def namespace(self, name: str) -> Namespace:
        return self._source.namespace(name)

    async def look_up(self, namespace: str, name: str, uid: str) -> Pod | None:
        return await self._source.look_up(namespace, name, uid)


def node_name(config: Kubernetes) -> str:
    """Return this node's name in the cluster: as configured, as the pod is told, or the host's."""
    return config.node or os.environ.get("NODE_NAME") or socket.gethostname().lower()


def rights(config: Kubernetes) -> Mapping[str, tuple[str, ...]]:
    """Return the verbs by resource (all of them in the core group) that the agent makes use of."""
    policies = {config.repair, config.unsafe}
    written = ("patch",) * (MARK in policies) + ("delete",) * (DELETE in policies)
    found = {"pods": ("get", "list", "watch", *written), "namespaces": ("list", "watch")}
    if config.events:
        found["events"] = ("create", "patch")
    if config.taint:
        found["nodes"] = ("get", "patch")
    return found
