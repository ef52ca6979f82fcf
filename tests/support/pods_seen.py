"""What somebody knows who listens to a source: a sink that keeps the state and can be waited on."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from agent.node.source import Changed, Gone, PodKey, PodRecord, Snapshot, Source, Update


class PodsSeen:
    """Applies updates as the daemon has to, and keeps them all."""

    def __init__(self) -> None:
        self.pods: dict[PodKey, PodRecord] = {}
        self.updates: list[Update] = []
        self._new = asyncio.Event()

    def sink(self, update: Update) -> None:
        self.updates.append(update)
        if isinstance(update, Snapshot):
            kept = {key: pod for key, pod in self.pods.items() if key in update.unknown}
            self.pods = {**kept, **{pod.key: pod for pod in update.pods}}
        elif isinstance(update, Changed):
            self.pods[update.pod.key] = update.pod
        elif isinstance(update, Gone):
            self.pods.pop(update.key, None)
        self._new.set()

    @property
    def snapshots(self) -> int:
        return sum(isinstance(update, Snapshot) for update in self.updates)

    def names(self) -> set[str]:
        return {key.name for key in self.pods}

    def named(self, name: str) -> PodRecord:
        [found] = [pod for key, pod in self.pods.items() if key.name == name]
        return found

    async def until(self, check: Callable[[], bool], timeout_s: float = 10.0) -> None:
        """Wait for an update that makes `check` true."""
        async with asyncio.timeout(timeout_s):
            while not check():
                self._new.clear()
                await self._new.wait()


@contextlib.asynccontextmanager
async def seen_by(source: Source) -> AsyncIterator[PodsSeen]:
    """Run a source for as long as the block takes; what it raises fails the test."""
    seen = PodsSeen()
    async with asyncio.TaskGroup() as group:
        running = group.create_task(source.run(seen.sink))
        try:
            yield seen
        finally:
            running.cancel()
