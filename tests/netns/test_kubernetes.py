"""The running agent with an API server, a runtime and real namespaces: what is wanted changes.

Both servers are fakes that speak the real protocols. The API server gives no right that is not in
`rights`, so these tests also show that the agent needs no other.
"""

import contextlib
import json
import signal
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from agent.kernel.netns import Netns
from agent.node.config import Kubernetes
from agent.node.kube.cluster import rights
from agent.node.kube.repair import LABEL
from tests.fakes import fake_api
from tests.fakes.fake_api import NODE, FakeApi, kubeconfig, pod, serving
from tests.support.agent import Agent, running, wait_for
from tests.support.conformance import cli_process
from tests.support.escape import lab
from tests.support.netns import inside, namespace, path_of, run
from tests.support.runtime import Runtime

EXCLUDE = "traffic.sidecar.istio.io/excludeOutboundPorts"
STATUS = "sidecar.istio.io/status"
IN_MESH = {"istio-injection": "enabled"}
TABLE = "table inet intercept-agent"
LONG_S = 60.0


@dataclass
class Node:
    """A node with its two servers, and how to make pods on it."""

    api: FakeApi
    runtime: Runtime
    folder: Path

    def config(self, **kubernetes: object) -> dict[str, Any]:
        found = {"kubeconfig": str(self.folder / "kubeconfig"), "node": NODE, **kubernetes}
        allowed = rights(Kubernetes(**found))  # type: ignore[arg-type]
        self.api.rights = frozenset((verb, kind) for kind in allowed for verb in allowed[kind])
        return {
            "cri": {"endpoint": f"unix://{self.runtime.socket}"},
            "kubernetes": found,
            "backend": "nftables",
        }

    def run(self, name: str, netns: str, **fields: Any) -> None:
        """Create a pod and start it."""
        self.api.put("pods", pod(name, **fields))
        self.start(name, netns)

    def start(self, name: str, netns: str) -> None:
        """Start a pod that the API server has."""
        annotations = self.api.get("pods", "shop", name)["metadata"].get("annotations", {})
        self.runtime.run(name, netns, uid=f"uid-{name}", annotations=annotations)

    def annotate(self, name: str, annotations: Mapping[str, str | None]) -> None:
        self.api.change("pods", "shop", name, {"metadata": {"annotations": dict(annotations)}})

    def label_namespace(self, labels: Mapping[str, str] | None) -> None:
        self.api.change("namespaces", "", "shop", {"metadata": {"labels": labels}})

    def labels(self, name: str) -> dict[str, str]:
        found: dict[str, str] = self.api.get("pods", "shop", name)["metadata"].get("labels", {})
        return found

    def pods(self) -> set[str]:
        """Return the names of those that nobody has deleted."""
        kept = [one["metadata"] for one in self.api.all("pods")]
        return {metadata["name"] for metadata in kept if "deletionTimestamp" not in metadata}

    def taints(self) -> object:
        return self.api.get("nodes", "", NODE)["spec"].get("taints")

    def events(self, reason: str) -> list[dict[str, Any]]:
        return [event for event in self.api.all("events") if event["reason"] == reason]

    def stale(self) -> list[dict[str, Any]]:
        found = self.events("LeftoverFound")
        return [event for event in found if event["message"].startswith("stale-capture")]


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    monkeypatch.setenv("INTERCEPT_STATE_DIR", str(tmp_path / "state"))
    with serving() as api, Runtime(tmp_path / "cri.sock") as runtime:
        kubeconfig(tmp_path, api)
        api.put("namespaces", fake_api.namespace("shop", istio_injection="enabled"))
        made = Node(api, runtime, tmp_path)
        yield made
        assert api.refused == []


def rules(netns: str) -> str:
    return inside(netns, "nft", "list", "ruleset")


def findings(agent: Agent) -> list[Mapping[str, Any]]:
    found: list[Mapping[str, Any]] = json.loads(agent.get("status", "/debug/leftovers")[1])[
        "findings"
    ]
    return found


