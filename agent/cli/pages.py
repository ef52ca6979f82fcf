"""What the daemon answers over HTTP to machines: health, metrics, and what it knows as JSON."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

from agent.api.known import Known
from agent.cli.proxy_metrics import ProxyMetrics
from agent.node.config import Config
from agent.observe.http import Answer, Page, Request
from agent.observe.metrics import CONTENT_TYPE, Metrics

Pages = Mapping[str, Page]


def health(pending: Callable[[], Sequence[str]]) -> Pages:
    """Return the pages of health; `pending` says why the agent is not ready."""

    async def ready(_: Request) -> Answer:
        why = list(pending())
        return Answer.of({"ready": not why, "pending": why}, 503 if why else 200)

    async def live(_: Request) -> Answer:
        return Answer.of({"live": True})

    return {"/healthz/ready": ready, "/healthz/live": live}


def metrics(own: Metrics, proxies: ProxyMetrics, count: Callable[[], None]) -> Pages:
    """Return the pages for Prometheus; `count` brings the agent's own gauges up to date."""

    async def agents(_: Request) -> Answer:
        count()
        await proxies.refresh()
        return Answer(200, own.text(), CONTENT_TYPE)

    async def everybodys(_: Request) -> Answer:
        count()
        return await proxies.stats()

    return {"/metrics": agents, "/stats/prometheus": everybodys}


def debug(known: Known, config: Callable[[], Config]) -> Pages:
    """Return the pages that show everything; they are for this host only."""

    async def pods(_: Request) -> Answer:
        return Answer.of({"pods": known.pods()})

    async def events(_: Request) -> Answer:
        return Answer.of({"events": known.events(0)})

    async def leftovers(_: Request) -> Answer:
        return Answer.of(known.scan())

    async def configured(_: Request) -> Answer:
        return Answer.of(json.loads(json.dumps(asdict(config()), default=str)))

    return {
        "/debug/pods": pods,
        "/debug/events": events,
        "/debug/leftovers": leftovers,
        "/debug/config": configured,
    }
