"""The running agent and an API server: the fake one, and a real one where there is its binary.

Everything that the agent asks of a server is asked of both here, with no right too many.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent.node.config import Kubernetes
from agent.node.kube.cluster import rights
from agent.node.kube.repair import LABEL
from tests.fakes import fake_api
from tests.fakes.fake_api import NODE
from tests.support import api_servers
from tests.support.agent import Agent, running, wait_for
from tests.support.api_servers import SERVERS, Server
from tests.support.netns import inside, namespace
from tests.support.real_api import ask
from tests.support.runtime import Runtime

TAINT = "intercept-agent/not-ready"
EXCLUDE = "traffic.sidecar.istio.io/excludeOutboundPorts"
PODS = "/api/v1/namespaces/shop/pods"
TABLE = "table inet intercept-agent"
LONG_S = 60.0


class Cluster:
    """An API server and a runtime, and how to make pods in both."""

    def __init__(self, server: Server, runtime: Runtime, config: dict[str, Any]) -> None:
        self.server, self.runtime, self.config = server, runtime, config

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        return ask(self.server.admin, method, path, body)

    def run(self, name: str, netns: str) -> None:
        made = self.ask("POST", PODS, fake_api.pod(name, kind="Pod", apiVersion="v1"))
        written = made["metadata"]["annotations"]
        self.runtime.run(name, netns, uid=made["metadata"]["uid"], annotations=written)

    def label_namespace(self, value: str | None) -> None:
        patch = {"metadata": {"labels": {"istio-injection": value}}}
        self.ask("PATCH", "/api/v1/namespaces/shop", patch)

    def metadata(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.ask("GET", f"{PODS}/{name}")["metadata"]
        return found

    def events(self, reason: str) -> list[dict[str, Any]]:
        found = self.ask("GET", "/api/v1/events")["items"]
        return [event for event in found if event["reason"] == reason]

    def taints(self) -> list[str]:
        found = self.ask("GET", f"/api/v1/nodes/{NODE}")["spec"].get("taints") or []
        return [taint["key"] for taint in found]


@pytest.fixture(params=SERVERS)
def cluster(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Cluster]:
    monkeypatch.setenv("INTERCEPT_STATE_DIR", str(tmp_path / "state"))
    policy: dict[str, Any] = {"repair": "label", "unsafe": "delete", "taint": TAINT, "node": NODE}
    allowed = rights(Kubernetes(**policy))
    with (
        api_servers.serving(request.param, tmp_path, allowed) as server,
        Runtime(tmp_path / "cri.sock") as runtime,
    ):
        config = {
            "cri": {"endpoint": f"unix://{runtime.socket}"},
            "kubernetes": {"kubeconfig": str(server.agent), **policy},
            "backend": "nftables",
        }
        made = Cluster(server, runtime, config)
        about = {"apiVersion": "v1"}
        node = {**about, "kind": "Node", "metadata": {"name": NODE}}
        taint = {"key": TAINT, "effect": "NoSchedule"}
        made.ask("POST", "/api/v1/nodes", {**node, "spec": {"taints": [taint]}})
        shop = fake_api.namespace("shop", istio_injection="enabled")
        made.ask("POST", "/api/v1/namespaces", {**about, "kind": "Namespace", **shop})
        yield made


def rules(netns: str) -> str:
    return inside(netns, "nft", "list", "ruleset")


def start(agent: Agent, cluster: Cluster, name: str, netns: str) -> None:
    """Have a pod start as one does where the plugin is in the chain."""
    made = cluster.ask("POST", PODS, fake_api.pod(name, kind="Pod", apiVersion="v1"))["metadata"]
    args = f"K8S_POD_UID={made['uid']};K8S_POD_NAMESPACE=shop;K8S_POD_NAME={name}"
    wait_for(lambda: agent.cni("ADD", netns, args=args)[0] == 0)
    cluster.runtime.run(name, netns, uid=made["uid"], annotations=made["annotations"])
    wait_for(lambda: agent.state(name) == "in-sync")


def test_agent_does_all_of_its_work_with_a_server(cluster: Cluster) -> None:
    with namespace("late") as late, namespace("new") as new:
        cluster.run("late", late)
        with running(cluster.runtime.socket.parent, **cluster.config) as agent:
            wait_for(lambda: TAINT not in cluster.taints())
            wait_for(lambda: cluster.metadata("late").get("labels", {}).get(LABEL) == "true")
            wait_for(lambda: cluster.events("Uncaptured"))
            assert rules(late) == ""

            start(agent, cluster, "new", new)
            patch = {"metadata": {"annotations": {EXCLUDE: "8000"}}}
            cluster.ask("PATCH", f"{PODS}/new", patch)
            wait_for(lambda: "8000" in rules(new))

            cluster.label_namespace(None)
            wait_for(lambda: agent.state("new") == "ignored")
            wait_for(lambda: any("stale" in e["message"] for e in cluster.events("LeftoverFound")))
            cluster.label_namespace("enabled")
            wait_for(lambda: agent.state("new") == "in-sync")
            wait_for(lambda: cluster.events("LeftoverGone"))
            about = cluster.events("LeftoverFound")[0]["involvedObject"]
            assert (about["kind"], about["name"]) == ("Pod", "new")
            assert TABLE in rules(new)
            assert agent.status()["ready"]


def test_agent_works_on_while_the_server_is_gone(cluster: Cluster) -> None:
    with (
        namespace("web") as web,
        running(cluster.runtime.socket.parent, **cluster.config) as agent,
    ):
        start(agent, cluster, "web", web)
        cluster.server.stop()
        wait_for(lambda: agent.get("health", "/healthz/ready")[0] == 503, LONG_S)
        assert "decisions go on from what is known" in agent.get("health", "/healthz/ready")[1]
        inside(web, "nft", "delete", "table", "inet", "intercept-agent")
        wait_for(lambda: TABLE in rules(web))
        cluster.server.start()
        wait_for(lambda: agent.get("health", "/healthz/ready")[0] == 200, LONG_S)
        cluster.ask("PATCH", f"{PODS}/web", {"metadata": {"annotations": {EXCLUDE: "8000"}}})
        wait_for(lambda: "8000" in rules(web))
        wait_for(lambda: cluster.events("CaptureRepaired"))  # which nobody could be told then
