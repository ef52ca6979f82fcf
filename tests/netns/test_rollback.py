"""A change that fails part way leaves the namespace as it was, whichever write it was."""

import contextlib
import fcntl
import signal
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agent.backends.protocol import Step
from agent.kernel.tools import find
from agent.model.errors import AgentError, KernelRejected, RolledBack
from tests.support.capturing import (
    BACKENDS,
    EVERYTHING,
    RICH,
    SETTINGS,
    STATE_DIR,
    assert_in_sync,
    capture,
    command,
    release,
    report,
    started,
    state,
    words,
)
from tests.support.foreign import ISTIO_INIT, ISTIO_NFT, TOOLS, add_foreign, counters
from tests.support.netns import inside

pytestmark = pytest.mark.netns

OTHER = SETTINGS["other-mark-and-table"]
NEXT = dict(zip(BACKENDS, (*BACKENDS[1:], BACKENDS[0]), strict=True))
MAX_STEPS = 40


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STATE_DIR, str(tmp_path / "state"))


class Refusal:
    """A hook that refuses one write: before it is made, after it, or by an interrupt."""

    def __init__(self, at: int, how: str) -> None:
        self._left = at
        self._how = how
        self.fired = False

    def __call__(self, step: Step) -> None:
        if self.fired:
            return
        if self._left:
            self._left -= 1
            return
        self.fired = True
        if self._how == "after":
            step.run()
        if self._how == "interrupt":
            raise KeyboardInterrupt
        raise KernelRejected(f"refused by the test: {step.what}")


def legacy_made(name: str) -> None:
    """Make the legacy tables that a capture needs: a rollback cannot unmake them."""
    for tool in TOOLS.values():
        for table in ("nat", "mangle", "raw", "filter"):
            inside(name, f"{tool}-legacy", "-t", table, "-S")


def exact(name: str) -> dict[str, object]:
    """Return the state with every rule in its order; that of nf_tables' chains means nothing."""
    found = state(name)
    tables = {}
    for text in found.pop("nft").split("table ")[1:]:
        head, _, body = text.partition(" {\n")
        tables[head] = sorted(body.rstrip().removesuffix("}").strip("\n").split("\n\n"))
    return {**found, "nft": tables}


def assert_every_refusal_is_undone(
    name: str, change: Callable[[Refusal], object], *, how: str
) -> None:
    """Refuse the first write, then the second and so on, until one goes through unrefused."""
    before = exact(name)
    for at in range(MAX_STEPS):
        refusal = Refusal(at, how)
        with contextlib.suppress(RolledBack):
            change(refusal)
        if not refusal.fired:
            assert at > 0
            return
        after = exact(name)
        for kind, text in before.items():
            assert after[kind] == text, (how, at, kind)
    raise AssertionError("there seems to be no end of writes")


HOW = ("before", "after", "interrupt")


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_refusal_of_a_first_capture_is_undone(netns: str, backend: str, how: str) -> None:
    add_foreign(netns)
    seen = counters(netns)
    assert_every_refusal_is_undone(
        netns, lambda refusal: capture(netns, RICH, backend, before_step=refusal), how=how
    )
    assert not report(netns, RICH, backend).differences  # foreign translations are mentioned
    release(netns)
    assert counters(netns) == seen


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_refusal_of_a_change_of_backend_is_undone(netns: str, backend: str, how: str) -> None:
    legacy_made(netns)
    inside(netns, "ip", "rule", "add", "pref", "100", "from", "10.9.0.0/16", "lookup", "200")
    capture(netns, RICH, backend)
    inside(netns, "ip", "rule", "add", "pref", "50", "from", "10.9.1.0/24", "lookup", "200")
    new = NEXT[backend]
    assert_every_refusal_is_undone(
        netns, lambda refusal: capture(netns, OTHER, new, before_step=refusal), how=how
    )
    assert_in_sync(netns, OTHER, new)


