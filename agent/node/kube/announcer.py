"""Tells of what happens to pods by Events of Kubernetes, for `kubectl describe` to show.

The agent's own list is the source. What is said again is counted in the Event that is there; no pod
and no node gets many of them; and what cannot be sent waits, but not for ever. Events are core/v1,
since `count` is what `kubectl` shows of what happens again and again.
"""

import asyncio
import contextlib
import logging
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from agent.node.feed import Feed, TooSlow
from agent.node.kube.client import MERGE_PATCH, ApiClient, Document
from agent.node.kube.errors import NOT_FOUND, ApiError, ApiRefused

log = logging.getLogger(__name__)

COMPONENT = "intercept-agent"
WARNING, NORMAL = "Warning", "Normal"
# Of the agent's events those that somebody should see who looks at the pod.
REASONS: Mapping[str, tuple[str, str]] = {
    "failed": (WARNING, "CaptureFailed"),
    "refused": (WARNING, "CaptureRefused"),
    "drift-found": (WARNING, "CaptureAltered"),
    "drift-repaired": (WARNING, "CaptureRepaired"),
    "leftover": (WARNING, "LeftoverFound"),
    "leftover-gone": (NORMAL, "LeftoverGone"),
    "bypass-risk": (WARNING, "BypassRisk"),
    "remark": (WARNING, "CaptureRemark"),
    "uncaptured": (WARNING, "Uncaptured"),
    "captured-late": (WARNING, "CapturedLate"),
    "deleted": (WARNING, "DeletedUncaptured"),
}
LONGEST_MESSAGE = 1024  # what the API server takes
LONGEST_NAME = 220
MOST_WAITING = 1024
# A full node has something to say of each pod at once, and of none should nothing be said.
BURST, PER_S = 300, 10.0
MOST_SERIES = 1024
AGAIN_S = 10.0  # between two counts of one Event
GIVE_UP_S = 600.0
RETRY_S = 2.0
NUMBERS = re.compile(r"\d+(?:\.\d+)?")

Key = tuple[str, str, str]
"""What makes one Event: the object's uid, the reason, and the message but for its numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What an Event is about."""

    kind: str
    namespace: str
    name: str
    uid: str


@dataclass(slots=True)
class Waiting:
    """Something that is to be said, `count` times so far."""

    subject: Subject
    kind: str
    message: str
    first: float
    last: float
    count: int = 1


@dataclass(slots=True)
class Series:
    """An Event that the API server has."""

    name: str
    count: int
    sent_s: float


class Budget:
    """Lets `burst` pass at once and `per_s` each second after that."""

    def __init__(self, burst: int, per_s: float, clock: Callable[[], float]) -> None:
        self._burst, self._per_s, self._clock = burst, per_s, clock
        self._left, self._at = float(burst), clock()

    def take(self) -> bool:
        now = self._clock()
        self._left = min(self._burst, self._left + (now - self._at) * self._per_s)
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True


