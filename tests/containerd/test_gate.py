"""The gate on a real node: what reaches the network before the proxy of its pod has listened."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from agent.model.state import EBPF
from tests.containerd import images
from tests.containerd.mesh import APP_UID, LABELS, PYTHON, configuration
from tests.containerd.node import Node, Pod, containerd_node
from tests.support.agent import Agent, running, wait_for
from tests.support.capturing import BACKENDS
from tests.support.ebpf import built, own_pins

GATEWAY, PORT = "10.244.1.1", 8000
INJECTED = {
    "sidecar.istio.io/status": json.dumps(
        {
            "initContainers": ["istio-validation", "fetch", "migrate", "again"],
            "containers": ["istio-proxy"],
        }
    )
}
# Says who asked for what: the path of each request.
OUTSIDE = f"""
import http.server
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        print(self.path[1:], flush=True)
        self.send_response(200)
        self.end_headers()
    def log_message(self, *_):
        pass
http.server.HTTPServer(("{GATEWAY}", {PORT}), Handler).serve_forever()
"""
PROXY = """
import socket, time
made = [socket.create_server(("0.0.0.0", port)) for port in (15001, 15006)]
time.sleep(86400)
"""


@dataclass(frozen=True, slots=True)
class World:
    """A node, and a server outside its pods that notes who reaches it."""

    node: Node
    log: Path

    def reached(self) -> list[str]:
        return self.log.read_text().split()

    def start(self, pod: Pod, name: str, *, uid: int = 0) -> str:
        """Start a container that calls the server until it answers, or ten times; it then stays."""
        call = f"timeout 5 wget -q -O- http://{GATEWAY}:{PORT}/{pod.name}-{name}"
        script = f"for try in 0 1 2 3 4 5 6 7 8 9; do {call} && break; sleep 0.1; done; sleep 86400"
        return self.node.run_container(pod, name, "sh", "-c", script, uid=uid)

    def calls(self, container: str, word: str) -> bool:
        """Call the server from inside a container; tell whether that was answered."""
        url = f"http://{GATEWAY}:{PORT}/{word}"
        done = self.node.exec(container, "timeout", "3", "wget", "-q", "-O-", url)
        assert (word in self.reached()) is (done.code == 0)
        return done.code == 0

    def proxy(self, pod: Pod) -> str:
        return self.node.run_container(
            *(pod, "istio-proxy", PYTHON, "-I", "-S", "-c", PROXY),
            image=images.HOSTROOT,
            uid=1337,
            mounts={"/usr": "/usr"},
        )


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    log = tmp_path_factory.mktemp("gate") / "reached"
    with containerd_node() as node, log.open("wb") as out:
        node.remove_pod(node.run_pod("first"))  # which makes the bridge
        enter = ("nsenter", f"--net=/run/netns/{node.netns}")
        process = subprocess.Popen((*enter, sys.executable, "-c", OUTSIDE), stdout=out)
        try:
            plain = node.run_container(node.run_pod("plain"), "plain")
            made = World(node, log)
            wait_for(lambda: made.calls(plain, "plain"))
            yield made
        finally:
            process.kill()
            process.wait()


@pytest.fixture(autouse=True)
def pins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    built()
    (tmp_path / "bpf").mkdir()
    monkeypatch.setenv("INTERCEPT_BPF_DIR", str(tmp_path / "bpf"))
    with own_pins(tmp_path / "bpf"):
        yield


@contextlib.contextmanager
def pod_behind(
    world: World, folder: Path, gate: str, backend: str
) -> Iterator[tuple[Agent, Pod, str]]:
    """Run an agent with such a gate and start a pod; yield both, and the pod's name."""
    name, node = f"{gate}-{backend}", world.node
    with running(folder, node.netns, **configuration(node), backend=backend, gate=gate) as agent:
        pod = node.run_pod(name, "shop", labels=LABELS, annotations=INJECTED)
        yield agent, pod, name
        node.remove_pod(pod)


def proxy_comes_and_goes(world: World, agent: Agent, pod: Pod, container: str) -> None:
    """Have a proxy listen; a container that passed until then passes no more, nor ever again."""
    proxy = world.proxy(pod)
    wait_for(lambda: not world.calls(container, f"{pod.name}-{os.urandom(4).hex()}"))
    world.node.stop_container(proxy)
    before = world.reached()
    world.start(pod, "again", uid=APP_UID)
    assert not world.calls(container, f"{pod.name}-after")
    agent.stop()
    agent.start()
    wait_for(lambda: agent.state(pod.name) == "in-sync")
    assert not world.calls(container, f"{pod.name}-again")
    assert not world.calls(world.start(pod, "late"), f"{pod.name}-late")
    assert world.reached() == before


@pytest.mark.parametrize("backend", [*BACKENDS, EBPF])
def test_init_containers_pass_until_the_proxy_listens(
    world: World, tmp_path: Path, backend: str
) -> None:
    with pod_behind(world, tmp_path, "listener", backend) as (agent, pod, name):
        fetch = world.start(pod, "fetch")
        wait_for(lambda: f"{name}-fetch" in world.reached())
        app = world.start(pod, "app", uid=APP_UID)
        assert not world.calls(app, f"{name}-app")
        world.node.stop_container(fetch)
        migrate = world.start(pod, "migrate", uid=APP_UID)
        wait_for(lambda: f"{name}-migrate" in world.reached())
        assert world.calls(migrate, f"{name}-more")
        assert not world.calls(app, f"{name}-app")
        proxy_comes_and_goes(world, agent, pod, migrate)


@pytest.mark.parametrize("backend", ["nftables", EBPF])
def test_everybody_passes_an_open_gate_until_the_proxy_listens(
    world: World, tmp_path: Path, backend: str
) -> None:
    with pod_behind(world, tmp_path, "open", backend) as (agent, pod, name):
        app = world.start(pod, "app", uid=APP_UID)
        wait_for(lambda: f"{name}-app" in world.reached())
        proxy_comes_and_goes(world, agent, pod, app)


@pytest.mark.parametrize("backend", ["iptables-nft", EBPF])
def test_closed_gate_lets_nothing_pass_from_the_first_packet(
    world: World, tmp_path: Path, backend: str
) -> None:
    with pod_behind(world, tmp_path, "closed", backend) as (_, pod, name):
        fetch = world.start(pod, "fetch")
        assert not world.calls(fetch, f"{name}-more")
        assert not any(word.startswith(name) for word in world.reached())
