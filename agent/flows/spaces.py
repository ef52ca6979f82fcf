"""Which namespaces are watched: one that was named, or every one on the node that is captured."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Self

from agent.flows.query import MAX_WATCHED
from agent.flows.space import Space
from agent.flows.view import is_captured
from agent.kernel import namespaces
from agent.kernel.namespaces import Place
from agent.kernel.netns import Netns, NetnsId, id_at, node_reason
from agent.model.errors import AgentError

Titles = Callable[[], Mapping[NetnsId, str]]
"""Asks what the pods of namespaces are called."""


@dataclass(frozen=True, slots=True)
class Change:
    """What came since the last look, and the cookies of what went."""

    come: tuple[Space, ...]
    gone: tuple[int, ...]


class Spaces:
    """The namespaces that are watched. Use it as a context manager: they are held open."""

    def __init__(self, titles: Titles, only: Space | None = None) -> None:
        """With `only`, which is taken over, there is never another one."""
        self._titles = titles
        self._only = only
        self._by_id: dict[NetnsId, Space] = {}
        self._by_cookie: dict[int, Space] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for space in tuple(self._by_id.values()):
            self._drop(space)

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def is_one(self) -> bool:
        return self._only is not None

    def of(self, cookie: int) -> Space | None:
        return self._by_cookie.get(cookie)

    def look(self) -> Change:
        """Look which there are now, and let go of those that are gone."""
        there = self._places() if self._only is None else self._where(self._only)
        gone = [space for known, space in self._by_id.items() if known not in there]
        for space in gone:
            self._drop(space)
        new = {known: place for known, place in there.items() if known not in self._by_id}
        come = tuple(self._opened(new))[: MAX_WATCHED - len(self)]
        for space in come:
            self._by_id[space.netns.id] = self._by_cookie[space.cookie] = space
        return Change(come, tuple(space.cookie for space in gone))

    def _drop(self, space: Space) -> None:
        del self._by_id[space.netns.id], self._by_cookie[space.cookie]
        space.close()

    def _places(self) -> dict[NetnsId, Place]:
        return {place.id: place for place in namespaces.places(namespaces.processes())}

    def _where(self, only: Space) -> dict[NetnsId, Place]:
        """Return the place of the one that was named, if it is there without us."""
        identity, path = only.netns.id, only.netns.path
        if id_at(path) == identity:
            return {identity: Place(identity, path, path)}
        found = self._places().get(identity)
        return {} if found is None else {identity: found}

    def _opened(self, places: Mapping[NetnsId, Place]) -> Iterator[Space]:
        if self._only is not None:
            yield from (self._only for _ in places)
            return
        titles: Mapping[NetnsId, str] | None = None
        for identity, place in places.items():
            with contextlib.suppress(AgentError, OSError), contextlib.ExitStack() as stack:
                netns = stack.enter_context(Netns.open(place.path))
                if node_reason(netns, is_self=False) is not None or not is_captured(netns):
                    continue
                titles = self._titles() if titles is None else titles
                space = Space(netns, titles.get(identity, place.name))
                stack.pop_all()
                yield space
