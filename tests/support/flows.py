"""`intercept-agent flows` as a test watches it: started, read line by line, ended."""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
# Compiling takes half a second of a processor that is free.
DEADLINE_S = 60.0

Document = dict[str, Any]


class Flows:
    """A running command."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def wait_until_watching(self) -> str:
        """Return what it says when it begins, or why it does not."""
        assert self.process.stderr is not None
        return self.process.stderr.readline()

    def next(self) -> Document:
        """Return the next document, waiting for it."""
        line = self._lines.get(timeout=DEADLINE_S)
        assert line, f"flows ended: {self.process.wait(DEADLINE_S)}"
        found: Document = json.loads(line)
        return found

    def by_now(self) -> list[Document]:
        """Return the documents that are there already and were not read yet."""
        return [self.next() for _ in range(self._lines.qsize())]

    def end(self, how: int = signal.SIGTERM) -> list[str]:
        """End it; return the lines that were not read yet. Asserts that it ends cleanly."""
        self.process.send_signal(how)
        return self.ended()

    def ended(self) -> list[str]:
        """Wait for its end; return the lines that were not read yet."""
        assert self.process.wait(DEADLINE_S) == 0
        assert self.process.stderr is not None
        assert "Traceback" not in self.process.stderr.read()
        lines = []
        while line := self._lines.get(timeout=DEADLINE_S):
            lines.append(line)
        return lines

    def documents(self) -> list[Document]:
        """End it and return all that was not read yet."""
        return [json.loads(line) for line in self.end()]


@contextlib.contextmanager
def flowing(*arguments: str, table: bool = False) -> Iterator[Flows]:
    """Run `intercept-agent flows`; it sees every connection that is made in the block."""
    command = (sys.executable, "-m", "agent.cli.main", "flows", *arguments)
    process = subprocess.Popen(
        command if table else (*command, "-o", "json"),
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            flows = Flows(process)
            said = flows.wait_until_watching()
            assert said.startswith("watching "), said
            yield flows
        finally:
            if process.poll() is None:
                process.kill()
