"""The agent's gRPC service, health and reflection, on the socket that its own frames use."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from agent.api import agent_pb2, door
from agent.api.door import GrpcDoor
from agent.api.known import Known
from agent.api.server import NAMES, GrpcServer
from agent.api.service import SERVICE, Agent
from agent.cni import frames
from agent.cni.server import Server
from agent.model.errors import EnvironmentLacks
from agent.node.events import Events
from agent.node.feed import Change, Feed
from agent.node.pod import Pod, Wish

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="the socket answers root only")

WISH = Wish(
    key="pod/shop/web/u1",
    namespace="shop",
    name="web",
    uid="u1",
    sandbox_id="s1",
    netns="/run/netns/web",
    settings={"inbound_ports_include": "*"},
    reason="injected",
    text="a sidecar was injected",
    source="cri",
)
ROW = Pod(WISH, state="in-sync", backend="nftables").row()


FINDING: dict[str, Any] = {
    "kind": "kube-proxy",
    "severity": "warning",
    "where": {"netns": "host", "pod": None, "family": "ipv4", "backend": "nft", "table": "nat"},
    "objects": ["chain KUBE-SERVICES"],
    "owner": "kube-proxy",
    "evidence": ["no process of that name"],
    "explanation": "nobody keeps them",
    "fix": "intercept-agent clean --host",
}


class Scene:
    """A daemon that knows one pod, behind the agent's socket, and a client's channel to it."""

    def __init__(self, folder: Path, *, longest: int = 1024) -> None:
        self.path = folder / "agent.sock"
        self.rows = [ROW]
        self.ready = True
        self.feed = Feed(longest)
        self.events = Events(lambda: 1.5, self.feed.publish)
        self.known = Known(
            pods=lambda: self.rows,
            pod=self.pod,
            events=self.events.since,
            watch=self.feed.watch,
            explain=self.explain,
            scan=lambda: {"findings": [FINDING], "scanned": {"namespaces": 3, "time": None}},
        )
        self.door = GrpcDoor(self.known, lambda: self.ready, folder)
        self.channel: Any = None

    async def pod(self, wanted: Mapping[str, Any]) -> Mapping[str, Any]:
        for row in self.rows:
            if all(row[key] == value for key, value in wanted.items() if value):
                return row
        raise EnvironmentLacks(f"the agent knows no pod {wanted['name']}")

    async def explain(self, wanted: Mapping[str, Any]) -> Mapping[str, Any]:
        row = await self.pod(wanted)
        return {"pod": row, "findings": {"in_sync": False, "differences": ["+ a rule"]}}

    async def say(self, request: Mapping[str, Any]) -> object:
        return "here"

    def call(self, method: str, request: Any, timeout_s: float = 10.0) -> Any:
        """Call a method of the agent's own service."""
        described = SERVICE.methods_by_name[method]
        kind = getattr(agent_pb2, described.output_type.name)
        make = self.channel.unary_stream if described.server_streaming else self.channel.unary_unary
        call = make(
            f"/{SERVICE.full_name}/{method}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=kind.FromString,
        )
        return call(request, timeout=timeout_s)

    async def health(self, service: str) -> int:
        stub = health_pb2_grpc.HealthStub(self.channel)
        request = health_pb2.HealthCheckRequest(service=service)
        return int((await stub.Check(request, timeout=10)).status)


def play(folder: Path, part: Callable[[Scene], Awaitable[None]], *, longest: int = 1024) -> None:
    async def run() -> None:
        scene = Scene(folder, longest=longest)
        server = Server(scene.path, {"say": scene.say}, scene.door.serve)
        await server.start()
        try:
            async with channel_to(scene.path) as scene.channel, asyncio.timeout(30):
                await part(scene)
        finally:
            await server.close()
            await scene.door.close()

    asyncio.run(run())


def channel_to(path: Path) -> Any:
    options = (("grpc.use_local_subchannel_pool", 1), ("grpc.default_authority", "localhost"))
    return grpc.aio.insecure_channel(f"unix:{path}", options=options)


@contextlib.asynccontextmanager
async def serving(agent: Agent, folder: Path) -> AsyncIterator[Path]:
    """Serve without the agent's own socket; the path is that of the one without a name."""
    server = GrpcServer(agent, lambda: True)
    await server.start(folder)
    try:
        yield Path(server.path)
    finally:
        await server.close()


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - what is waited for has no event of its own
        await asyncio.sleep(0.01)


async def refusal(call: Any) -> tuple[grpc.StatusCode, str]:
    """Return how a call, or the rest of a stream, ends."""
    try:
        if hasattr(call, "__aiter__"):
            async for _ in call:
                pass
        else:
            await call
    except grpc.aio.AioRpcError as error:
        return error.code(), str(error.details())
    raise AssertionError("it was answered")


