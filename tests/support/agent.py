"""A running agent of a test's own: started, asked and ended as often as the test likes."""

import contextlib
import itertools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import yaml

from agent.cli.agent_client import AgentClient
from agent.cni import plugin
from agent.kernel.netns import Netns
from tests.support.calls import nsenter
from tests.support.netns import path_of

ROOT = Path(__file__).parents[2]
INJECTED = {"sidecar.istio.io/status": "{}"}
ARGS = "K8S_POD_UID=u1;K8S_POD_NAMESPACE=shop;IgnoreUnknown=1;K8S_POD_NAME=web"
RESULT = {"cniVersion": "1.0.0", "ips": []}
WORKER_S = 20.0


def _ports() -> Iterator[int]:
    """Yield ports below those that the kernel gives to clients, no port twice in a long time.

    Whoever asked for one may bind it only later, so another must not get it meanwhile; processes
    of one run of the tests have ranges of their own.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 4
    first = random.randrange(5_000)
    for number in itertools.count(first):
        yield 12_000 + 5_000 * worker + number % 5_000


_PORTS = _ports()


def free_port() -> int:
    """Return a port that nobody has, and that nobody else here was given of late."""
    for port in _PORTS:
        with socket.socket() as found, contextlib.suppress(OSError):
            found.bind(("127.0.0.1", port))
            return port
    raise AssertionError("the ports never end")


class Agent:
    """An agent in a folder of its own; started and ended as often as a test likes.

    `netns` is the name of the network namespace that is the node to it, if not the machine's own.
    """

    def __init__(self, folder: Path, netns: str | None = None, /, **config: object) -> None:
        self.netns = netns
        self.socket = folder / "agent.sock"
        self.ports = {name: free_port() for name in ("health", "status")}
        self._config = folder / "agent.yaml"
        self.prefix: tuple[str, ...] = ()  # what starts the command, such as `unshare --mount`
        self.plugin: tuple[str, ...] = (sys.executable, "-I", "-S", plugin.__file__)
        self.configure(**config)
        self.process: subprocess.Popen[bytes] | None = None

    def configure(self, **config: object) -> None:
        document = {
            "socket": str(self.socket),
            "state_dir": str(self.socket.with_name("state")),
            **{name: {"port": port} for name, port in self.ports.items()},
            "cri": {"endpoint": "none"},
            **config,
        }
        # At once, since the agent may be about to read it.
        written = self._config.with_suffix(".new")
        written.write_text(yaml.safe_dump(document))
        written.replace(self._config)

    def start(self, checkout: Path = ROOT, *, ready: bool = True) -> None:
        """Start the agent that is in a folder, and return when it is ready, or answers at least."""
        self.process = self.launch(checkout)
        wait_for(lambda: self.status()["ready"] or not ready)

    def launch(self, checkout: Path = ROOT) -> subprocess.Popen[bytes]:
        """Start a process of the agent; it may be one too many."""
        return subprocess.Popen(
            [
                *(nsenter(self.netns) if self.netns else ()),
                *self.prefix,
                *(sys.executable, "-m", "agent.cli.main", "run", "--config", str(self._config)),
            ],
            cwd=checkout,
        )

    def tell(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """End the agent and return its exit code."""
        self.tell(number)
        assert self.process is not None
        code = self.process.wait(20)
        self.process = None
        return code

    def kill(self) -> None:
        """End it if it runs, and return when its worker has ended, too; for the end of a test.

        A worker that has a job in hand finishes it first, in folders that the test then takes away.
        """
        if self.process is not None:
            workers: list[psutil.Process] = []
            with contextlib.suppress(psutil.Error):
                workers = psutil.Process(self.process.pid).children(recursive=True)
            self.process.kill()
            self.process.wait()
            psutil.wait_procs(workers, WORKER_S)

    def ask(self, do: str, **request: object) -> Any:
        with AgentClient(self.socket) as client:
            return client.ask(do, **request)

    def status(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.ask("status")
        return found

    def pod(self, name: str) -> Mapping[str, Any] | None:
        return next((pod for pod in self.ask("pods") if pod["name"] == name), None)

    def state(self, name: str) -> str:
        pod = self.pod(name)
        return str(pod["state"]) if pod else "unknown"

    def kinds(self) -> list[str]:
        return [event["kind"] for event in self.ask("events", since=0, wait_s=0)]

    def get(self, where: str, path: str) -> tuple[int, str]:
        url = f"http://127.0.0.1:{self.ports[where]}{path}"
        if self.netns is None:
            return get(url)
        with Netns.open(path_of(self.netns)) as node:
            return node.run(lambda: get(url))

    def cni(
        self,
        verb: str,
        netns: str,
        *,
        annotations: Mapping[str, str] | None = INJECTED,
        container: str = "c0ffee",
        args: str = ARGS,
        conf: Mapping[str, object] | None = None,
    ) -> tuple[int, Any]:
        """Run the plugin as a runtime does and return its exit code and what it printed."""
        document = {
            "cniVersion": "1.0.0",
            "name": "net",
            "type": "intercept-cni",
            "socket": str(self.socket),
            "prevResult": RESULT,
            **(conf or {}),
        }
        if annotations is not None:
            document["runtimeConfig"] = {plugin.ANNOTATIONS: annotations}
        environment = {
            "CNI_COMMAND": verb,
            "CNI_CONTAINERID": container,
            "CNI_IFNAME": "eth0",
            "CNI_NETNS": netns if "/" in netns else f"/run/netns/{netns}" if netns else "",
            "CNI_ARGS": args,
        }
        done = subprocess.run(
            self.plugin,
            input=json.dumps(document),
            text=True,
            capture_output=True,
            env=environment,
            check=False,
        )
        return done.returncode, json.loads(done.stdout) if done.stdout else None


def get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def wait_for(condition: Callable[[], object], timeout_s: float = 20) -> None:
    """Return as soon as `condition` holds. Raises: AssertionError, saying what it failed with."""
    deadline = time.monotonic() + timeout_s
    while True:
        failure: Exception | None = None
        try:
            if condition():
                return
        except Exception as error:
            failure = error
        if time.monotonic() > deadline:
            raise AssertionError("it did not happen") from failure
        time.sleep(0.02)


@contextlib.contextmanager
def running(folder: Path, netns: str | None = None, /, **config: object) -> Iterator[Agent]:
    agent = Agent(folder, netns, **config)
    try:
        agent.start()
        yield agent
    finally:
        agent.kill()
