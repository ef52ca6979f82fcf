"""The agent on a real node: a chain that it enters by itself, pods that the runtime starts."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.cli.main import main
from agent.kernel import bpf_pins
from agent.model.state import EBPF
from tests.containerd.mesh import configuration, mesh_pod
from tests.containerd.node import SUBNETS_DUAL, Node, Pod, containerd_node
from tests.support.agent import Agent, running, wait_for
from tests.support.ebpf import built


@pytest.fixture
def node() -> Iterator[Node]:
    with containerd_node(subnets=SUBNETS_DUAL) as node:
        yield node


def chain(node: Node) -> list[str]:
    conflist = json.loads((node.conf_dir / "10-test.conflist").read_text())
    return [plugin["type"] for plugin in conflist["plugins"]]


def captured(node: Node, pod: Pod) -> bool:
    assert pod.netns is not None
    listing = node.run("nsenter", f"--net={pod.netns}", "nft", "list", "ruleset")
    return "table inet intercept-agent" in listing


def test_pod_is_captured_when_the_runtime_says_that_it_runs(node: Node, tmp_path: Path) -> None:
    with running(tmp_path, **configuration(node)) as agent:
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
    with running(tmp_path, **configuration(node)) as agent:
        wait_for(lambda: agent.state("web") == "in-sync")
        assert captured(node, web)


def test_base_cni_that_rewrites_its_chain_gets_the_entry_again(node: Node, tmp_path: Path) -> None:
    with running(tmp_path, **configuration(node)) as agent:
        conflist = json.loads((node.conf_dir / "10-test.conflist").read_text())
        conflist["plugins"].pop()
        node.write_conflist(conflist)
        wait_for(lambda: chain(node) == ["bridge", "intercept-cni"])
        wait_for(lambda: agent.status()["ready"])
        assert captured(node, mesh_pod(node, "web"))


def test_plugin_is_not_chained_where_the_runtime_does_not_look_for_it(
    node: Node,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No pod of the node could start or end with an entry whose plugin is not found."""
    places = configuration(node)
    elsewhere = str(tmp_path / "bin")
    Path(elsewhere).mkdir()
    wrong = {"conf_dir": str(node.conf_dir), "bin_dir": elsewhere}
    agent = Agent(tmp_path, **{**places, "cni": wrong})
    monkeypatch.setenv("INTERCEPT_SOCKET", str(agent.socket))
    monkeypatch.setenv("INTERCEPT_CRI_ENDPOINT", f"unix://{node.socket}")
    try:
        agent.start(ready=False)
        wait_for(lambda: f"not in {elsewhere}" in str(agent.status()["pending"]))
        assert main(["cni", "install", "--bin-dir", elsewhere]) == 3
        assert f"looks for plugins in {node.bin_dir}" in capsys.readouterr().err
        assert chain(node) == ["bridge"]
        agent.configure(**places)
        agent.tell(signal.SIGHUP)
        wait_for(lambda: agent.status()["ready"])
        assert chain(node) == ["bridge", "intercept-cni"]
        assert main(["cni", "check"]) == 0  # in the runtime's directories, which nobody names
        unread = str(tmp_path / "net.d")
        Path(unread).mkdir()
        agent.configure(**{**places, "cni": {**wrong, "conf_dir": unread}})
        agent.tell(signal.SIGHUP)
        wait_for(lambda: f"not {unread}" in str(agent.status()["pending"]))
    finally:
        agent.kill()


@pytest.mark.parametrize("who", ["the agent knows", "the container runtime knows"])
def test_commands_find_a_pod_by_its_name(
    node: Node,
    tmp_path: Path,
    who: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node.run_pod("node-pod", "shop", host_network=True)
    with running(tmp_path, **configuration(node)) as agent:
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


def source_of(agent: Agent, name: str) -> object:
    pod = agent.pod(name)
    return pod and pod["source"]


def test_pods_captured_by_ebpf_come_and_go(node: Node, tmp_path: Path) -> None:
    built()
    with running(tmp_path, backend=EBPF, **configuration(node)) as agent:
        pods = [mesh_pod(node, f"web{number}") for number in range(3)]
        wait_for(lambda: {agent.state(pod.name) for pod in pods} == {"in-sync"})
        for pod in pods:
            found = agent.pod(pod.name)
            assert found is not None
            assert found["backend"] == EBPF
            assert not captured(node, pod)  # by rules
        assert len(list((bpf_pins.base() / "pods").iterdir())) == len(pods)
        for pod in pods[1:]:
            node.remove_pod(pod)
        again = mesh_pod(node, "again")
        wait_for(lambda: len(list((bpf_pins.base() / "pods").iterdir())) == 2)
        assert agent.pod("web0") is not None
        wait_for(lambda: agent.state("again") == "in-sync")
        node.remove_pod(again)
