"""The gRPC server: the agent's service, health and reflection, on a socket that has no name.

gRPC for Python cannot be handed a connection that was accepted elsewhere, and does not ask who
connects. So its socket is made in a folder that only root may enter and taken out of it at once:
from then on it can only be reached through the descriptor that is kept here.
"""

import asyncio
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from agent.api.service import SERVICE, Agent, handlers
from agent.model.errors import EnvironmentLacks

HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
NAMES = (SERVICE.full_name, HEALTH, reflection.SERVICE_NAME)

MAX_CALLS = 128
OPTIONS = (
    ("grpc.max_concurrent_streams", 32),  # on one connection
    ("grpc.max_receive_message_length", 64 * 1024),
    ("grpc.max_send_message_length", 4 * 1024 * 1024),  # more is more than clients take
    ("grpc.max_metadata_size", 8 * 1024),
    ("grpc.absolute_max_metadata_size", 16 * 1024),
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_connection_idle_ms", 300_000),
    # A client that is stopped, or stops reading, is let go.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
)


class GrpcServer:
    """One server, for one event loop. `path` is where `connect` finds it."""

    def __init__(self, agent: Agent, ready: Callable[[], bool]) -> None:
        self.health = Health(ready)
        self._server: Any = grpc.aio.server(options=OPTIONS, maximum_concurrent_rpcs=MAX_CALLS)
        self._server.add_generic_rpc_handlers((handlers(agent),))
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self._server)
        reflection.enable_server_reflection(NAMES, self._server)
        self._fd = -1

    @property
    def path(self) -> str:
        return f"/proc/self/fd/{self._fd}"

    async def start(self, folder: Path) -> None:
        """Listen, by way of a socket in `folder` that is gone when this returns.

        Raises: EnvironmentLacks.
        """
        try:
            with tempfile.TemporaryDirectory(dir=folder, prefix=".grpc-") as private:
                self._fd = await self._listen(private)
        except (OSError, RuntimeError) as error:
            await self.close()
            raise EnvironmentLacks(f"gRPC cannot be served in {folder}: {error}") from error

    async def _listen(self, private: str) -> int:
        inside = os.open(private, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            # By the descriptor, since the path of a socket may be no longer than 107 bytes. The
            # name is a rare one: gRPC deletes it in the end, whatever the number then stands for.
            name = Path(private).name
            self._server.add_insecure_port(f"unix:/proc/self/fd/{inside}/{name}")
            await self._server.start()
            return os.open(name, os.O_PATH | os.O_CLOEXEC, dir_fd=inside)
        finally:
            os.close(inside)

    async def close(self) -> None:
        """End every call and connection."""
        await self._server.stop(None)
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # it has no types
    """grpc.health.v1, by asking whether the agent is ready.

    Not the servicer of the library: that one writes to watchers while it holds the lock under which
    the status is set, so one that does not read would stop the news for all.
    """

    def __init__(self, ready: Callable[[], bool]) -> None:
        self._ready = ready
        self._changed = asyncio.Event()

    def changed(self) -> None:
        """Look again whether the agent is ready."""
        self._changed.set()
        self._changed = asyncio.Event()

    def _status(self, service: str) -> Any:
        kinds = health_pb2.HealthCheckResponse
        if service not in ("", *NAMES):
            return kinds.SERVICE_UNKNOWN
        return kinds.SERVING if self._ready() else kinds.NOT_SERVING

    async def Check(self, request: Any, context: Any) -> Any:
        status = self._status(request.service)
        if status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN:
            said = f"no service {request.service!r} here"
            await context.abort(grpc.StatusCode.NOT_FOUND, said)
        return health_pb2.HealthCheckResponse(status=status)

    async def List(self, request: Any, context: Any) -> Any:
        found = {
            name: health_pb2.HealthCheckResponse(status=self._status(name)) for name in ("", *NAMES)
        }
        return health_pb2.HealthListResponse(statuses=found)

    async def Watch(self, request: Any, context: Any) -> None:
        last = None
        while True:
            changed, status = self._changed, self._status(request.service)
            if status != last:
                await context.write(health_pb2.HealthCheckResponse(status=status))
                last = status
            await changed.wait()
