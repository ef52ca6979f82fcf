"""What changes, as it changes, for everyone who watches: each has a bounded queue of its own."""

import asyncio
import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from agent.model.errors import AgentError

LONGEST_QUEUE = 1024


class TooSlow(AgentError):
    """A watcher took changes more slowly than they came, and is told of nothing more."""


@dataclass(frozen=True, slots=True)
class Change:
    """A pod as it is now, a pod that is gone as it was, or an event; all as plain values."""

    kind: Literal["pod", "gone", "event"]
    what: Mapping[str, object]


class Watch:
    """One watcher's changes, in their order."""

    def __init__(self, longest: int) -> None:
        # One place more than there may be changes: for the word that they were too many.
        self._queue = asyncio.Queue[Change | None](longest + 1)
        self._longest = longest
        self._slow = False

    def put(self, change: Change) -> None:
        """Keep a change for the watcher; one too many, and all are let go."""
        if self._slow:
            return
        if self._queue.qsize() < self._longest:
            self._queue.put_nowait(change)
            return
        self._slow = True
        while not self._queue.empty():
            self._queue.get_nowait()
        self._queue.put_nowait(None)

    async def next(self) -> Change:
        """Return the next change; waits for one. Raises: TooSlow."""
        change = await self._queue.get()
        if change is None:
            raise TooSlow(
                f"more than {self._longest} changes waited for this watcher, which takes them too "
                "slowly; watch again for the present state"
            )
        return change


class Feed:
    """Hands every change to all who watch at that moment. For one event loop."""

    def __init__(self, longest: int = LONGEST_QUEUE) -> None:
        self._longest = longest
        self._watches: set[Watch] = set()

    def publish(self, change: Change) -> None:
        for watch in self._watches:
            watch.put(change)

    @property
    def watchers(self) -> int:
        return len(self._watches)

    @contextlib.contextmanager
    def watch(self) -> Iterator[Watch]:
        """Watch for as long as the block takes."""
        watch = Watch(self._longest)
        self._watches.add(watch)
        try:
            yield watch
        finally:
            self._watches.discard(watch)
