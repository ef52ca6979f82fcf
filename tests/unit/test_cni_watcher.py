"""The watcher on real directories and a clock of the test: what is repaired, when, how often."""

import asyncio
import errno
import importlib
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent.cni import opponent
from agent.cni.folder import Folder
from agent.cni.installer import Place
from agent.cni.watcher import (
    HOLD_S,
    MAX_WAIT_S,
    PATIENCE,
    POLL_S,
    RECHECK_S,
    SETTLE_S,
    Inotify,
    NoWatch,
    State,
    Watcher,
)
from agent.formats.cni_config import TYPE

inotify_simple: Any = importlib.import_module("inotify_simple")  # it has no types

BASE = b'{"cniVersion":"1.0.0","name":"n","plugins":[{"type":"cilium-cni"}]}'
OTHER = BASE.replace(b"cilium-cni", b"calico")
DEADLINE_S = 20.0  # for what takes milliseconds: only a failure comes near it


class FakeWatch:
    """Events that nobody sends; counts how many were opened and closed."""

    opened = closed = 0

    def __init__(self, directories: tuple[str, ...]) -> None:
        FakeWatch.opened += 1

    def fileno(self) -> int:
        raise AssertionError("tick never waits")

    def read(self) -> bool:
        return False

    def close(self) -> None:
        FakeWatch.closed += 1


def no_watch(directories: tuple[str, ...]) -> FakeWatch:
    raise NoWatch("inotify is exhausted: Too many open files")


class Bench:
    """A watcher, its directories and its clock."""

    def __init__(self, root: Path, interpreter: str | None = None, **options: Any) -> None:
        self.conf, self.bin = root / "net.d", root / "bin"
        self.conf.mkdir()
        self.bin.mkdir()
        self.now = 1000.0
        self.file = self.conf / "05-cilium.conflist"
        known = {
            "clock": lambda: self.now,
            "watch": FakeWatch,
            "processes": lambda _: ("cilium-agent[7]",),
        }
        place = Place(conf_dir=str(self.conf), bin_dir=str(self.bin), interpreter=interpreter)
        self.watcher = Watcher(place, **{**known, **options})

    @property
    def state(self) -> State:
        return self.watcher.state

    def tick(self, after_s: float = 0.0) -> float:
        self.now += after_s
        return self.watcher.tick()

    def installed(self) -> "Bench":
        self.file.write_bytes(BASE)
        self.tick()
        assert self.state.present
        return self

    def ours(self, path: Path | None = None) -> int:
        return (path or self.file).read_bytes().count(b'"intercept-cni"')


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


# --- repair --------------------------------------------------------------------------------------


def test_first_tick_installs_and_later_ones_write_nothing(bench: Bench) -> None:
    bench.installed()
    seen = [path.stat().st_ctime_ns for path in (bench.file, bench.bin / TYPE)]
    assert bench.tick(RECHECK_S) == RECHECK_S
    assert [path.stat().st_ctime_ns for path in (bench.file, bench.bin / TYPE)] == seen
    assert (bench.state.repairs, bench.state.file, bench.state.watching) == (
        1,
        "05-cilium.conflist",
        "inotify",
    )


def in_place(bench: Bench) -> None:
    with bench.file.open("r+b") as file:
        file.truncate(0)
        file.write(BASE)


def other_body(bench: Bench) -> None:
    document = json.loads(bench.file.read_bytes())
    document["plugins"][-1] = {"type": TYPE}
    bench.file.write_text(json.dumps(document))


def other_place(bench: Bench) -> None:
    document = json.loads(bench.file.read_bytes())
    document["plugins"].reverse()
    bench.file.write_text(json.dumps(document))


@pytest.mark.parametrize(
    "damage",
    [
        in_place,
        other_body,
        other_place,
        lambda bench: (bench.bin / TYPE).unlink(),
        lambda bench: (bench.bin / TYPE).write_bytes(b"torn"),
    ],
)
def test_what_others_break_is_repaired_at_the_next_tick(
    bench: Bench, damage: Callable[[Bench], object]
) -> None:
    bench.installed()
    damage(bench)
    bench.tick(RECHECK_S)
    assert (bench.state.present, bench.state.repairs, bench.ours()) == (True, 2, 1)
    assert os.access(bench.bin / TYPE, os.X_OK)