# --- what is wanted of running pods ---------------------------------------------------------------


def test_exclusion_that_changes_is_applied_in_place_and_connections_live_on(node: Node) -> None:
    with lab("kube") as made, running(node.folder, **node.config()) as agent:
        node.run("web", made.pod)
        wait_for(lambda: agent.state("web") == "in-sync")
        assert set(made.hold()) == {"proxy-15001", "proxy-15006"}
        node.annotate("web", {EXCLUDE: "8000"})
        wait_for(lambda: made.dial()[:2] == ("service", "service"))
        assert made.ping() == ("alive",) * 4
        node.annotate("web", {EXCLUDE: None})
        wait_for(lambda: made.dial()[:2] == ("proxy-15001", "proxy-15001"))
        assert made.ping() == ("alive",) * 4
        told = agent.ask("events", since=0, wait_s=0)
        assert not [event for event in told if event["kind"].startswith("drift")]


def test_namespace_that_leaves_the_mesh_and_comes_back(node: Node) -> None:
    with (
        namespace("old") as old,
        namespace("new") as new,
        running(node.folder, **node.config()) as agent,
    ):
        node.run("old", old)
        wait_for(lambda: agent.state("old") == "in-sync")
        node.label_namespace(None)
        wait_for(node.stale)
        (event,) = node.stale()
        assert event["involvedObject"]["uid"] == "uid-old"
        assert event["involvedObject"]["kind"] == "Pod"
        assert ("stale-capture", "shop/old") in {
            (found["kind"], found["where"]["pod"]) for found in findings(agent)
        }
        assert TABLE in rules(old)
        node.run("new", new)
        wait_for(lambda: agent.state("new") == "ignored")
        shown = agent.pod("new")
        assert shown is not None
        assert shown["reason"] == "namespace-left"
        assert rules(new) == ""
        node.label_namespace(IN_MESH)
        wait_for(lambda: agent.state("old") == agent.state("new") == "in-sync")
        assert TABLE in rules(new)
        wait_for(lambda: not [f for f in findings(agent) if f["kind"] == "stale-capture"])
        wait_for(lambda: any("stale" in e["message"] for e in node.events("LeftoverGone")))
        assert "drift-repaired" not in agent.kinds()


def test_pod_that_asks_by_itself_stays_when_its_namespace_leaves(node: Node) -> None:
    with namespace("own") as own, running(node.folder, **node.config()) as agent:
        node.run("own", own, labels={"sidecar.istio.io/inject": "true"})
        wait_for(lambda: agent.state("own") == "in-sync")
        node.label_namespace({"istio-injection": "disabled"})
        node.annotate("own", {EXCLUDE: "8000"})  # which arrives after it, or with it
        wait_for(lambda: "8000" in rules(own))
        wait_for(lambda: agent.state("own") == "in-sync")


