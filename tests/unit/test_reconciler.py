"""The reconciler, against a worker that does as it is told: what it writes, says, tries again."""

import asyncio
import logging
import os
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from agent.node.events import Events
from agent.node.pod import SETTLE_S, Wish
from agent.node.reconciler import Reconciler
from agent.node.worker_client import JobFailed
from agent.node.worker_process import WorkerGone

WISH = Wish(
    key="pod/shop/web/u1",
    namespace="shop",
    name="web",
    uid="u1",
    sandbox_id="s1",
    netns="/proc/self/ns/net",
    settings={"inbound_ports_include": "*"},
    reason="injected",
    text="a sidecar was injected",
    source="cri",
)


class FakeJobs:
    """A namespace that is captured or not, and faults to come."""

    def __init__(self, *, captured: bool = False) -> None:
        self.captured, self.guarded = captured, False
        self.bare = False  # whether there never was a capture
        self.at_risk = False  # whether only a write without care can be made
        self.done: list[str] = []
        self.pipe, self.watches = -1, 0
        self.gates: list[int] = []  # the ends by which to tell that the proxy listens
        self.faults: list[JobFailed | WorkerGone] = []
        self.backends: list[object] = []
        self.only: str | None = None  # the backend by which it is captured; None: by any
        # What happens while a namespace is written in which somebody passes; that fails then.
        self.meanwhile: Callable[[], None] | None = None
        self.go_on = asyncio.Event()
        self.go_on.set()

    def has_done(self, job: str, times: int) -> bool:
        return self.done.count(job) >= times

    async def job(
        self, job: str, netns_fd: int, *pipe: int, deadline_s: float = 1.0, **request: object
    ) -> Mapping[str, object]:
        await asyncio.sleep(0)
        if job == "watch":
            self.pipe = os.dup(pipe[0])
            self.watches += 1
            return {}
        if job == "gate":
            self.gates.append(os.dup(pipe[0]))
            return {"gate": "open"}
        await self.go_on.wait()
        self.done.append(job)
        self.backends.append(request["backend"])
        if self.faults:
            raise self.faults.pop(0)
        if job == "apply" and self.meanwhile and request["settings"]["init_cgroups"]:  # type: ignore[index]
            self.meanwhile()
            raise JobFailed("KernelRejected", "it reads back differently", 4)
        if job == "check":
            in_sync = self.captured and self.only in (None, request["backend"])
            lines = [] if in_sync else ["+ nat: -A OUTPUT -j ISTIO_OUTPUT"]
            found = {"backend": "nftables", "in_sync": in_sync}
            found["guarded"], found["bare"] = self.guarded, self.bare
            return {**found, "differences": lines, "foreign": [], "warnings": []}
        if self.at_risk and request.get("careful"):
            raise JobFailed("ConnectionsAtRisk", "connections would be cut", 3)
        changed, self.captured = not self.captured, True
        return {"backend": "nftables", "changed": changed, "duration_ms": 1.0}


class FakeMeter:
    def __init__(self) -> None:
        self.counted: list[tuple[str, ...]] = []
        self.phases: list[str] = []

    def enrolled(self, result: str, reason: str) -> None:
        self.counted.append(("enrolled", result, reason))

    def applied(self, seconds: float) -> None:
        self.counted.append(("applied",))

    def drifted(self, result: str) -> None:
        self.counted.append(("drifted", result))

    def phase(self, phase: str, seconds: float) -> None:
        self.phases.append(phase)

    def removed(self, result: str, reason: str) -> None:
        self.counted.append(("removed", result, reason))


class Scene:
    """A reconciler without pauses, its worker, and what was said."""

    pause_s = 0.001

    def __init__(self, jobs: FakeJobs, mode: str) -> None:
        self.jobs, self.meter = jobs, FakeMeter()
        self.events = Events(lambda: 0.0)
        self.told: list[tuple[str, object]] = []
        self.reconciler = Reconciler(
            jobs,
            self.events,
            self.meter,
            mode=mode,
            backend="auto",
            publish=lambda change: self.told.append((change.kind, change.what["state"])),
            spread=lambda _: self.pause_s,
        )

    def kinds(self) -> list[str]:
        return [str(event["kind"]) for event in self.events.since(0)]

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(5):
            while not condition():  # noqa: ASYNC110 - the state has no event of its own
                await asyncio.sleep(0.001)


