"""Nodes with an agent each, joined by a link, and pods with an application and a real Envoy."""

import contextlib
import ipaddress
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent.model import numbers
from tests.containerd import images
from tests.containerd.node import Node, Pod
from tests.support import calls, envoy, web
from tests.support.agent import INJECTED, Agent, running, wait_for
from tests.support.calls import Answer
from tests.support.netns import run

LABELS = {"sidecar.istio.io/inject": "true"}
APP_UID = 1000
APP_PORT = 8080
PYTHON = "/usr/bin/python3"
# Between two nodes; only the last number differs.
LINK = {4: "10.99.0.", 6: "fd00:99::"}
PREFIX = {4: 24, 6: 64}


@contextlib.contextmanager
def agent_on(node: Node, **config: Any) -> Iterator[Agent]:
    """Run an agent in the network namespace that is the node, and with files in its folder."""
    folder = node.base / "agent"
    folder.mkdir()
    with running(folder, node.netns, **{**configuration(node), **config}) as agent:
        yield agent


def configuration(node: Node) -> dict[str, Any]:
    """Return what makes an agent that of this node."""
    return {
        "cri": {"endpoint": f"unix://{node.socket}"},
        "cni": {"conf_dir": str(node.conf_dir), "bin_dir": str(node.bin_dir)},
    }


def join(one: Node, other: Node) -> None:
    """Connect two nodes, so that the pods of each reach those of the other."""
    peer = ("peer", "name", "uplink", "netns", other.netns)
    run("ip", "link", "add", "uplink", "netns", one.netns, "type", "veth", *peer)
    for number, node in enumerate((one, other), 1):
        for version, network in LINK.items():
            nodad = ("nodad",) if version == 6 else ()
            address = f"{network}{number}/{PREFIX[version]}"
            node.run("ip", "addr", "add", address, "dev", "uplink", *nodad)
        node.run("ip", "link", "set", "uplink", "up")
    for node, number, there in ((one, 2, other), (other, 1, one)):
        for subnet in there.subnets:
            via = f"{LINK[ipaddress.ip_network(subnet).version]}{number}"
            node.run("ip", "route", "add", subnet, "via", via)


def mesh_pod(node: Node, name: str, **fields: Any) -> Pod:
    """Start a pod as the mesh's injector leaves it."""
    return node.run_pod(name, "shop", labels=LABELS, annotations=INJECTED, **fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class App:
    """A pod with an application as user 1000."""

    node: Node
    pod: Pod
    container: str

    @property
    def address(self) -> Mapping[int, str]:
        return {ipaddress.ip_address(ip).version: ip for ip in self.pod.ips}

    @property
    def netns(self) -> str:
        assert self.pod.netns is not None
        return self.pod.netns

    def call(self, address: str, port: int, *, count: int = 1) -> list[Answer]:
        """Send requests from inside the application's container, as its user."""
        return [Answer.of(raw) for raw in self._outcomes(calls.target(address, port), count)]

    def counters(self) -> envoy.Counters:
        """Return those of the Envoy that runs beside it."""
        call = calls.target("127.0.0.1", envoy.ADMIN_PORT, path=envoy.COUNTERS_PATH)
        return envoy.counters_in(str(self._outcomes(call, 1)[0]["body"]))

    def proxied(self) -> bool:
        """Return whether the Envoy that runs beside it takes connections."""
        health = calls.target("127.0.0.1", numbers.HEALTH_PORT, path=envoy.HEALTH_PATH)
        return self._outcomes(health, 1)[0].get("status") == 200

    def _outcomes(self, call: Mapping[str, object], count: int) -> list[dict[str, object]]:
        script = f'echo "$0" | {PYTHON} -I -S /web/web.py call'
        done = self.node.exec(self.container, "sh", "-c", script, calls.job(call, count=count))
        assert done.code == 0, done.err
        outcomes: list[dict[str, object]] = json.loads(done.out)
        return outcomes


def run_app(node: Node, pod: Pod) -> App:
    """Run a web server in a pod as its application, and return when it answers."""
    serve = (PYTHON, "-I", "-S", "/web/web.py", "serve", "--name", pod.name)
    # The server ends with its standard input, which must therefore be one that stays.
    command = ("sh", "-c", f"sleep infinity | {' '.join(serve)} --port {APP_PORT}")
    container = node.run_container(
        pod,
        "app",
        *command,
        image=images.HOSTROOT,
        uid=APP_UID,
        mounts={"/usr": "/usr", "/web": str(Path(web.__file__).parent)},
    )
    app = App(node=node, pod=pod, container=container)
    wait_for(lambda: app.call("127.0.0.1", APP_PORT)[0].status == 200)
    return app


def run_proxy(app: App) -> App:
    """Run Envoy in a container beside an application, and return when it serves."""
    own = {version: (address, APP_PORT) for version, address in app.address.items()}
    config = envoy.config(envoy.ProxySpec(self_v4=own[4], self_v6=own[6]))
    app.node.run_container(
        app.pod,
        "istio-proxy",
        *("/envoy/envoy", "--config-yaml", config, "--concurrency", "1"),
        *("--disable-hot-restart", "--log-level", "warning"),
        image=images.HOSTROOT,
        uid=numbers.PROXY_ID,
        mounts={"/usr": "/usr", "/envoy": str(envoy.binary().parent)},
    )
    wait_for(app.proxied)
    return app
