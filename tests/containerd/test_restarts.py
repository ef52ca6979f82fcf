"""The agent is killed, ended and upgraded while pods start and traffic flows."""

import contextlib
import itertools
import os
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import grpc
import pytest

from tests.containerd import images, lookout
from tests.containerd.mesh import APP_PORT, APP_UID, App, agent_on, mesh_pod, run_app, run_proxy
from tests.containerd.node import Node, Pod, containerd_node
from tests.support.agent import ROOT, Agent, wait_for
from tests.support.calls import client, follower, server, target
from tests.support.capturing import generation
from tests.support.envoy import INBOUND, OUTBOUND
from tests.support.netns import inside

STARTING = 50
PLAIN = 5
THREADS = 4
OUTSIDE_PORT = 8000
BATCH = 5
PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Busy:
    """A node whose pods call out from their first process on, and one pod that serves."""

    node: Node
    agent: Agent
    web: App
    plain: tuple[Pod, ...]


@pytest.fixture(scope="module")
def busy() -> Iterator[Busy]:
    subnets = ("10.244.0.0/16", "fd00:10:244::/64")
    with containerd_node(subnets=subnets, pause=images.EAGER) as node, agent_on(node) as agent:
        lookout.post(node)
        plain = tuple(node.run_pod(f"plain-{number}", run_as=APP_UID) for number in range(2))
        # The watch itself is proven by those that may come.
        wait_for(lambda: lookout.callers(node) == lookout.addresses(plain))
        with server(node.netns, "outside", OUTSIDE_PORT, uid=APP_UID):
            web = run_app(node, mesh_pod(node, "web", run_as=APP_UID))
            run_proxy(web)
            yield Busy(node=node, agent=agent, web=web, plain=plain)


# --- what is done to the agent --------------------------------------------------------------------


def kill_front(agent: Agent) -> None:
    agent.stop(signal.SIGKILL)
    agent.start()


def kill_worker(agent: Agent) -> None:
    os.kill(agent.status()["worker_pid"], signal.SIGKILL)


def kill_both(agent: Agent) -> None:
    worker = agent.status()["worker_pid"]
    assert agent.process is not None
    for pid in (worker, agent.process.pid):
        os.kill(pid, signal.SIGKILL)
    agent.stop(signal.SIGKILL)
    agent.start()


def restart(agent: Agent) -> None:
    assert agent.stop() == 0
    agent.start()


class Upgrade:
    """Replaces the running agent by one of another build, as a service manager does.

    The next time it goes back to the build of this checkout, as after an upgrade that failed.
    """

    def __init__(self, folder: Path) -> None:
        shutil.copytree(ROOT / "agent", folder / "agent")
        with (folder / "agent/cni/plugin.py").open("a") as plugin:
            plugin.write("# another build\n")
        self._builds = itertools.cycle((folder, ROOT))

    def __call__(self, agent: Agent) -> None:
        assert agent.stop() == 0
        agent.start(next(self._builds))


# --- traffic --------------------------------------------------------------------------------------


class Traffic:
    """Requests out of a pod and into it, in both families: connections that last, and new ones."""

    def __init__(self, app: App) -> None:
        self.answers: Counter[tuple[str, tuple[str, ...]]] = Counter()
        self._app = app
        self._stack = contextlib.ExitStack()
        self._enough = threading.Event()
        self._out = [target(address, OUTSIDE_PORT) for address in images.LOOKOUT.values()]
        self._in = [target(address, APP_PORT) for address in app.address.values()]

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            threads = stack.enter_context(ThreadPoolExecutor(2))
            stack.callback(self._enough.set)
            self._lasting = [
                stack.enter_context(follower(self._app.netns, *self._out, uid=APP_UID)),
                stack.enter_context(follower(self._app.node.netns, *self._in, uid=APP_UID)),
            ]
            self._calling = [
                threads.submit(self._call, self._app.netns, self._out),
                threads.submit(self._call, self._app.node.netns, self._in),
            ]
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _call(self, netns: str, targets: list[dict[str, object]]) -> None:
        with client(netns, uid=APP_UID, gid=APP_UID) as caller:
            for request in itertools.cycle(targets):
                if self._enough.is_set():
                    return
                for answer in caller.call(request, count=BATCH):
                    self.answers[answer.name or answer.error, answer.via] += 1
                time.sleep(0.02)  # the machine has few cores, and pods are to start

    def check(self) -> None:
        """Stop, and fail if one connection was lost or went past the proxy."""
        followed = [one for lasting in self._lasting for one in lasting.stop()]
        assert {(one.status, one.error) for one in followed} == {(200, "")}
        self._enough.set()
        for calling in self._calling:
            calling.result()
        assert set(self.answers) == {("outside", (OUTBOUND,)), ("web", (INBOUND,))}


@contextlib.contextmanager
def no_write(*namespaces: str) -> Iterator[None]:
    """Fail if anything is written to nf_tables of these namespaces."""
    before = {netns: generation(netns) for netns in namespaces}
    yield
    assert {netns: generation(netns) for netns in namespaces} == before


