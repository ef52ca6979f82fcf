"""`explain` of pods that a runtime, a running agent and a manifest tell of, each in its own way.

The runtime is a fake one: what real ones say is tested in tests/containerd.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.fake_cri import FakeContainer, changed
from tests.support import standin
from tests.support.agent import running, wait_for
from tests.support.capturing import capture
from tests.support.conformance import Ran, cli_process
from tests.support.netns import namespace
from tests.support.runtime import Runtime

INJECT = "sidecar.istio.io/inject"
STATUS = "sidecar.istio.io/status"
EVERYTHING = {"inbound_ports_include": "*", "outbound_ip_ranges_include": "*", "enable_ipv6": True}


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Runtime]:
    monkeypatch.setenv("INTERCEPT_SOCKET", str(tmp_path / "agent.sock"))
    with Runtime(tmp_path / "cri.sock") as found:
        monkeypatch.setenv("INTERCEPT_CRI_ENDPOINT", f"unix://{found.socket}")
        yield found


@pytest.fixture
def web(runtime: Runtime) -> Iterator[str]:
    """The namespace of a pod shop/web that was injected."""
    with namespace("pod") as name:
        runtime.run("web", name, labels={INJECT: "true"}, annotations={STATUS: "{}"})
        yield name


def explained(*words: str) -> Any:
    done = cli_process("explain", *words, "-o", "json")
    assert (done.code, done.stderr) == (0, "")
    return done.document


def manifest(folder: Path, labels: dict[str, str]) -> str:
    path = folder / "pod.yaml"
    pod = {
        "kind": "Pod",
        "metadata": {
            "name": "web",
            "namespace": "shop",
            "labels": labels,
            "annotations": {STATUS: "{}"},
        },
        "spec": {"containers": [{"name": "app"}, {"name": "istio-proxy"}]},
    }
    path.write_text(json.dumps(pod))
    return str(path)


def test_injected_pod_without_rules_is_told_by_name_and_by_namespace(web: str) -> None:
    for target in ("shop/web", "pod:shop/web", web):
        document = explained(target)
        assert (document["captured"], document["should_be"]) == (False, True)
        assert document["pod"]["created"]["labels"][INJECT] == "true"
        assert document["pod"]["now"] is None
        assert [found["kind"] for found in document["findings"]] == ["not-captured"]
    assert "now: only the API server knows" in cli_process("explain", "shop/web").stdout


def test_label_that_is_gone_now_is_answered_by_one_command(web: str, tmp_path: Path) -> None:
    capture(web, EVERYTHING, "nftables")
    with standin.process(web, 15001, 15006):
        done = cli_process("explain", "shop/web", "--pod-manifest", manifest(tmp_path, {}))
    assert done.code == 0
    assert f"label {INJECT} was 'true' when the pod was made and is gone now" in done.stdout
    assert "read when a pod is made" in done.stdout
    assert "kubectl -n shop delete pod web" in done.stdout


def test_label_that_says_no_now_makes_the_capture_stale(web: str, tmp_path: Path) -> None:
    capture(web, EVERYTHING, "nftables")
    document = explained("shop/web", "--pod-manifest", manifest(tmp_path, {INJECT: "false"}))
    assert (document["should_be"], document["reason"]) == (False, "inject-false")
    found = {finding["kind"]: finding["fix"] for finding in document["findings"]}
    remove = "intercept-agent remove --netns pod:shop/web"
    assert found["stale-capture"] == found["blackhole"] == remove


def test_manifest_of_another_pod_is_refused(runtime: Runtime, web: str, tmp_path: Path) -> None:
    runtime.run("api", web)
    done = cli_process("explain", "shop/api", "--pod-manifest", manifest(tmp_path, {}))
    assert (done.code, done.stdout) == (2, "")
    assert "the manifest is of the pod web, not of api" in done.stderr


def test_containers_have_their_names(runtime: Runtime, web: str) -> None:
    container = FakeContainer(id="c1", sandbox_id="web", name="istio-proxy")
    runtime.cri.containers["c1"] = container
    assert explained("shop/web")["pod"]["sandbox"] == "web"
    assert runtime.cri.calls["ListContainers"] >= 1


def test_host_network_pod_has_no_namespace_of_its_own(runtime: Runtime) -> None:
    runtime.run("node-pod", None, host_network=True)
    document = explained("shop/node-pod")
    assert (document["captured"], document["should_be"]) == (False, False)
    assert (document["reason"], document["netns"]) == ("host-network", None)


def test_ambient_pod_is_known_by_its_label(runtime: Runtime, web: str) -> None:
    ambient = {"istio.io/dataplane-mode": "ambient"}
    runtime.cri.sandboxes["web"] = changed(
        runtime.cri.sandboxes["web"], labels=ambient, annotations={}
    )
    document = explained("shop/web")
    assert (document["should_be"], document["reason"]) == (False, "ambient")


def test_pod_that_nobody_knows_is_refused_in_one_sentence(runtime: Runtime, web: str) -> None:
    done: Ran = cli_process("explain", "shop/never")
    assert (done.code, done.stdout) == (3, "")
    assert "no pod never of the namespace shop" in done.stderr


def test_running_agent_is_asked_when_there_is_no_runtime(
    runtime: Runtime, web: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cri = {"endpoint": os.environ.pop("INTERCEPT_CRI_ENDPOINT")}
    with running(tmp_path, cri=cri) as agent:
        wait_for(lambda: agent.state("web") == "in-sync")
        monkeypatch.setenv("INTERCEPT_CRI_ENDPOINT", "none")
        document = explained("shop/web")
        static = document["pod"]["agent"]
    assert document["captured"]
    assert static["state"] == "in-sync"
    assert document["pod"]["created"]["labels"][INJECT] == "true"
    assert document["compared_with"] == "what the running agent keeps it to"
    assert document["loaded"][0]["owner"] == "this agent"


def test_namespace_that_the_agent_keeps_by_name_is_explained_so(tmp_path: Path, netns: str) -> None:
    static = [{"name": "build", "netns": netns, "settings": {"outbound_ip_ranges_include": "*"}}]
    with running(tmp_path, static=static) as agent, pytest.MonkeyPatch.context() as patch:
        wait_for(lambda: agent.state("build") == "in-sync")
        patch.setenv("INTERCEPT_SOCKET", str(agent.socket))
        patch.setenv("INTERCEPT_CRI_ENDPOINT", "none")
        document = explained(netns)
    assert document["should_be"]
    assert document["text"] == "it is named in the configuration"
    assert document["pod"]["name"] == "build"
