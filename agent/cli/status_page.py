"""The pages for people: gathers what they show, and keeps them from costing much.

However many ask, one page is made at a time, and the same one once a second at most. Only the page
of one pod has work done in a namespace: for few pods at a time, and never twice for the same.
What draws them is imported with the first page, so an agent whose pages nobody opens stays small.
"""

import asyncio
import os
import socket
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from agent.api.known import Known
from agent.kernel import package
from agent.model.errors import AgentError
from agent.node.proxies import opened
from agent.node.reconciler import Jobs
from agent.observe.http import Answer, Page, Request

if TYPE_CHECKING:
    from agent.observe.page.frame import Frame
    from agent.observe.page.given import Given
    from agent.observe.page.pod import Drawn, Shown
    from agent.observe.page.view import View

FRESH_S = 1.0
KEPT = 64  # pages, and pods that were looked at
AT_WORKER = 2
LOOK_S = 8.0
NAME_OF_NODE = "NODE_NAME"  # as the DaemonSet gives it

Row = Mapping[str, Any]
Ask = Callable[[Row], Awaitable[Any]]


class StatusPage:
    """Answers the pages for people. For one event loop."""

    def __init__(self, known: Known, status: Ask, described: Ask, jobs: Jobs) -> None:
        """`status` and `described` (one pod, with its settings) are as the socket answers them."""
        self._known = known
        self._status = status
        self._described = described
        self._lookout = Lookout(known, jobs)
        self._making = asyncio.Lock()
        self._made: OrderedDict[tuple[View, bool], tuple[float, Answer]] = OrderedDict()

    def pages(self) -> Mapping[str, Page]:
        """Return the pages by path; that of a pod says itself that it is for this host only."""
        lists = {path: self._list for path in ("/", "/findings", "/events")}
        return {**lists, "/pod": self._pod}

    async def _list(self, request: Request) -> Answer:
        from agent.observe.page import lists
        from agent.observe.page.view import View

        view = View.of(request.path, request.query)
        if not request.own_name:
            return _led_astray(view)
        async with self._making:
            await asyncio.sleep(0)  # whatever else is to be done has its turn between two pages
            key = (view, request.local)
            known = self._made.get(key)
            if known is not None and time.monotonic() - known[0] < FRESH_S:
                return known[1]
            given = await self._given()
            pages = {"/": lists.pods_page, "/findings": lists.findings_page}
            page = pages.get(request.path, lists.events_page)
            made = page(_frame(), view, given if request.local else given.for_strangers())
            self._made[key] = time.monotonic(), made
            while len(self._made) > KEPT:
                self._made.popitem(last=False)
            return made

    async def _given(self) -> "Given":
        from agent.observe.page.given import Given

        scan = self._known.scan()
        return Given(
            status=await self._status({}),
            pods=self._known.pods(),
            findings=scan["findings"],
            scanned=scan["scanned"],
            events=self._known.events(0),
        )

    async def _pod(self, request: Request) -> Answer:
        from agent.observe.page.pod import missing_page, pod_page
        from agent.observe.page.view import View

        view = View.of(request.path, request.query)
        if not request.own_name:
            return _led_astray(view)
        if not request.local:
            why = "What a pod holds is shown to this host only"
            return missing_page(_frame(), view, why, 403)
        asked = {"namespace": view.namespace, "name": view.name, "uid": view.uid}
        try:
            pod = await self._described(asked)
        except AgentError as error:
            return missing_page(_frame(), view, str(error), 404)
        try:
            shown = await self._lookout.look(pod)
        except AgentError as error:
            return missing_page(_frame(), view, str(error), 503)
        return pod_page(_frame(), view, shown)


@dataclass(slots=True)
class _Look:
    """A look at one pod, and when it began."""

    task: "asyncio.Task[Shown]"
    since: float


class Lookout:
    """Looks at pods for who wants to see one; who asks meanwhile gets the same look."""

    def __init__(self, known: Known, jobs: Jobs) -> None:
        self._known = known
        self._jobs = jobs
        self._looks: OrderedDict[str, _Look] = OrderedDict()
        self._turns = asyncio.Semaphore(AT_WORKER)

    async def look(self, pod: Row) -> "Shown":
        """Return what is shown of a pod.

        Raises: AgentError if it takes too long, or too many others are being looked at.
        """
        key = f"{pod['namespace']}/{pod['name']}/{pod['uid']}"
        look = self._looks.get(key)
        if look is None or (look.task.done() and time.monotonic() - look.since > FRESH_S):
            self._forget_old()
            if len(self._looks) >= KEPT:
                raise AgentError("too many pods are being looked at; ask again in a moment")
            look = _Look(asyncio.create_task(self._look(pod)), time.monotonic())
            look.task.add_done_callback(_seen)
            self._looks[key] = look
        # The work goes on when this one waits no longer: it cannot be taken from the worker.
        await asyncio.wait([look.task], timeout=LOOK_S)
        if not look.task.done():
            raise AgentError(f"it could not be looked at within {LOOK_S:.0f} seconds; ask again")
        return look.task.result()

    def _forget_old(self) -> None:
        now = time.monotonic()
        for key, look in list(self._looks.items()):
            if look.task.done() and now - look.since > FRESH_S:
                del self._looks[key]

    async def _look(self, pod: Row) -> "Shown":
        from agent.observe.page.pod import Shown

        label = f"{pod['namespace']}/{pod['name']}" if pod["namespace"] else pod["name"]
        async with self._turns:
            explained = await self._known.explain(pod)
            drawn = await self._drawn(pod)
        findings = self._known.scan()["findings"]
        return Shown(
            explained=explained,
            drawn=drawn,
            findings=[found for found in findings if found["where"]["pod"] == label],
            events=[event for event in self._known.events(0) if event["pod"] == label],
        )

    async def _drawn(self, pod: Row) -> "Drawn":
        import msgspec

        from agent.observe.page.pod import Drawn

        path = pod["netns"]
        if path is None:
            return Drawn(why_none="The agent knows of no network namespace of its own.")
        try:
            async with opened(path) as fd:
                found = await self._jobs.job("ways", fd, name=path, settings=pod["settings"])
        except AgentError as error:
            return Drawn(why_none=f"Its network namespace could not be looked at: {error}")
        return msgspec.convert(found, Drawn)


def _seen(task: "asyncio.Task[Shown]") -> None:
    """Take a failure as known: who asked may be gone by now."""
    if not task.cancelled():
        task.exception()


def _frame() -> "Frame":
    from agent.observe.page.frame import Frame

    now = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    node = os.environ.get(NAME_OF_NODE) or socket.gethostname()
    return Frame(node=node, version=_version(), now=now)


@cache
def _version() -> str:
    return package.version()


def _led_astray(view: "View") -> Answer:
    """Answer a browser that a strange name led here, perhaps to read what is for this host only."""
    from agent.observe.page.pod import missing_page

    why = "Open this page by an address, as localhost or by the node's own name: "
    return missing_page(_frame(), view, f"{why}others' names are not answered", 421)
