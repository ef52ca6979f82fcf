"""A fake container runtime that is served from a thread of its own, for tests of whole programs."""

import asyncio
import threading
from pathlib import Path
from typing import Any, Self

from tests.fakes.fake_cri import FakeCri, FakeSandbox, serving
from tests.support.agent import wait_for
from tests.support.netns import path_of


class Runtime:
    """One runtime; `run` starts a pod in it."""

    def __init__(self, socket: Path) -> None:
        self.cri = FakeCri()
        self.socket = socket
        self._loop = asyncio.new_event_loop()
        self._ended = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),))

    async def _serve(self) -> None:
        async with serving(self.cri, self.socket):
            await self._ended.wait()

    def __enter__(self) -> Self:
        self._thread.start()
        wait_for(self.socket.exists)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join()
        self._loop.close()

    def run(self, name: str, netns: str | None, **fields: Any) -> None:
        path = str(path_of(netns)) if netns else None
        about = {"id": name, "name": name, "uid": name, "netns": path, **fields}
        self.cri.sandboxes[name] = FakeSandbox(**about)
