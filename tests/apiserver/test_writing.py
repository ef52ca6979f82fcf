"""What the agent writes, as a real API server takes it and kubectl shows it."""

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from agent.node.config import Kubernetes
from agent.node.kube.repair import LABEL
from tests.apiserver.at_work import NODES, PODS, make, working
from tests.apiserver.conftest import POLICY
from tests.fakes.fake_api import NODE
from tests.support.hearing import until
from tests.support.real_api import RealApi, ask

LONG_S = 60.0


def test_events_are_shown_by_kubectl(
    api: RealApi, node: Callable[[], dict[str, Any]], tmp_path: Path
) -> None:
    async def test() -> None:
        make(api, "web")
        async with working(api, tmp_path, Kubernetes()) as agent:
            await until(lambda: agent.cluster.pod("shop", "web", ""))
            agent.events.add("failed", "shop/web", "the kernel said no")
            agent.events.add("leftover", "host", "route: table 133 is left")

            def shows(*way: str) -> bool:
                return "the kernel said no" in api.kubectl(*way).stdout

            for way in (
                ("describe", "pod", "-n", "shop", "web"),
                ("get", "events", "-n", "shop"),
                ("events", "-n", "shop", "--for", "pod/web"),
            ):
                await until(partial(shows, *way))
                shown = api.kubectl(*way).stdout
                assert "Warning" in shown
                assert "CaptureFailed" in shown
            said = api.kubectl("describe", "pod", "-n", "shop", "web").stdout
            assert "intercept-agent" in said
            wanted = "route: table 133 is left"
            await until(lambda: wanted in api.kubectl("describe", "node", NODE).stdout)

    asyncio.run(test())


def test_what_happens_again_is_counted_where_kubectl_shows_it(
    api: RealApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent.node.kube.announcer.AGAIN_S", 0.5)

    async def test() -> None:
        make(api, "web")
        async with working(api, tmp_path, Kubernetes()) as agent:
            await until(lambda: agent.cluster.pod("shop", "web", ""))
            path = "/api/v1/namespaces/shop/events"

            def counts() -> list[int]:
                return [event["count"] for event in ask(api.admin, "GET", path)["items"]]

            agent.events.add("drift-repaired", "shop/web", "open for 0.1 s")
            await until(lambda: counts() == [1])
            agent.events.add("drift-repaired", "shop/web", "open for 0.3 s")
            await until(lambda: counts() == [2])
            assert "x2 over" in api.kubectl("events", "-n", "shop").stdout
            (name,) = [e["metadata"]["name"] for e in ask(api.admin, "GET", path)["items"]]
            ask(api.admin, "DELETE", f"{path}/{name}", {})
            agent.events.add("drift-repaired", "shop/web", "open for 0.2 s")
            await until(lambda: counts() == [1])

    asyncio.run(test())


def test_late_pod_is_labelled_and_the_label_taken_away(api: RealApi, tmp_path: Path) -> None:
    async def test() -> None:
        web = make(api, "web")
        async with working(api, tmp_path, Kubernetes(repair="label")) as agent:
            await until(lambda: agent.cluster.pod("shop", "web", ""))
            agent.late(web)

            def label() -> object:
                return ask(api.admin, "GET", f"{PODS}/web")["metadata"].get("labels", {}).get(LABEL)

            await until(lambda: label() == "true")
            agent.events.add("captured", "shop/web", "")
            await until(lambda: label() is None)

    asyncio.run(test())


def test_late_pod_is_deleted_with_the_patience_that_it_asks_for(
    api: RealApi, tmp_path: Path
) -> None:
    async def test() -> None:
        web = make(api, "web")
        async with working(api, tmp_path, Kubernetes(repair="delete")) as agent:
            await until(lambda: agent.cluster.pod("shop", "web", ""))
            assert "it is deleted" in agent.late(web)
            metadata: dict[str, Any] = {}

            def dated() -> bool:
                metadata.update(ask(api.admin, "GET", f"{PODS}/web")["metadata"])
                return "deletionTimestamp" in metadata

            await until(dated)
            assert metadata["deletionGracePeriodSeconds"] == 30
            await until(lambda: "it ends already" in agent.late(web))
            assert [e["kind"] for e in agent.events.since(0)] == ["uncaptured", "deleted"]

    asyncio.run(test())


@pytest.mark.parametrize("policy", ["label", "delete"])
def test_pod_that_was_made_anew_meanwhile_is_left_alone(
    api: RealApi, tmp_path: Path, policy: str
) -> None:
    async def test() -> None:
        web = make(api, "web")
        async with working(api, tmp_path, Kubernetes(repair=policy)) as agent:
            await until(lambda: agent.cluster.pod("shop", "web", ""))
            known = agent.cluster._source.cache.known_pods["shop", "web"]
            api.end_pod("web")
            anew = make(api, "web")
            await until(lambda: agent.cluster.pod("shop", "web", anew["metadata"]["uid"]))
            agent.cluster._source.cache.known_pods["shop", "web"] = known
            agent.late(web)
            before = refusals(api)
            await until(lambda: refusals(api) > before)
            await asyncio.sleep(0.5)
            assert refusals(api) == before + 1
            found = ask(api.admin, "GET", f"{PODS}/web")["metadata"]
            assert found["uid"] == anew["metadata"]["uid"]
            assert LABEL not in found.get("labels", {})
            assert "deletionTimestamp" not in found

    asyncio.run(test())


def refusals(api: RealApi) -> int:
    return sum(event.get("responseStatus", {}).get("code", 0) >= 400 for event in api.requests())


def test_taint_is_set_among_others_who_write_to_the_node(
    api: RealApi, node: Callable[[], dict[str, Any]], tmp_path: Path
) -> None:
    key = str(POLICY.taint)
    ours, other = {"key": key, "effect": "NoSchedule"}, {"key": "other", "effect": "NoExecute"}
    ask(api.admin, "PATCH", f"{NODES}/{NODE}", {"spec": {"taints": [ours, other]}})

    def taints() -> list[str]:
        return [taint["key"] for taint in node()["spec"].get("taints", [])]

    async def meddle() -> None:
        for number in range(10_000):
            patch = {"metadata": {"annotations": {"it-meddled": str(number)}}}
            await asyncio.to_thread(ask, api.admin, "PATCH", f"{NODES}/{NODE}", patch)
            await asyncio.sleep(0.1)

    async def test() -> None:
        meddler = asyncio.create_task(meddle())
        async with working(api, tmp_path, Kubernetes(taint=key)) as agent:
            await until(lambda: taints() == ["other"], patience_s=LONG_S)
            agent.ready = False
            await until(lambda: set(taints()) == {key, "other"}, patience_s=LONG_S)
        meddler.cancel()

    asyncio.run(test())
