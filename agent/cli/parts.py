"""What runs in the daemon for as long as it is configured so: its sources and its watcher."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from agent.cli.cni_places import told, unfound, unread
from agent.cni.installer import BIN_DIR, Place
from agent.cni.watcher import State, Watcher
from agent.formats.cni_config import Entry
from agent.node.config import Config
from agent.node.kube.around import Around
from agent.node.source import KUBERNETES, Source, Update
from agent.node.static_source import StaticSource

WATCHER = "watcher"
ASK_AGAIN_S = 15.0

Start = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]


@dataclass(frozen=True, slots=True)
class Part:
    """One part: what it is, what it was made of, and its life."""

    subject: Any
    made_of: object
    run: Callable[[], Coroutine[Any, Any, None]]


class Parts:
    """The parts by name. One that is made of the same as before runs on."""

    def __init__(self, start: Start) -> None:
        """`start` makes a task of a coroutine, in the task group of the daemon."""
        self.started = False
        self._start = start
        self._running: dict[str, tuple[Part, asyncio.Task[None]]] = {}

    def subject(self, name: str) -> Any:
        """Return a part that runs, or None."""
        found = self._running.get(name)
        return found[0].subject if found else None

    def subjects(self) -> list[Any]:
        return [part.subject for part, _ in self._running.values()]

    async def have(self, wanted: Mapping[str, Part]) -> frozenset[str]:
        """Run these parts and no others; return the names of those that were ended for it."""
        ended = []
        for name, (part, task) in list(self._running.items()):
            if name not in wanted or wanted[name].made_of != part.made_of:
                task.cancel()
                await asyncio.wait((task,))
                del self._running[name]
                ended.append(name)
        for name, part in wanted.items():
            if name not in self._running:
                self._running[name] = (part, self._start(part.run()))
        self.started = True
        return frozenset(ended)


@dataclass(frozen=True, slots=True)
class Ears:
    """Who is told what: pods by any source, the state of the plugin's entry, and what the API
    server needs of the rest. Sources of what runs begin after `ahead`, so that they find what is
    known of it."""

    pods: Callable[[Source, Update], None]
    cni: Callable[[State], None]
    around: Callable[[], Around]
    ahead: Callable[[], Awaitable[None]]


def parts_of(config: Config, ears: Ears) -> dict[str, Part]:
    """Return what is to run by a configuration. Nothing is opened before it runs.

    Raises: InvalidSettings for what only shows here.
    """
    parts = {}
    if config.kubernetes.kubeconfig != "none" and (cluster := _cluster(config, ears)):
        parts[KUBERNETES] = cluster
    if config.static:
        parts["static"] = _source(StaticSource(config.static), config.static, ears)
    if config.cri_endpoint != "none":
        # Here and not above: it brings gRPC, which an agent without a runtime may never need.
        from agent.node.cri.client import CriClient
        from agent.node.cri.source import CriSource

        source = CriSource(CriClient(config.cri_endpoint))
        parts["cri"] = _source(source, config.cri_endpoint, ears)
    if config.cni_conf_dir is not None:
        parts[WATCHER] = _watcher(config, ears.cni)
    return parts


def _cluster(config: Config, ears: Ears) -> Part | None:
    # Here and not above: it brings TLS and HTTP, which an agent on a plain host never needs.
    from agent.node.kube.access import credentials
    from agent.node.kube.cluster import Cluster

    known = config.kubernetes
    access = credentials(known.kubeconfig, known.context)
    if access is None:
        return None
    cluster = Cluster(access, known, config.state_dir, ears.around())
    return Part(
        cluster, (known, config.state_dir), lambda: cluster.run(partial(ears.pods, cluster))
    )


def _source(source: Source, made_of: object, ears: Ears) -> Part:
    async def run() -> None:
        await ears.ahead()
        await source.run(partial(ears.pods, source))

    return Part(source, made_of, run)


def _watcher(config: Config, hear_cni: Callable[[State], None]) -> Part:
    """Return what keeps the plugin's entry on the node."""
    place = Place(
        conf_dir=str(config.cni_conf_dir),
        bin_dir=str(config.cni_bin_dir or BIN_DIR),
        entry=Entry(socket=str(config.socket)),
        program=str(config.cni_program) if config.cni_program else None,
    )
    repair = config.mode == "repair"
    watcher = Watcher(place, repair=repair, on_change=hear_cni)

    async def run() -> None:
        while reason := await _elsewhere(place, config.cri_endpoint):
            watcher.hold(reason)
            await asyncio.sleep(ASK_AGAIN_S)
        await watcher.run()

    return Part(watcher, (place, repair, config.cri_endpoint), run)


async def _elsewhere(place: Place, endpoint: str | None) -> str:
    """Return why the plugin must not be put in a place, if the runtime looks for it elsewhere."""
    places = await told(endpoint)
    return unread(place, places) or unfound(place, places)
