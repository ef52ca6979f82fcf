"""What happened to pods, for people: a bounded list, newest last, that can be followed."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass

from agent.node.feed import Change

log = logging.getLogger(__name__)

KEPT = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One thing that happened. `time` is seconds since the epoch; `pod` is NAMESPACE/NAME."""

    number: int
    time: float
    kind: str
    pod: str
    message: str


class Events:
    """The last events, each handed to `publish` as well; for one event loop."""

    def __init__(
        self, clock: Callable[[], float], publish: Callable[[Change], None] = lambda _: None
    ) -> None:
        self._clock = clock
        self._publish = publish
        self._kept: deque[Event] = deque(maxlen=KEPT)
        self._number = 0
        self._added = asyncio.Event()

    def add(self, kind: str, pod: str, message: str) -> Event:
        """Add an event, log it, and wake whoever waits for one."""
        self._number += 1
        event = Event(number=self._number, time=self._clock(), kind=kind, pod=pod, message=message)
        self._kept.append(event)
        log.info(kind, extra={"pod": pod, "said": message})
        self._publish(Change("event", asdict(event)))
        self._added.set()
        self._added = asyncio.Event()
        return event

    def since(self, number: int) -> list[dict[str, object]]:
        """Return the events after a number, oldest first, as plain values."""
        return [asdict(event) for event in self._kept if event.number > number]

    async def wait(self, timeout_s: float) -> None:
        """Return when an event is added, or after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._added.wait()
        except TimeoutError:
            return
