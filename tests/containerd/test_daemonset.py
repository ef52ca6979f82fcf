"""The container of deploy/base on a real node, with exactly the rights that the manifest gives."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.containerd.kubelet import Installation, daemonset
from tests.containerd.mesh import mesh_pod
from tests.containerd.node import Node, Pod, containerd_node
from tests.support.agent import wait_for
from tests.support.cni_program import Program
from tests.support.netns import inside

NUMBERS = {
    **{"SETGID": 6, "SETUID": 7, "NET_ADMIN": 12, "NET_RAW": 13, "SYS_PTRACE": 19},
    "SYS_ADMIN": 21,
}
LONGEST_S = 60.0


@pytest.fixture
def node() -> Iterator[Node]:
    with containerd_node() as node:
        yield node


@pytest.fixture
def installation(node: Node, static_cni: Program) -> Installation:
    return Installation(node, Path(static_cni.words[0]))


def states(installation: Installation) -> dict[str, dict[str, Any]]:
    """Return the pods of the mesh by name."""
    pods = json.loads(installation.ask("pods", "-o", "json"))["pods"]
    return {pod["name"]: pod for pod in pods if pod["captured"]}


def ready(installation: Installation) -> bool:
    return bool(json.loads(installation.ask("status", "-o", "json"))["ready"])


def settled(installation: Installation, name: str) -> str:
    """Return the backend of a pod once its capture is as it should be."""
    wait_for(lambda: states(installation)[name]["state"] == "in-sync", LONGEST_S)
    return str(states(installation)[name]["backend"])


def bounding(node: Node, container: str) -> int:
    (bits,) = re.findall(r"CapBnd:\s+(\w+)", node.exec(container, "cat", "/proc/self/status").out)
    return int(bits, 16)


def rules(pod: Pod) -> str:
    assert pod.netns is not None
    return inside(pod.netns, "nft", "-a", "list", "table", "inet", "intercept-agent")


def test_container_has_exactly_the_rights_that_are_listed(
    node: Node, installation: Installation
) -> None:
    installation.start()
    wait_for(lambda: ready(installation), LONGEST_S)
    (container,) = daemonset()["spec"]["template"]["spec"]["containers"]
    listed = container["securityContext"]["capabilities"]["add"]
    assert bounding(node, installation.container) == sum(1 << NUMBERS[name] for name in listed)
    for place in ("/", "/etc/intercept-agent", "/sys/fs/cgroup"):
        done = node.exec(installation.container, "touch", f"{place}/file")
        assert "Read-only file system" in done.err


def seen_to_dial(node: Node, installation: Installation, pod: Pod) -> str:
    """Have a container dial; return what `flows` in the agent's container says of that."""
    dial = "while true; do nc -w 1 192.0.2.1 80 </dev/null; sleep 0.2; done"
    node.run_container(pod, "app", "sh", "-c", dial, uid=1000)
    target = ("flows", f"shop/{pod.name}", "--uid", "1000", "--port", "80")
    found = json.loads(installation.ask(*target, "--count", "1", "--for", "60", "-o", "json"))
    assert (found["process"], found["destination"]) == ("nc", "192.0.2.1:80")
    return str(found["became"])


def test_other_backends_capture_pods_too(node: Node, installation: Installation) -> None:
    for backend in ("iptables-nft", "iptables-legacy", "ebpf"):
        installation.start(INTERCEPT_BACKEND=backend)
        wait_for(lambda: ready(installation), LONGEST_S)
        pod = mesh_pod(node, backend)
        assert settled(installation, backend) == backend
        if backend == "ebpf":
            assert seen_to_dial(node, installation, pod) == "refused"
        node.remove_pod(pod)
        wait_for(lambda: not states(installation), LONGEST_S)
        installation.stop()


def test_upgrade_leaves_plugin_and_captures_and_uninstall_says_who_holds_one(
    node: Node, installation: Installation, static_cni: Program
) -> None:
    conflist, plugin = node.conf_dir / "10-test.conflist", node.bin_dir / "intercept-cni"
    before = conflist.read_bytes()
    installation.start()
    wait_for(lambda: ready(installation), LONGEST_S)
    web = mesh_pod(node, "web")
    assert settled(installation, "web") == "nftables"
    proved = installation.ask("check", "--netns", "pod:shop/web", "--probe")
    assert "landed on port 15001 with its original destination" in proved
    loaded = rules(web)
    installation.stop()

    assert rules(web) == loaded
    assert plugin.read_bytes() == Path(static_cni.words[0]).read_bytes()
    node.remove_pod(node.run_pod("plain"))
    with pytest.raises(grpc.RpcError, match="no intercept-agent answers"):
        mesh_pod(node, "late")

    installation.start()
    wait_for(lambda: ready(installation), LONGEST_S)
    assert settled(installation, "web") == "nftables"
    assert rules(web) == loaded
    installation.stop()

    installation.start("sleep", "86400")
    said = installation.ask("cni", "uninstall", "--config", "/etc/intercept-agent/config.yaml")
    assert re.search(r"shop/web \(nftables.*\): intercept-agent remove --netns \S+", said)
    assert conflist.read_bytes() == before
    assert not plugin.exists()
    assert rules(web) == loaded
