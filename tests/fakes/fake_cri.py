"""A container runtime that speaks CRI over a Unix socket, with a switch for every way to misbehave.

It behaves as containerd 1.6, 1.7, 2.1 or CRI-O do where they differ for an agent: events (none, one
queue that readers share, one queue a reader), what the verbose status says, whether it has a pause
process.
"""

import asyncio
import contextlib
import json
import os
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from agent.node.cri import api_pb2

SERVICE = "runtime.v1.RuntimeService"


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeSandbox:
    """One sandbox, as the runtime has it. `info` replaces the JSON of the verbose status."""

    id: str
    name: str = "web"
    namespace: str = "shop"
    uid: str = "u1"
    attempt: int = 0
    ready: bool = True
    created_at_ns: int = 1
    labels: dict[str, str] = field(default_factory=dict)
    annotations: dict[str, str] = field(default_factory=dict)
    netns: str | None = "/run/netns/none"
    pid: int = 4321
    ips: tuple[str, ...] = ("10.0.0.5",)
    host_network: bool = False
    closed: bool = False
    info: str | None = None
    runtime_handler: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeContainer:
    id: str
    sandbox_id: str
    name: str = "app"
    running: bool = True
    pid: int = 5432
    netns: str | None = None


def changed(sandbox: FakeSandbox, **fields: Any) -> FakeSandbox:
    return replace(sandbox, **fields)


class FakeCri:
    """The state of one runtime and its faults; served by `serving`."""

    def __init__(self, name: str = "containerd", version: str = "1.6.20~ds1") -> None:
        self.name = name
        self.version = version
        self.sandboxes: dict[str, FakeSandbox] = {}
        self.containers: dict[str, FakeContainer] = {}
        self.calls: Counter[str] = Counter()
        self.called = asyncio.Event()  # any call; for tests to wait on
        self.info: dict[str, str] = {}  # of its own status
        # Faults, by method (or method and sandbox).
        self.refused: dict[str, grpc.StatusCode] = {}
        self.hanging: set[str] = set()
        self.garbage: set[str] = set()
        self.delay_s = 0.0
        self.ignores_filters = False
        self.events_on = True
        self._shared: asyncio.Queue[str] = asyncio.Queue()
        self._readers: set[asyncio.Queue[str]] = set()

    def add(self, *sandboxes: FakeSandbox) -> None:
        self.sandboxes.update((sandbox.id, sandbox) for sandbox in sandboxes)

    def tell(self, container: str) -> None:
        """Send an event to whoever reads them."""
        for queue in self._readers or (self._shared,):
            queue.put_nowait(container)

    @property
    def readers(self) -> int:
        return len(self._readers)

    def queued(self) -> int:
        return self._shared.qsize()

    # --- answers ----------------------------------------------------------------------------------

    async def answer(self, method: str, raw: bytes, context: Any) -> bytes:
        request = getattr(api_pb2, f"{method}Request").FromString(raw)
        about = getattr(request, "pod_sandbox_id", "")
        self.calls[method] += 1
        self.called.set()
        await asyncio.sleep(self.delay_s)
        for key in (method, f"{method} {about}"):
            if key in self.hanging:
                await asyncio.sleep(3600)
            if key in self.refused:
                await context.abort(self.refused[key], "told to")
            if key in self.garbage:
                return b"\xff\xff\xffno message"
        try:
            made = getattr(self, f"_{method}")(request)
        except KeyError:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"{about}: not found")
        return bytes(made.SerializeToString())

    def _Version(self, _: Any) -> Any:
        return api_pb2.VersionResponse(
            version="0.1.0",
            runtime_name=self.name,
            runtime_version=self.version,
            runtime_api_version="v1",
        )

    def _Status(self, request: Any) -> Any:
        lacking = api_pb2.RuntimeCondition(
            type="NetworkReady", status=False, message="cni plugin not initialized"
        )
        ready = api_pb2.RuntimeCondition(type="RuntimeReady", status=True)
        status = api_pb2.RuntimeStatus(conditions=[ready, lacking])
        return api_pb2.StatusResponse(status=status, info=self.info if request.verbose else {})

    def _ListPodSandbox(self, _: Any) -> Any:
        items = [
            api_pb2.PodSandbox(
                id=sandbox.id,
                metadata=_metadata(sandbox),
                state=_state(sandbox),
                created_at=sandbox.created_at_ns,
                labels=sandbox.labels,
                annotations=sandbox.annotations,
                runtime_handler=sandbox.runtime_handler,
            )
            for sandbox in self.sandboxes.values()
        ]
        return api_pb2.ListPodSandboxResponse(items=items)

    def _PodSandboxStatus(self, request: Any) -> Any:
        sandbox = self.sandboxes[request.pod_sandbox_id]
        mode = api_pb2.NODE if sandbox.host_network else api_pb2.POD
        options = api_pb2.NamespaceOption(network=mode)
        status = api_pb2.PodSandboxStatus(
            id=sandbox.id,
            metadata=_metadata(sandbox),
            state=_state(sandbox),
            created_at=sandbox.created_at_ns,
            network=api_pb2.PodSandboxNetworkStatus(
                ip=sandbox.ips[0] if sandbox.ips else "",
                additional_ips=[api_pb2.PodIP(ip=ip) for ip in sandbox.ips[1:]],
            ),
            linux=api_pb2.LinuxPodSandboxStatus(namespaces=api_pb2.Namespace(options=options)),
        )
        info = {"info": self._info(sandbox)} if request.verbose else {}
        return api_pb2.PodSandboxStatusResponse(status=status, info=info)

    def _info(self, sandbox: FakeSandbox) -> str:
        if sandbox.info is not None:
            return sandbox.info
        spaces = [{"type": "pid"}]
        if not sandbox.host_network:
            spaces.append({"type": "network", "path": sandbox.netns or ""})
        said: dict[str, Any] = {"runtimeSpec": {"linux": {"namespaces": spaces}}}
        if self.name == "containerd":
            said["netNamespaceClosed"] = sandbox.closed
            said["pid"] = sandbox.pid if sandbox.ready else 0
        return json.dumps(said)

    def _ListContainers(self, request: Any) -> Any:
        wanted = request.filter.pod_sandbox_id
        items = [
            api_pb2.Container(
                id=container.id,
                pod_sandbox_id=container.sandbox_id,
                metadata=api_pb2.ContainerMetadata(name=container.name),
                state=(
                    api_pb2.CONTAINER_RUNNING if container.running else api_pb2.CONTAINER_EXITED
                ),
            )
            for container in self.containers.values()
            if self.ignores_filters or container.sandbox_id == wanted
        ]
        return api_pb2.ListContainersResponse(containers=items)

    def _ContainerStatus(self, request: Any) -> Any:
        container = self.containers[request.container_id]
        spaces = [{"type": "network", "path": container.netns or ""}]
        said = {"pid": container.pid, "runtimeSpec": {"linux": {"namespaces": spaces}}}
        return api_pb2.ContainerStatusResponse(
            status=api_pb2.ContainerStatus(id=container.id), info={"info": json.dumps(said)}
        )

    async def events(self, _: bytes, context: Any) -> AsyncIterator[bytes]:
        self.calls["GetContainerEvents"] += 1
        if self.name == "containerd" and self.version.startswith("1.6"):
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "not implemented")
        if not self.events_on:
            return
        own: asyncio.Queue[str] = asyncio.Queue()
        shares = self.name == "containerd" and self.version.startswith(("1.", "2.0"))
        if not shares:
            self._readers.add(own)
        try:
            while True:
                told = await (self._shared if shares else own).get()
                yield api_pb2.ContainerEventResponse(container_id=told).SerializeToString()
        finally:
            self._readers.discard(own)


