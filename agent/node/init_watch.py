"""Whose processes a gate of the kind `listener` lets pass: those of init containers that run now.

A container's cgroup comes into being a moment before its first process, so its pod's folder of
cgroups is watched, and the runtime asked each time. Before that folder is known, which is until the
runtime has made the sandbox, it is asked again and again: the first init container starts at once.
A container that is not known to be an init container never passes, and none does once the proxy's
container was made, whatever became of it.
"""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from agent.kernel import cgroups
from agent.kernel.folders import FolderWatch
from agent.model.pod import PROXY
from agent.node.cri.errors import CriError, CriMissing
from agent.node.gate import LISTENER
from agent.node.reconciler import Reconciler

if TYPE_CHECKING:
    from agent.node.cri.client import CriClient
    from agent.node.cri.details import Container

log = logging.getLogger(__name__)

SOON_S = 0.03  # while a sandbox is being made
SOON_FOR_S = 60.0
LATER_S = 2.0  # where no folder tells


class InitWatch:
    """Follows the pods with such a gate of which init containers are known. Run it once."""

    def __init__(self, reconciler: Reconciler, endpoint: Callable[[], str | None]) -> None:
        """`endpoint` is where the runtime is now: None to find it, `none` for none."""
        self._reconciler = reconciler
        self._endpoint = endpoint
        self._asked: str | None = None
        self._client: CriClient | None = None
        self._folders = FolderWatch()
        self._wanted: dict[str, tuple[str, ...]] = {}
        self._changed = asyncio.Event()

    def look(self) -> None:
        """Pods came, went or changed: follow those that are there, and no others."""
        wanted = {}
        for pod in self._reconciler.pods.values() if self._endpoint() != "none" else ():
            wish = pod.wish
            if wish.init_names and self._reconciler.gate_of(wish) == LISTENER:
                wanted[wish.sandbox_id] = wish.init_names
        if wanted != self._wanted:
            self._wanted = wanted
            self._changed.set()

    async def run(self) -> None:
        running: dict[str, tuple[tuple[str, ...], asyncio.Task[None]]] = {}
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    for sandbox, (names, task) in list(running.items()):
                        if self._wanted.get(sandbox) != names:
                            task.cancel()
                            del running[sandbox]
                    for sandbox, names in self._wanted.items():
                        if sandbox not in running:
                            work = self._keep(sandbox, frozenset(names))
                            running[sandbox] = names, group.create_task(work)
                    await self._changed.wait()
                    self._changed.clear()
        finally:
            self._folders.close()
            await self._leave()

    async def _runtime(self) -> "CriClient":
        """Return the door to the runtime, another one if it is elsewhere by now."""
        endpoint = self._endpoint()
        if self._client is None or endpoint != self._asked:
            await self._leave()
            from agent.node.cri.client import CriClient  # here, since it brings gRPC

            self._asked, self._client = endpoint, CriClient(endpoint)
        return self._client

    async def _leave(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    async def _keep(self, sandbox: str, names: frozenset[str]) -> None:
        told = asyncio.Event()
        try:
            await self._follow(sandbox, names, told)
        finally:
            self._folders.remove(told.set)

    async def _follow(self, sandbox: str, names: frozenset[str], told: asyncio.Event) -> None:
        started, watched = time.monotonic(), False
        while True:
            told.clear()
            pause_s = LATER_S
            client = await self._runtime()
            try:
                if not watched:
                    cgroup = await client.cgroup(sandbox)
                    watched = cgroup is not None and self._watches(cgroup, told.set)
                found = passing(await client.containers(sandbox), names)
            except CriMissing:
                if time.monotonic() - started < SOON_FOR_S:
                    pause_s = SOON_S
            except CriError as error:
                log.info("init containers wait", extra={"sandbox": sandbox, "cause": str(error)})
            else:
                self._reconciler.let_pass(sandbox, found or ())
                if found is None:
                    return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await told.wait()

    def _watches(self, cgroup: str, heard: Callable[[], None]) -> bool:
        """Watch the folder in which a sandbox's cgroup and those of its containers are."""
        place = cgroups.folder(os.path.dirname(cgroup))
        try:
            if place is not None:
                self._folders.add(place, heard)
        except OSError:
            return False  # not there yet, or too many are watched
        return place is not None


def passing(containers: Iterable["Container"], names: frozenset[str]) -> tuple[str, ...] | None:
    """Return the cgroups that exist of those init containers; None once nobody may pass."""
    found = tuple(containers)
    if any(one.name == PROXY for one in found):
        return None
    there = (one.cgroup for one in found if one.name in names and one.cgroup)
    return tuple(sorted(one for one in there if cgroups.identity(one) is not None))
