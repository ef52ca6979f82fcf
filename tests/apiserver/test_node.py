"""A full node of a real API server: the agent, fifty pods, and a label that comes and goes."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.apiserver.at_work import make
from tests.fakes.fake_api import NODE
from tests.support.agent import Agent, running, wait_for
from tests.support.netns import inside, namespace
from tests.support.real_api import RealApi, ask
from tests.support.runtime import Runtime

pytestmark = pytest.mark.netns
PODS = 50
TABLE = "table inet intercept-agent"
LONG_S = 90.0


@pytest.fixture
def pods(api: RealApi, tmp_path: Path) -> Iterator[dict[str, str]]:
    """Pods that run without their capture; the value is their namespaces by name."""
    with contextlib.ExitStack() as stack:
        names = [f"pod-{number}" for number in range(PODS)]
        found = {name: stack.enter_context(namespace("full")) for name in names}
        runtime = stack.enter_context(Runtime(tmp_path / "cri.sock"))
        for name, netns in found.items():
            metadata = make(api, name)["metadata"]
            runtime.run(name, netns, uid=metadata["uid"], annotations=metadata["annotations"])
        yield found


@pytest.fixture
def agent(
    api: RealApi, pods: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Agent]:
    monkeypatch.setenv("INTERCEPT_STATE_DIR", str(tmp_path / "state"))
    kubernetes = {"kubeconfig": str(api.kubeconfig("agent", api.token())), "node": NODE}
    config: dict[str, Any] = {"kubernetes": kubernetes, "backend": "nftables"}
    with running(tmp_path, cri={"endpoint": f"unix://{tmp_path}/cri.sock"}, **config) as agent:
        yield agent


def states(agent: Agent) -> list[str]:
    return [pod["state"] for pod in agent.ask("pods")]


def told(api: RealApi, reason: str) -> set[str]:
    """Return the pods that an Event of the server tells it of."""
    events = ask(api.admin, "GET", "/api/v1/namespaces/shop/events")["items"]
    return {event["involvedObject"]["name"] for event in events if event["reason"] == reason}


def test_full_node_is_captured_leaves_the_mesh_and_comes_back(
    api: RealApi, pods: dict[str, str], agent: Agent
) -> None:
    wait_for(lambda: states(agent) == ["in-sync"] * PODS, LONG_S)
    assert all(TABLE in inside(netns, "nft", "list", "ruleset") for netns in pods.values())
    wait_for(lambda: told(api, "CapturedLate") == set(pods), LONG_S)
    api.label_shop(None)
    wait_for(lambda: states(agent) == ["ignored"] * PODS, LONG_S)
    wait_for(lambda: told(api, "LeftoverFound") == set(pods), LONG_S)
    api.label_shop("enabled")
    wait_for(lambda: states(agent) == ["in-sync"] * PODS, LONG_S)
    wait_for(lambda: told(api, "LeftoverGone") == set(pods), LONG_S)
    for _ in range(3):
        api.label_shop(None)
        api.label_shop("enabled")
    wait_for(lambda: states(agent) == ["in-sync"] * PODS, LONG_S)
    assert all(TABLE in inside(netns, "nft", "list", "ruleset") for netns in pods.values())
    assert "drift-repaired" not in agent.kinds()
