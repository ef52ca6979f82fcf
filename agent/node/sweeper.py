"""Has what namespaces left on the node taken out when they are gone, though nothing else happens.

The eBPF programs have no way to learn that a namespace ended, and neither has the agent of one
that the runtime does not tell of: so it is looked for on a timer. Whoever detaches a program of one
that lives is noticed in passing. So is a pod that only the plugin told of, should it not be called
when the namespace ends.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from agent.kernel import netns
from agent.model.errors import AgentError
from agent.node.reconciler import Jobs

log = logging.getLogger(__name__)

PAUSE_S = 10.0


class Sweeper:
    """The loop that sweeps. For one event loop."""

    def __init__(
        self,
        jobs: Jobs,
        alarm: Callable[[], None],
        let_go: Callable[[], Awaitable[None]],
        *,
        pause_s: float = PAUSE_S,
    ) -> None:
        """`alarm` is called when something is newly wrong about those that are not gone, `let_go`
        to forget pods that are."""
        self._jobs = jobs
        self._alarm = alarm
        self._let_go = let_go
        self._pause_s = pause_s
        self._faults: object = []

    async def run(self) -> None:
        """Sweep until cancelled; what fails is tried again after the pause."""
        while True:
            await asyncio.sleep(self._pause_s)
            await self._let_go()
            try:
                with netns.open_target("host")[0] as host:
                    found = await self._jobs.job("sweep", host.fd)
            except AgentError as error:
                log.warning("what is left of namespaces cannot be swept: %s", error)
                continue
            if found["gone"]:
                log.info("swept what namespaces that are gone left", extra={"gone": found["gone"]})
            if found["faults"] and found["faults"] != self._faults:
                self._alarm()
            self._faults = found["faults"]