def test_every_state_in_between_is_told(tmp_path: Path) -> None:
    told: list[State] = []
    bench = Bench(tmp_path, on_change=told.append).installed()
    bench.file.write_bytes(BASE)
    bench.tick(RECHECK_S)
    reasons = [state.reason for state in told if not state.present]
    assert "05-cilium.conflist: entry is missing" in reasons
    assert told[-1].present


def test_new_file_in_front_is_followed(bench: Bench) -> None:
    bench.installed()
    first = bench.conf / "01-other.conflist"
    first.write_bytes(OTHER)
    bench.tick(RECHECK_S)
    assert (bench.state.present, bench.state.file) == (True, "01-other.conflist")
    assert bench.ours(first) == 1


def test_swapped_cni_is_followed(bench: Bench) -> None:
    bench.installed()
    bench.file.unlink()
    bench.tick(RECHECK_S)
    assert (bench.state.present, bench.state.file) == (False, None)
    assert "no CNI configuration yet" in bench.state.reason
    (bench.conf / "10-calico.conf").write_bytes(
        b'{"cniVersion":"0.3.1","name":"k","type":"calico"}'
    )
    bench.tick(RECHECK_S)
    assert (bench.state.present, bench.state.file) == (True, "10-calico.conflist")


def test_directory_that_comes_late_is_found(bench: Bench) -> None:
    bench.conf.rmdir()
    assert bench.tick() == POLL_S
    assert bench.state.reason == "the directory does not exist; binary intercept-cni is missing"
    assert bench.state.watching.startswith("polling every 1 s")
    bench.conf.mkdir()
    bench.installed()
    assert bench.state.watching == "inotify"


def test_replaced_directory_is_watched_anew(bench: Bench) -> None:
    bench.installed()
    opened, closed = FakeWatch.opened, FakeWatch.closed
    bench.conf.rename(bench.conf.with_name("away"))
    bench.conf.mkdir()
    bench.file.write_bytes(BASE)
    bench.tick(RECHECK_S)
    assert (bench.state.present, bench.ours()) == (True, 1)
    assert (FakeWatch.opened - opened, FakeWatch.closed - closed) == (1, 1)


def test_unfinished_write_does_not_send_us_into_the_next_file(bench: Bench) -> None:
    bench.installed()
    second = bench.conf / "87-podman.conflist"
    second.write_bytes(OTHER)
    bench.file.write_bytes(BASE[:20])
    assert bench.tick(RECHECK_S) == SETTLE_S
    assert not bench.state.present
    assert bench.ours(second) == 0
    bench.file.write_bytes(BASE)
    bench.tick(SETTLE_S / 2)
    assert (bench.state.file, bench.ours(), bench.ours(second)) == ("05-cilium.conflist", 1, 0)


def test_invalid_file_that_stays_is_passed_over(bench: Bench) -> None:
    bench.installed()
    bench.file.write_bytes(b"{")
    second = bench.conf / "87-podman.conflist"
    second.write_bytes(OTHER)
    bench.tick(bench.tick(RECHECK_S))
    assert (bench.state.present, bench.state.file) == (True, "87-podman.conflist")
    assert "05-cilium.conflist is not JSON" in bench.state.warnings[0]


def test_observing_changes_nothing(tmp_path: Path) -> None:
    bench = Bench(tmp_path, repair=False)
    bench.file.write_bytes(BASE)
    bench.tick()
    assert not bench.state.present
    assert bench.file.read_bytes() == BASE
    assert list(bench.bin.iterdir()) == []


def test_another_run_of_ours_is_waited_for(bench: Bench) -> None:
    bench.file.write_bytes(BASE)
    with Folder(str(bench.conf), lock=True):
        assert bench.tick() == POLL_S
        assert "another run" in bench.state.reason
    bench.tick(POLL_S)
    assert bench.state.present


