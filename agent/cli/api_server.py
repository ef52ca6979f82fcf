"""The API server's part in the daemon, where there is one: who listens, and what it is told."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from agent.cli.parts import Parts
from agent.node.events import Events
from agent.node.feed import Feed
from agent.node.kube.around import Around
from agent.node.reconciler import Reconciler
from agent.node.roster import Roster
from agent.node.source import KUBERNETES, NOTHING_KNOWN

if TYPE_CHECKING:  # it brings what an agent without an API server never needs
    from agent.node.kube.cluster import Cluster

# How long sources wait for the API server: what it says of pods decides what is done with them.
PATIENCE_S = 3.0


@dataclass(frozen=True, slots=True)
class ApiServer:
    """Whichever API server the configuration names at the moment, or none."""

    parts: Parts
    roster: Roster
    reconciler: Reconciler
    started: float = field(default_factory=time.time)

    @property
    def cluster(self) -> "Cluster | None":
        found: Cluster | None = self.parts.subject(KUBERNETES)
        return found

    def use(self) -> bool:
        """Have it asked from now on; return whether it is another one than before."""
        facts, before = self.cluster or NOTHING_KNOWN, self.roster.facts
        self.roster.facts = facts
        self.reconciler.remedy = self.cluster.late if self.cluster else None
        return facts is not before

    async def ahead(self) -> None:
        """Return when it has spoken, or is not there."""
        if self.cluster is not None:
            await self.cluster.spoke(PATIENCE_S)

    def around(
        self, events: Events, feed: Feed, moved: Callable[[], None], ready: Callable[[], bool]
    ) -> Around:
        return Around(
            events=events,
            feed=feed,
            moved=moved,
            ready=ready,
            uncaptured=self.reconciler.runs_uncaptured,
            started=self.started,
            own_namespace=own_namespace(),
        )


def own_namespace() -> str:
    """Return the namespace that the agent runs in as a pod, or nothing."""
    return os.environ.get("POD_NAMESPACE", "")
