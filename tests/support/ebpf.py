"""eBPF in the tests: programs built from this checkout, pins of their own, and the use cases."""

import contextlib
import functools
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from agent.capture.apply import Result, apply, remove
from agent.capture.check import Report, check
from agent.kernel import bpf, bpf_pins
from agent.kernel.netns import Netns
from agent.model.settings import parse
from agent.model.state import EBPF
from tests.support.capturing import EVERYTHING, STATE_DIR, Raw
from tests.support.netns import path_of

BUILD = Path(__file__).parents[2] / "bpf" / "build.py"
DETACH = 34  # BPF_LINK_DETACH


@functools.cache
def built() -> None:
    """Compile the programs if they are older than their sources. Takes clang."""
    runpy.run_path(str(BUILD))["build"]()


@contextlib.contextmanager
def own_pins(folder: Path) -> Iterator[Path]:
    """Yield a folder for pins; a bpffs that was mounted there goes, with all that is pinned.

    Lazily: the worker of an agent that was killed may use it for another moment.
    """
    try:
        yield folder
    finally:
        while folder.is_mount():
            subprocess.run(("umount", "--lazy", str(folder)), check=True)


@contextlib.contextmanager
def own_node(folder: Path) -> Iterator[None]:
    """Keep programs, pins and records of the block away from everybody else's."""
    built()
    pins = folder / "bpf"
    pins.mkdir()
    places = {"INTERCEPT_BPF_DIR": str(pins), STATE_DIR: str(folder / "state")}
    with mock.patch.dict(os.environ, places), own_pins(pins):
        yield


def capture(name: str, raw: Raw = EVERYTHING, backend: str = EBPF) -> Result:
    with Netns.open(path_of(name)) as opened:
        return apply(opened, parse(raw), backend=backend)


def release(name: str) -> Result:
    with Netns.open(path_of(name)) as opened:
        return remove(opened)


def checked(name: str, raw: Raw = EVERYTHING, backend: str = EBPF) -> Report:
    with Netns.open(path_of(name)) as opened:
        return check(opened, parse(raw), backend=backend)


def found_wrong(name: str, raw: Raw = EVERYTHING) -> list[str]:
    return [difference.text for difference in checked(name, raw).differences]


def pinned() -> set[str]:
    base = bpf_pins.base()
    return {str(path.relative_to(base)) for path in base.rglob("*")} if base.exists() else set()


def cookie(name: str) -> int:
    with Netns.open(path_of(name)) as opened:
        found = opened.cookie()
    assert found is not None
    return found


def detach(pin: Path) -> None:
    fd = bpf.get(pin)
    bpf.call(DETACH, fd.to_bytes(4, sys.byteorder))
    os.close(fd)


def run_killed(command: str, name: str, after_s: float) -> None:
    """Run a command of the agent and kill it, and what it started, after some time."""
    arguments = [command, "--netns", name]
    if command == "apply":
        arguments += ["--backend", EBPF, "-i", "*", "-b", "*", "-d", "", "--enable-ipv6", "true"]
    start = "import sys; from agent.cli.main import main; sys.exit(main())"
    child = subprocess.Popen(
        [sys.executable, "-c", start, *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(after_s)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
