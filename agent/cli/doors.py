"""Where the agent listens. A door that moves is opened anew before the old one is closed."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from agent.model.errors import EnvironmentLacks

ATTEMPTS, PAUSE_S = 20, 0.1


class Door(Protocol):
    """A server that listens somewhere."""

    async def close(self, patience_s: float = 0.0) -> None: ...


Open = Callable[[object, Sequence[Door]], Awaitable[Door | None]]
"""Listens at a place; the doors given with it close afterwards. None for a place that is none."""


@dataclass(frozen=True, slots=True)
class _Place:
    where: object
    door: Door | None


class Doors:
    """The doors by name, and how each is opened."""

    def __init__(self, openers: Mapping[str, Open]) -> None:
        self._openers = openers
        self._places: dict[str, _Place] = {}
        self._seen_out: set[Door] = set()

    def door(self, name: str) -> Door | None:
        place = self._places.get(name)
        return place.door if place else None

    async def move(self, wanted: Mapping[str, object]) -> list[Door]:
        """Listen where it is wanted, and return the doors that are to be closed for it.

        Raises: EnvironmentLacks if one cannot be opened; then all is as it was.
        """
        moving = {name: where for name, where in wanted.items() if self._is_new(name, where)}
        leaving = [door for name in moving if (door := self.door(name)) is not None]
        for _ in range(ATTEMPTS):
            try:
                return await self._open(moving, leaving)
            except EnvironmentLacks:
                if not self._seen_out:
                    raise
            await asyncio.sleep(PAUSE_S)  # a door of ours that is just closing may be in the way
        return await self._open(moving, leaving)

    async def _open(self, moving: Mapping[str, object], leaving: list[Door]) -> list[Door]:
        opened: dict[str, _Place] = {}
        try:
            for name, where in moving.items():
                opened[name] = _Place(where, await self._openers[name](where, leaving))
        except BaseException:
            await _close(opened)
            raise
        self._places |= opened
        return leaving

    async def see_out(self, door: Door, patience_s: float) -> None:
        """Close a door that was left, when those inside have finished or the time is over."""
        self._seen_out.add(door)
        try:
            await door.close(patience_s)
        finally:
            self._seen_out.discard(door)

    def _is_new(self, name: str, where: object) -> bool:
        return name not in self._places or self._places[name].where != where

    async def close(self) -> None:
        """Close every door, at once."""
        places, self._places = self._places, {}
        await _close(places)


async def _close(places: Mapping[str, _Place]) -> None:
    for place in places.values():
        if place.door is not None:
            await place.door.close()
