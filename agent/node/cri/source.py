"""The pods that really run on this node, as the container runtime sees them.

List, compare, say what changed; then wait and list again: two seconds with some jitter, sooner
after a change. Where events can be read without taking them from the kubelet (containerd 2.1,
CRI-O) one is a hint to list at once and nothing more, since no version replays what a reader missed
and 1.6 has none at all. When the runtime is lost, what was said stays; once it is back everything
is said anew in a snapshot.
"""

import asyncio
import logging
import os
from collections.abc import Callable
from contextlib import aclosing
from random import Random

from agent.node.cri import pods
from agent.node.cri.client import CriClient, Runtime
from agent.node.cri.errors import CriError, CriUnsupported, RuntimeAbsent
from agent.node.source import PodKey, PodRecord, Snapshot, Update

log = logging.getLogger(__name__)

INTERVAL_S = 2.0
SOON_S = 0.25  # after a change: where one pod starts or ends, others do
GAP_S = 0.1  # between two lists, however many hints there are

FIRST_BACKOFF_S = 0.2
SLOWEST_BACKOFF_S = 10.0

# A stream of events that ends at once (CRI-O's, where they are off) is asked for ever more rarely.
FIRST_STREAM_S = 1.0
SLOWEST_STREAM_S = 300.0


class CriSource:
    """See `agent.node.source.Source`. Run it once; `poke` makes it look at once."""

    def __init__(
        self,
        client: CriClient,
        *,
        name: str = "cri",
        interval_s: float = INTERVAL_S,
        random: Random | None = None,
    ) -> None:
        self.name = name
        self.connected = False
        self.detail = "not asked yet"
        self._client = client
        self._interval_s = interval_s
        self._random = random or Random()
        self._hint = asyncio.Event()
        self._known: dict[PodKey, PodRecord] = {}
        self._doubted: frozenset[PodKey] = frozenset()

    def poke(self) -> None:
        """List now rather than later: somebody has seen a pod start or end."""
        self._hint.set()

    async def run(self, sink: Callable[[Update], None]) -> None:
        """Tell `sink` of pods until cancelled. Errors of the runtime are waited out, not raised."""
        backoff_s = FIRST_BACKOFF_S
        try:
            while True:
                lost, heard = await self._session(sink)
                self._say_lost(lost)
                waited = isinstance(lost, RuntimeAbsent) and await self._client.wait_for_socket()
                if heard or waited:
                    backoff_s = FIRST_BACKOFF_S
                if not waited:
                    await asyncio.sleep(self._jittered(backoff_s))
                    backoff_s = min(backoff_s * 2, SLOWEST_BACKOFF_S)
        finally:
            self.connected = False
            await self._client.close()

    def _say_lost(self, error: CriError) -> None:
        if self.connected or self.detail != str(error):
            log.warning("runtime not there", extra={"source": self.name, "cause": str(error)})
        self.connected = False
        self.detail = str(error)

    def _jittered(self, seconds: float) -> float:
        return seconds * self._random.uniform(0.8, 1.2)

    async def _session(self, sink: Callable[[Update], None]) -> tuple[CriError, bool]:
        """List until the runtime is lost; return why, and whether it ever answered."""
        try:
            runtime = await self._client.connect()
            await self._list(sink, runtime, whole=True)
        except CriError as error:
            return error, False
        log.info("runtime connected", extra={"source": self.name, "runtime": str(runtime)})
        async with asyncio.TaskGroup() as group:
            watch = group.create_task(self._watch()) if runtime.events_are_safe else None
            lost = await self._poll(sink, runtime)
            if watch is not None:
                watch.cancel()
        return lost, True

    async def _poll(self, sink: Callable[[Update], None], runtime: Runtime) -> CriError:
        delay_s = SOON_S
        while True:
            await asyncio.sleep(GAP_S)
            try:
                async with asyncio.timeout(max(0.0, self._jittered(delay_s) - GAP_S)):
                    await self._hint.wait()
            except TimeoutError:
                pass
            self._hint.clear()
            try:
                changed = await self._list(sink, runtime, whole=False)
            except CriError as error:
                return error
            delay_s = SOON_S if changed else min(delay_s * 2, self._interval_s)

    async def _list(self, sink: Callable[[Update], None], runtime: Runtime, *, whole: bool) -> bool:
        """List once and say what is new; return whether it is worth looking again soon."""
        seen = pods.view(await self._client.sandboxes(), alive)
        now, doubts = pods.with_doubts(seen, self._known, self._doubted, alive)
        updates: tuple[Update, ...]
        if whole:
            every = tuple(now.pods.values())
            updates = (Snapshot(source=self.name, pods=every, unknown=now.unknown),)
        else:
            updates = pods.changes(self.name, self._known, now)
        self._known, self._doubted = pods.known(self._known, now), doubts
        self.connected = True
        self.detail = f"{runtime}: {len(now.pods)} pods"
        if now.unknown:
            self.detail += f", {len(now.unknown)} of which little is known yet"
        for update in updates:
            sink(update)
        return bool(updates) or bool(now.unknown)

    async def _watch(self) -> None:
        """Take every event as a hint. How the stream ends does not matter: the list will show."""
        delay_s = FIRST_STREAM_S
        while True:
            try:
                async with aclosing(self._client.events()) as events:
                    async for _ in events:
                        self.poke()
                        delay_s = FIRST_STREAM_S
            except CriUnsupported:
                return
            except CriError:
                self.poke()
            await asyncio.sleep(self._jittered(delay_s))
            delay_s = min(delay_s * 2, SLOWEST_STREAM_S)


def alive(path: str) -> bool:
    """Return whether a path still is a namespace; its mount goes when the namespace is closed."""
    try:
        return os.stat(path).st_dev == os.stat("/proc/self/ns/net").st_dev
    except (OSError, ValueError):
        return False
