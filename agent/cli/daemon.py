"""The daemon: sources of pods, decisions, the reconciler and the doors to ask it, put together.

This half talks to the runtime, the plugin and the network, and holds no network-administration
capability; namespaces are entered by the worker alone. When it ends, however it ends, every capture
stays in place.
"""

import asyncio
import contextlib
import logging
import math
import os
import signal
import time
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import Any

from agent.api.door import GrpcDoor
from agent.api.known import Known
from agent.cli import pages
from agent.cli.api_server import ApiServer, own_namespace
from agent.cli.cni_calls import CniCalls
from agent.cli.doors import Door, Doors
from agent.cli.parts import WATCHER, Ears, Part, Parts, parts_of
from agent.cli.proxy_metrics import ProxyMetrics
from agent.cli.status_page import StatusPage
from agent.cni.server import Server
from agent.cni.watcher import State, Watcher
from agent.kernel import capabilities, package
from agent.model.errors import AgentError, EnvironmentLacks
from agent.model.pod import Policy
from agent.model.state import EBPF
from agent.node.config import Config, Listen, load
from agent.node.events import Events
from agent.node.explanation import explain
from agent.node.feed import Feed
from agent.node.init_watch import InitWatch
from agent.node.kube.around import Around
from agent.node.leftover_watch import LeftoverWatch
from agent.node.memory import Memory
from agent.node.pod import Pod
from agent.node.reconciler import Reconciler
from agent.node.roster import Roster
from agent.node.source import KUBERNETES, Source, Update
from agent.node.sweeper import Sweeper
from agent.node.worker_client import WorkerClient
from agent.observe.http import HttpServer, Page
from agent.observe.metrics import Metrics
from agent.observe.service_manager import ServiceManager

log = logging.getLogger(__name__)

LONGEST_WAIT_S = 25.0
GONE = (KUBERNETES, False)
# How long those inside may stay when a door has moved.
PATIENCE_S = 30.0


