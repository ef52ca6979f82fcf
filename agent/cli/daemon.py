"""The daemon: sources of pods, decisions, the reconciler and the doors to ask it, put together.

This half talks to the runtime, the plugin and the network, and holds no network-administration
capability; namespaces are entered by the worker alone. When it ends, however it ends, every capture
stays in place.
"""

import asyncio
import contextlib
import json
import logging
import math
import os
import signal
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

from agent.cli.cni_calls import CniCalls, pod_key
from agent.cli.proxy_metrics import ProxyMetrics
from agent.cni.installer import BIN_DIR, Place
from agent.cni.server import Server
from agent.cni.watcher import State, Watcher
from agent.formats.cni_config import Entry
from agent.kernel import capabilities
from agent.model.decision import decide
from agent.model.errors import AgentError
from agent.model.pod import Namespace, Pod, Policy
from agent.node.config import Config, load
from agent.node.cri.client import CriClient
from agent.node.cri.source import CriSource
from agent.node.events import Events
from agent.node.memory import Memory
from agent.node.reconciler import Reconciler, Wish
from agent.node.source import Changed, Gone, PodRecord, Snapshot, Source, Update
from agent.node.static_source import StaticSource
from agent.node.worker_client import WorkerClient
from agent.observe.http import Answer, HttpServer
from agent.observe.metrics import CONTENT_TYPE, Metrics

log = logging.getLogger(__name__)

LONGEST_WAIT_S = 25.0


