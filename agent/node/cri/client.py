"""A client of the container runtime: which sandboxes there are, and where their namespaces are.

Promises: every request has a deadline, a runtime that restarts is found again without anybody's
help, and an answer is either the whole or an error. The list is one request; the details of a
sandbox, one request each, are read once and kept while the sandbox is listed, since they change
only with its state. Details that were not all there yet (no address, no namespace) are asked for
again, ever more rarely.

Works with containerd 1.6, 1.7 and 2.x and CRI-O; only requests that read are made. For one event
loop, and never to be used in a thread that did setns (see `transport`).
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from random import Random
from types import TracebackType
from typing import Self, TypeVar

from agent.kernel.netns import container_pid
from agent.model.errors import NamespaceRefused
from agent.node.cri import api_pb2, details, endpoint
from agent.node.cri.details import CniPlaces, Container, Sandbox
from agent.node.cri.errors import (
    CriBroken,
    CriError,
    CriMissing,
    CriRefused,
    CriUnsupported,
    RuntimeAbsent,
)
from agent.node.cri.transport import Message, Transport

M = TypeVar("M", bound=Message)

TIMEOUT_S = 10.0
VERSION_TIMEOUT_S = 3.0

# How often a socket that nobody listens on is looked at (microseconds each).
FIRST_LOOK_S = 0.05
SLOWEST_LOOK_S = 1.0

# Details are read a few at a time, and for no longer than this in one go: a slow runtime must not
# keep back what is known of the other pods.
AT_ONCE = 8
DETAILS_BUDGET_S = 5.0
DETAILS_TIMEOUT_S = 3.0
FIRST_RETRY_S = 0.5
SLOWEST_RETRY_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """Who answers, and where."""

    name: str
    version: str
    path: str

    @property
    def events_are_safe(self) -> bool:
        """Whether reading events takes none away from the kubelet.

        containerd 1.6 has none, and 1.7 to 2.0 have one queue that all readers share.
        """
        if self.name == "cri-o":
            return True
        numbers = self.version.removeprefix("v").split("~")[0].split("-")[0].split(".")[:2]
        if self.name != "containerd" or not all(number.isdecimal() for number in numbers):
            return False
        return tuple(map(int, numbers)) >= (2, 1)

    def __str__(self) -> str:
        return f"{self.name} {self.version} at {self.path}"


@dataclass(slots=True)
class _Kept:
    """A sandbox that is listed, and when its details may be asked for (again)."""

    sandbox: Sandbox
    due: bool = True
    retry_at_s: float = 0.0
    delay_s: float = FIRST_RETRY_S


class CriClient:
    """The door to the runtime at `configured`, or at whichever of the usual sockets answers."""

    def __init__(
        self,
        configured: str | None = None,
        *,
        timeout_s: float = TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
        random: Random | None = None,
    ) -> None:
        """Open nothing yet. Raises: InvalidSettings for an endpoint that is not a Unix socket."""
        self._paths = endpoint.candidates(configured)
        self._timeout_s = timeout_s
        self._clock = clock
        self._random = random or Random()
        self._transport: Transport | None = None
        self._runtime: Runtime | None = None
        self._connecting = asyncio.Lock()
        self._listing = asyncio.Lock()
        self._kept: dict[str, _Kept] = {}

    # --- the connection ---------------------------------------------------------------------------

    async def connect(self) -> Runtime:
        """Return who answers; the connection is made if there is none. It does not wait.

        Raises: RuntimeAbsent, CriUnsupported or CriBroken: what the most promising socket said.
        """
        async with self._connecting:
            if self._transport is not None and self._runtime is not None:
                return self._runtime
            worst: CriError | None = None
            absent: dict[str, list[str]] = {}
            for path in self._paths:
                if reason := endpoint.unreachable(path):
                    absent.setdefault(reason, []).append(path)
                    continue
                try:
                    return await self._open(path)
                except CriError as error:
                    worst = worst or error
            tried = "; ".join(f"{', '.join(paths)}: {reason}" for reason, paths in absent.items())
            raise worst or RuntimeAbsent(
                f"no container runtime answers ({tried}); the key cri.endpoint names its socket, "
                "or is none where there is no runtime"
            )

    async def wait_for_socket(self) -> bool:
        """Return once somebody listens on one of the sockets; whether that took any waiting.

        Looking is cheap, and there is no limit: a node without a runtime is a node, too.
        """
        delay_s, waited = FIRST_LOOK_S, False
        while all(endpoint.unreachable(path) for path in self._paths):
            await asyncio.sleep(delay_s * self._random.uniform(0.8, 1.2))
            delay_s, waited = min(delay_s * 2, SLOWEST_LOOK_S), True
        return waited

    async def close(self) -> None:
        """Close the connection; requests under way end with CriBroken. The next one opens it."""
        transport, self._transport, self._runtime = self._transport, None, None
        if transport is not None:
            await transport.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def _open(self, path: str) -> Runtime:
        transport = Transport(path)
        try:
            asked = min(VERSION_TIMEOUT_S, self._timeout_s)
            answer = await transport.ask(
                "Version", api_pb2.VersionRequest(), api_pb2.VersionResponse, asked
            )
        except BaseException:
            await transport.close()
            raise
        self._transport = transport
        self._runtime = Runtime(name=answer.runtime_name, version=answer.runtime_version, path=path)
        return self._runtime

    async def _ask(
        self,
        method: str,
        request: Message,
        answer: type[M],
        *,
        timeout_s: float | None = None,
        patient: bool = False,
    ) -> M:
        """Ask, and give the connection up if it is at fault.

        gRPC would try again by itself, with a back-off of up to two minutes. A new channel is made
        instead, once somebody listens. The `patient` keep it when one answer is late or wrong.
        """
        await self.connect()
        transport = self._transport
        if transport is None:
            raise CriBroken(f"{method}: the connection was closed")
        try:
            return await transport.ask(method, request, answer, timeout_s or self._timeout_s)
        except (RuntimeAbsent, CriBroken) as error:
            at_fault = isinstance(error, RuntimeAbsent) or not patient
            if at_fault and self._transport is transport:
                await self.close()
            raise

    # --- sandboxes --------------------------------------------------------------------------------

    async def sandboxes(self) -> tuple[Sandbox, ...]:
        """Return every sandbox that the runtime lists, oldest first.

        One whose details could not be read (now) is among them, with `detailed` false.

        Raises: CriError if the list cannot be had whole.
        """
        async with self._listing:
            answer = await self._ask(
                "ListPodSandbox", api_pb2.ListPodSandboxRequest(), api_pb2.ListPodSandboxResponse
            )
            self._keep_only(answer)
            await self._read_details()
            found = [kept.sandbox for kept in self._kept.values()]
            return tuple(sorted(found, key=lambda sandbox: (sandbox.created_at_ns, sandbox.id)))

    def _keep_only(self, answer: api_pb2.ListPodSandboxResponse) -> None:
        """Forget sandboxes that are not listed any more, and the details of changed ones."""
        kept: dict[str, _Kept] = {}
        for item in answer.items:
            if not item.id:
                continue
            before = self._kept.get(item.id)
            ready = item.state == api_pb2.SANDBOX_READY
            if before is None or before.sandbox.created_at_ns != item.created_at:
                kept[item.id] = _Kept(details.listed(item))
            elif before.sandbox.ready != ready:
                # What was known stays valid (but for the process) until it is read anew.
                kept[item.id] = _Kept(replace(before.sandbox, ready=ready, pid=None))
            else:
                kept[item.id] = before
        self._kept = kept

    async def _read_details(self) -> None:
        """Read what is due, newest first, until the budget is used up.

        Raises: CriError if the connection broke.
        """
        started = self._clock()
        due = [
            kept
            for kept in self._kept.values()
            if kept.due or (kept.retry_at_s <= started and not kept.sandbox.complete)
        ]
        due.sort(key=lambda kept: -kept.sandbox.created_at_ns)
        for first in range(0, len(due), AT_ONCE):
            if self._clock() - started > DETAILS_BUDGET_S:
                return
            reads = (self._read(kept) for kept in due[first : first + AT_ONCE])
            for outcome in await asyncio.gather(*reads, return_exceptions=True):
                if isinstance(outcome, BaseException):
                    raise outcome

    async def _read(self, kept: _Kept) -> None:
        """Read the details of one sandbox; that it does not answer must not hide the others."""
        try:
            found = await self._detailed(kept.sandbox)
        except CriMissing:  # it went after it was listed
            self._kept.pop(kept.sandbox.id, None)
            return
        except RuntimeAbsent:
            raise
        except CriError:
            found = kept.sandbox
        kept.sandbox = found
        kept.due = False
        kept.retry_at_s = self._clock() + kept.delay_s * self._random.uniform(0.8, 1.2)
        kept.delay_s = min(kept.delay_s * 2, SLOWEST_RETRY_S)

    async def _detailed(self, sandbox: Sandbox) -> Sandbox:
        request = api_pb2.PodSandboxStatusRequest(pod_sandbox_id=sandbox.id, verbose=True)
        answer = await self._ask(
            "PodSandboxStatus",
            request,
            api_pb2.PodSandboxStatusResponse,
            timeout_s=min(DETAILS_TIMEOUT_S, self._timeout_s),
            patient=True,
        )
        found = details.with_details(sandbox, answer)
        if found.complete or found.netns_path:
            return found
        return await self._located(found)

    async def _located(self, sandbox: Sandbox) -> Sandbox:
        """Return the sandbox with the namespace of one of its containers, if one tells.

        Runtimes for Docker tell nothing of the kind: there a process of the sandbox shows it.
        """
        try:
            containers = await self.containers(sandbox.id)
        except (CriRefused, CriUnsupported):
            return sandbox
        paths = (container.netns_path for container in containers if container.netns_path)
        path = next(paths, None)
        if path is None and sandbox.ready and not sandbox.host_network:
            path = await asyncio.to_thread(_shown_by_a_process, sandbox.id)
        return replace(sandbox, netns_path=path)

    # --- containers, events -----------------------------------------------------------------------

    async def containers(self, sandbox_id: str) -> tuple[Container, ...]:
        """Return the containers of a sandbox, oldest first, and what is told of those not ended.

        Raises: CriError.
        """
        chosen = api_pb2.ContainerFilter(pod_sandbox_id=sandbox_id)
        answer = await self._ask(
            "ListContainers",
            api_pb2.ListContainersRequest(filter=chosen),
            api_pb2.ListContainersResponse,
        )
        # A filter that a server ignores must not make another pod's containers this one's.
        items = [item for item in answer.containers if item.pod_sandbox_id == sandbox_id]
        found = [details.container(item, await self._living(item)) for item in items]
        return tuple(sorted(found, key=lambda container: (container.created_at_ns, container.id)))

    async def _living(self, item: api_pb2.Container) -> api_pb2.ContainerStatusResponse | None:
        if item.state not in (api_pb2.CONTAINER_CREATED, api_pb2.CONTAINER_RUNNING):
            return None
        request = api_pb2.ContainerStatusRequest(container_id=item.id, verbose=True)
        try:
            return await self._ask("ContainerStatus", request, api_pb2.ContainerStatusResponse)
        except (CriRefused, CriUnsupported):
            return None

    async def cgroup(self, sandbox_id: str) -> str | None:
        """Return where the cgroup of a sandbox itself is, None if the runtime does not tell.

        Raises: CriMissing if there is no such sandbox, or not yet; CriError.
        """
        request = api_pb2.PodSandboxStatusRequest(pod_sandbox_id=sandbox_id, verbose=True)
        answer = await self._ask("PodSandboxStatus", request, api_pb2.PodSandboxStatusResponse)
        return details.verbose(answer.info).cgroup

    async def conditions(self) -> dict[str, str]:
        """Return what the runtime says it lacks, by condition ("NetworkReady"), or nothing.

        Raises: CriError.
        """
        answer = await self._ask("Status", api_pb2.StatusRequest(), api_pb2.StatusResponse)
        lacking = (entry for entry in answer.status.conditions if not entry.status)
        return {entry.type: entry.message or entry.reason for entry in lacking}

    async def cni_places(self) -> CniPlaces | None:
        """Return where the runtime looks for CNI, None if it does not tell. Raises: CriError."""
        request = api_pb2.StatusRequest(verbose=True)
        answer = await self._ask("Status", request, api_pb2.StatusResponse)
        return details.cni_places(answer.info)

    async def events(self) -> AsyncGenerator[None, None]:
        """Yield once for every event, of whatever kind, until the runtime ends the stream.

        The caller must not read where `Runtime.events_are_safe` is false, and must keep reading:
        CRI-O sends to one reader after the other.

        Raises: CriError.
        """
        await self.connect()
        if self._transport is None:
            raise CriBroken("GetContainerEvents: the connection was closed")
        stream = self._transport.stream("GetContainerEvents", api_pb2.GetEventsRequest())
        async with aclosing(stream) as messages:
            async for _ in messages:
                yield


def _shown_by_a_process(sandbox_id: str) -> str | None:
    try:
        return f"/proc/{container_pid(sandbox_id)}/ns/net"
    except NamespaceRefused:
        return None
