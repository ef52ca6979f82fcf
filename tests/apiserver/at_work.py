"""The part of the agent that has to do with the API server, at work in the test's own process."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from agent.node.config import Kubernetes
from agent.node.events import Events
from agent.node.feed import Feed
from agent.node.kube.access import Kubeconfig
from agent.node.kube.around import Around
from agent.node.kube.cluster import Cluster
from agent.node.pod import Wish
from tests.fakes import fake_api
from tests.fakes.fake_api import NODE
from tests.support.hearing import until
from tests.support.real_api import RealApi, ask

PODS = "/api/v1/namespaces/shop/pods"
NODES = "/api/v1/nodes"


class Agent:
    """The part of the agent that has to do with the server, and what it is told by the rest."""

    def __init__(self, api: RealApi, folder: Path, policy: Kubernetes) -> None:
        self.feed = Feed()
        self.events = Events(time.time, self.feed.publish)
        self.ready = True
        around = Around(
            events=self.events,
            feed=self.feed,
            moved=lambda: None,
            ready=lambda: self.ready,
            uncaptured=lambda _: True,
            started=time.time(),
            own_namespace="",
        )
        access = Kubeconfig(api.kubeconfig("agent", api.token()))
        self.cluster = Cluster(access, policy, folder / "state", around)

    def late(self, document: Any, danger: str = "") -> str:
        metadata = document["metadata"]
        wish = Wish(
            key=f"pod/{metadata['namespace']}/{metadata['name']}",
            namespace=metadata["namespace"],
            name=metadata["name"],
            uid=metadata["uid"],
            sandbox_id="s",
            netns=None,
            settings={},
            reason="injected",
            text="",
            source="cri",
        )
        return self.cluster.late(wish, danger)


@contextlib.asynccontextmanager
async def working(
    api: RealApi, folder: Path, policy: Kubernetes, *, listed: bool = True
) -> AsyncIterator[Agent]:
    """Have it work until the block ends, which begins when everything was listed."""
    made = Agent(api, folder, replace(policy, node=NODE))
    task = asyncio.create_task(made.cluster.run(lambda _: None))
    try:
        await until(lambda: (made.cluster.connected or not listed) and made.feed.watchers)
        yield made
    finally:
        task.cancel()
        await asyncio.wait([task])


def make(api: RealApi, name: str, **fields: Any) -> Any:
    made = fake_api.pod(name, kind="Pod", apiVersion="v1", **fields)
    return ask(api.admin, "POST", PODS, made)
