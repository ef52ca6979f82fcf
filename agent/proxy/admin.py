"""Envoy's admin port: what it says about itself, read by one GET each."""

import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from agent.formats import envoy
from agent.model.errors import EnvironmentLacks
from agent.proxy import http
from agent.proxy.http import ProxyUnreadable

T = TypeVar("T")

MAX_BYTES = 64 * http.MIB  # thousands of clusters with their endpoints

UNAVAILABLE = 503  # /ready of an Envoy that is not


@dataclass(frozen=True, slots=True)
class Admin:
    """One proxy's admin port. `connect` opens a connection to it, `where` names it in errors."""

    connect: Callable[[], Awaitable[socket.socket]]
    where: str
    deadline_s: float
    max_bytes: int = MAX_BYTES

    async def state(self) -> str:
        """Return the word for how Envoy is; `LIVE` is the one that means ready.

        Raises: EnvironmentLacks if nobody answers there or it is not Envoy; so do the others.
        """
        path = "/ready"
        reply = await self._get(path)
        if reply.status not in (http.OK, UNAVAILABLE):
            raise self._not_envoy(path, f"status {reply.status}")
        try:
            return envoy.state(reply.body.decode("utf-8", "replace"))
        except envoy.NotEnvoy as error:
            raise self._not_envoy(path, str(error)) from error

    async def listeners(self) -> tuple[envoy.Listener, ...]:
        return await self._read("/listeners?format=json", envoy.listeners)

    async def clusters(self) -> tuple[envoy.Cluster, ...]:
        return await self._read("/clusters?format=json", envoy.clusters)

    async def certificates(self) -> tuple[envoy.Certificate, ...]:
        return await self._read("/certs", envoy.certificates)

    async def _read(self, path: str, parse: Callable[[bytes, bool], T]) -> T:
        reply = await self._get(path)
        if reply.status != http.OK:
            raise self._not_envoy(path, f"status {reply.status}")
        try:
            return parse(reply.body, reply.server.lower() == "envoy")
        except envoy.NotEnvoy as error:
            raise self._not_envoy(path, str(error)) from error

    async def _get(self, path: str) -> http.Reply:
        sock = await self.connect()
        try:
            return await http.fetch(
                sock, path, deadline_s=self.deadline_s, max_bytes=self.max_bytes
            )
        except ProxyUnreadable as error:
            raise EnvironmentLacks(f"{self.where} {error}") from error

    def _not_envoy(self, path: str, said: str) -> EnvironmentLacks:
        return EnvironmentLacks(
            f"{self.where} is not Envoy's admin port: {path} answers with {said}; "
            "--admin-port names another one"
        )
