"""The agent on a real node: a chain that it enters by itself, pods that the runtime starts."""

import contextlib
import json
import re
import signal
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from agent.cli.main import main
from tests.containerd.node import SUBNETS_DUAL, Node, Pod, containerd_node
from tests.support.agent import INJECTED, Agent, running, wait_for

MANY = 20
MESH = {"sidecar.istio.io/inject": "true"}


@pytest.fixture
def node() -> Iterator[Node]:
    with containerd_node(subnets=SUBNETS_DUAL) as node:
        yield node


def on(node: Node) -> Mapping[str, object]:
    """Return the configuration of an agent for this node."""
    return {
        "cri": {"endpoint": f"unix://{node.socket}"},
        "cni": {"conf_dir": str(node.conf_dir), "bin_dir": str(node.bin_dir)},
    }


def chain(node: Node) -> list[str]:
    conflist = json.loads((node.conf_dir / "10-test.conflist").read_text())
    return [plugin["type"] for plugin in conflist["plugins"]]


def mesh_pod(node: Node, name: str) -> Pod:
    return node.run_pod(name, "shop", labels=MESH, annotations=INJECTED)


def captured(node: Node, pod: Pod) -> bool:
    assert pod.netns is not None
    listing = node.run("nsenter", f"--net={pod.netns}", "nft", "list", "ruleset")
    return "table inet intercept-agent" in listing


def test_pod_is_captured_when_the_runtime_says_that_it_runs(node: Node, tmp_path: Path) -> None:
    with running(tmp_path, **on(node)) as agent:
        assert chain(node) == ["bridge", "intercept-cni"]
        web, plain = mesh_pod(node, "web"), node.run_pod("plain")
        assert captured(node, web)
        assert not captured(node, plain)
        wait_for(lambda: agent.state("web") == "in-sync")
        wait_for(lambda: agent.state("plain") == "ignored")
        wait_for(lambda: source_of(agent, "web") == "cri")
        node.remove_pod(web)
        wait_for(lambda: agent.pod("web") is None)


def test_agent_that_comes_later_captures_the_pods_that_run(node: Node, tmp_path: Path) -> None:
    web = mesh_pod(node, "web")
    assert not captured(node, web)
    with running(tmp_path, **on(node)) as agent:
        wait_for(lambda: agent.state("web") == "in-sync")
        assert captured(node, web)


def test_killed_agent_leaves_pods_captured_and_lets_no_mesh_pod_start(
    node: Node, tmp_path: Path
) -> None:
    with running(tmp_path, **on(node)) as agent:
        web = mesh_pod(node, "web")
        agent.stop(signal.SIGKILL)
        assert captured(node, web)
        with pytest.raises(grpc.RpcError, match="intercept-agent"):
            mesh_pod(node, "late")
        node.run_pod("plain")
        node.remove_pod(web)
        agent.start()
        assert captured(node, mesh_pod(node, "late"))


def test_base_cni_that_rewrites_its_chain_gets_the_entry_again(node: Node, tmp_path: Path) -> None:
    with running(tmp_path, **on(node)) as agent:
        conflist = json.loads((node.conf_dir / "10-test.conflist").read_text())
        conflist["plugins"].pop()
        node.write_conflist(conflist)
        wait_for(lambda: chain(node) == ["bridge", "intercept-cni"])
        wait_for(lambda: agent.status()["ready"])
        assert captured(node, mesh_pod(node, "web"))


@pytest.mark.parametrize("who", ["the agent knows", "the container runtime knows"])
def test_commands_find_a_pod_by_its_name(
    node: Node,
    tmp_path: Path,
    who: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node.run_pod("node-pod", "shop", host_network=True)
    with running(tmp_path, **on(node)) as agent:
        mesh_pod(node, "web")
        wait_for(lambda: source_of(agent, "web") == "cri")
        wait_for(lambda: agent.pod("node-pod"))
        monkeypatch.setenv("INTERCEPT_SOCKET", str(agent.socket))
        monkeypatch.setenv("INTERCEPT_CRI_ENDPOINT", f"unix://{node.socket}")
        if who == "the container runtime knows":
            agent.stop()
        assert main(["check", "--netns", "pod:shop/web"]) == 0
        capsys.readouterr()
        assert main(["check", "--netns", "pod:shop/never"]) == 3
        assert f"{who} no pod never of the namespace shop" in capsys.readouterr().err
        assert main(["check", "--netns", "pod:shop/node-pod"]) == 3
        assert "host network" in capsys.readouterr().err


def test_pod_that_nobody_can_be_asked_about_is_refused_in_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INTERCEPT_SOCKET", str(tmp_path / "agent.sock"))
    monkeypatch.setenv("INTERCEPT_CRI_ENDPOINT", f"unix://{tmp_path}/runtime.sock")
    assert main(["check", "--netns", "pod:shop/web"]) == 3
    said = capsys.readouterr().err
    assert "no agent answers on" in said
    assert "no container runtime answers" in said
    assert main(["check", "--netns", "pod:web"]) == 3
    assert "write pod:NAMESPACE/NAME" in capsys.readouterr().err


def test_many_pods_at_once_are_each_as_they_should_be_also_after_a_restart(
    node: Node, tmp_path: Path
) -> None:
    with running(tmp_path, **on(node)) as agent, ThreadPoolExecutor(4) as pool:
        mesh = list(pool.map(lambda n: mesh_pod(node, f"mesh-{n}"), range(MANY)))
        plain = list(pool.map(lambda n: node.run_pod(f"plain-{n}"), range(MANY // 4)))
        expected = {
            **{pod.name: "in-sync" for pod in mesh},
            **{pod.name: "ignored" for pod in plain},
        }
        wait_for(lambda: states(agent) == expected)
        handles = [rule_handles(node, pod) for pod in mesh]
        agent.stop(signal.SIGKILL)
        agent.start()
        wait_for(lambda: states(agent) == expected)
        assert [rule_handles(node, pod) for pod in mesh] == handles
        assert f'state="in-sync"}} {MANY}.0' in agent.get("status", "/metrics")[1]


def test_no_mesh_pod_starts_uncaptured_while_the_agent_is_killed_again_and_again(
    node: Node, tmp_path: Path
) -> None:
    started: list[Pod] = []

    def start(number: int) -> None:
        for _ in range(50):  # as the kubelet does
            with contextlib.suppress(grpc.RpcError):
                started.append(mesh_pod(node, f"mesh-{number}"))
                return

    with running(tmp_path, **on(node)) as agent, ThreadPoolExecutor(2) as pool:
        starting = [pool.submit(start, number) for number in range(MANY)]
        while not all(future.done() for future in starting):
            agent.stop(signal.SIGKILL)
            agent.start()
            time.sleep(0.2)
        for future in starting:
            future.result()
        assert len(started) == MANY
        assert all(captured(node, pod) for pod in started)


def states(agent: Agent) -> dict[str, str]:
    return {pod["name"]: pod["state"] for pod in agent.ask("pods")}


def rule_handles(node: Node, pod: Pod) -> list[str]:
    """Return the numbers of a pod's rules: one that is written again has another."""
    assert pod.netns is not None
    listing = node.run("nsenter", f"--net={pod.netns}", "nft", "-a", "list", "ruleset")
    return re.findall(r"handle \d+", listing)


def source_of(agent: Agent, name: str) -> object:
    pod = agent.pod(name)
    return pod and pod["source"]