def play(
    part: Callable[[Scene], Awaitable[Any]], *, captured: bool = False, mode: str = "repair"
) -> Scene:
    async def run() -> Scene:
        scene = Scene(FakeJobs(captured=captured), mode)
        try:
            await part(scene)
        finally:
            await scene.reconciler.close()
        return scene

    return asyncio.run(run())


def test_pod_is_captured_once_and_then_only_looked_at() -> None:
    async def part(scene: Scene) -> None:
        pod = scene.reconciler.want(WISH)
        await scene.until(lambda: scene.jobs.done.count("check") > 3)
        assert (pod.state, pod.backend) == ("in-sync", "nftables")

    scene = play(part)
    assert scene.jobs.done.count("apply") == 1
    assert scene.kinds() == ["captured"]


def test_what_is_captured_already_is_adopted_without_a_write() -> None:
    async def part(scene: Scene) -> None:
        pod = scene.reconciler.want(WISH)
        await scene.until(lambda: pod.state == "in-sync")

    scene = play(part, captured=True)
    assert "apply" not in scene.jobs.done
    assert scene.kinds() == []


@pytest.mark.parametrize(
    ("mode", "kinds", "state"),
    [
        ("repair", ["drift-repaired"], "in-sync"),
        ("alert", ["drift-found"], "drifted"),
        ("observe", [], "drifted"),
    ],
)
def test_drift_is_treated_as_the_mode_says(mode: str, kinds: list[str], state: str) -> None:
    async def part(scene: Scene) -> None:
        pod = scene.reconciler.want(WISH)
        await scene.until(lambda: pod.state == "in-sync")
        scene.jobs.captured = False
        await scene.until(lambda: bool(scene.meter.counted))
        await scene.until(lambda: pod.state == state)
        looks = len(scene.jobs.done)
        await scene.until(lambda: len(scene.jobs.done) > looks + 3)
        assert pod.state == state

    scene = play(part, captured=True, mode=mode)
    assert scene.kinds() == kinds
    assert [c for c in scene.meter.counted if c[0] == "drifted"] == [
        ("drifted", "repaired" if mode == "repair" else "found")
    ]


def test_pod_that_is_not_of_the_mesh_is_left_alone() -> None:
    async def part(scene: Scene) -> None:
        pod = scene.reconciler.want(replace(WISH, settings=None, reason="not-injected"))
        await scene.until(lambda: pod.state == "ignored")
        assert pod.row()["captured"] is False

    assert play(part).jobs.done == []


def test_failure_is_told_once_and_tried_again_until_it_works() -> None:
    async def part(scene: Scene) -> None:
        scene.jobs.faults = [JobFailed("KernelRejected", "no luck", 4) for _ in range(3)]
        pod = scene.reconciler.want(WISH)
        await scene.until(lambda: pod.state == "failed")
        await scene.until(lambda: pod.state == "in-sync")

    assert play(part).kinds() == ["failed", "captured"]


