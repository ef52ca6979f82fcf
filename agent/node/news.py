"""News of a namespace, by a pipe whose writing end the worker holds. For one event loop."""

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Mapping


class News:
    """One pipe at a time. `heard` is called when something comes, and when the pipe ends."""

    def __init__(self, heard: Callable[[], None]) -> None:
        self._heard = heard
        self._fd: int | None = None
        self._about = ""
        self._told_of: str | None = None

    def are_about(self, sandbox: str) -> bool:
        """Whether there is a pipe, and it is about this sandbox."""
        return self._fd is not None and self._about == sandbox

    def told_of(self, sandbox: str) -> bool:
        """Whether anything was ever written about this sandbox; that its pipe ended is no news."""
        return self._told_of == sandbox

    async def follow(
        self, ask: Callable[[int], Awaitable[Mapping[str, object]]], sandbox: str
    ) -> Mapping[str, object]:
        """Hand the writing end of a new pipe to `ask` and listen; return what it answered."""
        self.close()
        ours, theirs = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            answer = await ask(theirs)
        except BaseException:
            os.close(ours)
            raise
        finally:
            os.close(theirs)
        self._fd, self._about = ours, sandbox
        asyncio.get_running_loop().add_reader(ours, self._read)
        return answer

    def close(self) -> None:
        if self._fd is not None:
            asyncio.get_running_loop().remove_reader(self._fd)
            os.close(self._fd)
            self._fd = None

    def _read(self) -> None:
        assert self._fd is not None
        with contextlib.suppress(BlockingIOError):
            if os.read(self._fd, 4096):
                self._told_of = self._about
            else:
                self.close()
        self._heard()