def test_pods_are_listed_and_one_is_found_by_name(tmp_path: Path) -> None:
    async def part(scene: Scene) -> None:
        scene.rows.append({**ROW, "namespace": "other", "uid": "u2"})
        everything = await scene.call("List", agent_pb2.ListRequest())
        assert [pod.namespace for pod in everything.pods] == ["shop", "other"]
        some = await scene.call("List", agent_pb2.ListRequest(namespace="other"))
        assert [pod.uid for pod in some.pods] == ["u2"]
        found = await scene.call("Get", agent_pb2.PodName(namespace="shop", name="web"))
        assert {name: getattr(found, name) for name in ROW} == ROW
        missing = scene.call("Get", agent_pb2.PodName(namespace="shop", name="none"))
        assert await refusal(missing) == (
            grpc.StatusCode.NOT_FOUND,
            "the agent knows no pod none",
        )

    play(tmp_path, part)


def test_a_pod_is_explained(tmp_path: Path) -> None:
    async def part(scene: Scene) -> None:
        found = await scene.call("Explain", agent_pb2.PodName(namespace="shop", name="web"))
        assert found.pod.name == "web"
        assert list(found.findings.differences) == ["+ a rule"]
        missing = scene.call("Explain", agent_pb2.PodName(name="none"))
        assert (await refusal(missing))[0] is grpc.StatusCode.NOT_FOUND

    play(tmp_path, part)


def test_watcher_is_told_the_present_state_and_then_each_change(tmp_path: Path) -> None:
    async def part(scene: Scene) -> None:
        scene.events.add("captured", "shop/web", "by nftables")
        scene.events.add("captured", "other/web", "by nftables")
        request = agent_pb2.WatchRequest(namespace="shop", after_event=0)
        changes = aiter(scene.call("Watch", request))
        assert (await anext(changes)).pod.state == "in-sync"
        assert (await anext(changes)).HasField("present")
        assert (await anext(changes)).event.message == "by nftables"
        for state in ("drifted", "repairing", "in-sync"):
            scene.feed.publish(Change("pod", {**ROW, "state": state}))
        scene.feed.publish(Change("pod", {**ROW, "namespace": "other"}))
        scene.events.add("drift-repaired", "shop/web", "a rule was missing")
        scene.feed.publish(Change("gone", ROW))
        states = [(await anext(changes)).pod.state for _ in range(3)]
        assert states == ["drifted", "repairing", "in-sync"]
        event = (await anext(changes)).event
        assert (event.number, event.time, event.kind) == (3, 1.5, "drift-repaired")
        assert (await anext(changes)).gone.uid == "u1"

    play(tmp_path, part)


def test_watcher_that_does_not_keep_up_is_dropped_with_a_reason(tmp_path: Path) -> None:
    async def part(scene: Scene) -> None:
        changes = aiter(scene.call("Watch", agent_pb2.WatchRequest()))
        await anext(changes)
        await anext(changes)
        for number in range(6):  # all before the watcher's turn
            scene.events.add("captured", "shop/web", str(number))
        code, said = await refusal(changes)
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "too many changes waited" in said
        assert await scene.health("") == health_pb2.HealthCheckResponse.SERVING

    play(tmp_path, part, longest=5)


def test_watcher_that_takes_nothing_is_dropped_and_holds_up_nobody(tmp_path: Path) -> None:
    """It reads its connection, as every gRPC client does, but none of the messages."""

    async def part(scene: Scene) -> None:
        hasty = Agent(scene.known, take_s=0.3)
        async with serving(hasty, tmp_path) as path, channel_to(path) as scene.channel:
            changes = aiter(scene.call("Watch", agent_pb2.WatchRequest()))
            await anext(changes)
            while scene.feed.watchers:
                scene.events.add("captured", "shop/web", "x" * 10_000)
                await asyncio.sleep(0)
            found = await scene.call("List", agent_pb2.ListRequest())
            assert len(found.pods) == 1
            code, said = await refusal(changes)
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "too slow" in said

    play(tmp_path, part)


def test_scan_is_the_last_one_as_the_command_has_it(tmp_path: Path) -> None:
    async def part(scene: Scene) -> None:
        found = await scene.call("Scan", agent_pb2.ScanRequest())
        assert (found.scanned.namespaces, found.scanned.time) == (3, 0.0)
        (finding,) = found.findings
        where = {name: getattr(finding.where, name) for name in FINDING["where"]}
        assert where == {**FINDING["where"], "pod": ""}
        same = {name: getattr(finding, name) for name in FINDING if name != "where"}
        assert same == {name: value for name, value in FINDING.items() if name != "where"}

    play(tmp_path, part)


