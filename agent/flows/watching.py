"""This side of the process that has the programs: starts it, tells it of namespaces, reads it."""

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Self

from agent.flows.event import EVENT, Event, Lost, Ready, decode
from agent.flows.query import Query
from agent.kernel import bpf_pins
from agent.model.enrolment import LAYOUT
from agent.model.errors import EnvironmentLacks

PACKAGE_ROOT = str(Path(__file__).resolve().parents[2])
READ_BYTES = EVENT.size * 512
END_S = 5.0
REST_S = 60.0  # a full buffer is read within seconds, unless the reader of ours is slow

Told = Event | Lost | Ready


class Watch:
    """A running watch. Use it as a context manager: at the end the programs are gone."""

    def __init__(self, query: Query) -> None:
        """Raises: EnvironmentLacks where there is no cgroup2."""
        cgroup = bpf_pins.cgroup_root()
        if cgroup is None:
            raise EnvironmentLacks(
                "the root of cgroup2 is mounted nowhere here; mount it: "
                "mount -t cgroup2 none /sys/fs/cgroup/unified"
            )
        self._rest = b""
        # A session of its own: what a terminal sends on Ctrl-C is for us to act on.
        self._process = subprocess.Popen(
            (sys.executable, "-P", "-m", "agent.flows.watcher"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": PACKAGE_ROOT},
            start_new_session=True,
        )
        job = {
            "uids": query.uids,
            "ports": query.ports,
            "netns": query.netns,
            "cgroup": cgroup,
            "dialled": _dialled_pin(),
        }
        self._send(job)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        process = self._process
        with contextlib.suppress(OSError):
            assert process.stdin is not None
            process.stdin.close()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()

    def watch(self, more: Iterable[tuple[int, str]], forget: Iterable[int] = ()) -> None:
        """Tell of namespaces by cookie and path; `Ready` comes when they are watched."""
        self._send({"watch": list(more), "forget": list(forget)})

    def read(self, timeout_s: float, wake: int | None = None) -> Iterator[Told]:
        """Yield what was told by now, after waiting for that, or for `wake` to be readable.

        Raises: EnvironmentLacks if the process ended, with its reason.
        """
        assert self._process.stdout is not None
        out = self._process.stdout.fileno()
        ready, _, _ = select.select([out] if wake is None else [out, wake], [], [], timeout_s)
        if out not in ready:
            return
        data = os.read(out, READ_BYTES)
        if not data:
            raise self._ended()
        data = self._rest + data
        whole = len(data) // EVENT.size * EVENT.size
        self._rest = data[whole:]
        for at in range(0, whole, EVENT.size):
            yield decode(data[at : at + EVENT.size])

    def rest(self) -> Iterator[Told]:
        """Yield what was told before this was called, and end the watch."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        with contextlib.suppress(EnvironmentLacks):  # that is how it ends
            deadline = time.monotonic() + REST_S
            while (left := deadline - time.monotonic()) > 0:
                yield from self.read(left)

    def _send(self, document: object) -> None:
        assert self._process.stdin is not None
        # One that has ended already says why when it is read.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(document).encode() + b"\n")
            self._process.stdin.flush()

    def _ended(self) -> EnvironmentLacks:
        assert self._process.stderr is not None
        said = self._process.stderr.read().decode(errors="replace").strip().splitlines()
        code = self._process.wait()
        return EnvironmentLacks(said[-1] if said else f"the process that watches ended: {code}")


def _dialled_pin() -> str | None:
    """Return the pin of the map in which the eBPF backend keeps who was dialled."""
    about = bpf_pins.about()
    pin = bpf_pins.base() / "maps" / "dialled"
    return str(pin) if about is not None and about.layout == LAYOUT else None
