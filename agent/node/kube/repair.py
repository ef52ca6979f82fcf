"""What is done about pods that started before the agent, or while it was away, and run uncaptured.

By policy they are programmed in place, marked by a label, or deleted, so that whoever made them
makes others, which are captured from their first packet. An Event tells of each. Nothing is deleted
that nobody would make again, that is protected, or that the agent has no word about from the API
server; and never many at a time.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from agent.node.config import Kubernetes
from agent.node.events import Events
from agent.node.kube.cache import Cache, KnownPod
from agent.node.kube.client import MERGE_PATCH, ApiClient
from agent.node.kube.errors import CONFLICT, INVALID, NOT_FOUND, ApiError, ApiRefused
from agent.node.pod import Wish
from agent.node.source import STATIC

log = logging.getLogger(__name__)

LABEL = "intercept-agent/uncaptured"
PROGRAM, EVENT, MARK, DELETE = "program", "event", "label", "delete"
SAID = {EVENT: "it is left so", MARK: "it is labelled", DELETE: "it is deleted"}
PROTECTED = frozenset({"kube-system"})
DELETE_EVERY_S = 5.0
RETRY_S = 2.0
MOST_TOLD = 1000
# The API server's clock need not be this node's, and tells whole seconds.
SLACK_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One pod about which the API server is to be asked for something; without an action, to take
    the mark away. `key` is the reconciler's."""

    key: str
    known: KnownPod
    action: str = ""
    why: str = ""


class Repair:
    """Run it once. `late` is the reconciler's remedy (see `agent.node.reconciler.Remedy`)."""

    def __init__(
        self,
        client: ApiClient,
        config: Kubernetes,
        cache: Cache,
        events: Events,
        still: Callable[[str], bool],
        *,
        started: float,
        own_namespace: str = "",
        delete_every_s: float = DELETE_EVERY_S,
    ) -> None:
        """`still` tells whether the pod of a key is uncaptured yet; `started` is when the agent
        was, in seconds since the epoch."""
        self._client = client
        self._config = config
        self._cache = cache
        self._events = events
        self._still = still
        self._protected = PROTECTED | {own_namespace}
        self._started = started
        self._delete_every_s = delete_every_s
        self._cases: dict[str, Case] = {}
        self._told: dict[str, str] = {}
        self._marked: set[str] = set()  # of which the watch may not have told yet
        self._news = asyncio.Event()
        self._refused: dict[str, str] = {}  # what the server said to an action the last time

    @property
    def problem(self) -> str:
        """Why pods are not repaired as they should be, or nothing."""
        return "; ".join(f"a pod is not repaired: {said}" for said in self._refused.values())

    def late(self, wish: Wish, danger: str) -> str:
        """Return what becomes of a pod that runs uncaptured; nothing: it is to be programmed."""
        asked = self._config.unsafe if danger else self._config.repair
        if asked == PROGRAM or wish.source == STATIC:
            return ""
        known = self._cache.known(wish.namespace, wish.name, wish.uid)
        why = f"it runs without its capture{f', and {danger}' if danger else ''}"
        if known is not None and known.ending:
            return f"{why}; it ends already"
        action, but = self._allowed(wish, known, asked)
        said = f"{why}; {SAID[action]}{f', not {SAID[asked]}: {but}' if but else ''}"
        if self._told.get(wish.key) != said:
            if len(self._told) >= MOST_TOLD:
                self._told.clear()
            self._told[wish.key] = said
            self._events.add("uncaptured", wish.label, said)
            if action != EVENT and known is not None:
                self._open(Case(key=wish.key, known=known, action=action, why=said))
        return said

    def captured(self, label: str) -> None:
        """Take the mark from a pod that is captured now."""
        namespace, _, name = label.partition("/")
        known = self._cache.known_pods.get((namespace, name))
        marked = known is not None and LABEL in (known.pod.labels or {})
        if known is not None and (marked or label in self._marked):
            self._open(Case(key=label, known=known))

    def _open(self, case: Case) -> None:
        self._cases[case.key] = case
        self._news.set()

    def _allowed(self, wish: Wish, known: KnownPod | None, asked: str) -> tuple[str, str]:
        """Return what may be done of what is asked for, and why it is not all."""
        if asked == EVENT:
            return EVENT, ""
        if wish.namespace in self._protected:
            return EVENT, f"namespace {wish.namespace} is left alone"
        if known is None:
            return EVENT, "the API server has told nothing of it"
        if asked == DELETE and not known.replaced:
            return EVENT, "nobody would make another one"
        if asked == DELETE and known.created > self._started + SLACK_S:
            return EVENT, "it started after the agent; is the CNI plugin in the chain?"
        return asked, ""

    async def run(self) -> None:
        """Do what is to be done until cancelled. Errors are waited out, not raised."""
        while True:
            await self._news.wait()
            self._news.clear()
            while self._cases:
                key, case = next(iter(self._cases.items()))
                try:
                    done = await self._do(case)
                    self._refused.pop(case.action, None)
                except ApiRefused as error:
                    done = False
                    self._refused[case.action] = str(error)
                    self._told.pop(case.key, None)  # and tried again with the next look
                    log.warning("a pod is not repaired", extra={"cause": str(error)})
                except ApiError as error:
                    log.warning("a pod is not repaired yet", extra={"cause": str(error)})
                    await asyncio.sleep(RETRY_S)
                    continue
                if self._cases.get(key) is case:
                    del self._cases[key]
                if done and case.action == DELETE:
                    await asyncio.sleep(self._delete_every_s)

    def _tell_once(self, case: Case) -> None:
        """Tell that a pod is deleted: before it is gone, and not again with each attempt."""
        if self._told.get(case.known.pod.uid) != case.why:
            self._told[case.known.pod.uid] = case.why
            self._events.add("deleted", case.known.pod.title, case.why)

    async def _do(self, case: Case) -> bool:
        """Do it, unless it is not needed any more; tell whether it was done. Raises: ApiError."""
        pod = case.known.pod
        if case.action and not self._still(case.key):
            return False
        path = f"/api/v1/namespaces/{pod.namespace}/pods/{pod.name}"
        try:
            if case.action == DELETE:
                self._tell_once(case)
                options = {"kind": "DeleteOptions", "apiVersion": "v1"}
                wanted = {**options, "preconditions": {"uid": pod.uid}}
                await self._client.send("DELETE", path, wanted)
            else:
                value = "true" if case.action == MARK else None
                (self._marked.add if case.action else self._marked.discard)(pod.title)
                patch = {"metadata": {"uid": pod.uid, "labels": {LABEL: value}}}
                await self._client.send("PATCH", path, patch, MERGE_PATCH)
        except ApiRefused as error:
            # It is gone, or another one by now; of a patch the server says that no uid may change.
            if error.status in (NOT_FOUND, CONFLICT, INVALID):
                return False
            raise
        return True