def test_watcher_that_leaves_is_forgotten(tmp_path: Path) -> None:
    async def part(scene: Scene) -> None:
        call = scene.call("Watch", agent_pb2.WatchRequest())
        await anext(aiter(call))
        assert scene.feed.watchers == 1
        call.cancel()
        await until(lambda: scene.feed.watchers == 0)

    play(tmp_path, part)


def test_health_follows_readiness_for_each_service(tmp_path: Path) -> None:
    serving, not_serving, unknown = 1, 2, 3

    async def part(scene: Scene) -> None:
        scene.ready = False
        for name in ("", *NAMES):
            assert await scene.health(name) == not_serving
        code, _ = await refusal(scene.health("no.such.Service"))
        assert code is grpc.StatusCode.NOT_FOUND
        stub = health_pb2_grpc.HealthStub(scene.channel)
        name = health_pb2.HealthCheckRequest(service=SERVICE.full_name)
        watching = aiter(stub.Watch(name, timeout=10))
        assert (await anext(watching)).status == not_serving
        scene.ready = True
        scene.door.changed()
        assert (await anext(watching)).status == serving
        assert await scene.health("") == serving
        odd = aiter(stub.Watch(health_pb2.HealthCheckRequest(service="none"), timeout=10))
        assert (await anext(odd)).status == unknown

    play(tmp_path, part)


def test_reflection_describes_the_service(tmp_path: Path) -> None:
    async def part(scene: Scene) -> None:
        stub = reflection_pb2_grpc.ServerReflectionStub(scene.channel)
        asked = (
            reflection_pb2.ServerReflectionRequest(list_services=""),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE.full_name),
        )
        listed, described = [x async for x in stub.ServerReflectionInfo(iter(asked), timeout=10)]
        names = [service.name for service in listed.list_services_response.service]
        assert sorted(names) == sorted(NAMES)
        [file] = described.file_descriptor_response.file_descriptor_proto
        assert file == agent_pb2.DESCRIPTOR.serialized_pb

    play(tmp_path, part)


def test_frames_and_grpc_are_answered_on_one_socket(tmp_path: Path) -> None:
    async def part(scene: Scene) -> None:
        for _ in range(3):
            reader, writer = await asyncio.open_unix_connection(str(scene.path))
            for _ in range(2):
                await frames.write(writer, {"do": "say"})
                assert await frames.read(reader) == {"result": "here"}
            writer.close()
            assert await scene.health("") == health_pb2.HealthCheckResponse.SERVING

    play(tmp_path, part)


def test_servers_own_socket_has_no_name(tmp_path: Path) -> None:
    """So nothing leads to it but the agent's socket, where it is checked who connects."""

    async def part(scene: Scene) -> None:
        await scene.health("")
        assert sorted(os.listdir(tmp_path)) == ["agent.sock", "agent.sock.lock"]

    play(tmp_path, part)


def test_request_that_is_too_large_is_refused(tmp_path: Path) -> None:
    async def part(scene: Scene) -> None:
        large = agent_pb2.ListRequest(namespace="x" * 100_000)
        code, said = await refusal(scene.call("List", large))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "larger than max" in said
        assert len((await scene.call("List", agent_pb2.ListRequest())).pods) == 1

    play(tmp_path, part)


def test_connections_are_bounded_and_one_that_ends_makes_room(tmp_path: Path) -> None:
    async def part(scene: Scene) -> None:
        opened = []
        for _ in range(door.MAX_CONNECTIONS):
            _, writer = await asyncio.open_unix_connection(str(scene.path))
            writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
            opened.append(writer)
        await until(lambda: scene.door.connections == door.MAX_CONNECTIONS)
        code, _ = await refusal(scene.health(""))
        assert code is grpc.StatusCode.UNAVAILABLE
        for writer in opened:
            writer.close()
        await until(lambda: scene.door.connections == 0)
        async with channel_to(scene.path) as scene.channel:
            assert await scene.health("") == health_pb2.HealthCheckResponse.SERVING

    play(tmp_path, part)


def test_server_that_cannot_be_started_costs_that_client_only(tmp_path: Path) -> None:
    async def part(scene: Scene) -> None:
        scene.door.folder = tmp_path / "none"
        code, _ = await refusal(scene.health(""))
        assert code is grpc.StatusCode.UNAVAILABLE
        scene.door.folder = tmp_path
        async with channel_to(scene.path) as scene.channel:
            assert await scene.health("") == health_pb2.HealthCheckResponse.SERVING

    play(tmp_path, part)


def test_every_value_of_a_pod_has_its_field() -> None:
    assert set(ROW) == set(agent_pb2.Pod.DESCRIPTOR.fields_by_name)