# --- tests ----------------------------------------------------------------------------------------


def start_like_the_kubelet(node: Node, name: str) -> Pod:
    """Start a mesh pod; when that fails, start it again under the same UID."""
    uid = f"uid-of-{name}"
    for attempt in range(100):
        try:
            return mesh_pod(node, name, uid=uid, attempt=attempt, run_as=APP_UID)
        except grpc.RpcError:
            time.sleep(0.5)
    raise AssertionError(f"{name} does not start")


@pytest.mark.timeout(400)
def test_nothing_is_lost_and_nothing_escapes_while_the_agent_is_ended_again_and_again(
    busy: Busy, tmp_path: Path
) -> None:
    node, agent, web = busy.node, busy.agent, busy.web
    harm = (kill_front, kill_worker, kill_both, restart, Upgrade(tmp_path))
    names = [f"mesh-{number}" for number in range(STARTING)]
    with no_write(web.netns), Traffic(web) as traffic, ThreadPoolExecutor(THREADS) as pool:
        starting = [pool.submit(start_like_the_kubelet, node, name) for name in names]
        unmeshed = [pool.submit(node.run_pod, f"late-{number}") for number in range(PLAIN)]
        for do_harm in harm * 2:
            do_harm(agent)
            time.sleep(0.5)
        pods = [future.result() for future in starting]
        plain = [future.result() for future in unmeshed]  # the first try of each
        traffic.check()
    wait_for(lambda: all(agent.state(name) == "in-sync" for name in ("web", *names)))
    with no_write(*(str(pod.netns) for pod in pods)):
        kill_both(agent)
        wait_for(lambda: all(agent.state(name) == "in-sync" for name in ("web", *names)))
    assert lookout.callers(node) == lookout.addresses((*busy.plain, *plain))


def test_second_agent_is_refused_in_words_and_takes_over_once_the_first_has_ended(
    busy: Busy, capfd: pytest.CaptureFixture[str]
) -> None:
    agent = busy.agent
    first = agent.status()["worker_pid"]
    with no_write(busy.web.netns):
        second = agent.launch()
        assert second.wait(PATIENCE_S) == 3
        said = capfd.readouterr().err.splitlines()[-1]
        assert said == f"error: another agent serves {agent.socket}; end it first"
        assert agent.status()["ready"]
        assert agent.status()["worker_pid"] == first
        assert agent.state("web") == "in-sync"
        assert agent.stop() == 0
        agent.start()
        wait_for(lambda: agent.state("web") == "in-sync")


def test_of_agents_that_start_at_once_one_serves_and_the_others_say_so(busy: Busy) -> None:
    agent = busy.agent
    agent.stop(signal.SIGKILL)
    launched = [agent.launch() for _ in range(4)]
    wait_for(lambda: sum(one.poll() is None for one in launched) == 1, PATIENCE_S)
    assert sorted(one.returncode for one in launched if one.poll() is not None) == [3, 3, 3]
    (agent.process,) = (one for one in launched if one.poll() is None)
    wait_for(lambda: agent.status()["ready"])


def test_without_an_agent_plain_pods_start_and_mesh_pods_wait_for_it(busy: Busy) -> None:
    node, agent = busy.node, busy.agent
    gone = mesh_pod(node, "gone")
    agent.stop(signal.SIGKILL)
    try:
        with pytest.raises(grpc.RpcError) as refused:
            mesh_pod(node, "late", uid="late-1")
        plain = node.run_pod("early")
        node.remove_pod(gone)
    finally:
        agent.start()
    for part in ('plugin type="intercept-cni" failed', "no intercept-agent answers on", "is back"):
        assert part in refused.value.details()
    late = mesh_pod(node, "late", uid="late-1", attempt=1)
    wait_for(lambda: agent.state("late") == "in-sync")
    wait_for(lambda: agent.state("early") == "ignored")
    assert agent.pod("gone") is None
    for pod in (late, plain):
        node.remove_pod(pod)
    wait_for(lambda: agent.pod("late") is None)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_pods_stay_known_and_kept_while_containerd_is_away(busy: Busy, how: signal.Signals) -> None:
    node, agent, web = busy.node, busy.agent, busy.web

    def captured() -> bool:
        return "table inet intercept-agent {" in inside(web.netns, "nft", "list", "ruleset")

    def connected() -> bool:
        (source,) = agent.status()["sources"]
        return bool(source["connected"])

    def states() -> dict[str, str]:
        return {pod["name"]: pod["state"] for pod in agent.ask("pods")}

    wait_for(lambda: set(states().values()) <= {"in-sync", "ignored"})
    before = states()
    node.stop(how)
    try:
        wait_for(lambda: not connected())
        inside(web.netns, "nft", "delete", "table", "inet", "intercept-agent")
        wait_for(captured)
        agent.stop(signal.SIGKILL)
        agent.start(ready=False)
        wait_for(lambda: agent.state("web") == "in-sync")
    finally:
        node.start()
    with no_write(web.netns):
        wait_for(connected)
        wait_for(lambda: states() == before)
        assert agent.status()["ready"]