@pytest.mark.parametrize("flavour", ["legacy", "nft"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_refusal_over_istio_init_is_undone(netns: str, backend: str, flavour: str) -> None:
    legacy_made(netns)
    ISTIO_INIT["tproxy"].load(netns, flavour)
    inside(netns, "ip", "rule", "add", "fwmark", "1337", "lookup", "133")
    assert_every_refusal_is_undone(
        netns, lambda refusal: capture(netns, OTHER, backend, before_step=refusal), how="after"
    )
    assert_in_sync(netns, OTHER, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_refusal_over_istios_own_nftables_mode_is_undone(netns: str, backend: str) -> None:
    legacy_made(netns)
    inside(netns, "nft", "-f", "-", stdin=ISTIO_NFT)
    assert_every_refusal_is_undone(
        netns, lambda refusal: capture(netns, OTHER, backend, before_step=refusal), how="after"
    )
    assert_in_sync(netns, OTHER, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_refusal_of_a_removal_is_undone(netns: str, backend: str) -> None:
    legacy_made(netns)
    add_foreign(netns)
    clean = exact(netns)
    capture(netns, RICH, backend)
    for how in ("before", "after"):
        before = exact(netns)
        for at in range(MAX_STEPS):
            refusal = Refusal(at, how)
            with contextlib.suppress(RolledBack):
                release(netns, before_step=refusal)
            if not refusal.fired:
                break
            assert exact(netns) == before, (how, at)
        assert exact(netns) == clean
        capture(netns, RICH, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_was_known_of_the_capture_that_stayed_is_known_after_a_refusal(
    netns: str, backend: str
) -> None:
    """`check` without options compares with what stands there, not with what was refused."""
    capture(netns, RICH, backend)
    with pytest.raises(RolledBack):
        capture(netns, SETTINGS["other-ports"], backend, before_step=Refusal(0, "before"))
    code, out, err = command("check", "--netns", netns)
    assert code == 0, out + err


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_foreign_rule_that_comes_meanwhile_is_not_lost(netns: str, backend: str) -> None:
    """Another program adds a rule while ours runs; whatever becomes of ours, theirs stays."""
    rule = ("-p", "tcp", "--dport", "4711", "-j", "DROP")
    added = threading.Event()

    def add(_step: Step) -> None:
        if not added.is_set():
            added.set()
            for flavour in ("nft", "legacy"):
                inside(netns, f"iptables-{flavour}", "-t", "filter", "-A", "INPUT", *rule)

    with contextlib.suppress(AgentError):
        capture(netns, RICH, backend, before_step=add)
    assert added.is_set()
    for flavour in ("nft", "legacy"):
        assert "--dport 4711" in inside(netns, f"iptables-{flavour}-save"), flavour
    capture(netns, RICH, backend)
    assert_in_sync(netns, RICH, backend)


# --- real refusals -------------------------------------------------------------------------------


@contextlib.contextmanager
def tool_wrapped(folder: Path, tool: str, script: str) -> Iterator[str]:
    """Put a shell script in front of a tool; yields the folder to search first.

    In the script `$real` is the tool and `$count` says which call this is, from 1.
    """
    real = find(tool)
    assert real is not None
    wrapper, calls = folder / tool, folder / "calls"
    wrapper.write_text(
        f"#!/bin/bash\nreal={real}\necho >> {calls}\ncount=$(wc -l < {calls})\n{script}\n"
    )
    wrapper.chmod(wrapper.stat().st_mode | stat.S_IXUSR)
    yield str(folder)


@pytest.mark.parametrize("nth", [1, 2])
def test_a_restore_that_fails_gives_exit_4_and_changes_nothing(
    netns: str, tmp_path: Path, nth: int
) -> None:
    """Call 1 of a family is the test, 2 writes; families run at once, so the other is written."""
    add_foreign(netns)
    capture(netns, EVERYTHING, "nftables")
    before = exact(netns)
    say = 'echo "RULE_APPEND failed (Invalid argument)" >&2; exit 4'
    for tool in ("iptables-nft-restore", "ip6tables-nft-restore"):
        folder = tmp_path / tool
        folder.mkdir()
        script = f'if [ "$count" = {nth} ]; then {say}; fi; exec $real "$@"'
        with tool_wrapped(folder, tool, script) as path:
            arguments = ("apply", "--netns", netns, "--backend", "iptables-nft", *words(RICH))
            code, out, err = command(*arguments, path=path)
        assert code == 4, out + err
        assert "RULE_APPEND failed" in err
        assert "put back" in err
        assert exact(netns) == before
    capture(netns, RICH, "iptables-nft")
    assert not report(netns, RICH, "iptables-nft").differences


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_somebody_takes_away_before_the_proof_is_noticed(netns: str, backend: str) -> None:
    """The tool said that all went well, and reading back shows that it did not."""
    if backend == "iptables-legacy":
        legacy_made(netns)
    before = exact(netns)

    def spoil(step: Step) -> None:
        loads = "load table inet intercept-agent in" in step.what
        if "delete table inet intercept-agent-guard" in step.what or loads:
            inside(netns, "ip", "-6", "rule", "del", "fwmark", "1337", "lookup", "133")

    with pytest.raises(RolledBack, match="reads back differently"):
        capture(netns, RICH, backend, before_step=spoil)
    assert exact(netns) == before
    capture(netns, RICH, backend)
    assert_in_sync(netns, RICH, backend)


# --- interrupts that come while a tool is at work ------------------------------------------------

SLOW_S = 1.0


def interrupted(name: str, backend: str, ready: Callable[[], bool], path: str = "") -> int:
    """Run `apply`, interrupt only that process once it is `ready`, and return its exit code."""
    arguments = ("apply", "--netns", name, "--backend", backend, *words(RICH))
    with started(*arguments, path=path) as process:
        deadline = time.monotonic() + 20
        while not ready():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=40)
    assert "Traceback" not in err, err
    return process.returncode


def test_an_interrupt_during_a_slow_restore_leaves_nothing_that_comes_later(
    netns: str, tmp_path: Path
) -> None:
    """The rollback must not look before the restore that it undoes has ended."""
    before = exact(netns)
    script = (
        f'if [ "$count" = 2 ]; then touch {tmp_path}/writing; sleep {SLOW_S}; fi; exec $real "$@"'
    )
    with tool_wrapped(tmp_path, "iptables-nft-restore", script) as path:
        code = interrupted(netns, "iptables-nft", (tmp_path / "writing").exists, path)
    time.sleep(2 * SLOW_S)
    assert code in (4, 130)
    assert exact(netns) == before
    capture(netns, RICH, "iptables-nft")
    assert_in_sync(netns, RICH, "iptables-nft")


def test_an_interrupt_while_the_legacy_helper_works_leaves_nothing_that_comes_later(
    netns: str,
) -> None:
    legacy_made(netns)
    before = exact(netns)
    guarded = False

    def waits_for_the_lock() -> bool:
        nonlocal guarded  # the guard stands right before the first table is written
        guarded = guarded or "intercept-agent-guard" in inside(netns, "nft", "list", "tables")
        return guarded

    with open("/run/xtables.lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        release_lock = threading.Timer(SLOW_S, lambda: fcntl.flock(lock, fcntl.LOCK_UN))

        def ready() -> bool:
            if not waits_for_the_lock():
                return False
            time.sleep(0.5)  # the helper starts and waits
            release_lock.start()
            return True

        code = interrupted(netns, "iptables-legacy", ready)
        release_lock.join()
    time.sleep(SLOW_S)
    assert code in (4, 130)
    assert exact(netns) == before
    capture(netns, RICH, "iptables-legacy")
    assert_in_sync(netns, RICH, "iptables-legacy")
