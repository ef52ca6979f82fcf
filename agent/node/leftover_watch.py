"""Scans the pods of the node and the node itself for leftovers: on a timer, and soon after news.

Nothing is removed here: `clean` does that, when somebody says so. Each namespace is a job of the
worker, one after the other, so a scan never takes more than one of its threads.
"""

import asyncio
import contextlib
import itertools
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from agent.kernel import netns
from agent.leftovers.finding import Kind, Severity
from agent.leftovers.node import PodFact
from agent.model.errors import AgentError
from agent.node.events import Events
from agent.node.pod import Pod
from agent.node.reconciler import Jobs

# Pods come in bunches, and their proxies need a moment to listen; later, little changes by itself.
FIRST_PAUSE_S = 5.0
LONGEST_PAUSE_S = 600.0
# After the first few scans, which find what has just been made, no more than this share of the time
# is spent on looking, however many pods there are.
FEW_S = 20.0
SHARE = 0.005
# Left over because no process of their owner runs, which is so while a DaemonSet is updated, too.
OF_NOBODY = frozenset({Kind.KUBE_PROXY, Kind.FOREIGN_CNI})

Document = Mapping[str, Any]
Subject = tuple[str, str, dict[str, object]]
"""A place, the path of its namespace, and what the worker is to be told of it."""
Key = tuple[str, str, str]
"""What makes a finding the same as before: its place, its kind and its owner."""


class Meter(Protocol):
    """Counts what is found; the daemon's metrics are the real one."""

    def found_leftovers(self, counts: Mapping[str, int]) -> None: ...


class LeftoverWatch:
    """The last scan, and the loop that renews it. For one event loop."""

    def __init__(
        self,
        jobs: Jobs,
        pods: Callable[[], Iterable[Pod]],
        events: Events,
        meter: Meter,
        *,
        cni: Callable[[], tuple[Path | None, Path | None]],
        first_pause_s: float = FIRST_PAUSE_S,
    ) -> None:
        self._jobs = jobs
        self._pods = pods
        self._events = events
        self._meter = meter
        self._cni = cni
        self._first_pause_s = first_pause_s
        self._news = asyncio.Event()
        self._asked: dict[str, Pod] = {}
        self._asked_for = asyncio.Event()
        self._looks = itertools.count(1)
        self._seen: set[Key] = set()
        self._told: set[Key] = set()
        self._found: dict[str, tuple[int, list[Document]]] = {}  # by place, with the look's number
        self._scanned: dict[str, object] = {"namespaces": 0, "time": None, "failed": []}

    def poke(self) -> None:
        """Say that a pod came, went or changed."""
        self._news.set()

    def document(self) -> dict[str, object]:
        """Return the last scan as `scan -o json` has it."""
        return {"findings": self._findings(), "scanned": dict(self._scanned)}

    def look_at(self, pod: Pod) -> None:
        """Look at one pod at once: what is decided about it has turned."""
        self._asked[pod.wish.key] = pod
        self._asked_for.set()
        self.poke()

    async def run(self) -> None:
        """Scan until cancelled: soon after news, and then ever more rarely."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._look_when_asked())
            group.create_task(self._scan_at_times())

    async def _look_when_asked(self) -> None:
        while True:
            await self._asked_for.wait()
            self._asked_for.clear()
            asked, self._asked = self._asked, {}
            for pod in asked.values():
                for subject in self._subject(pod):
                    await self._look_into(subject)
            self._count()
            self._tell({pod.wish.label for pod in asked.values()})

    async def _scan_at_times(self) -> None:
        pause_s = self._first_pause_s
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._news.wait()
                pause_s = self._first_pause_s
                await asyncio.sleep(pause_s)
            self._news.clear()
            started = time.monotonic()
            await self.scan()
            pause_s = next_pause(pause_s, time.monotonic() - started)

    async def scan(self) -> None:
        """Look into the node's namespace and every pod's, and tell what is new and what is gone."""
        subjects = self._subjects()
        failed = [said for subject in subjects if (said := await self._look_into(subject))]
        names = {name for name, _, _ in subjects}
        self._found = {name: found for name, found in self._found.items() if name in names}
        looked = len(subjects) - len(failed)
        self._scanned = {"namespaces": looked, "time": time.time(), "failed": failed}
        self._count()
        self._tell()

    def _findings(self) -> list[Document]:
        return [finding for _, found in self._found.values() for finding in found]

    def _count(self) -> None:
        counts = Counter(str(finding["kind"]) for finding in self._findings())
        self._meter.found_leftovers({kind.value: counts[kind.value] for kind in Kind})

    def _subjects(self) -> list[Subject]:
        subjects: list[Subject] = []
        with contextlib.suppress(AgentError), netns.open_target("host")[0] as host:
            names = ("conf_dir", "bin_dir")
            folders = {n: str(p) if p else None for n, p in zip(names, self._cni(), strict=True)}
            subjects.append(("host", host.path, {"name": "host", "host": True, "cni": folders}))
        for pod in self._pods():
            subjects += self._subject(pod)
        return subjects

    def _subject(self, pod: Pod) -> list[Subject]:
        if pod.wish.netns is None:
            return []
        wish, captured = pod.wish, pod.wish.settings is not None
        about = asdict(PodFact.of(wish.label, wish.reason, wish.text, captured=captured))
        request = {"name": f"pod:{pod.wish.label}", "host": False, "pod": about}
        return [(pod.wish.label, pod.wish.netns, request)]

    async def _look_into(self, subject: Subject) -> str:
        """Keep what is found in one place, and return why nothing could be, if so.

        A look that began before another one ended says nothing new.
        """
        (name, path, request), number = subject, next(self._looks)
        found: list[Document] = []
        failed = ""
        try:
            found = await self._look(path, request)
        except (AgentError, OSError) as error:
            failed = f"{name}: {error}"
        if self._found.get(name, (0, ()))[0] < number:
            self._found[name] = (number, found)
        return failed

    async def _look(self, path: str, request: Mapping[str, Any]) -> list[Document]:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            answer = await self._jobs.job("scan", fd, **request)
        finally:
            os.close(fd)
        found = answer["findings"]
        return found if isinstance(found, list) else []

    def _tell(self, turned: Collection[str] = ()) -> None:
        """Add an event for each finding that is new, and for each that is gone.

        What is not critical is told when it is seen for the second time: a proxy that has only just
        been started does not listen yet. So is what nobody seems to use any more: whose it is may
        just be started anew. That a pod no longer asks for its capture is told at once.
        """
        now = {_key(finding): finding for finding in self._findings()}
        for key, finding in now.items():
            place, kind, owner = key
            due = kind == Kind.STALE_CAPTURE and place in turned
            urgent = finding["severity"] == Severity.CRITICAL and kind not in OF_NOBODY
            lasting = key in self._seen or urgent
            if (lasting or due) and key not in self._told:
                self._told.add(key)
                self._events.add("leftover", place, f"{kind} ({owner}): {finding['explanation']}")
        for place, kind, owner in sorted(self._told - now.keys()):
            self._events.add("leftover-gone", place, f"{kind} ({owner}) is gone")
        self._told &= now.keys()
        self._seen = set(now)


def next_pause(pause_s: float, took_s: float) -> float:
    """Return how long to wait after a scan that came after that pause and took so long."""
    longer = 2 * pause_s
    return min(longer if longer <= FEW_S else max(longer, took_s / SHARE), LONGEST_PAUSE_S)


def _key(finding: Document) -> Key:
    where = finding["where"]
    place = where["pod"] or where["netns"] or "host"
    return str(place), str(finding["kind"]), str(finding["owner"])