def _metadata(sandbox: FakeSandbox) -> Any:
    return api_pb2.PodSandboxMetadata(
        name=sandbox.name,
        uid=sandbox.uid,
        namespace=sandbox.namespace,
        attempt=sandbox.attempt,
    )


def _state(sandbox: FakeSandbox) -> Any:
    return api_pb2.SANDBOX_READY if sandbox.ready else api_pb2.SANDBOX_NOTREADY


METHODS = (
    "Version",
    "Status",
    "ListPodSandbox",
    "PodSandboxStatus",
    "ListContainers",
    "ContainerStatus",
)


@contextlib.asynccontextmanager
async def serving(cri: FakeCri, path: Path, *, service: str = SERVICE) -> AsyncIterator[FakeCri]:
    """Serve `cri` at a socket; at the end it goes away at once, as a killed runtime does.

    Another `service` makes a server that speaks gRPC and not CRI v1.
    """
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])

    def handler(method: str) -> Any:
        async def unary(raw: bytes, context: Any) -> bytes:
            return await cri.answer(method, raw, context)

        return grpc.unary_unary_rpc_method_handler(unary)

    handlers = {method: handler(method) for method in METHODS}
    handlers["GetContainerEvents"] = grpc.unary_stream_rpc_method_handler(cri.events)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    server.add_insecure_port(f"unix:{path}")
    await server.start()
    try:
        yield cri
    finally:
        await server.stop(None)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
