"""The rights of the agent: it makes use of each that it asks for, and says which one it lacks."""

import asyncio
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from agent.node.kube.cluster import rights
from tests.apiserver.at_work import NODES, Agent, make, working
from tests.apiserver.conftest import POLICY
from tests.fakes.fake_api import NODE
from tests.support.hearing import until
from tests.support.real_api import ACCOUNT, RealApi, ask

ROLE = f"/apis/rbac.authorization.k8s.io/v1/clusterroles/{ACCOUNT}"
ALL = [(verb, kind) for kind, verbs in rights(POLICY).items() for verb in verbs]


def used(api: RealApi) -> set[tuple[str, str]]:
    """Return the verbs and resources that the agent's account was allowed and has made use of."""
    return {
        (event["verb"], event["objectRef"]["resource"])
        for event in api.requests()
        if event.get("annotations", {}).get("authorization.k8s.io/decision") == "allow"
    }


def told(api: RealApi) -> bool:
    events = ask(api.admin, "GET", "/api/v1/namespaces/shop/events")["items"]
    return "CaptureFailed" in {event["reason"] for event in events}


async def do_everything(agent: Agent, api: RealApi) -> None:
    """Have the agent do all that it ever asks a server for."""
    late, risky = make(api, "late"), make(api, "risky")
    await agent.cluster.look_up("shop", "nobody", "")
    for name in ("late", "risky"):
        await until(partial(agent.cluster.pod, "shop", name, ""))
    agent.late(late)
    agent.late(risky, "its connections would be cut")
    agent.events.add("failed", "shop/late", "the kernel said no")
    await until(lambda: told(api) or "403" in agent.cluster.detail)
    agent.events.add("failed", "shop/late", "the kernel said no")  # which is counted


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent.node.kube.announcer.AGAIN_S", 0.5)


def test_every_right_is_made_use_of(
    api: RealApi, node: Callable[[], dict[str, Any]], tmp_path: Path
) -> None:
    async def test() -> None:
        taints = [{"key": POLICY.taint, "effect": "NoSchedule"}]
        ask(api.admin, "PATCH", f"{NODES}/{NODE}", {"spec": {"taints": taints}})
        async with working(api, tmp_path, POLICY) as agent:
            await do_everything(agent, api)
            await until(lambda: used(api) == set(ALL), f"{set(ALL) ^ used(api)}")
            assert "403" not in agent.cluster.detail

    asyncio.run(test())


@pytest.fixture
def without(api: RealApi) -> Iterator[Callable[[str, str], None]]:
    """Take a right from the agent's account until the test is over."""
    rules = ask(api.admin, "GET", ROLE)["rules"]

    def take(verb: str, kind: str) -> None:
        left = [
            {**rule, "verbs": [one for one in rule["verbs"] if one != verb]}
            if rule["resources"] == [kind]
            else rule
            for rule in rules
        ]
        ask(api.admin, "PATCH", ROLE, {"rules": left})

    yield take
    ask(api.admin, "PATCH", ROLE, {"rules": rules})


@pytest.mark.parametrize(("verb", "kind"), ALL)
def test_right_that_is_missing_is_named(
    api: RealApi,
    node: Callable[[], dict[str, Any]],
    without: Callable[[str, str], None],
    tmp_path: Path,
    verb: str,
    kind: str,
) -> None:
    async def test() -> None:
        taints = [{"key": POLICY.taint, "effect": "NoSchedule"}]
        ask(api.admin, "PATCH", f"{NODES}/{NODE}", {"spec": {"taints": taints}})
        without(verb, kind)
        async with working(api, tmp_path, POLICY, listed=False) as agent:
            if verb not in ("list", "watch"):
                await do_everything(agent, api)
            wanted = f'cannot {verb} resource "{kind}"'
            await until(lambda: wanted in agent.cluster.detail, agent.cluster.detail)
            assert "the agent lacks this right (RBAC)" in agent.cluster.detail

    asyncio.run(test())