def test_failure_is_told_and_tried_again_ever_more_rarely(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(tmp_path, interpreter="/bin/false")
    bench.file.write_bytes(BASE)
    end, waits = bench.now + 600, []
    while bench.now < end:
        waits.append(bench.tick())
        bench.now += waits[-1]
    assert waits[:3] == [1, 2, 4]
    assert max(waits) <= RECHECK_S
    assert not bench.state.present
    assert "no interpreter" in bench.state.reason
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 1


def test_repair_that_can_be_done_again_after_a_long_time_is_not_waited_for_long(
    tmp_path: Path,
) -> None:
    python = tmp_path / "python"
    python.symlink_to("/bin/false")
    bench = Bench(tmp_path, interpreter=str(python))
    bench.file.write_bytes(BASE)
    end = bench.now + 3600
    while bench.now < end:
        bench.now += bench.tick()
    python.unlink()
    python.symlink_to(sys.executable)
    end = bench.now + 30
    while bench.now < end:
        bench.now += bench.tick()
    assert bench.state.present


# --- somebody fights -----------------------------------------------------------------------------


def fight(bench: Bench, seconds: float) -> int:
    """Let somebody undo every repair at once for so long; return how many there were."""
    before, end = bench.state.repairs, bench.now + seconds
    while bench.now < end:
        wait = bench.tick()
        undone = bench.ours() > 0
        if undone:
            bench.file.write_bytes(BASE)
        # An event of theirs, which with inotify comes at once, else the time that was asked for.
        bench.now += 0.01 if undone else wait
    return bench.state.repairs - before


def test_fight_for_a_minute_is_a_handful_of_writes_and_one_warning(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    bench.file.write_bytes(BASE)
    repairs = fight(bench, 60)
    assert PATIENCE < repairs <= PATIENCE + 7
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "cni.exclusive=false" in vars(warnings[0])["opponent"]
    assert "cilium-agent[7]" in vars(warnings[0])["opponent"]
    assert len(caplog.records) <= PATIENCE + 3
    assert bench.state.opponent is not None


def test_long_fight_costs_no_more_than_one_write_in_five_minutes(bench: Bench) -> None:
    bench.file.write_bytes(BASE)
    fight(bench, 3600)
    assert fight(bench, 3600) <= 3600 / MAX_WAIT_S + 1
    assert not bench.state.present


def test_state_is_red_while_the_fight_is_on(bench: Bench) -> None:
    bench.file.write_bytes(BASE)
    fight(bench, 60)
    bench.tick(0.01)
    assert not bench.state.present
    assert "entry is missing" in bench.state.reason


def test_fight_is_forgotten_when_the_entry_holds(bench: Bench) -> None:
    bench.file.write_bytes(BASE)
    fight(bench, 60)
    bench.tick(MAX_WAIT_S)
    assert bench.state.present
    bench.tick(HOLD_S)
    assert bench.state.opponent is None
    bench.file.write_bytes(BASE)
    bench.tick(1)
    assert bench.state.present


def test_two_files_that_change_in_turn_are_not_written_without_end(bench: Bench) -> None:
    first = bench.conf / "01-a.conflist"
    bench.file.write_bytes(BASE)
    end = bench.now + 600
    while bench.now < end:
        wait = bench.tick()
        if bench.state.present:
            bench.file.write_bytes(BASE)
            first.write_bytes(OTHER)
            wait = 0.01
        bench.now += wait
    assert bench.state.repairs <= PATIENCE + 11


@pytest.mark.parametrize(
    ("main_type", "processes", "said"),
    [
        ("cilium-cni", (), "likely Cilium's exclusive mode"),
        ("calico", ("install[9]",), "processes at work in the directory: install[9]"),
        ("own-cni", ("own[1]",), "processes at work in the directory: own[1]"),
        ("own-cni", (), "likely what installs own-cni"),
        (None, (), "nobody can be named"),
    ],
)
def test_opponent_in_words(main_type: str | None, processes: tuple[str, ...], said: str) -> None:
    assert said in opponent.describe(main_type, processes)


WATCH_OR_HOLD = """
import sys, inotify_simple
if sys.argv[2] == "watch":
    inotify = inotify_simple.INotify()
    inotify.add_watch(sys.argv[1], inotify_simple.flags.MODIFY)
else:
    held = open(sys.argv[1] + "/x.conflist", "w")
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("how", ["watch", "hold"])
def test_process_at_work_in_the_directory_is_named(tmp_path: Path, how: str) -> None:
    command = [sys.executable, "-c", WATCH_OR_HOLD, str(tmp_path), how]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as other:
        assert other.stdout is not None
        other.stdout.readline()
        found = opponent.processes(str(tmp_path))
        other.communicate(b"")
    assert any(name.endswith(f"[{other.pid}]") for name in found), found
    assert opponent.processes(str(tmp_path)) == ()


# --- events --------------------------------------------------------------------------------------


def test_exhausted_inotify_means_polling_every_second_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(tmp_path, watch=no_watch).installed()
    assert bench.state.watching == "polling every 1 s: inotify is exhausted: Too many open files"
    bench.file.write_bytes(BASE)
    assert bench.tick(POLL_S) == POLL_S
    assert (bench.state.present, bench.ours()) == (True, 1)
    bench.tick(600)
    assert [record.levelno for record in caplog.records].count(logging.WARNING) == 1


def test_inotify_that_can_be_had_again_is_taken(tmp_path: Path) -> None:
    exhausted = True

    def sometimes(directories: tuple[str, ...]) -> FakeWatch:
        return no_watch(directories) if exhausted else FakeWatch(directories)

    bench = Bench(tmp_path, watch=sometimes).installed()
    exhausted = False
    bench.tick(POLL_S)
    assert bench.state.watching.startswith("polling")
    bench.tick(60)
    assert bench.state.watching == "inotify"


def test_kernel_without_inotify_instances_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhausted(**_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(inotify_simple, "INotify", exhausted)
    with pytest.raises(NoWatch, match="inotify is exhausted: Too many open files"):
        Inotify((str(tmp_path),))


def test_node_without_the_library_is_polled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "inotify_simple", None)
    bench = Bench(tmp_path, watch=Inotify).installed()
    assert bench.state.watching == "polling every 1 s: inotify_simple is not installed"


def test_inotify_wakes_a_running_watcher_for_whatever_happens(tmp_path: Path) -> None:
    """Real events and no time at all: between events this watcher would sleep for ever."""

    async def scenario() -> None:
        changed = asyncio.Event()
        asleep = asyncio.Event()

        async def sleep(seconds: float) -> None:
            if seconds < 1:
                return  # the moment in which events of one write come together
            asleep.set()
            await asyncio.Event().wait()

        def told(_: State) -> None:
            changed.set()

        bench = Bench(tmp_path, watch=Inotify, sleep=sleep, on_change=told)
        running = asyncio.create_task(bench.watcher.run())

        async def until(condition: Callable[[], bool]) -> None:
            while not condition():
                changed.clear()
                await changed.wait()

        async def after(act: Callable[[], object], condition: Callable[[], bool]) -> None:
            asleep.clear()
            act()
            await until(condition)

        def repaired(count: int) -> Callable[[], bool]:
            return lambda: bench.state.present and bench.state.repairs == count

        async with asyncio.timeout(DEADLINE_S):
            await asleep.wait()
            await after(lambda: bench.file.write_bytes(BASE), repaired(1))
            bench.now += 2 * HOLD_S
            await after(lambda: in_place(bench), repaired(2))
            bench.now += 2 * HOLD_S
            await after((bench.bin / TYPE).unlink, repaired(3))
            bench.now += 2 * HOLD_S
            moved = bench.conf / "moved"
            moved.write_bytes(OTHER)
            await after(lambda: moved.rename(bench.conf / "01-a.conflist"), repaired(4))
            assert bench.state.file == "01-a.conflist"
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert bench.ours() == 1

    asyncio.run(scenario())


def test_cancelled_watcher_leaves_no_descriptor_and_no_task(tmp_path: Path) -> None:
    async def scenario() -> None:
        bench = Bench(tmp_path, watch=Inotify)
        bench.file.write_bytes(BASE)
        before = set(os.listdir("/proc/self/fd"))
        running = asyncio.create_task(bench.watcher.run())
        await asyncio.sleep(0)
        assert bench.state.watching == "inotify"
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert set(os.listdir("/proc/self/fd")) <= before
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(scenario())
