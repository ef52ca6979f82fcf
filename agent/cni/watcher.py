"""Keeps our entry where it is: watches the configuration of the node, repairs it, gives in slowly.

How it works. `tick` looks at both directories as they are *now* and compares; what an event said is
never believed, an event only makes the next look come sooner. So a lost event costs time and
nothing else, our own writes need no marking (after them nothing differs), and one look follows a
file that comes first by name, a swapped CNI and a replaced directory alike.

Events come from inotify. Where it cannot be had (the node has used up its instances, the directory
is not there) the directory is looked at every second instead, and `state.watching` says so.

Somebody who undoes every repair is not fought for ever: after `PATIENCE` repairs that did not
hold, the next waits twice as long as the last, up to `MAX_WAIT_S`, with one warning that names the
likely opponent. Meanwhile `state.present` is false.
"""

import asyncio
import contextlib
import importlib
import logging
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from agent.cni import installer, opponent
from agent.cni.folder import Busy, Changed
from agent.cni.installer import Look, Place
from agent.model.errors import AgentError, EnvironmentLacks

log = logging.getLogger(__name__)

RECHECK_S = 5.0  # with events, for those that get lost and for a mount over the directory
POLL_S = 1.0  # without events
SETTLE_S = 1.0  # how long an invalid file may be somebody's unfinished write
COALESCE_S = 0.05  # one write is several events
RETRY_WATCH_S = 60.0
HOLD_S = 60.0  # a repair that was undone sooner did not hold
PATIENCE = 3
MAX_WAIT_S = 300.0
MAX_RETRY_S = 15.0  # after a repair that could not be done: pods start without capture meanwhile


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What health and metrics show. `repairs` counts since the start and never falls."""

    present: bool = False
    reason: str = "not looked at yet"
    file: str | None = None
    repairs: int = 0
    watching: str = "not yet"
    opponent: str | None = None
    warnings: tuple[str, ...] = ()


class Watch(Protocol):
    """A source of events about directories. `read` returns whether there was one."""

    def fileno(self) -> int: ...
    def read(self) -> bool: ...
    def close(self) -> None: ...


class NoWatch(EnvironmentLacks):
    """Events cannot be had; the message says why."""


class Inotify:
    """Events about what can happen to a directory or in it.

    Raises: NoWatch if the library or the kernel has none to give.
    """

    def __init__(self, directories: tuple[str, ...]) -> None:
        try:
            # Not by `import`: the library has no types, and a node may do without it.
            inotify_simple: Any = importlib.import_module("inotify_simple")
        except ImportError as error:
            raise NoWatch("inotify_simple is not installed") from error
        flags = inotify_simple.flags
        mask = (
            flags.MODIFY | flags.CLOSE_WRITE | flags.ATTRIB | flags.CREATE | flags.DELETE
            | flags.MOVED_FROM | flags.MOVED_TO | flags.DELETE_SELF | flags.MOVE_SELF
            | flags.ONLYDIR
        )  # fmt: skip
        try:
            self._inotify: Any = inotify_simple.INotify(nonblocking=True)
        except OSError as error:
            raise NoWatch(f"inotify is exhausted: {error.strerror}") from error
        try:
            for directory in directories:
                self._inotify.add_watch(directory, mask)
        except OSError as error:
            self._inotify.close()
            raise NoWatch(f"inotify cannot watch {directory}: {error.strerror}") from error

    def fileno(self) -> int:
        return int(self._inotify.fileno())

    def read(self) -> bool:
        return bool(self._inotify.read(timeout=0))

    def close(self) -> None:
        self._inotify.close()


class Watcher:
    """One node's configuration. `run` is the whole of it; tests call `tick` themselves.

    With `repair` off it only reports. The caller must not share the directories with a second
    watcher that has another entry: the two would fight each other.
    """

    def __init__(
        self,
        place: Place,
        *,
        repair: bool = True,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        watch: Callable[[tuple[str, ...]], Watch] = Inotify,
        processes: Callable[[str], tuple[str, ...]] = opponent.processes,
        on_change: Callable[[State], None] = lambda _: None,
    ) -> None:
        self.state = State()
        self._place = place
        self._dirs = (place.conf_dir, place.bin_dir)
        self._repair_on = repair
        self._clock, self._sleep, self._make_watch = clock, sleep, watch
        self._processes, self._on_change = processes, on_change
        self._watch: Watch | None = None
        self._watched: tuple[tuple[int, int] | None, ...] = ()
        self._watch_again_at = 0.0
        self._skipped: tuple[str, ...] = ()
        self._skipped_since = 0.0
        self._repaired_at: float | None = None
        self._strikes = 0
        self._not_before = 0.0
        self._failure = ""  # of the last repair
        self._failures = 0  # repairs in a row that could not be done

    async def run(self) -> None:
        """Watch until cancelled. What goes wrong on the node ends in `state.reason`, not here."""
        try:
            while True:
                await self._wait(self.tick())
        finally:
            self.close()

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()
        self._watch, self._watched = None, ()

    def hold(self, reason: str) -> None:
        """Say why nothing is looked at yet."""
        self._set(present=False, reason=reason)

    def tick(self) -> float:
        """Look once, repair if that is due, and return after how many seconds to look again."""
        now = self._clock()
        # Before the look: what happens during it must be an event for the next one.
        self._mind_watch(now)
        try:
            found = installer.look(self._place)
            wait = self._act(found, now)
        except AgentError as error:
            self._set(present=False, reason=str(error), warnings=())
            wait = POLL_S
        return min(wait, RECHECK_S if self._watch is not None else POLL_S)

    # --- deciding --------------------------------------------------------------------------------

    def _act(self, found: Look, now: float) -> float:
        if not found.differences:
            self._calm(now)
            self._found(found)
            return RECHECK_S
        if self.state.present:
            self._count_loss(found, now)
        self._found(found)
        if not found.repairable or not self._repair_on:
            return RECHECK_S
        unsettled = self._unsettled(found, now)
        if unsettled > 0:
            return unsettled
        if now < self._not_before:
            return self._not_before - now
        return self._repair(found, now)

    def _unsettled(self, found: Look, now: float) -> float:
        """Return how long to wait for a file that is invalid now, lest we edit the next one."""
        if found.plan.skipped != self._skipped:
            self._skipped, self._skipped_since = found.plan.skipped, now
        return self._skipped_since + SETTLE_S - now if self._skipped else 0.0

    def _repair(self, found: Look, now: float) -> float:
        reason = "; ".join(found.differences)
        try:
            done = installer.install(self._place)
        except (Busy, Changed) as error:
            self._set(present=False, reason=f"{reason}; {error}")
            return POLL_S
        except AgentError as error:
            self._failures += 1
            self._not_before = now + min(POLL_S * 2.0 ** min(self._failures - 1, 30), MAX_RETRY_S)
            if self._failure != str(error):
                log.error("cni configuration cannot be repaired", extra={"reason": str(error)})
            self._failure = str(error)
            self._set(present=False, reason=f"{reason}; {error}")
            return self._not_before - now
        self._repaired_at, self._failure, self._failures = now, "", 0
        self._set(
            present=True,
            reason="",
            file=done.file,
            warnings=done.warnings,
            repairs=self.state.repairs + (1 if done.changed else 0),
        )
        if self._strikes <= PATIENCE:
            changes = "; ".join(done.changes)
            log.info("cni configuration repaired", extra={"differed": reason, "changes": changes})
        return RECHECK_S

    def _count_loss(self, found: Look, now: float) -> None:
        """What was in order is not any more: was it us who put it in order a moment ago?"""
        if self._repaired_at is None or now - self._repaired_at >= HOLD_S:
            self._strikes = 0
            return
        self._strikes += 1
        self._not_before = now + self._backoff()
        if self._strikes == PATIENCE:
            who = opponent.describe(found.plan.main_type, self._processes(self._place.conf_dir))
            self._set(opponent=who)
            log.warning(
                "cni configuration is changed back again and again; repairs become rarer",
                extra={"directory": self._place.conf_dir, "file": found.plan.file, "opponent": who},
            )

    def _backoff(self) -> float:
        if self._strikes < PATIENCE:
            return 0.0
        return float(min(2.0 ** min(self._strikes - PATIENCE, 30), MAX_WAIT_S))

    def _calm(self, now: float) -> None:
        """Forgive once the entry has held."""
        self._failure, self._failures = "", 0
        held = self._repaired_at is None or now - self._repaired_at >= HOLD_S
        if held and self._strikes:
            self._strikes, self._not_before = 0, 0.0
            self._set(opponent=None)

    def _found(self, found: Look) -> None:
        self._set(
            present=not found.differences,
            reason="; ".join(filter(None, (*found.differences, self._failure))),
            file=found.plan.file,
            warnings=found.plan.warnings,
        )

    def _set(self, **changes: Any) -> None:
        after = replace(self.state, **changes)
        if after != self.state:
            self.state = after
            self._on_change(after)

    # --- events ----------------------------------------------------------------------------------

    def _mind_watch(self, now: float) -> None:
        """Have a watch on the directories that are there now, under these names."""
        there = tuple(_identity(path) for path in self._dirs)
        if self._watch is not None:
            with contextlib.suppress(OSError):
                self._watch.read()
        if there == self._watched and (self._watch is not None or now < self._watch_again_at):
            return
        self.close()
        self._watched = there
        missing = [path for path, id in zip(self._dirs, there, strict=True) if id is None]
        try:
            if missing:
                raise NoWatch(f"{' and '.join(missing)} does not exist")
            self._watch = self._make_watch(self._dirs)
        except NoWatch as error:
            self._watch_again_at = now + RETRY_WATCH_S
            watching = f"polling every {POLL_S:g} s: {error}"
        else:
            watching = "inotify"
        if watching != self.state.watching and watching != "inotify":
            log.warning("cni configuration is polled", extra={"reason": watching})
        self._set(watching=watching)

    async def _wait(self, seconds: float) -> None:
        """Return after so many seconds, or soon after something happened in the directories."""
        if self._watch is None:
            await self._sleep(seconds)
            return
        happened = asyncio.Event()
        loop = asyncio.get_running_loop()
        fd = self._watch.fileno()
        loop.add_reader(fd, happened.set)
        tasks = [
            asyncio.ensure_future(self._sleep(seconds)),
            asyncio.ensure_future(happened.wait()),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            loop.remove_reader(fd)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if happened.is_set():
            await self._sleep(COALESCE_S)


def _identity(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino
