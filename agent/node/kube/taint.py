"""Keeps pods off a node whose agent is not ready, by a taint.

Whoever makes nodes gives them the taint at birth, so that no pod is there before the agent (field
report 16). The agent takes it away once it is ready, and puts it back when it has not been for
a while. When the agent ends, the taint is left as it is: an upgrade is no reason to keep pods away.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from agent.node.kube.client import MERGE_PATCH, ApiClient
from agent.node.kube.errors import CONFLICT, ApiError, ApiRefused

log = logging.getLogger(__name__)

EFFECT = "NoSchedule"
LOOK_S = 0.5  # at the agent's own state
CHECK_S = 60.0  # at the node, for somebody may have changed it
PATIENCE_S = 10.0  # with an agent that is not ready any more
FIRST_RETRY_S, SLOWEST_RETRY_S = 0.5, 30.0
ATTEMPTS = 5  # of one write, when others write to the node at the same time


class TaintKeeper:
    """Run it once. `ready` is what the taint goes by."""

    def __init__(
        self,
        client: ApiClient,
        node: str,
        key: str,
        ready: Callable[[], bool],
        *,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._client = client
        self._path = f"/api/v1/nodes/{node}"
        self._key = key
        self._ready = ready
        self._patience_s = patience_s
        self.problem = ""  # why the node's taint is not as it should be

    async def run(self) -> None:
        """Keep the taint as it should be until cancelled. Errors are waited out, not raised."""
        clock = asyncio.get_running_loop().time
        unready_s = clock() - self._patience_s  # at the start there is nothing to be patient with
        settled: bool | None = None
        look_again_s, retry_s = 0.0, FIRST_RETRY_S
        while True:
            ready = self._ready()
            if ready:
                unready_s = clock()
            wanted = not ready and clock() - unready_s >= self._patience_s
            due = wanted != settled or clock() >= look_again_s
            if due and (ready or wanted):
                try:
                    await self._settle(tainted=wanted)
                    settled, look_again_s, retry_s = wanted, clock() + CHECK_S, FIRST_RETRY_S
                    self.problem = ""
                except ApiError as error:
                    if isinstance(error, ApiRefused):
                        self.problem = f"the node's taint cannot be set: {error}"
                    log.warning("the node's taint cannot be set", extra={"cause": str(error)})
                    await asyncio.sleep(retry_s)
                    retry_s = min(retry_s * 2, SLOWEST_RETRY_S)
            await asyncio.sleep(LOOK_S)

    async def _settle(self, *, tainted: bool) -> None:
        """Make the node so, whatever else is written to it meanwhile. Raises: ApiError."""
        for attempt in range(ATTEMPTS):
            node = await self._client.get(self._path)
            taints = _taints(node)
            others = [taint for taint in taints if taint.get("key") != self._key]
            if tainted == (len(others) < len(taints)):
                return
            wanted = [*others, {"key": self._key, "effect": EFFECT}] if tainted else others
            version = _mapping(node, "metadata").get("resourceVersion")
            patch = {"metadata": {"resourceVersion": version}, "spec": {"taints": wanted or None}}
            try:
                await self._client.send("PATCH", self._path, patch, MERGE_PATCH)
            except ApiRefused as error:
                if error.status != CONFLICT or attempt == ATTEMPTS - 1:
                    raise
            else:
                log.info("taint set" if tainted else "taint removed", extra={"key": self._key})
                return


def _taints(node: Any) -> list[dict[str, Any]]:
    taints = _mapping(node, "spec").get("taints")
    return [one for one in taints if isinstance(one, dict)] if isinstance(taints, list) else []


def _mapping(thing: Any, key: str) -> dict[str, Any]:
    found = thing.get(key)
    return found if isinstance(found, dict) else {}