class Daemon:
    """One agent. Its configuration is read again from `path` after SIGHUP."""

    def __init__(self, config: Config, path: str | None) -> None:
        """Raises: InvalidSettings for what only shows when it is used."""
        self._config = config
        self._path = path
        self._feed = Feed()
        self._events = Events(time.time, self._feed.publish)
        self._metrics = Metrics()
        self._metrics.cni_present.set(math.nan)  # neither yes nor no before somebody has looked
        self._manager = ServiceManager(os.environ, self._pending)
        self._ended, self._reload = asyncio.Event(), asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._worker = WorkerClient(config.state_dir, config.worker)
        self._reconciler = Reconciler(
            self._worker, self._events, self._metrics, publish=self._feed.publish, **_how(config)
        )
        self._proxies = ProxyMetrics(self._worker, self._reconciler.pods.values, self._metrics)
        self._leftovers = LeftoverWatch(
            self._worker,
            self._reconciler.pods.values,
            self._events,
            self._metrics,
            cni=lambda: (self._config.cni_conf_dir, self._config.cni_bin_dir),
        )
        self._roster = Roster(
            self._reconciler,
            Memory(config.state_dir),
            _policy(config),
            changed=self._pods_changed,
            turned=self._leftovers.look_at,
            tell=self._events.add,
        )
        alarm = partial(self._reconciler.look_again, EBPF)
        self._sweeper = Sweeper(self._worker, alarm, self._roster.let_go)
        self._inits = InitWatch(self._reconciler, lambda: self._config.cri_endpoint)
        self._parts = Parts(self._start)
        self._api = ApiServer(self._parts, self._roster, self._reconciler)
        self._ears = Ears(self._hear, self._hear_cni, self._around, self._api.ahead)
        self._first = parts_of(config, self._ears)
        self._told: set[str] = set()
        known = Known(
            pods=self._rows,
            pod=self._pod,
            events=self._events.since,
            watch=self._feed.watch,
            explain=self._explain,
            scan=self._leftovers.document,
        )
        health = pages.health(self._pending)
        shown = pages.metrics(self._metrics, self._proxies, self._count)
        debug = pages.debug(known, lambda: self._config)
        people = StatusPage(known, self._status, self._described, self._worker)
        self._grpc = GrpcDoor(known, lambda: not self._pending(), config.socket.parent)
        self._doors = Doors(
            {
                "socket": self._open_socket,
                "health": partial(self._open_pages, health, {}),
                "status": partial(self._open_pages, {**health, **shown, **people.pages()}, debug),
            }
        )

    # --- what it is made of -----------------------------------------------------------------------

    @property
    def _sources(self) -> list[Source]:
        return [found for found in self._parts.subjects() if not isinstance(found, Watcher)]

    @property
    def _watcher(self) -> Watcher | None:
        found: Watcher | None = self._parts.subject(WATCHER)
        return found

    def _around(self) -> Around:
        return self._api.around(
            self._events,
            self._feed,
            moved=lambda: self._grpc.changed(),
            ready=lambda: not self._pending(but=KUBERNETES),
        )

    async def _open_socket(self, where: object, leaving: Sequence[Door]) -> Door:
        calls = CniCalls(
            self._roster, self._reconciler, self._events, self._metrics, seen=self._poke
        )
        handlers = {
            "cni": calls.answer,
            "pods": self._pods,
            "status": self._status,
            "events": self._list_events,
            "explain": self._explain,
            "pod": self._described,
        }
        assert isinstance(where, Path)
        server = Server(where, handlers, self._grpc.serve)
        await server.start()
        return server

    async def _open_pages(
        self,
        shown: Mapping[str, Page],
        local: Mapping[str, Page],
        where: object,
        leaving: Sequence[Door],
    ) -> Door | None:
        assert isinstance(where, Listen)
        if not where.port:
            return None
        instead = [door for door in leaving if isinstance(door, HttpServer)]
        server = HttpServer(shown, local)
        await server.start(where.address, where.port, instead)
        return server

    # --- its life ---------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT.

        Raises: EnvironmentLacks if the socket or a port cannot be had.
        """
        capabilities.drop(capabilities.NUMBERS)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._ended.set)
        loop.add_signal_handler(signal.SIGHUP, self._reload.set)
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(self._worker.close)
            stack.push_async_callback(self._reconciler.close)
            stack.push_async_callback(self._grpc.close)
            stack.push_async_callback(self._doors.close)
            await self._doors.move(_places(self._config))
            await self._roster.remember()  # only now is it sure that no other agent is at work
            async with asyncio.TaskGroup() as self._group:
                await self._parts.have(self._first)
                self._api.use()
                self._start(self._reload_when_told())
                self._start(self._leftovers.run())
                self._start(self._sweeper.run())
                self._start(self._manager.run())
                self._start(self._inits.run())
                log.info("started", extra={"socket": str(self._config.socket)})
                await self._ended.wait()
                self._manager.ending()
                for task in self._tasks:
                    task.cancel()
        log.info("ended; every capture stays in place")

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._group.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _reload_when_told(self) -> None:
        while True:
            await self._reload.wait()
            self._reload.clear()
            with self._manager.reloading():
                await self._read_again()

    async def _read_again(self) -> None:
        try:
            config = await asyncio.to_thread(load, self._path)
            parts = parts_of(config, self._ears)
            leaving = await self._doors.move(_places(config))
        except AgentError as error:
            log.error("the new configuration is refused, the old one stays: %s", error)
            return
        before, self._config = self._config, config
        await self._follow(before, config)
        await self._use(parts)
        for door in leaving:
            self._start(self._doors.see_out(door, PATIENCE_S))
        log.info("configuration read again", extra={"changed": _changed(before, config)})

    async def _follow(self, before: Config, now: Config) -> None:
        """Go by another configuration: what did not change is left alone."""
        self._grpc.folder = now.socket.parent
        if before.state_dir != now.state_dir:
            await self._roster.use_memory(Memory(now.state_dir))
        if (before.state_dir, before.worker) != (now.state_dir, now.worker):
            await self._worker.renew(now.state_dir, now.worker)
        self._reconciler.configure(**_how(now))
        self._inits.look()
        if _policy(before) != _policy(now):
            self._roster.decide_again(_policy(now))

    async def _use(self, parts: Mapping[str, Part]) -> None:
        ended = await self._parts.have(parts)
        self._told -= ended  # before those that come after them have a turn
        if WATCHER in ended:
            self._metrics.cni_present.set(math.nan)
        for name in ended - {WATCHER} - parts.keys():
            self._metrics.connected.remove(name)
            await self._roster.leave(name)
        await self._api.ahead()  # what the one before it knew is good until then
        if self._api.use():
            self._roster.decide_again(self._roster.policy)
        self._grpc.changed()

    # --- what it is told --------------------------------------------------------------------------

    def _hear(self, source: Source, update: Update) -> None:
        self._metrics.connected.labels(source.name).set(source.connected)
        self._told.add(source.name)
        self._roster.hear(source.name, update)
        self._leftovers.poke()
        self._grpc.changed()

    def _hear_cni(self, state: State) -> None:
        self._metrics.cni_present.set(state.present)
        self._metrics.cni_repairs.set(state.repairs)
        self._grpc.changed()

    def _poke(self) -> None:
        for source in self._sources:
            poke = getattr(source, "poke", None)
            if poke is not None:
                poke()

    def _pods_changed(self) -> None:
        self._count()
        self._inits.look()

    def _count(self) -> None:
        counts = Counter((p.state, p.backend or "none") for p in self._reconciler.pods.values())
        self._metrics.pods.clear()
        for (state, backend), number in counts.items():
            self._metrics.pods.labels(state, backend).set(number)
        for source in self._sources:
            self._metrics.connected.labels(source.name).set(source.connected)
        self._metrics.worker_restarts.set(max(self._worker.restarts, 0))

    # --- those who ask ----------------------------------------------------------------------------

    def _pending(self, but: str = "") -> list[str]:
        """Return why the agent is not ready, one sentence each, but for one of its sources."""
        if not self._parts.started:
            return ["agent: it is starting"]
        pending = [
            f"{source.name}: {source.detail}"
            for source in self._sources
            # Everything goes on without the API server, but nothing new is heard of.
            if (source.name not in self._told or (source.name, source.connected) == GONE)
            and source.name != but
        ]
        if self._watcher is not None and not self._watcher.state.present:
            pending.append(f"cni: {self._watcher.state.reason}")
        return pending

    def _rows(self) -> list[dict[str, object]]:
        """Return the pods by namespace and name."""
        rows = [pod.row() for pod in self._reconciler.pods.values()]
        return sorted(rows, key=lambda row: (str(row["namespace"]), str(row["name"])))

    async def _pods(self, _: Mapping[str, Any]) -> object:
        return self._rows()

    async def _pod(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        return self._find(request).row()

    async def _described(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return all that is known of a pod; labels are null where only the plugin told of it."""
        pod = self._find(request)
        wanted = pod.wish.settings
        return {
            **pod.row(),
            "settings": None if wanted is None else self._reconciler.with_defaults(wanted),
            **self._roster.known(pod.wish),
        }

    async def _explain(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        return await explain(self._find(request), self._roster, self._reconciler, self._config)

    def _find(self, request: Mapping[str, Any]) -> Pod:
        """Return the pod of a name; of several the one that came last, or that of a uid."""
        namespace, name, uid = (str(request.get(key) or "") for key in ("namespace", "name", "uid"))
        for pod in reversed(self._reconciler.pods.values()):
            wish = pod.wish
            if (wish.namespace, wish.name) == (namespace, name) and uid in ("", wish.uid):
                return pod
        title = "/".join(filter(None, (namespace, name, uid)))
        raise EnvironmentLacks(f"the agent knows no pod {title} on this node")

    async def _status(self, _: Mapping[str, Any]) -> object:
        states = Counter(pod.state for pod in self._reconciler.pods.values())
        pending = self._pending()
        return {
            "version": package.version(),
            "ready": not pending,
            "pending": pending,
            "sources": [
                {"name": s.name, "connected": s.connected, "detail": s.detail}
                for s in self._sources
            ],
            "cni": asdict(self._watcher.state) if self._watcher else None,
            "pods": dict(states),
            "mode": self._config.mode,
            "backend": self._config.backend,
            "guard": self._config.guard,
            "worker_pid": self._worker.pid,
            **{name: self._url(name) for name in ("health", "status")},
        }

    def _url(self, name: str) -> str | None:
        door = self._doors.door(name)
        return door.url if isinstance(door, HttpServer) else None

    async def _list_events(self, request: Mapping[str, Any]) -> object:
        since = int(request.get("since", 0))
        wait_s = min(float(request.get("wait_s", 0)), LONGEST_WAIT_S)
        found = self._events.since(since)
        if not found and wait_s > 0:
            await self._events.wait(wait_s)
            found = self._events.since(since)
        return found


def _policy(config: Config) -> Policy:
    return config.policy(own_namespace())


def _how(config: Config) -> dict[str, Any]:
    """Return how pods are kept."""
    return {name: getattr(config, name) for name in ("mode", "backend", "guard", "gate")}


def _places(config: Config) -> dict[str, object]:
    return {"socket": config.socket, "health": config.health, "status": config.status}


def _changed(before: Config, now: Config) -> str:
    names = [one.name for one in fields(Config)]
    found = [name for name in names if getattr(before, name) != getattr(now, name)]
    return ", ".join(found) or "nothing"
