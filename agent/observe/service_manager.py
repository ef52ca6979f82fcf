"""Tells systemd how the agent is: started, reading its configuration again, alive, ending.

This is sd_notify(3): words in a datagram to the socket that the unit's environment names. Without
one there is nobody to tell, and nothing happens.
"""

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

USUAL_PAUSE_S = 5.0
TRIES = 3  # before systemd takes the agent for hung and starts it again
MAX_STATUS = 300


class ServiceManager:
    """The manager of this service. `pending` says why the agent is not ready, in sentences."""

    def __init__(
        self, environment: Mapping[str, str], pending: Callable[[], Sequence[str]]
    ) -> None:
        self._address = environment.get("NOTIFY_SOCKET", "")
        self._pending = pending
        limit = environment.get("WATCHDOG_USEC", "")
        self._pause_s = int(limit) / 1e6 / TRIES if limit.isdigit() else USUAL_PAUSE_S

    async def run(self) -> None:
        """Say that the agent has started, and then, again and again, that it is alive, and how.

        The event loop itself says so: where it hangs, nobody does.
        """
        if not self._address:
            return
        self._tell("READY=1", self._status())
        while True:
            await asyncio.sleep(self._pause_s)
            self._tell("WATCHDOG=1", self._status())

    @contextlib.contextmanager
    def reloading(self) -> Iterator[None]:
        """Have `systemctl reload` wait until the block is left."""
        self._tell("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")
        try:
            yield
        finally:
            self._tell("READY=1")

    def ending(self) -> None:
        self._tell("STOPPING=1", "STATUS=ending; every capture stays in place")

    def _status(self) -> str:
        pending = "; ".join(self._pending())
        text = f"waiting for {pending}" if pending else "ready"
        return f"STATUS={' '.join(text.split())[:MAX_STATUS]}"

    def _tell(self, *words: str) -> None:
        if not self._address:
            return
        path = self._address
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.setblocking(False)
            with contextlib.suppress(OSError):  # it looks after us, and not we after it
                sock.sendto("\n".join(words).encode(), f"\0{path[1:]}" if path[0] == "@" else path)
