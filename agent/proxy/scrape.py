"""Asks all proxies of the node for their metrics at once; one that fails costs nobody else.

Each has a deadline and a cap, and so have all together. Those that failed are asked last when they
are asked again, so that they cannot take the time of the others.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from socket import socket

from agent.formats.exposition import BadExposition, Reader
from agent.model.errors import AgentError
from agent.proxy import http
from agent.proxy.merge import Merge, Part

PATH = "/stats/prometheus"
ACCEPT = "text/plain;version=0.0.4"
AT_ONCE = 32
DEADLINE_S = 2.0
TOTAL_S = 7.0  # Prometheus waits ten seconds by default, and the answer has to be sent
MAX_BYTES = 16 * http.MIB
MAX_TOTAL_BYTES = 256 * http.MIB

NO_TURN = "its turn did not come before the time for all was over"
TOO_LATE = "it did not answer before the time for all was over"


@dataclass(frozen=True, slots=True)
class Subject:
    """A proxy to ask: its pod, and how to connect to the port that has its metrics."""

    namespace: str
    name: str
    connect: Callable[[], Awaitable[socket]] = field(compare=False)

    @property
    def labels(self) -> Mapping[str, str]:
        return {"namespace": self.namespace, "pod": self.name}


@dataclass(slots=True)
class Outcome:
    """What became of asking one proxy. `problem` is empty if it was read to the end."""

    subject: Subject
    problem: str = NO_TURN
    seconds: float = 0.0
    number: int = -1
    dropped: int = 0


class Scraper:
    """Asks proxies, remembering which failed. For one event loop."""

    def __init__(
        self, *, reserved: str, deadline_s: float = DEADLINE_S, total_s: float = TOTAL_S
    ) -> None:
        """A proxy's families whose names start with `reserved` are left out."""
        self._reserved = reserved
        self._deadline_s, self._total_s = deadline_s, total_s
        # One piece a turn of the event loop, which has a plugin to answer meanwhile.
        self._reading = asyncio.Lock()
        self._late: frozenset[Subject] = frozenset()

    async def scrape(self, subjects: Sequence[Subject], merge: Merge) -> list[Outcome]:
        """Merge what the proxies say, and return what became of each, in their order."""
        outcomes = [Outcome(subject) for subject in subjects]
        turns = asyncio.Semaphore(AT_ONCE)
        in_turn = sorted(outcomes, key=lambda outcome: outcome.subject in self._late)
        tasks = [asyncio.create_task(self._in_turn(one, merge, turns)) for one in in_turn]
        try:
            if tasks:
                await asyncio.wait(tasks, timeout=self._total_s)
        finally:
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
        bugs = [e for e in ended if isinstance(e, Exception)]
        if bugs:
            raise bugs[0]
        self._late = frozenset(o.subject for o in outcomes if o.problem not in ("", NO_TURN))
        lost = merge.settle()
        for outcome in outcomes:
            outcome.dropped += lost[outcome.number]
        return outcomes

    async def _in_turn(self, outcome: Outcome, merge: Merge, turns: asyncio.Semaphore) -> None:
        async with turns:
            started, outcome.problem = time.monotonic(), TOO_LATE
            try:
                await self._one(outcome, merge)
                outcome.problem = ""
            except (AgentError, BadExposition) as error:
                outcome.problem = str(error)
            except OSError as error:
                outcome.problem = f"this process cannot keep it: {error.strerror or error}"
            outcome.seconds = time.monotonic() - started

    async def _one(self, outcome: Outcome, merge: Merge) -> None:
        part = Part(merge)
        reader = Reader(outcome.subject.labels, part.take, reserved=self._reserved)

        async def take(data: bytes) -> None:
            if merge.size > MAX_TOTAL_BYTES:
                raise http.ProxyUnreadable("all proxies together answer with too much")
            async with self._reading:
                reader.feed(data)
                await asyncio.sleep(0)

        await http.stream(
            await outcome.subject.connect(),  # takes our own time and not the proxy's
            PATH,
            take,
            deadline_s=self._deadline_s,
            max_bytes=MAX_BYTES,
            accept=ACCEPT,
        )
        reader.end()
        outcome.number = merge.add(part)
        outcome.dropped = reader.dropped
