"""A run that is killed at any moment leaves the namespace as before, captured, or closed.

INTERCEPT_KILLS   how many runs are killed in total (40); set it to some hundreds for a long run
"""

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.kernel import locks
from agent.kernel.netns import Netns
from tests.support.capturing import (
    BACKENDS,
    RICH,
    SETTINGS,
    STATE_DIR,
    Raw,
    assert_in_sync,
    capture,
    release,
    report,
    started,
    state,
    words,
)
from tests.support.escape import DIRECT, Lab, lab
from tests.support.foreign import TOOLS
from tests.support.netns import inside, path_of

pytestmark = pytest.mark.netns

KILLS = int(os.environ.get("INTERCEPT_KILLS", "40"))
SEED = int(os.environ.get("INTERCEPT_KILL_SEED", "1"))
ROUTING = ("rules4", "rules6", "routes4", "routes6", "addresses")
CLOSED = frozenset({"timeout"})
QUIET_S = 20.0

OTHER = SETTINGS["other-ports"]
NEXT = dict(zip(BACKENDS, (*BACKENDS[1:], BACKENDS[0]), strict=True))


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STATE_DIR, str(tmp_path))


@pytest.fixture(scope="module")
def pod() -> Iterator[Lab]:
    with lab("kill") as made:
        for tool in TOOLS.values():
            for table in ("nat", "mangle", "raw", "filter"):
                inside(made.pod, f"{tool}-legacy", "-t", table, "-S")
        yield made


def kill(name: str, raw: Raw, backend: str, after_s: float) -> bool:
    """Start `apply`, kill that one process, wait for what it started; tell whether it was alive."""
    arguments = ("apply", "--netns", name, "--backend", backend, *words(raw))
    with started(*arguments) as process:
        time.sleep(after_s)
        alive = process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.wait()
        wait_for_orphans(name)
    return alive


def wait_for_orphans(name: str) -> None:
    """Wait as the next run would, by the lock, and prove that nobody is at work any more then."""
    with Netns.open(path_of(name)) as opened:
        with locks.namespace_lock(opened, timeout_s=QUIET_S):
            before = state(name)
        inode = opened.id.ino
    deadline = time.monotonic() + QUIET_S
    while tools_inside(inode):
        assert time.monotonic() < deadline, "a tool does not end"
        time.sleep(0.01)
    assert state(name) == before, "something was written after the lock was free"


def tools_inside(inode: int) -> list[str]:
    """Return the programs in a namespace, those of the lab apart."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if os.stat(entry / "ns/net").st_ino == inode:
                words_ = (entry / "cmdline").read_bytes()
                if b"escape_node" not in words_:
                    found.append(words_.decode(errors="replace"))
        except OSError:
            continue
    return found


def judge(
    pod: Lab, before: dict[str, str], was: str, wanted: tuple[Raw, str], was_captured: bool
) -> str:
    """Return what a killed run left; anything half open fails."""
    after = state(pod.pod)
    raw, backend = wanted
    if after == before:
        return "as before"
    if report(pod.pod, raw, backend).in_sync:
        return "captured"
    answers = pod.dial()
    if set(answers) <= CLOSED:
        return "closed"
    rules_as_before = all(after[k] == text for k, text in before.items() if k not in ROUTING)
    if rules_as_before and (not was_captured or not set(answers) & DIRECT):
        return "as before but for routes"
    differences = report(pod.pod, raw, backend).differences
    only_routes = all(d.backend == "routing" and d.sign == "-" for d in differences)
    if differences and only_routes and not set(answers) & DIRECT:
        return "captured, and routes nobody needs"
    raise AssertionError((was, answers, [d.line() for d in differences][:10]))


def duration_s(pod: Lab, raw: Raw, backend: str) -> float:
    arguments = ("apply", "--netns", pod.pod, "--backend", backend, *words(raw))
    begun = time.monotonic()
    with started(*arguments) as process:
        _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    return time.monotonic() - begun


@pytest.mark.timeout(60 + 4 * KILLS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_killed_run_never_leaves_a_namespace_half_open(pod: Lab, backend: str) -> None:
    """A first capture, a change of settings and a change of backend take turns to be killed."""
    chance = random.Random(SEED)
    seen: Counter[str] = Counter()
    old = NEXT[backend]
    turns = (("first", None), ("settings", backend), ("backend", old))
    longest = {}
    for index in range(max(6, KILLS // len(BACKENDS))):
        kind, there = turns[index % len(turns)]
        release(pod.pod)
        if there:
            capture(pod.pod, OTHER, there)
        before = state(pod.pod)
        if kind not in longest:
            longest[kind] = duration_s(pod, RICH, backend)
            release(pod.pod)
            if there:
                capture(pod.pod, OTHER, there)
            before = state(pod.pod)
        after_s = longest[kind] * chance.uniform(0.25, 1.0)
        alive = kill(pod.pod, RICH, backend, after_s)
        found = judge(pod, before, f"{kind} after {after_s:.3f}", (RICH, backend), bool(there))
        seen[f"{kind}: {found}" if alive else "ended before"] += 1
        capture(pod.pod, RICH, backend)
        assert_in_sync(pod.pod, RICH, backend)
        assert "guard" not in inside(pod.pod, "nft", "list", "tables")
        assert not set(pod.dial()) & (DIRECT | CLOSED)
    print(backend, dict(seen))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_killed_removal_is_taken_up_again(pod: Lab, backend: str) -> None:
    release(pod.pod)
    clean = state(pod.pod)
    chance = random.Random(SEED)
    for _ in range(3):
        capture(pod.pod, RICH, backend)
        with started("remove", "--netns", pod.pod) as process:
            time.sleep(chance.uniform(0.15, 0.4))
            process.send_signal(signal.SIGKILL)
            process.wait()
            wait_for_orphans(pod.pod)
        release(pod.pod)
        assert state(pod.pod) == clean
