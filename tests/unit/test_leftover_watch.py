"""The daemon's scan: what it asks the worker, what it tells, and when."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from agent.model.errors import AgentError
from agent.node.events import Events
from agent.node.leftover_watch import LONGEST_PAUSE_S, SHARE, LeftoverWatch, next_pause
from agent.node.pod import Pod, Wish

NETNS = "/proc/self/ns/net"


def pod(name: str, reason: str, *, netns: str | None = NETNS) -> Pod:
    wish = Wish(
        key=name,
        namespace="shop",
        name=name,
        uid="u",
        sandbox_id="s",
        netns=netns,
        settings=None,
        reason=reason,
        text="why",
        source="cri",
    )
    return Pod(wish)


def finding(kind: str, severity: str = "warning") -> dict[str, Any]:
    where = {"netns": "x", "pod": "shop/web"}
    words = {"owner": "istio", "explanation": "so"}
    return {"kind": kind, "severity": severity, "where": where, **words}


class FakeJobs:
    """A worker that finds what it is told to in pods, and nothing on the node."""

    def __init__(self) -> None:
        self.asked: list[Mapping[str, Any]] = []
        self.found: list[dict[str, Any]] = []
        self.failure: AgentError | None = None

    async def job(
        self, job: str, netns_fd: int, *pipe: int, deadline_s: float = 1, **request: object
    ) -> Mapping[str, object]:
        assert job == "scan"
        self.asked.append(request)
        if self.failure:
            raise self.failure
        return {"findings": [] if request["host"] else self.found}


class FakeMeter:
    def __init__(self) -> None:
        self.counts: Mapping[str, int] = {}

    def found_leftovers(self, counts: Mapping[str, int]) -> None:
        self.counts = counts


def make(jobs: FakeJobs, *pods: Pod) -> tuple[LeftoverWatch, Events, FakeMeter]:
    events, meter = Events(lambda: 0.0), FakeMeter()
    watch = LeftoverWatch(jobs, lambda: pods, events, meter, cni=lambda: (None, None))
    return watch, events, meter


def told(events: Events) -> list[str]:
    return [str(event["kind"]) for event in events.since(0)]


def test_node_and_pods_are_asked_for_with_what_they_want() -> None:
    jobs = FakeJobs()
    pods = pod("web", "not-injected"), pod("api", "unknown-pod"), pod("net", "x", netns=None)
    watch, _, meter = make(jobs, *pods)
    asyncio.run(watch.scan())
    assert [(r["host"], r.get("pod", {}).get("wants")) for r in jobs.asked] == [
        (True, None),
        (False, False),
        (False, None),
    ]
    assert set(meter.counts.values()) == {0}


def test_new_findings_are_told_once_they_last_and_again_when_they_are_gone() -> None:
    async def main() -> None:
        jobs = FakeJobs()
        watch, events, meter = make(jobs, pod("web", "not-injected"))
        jobs.found = [finding("stale-capture")]
        await watch.scan()
        assert (told(events), meter.counts["stale-capture"]) == ([], 1)
        await watch.scan()
        await watch.scan()
        assert told(events) == ["leftover"]
        jobs.found = []
        await watch.scan()
        assert (told(events), meter.counts["stale-capture"]) == (["leftover", "leftover-gone"], 0)

    asyncio.run(main())


def test_what_is_critical_is_told_at_once() -> None:
    jobs = FakeJobs()
    jobs.found = [finding("blackhole", "critical")]
    watch, events, _ = make(jobs, pod("web", "not-injected"))
    asyncio.run(watch.scan())
    assert told(events) == ["leftover"]


@pytest.mark.parametrize("kind", ["kube-proxy", "foreign-cni"])
def test_nothing_is_told_of_an_owner_that_is_only_started_anew(kind: str) -> None:
    jobs = FakeJobs()
    watch, events, _ = make(jobs, pod("web", "not-injected"))
    for found in ([finding(kind, "critical")], [], [finding(kind, "critical")]):
        jobs.found = found
        asyncio.run(watch.scan())
    assert told(events) == []
    asyncio.run(watch.scan())
    assert told(events) == ["leftover"]


def test_a_namespace_that_cannot_be_looked_into_is_named_and_ends_nothing() -> None:
    jobs = FakeJobs()
    jobs.failure = AgentError("no")
    watch, _, _ = make(jobs, pod("web", "not-injected"))
    asyncio.run(watch.scan())
    scanned: Any = watch.document()["scanned"]
    assert scanned["failed"] == ["host: no", "shop/web: no"]


def test_scans_become_rarer_the_longer_they_take() -> None:
    assert [next_pause(5, 2), next_pause(10, 2)] == [10, 20]  # the first few find what is new
    assert next_pause(20, 0.01) == 40
    assert next_pause(20, 0.5) == 0.5 / SHARE
    assert next_pause(400, 0.01) == next_pause(20, 60) == LONGEST_PAUSE_S