def test_events_stand_in_the_log_too(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def part(scene: Scene) -> None:
        pod = scene.reconciler.want(WISH)
        await scene.until(lambda: pod.state == "in-sync")

    play(part)
    (line,) = (vars(record) for record in caplog.records if record.msg == "captured")
    assert line["pod"] == WISH.label
    assert line["said"].startswith("captured by ")


def test_job_of_a_worker_that_died_is_asked_for_again_at_once() -> None:
    async def part(scene: Scene) -> None:
        scene.jobs.faults = [WorkerGone("it died")]
        pod = scene.reconciler.want(WISH)
        await scene.until(lambda: pod.state == "in-sync")

    assert play(part).kinds() == ["captured"]


def test_enrolment_that_fails_says_why_to_whoever_waits() -> None:
    async def part(scene: Scene) -> None:
        scene.jobs.faults = [JobFailed("KernelRejected", "no luck", 4)] * 2
        with pytest.raises(JobFailed, match="no luck"):
            await scene.reconciler.enrol(scene.reconciler.want(WISH))

    play(part)


def test_namespace_that_is_gone_is_a_sentence() -> None:
    async def part(scene: Scene) -> None:
        pod = scene.reconciler.want(replace(WISH, netns="/run/netns/it-never"))
        await scene.until(lambda: pod.state == "failed")
        assert "/run/netns/it-never cannot be opened" in pod.detail

    play(part)


def test_path_that_leads_to_another_namespace_later_is_not_followed(tmp_path: Path) -> None:
    """As of a process whose number was given to one of another pod."""
    path = tmp_path / "ns"
    path.symlink_to("/proc/self/ns/net")

    async def part(scene: Scene) -> None:
        pod = scene.reconciler.want(replace(WISH, netns=str(path)))
        await scene.until(lambda: pod.state == "in-sync")
        path.unlink()
        path.symlink_to("/proc/self/ns/uts")
        await scene.until(lambda: pod.state == "failed")
        assert "another network namespace" in pod.detail
        done = len(scene.jobs.done)
        await scene.until(lambda: pod.failures > 3)
        assert len(scene.jobs.done) == done
        scene.reconciler.want(replace(pod.wish, sandbox_id="s2"))
        await scene.until(lambda: pod.state == "in-sync")

    play(part)


def test_other_settings_are_applied() -> None:
    async def part(scene: Scene) -> None:
        pod = scene.reconciler.want(WISH)
        await scene.until(lambda: pod.state == "in-sync")
        scene.jobs.captured = False
        scene.reconciler.want(replace(WISH, settings={"inbound_ports_include": "80"}))
        await scene.until(lambda: scene.jobs.captured)

    assert play(part).jobs.done.count("apply") == 2


def test_pod_that_is_gone_is_not_looked_at_any_more() -> None:
    async def part(scene: Scene) -> None:
        pod = scene.reconciler.want(WISH)
        await scene.until(lambda: pod.state == "in-sync")
        await scene.reconciler.forget(WISH.key)
        looks = len(scene.jobs.done)
        await asyncio.sleep(0.02)
        assert len(scene.jobs.done) == looks
        assert scene.reconciler.pods == {}

    play(part)


def test_change_in_the_namespace_is_looked_at_at_once() -> None:
    async def part(scene: Scene) -> None:
        scene.reconciler._spread = lambda _: 60.0  # nothing but news wakes it
        pod = scene.reconciler.want(WISH)
        await scene.until(lambda: pod.state == "in-sync")
        scene.jobs.captured = False
        os.write(scene.jobs.pipe, b"!")
        await scene.until(lambda: scene.jobs.captured)

    assert play(part, captured=True).kinds() == ["drift-repaired"]


def test_watch_that_ended_with_its_worker_is_made_again() -> None:
    async def part(scene: Scene) -> None:
        scene.reconciler._spread = lambda _: 60.0
        pod = scene.reconciler.want(WISH)
        await scene.until(lambda: pod.state == "in-sync")
        first = scene.jobs.pipe
        os.close(first)
        await scene.until(lambda: scene.jobs.watches == 2)

    play(part, captured=True)


def test_repairs_that_do_not_hold_become_rarer() -> None:
    async def part(scene: Scene) -> None:
        pod = scene.reconciler.want(WISH)
        await scene.until(lambda: pod.state == "in-sync")
        for _ in range(3):
            scene.jobs.captured = False
            await scene.until(lambda: scene.jobs.captured)
        assert pod.settle_s > 4 * SETTLE_S

    play(part, captured=True)


@pytest.mark.parametrize(
    ("guarded", "told", "said"),
    [
        (True, True, r"\(the guard kept the pod closed\)$"),
        (False, True, r"\(connections could get past the proxy for \d+\.\d\d s\)$"),
        (False, False, r"\(connections could get past the proxy for at most \d+\.\d\d s\)$"),
    ],
)
def test_repair_says_for_how_long_the_pod_was_open(guarded: bool, told: bool, said: str) -> None:
    async def part(scene: Scene) -> None:
        pod = scene.reconciler.want(WISH)
        await scene.until(lambda: pod.state == "in-sync" and scene.jobs.watches == 1)
        if told:  # then only the news can have been what made it look again
            scene.pause_s = 60.0
            await asyncio.sleep(0.01)
        scene.jobs.captured, scene.jobs.guarded = False, guarded
        if told:
            os.write(scene.jobs.pipe, b"!")
        await scene.until(lambda: len(scene.kinds()) == 1)

    (event,) = play(part, captured=True).events.since(0)
    assert re.search(said, str(event["message"]))


def test_pod_that_is_let_go_while_it_is_looked_at_is_not_written_to() -> None:
    async def part(scene: Scene) -> None:
        scene.jobs.go_on.clear()
        pod = scene.reconciler.want(WISH)
        await asyncio.sleep(0.01)  # the first look is under way
        scene.reconciler.want(replace(WISH, settings=None, reason="excluded-namespace"))
        scene.jobs.go_on.set()
        await scene.until(lambda: pod.state == "ignored")
        await scene.reconciler.enrol(pod)

    scene = play(part)
    assert "apply" not in scene.jobs.done
    assert scene.kinds() == []


def test_look_that_was_under_way_when_the_words_changed_counts_for_nothing() -> None:
    async def part(scene: Scene) -> None:
        scene.jobs.only = "iptables-nft"
        scene.jobs.go_on.clear()
        pod = scene.reconciler.want(WISH)
        await asyncio.sleep(0.01)  # the first look is under way
        scene.reconciler.configure(mode="repair", backend="iptables-nft", guard=None)
        scene.jobs.go_on.set()
        await scene.until(lambda: pod.state == "in-sync")

    assert "apply" not in play(part, captured=True).jobs.done


def test_other_words_are_gone_by_at_once_and_what_differs_then_is_no_drift() -> None:
    async def part(scene: Scene) -> None:
        scene.pause_s = 60.0  # nothing but being told wakes it
        pod = scene.reconciler.want(WISH)
        await scene.until(lambda: pod.state == "in-sync")
        scene.jobs.captured = False
        scene.reconciler.configure(mode="repair", backend="iptables-nft", guard="off")
        await scene.until(lambda: scene.jobs.captured)
        assert scene.jobs.backends[-1] == "iptables-nft"
        looks = len(scene.jobs.done)
        scene.reconciler.configure(mode="repair", backend="iptables-nft", guard="off")
        await asyncio.sleep(0.1)
        assert len(scene.jobs.done) == looks

    assert play(part, captured=True).kinds() == ["captured"]


def test_drift_right_after_a_mode_without_a_guard_of_its_own_is_drift() -> None:
    async def part(scene: Scene) -> None:
        scene.reconciler.configure(mode="repair", backend="auto", guard="standing")
        pod = scene.reconciler.want(WISH)
        await scene.until(lambda: pod.state == "in-sync")
        scene.jobs.captured = False  # before anybody has looked again
        scene.reconciler.configure(mode="alert", backend="auto", guard=None)
        await scene.until(lambda: pod.state == "drifted")
        scene.reconciler.configure(mode="repair", backend="auto", guard="standing")
        await scene.until(lambda: pod.state == "in-sync")

    assert play(part, captured=True).kinds() == ["drift-found", "drift-repaired"]


def test_every_change_of_a_pod_is_published_once() -> None:
    async def part(scene: Scene) -> None:
        pod = scene.reconciler.want(WISH)
        await scene.until(lambda: pod.state == "in-sync")
        scene.jobs.captured = False
        await scene.until(lambda: "drift-repaired" in scene.kinds())
        await scene.until(lambda: pod.state == "in-sync")
        looks = len(scene.jobs.done)
        await scene.until(lambda: len(scene.jobs.done) > looks + 3)
        await scene.reconciler.forget(WISH.key)

    states = [state for kind, state in play(part, captured=True).told if kind == "pod"]
    assert states == ["repairing", "in-sync", "repairing", "in-sync"]


def test_check_compares_with_any_wish_and_keeps_none() -> None:
    async def part(scene: Scene) -> None:
        found = await scene.reconciler.check(WISH)
        assert (found.in_sync, found.text) == (False, "+ nat: -A OUTPUT -j ISTIO_OUTPUT")
        assert scene.reconciler.pods == {}

    assert play(part).jobs.done == ["check"]


@pytest.mark.parametrize("turns", range(6))
def test_pod_that_is_woken_as_it_is_to_be_forgotten_is_forgotten(turns: int) -> None:
    async def part(scene: Scene) -> None:
        scene.pause_s = 60.0
        pod = scene.reconciler.want(WISH)
        await scene.until(lambda: pod.state == "in-sync" and not pod.busy.locked())
        pod.wake.set()
        for _ in range(turns):
            await asyncio.sleep(0)
        forgetting = asyncio.create_task(scene.reconciler.forget(WISH.key))
        done, _ = await asyncio.wait([forgetting], timeout=5)
        assert done

    play(part, captured=True)


def test_proxy_that_listened_once_closes_the_gate_though_it_is_dead_already() -> None:
    async def part(scene: Scene) -> None:
        scene.pause_s = 60.0
        pod = scene.reconciler.want(replace(WISH, settings={"gate": "open"}))
        await scene.until(lambda: bool(scene.jobs.gates))
        os.write(scene.jobs.gates[-1], b"!")
        await scene.until(lambda: pod.state == "in-sync")
        assert scene.jobs.captured
        for end in scene.jobs.gates:
            os.close(end)

    play(part)


def test_gate_stays_open_when_whoever_was_to_tell_is_gone_and_another_is_asked() -> None:
    async def part(scene: Scene) -> None:
        scene.pause_s = 60.0  # nothing but being told wakes it
        pod = scene.reconciler.want(replace(WISH, settings={"gate": "open"}))
        await scene.until(lambda: len(scene.jobs.gates) == 1)
        os.close(scene.jobs.gates[-1])
        await scene.until(lambda: len(scene.jobs.gates) == 2)
        assert pod.state == "repairing"
        os.close(scene.jobs.gates[-1])

    assert "apply" not in play(part).jobs.done


def test_nothing_is_watched_in_a_pod_that_is_left_alone() -> None:
    async def part(scene: Scene) -> None:
        scene.pause_s = 60.0
        pod = scene.reconciler.want(replace(WISH, settings={"gate": "open"}))
        await scene.until(lambda: bool(scene.jobs.gates))
        await scene.until(lambda: not pod.busy.locked())
        scene.reconciler.want(replace(WISH, settings=None, reason="excluded-namespace"))
        await scene.until(lambda: pod.state == "ignored")
        for end in (scene.jobs.pipe, scene.jobs.gates[-1]):
            with pytest.raises(BrokenPipeError):
                os.write(end, b"!")
            os.close(end)

    play(part)


# --- pods that come late --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "at_risk", "state", "kinds"),
    [
        ({"": "", "risk": ""}, False, "in-sync", ["captured", "captured-late"]),
        ({"": "", "risk": ""}, True, "in-sync", ["captured", "captured-late"]),
        ({"": "", "risk": "left alone"}, True, "drifted", []),
        ({"": "left alone", "risk": ""}, False, "drifted", []),
    ],
    ids=["safe", "unsafe all the same", "unsafe", "not programmed"],
)
def test_pod_that_ran_uncaptured_is_treated_as_the_policy_says(
    policy: dict[str, str], at_risk: bool, state: str, kinds: list[str]
) -> None:
    async def part(scene: Scene) -> None:
        scene.jobs.bare, scene.jobs.at_risk = True, at_risk
        scene.reconciler.remedy = lambda _, danger: policy["risk" if danger else ""]
        pod = scene.reconciler.want(WISH)
        await scene.until(lambda: pod.state == state and len(scene.jobs.done) > 2)
        assert pod.detail == ("left alone" if state == "drifted" else "")
        assert scene.reconciler.runs_uncaptured(WISH.key) is (state == "drifted")

    scene = play(part)
    assert scene.jobs.captured is (state == "in-sync")
    assert scene.kinds() == kinds


