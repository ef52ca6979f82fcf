"""`flows` of a real pod: called by its name, its containers' processes by theirs."""

import pytest

from agent.cli.main import main
from tests.containerd.node import SUBNETS_DUAL, containerd_node
from tests.support.agent import INJECTED
from tests.support.flows import flowing

DIAL = "while true; do nc -w 1 127.0.0.1 81 </dev/null; sleep 0.2; done"


def test_pod_is_called_by_its_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.setenv("INTERCEPT_SOCKET", str(tmp_path_factory.mktemp("run") / "agent.sock"))
    with containerd_node(subnets=SUBNETS_DUAL) as node:
        monkeypatch.setenv("INTERCEPT_CRI_ENDPOINT", f"unix://{node.socket}")
        pod = node.run_pod("web", "shop", annotations=INJECTED)
        node.run_container(pod, "app", "sh", "-c", DIAL, uid=1000)
        assert pod.netns is not None
        assert main(["apply", "--netns", pod.netns]) == 0
        for target in ((), ("shop/web",)):  # every pod of the node, and this one
            with flowing(*target, "--uid", "1000", "--port", "81") as flows:
                found = flows.next()
            assert [found[key] for key in ("pod", "process", "uid")] == ["shop/web", "nc", 1000]
            assert (found["destination"], found["became"]) == ("127.0.0.1:81", "exempt")
