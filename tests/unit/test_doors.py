"""Doors move without a gap or not at all; parts that did not change run on."""

import asyncio
from collections.abc import Sequence

import pytest

from agent.cli.doors import Door, Doors
from agent.cli.parts import Part, Parts
from agent.model.errors import EnvironmentLacks


class FakeDoor:
    """Notes when it is opened and closed; one at `taken` cannot be opened."""

    def __init__(self, where: object, notes: list[str]) -> None:
        if where == "taken":
            raise EnvironmentLacks("it is taken")
        self.where, self.notes = where, notes
        notes.append(f"open {where}")

    async def close(self, patience_s: float = 0.0) -> None:
        self.notes.append(f"close {self.where}")


def doors_noting(notes: list[str]) -> Doors:
    async def opener(where: object, leaving: Sequence[Door]) -> Door | None:
        return FakeDoor(where, notes) if where else None

    return Doors({"a": opener, "b": opener})


def test_door_that_moves_is_opened_before_the_old_one_is_given_up() -> None:
    async def run() -> None:
        notes: list[str] = []
        doors = doors_noting(notes)
        assert await doors.move({"a": 1, "b": 2}) == []
        [old] = await doors.move({"a": 1, "b": 3})
        await old.close()
        assert await doors.move({"a": None, "b": 3}) != []
        assert doors.door("a") is None
        assert notes == ["open 1", "open 2", "open 3", "close 2"]
        await doors.close()
        assert notes[4:] == ["close 3"]

    asyncio.run(run())


def test_doors_stay_as_they_were_where_one_cannot_be_opened() -> None:
    async def run() -> None:
        notes: list[str] = []
        doors = doors_noting(notes)
        await doors.move({"a": 1, "b": 2})
        with pytest.raises(EnvironmentLacks, match="taken"):
            await doors.move({"a": 3, "b": "taken"})
        assert notes == ["open 1", "open 2", "open 3", "close 3"]
        assert await doors.move({"a": 1, "b": 2}) == []

    asyncio.run(run())


def test_part_runs_on_unless_it_is_made_of_something_else() -> None:
    async def run() -> None:
        notes: list[str] = []

        async def live(name: str) -> None:
            notes.append(f"start {name}")
            try:
                await asyncio.sleep(60)
            finally:
                notes.append(f"end {name}")

        def part(name: str, made_of: int) -> Part:
            return Part(name, made_of, lambda: live(name))

        async with asyncio.TaskGroup() as group:
            parts = Parts(group.create_task)
            assert await parts.have({"a": part("a1", 1), "b": part("b1", 1)}) == set()
            await asyncio.sleep(0)
            assert await parts.have({"a": part("a2", 1), "b": part("b2", 2)}) == {"b"}
            await asyncio.sleep(0)
            assert (parts.subject("a"), parts.subject("b")) == ("a1", "b2")
            assert await parts.have({}) == {"a", "b"}
        assert notes == ["start a1", "start b1", "end b1", "start b2", "end a1", "end b2"]

    asyncio.run(run())
