"""Where the agent listens. A door that moves is opened anew before the old one is closed."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


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

    def door(self, name: str) -> Door | None:
        place = self._places.get(name)
        return place.door if place else None

    async def move(self, wanted: Mapping[str, object]) -> list[Door]:
        """Listen where it is wanted, and return the doors that are to be closed for it.

        Raises: EnvironmentLacks if one cannot be opened; then all is as it was.
        """
        moving = {name: where for name, where in wanted.items() if self._is_new(name, where)}
        leaving = [door for name in moving if (door := self.door(name)) is not None]
        opened: dict[str, _Place] = {}
        try:
            for name, where in moving.items():
                opened[name] = _Place(where, await self._openers[name](where, leaving))
        except BaseException:
            await _close(opened)
            raise
        self._places |= opened
        return leaving

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