def test_pod_that_the_plugin_announced_or_that_lost_its_capture_does_not_come_late() -> None:
    async def part(scene: Scene) -> None:
        scene.jobs.bare = True
        scene.reconciler.remedy = lambda *_: "left alone"
        announced = scene.reconciler.want(WISH)
        announced.announced = True
        await scene.until(lambda: announced.state == "in-sync")
        scene.jobs.captured = False
        await scene.until(lambda: "drift-repaired" in scene.kinds())

    play(part)


def test_other_settings_are_no_drift() -> None:
    async def part(scene: Scene) -> None:
        pod = scene.reconciler.want(WISH)
        await scene.until(lambda: pod.state == "in-sync")
        for ports in ("80", "81"):
            scene.jobs.captured = False  # by these it is not as it should be
            scene.reconciler.want(replace(WISH, settings={"inbound_ports_include": ports}))
            await scene.until(lambda: scene.jobs.captured and pod.enrolled)
        scene.reconciler.want(replace(WISH, settings=None))
        scene.reconciler.want(pod.wish)

    assert set(play(part).kinds()) == {"captured"}


def test_init_container_that_ends_while_it_is_let_pass_is_no_failure() -> None:
    """A rule that names its cgroup reads back without the name then."""

    async def part(scene: Scene) -> None:
        scene.reconciler.configure(mode="repair", backend="auto", guard=None, gate="listener")
        pod = scene.reconciler.want(WISH)
        await scene.until(lambda: pod.enrolled)
        for told in (("/it-gone/1",), ()):  # the runtime tells of the end later, or at once
            enough = scene.jobs.done.count("apply") + 2
            scene.jobs.meanwhile = partial(scene.reconciler.let_pass, "s1", told)
            scene.reconciler.let_pass("s1", ("/it-gone/1",))
            await scene.until(partial(scene.jobs.has_done, "apply", enough))
            await scene.until(lambda: pod.state == "in-sync")
            scene.reconciler.let_pass("s1", ())

    assert play(part).kinds() == ["captured"]
