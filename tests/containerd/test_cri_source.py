"""CriSource and its client against a real containerd with real pods."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.node.cri.client import CriClient
from agent.node.cri.source import CriSource
from agent.node.source import PodRecord
from tests.containerd.node import SUBNETS_DUAL, Node, Pod, containerd_node
from tests.support.pods_seen import PodsSeen, seen_by

MANY = 20


@pytest.fixture(scope="module")
def shared() -> Iterator[Node]:
    with containerd_node(subnets=SUBNETS_DUAL) as node:
        yield node


@pytest.fixture
def node(shared: Node) -> Iterator[Node]:
    yield shared
    shared.remove_all()


def client(node: Node, *, timeout_s: float = 10.0) -> CriClient:
    return CriClient(f"unix://{node.socket}", timeout_s=timeout_s)


async def started(node: Node, name: str, **fields: object) -> Pod:
    """Start a pod without holding up the event loop."""
    return await asyncio.to_thread(node.run_pod, name, **fields)  # type: ignore[arg-type]


def identity(path: str | None) -> tuple[int, int]:
    assert path is not None
    status = os.stat(path)
    return status.st_dev, status.st_ino


def test_pods_appear_and_disappear(node: Node) -> None:
    async def main() -> None:
        source = CriSource(client(node))
        async with seen_by(source) as seen:
            await seen.until(lambda: seen.snapshots == 1)
            assert source.connected
            web = await started(node, "web", namespace="shop")
            await seen.until(lambda: "web" in seen.names(), timeout_s=3)
            await asyncio.to_thread(node.stop_pod, web)
            await seen.until(lambda: not seen.pods, timeout_s=3)
            await asyncio.to_thread(node.remove_pod, web)

    asyncio.run(main())


def test_record_says_what_the_pod_is(node: Node) -> None:
    made = node.run_pod(
        "web", "shop", labels={"app": "web"}, annotations={"sidecar.istio.io/status": "{}"}
    )

    async def main() -> None:
        async with seen_by(CriSource(client(node))) as seen:
            await seen.until(lambda: bool(seen.pods))
            check(seen.named("web"), made)

    def check(pod: PodRecord, made: Pod) -> None:
        assert (pod.namespace, pod.name, pod.uid) == ("shop", "web", made.uid)
        assert (pod.sandbox_id, pod.netns) == (made.id, made.netns)
        assert identity(pod.netns) == identity(f"/proc/{made.pid}/ns/net")
        assert pod.labels["app"] == "web"
        assert pod.annotations["sidecar.istio.io/status"] == "{}"
        assert tuple(map(str, pod.ips)) == made.ips
        assert {ip.version for ip in pod.ips} == {4, 6}
        assert (pod.ready, pod.host_network) == (True, False)

    asyncio.run(main())


def test_host_network_pod_has_no_namespace_of_its_own(node: Node) -> None:
    node.run_pod("proxy", "kube-system", host_network=True)

    async def main() -> None:
        async with seen_by(CriSource(client(node))) as seen:
            await seen.until(lambda: bool(seen.pods))
            pod = seen.named("proxy")
            assert (pod.host_network, pod.netns, pod.ips) == (True, None, ())

    asyncio.run(main())


def test_pod_whose_pause_process_died_is_not_ready_and_still_there(node: Node) -> None:
    made = node.run_pod("web")
    app = node.run_container(made, "app")

    async def main() -> None:
        async with seen_by(CriSource(client(node))) as seen:
            await seen.until(lambda: bool(seen.pods))
            node.kill_pause(made)
            await seen.until(lambda: not seen.named("web").ready)
            assert seen.named("web").netns == made.netns
            assert node.exec(app, "true").code == 0
            again = await started(node, "web", uid=made.uid, attempt=1)
            await seen.until(lambda: seen.named("web").ready)
            assert seen.named("web").sandbox_id == again.id
            assert len(seen.pods) == 1

    asyncio.run(main())


def test_containers_come_with_processes_and_users(node: Node) -> None:
    made = node.run_pod("web")
    node.run_container(made, "app", uid=1000)
    node.stop_container(node.run_container(made, "init"))
    node.run_container(made, "istio-proxy", uid=1337)

    async def main() -> None:
        async with client(node) as asked:
            found = {one.name: one for one in await asked.containers(made.id)}
        assert {name: one.running for name, one in found.items()} == {
            "app": True,
            "init": False,
            "istio-proxy": True,
        }
        assert os.stat(f"/proc/{found['istio-proxy'].pid}").st_uid == 1337
        assert found["init"].pid is None
        assert identity(found["app"].netns_path) == identity(made.netns)

    asyncio.run(main())


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_restart_of_containerd_loses_nothing(node: Node, how: signal.Signals) -> None:
    made = node.run_pod("web")

    def restarted(seen: PodsSeen) -> bool:
        return seen.snapshots == 2

    async def main() -> None:
        source = CriSource(client(node), interval_s=0.3)
        async with seen_by(source) as seen:
            await seen.until(lambda: seen.names() == {"web"})
            await asyncio.to_thread(node.stop, how)
            await asyncio.sleep(1)
            assert not source.connected
            assert seen.names() == {"web"}
            await asyncio.to_thread(node.start)
            await seen.until(lambda: restarted(seen), timeout_s=3)
            assert seen.named("web").netns == made.netns
            assert len(seen.updates) == 2

    asyncio.run(main())


def test_pods_that_changed_while_nobody_looked_are_right_afterwards(node: Node) -> None:
    gone, stays = node.run_pod("gone"), node.run_pod("stays")

    async def main() -> None:
        asked = client(node)
        async with seen_by(CriSource(asked)) as seen:
            await seen.until(lambda: seen.names() == {"gone", "stays"})
            node.stop(signal.SIGKILL)
            node.start()
            node.remove_pod(gone)
            new = node.run_pod("new")
            await seen.until(lambda: seen.names() == {"new", "stays"})
            assert seen.named("new").netns == new.netns
            assert seen.named("stays").sandbox_id == stays.id

    asyncio.run(main())


def test_containerd_that_does_not_answer_takes_no_pod_away(node: Node) -> None:
    node.run_pod("web")

    async def main() -> None:
        source = CriSource(client(node, timeout_s=0.5), interval_s=0.3)
        async with seen_by(source) as seen:
            await seen.until(lambda: seen.names() == {"web"})
            node.pause()
            try:
                await asyncio.sleep(2)
                assert not source.connected
                assert "DEADLINE_EXCEEDED" in source.detail
                assert seen.names() == {"web"}
            finally:
                node.resume()
            await seen.until(lambda: seen.snapshots == 2)
            assert seen.names() == {"web"}

    asyncio.run(main())


def test_socket_that_is_missing_at_first() -> None:
    async def main(node: Node) -> None:
        source = CriSource(client(node))
        async with seen_by(source) as seen:
            await asyncio.sleep(0.3)
            assert "there is no such socket" in source.detail
            await asyncio.to_thread(node.start)
            await seen.until(lambda: seen.snapshots == 1, timeout_s=2)
            assert source.connected

    with containerd_node(started=False) as node:
        asyncio.run(main(node))


def test_many_pods(node: Node) -> None:
    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(MANY):
                group.create_task(started(node, f"p{number}"))
        asked = client(node)
        async with seen_by(CriSource(asked)) as seen:
            await seen.until(lambda: len(seen.pods) == MANY)
            assert seen.snapshots == 1
            assert len({pod.netns for pod in seen.pods.values()}) == MANY
            spent = time.process_time()
            for _ in range(100):
                assert len(await asked.sandboxes()) == MANY
            # The bound is generous: what it must catch is a request for every pod, every time.
            assert time.process_time() - spent < 2

    asyncio.run(main())


def test_nothing_is_left_of_a_node_even_when_the_tests_are_killed() -> None:
    code = "\n".join(
        (
            "import os, signal, time",
            "from tests.containerd.node import containerd_node",
            "with containerd_node() as node:",
            "    node.run_container(node.run_pod('web'), 'app')",
            "    print(node.base, flush=True)",
            "    os.kill(os.getpid(), signal.SIGKILL)",
        )
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False
    )
    base = Path(done.stdout.strip())
    assert base.name.startswith("it-node-"), done.stderr
    deadline = time.monotonic() + 10
    left = ["not looked yet"]
    while left and time.monotonic() < deadline:
        time.sleep(0.1)
        left = leftovers(base)
    assert not left


def leftovers(base: Path) -> list[str]:
    places = [base, Path("/run/netns", base.name), Path("/sys/fs/cgroup", base.name)]
    places += Path("/sys/fs/cgroup").glob(f"*/{base.name}")
    found = [str(place) for place in places if place.exists()]
    found += [
        line for line in Path("/proc/self/mounts").read_text().splitlines() if str(base) in line
    ]
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes().decode(errors="replace")
        except OSError:
            continue
        if str(base) in words:
            found.append(words)
    return found