class Announcer:
    """Run it once. `subject` knows what the agent's name for a pod (or `host`) is in the API."""

    def __init__(
        self,
        client: ApiClient,
        feed: Feed,
        node: str,
        subject: Callable[[str], Subject | None],
        connected: Callable[[], bool],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._feed = feed
        self._node = node
        self._subject = subject
        self._connected = connected
        self._clock = clock
        self._waiting: OrderedDict[Key, Waiting] = OrderedDict()
        self._series: OrderedDict[Key, Series] = OrderedDict()
        self._budgets: OrderedDict[str, Budget] = OrderedDict()
        self._budget = Budget(BURST, PER_S, clock)
        self._news = asyncio.Event()
        self.problem = ""  # why the last Event was refused

    async def run(self) -> None:
        """Tell until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._listen())
            group.create_task(self._send())

    async def _listen(self) -> None:
        while True:
            with self._feed.watch() as watch, contextlib.suppress(TooSlow):
                while True:
                    change = await watch.next()
                    if change.kind == "event":
                        self.take(change.what)

    def take(self, event: Mapping[str, Any]) -> None:
        """Have one of the agent's events said, if it is one that people should see."""
        known = REASONS.get(str(event["kind"]))
        subject = self._subject(str(event["pod"])) if known else None
        if known is None or subject is None:
            return
        message = str(event["message"])
        key = (subject.uid, known[1], NUMBERS.sub("#", message))
        waiting = self._waiting.get(key)
        if waiting is not None:
            waiting.count, waiting.last, waiting.message = (
                waiting.count + 1,
                float(event["time"]),
                message,
            )
        elif key in self._series or self._may(subject.uid):
            at = float(event["time"])
            self._waiting[key] = Waiting(subject, str(event["kind"]), message, at, at)
            while len(self._waiting) > MOST_WAITING:
                self._waiting.popitem(last=False)
        self._news.set()

    def _may(self, uid: str) -> bool:
        """Whether one more kind of Event may be made for an object: ten, then one a minute."""
        budget = self._budgets.setdefault(uid, Budget(10, 1 / 60, self._clock))
        self._budgets.move_to_end(uid)
        while len(self._budgets) > MOST_SERIES:
            self._budgets.popitem(last=False)
        return budget.take()

    # --- sending ----------------------------------------------------------------------------------

    async def _send(self) -> None:
        while True:
            due = self._due() if self._connected() else None
            if due is None:
                self._news.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(RETRY_S if self._waiting else None):
                        await self._news.wait()
                continue
            if not self._budget.take():
                await asyncio.sleep(1 / PER_S)
                continue
            waiting = self._waiting.pop(due)
            try:
                await self._say(due, waiting)
                self.problem = ""
            except ApiRefused as error:
                self.problem = f"an Event is refused: {error}"
                log.warning("an Event is refused", extra={"cause": str(error)})
            except ApiError:
                self._keep(due, waiting)
                await asyncio.sleep(RETRY_S)

    def _due(self) -> Key | None:
        now = self._clock()
        for key in self._waiting:
            series = self._series.get(key)
            if series is None or now - series.sent_s >= AGAIN_S:
                return key
        return None

    def _keep(self, key: Key, waiting: Waiting) -> None:
        """Try again later, unless it is old news by then."""
        newer = self._waiting.get(key)
        if newer is not None:
            newer.count, newer.first = newer.count + waiting.count, waiting.first
        elif time.time() - waiting.first < GIVE_UP_S:
            self._waiting[key] = waiting
            self._waiting.move_to_end(key, last=False)

    async def _say(self, key: Key, waiting: Waiting) -> None:
        series = self._series.get(key)
        if series is not None:
            try:
                await self._count(series, waiting)
            except ApiRefused as error:
                if error.status != NOT_FOUND:  # the API server forgets Events after an hour
                    raise
                del self._series[key]
            else:
                return
        name = _name(waiting.subject.name)
        path = f"/api/v1/namespaces/{waiting.subject.namespace}/events"
        await self._client.send("POST", path, self._event(name, waiting))
        self._series[key] = Series(name, waiting.count, self._clock())
        while len(self._series) > MOST_SERIES:
            self._series.popitem(last=False)

    async def _count(self, series: Series, waiting: Waiting) -> None:
        path = f"/api/v1/namespaces/{waiting.subject.namespace}/events/{series.name}"
        patch = {
            "count": series.count + waiting.count,
            "message": waiting.message[:LONGEST_MESSAGE],
            "lastTimestamp": _timestamp(waiting.last),
        }
        await self._client.send("PATCH", path, patch, MERGE_PATCH)
        series.count += waiting.count
        series.sent_s = self._clock()

    def _event(self, name: str, waiting: Waiting) -> Document:
        subject = waiting.subject
        type_, reason = REASONS[waiting.kind]
        about = {"apiVersion": "v1", "kind": subject.kind, "name": subject.name}
        if subject.kind == "Pod":
            about["namespace"] = subject.namespace
        return {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": name, "namespace": subject.namespace},
            "involvedObject": {**about, "uid": subject.uid},
            "type": type_,
            "reason": reason,
            "message": waiting.message[:LONGEST_MESSAGE],
            "count": waiting.count,
            "firstTimestamp": _timestamp(waiting.first),
            "lastTimestamp": _timestamp(waiting.last),
            "source": {"component": COMPONENT, "host": self._node},
            "reportingComponent": COMPONENT,
            "reportingInstance": self._node,
        }


def _name(of: str) -> str:
    return f"{of[:LONGEST_NAME].rstrip('.-')}.{time.time_ns():x}"


def _timestamp(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
