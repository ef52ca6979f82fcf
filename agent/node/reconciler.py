"""Keeps each pod's capture as it should be: one task a pod, driven by state and not by events.

Looking is cheap (two milliseconds), so a pod is looked at whenever the kernel tells of a change in
its namespace; it does not tell of every kind, so also soon after a write and ever more rarely
later. What is already so is never written again, which is also how a restarted agent adopts what it
finds. Every failure is tried again with growing pauses and a little randomness.
"""

import asyncio
import contextlib
import os
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Protocol

from agent.kernel import cgroups
from agent.model.errors import AgentError, ConnectionsAtRisk
from agent.node.events import Events
from agent.node.feed import Change
from agent.node.findings import Findings
from agent.node.gate import OPEN
from agent.node.pod import FIRST_PAUSE_S, SETTLE_S, Pod, Wish, gap, opened
from agent.node.worker_client import JobFailed
from agent.node.worker_process import WorkerGone

GROWTH = 3.0  # of the pause between two looks that found nothing
LONGEST_PAUSE_S = 120.0
# Where the kernel tells of every change, the sweep is there only for news that got lost.
TOLD = frozenset({"nftables", "iptables-nft"})
LONGEST_PAUSE_IF_TOLD_S = 600.0
LONGEST_RETRY_S = 60.0
JITTER = 0.2
LONGEST_SETTLE_S = 10.0
LATE = "it ran without its capture, which was added"
CALM_S = 16.0  # a capture that was found whole after such a pause has held


class Jobs(Protocol):
    """The one door to namespaces; `WorkerClient` is the real one."""

    async def job(
        self, job: str, netns_fd: int, *pipe: int, deadline_s: float = ..., **request: object
    ) -> Mapping[str, object]: ...


class Meter(Protocol):
    """Counts what happens; the daemon's metrics are the real one."""

    def enrolled(self, result: str, reason: str) -> None: ...
    def applied(self, seconds: float) -> None: ...
    def drifted(self, result: str) -> None: ...
    def phase(self, phase: str, seconds: float) -> None: ...
    def removed(self, result: str, reason: str) -> None: ...


Remedy = Callable[[Wish, str], str]
"""What is done about a pod that runs without its capture: nothing for programming it, or a sentence
that says what else. The text is why that would cut connections, where it would."""


