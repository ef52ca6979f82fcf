"""`explain` of a real pod: its containers by name, and who in them gets past the proxy."""

import json

import pytest

from agent.cli.main import main
from tests.containerd.node import SUBNETS_DUAL, containerd_node
from tests.support.agent import INJECTED

MESH = {"sidecar.istio.io/inject": "true"}


def test_container_that_runs_as_the_proxy_is_named(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    monkeypatch.setenv("INTERCEPT_SOCKET", str(tmp_path_factory.mktemp("run") / "agent.sock"))
    with containerd_node(subnets=SUBNETS_DUAL) as node:
        monkeypatch.setenv("INTERCEPT_CRI_ENDPOINT", f"unix://{node.socket}")
        pod = node.run_pod("web", "shop", labels=MESH, annotations=INJECTED)
        node.run_container(pod, "istio-proxy", "sleep", "1000", uid=1337)
        node.run_container(pod, "app", "sleep", "1000", uid=1337)
        node.run_container(pod, "side", "sleep", "1000", uid=1000)
        assert pod.netns is not None
        assert main(["apply", "--netns", pod.netns]) == 0
        capsys.readouterr()
        assert main(["explain", "shop/web", "-o", "json"]) == 0
        document = json.loads(capsys.readouterr().out)
    processes = document["processes"]
    assert [one["container"] for one in processes["proxy"]] == ["istio-proxy"]
    assert [one["container"] for one in processes["as_proxy"]] == ["app"]
    kinds = {found["kind"]: found["seen"] for found in document["findings"]}
    assert "in container app" in kinds["bypass-by-id"]
    assert "blackhole" in kinds
    assert document["loaded"][0]["families"] == ["ipv4", "ipv6"]
