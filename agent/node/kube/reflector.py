"""Keeps one kind of object as the API server has it: list it in pieces, then watch what changes.

A watch goes on where the last one ended (`resourceVersion`, which bookmarks keep fresh). Only when
that is too old (410), or when the server contradicts itself, everything is listed anew, and what is
not in the list any more is gone. Every failure is tried again, with growing pauses and a little
randomness. What is known stays known meanwhile.

A server that was out of reach is asked how far it is before a watch goes on. One that has lost its
etcd, or was given an older state, takes a watch from a version that it has yet to come to, and
tells nothing until then, not even by bookmarks (kube-apiserver 1.34).
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from random import Random
from typing import Any, Protocol

from agent.model.values import shown
from agent.node.kube.client import ApiClient, Document
from agent.node.kube.errors import GONE, ApiError, ApiGarbled, ApiRefused

log = logging.getLogger(__name__)

PAGE = 250
MOST_OBJECTS = 50_000
LONGEST_VERSION = 256
FIRST_BACKOFF_S = 0.2
SLOWEST_BACKOFF_S = 15.0
CALM_S = 5.0  # a watch that held for as long ended in peace
# The server ends a watch after this. Where nothing happens it may tell nothing before: the first
# bookmark came after two minutes with etcd 3.6, and none with 3.4. To ask again costs little.
WATCH_S = 300.0
SILENCE_S = 120.0
# Answers to a watch that say: what you go on from is none of mine.
START_ANEW = frozenset({400, GONE, 504})


class Keeper(Protocol):
    """What keeps the objects. Whatever it cannot read it passes over; it raises nothing."""

    def replace(self, objects: list[Document]) -> None:
        """These are all there are."""

    def put(self, thing: Document) -> None:
        """One is new, or another than before."""

    def drop(self, thing: Document) -> None:
        """One is gone."""


class _Stale(ApiError):
    """What the watch would go on from is too old, or wrong."""


class Reflector:
    """One kind of object. Run it once; `problem` is why it is behind the server, or nothing."""

    def __init__(
        self,
        client: ApiClient,
        path: str,
        keeper: Keeper,
        *,
        query: Mapping[str, str] | None = None,
        changed: Callable[[], None] = lambda: None,
        random: Random | None = None,
        silence_s: float = SILENCE_S,
    ) -> None:
        """`changed` is called whenever `problem` is another one than before."""
        self.problem = "not asked yet"
        self.listed = False
        self.doubted = False  # whether the server may be another one than before
        self._client = client
        self._path = path
        self._keeper = keeper
        self._query = dict(query or {})
        self._changed = changed
        self._random = random or Random()
        self._silence_s = silence_s
        self._version = ""
        self._began = False  # whether the last watch was one, however it ended
        self._heard = False  # and told anything

    async def run(self) -> None:
        """Follow the server until cancelled."""
        backoff_s = FIRST_BACKOFF_S
        clock = asyncio.get_running_loop().time
        while True:
            self._began = self._heard = False
            started, wait_s = clock(), 0.0
            try:
                if not self._version:
                    await self._list()
                elif self.doubted:
                    await self._confirm()
                await self._watch()
            except _Stale as error:
                log.info("listing anew", extra={"path": self._path, "cause": str(error)})
                self._version = ""
            except ApiError as error:
                # A connection that breaks is no news; that no other can be made is.
                if not self._began:
                    self._say(str(error))
                wait_s = getattr(error, "retry_after_s", 0.0)
            if self._heard or (self._began and clock() - started > CALM_S):
                backoff_s = FIRST_BACKOFF_S
            # Also after a watch that ended well: a server that ends each at once is not pressed.
            await asyncio.sleep(max(wait_s, backoff_s) * self._random.uniform(0.5, 1.5))
            backoff_s = min(backoff_s * 2, SLOWEST_BACKOFF_S)

    def _say(self, problem: str) -> None:
        if problem == self.problem:
            return
        if problem and not self.problem:
            log.warning("API server lost", extra={"path": self._path, "cause": problem})
        self.problem = problem
        self._changed()

    # --- the list ---------------------------------------------------------------------------------

    async def _list(self) -> None:
        try:
            objects, version = await self._pages({"limit": str(PAGE)})
        except ApiRefused as error:
            if error.status != GONE:
                raise
            objects, version = await self._pages({})  # it took too long for pieces
        if not version:
            raise ApiGarbled(f"GET {self._path}: the list has no resourceVersion")
        self._keeper.replace(objects)
        self._version, self.listed = version, True
        self._say("")

    async def _pages(self, query: Mapping[str, str]) -> tuple[list[Document], str]:
        objects: list[Document] = []
        more: dict[str, str] = {}
        while True:
            page = await self._client.get(self._path, {**self._query, **query, **more})
            items = page.get("items") or []
            if not isinstance(items, list) or not str(page.get("kind", "")).endswith("List"):
                raise ApiGarbled(f"GET {self._path}: a list is expected")
            objects += (item for item in items if isinstance(item, dict))
            metadata = page.get("metadata")
            metadata = metadata if isinstance(metadata, dict) else {}
            token = metadata.get("continue")
            if not token:
                return objects, _version_of(page)
            if not items or len(objects) > MOST_OBJECTS:
                raise ApiGarbled(f"GET {self._path}: the list does not end")
            more = {"continue": str(token)}

    # --- the watch --------------------------------------------------------------------------------

    async def _confirm(self) -> None:
        """Raises: _Stale if the server is not as far yet as what is known.

        Versions of Kubernetes' own objects are numbers that grow; of any other nothing is said.
        """
        page = await self._client.get(self._path, {**self._query, "limit": "1"})
        theirs, ours = _version_of(page), self._version
        if theirs.isdecimal() and ours.isdecimal() and int(theirs) < int(ours):
            raise _Stale(f"the server has gone back from version {ours} to {theirs}")
        self.doubted = False

    async def _watch(self) -> None:
        query = {
            **self._query,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": self._version,
            "timeoutSeconds": str(int(WATCH_S * self._random.uniform(0.8, 1.2))),
        }
        try:
            await self._client.watch(
                self._path,
                query,
                began=self._agreed,
                hear=self._hear,
                silence_s=self._silence_s,
            )
        except ApiGarbled as error:
            raise _Stale(str(error)) from error
        except ApiRefused as error:
            if error.status in START_ANEW:
                raise _Stale(str(error)) from error
            raise

    def _agreed(self) -> None:
        self._began = True
        self._say("")

    def _hear(self, event: Document) -> None:
        kind, thing = event.get("type"), event.get("object")
        if not isinstance(thing, dict):
            raise _Stale(f"a change without an object: {shown(event)}")
        if kind == "ERROR":
            said = f"{thing.get('code')} {thing.get('reason') or ''}: {thing.get('message') or ''}"
            raise _Stale(said)
        version = _version_of(thing)
        if not version:
            raise _Stale("a change without a resourceVersion")
        if kind in ("ADDED", "MODIFIED"):
            self._keeper.put(thing)
        elif kind == "DELETED":
            self._keeper.drop(thing)
        self._version, self._heard = version, True


def _version_of(thing: Mapping[str, Any]) -> str:
    metadata = thing.get("metadata")
    found = metadata.get("resourceVersion") if isinstance(metadata, dict) else None
    return found if isinstance(found, str) and len(found) <= LONGEST_VERSION else ""
