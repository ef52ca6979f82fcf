"""The plugin as containerd's libcni calls it, in the versions of CNI that both of them speak."""

import json
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from tests.containerd.configuration import conflist
from tests.containerd.node import SUBNETS_DUAL, Node, containerd_node
from tests.support.agent import INJECTED, running, wait_for


@pytest.fixture
def node() -> Iterator[Node]:
    with containerd_node(subnets=SUBNETS_DUAL) as node:
        yield node


def use(node: Node, version: str) -> None:
    """Write the node's configuration anew and wait until containerd has it with our entry."""
    node.write_conflist({**conflist(node.base, SUBNETS_DUAL, ()), "cniVersion": version})

    def is_loaded() -> bool:
        status = node.call("Status", verbose=True)
        networks = json.loads(status.info["cniconfig"])["Networks"]
        config = next(n["Config"] for n in networks if n["IFName"] == "eth0")
        types = [plugin["Network"]["type"] for plugin in config["Plugins"]]
        return (config["CNIVersion"], types[-1]) == (version, "intercept-cni")

    wait_for(is_loaded, 40)


def test_pods_start_captured_and_end_in_every_version(node: Node, tmp_path: Path) -> None:
    where = {"conf_dir": str(node.conf_dir), "bin_dir": str(node.bin_dir)}
    with running(tmp_path, cri={"endpoint": f"unix://{node.socket}"}, cni=where) as agent:
        for version in ("0.3.0", "0.3.1", "0.4.0", "1.0.0"):
            use(node, version)
            pod = node.run_pod("web", "shop", annotations=INJECTED)
            assert len(pod.ips) == 2
            assert agent.state("web") == "in-sync"
            rules = node.run("nsenter", f"--net={pod.netns}", "nft", "list", "ruleset")
            assert "table inet intercept-agent" in rules
            refused = {**INJECTED, "traffic.sidecar.istio.io/includeInboundPorts": "70000"}
            with pytest.raises(grpc.RpcError, match=r"intercept-cni.*failed \(add\): .*70000"):
                node.run_pod("odd", "shop", annotations=refused)
            node.remove_pod(pod)
            wait_for(lambda: agent.ask("pods") == [])