def test_explain_says_what_is_asked_of_a_pod_now(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    with namespace("web") as web, running(node.folder, **node.config()) as agent:
        node.run("web", web)
        node.annotate("web", {EXCLUDE: "8000"})
        wait_for(lambda: "8000" in rules(web))
        monkeypatch.setenv("INTERCEPT_SOCKET", str(agent.socket))
        monkeypatch.setenv("INTERCEPT_CRI_ENDPOINT", f"unix://{node.runtime.socket}")
        shown = cli_process("explain", "shop/web", "-o", "json").document
        assert shown["should_be"] is True
        kinds = {found["kind"]: found for found in shown["findings"]}
        assert "stale-capture" not in kinds
        assert "goes by what they are now" in kinds["changed-since"]["means"]
        node.label_namespace(None)
        wait_for(lambda: agent.state("web") == "ignored")
        shown = cli_process("explain", "shop/web", "-o", "json").document
        assert shown["should_be"] is False
        assert shown["reason"] == "namespace-left"
        assert "stale-capture" in {found["kind"] for found in shown["findings"]}


# --- the API server comes and goes ----------------------------------------------------------------


def test_agent_works_on_while_the_api_server_is_gone_and_says_so(node: Node) -> None:
    with namespace("a") as a, namespace("b") as b, running(node.folder, **node.config()) as agent:
        node.run("a", a)
        node.api.put("pods", pod("b"))
        wait_for(lambda: agent.state("a") == "in-sync")
        wait_for(lambda: "2 pods" in agent.status()["sources"][0]["detail"])
        node.api.stop()
        wait_for(lambda: agent.get("health", "/healthz/ready")[0] == 503)
        pending = json.loads(agent.get("health", "/healthz/ready")[1])["pending"]
        assert len(pending) == 1
        assert pending[0].startswith("kubernetes: ")
        assert "decisions go on from what is known" in pending[0]
        metrics = agent.get("status", "/metrics")[1]
        assert 'intercept_source_connected{source="kubernetes"} 0.0' in metrics
        assert agent.get("health", "/healthz/live")[0] == 200
        inside(a, "nft", "delete", "table", "inet", "intercept-agent")
        wait_for(lambda: TABLE in rules(a))
        args = "K8S_POD_UID=uid-b;K8S_POD_NAMESPACE=shop;K8S_POD_NAME=b"
        assert agent.cni("ADD", b, annotations=None, args=args)[0] == 0  # known from the watch
        assert TABLE in rules(b)
        node.api.start()
        wait_for(lambda: agent.get("health", "/healthz/ready")[0] == 200)


def test_agent_that_starts_without_the_api_server_goes_by_what_it_knew(node: Node) -> None:
    with namespace("a") as a, running(node.folder, **node.config()) as agent:
        node.run("a", a)
        node.annotate("a", {EXCLUDE: "8000"})
        wait_for(lambda: "8000" in rules(a))
        state = node.folder / "state" / "kubernetes.json"
        wait_for(lambda: "8000" in state.read_text())
        agent.stop()
        node.api.stop()
        before = rules(a)
        agent.start(ready=False)
        wait_for(lambda: agent.state("a") == "in-sync")
        assert rules(a) == before
        pending = json.loads(agent.get("health", "/healthz/ready")[1])["pending"]
        assert [said.partition(":")[0] for said in pending] == ["kubernetes"]
        node.api.start()
        wait_for(lambda: agent.status()["ready"])
        assert rules(a) == before


def test_pod_of_which_the_runtime_says_nothing_is_asked_for(node: Node) -> None:
    """It has no annotations for the plugin, and the watch has not told of it yet."""
    with (
        namespace("mesh") as mesh,
        namespace("plain") as plain,
        running(node.folder, **node.config()) as agent,
    ):
        node.api.faults.deaf_watches = True
        node.api.end_watches()
        wait_for(lambda: node.api.count("WATCH /api/v1/pods") > 1)
        node.api.put("pods", pod("one"))
        other = pod("other", containers=[{"name": "app"}])
        del other["metadata"]["annotations"][STATUS]
        node.api.put("pods", other)

        def add(name: str, netns: str) -> int:
            args = f"K8S_POD_UID=uid-{name};K8S_POD_NAMESPACE=shop;K8S_POD_NAME={name}"
            return agent.cni("ADD", netns, annotations=None, args=args)[0]

        # The kubelet, too, tries again where the answer took too long.
        wait_for(lambda: add("one", mesh) == 0)
        wait_for(lambda: add("other", plain) == 0)
        assert add("nobody", plain) == 1
        assert TABLE in rules(mesh)
        assert rules(plain) == ""


def test_reload_takes_the_api_server_away_and_brings_it_back(node: Node) -> None:
    with namespace("a") as a, running(node.folder, **node.config()) as agent:
        node.run("a", a)
        node.annotate("a", {EXCLUDE: "8000"})
        wait_for(lambda: "8000" in rules(a))
        agent.configure(**{**node.config(), "kubernetes": {"kubeconfig": "none"}})
        agent.tell(signal.SIGHUP)
        wait_for(lambda: "8000" not in rules(a))  # what the runtime says is all there is
        agent.configure(**node.config())
        agent.tell(signal.SIGHUP)
        wait_for(lambda: "8000" in rules(a))


# --- Events ---------------------------------------------------------------------------------------


def test_events_tell_of_failures_repairs_and_risks(node: Node) -> None:
    risky = [
        {"name": "app", "securityContext": {"runAsUser": 1337}},
        {"name": "vpn", "securityContext": {"capabilities": {"add": ["NET_ADMIN"]}}},
        {"name": "istio-proxy"},
    ]
    with namespace("a") as a, running(node.folder, **node.config()) as agent:
        node.run("a", a, containers=risky)
        wait_for(lambda: agent.state("a") == "in-sync")
        wait_for(lambda: len(node.events("BypassRisk")) == 2)
        said = " ".join(event["message"] for event in node.events("BypassRisk"))
        assert "container app runs as user 1337" in said
        assert "container vpn holds NET_ADMIN" in said
        inside(a, "nft", "delete", "table", "inet", "intercept-agent")
        wait_for(lambda: node.events("CaptureRepaired"))
        event = node.events("CaptureRepaired")[0]
        assert event["type"] == "Warning"
        assert event["source"] == {"component": "intercept-agent", "host": NODE}
        assert event["count"] == 1
        node.run("gone", "it-there-is-none")
        wait_for(lambda: node.events("CaptureFailed"))
        assert node.events("CaptureFailed")[0]["involvedObject"]["name"] == "gone"
        assert agent.status()["ready"]


# --- pods that were there before the agent --------------------------------------------------------


@contextlib.contextmanager
def late_pods(node: Node, names: list[str]) -> Iterator[dict[str, str]]:
    """Pods that run when no agent does; the value is their namespaces by name."""
    with contextlib.ExitStack() as stack:
        found = {name: stack.enter_context(namespace("late")) for name in names}
        for name, netns in found.items():
            node.run(name, netns)
        yield found


class Busy:
    """A pod with an idle connection each way, to a namespace that all such pods are joined to."""

    def __init__(self, pod: str, peer: str, number: int) -> None:
        self.pod = pod
        here, there = f"10.80.{number}.2", f"10.80.{number}.1"
        link = f"pod{number}"
        run("ip", "link", "add", "eth0", "netns", pod, "type", "veth", "peer", link, "netns", peer)
        for space, device, address in ((pod, "eth0", here), (peer, link, there)):
            run("ip", "-n", space, "addr", "add", f"{address}/24", "dev", device)
            run("ip", "-n", space, "link", "set", device, "up")
        with Netns.open(path_of(pod)) as inner, Netns.open(path_of(peer)) as outer:
            self._doors = (
                inner.run(lambda: socket.create_server((here, 8080))),
                outer.run(lambda: socket.create_server((there, 8000))),
            )
            self._out = self._pair(inner, self._doors[1])
            self._in = self._pair(outer, self._doors[0])

    def _pair(self, client: Netns, door: socket.socket) -> tuple[socket.socket, socket.socket]:
        made = client.run(lambda: socket.create_connection(door.getsockname(), timeout=10))
        accepted, _ = door.accept()
        accepted.settimeout(10)
        return made, accepted

    def alive(self) -> bool:
        for one, other in (self._out, self._in):
            for sender, receiver in ((one, other), (other, one)):
                sender.send(b"still there?")
                assert receiver.recv(64) == b"still there?"
        return True

    def passes(self) -> bool:
        """Whether a new connection gets past the proxy, which is not there."""
        with Netns.open(path_of(self.pod)) as inner:
            return inner.run(lambda: dialled(self._doors[1].getsockname()))

    def close(self) -> None:
        for one in (*self._doors, *self._out, *self._in):
            one.close()


def dialled(address: tuple[str, int]) -> bool:
    with contextlib.suppress(ConnectionRefusedError), socket.create_connection(address, timeout=10):
        return True
    return False


def test_fifty_pods_without_rules_are_captured_and_their_connections_live_on(node: Node) -> None:
    with contextlib.ExitStack() as stack:
        names = [f"pod-{number}" for number in range(50)]
        pods = stack.enter_context(late_pods(node, names))
        peer = stack.enter_context(namespace("peer"))
        busy = []
        for number in range(25):
            busy.append(Busy(pods[names[number]], peer, number))
            stack.callback(busy[-1].close)
        assert all(each.alive() and each.passes() for each in busy)
        with running(node.folder, **node.config()) as agent:
            wait_for(lambda: {pod["state"] for pod in agent.ask("pods")} == {"in-sync"}, LONG_S)
            assert len(agent.ask("pods")) == 50
            assert all(TABLE in rules(netns) for netns in pods.values())
            assert all(each.alive() and not each.passes() for each in busy)
            wait_for(lambda: len(node.events("CapturedLate")) == 50, LONG_S)
            told = [event["message"] for event in node.events("CapturedLate")]
            assert sum("connections that were open go on past" in said for said in told) == 25


@pytest.mark.parametrize("policy", ["event", "label"])
def test_late_pod_is_told_of_or_labelled_and_not_touched(node: Node, policy: str) -> None:
    config = node.config(repair=policy)
    with late_pods(node, ["late"]) as found, running(node.folder, **config) as agent:
        wait_for(lambda: agent.state("late") == "drifted")
        wait_for(lambda: node.events("Uncaptured"))
        if policy == "label":
            wait_for(lambda: node.labels("late").get(LABEL) == "true")
        assert rules(found["late"]) == ""
        agent.configure(**node.config(repair="program"))
        node.api.rights = None  # it goes on knowing the label that it set
        agent.tell(signal.SIGHUP)
        wait_for(lambda: agent.state("late") == "in-sync")
        wait_for(lambda: LABEL not in node.labels("late"))


def test_late_pods_are_deleted_one_by_one_and_only_those_that_come_back(node: Node) -> None:
    config = node.config(repair="delete")
    names = ["owned-1", "owned-2", "lonely", "newer"]
    with late_pods(node, names) as found:
        node.api.put("pods", pod("lonely", owned=False))
        tomorrow = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 86400))
        node.api.put("pods", pod("newer", created=tomorrow))
        with running(node.folder, **config) as agent:
            wait_for(lambda: {p["state"] for p in agent.ask("pods")} == {"drifted"})
            wait_for(lambda: len(node.pods()) == 3)
            first = time.monotonic()
            wait_for(lambda: node.pods() == {"lonely", "newer"})
            assert time.monotonic() - first > 1.0
            wait_for(lambda: len(node.events("DeletedUncaptured")) == 2)
            wait_for(lambda: len(node.events("Uncaptured")) == 4)
            said = {e["involvedObject"]["name"]: e["message"] for e in node.events("Uncaptured")}
            assert "nobody would make another one" in said["lonely"]
            assert "it started after the agent" in said["newer"]
            assert all(rules(netns) == "" for netns in found.values())


# --- the node's taint -----------------------------------------------------------------------------


def test_taint_goes_when_the_agent_is_ready_and_stays_when_it_ends(node: Node) -> None:
    born = {"key": "intercept-agent/not-ready", "effect": "NoSchedule"}
    other = {"key": "other", "effect": "NoExecute"}
    node.api.put("nodes", {"metadata": {"name": NODE}, "spec": {"taints": [born, other]}})
    config = node.config(taint="intercept-agent/not-ready")
    with running(node.folder, **config) as agent:
        wait_for(lambda: node.taints() == [other])
        agent.stop()
        assert node.taints() == [other]
