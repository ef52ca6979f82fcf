"""Namespaces that are named in the configuration, for hosts without a container runtime.

A path may come, go and come back as another namespace, so it is looked at again and again.
"""

import asyncio
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from random import Random

from agent.kernel.netns import RUN_NETNS, Netns
from agent.model.errors import NamespaceRefused
from agent.node.config import StaticPod
from agent.node.source import Changed, Gone, PodKey, PodRecord, Snapshot, Update

NAMESPACE = "static"
INTERVAL_S = 2.0


class StaticSource:
    """See `agent.node.source.Source`. A pod is there while its path is a network namespace."""

    def __init__(
        self,
        pods: Iterable[StaticPod],
        *,
        name: str = "static",
        interval_s: float = INTERVAL_S,
        random: Random | None = None,
    ) -> None:
        self.name = name
        self.connected = False
        self.detail = "not looked yet"
        self._pods = tuple(pods)
        self._interval_s = interval_s
        self._random = random or Random()
        self._known: dict[PodKey, PodRecord] = {}

    async def run(self, sink: Callable[[Update], None]) -> None:
        """Tell `sink` of the namespaces until cancelled."""
        self._known, absent = self._look()
        sink(Snapshot(source=self.name, pods=tuple(self._known.values())))
        try:
            while True:
                self.connected = True
                self.detail = f"{len(self._known)} of {len(self._pods)} namespaces are there"
                if absent:
                    self.detail += f" ({'; '.join(absent)})"
                await asyncio.sleep(self._interval_s * self._random.uniform(0.8, 1.2))
                now, absent = self._look()
                for update in self._changes(now):
                    sink(update)
                self._known = now
        finally:
            self.connected = False

    def _look(self) -> tuple[dict[PodKey, PodRecord], list[str]]:
        found, absent = {}, []
        for pod in self._pods:
            path = path_of(pod.netns)
            identity = identity_of(path)
            if identity is None:
                absent.append(f"{pod.name}: there is no network namespace at {path}")
                continue
            record = PodRecord(
                namespace=NAMESPACE,
                name=pod.name,
                uid="",
                sandbox_id=identity,
                netns=path,
                settings=pod.settings,
            )
            found[record.key] = record
        return found, absent

    def _changes(self, now: dict[PodKey, PodRecord]) -> list[Update]:
        gone = [Gone(source=self.name, key=key) for key in self._known if key not in now]
        changed = [
            Changed(source=self.name, pod=pod)
            for key, pod in now.items()
            if self._known.get(key) != pod
        ]
        return [*gone, *changed]


def path_of(netns: str) -> str:
    """Return the path that is meant: a bare name is one under /run/netns."""
    return netns if "/" in netns else str(RUN_NETNS / netns)


def identity_of(path: str) -> str | None:
    """Return what names the namespace at a path, or None if there is none.

    That is (dev, inode), and the birth of the inode where the path is a mount: a namespace that is
    made anew right after another was removed mostly gets its number (seen on 6.18), while the inode
    lives as long as the mount. Under /proc each look may make the inode anew.
    """
    try:
        with Netns.open(path) as netns:
            status = os.fstat(netns.fd)
    except (NamespaceRefused, ValueError):
        return None
    identity = f"{status.st_dev}:{status.st_ino}"
    if Path(path).resolve().is_relative_to("/proc"):
        return identity
    return f"{identity}:{status.st_ctime_ns}"
