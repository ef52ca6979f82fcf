"""Says when the first listener comes to a port of a namespace; the kernel itself tells nobody."""

import contextlib
import os
import select
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass

from agent.kernel.netns import Netns
from agent.kernel.sockets import SocketTable
from agent.model.errors import StateUnreadable

PAUSE_S = 0.02  # asking costs some 50 microseconds, and only pods that are starting are asked


@dataclass(frozen=True, slots=True)
class _Expected:
    sockets: SocketTable
    ports: frozenset[int]
    pipe: int

    def over(self) -> bool:
        """Whether somebody listens, or nobody waits for that any more."""
        waiting = select.poll()
        waiting.register(self.pipe, 0)
        if waiting.poll(0):  # only an error is told: the reading end is closed
            return True
        try:
            listeners = self.sockets.listeners("tcp")
        except StateUnreadable:
            return True  # whoever waits looks for himself, and comes back
        came = any(found.local[1] in self.ports for found in listeners)
        if came:
            with contextlib.suppress(OSError):
                os.write(self.pipe, b"!")
        return came


class Arrivals:
    """All namespaces in which a listener is awaited, and one thread while there are any."""

    def __init__(self) -> None:
        self._expected: list[_Expected] = []
        self._lock = threading.Lock()

    def expect(self, netns: Netns, ports: Collection[int], pipe: int) -> None:
        """Write to the pipe and close it as soon as somebody listens on one of the TCP ports.

        Closed without a word, it says that whoever waits has to ask again. `pipe` is duplicated;
        so the caller closes its own. The wait ends with its reading end.
        Raises: EnvironmentLacks if the kernel cannot be asked.
        """
        found = _Expected(netns.run(SocketTable), frozenset(ports), os.dup(pipe))
        with self._lock:
            if not self._expected:  # the thread goes on when this lock is free
                threading.Thread(target=self._run, name="arrivals", daemon=True).start()
            self._expected.append(found)

    def _run(self) -> None:
        while True:
            over = [each for each in self._expected if each.over()]
            for each in over:
                each.sockets.close()
                os.close(each.pipe)
            with self._lock:
                self._expected = [each for each in self._expected if each not in over]
                if not self._expected:
                    return
            time.sleep(PAUSE_S)
