"""Says when the first listener comes to a port of a namespace; the kernel itself tells nobody."""

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
        return any(found.local[1] in self.ports for found in listeners)


class Arrivals:
    """All namespaces in which a listener is awaited, and one thread while there are any."""

    def __init__(self) -> None:
        self._expected: list[_Expected] = []
        self._lock = threading.Lock()

    def expect(self, netns: Netns, ports: Collection[int], pipe: int) -> None:
        """Close the pipe as soon as somebody listens on one of the TCP ports.

        `pipe` is duplicated; so the caller closes its own. The wait ends with its reading end.
        Raises: EnvironmentLacks if the kernel cannot be asked.
        """
        found = _Expected(netns.run(SocketTable), frozenset(ports), os.dup(pipe))
        with self._lock:
            self._expected.append(found)
            if len(self._expected) == 1:
                threading.Thread(target=self._run, name="arrivals", daemon=True).start()

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
