"""The API server as a source: it does not say what runs here, but what is wanted of what runs.

See `agent.node.source.Source` and `Facts`. While the server cannot be reached, what it said before
goes on being true, also over a restart of the agent.
"""

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from random import Random

from agent.model.pod import Namespace, Pod
from agent.node.kube.cache import Cache
from agent.node.kube.client import ApiClient
from agent.node.kube.errors import NOT_FOUND, ApiError, ApiRefused
from agent.node.kube.reflector import SILENCE_S, Reflector
from agent.node.source import KUBERNETES, Described, Update

PODS, NAMESPACES = "/api/v1/pods", "/api/v1/namespaces"
# A runtime waits for the plugin, and the kubelet asks again: no pod is worth a long wait.
LOOK_UP_S = 1.5
SAVE_EVERY_S = 1.0


class KubeSource:
    """Run it once. `moved` is called whenever it comes to know or loses the server."""

    name = KUBERNETES

    def __init__(
        self,
        client: ApiClient,
        node: str,
        state_dir: Path,
        *,
        moved: Callable[[], None] = lambda: None,
        random: Random | None = None,
        silence_s: float = SILENCE_S,
    ) -> None:
        self.cache = Cache(node, self._tell)
        self._client = client
        self._state_dir = state_dir
        self._moved = moved
        self._sink: Callable[[Update], None] | None = None
        self._told = False
        self._spoke = asyncio.Event()
        self._dirty = asyncio.Event()
        self.problem = ""  # why a pod that was asked for is not told of
        self._reflectors = tuple(
            Reflector(
                client,
                path,
                keeper,
                query=query,
                changed=self._stirred,
                random=random,
                silence_s=silence_s,
            )
            for path, keeper, query in (
                (NAMESPACES, self.cache.namespaces, {}),
                (PODS, self.cache.pods, {"fieldSelector": f"spec.nodeName={node}"}),
            )
        )

    @property
    def synced(self) -> bool:
        """Whether everything was listed once since the start."""
        return all(reflector.listed for reflector in self._reflectors)

    @property
    def connected(self) -> bool:
        return not any(reflector.problem for reflector in self._reflectors)

    @property
    def detail(self) -> str:
        known = f"{len(self.cache.known_pods)} pods of node {self.cache.node}"
        problem = next((one.problem for one in self._reflectors if one.problem), "")
        return f"{problem}; decisions go on from what is known of {known}" if problem else known

    async def spoke(self, patience_s: float) -> None:
        """Return once it was listed or found out to be gone, or after `patience_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await self._spoke.wait()

    async def run(self, sink: Callable[[Update], None]) -> None:
        """Tell `sink` what to decide again until cancelled. Errors are waited out, not raised."""
        await asyncio.to_thread(self.cache.load, self._state_dir)
        self._sink = sink
        try:
            async with asyncio.TaskGroup() as group:
                for reflector in self._reflectors:
                    group.create_task(reflector.run())
                group.create_task(self._save())
        finally:
            self._sink = None

    async def _save(self) -> None:
        while True:
            await self._dirty.wait()
            await asyncio.sleep(SAVE_EVERY_S)
            self._dirty.clear()
            # In this thread: what is written must not change meanwhile, and it takes milliseconds.
            self.cache.save(self._state_dir)

    def _tell(self, described: Described) -> None:
        self._dirty.set()
        if self._sink is not None and self._told:
            self._sink(described)

    def _stirred(self) -> None:
        gone = any(one.problem for one in self._reflectors)
        if any(one.problem and one.listed for one in self._reflectors):
            # Another one may not notice: its connection breaks, and the next can be made again.
            for one in self._reflectors:
                one.doubted = True
        if self.synced and self._sink is not None and not self._told:
            # All at once, now that both are there: a pod without its namespace is half of it.
            self._told = True
            pods, namespaces = self.cache.known_pods, self.cache.known_namespaces
            self._sink(Described(pods=frozenset(pods), namespaces=frozenset(namespaces)))
        if self.synced or gone:
            self._spoke.set()
        self._moved()

    # --- facts ------------------------------------------------------------------------------------

    def pod(self, namespace: str, name: str, uid: str) -> Pod | None:
        return self.cache.pod(namespace, name, uid)

    def namespace(self, name: str) -> Namespace:
        return self.cache.namespace(name)

    async def look_up(self, namespace: str, name: str, uid: str) -> Pod | None:
        """Return a pod from the cache, or ask for it once; nothing if the server is gone."""
        known = self.pod(namespace, name, uid)
        lost = self._spoke.is_set() and not self.connected
        if known is not None or lost or not (namespace and name):
            return known
        path = f"{NAMESPACES}/{namespace}/pods/{name}"
        try:
            found = await self._client.get(path, deadline_s=LOOK_UP_S)
        except ApiError as error:
            if isinstance(error, ApiRefused) and error.status != NOT_FOUND:
                self.problem = f"a pod that starts is not looked up: {error}"
            return None
        self.problem = ""
        self.cache.pods.put(found)
        return self.pod(namespace, name, uid)