class Daemon:
    """One agent with one configuration, which is read again from `path` after SIGHUP."""

    def __init__(self, config: Config, events: Events, metrics: Metrics, path: str | None) -> None:
        self._config = config
        self._path = path
        self._events = events
        self._metrics = metrics
        self._ended = asyncio.Event()
        self._next: Config | None = None
        self._worker = WorkerClient()
        self._policy = Policy(
            exclude_namespaces=config.exclude_namespaces,
            own_namespace=os.environ.get("POD_NAMESPACE", ""),
        )
        self._reconciler = Reconciler(
            self._worker,
            self._events,
            self._metrics,
            mode=config.mode,
            backend=config.backend,
            guard=config.guard,
        )
        self._proxies = ProxyMetrics(self._worker, self._reconciler.pods.values, metrics)
        self._sources = self._make_sources()
        self._watcher = self._make_watcher()
        self._memory = Memory(config.state_dir)
        self._told: set[str] = set()
        self._forgetting: set[asyncio.Task[None]] = set()
        self._addresses: dict[str, str | None] = {"health": None, "status": None}

    def _make_sources(self) -> tuple[Source, ...]:
        found: list[Source] = []
        if self._config.static:
            found.append(StaticSource(self._config.static))
        if self._config.cri_endpoint != "none":
            found.append(CriSource(CriClient(self._config.cri_endpoint)))
        return tuple(found)

    def _make_watcher(self) -> Watcher | None:
        """Return what keeps the plugin's entry on the node, if the configuration says where."""
        conf_dir, bin_dir = self._config.cni_conf_dir, self._config.cni_bin_dir
        self._metrics.cni_present.set(math.nan)  # neither yes nor no before somebody has looked
        if conf_dir is None:
            return None
        return Watcher(
            Place(
                conf_dir=str(conf_dir),
                bin_dir=str(bin_dir or BIN_DIR),
                entry=Entry(socket=str(self._config.socket)),
            ),
            repair=self._config.mode == "repair",
            on_change=self._hear_cni,
        )

    def _hear_cni(self, state: State) -> None:
        self._metrics.cni_present.set(state.present)
        self._metrics.cni_repairs.set(state.repairs)

    def _poke(self) -> None:
        for source in self._sources:
            if isinstance(source, CriSource):
                source.poke()

    async def run(self) -> Config | None:
        """Serve until SIGTERM or SIGINT, or until SIGHUP when the configuration is another one.

        Returns that other configuration, or None at the end. Raises: EnvironmentLacks if the socket
        or a port cannot be had.
        """
        capabilities.drop(capabilities.NUMBERS)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._ended.set)
        loop.add_signal_handler(signal.SIGHUP, self._reload)
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(self._worker.close)
            stack.push_async_callback(self._reconciler.close)
            for wish in await asyncio.to_thread(self._memory.load):
                self._reconciler.want(wish)
            await self._open_doors(stack)
            async with asyncio.TaskGroup() as tasks:
                running = [
                    tasks.create_task(source.run(partial(self._hear, source)))
                    for source in self._sources
                ]
                if self._watcher is not None:
                    running.append(tasks.create_task(self._watcher.run()))
                log.info("started", extra={"socket": str(self._config.socket)})
                await self._ended.wait()
                for task in running:
                    task.cancel()
        log.info("started anew" if self._next else "ended; every capture stays in place")
        return self._next

    def _reload(self) -> None:
        try:
            found = load(self._path)
        except AgentError as error:
            log.error("the new configuration is refused, the old one stays: %s", error)
            return
        if found != self._config:
            # Nothing is lost by ending: what is captured is adopted without a write.
            self._next = found
            self._ended.set()

    async def _open_doors(self, stack: contextlib.AsyncExitStack) -> None:
        calls = CniCalls(
            self._reconciler,
            self._events,
            self._metrics,
            policy=self._policy,
            memory=self._memory,
            seen=self._poke,
        )
        handlers = {
            "cni": calls.answer,
            "pods": self._pods,
            "status": self._status,
            "events": self._list_events,
        }
        server = Server(self._config.socket, handlers)
        await server.start()
        stack.push_async_callback(server.close)
        for name, where, pages, local in (
            ("health", self._config.health, self._health_pages(), {}),
            ("status", self._config.status, self._status_pages(), self._debug_pages()),
        ):
            if where.port:
                http = HttpServer(pages, local)
                port = await http.start(where.address, where.port)
                self._addresses[name] = f"http://{where.address}:{port}"
                stack.push_async_callback(http.close)

    # --- what sources say -------------------------------------------------------------------------

    def _hear(self, source: Source, update: Update) -> None:
        self._metrics.connected.labels(source.name).set(source.connected)
        self._told.add(source.name)
        if isinstance(update, Changed):
            self._want(source.name, update.pod)
        elif isinstance(update, Gone):
            self._forget(source.name, pod_key(source.name, *update.key))
        elif isinstance(update, Snapshot):
            keep = {pod_key(source.name, *key) for key in update.unknown}
            for pod in update.pods:
                keep.add(self._want(source.name, pod))
            for key, known in list(self._reconciler.pods.items()):
                # What the plugin told first becomes the runtime's with its first list.
                if known.wish.source == source.name and key not in keep:
                    self._forget(source.name, key)

    def _want(self, source: str, pod: PodRecord) -> str:
        key = pod_key(source, *pod.key)
        if pod.settings is not None:
            decision_settings: Mapping[str, object] | None = pod.settings
            reason, text = "static", "it is named in the configuration"
        else:
            decision = decide(_model(pod), Namespace(name=pod.namespace), self._policy)
            decision_settings = decision.settings if decision.captured else None
            reason, text = decision.reason.value, decision.text
        self._reconciler.want(
            Wish(
                key=key,
                namespace=pod.namespace,
                name=pod.name,
                uid=pod.uid,
                sandbox_id=pod.sandbox_id,
                netns=pod.netns,
                settings=decision_settings,
                reason=reason,
                text=text,
                source=source,
            )
        )
        self._count()
        return key

    def _forget(self, source: str, key: str) -> None:
        known = self._reconciler.pods.get(key)
        if known is not None and known.wish.source == source:
            self._memory.drop(key)
            task = asyncio.create_task(self._reconciler.forget(key))
            self._forgetting.add(task)  # the event loop alone would not keep it
            task.add_done_callback(self._forgetting.discard)
            task.add_done_callback(lambda _: self._count())

    def _count(self) -> None:
        counts = Counter((p.state, p.backend or "none") for p in self._reconciler.pods.values())
        self._metrics.pods.clear()
        for (state, backend), number in counts.items():
            self._metrics.pods.labels(state, backend).set(number)
        for source in self._sources:
            self._metrics.connected.labels(source.name).set(source.connected)
        self._metrics.worker_restarts.set(max(self._worker.restarts, 0))

    # --- those who ask ----------------------------------------------------------------------------

    def _pending(self) -> list[str]:
        """Return why the agent is not ready, one sentence each."""
        pending = [
            f"{source.name}: {source.detail}"
            for source in self._sources
            if source.name not in self._told
        ]
        if self._watcher is not None and not self._watcher.state.present:
            pending.append(f"cni: {self._watcher.state.reason}")
        return pending

    async def _pods(self, _: Mapping[str, Any]) -> object:
        rows = [pod.row() for pod in self._reconciler.pods.values()]
        return sorted(rows, key=lambda row: (str(row["namespace"]), str(row["name"])))

    async def _status(self, _: Mapping[str, Any]) -> object:
        states = Counter(pod.state for pod in self._reconciler.pods.values())
        pending = self._pending()
        return {
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
            "worker_pid": self._worker.pid,
            **self._addresses,
        }

    async def _list_events(self, request: Mapping[str, Any]) -> object:
        since = int(request.get("since", 0))
        wait_s = min(float(request.get("wait_s", 0)), LONGEST_WAIT_S)
        found = self._events.since(since)
        if not found and wait_s > 0:
            await self._events.wait(wait_s)
            found = self._events.since(since)
        return found

    def _health_pages(self) -> dict[str, Any]:
        async def ready() -> Answer:
            pending = self._pending()
            document = {"ready": not pending, "pending": pending}
            return Answer.of(document, 503 if pending else 200)

        async def live() -> Answer:
            return Answer.of({"live": True})

        return {"/healthz/ready": ready, "/healthz/live": live}

    def _status_pages(self) -> dict[str, Any]:
        async def metrics() -> Answer:
            self._count()
            await self._proxies.refresh()
            return Answer(200, self._metrics.text(), CONTENT_TYPE)

        async def stats() -> Answer:
            self._count()
            return await self._proxies.stats()

        pages = {"/metrics": metrics, "/stats/prometheus": stats}
        return {**self._health_pages(), **pages}

    def _debug_pages(self) -> dict[str, Any]:
        async def pods() -> Answer:
            return Answer.of({"pods": await self._pods({})})

        async def events() -> Answer:
            return Answer.of({"events": self._events.since(0)})

        async def config() -> Answer:
            return Answer.of(json.loads(json.dumps(asdict(self._config), default=str)))

        return {"/debug/pods": pods, "/debug/events": events, "/debug/config": config}


def _model(pod: PodRecord) -> Pod:
    return Pod(
        namespace=pod.namespace,
        name=pod.name,
        uid=pod.uid,
        labels=pod.labels,
        annotations=pod.annotations,
        host_network=pod.host_network,
    )