class Reconciler:
    """All pods of the node and the tasks that keep them. For one event loop."""

    def __init__(
        self,
        jobs: Jobs,
        events: Events,
        meter: Meter,
        *,
        mode: str,
        backend: str,
        guard: str | None = None,
        gate: str = "closed",
        publish: Callable[[Change], None] = lambda _: None,
        spread: Callable[[float], float] = lambda s: s * random.uniform(1 - JITTER, 1 + JITTER),
    ) -> None:
        """`publish` is told of every pod that changes, and of every pod that is forgotten."""
        self.pods: dict[str, Pod] = {}
        self.remedy: Remedy | None = None  # None: every pod is programmed in place
        self._jobs = jobs
        self._events = events
        self._meter = meter
        self._mode = mode
        self._backend = backend
        self._guard = guard
        self._gate = gate
        self._publish = publish
        self._spread = spread

    def configure(
        self, *, mode: str, backend: str, guard: str | None, gate: str = "closed"
    ) -> None:
        """Go by these words from now on; if they are others, all pods are looked at again."""
        before = (self._mode, self._backend, self._guard, self._gate)
        now = (mode, backend, guard, gate)
        if now == before:
            return
        self._mode, self._backend, self._guard, self._gate = now
        # No guard is named in the other modes: the one that stands is left as it is.
        otherwise = (backend, guard or before[2], gate) != before[1:]
        for pod in self.pods.values():
            if otherwise and pod.state != "drifted":
                pod.enrolled = False  # what differs because of another backend or guard is no drift
            pod.wish = replace(pod.wish)  # so that a look under way counts for nothing
            pod.pause_s, pod.failures = FIRST_PAUSE_S, 0
            pod.wake.set()

    def want(self, wish: Wish) -> Pod:
        """Say what a pod should be; the same wish again changes nothing."""
        pod = self.pods.get(wish.key)
        if pod is None:
            pod = self.pods[wish.key] = Pod(wish)
            pod.task = asyncio.create_task(self._keep(pod), name=f"pod {wish.label}")
        elif pod.wish != wish:
            pod.turn_to(wish)
        self._tell(pod)
        return pod

    def rename(self, key: str, new: str) -> None:
        """Keep a pod under another key: it is the same one, of which more is known now."""
        pod = self.pods[new] = self.pods.pop(key)
        self._publish(Change("gone", pod.row()))

    def runs_uncaptured(self, key: str) -> bool:
        """Whether a pod is there that should be captured and was not found so, or made so, yet."""
        pod = self.pods.get(key)
        return pod is not None and pod.wish.settings is not None and not pod.enrolled

    async def forget(self, key: str) -> None:
        """Stop keeping a pod that is gone. Its namespace is left as it is."""
        pod = self.pods.get(key)
        if pod is not None:
            self._publish(Change("gone", pod.row()))
            if pod.enrolled:
                self._meter.removed("done", "pod-gone")
        await self._stop(key)

    def let_pass(self, sandbox: str, cgroups: tuple[str, ...]) -> None:
        """Let the processes of these cgroups pass in a pod whose gate is `listener`."""
        for pod in self.pods.values():
            if pod.wish.sandbox_id == sandbox and pod.wish.settings is not None:
                pod.gate.of(sandbox).let_pass(cgroups)

    def gate_of(self, wish: Wish) -> str:
        """Return which gate a pod is to have."""
        return str(self.with_defaults(wish.settings or {})["gate"])

    async def close(self) -> None:
        """Stop keeping all pods; every capture stays in place."""
        for key in list(self.pods):
            await self._stop(key)

    async def _stop(self, key: str) -> None:
        pod = self.pods.pop(key, None)
        if pod is not None and pod.task is not None:
            pod.task.cancel()
            await asyncio.wait([pod.task])  # which, unlike awaiting it, can be cancelled itself
            pod.deaf()

    async def enrol(self, pod: Pod) -> None:
        """Capture a pod now, as the CNI plugin needs it before the pod's first process runs.

        Raises: AgentError with the reason why it could not be done.
        """
        pod.announced = True
        async with pod.busy:
            try:
                await self._apply(pod)
            except AgentError as error:
                self._failed(pod, error)
                raise
            finally:
                self._tell(pod)

    def look_again(self, backend: str) -> None:
        """Look soon at all pods that are captured by a backend: something is wrong about it."""
        for pod in self.pods.values():
            if pod.backend == backend:
                pod.wake.set()

    async def check(self, wish: Wish) -> Findings:
        """Compare a namespace with a wish, whether or not a pod is kept by that wish.

        Raises: AgentError with the reason why it could not be looked at.
        """
        return Findings.of(await self._job(Pod(wish, enrolled=True), wish, "check"))

    def _tell(self, pod: Pod) -> None:
        row = pod.row()
        if row != pod.published and self.pods.get(pod.wish.key) is pod:
            pod.published = row
            self._publish(Change("pod", row))

    async def _keep(self, pod: Pod) -> None:
        while True:
            pod.wake.clear()
            async with pod.busy:
                pause_s = await self._once(pod)
            self._tell(pod)
            with contextlib.suppress(TimeoutError):
                # Not wait_for: Python 3.11's takes no notice of a cancel that comes as it ends.
                async with asyncio.timeout(self._spread(pause_s)):
                    await pod.wake.wait()
                if pod.enrolled and not pod.gate.due(self.gate_of(pod.wish)):
                    await asyncio.sleep(pod.settle_s)

    async def _once(self, pod: Pod) -> float:
        """Look at a pod, mend it if the mode says so, and return how long to wait."""
        if pod.wish.settings is None:
            pod.state, pod.detail = "ignored", ""
            pod.deaf()
            return LONGEST_PAUSE_S
        try:
            await self._look(pod)
        except AgentError as error:
            self._failed(pod, error)
            return min(FIRST_PAUSE_S * float(2 ** min(pod.failures, 10)), LONGEST_RETRY_S)
        pod.failures = 0
        if pod.pause_s >= CALM_S:
            pod.settle_s = SETTLE_S
        longest = LONGEST_PAUSE_IF_TOLD_S if pod.backend in TOLD else LONGEST_PAUSE_S
        pod.pause_s = min(pod.pause_s * GROWTH, longest)
        return pod.pause_s

    async def _look(self, pod: Pod) -> None:
        wish = pod.wish
        if not pod.changes.are_about(wish.sandbox_id):
            await pod.changes.follow(partial(self._job, pod, wish, "watch"), wish.sandbox_id)
        gate, wished = pod.gate.of(wish.sandbox_id), self.gate_of(wish)
        if gate.due(wished):
            await self._apply(pod)
        asked_s = time.monotonic()
        found = Findings.of(await self._job(pod, wish, "check"))
        if wish is not pod.wish:
            return  # what was found is about a wish that is none any more; the next look is due
        pod.backend = found.backend
        if found.in_sync:
            pod.state, pod.enrolled = "in-sync", True
            pod.whole_s, pod.told_s = asked_s, None
            if (gate.matters(wished) or found.passing) and not gate.is_followed:
                await gate.follow(partial(self._job, pod, wish, "gate"))
            if gate.due(wished):
                await self._apply(pod)
            self._say(pod, gate.text(wished))
            return
        drifted = pod.enrolled
        if self._mode != "repair" and gate.is_open:
            return  # nothing is there yet, and nothing should be
        if self._mode != "repair":
            self._drifted(pod, found.text, "found")
            return
        pod.state = "repairing"
        self._tell(pod)
        told, since_s = pod.told_s is not None, pod.told_s or pod.whole_s
        if self.remedy is not None and found.bare and not (drifted or pod.announced):
            await self._come_late(pod, self.remedy)
            return
        await self._apply(pod)
        if drifted:
            pod.settle_s = min(pod.settle_s * 2, LONGEST_SETTLE_S)
            left = "the guard kept the pod closed" if found.guarded else gap(since_s, told)
            self._drifted(pod, f"{found.text} ({left})", "repaired")

    async def _come_late(self, pod: Pod, remedy: Remedy) -> None:
        """Do what the policy says about a pod that has run without its capture so far."""
        wish = pod.wish
        said = remedy(wish, "")
        if not said:
            try:
                done = await self._apply(pod, careful=True)
            except JobFailed as error:
                if error.kind != ConnectionsAtRisk.__name__:
                    raise
                said = remedy(wish, str(error))
                done = None if said else await self._apply(pod)
            if done is not None and wish is pod.wish:
                self._events.add("captured-late", wish.label, LATE + _besides(done))
        if said:
            pod.state, pod.detail = "drifted", said

    def _drifted(self, pod: Pod, shown: str, result: str) -> None:
        repaired = result == "repaired"
        if not repaired and pod.state == "drifted" and pod.detail == shown:
            return
        self._meter.drifted(result)
        pod.state = "in-sync" if repaired else "drifted"
        pod.detail = "" if repaired else shown
        if repaired or self._mode != "observe":
            self._events.add(f"drift-{result}", pod.wish.label, shown)

    async def _apply(self, pod: Pod, *, careful: bool = False) -> Mapping[str, object] | None:
        """Return what was done, or nothing where nothing is to be done yet, or any more."""
        wish = pod.wish
        if wish.settings is None:
            return None  # said meanwhile: what is there stays
        if await self._may_pass(pod, wish):
            return None
        done = await self._applied(pod, wish, careful=careful)
        pod.backend = str(done["backend"])
        pod.state, pod.failures = "in-sync", 0
        self._say(pod, pod.gate.text(self.gate_of(wish)))
        pod.pause_s, pod.whole_s, pod.told_s = FIRST_PAUSE_S, time.monotonic(), None
        if done["changed"]:
            self._meter.applied(float(str(done["duration_ms"])) / 1000)
        if not pod.enrolled and pod.asks_for(wish):
            pod.enrolled = True
            self._meter.enrolled("done", wish.reason)
            how = f"captured by {pod.backend}: {wish.text}{_besides(done)}"
            self._events.add("captured", wish.label, how)
        return done

    async def _may_pass(self, pod: Pod, wish: Wish) -> bool:
        """Whether the gate is open, so that there is nothing to do until the proxy listens."""
        gate, wished = pod.gate.of(wish.sandbox_id), self.gate_of(wish)
        if wished != OPEN or not gate.matters(wished) or (pod.enrolled and gate.is_followed):
            return False
        await gate.follow(partial(self._job, pod, wish, "gate"))
        if gate.is_open:
            pod.state = "repairing"
        self._say(pod, gate.text(wished))
        return gate.is_open

    def _say(self, pod: Pod, gate: str) -> None:
        """Show who passes the gate, and tell of it when that begins."""
        if gate and pod.detail != gate:
            self._events.add("gate-open", pod.wish.label, gate)
        pod.detail = gate

    async def _applied(self, pod: Pod, wish: Wish, *, careful: bool) -> Mapping[str, object]:
        """Write; where it is for those who may pass that it cannot be done, without them."""
        try:
            done = await self._job(pod, wish, "apply", careful=careful)
        except AgentError as error:
            if isinstance(error, WorkerGone) or not (asked := pod.gate.refuse()):
                raise
            if any(cgroups.identity(one) is not None for one in asked):  # else they ended meanwhile
                waits = f"its init containers wait for the proxy (gate: listener): {error}"
                self._events.add("gate-refused", wish.label, waits)
            done = await self._job(pod, wish, "apply", careful=careful)
        pod.gate.loaded()
        return done

    async def _job(
        self, pod: Pod, wish: Wish, job: str, *pipe: int, **more: bool
    ) -> Mapping[str, object]:
        """Have a job done by a wish, which the pod may have had before it got another."""
        path, started = wish.netns, time.monotonic()
        if path is None:
            raise AgentError("its network namespace is not known yet")
        try:
            fd = await asyncio.to_thread(opened, path)
        except AgentError:
            pod.deaf()
            raise
        try:
            pod.recognise(fd, wish)
            try:
                return await self._ask(pod, wish, job, fd, *pipe, **more)
            except WorkerGone:  # once more: it is started again, and jobs may be repeated
                return await self._ask(pod, wish, job, fd, *pipe, **more)
        finally:
            os.close(fd)
            if not pod.enrolled:
                self._meter.phase(job, time.monotonic() - started)

    async def _ask(
        self, pod: Pod, wish: Wish, job: str, *fds: int, **more: bool
    ) -> Mapping[str, object]:
        gate = pod.gate.of(wish.sandbox_id).settings(self.gate_of(wish))
        settings = {**self.with_defaults(wish.settings or {}), **gate}
        return await self._jobs.job(
            job, *fds, settings=settings, backend=self._backend, name=wish.netns, **more
        )

    def with_defaults(self, settings: Mapping[str, object]) -> Mapping[str, object]:
        """Return the settings with the node's gate and guard where they say none."""
        guard = {} if self._guard is None else {"guard": self._guard}
        return {"gate": self._gate, **guard, **settings}

    def _failed(self, pod: Pod, error: AgentError) -> None:
        pod.failures += 1
        said = str(error)
        if pod.state != "failed" or pod.detail != said:
            self._events.add("failed", pod.wish.label, said)
            self._meter.enrolled("failed", pod.wish.reason)
        pod.state, pod.detail = "failed", said


def _besides(done: Mapping[str, object]) -> str:
    """Say which backend gave way, and what goes on past the proxy: what was open before."""
    passed_over, number = done.get("passed_over"), int(str(done.get("spared", 0)))
    said = [str(why) for why in passed_over] if isinstance(passed_over, list) else []
    if number:
        said.append(f"{number} connections that were open go on past the proxy")
    return "".join(f"; {one}" for one in said)
