"""What the daemon shows of the pods' proxies: whether they listen, their certificates, their stats.

Nothing is asked before somebody looks: a node whose metrics nobody reads has no work with this.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial

from prometheus_client import CollectorRegistry, Gauge, generate_latest

from agent.model import numbers
from agent.model.errors import AgentError
from agent.model.values import AMBIENT
from agent.node.pod import Pod, Wish
from agent.node.proxies import Proxies
from agent.node.reconciler import Jobs
from agent.observe.http import Answer
from agent.observe.metrics import CONTENT_TYPE, PREFIX, Metrics
from agent.proxy import http
from agent.proxy.admin import Admin
from agent.proxy.merge import Merge
from agent.proxy.ports import capture_ports
from agent.proxy.scrape import Outcome, Scraper, Subject

log = logging.getLogger(__name__)

LABELS = ("namespace", "pod")
AT_WORKER, AT_PROXIES = 8, 32
FRESH_S = 2.0  # two who look at the same time cost one look
TOTAL_S = 2.0
# A certificate is good for hours or days; one that is late, missing or nearly over is news.
CERTIFICATES_FRESH_S, NEWS_FRESH_S = 600.0, 30.0
NEARLY_OVER_S = 3600.0
ADMIN_DEADLINE_S, MAX_ADMIN_BYTES = 1.0, 4 * http.MIB


@dataclass(slots=True)
class _Seen:
    """What is known of one pod's proxy. `expires` is None where it holds no certificate."""

    listening: bool = False
    expires: datetime | None = None
    read_at: float = float("-inf")

    def read_again_at(self, now: datetime) -> float:
        calm = self.expires and (self.expires - now).total_seconds() > NEARLY_OVER_S
        return self.read_at + (CERTIFICATES_FRESH_S if calm else NEWS_FRESH_S)


