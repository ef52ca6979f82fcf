"""The API server as a source, run in the test's own process, and what it says."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from random import Random

from agent.model.pod import Pod
from agent.node.kube.access import Credentials
from agent.node.kube.client import ApiClient
from agent.node.kube.source import KubeSource
from agent.node.source import Described
from tests.fakes.fake_api import NODE

PATIENCE_S = 20.0


class Heard:
    """A source that runs, and what it has said."""

    def __init__(self, access: Credentials, folder: Path, silence_s: float) -> None:
        self.source = KubeSource(
            ApiClient(access), NODE, folder / "state", random=Random(1), silence_s=silence_s
        )
        self.updates: list[Described] = []

    def take(self, update: object) -> None:
        assert isinstance(update, Described)
        self.updates.append(update)

    def known(self, name: str) -> Pod | None:
        return self.source.pod("shop", name, f"uid-{name}")

    def names(self) -> set[str]:
        return {name for _, name in self.source.cache.known_pods}


@contextlib.asynccontextmanager
async def hearing(
    access: Credentials, folder: Path, silence_s: float = 60.0
) -> AsyncIterator[Heard]:
    heard = Heard(access, folder, silence_s)
    task = asyncio.create_task(heard.source.run(heard.take))
    try:
        yield heard
    finally:
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            task.result()


async def until(
    condition: Callable[[], object],
    what: str = "not within the time",
    patience_s: float = PATIENCE_S,
) -> None:
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.01)
