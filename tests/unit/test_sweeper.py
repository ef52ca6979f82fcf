"""The loop that sweeps: it goes on whatever happens, and raises the alarm once for each trouble."""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence

from agent.model.errors import AgentError
from agent.node.sweeper import Sweeper

FINE: Mapping[str, object] = {"gone": 0, "faults": []}
DETACHED: Mapping[str, object] = {"gone": 1, "faults": ["connect4 is not attached"]}
WORSE: Mapping[str, object] = {"gone": 0, "faults": ["connect4 is not attached", "and so on"]}


class Jobs:
    """Gives one answer after the other, and the last one for good."""

    def __init__(self, answers: Sequence[Mapping[str, object] | None]) -> None:
        self._answers = list(answers)
        self._asked = 0
        self.last = asyncio.Event()  # has been given and its consequences seen

    async def job(
        self, job: str, netns_fd: int, *pipe: int, deadline_s: float = 1.0, **request: object
    ) -> Mapping[str, object]:
        assert job == "sweep"
        if self._asked >= len(self._answers):
            self.last.set()
        answer = self._answers[min(self._asked, len(self._answers) - 1)]
        self._asked += 1
        if answer is None:
            raise AgentError("the worker died")
        return answer


async def nothing() -> None:
    """There are no pods."""


def alarms(*answers: Mapping[str, object] | None) -> int:
    """Return how often the alarm was raised over these answers."""
    raised: list[None] = []

    async def sweep() -> None:
        jobs = Jobs((*answers, FINE))
        sweeper = Sweeper(jobs, lambda: raised.append(None), nothing, pause_s=0)
        task = asyncio.create_task(sweeper.run())
        async with asyncio.timeout(20):
            await jobs.last.wait()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    asyncio.run(sweep())
    return len(raised)


def test_nothing_wrong_is_no_alarm() -> None:
    assert alarms(FINE, FINE) == 0


def test_the_same_trouble_is_told_once() -> None:
    assert alarms(DETACHED, DETACHED, DETACHED) == 1


def test_another_trouble_and_one_that_comes_back_are_told_again() -> None:
    assert alarms(DETACHED, WORSE, FINE, DETACHED) == 3


def test_a_worker_that_died_does_not_end_it() -> None:
    assert alarms(None, DETACHED, None, DETACHED) == 1