class ProxyMetrics:
    """Metrics about and of the proxies of captured pods. For one event loop."""

    def __init__(self, jobs: Jobs, pods: Callable[[], Iterable[Pod]], metrics: Metrics) -> None:
        self._proxies = Proxies(jobs)
        self._pods = pods
        self._metrics = metrics
        self._scraper = Scraper(reserved=PREFIX)
        self._seen: dict[tuple[str, str], _Seen] = {}
        self._problems: dict[Subject, str] = {}
        self._looked_at = float("-inf")
        self._looking = asyncio.Lock()
        self._scraping = asyncio.Lock()

    async def refresh(self) -> None:
        """Set the gauges about proxies to how things are; what takes too long stays as it was."""
        async with self._looking:
            wishes = self._wishes()
            keys = {_key(wish) for wish in wishes}
            self._seen = {key: seen for key, seen in self._seen.items() if key in keys}
            if time.monotonic() - self._looked_at >= FRESH_S:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(TOTAL_S):
                        await self._look(wishes)
                self._looked_at = time.monotonic()
            self._show(wishes)

    async def stats(self) -> Answer:
        """Return the agent's metrics and those of all proxies, each sample with its pod."""
        async with self._scraping:
            await self.refresh()
            merge = Merge()
            try:
                outcomes = await self._scraper.scrape(self._subjects(), merge)
            except BaseException:
                merge.close()
                raise
        self._log(outcomes)
        own = self._metrics.text() + _told(outcomes)
        return Answer(200, own, CONTENT_TYPE, merge)

    def _log(self, outcomes: list[Outcome]) -> None:
        """Say once why the metrics of a proxy are missing."""
        problems = {one.subject: one.problem for one in outcomes if one.problem}
        for subject, problem in problems.items():
            if self._problems.get(subject) != problem:
                pod = f"{subject.namespace}/{subject.name}"
                log.warning("metrics of a proxy are missing", extra={"pod": pod, "why": problem})
        self._problems = problems

    def _wishes(self) -> list[Wish]:
        """Return the captured pods that can be reached, of each name the one that came last."""
        found = {
            (pod.wish.namespace, pod.wish.name): pod.wish
            for pod in self._pods()
            if pod.wish.settings is not None and pod.wish.netns is not None
        }
        return list(found.values())

    def _subjects(self) -> list[Subject]:
        connect = self._proxies.connect
        port = numbers.ENVOY_METRICS_PORT
        return [
            Subject(wish.namespace, wish.name, partial(connect, str(wish.netns), port))
            for wish in self._wishes()
            if _has_envoy(wish)
        ]

    async def _look(self, wishes: list[Wish]) -> None:
        at_worker, at_proxies = asyncio.Semaphore(AT_WORKER), asyncio.Semaphore(AT_PROXIES)

        async def look(wish: Wish) -> None:
            path, capture = str(wish.netns), capture_ports(wish.settings or {})
            seen = self._seen.setdefault(_key(wish), _Seen())
            try:
                async with at_worker:
                    asked = {*capture, numbers.ENVOY_ADMIN_PORT}
                    found = await self._proxies.listening(path, asked)
            except AgentError:
                found = frozenset()
            seen.listening = found >= capture
            if numbers.ENVOY_ADMIN_PORT in found and _has_envoy(wish):
                async with at_proxies:  # another queue: nobody else waits for a slow proxy
                    await self._read_certificates(path, seen)

        async with asyncio.TaskGroup() as tasks:
            for wish in wishes:
                tasks.create_task(look(wish))

    async def _read_certificates(self, path: str, seen: _Seen) -> None:
        if time.monotonic() < seen.read_again_at(datetime.now(UTC)):
            return
        seen.read_at = time.monotonic()  # also where it fails: it is asked rarely all the same
        connect = partial(self._proxies.connect, path, numbers.ENVOY_ADMIN_PORT)
        admin = Admin(connect, path, ADMIN_DEADLINE_S, MAX_ADMIN_BYTES)
        with contextlib.suppress(AgentError):
            found = await admin.certificates()
            seen.expires = min((c.expires for c in found if c.kind == "chain"), default=None)

    def _show(self, wishes: list[Wish]) -> None:
        now = datetime.now(UTC)
        listening, expiry = self._metrics.proxy_listening, self._metrics.certificate_expiry
        listening.clear()
        expiry.clear()
        for wish in wishes:
            seen = self._seen.get(_key(wish))
            if seen is None:
                continue
            listening.labels(wish.namespace, wish.name).set(seen.listening)
            if seen.expires is not None:
                left = (seen.expires - now).total_seconds()
                expiry.labels(wish.namespace, wish.name).set(round(left))


def _has_envoy(wish: Wish) -> bool:
    """Whether the proxy is one of the pod's own: the node's tells of itself elsewhere."""
    return (wish.settings or {}).get("mode") != AMBIENT


def _key(wish: Wish) -> tuple[str, str]:
    """Return what tells one namespace of a pod from the next of the same pod."""
    return wish.key, wish.sandbox_id


def _told(outcomes: list[Outcome]) -> bytes:
    """Return what became of asking each proxy, as metrics."""
    registry = CollectorRegistry()
    up = Gauge(
        f"{PREFIX}proxy_scrape_up",
        "Whether the metrics of the pod's proxy were read and are all here",
        LABELS,
        registry=registry,
    )
    seconds = Gauge(
        f"{PREFIX}proxy_scrape_duration_seconds",
        "How long the pod's proxy took to tell its metrics",
        LABELS,
        registry=registry,
    )
    dropped = Gauge(
        f"{PREFIX}proxy_scrape_samples_dropped",
        "Samples of the pod's proxy that are not here, their names being others' of another type",
        LABELS,
        registry=registry,
    )
    for outcome in outcomes:
        labels = (outcome.subject.namespace, outcome.subject.name)
        up.labels(*labels).set(not outcome.problem)
        seconds.labels(*labels).set(outcome.seconds)
        dropped.labels(*labels).set(outcome.dropped)
    return generate_latest(registry)
