"""A headless Chromium, driven over a pipe: the DevTools protocol without a library.

Chromium reads commands from descriptor 3 and writes what happens to descriptor 4, each a JSON
document that ends with a null byte. Nothing listens on a port.
"""

import base64
import contextlib
import itertools
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from tests.support.agent import wait_for

# The first is the smallest; Debian has both.
NAMES = ("chromium-headless-shell", "chromium")
FLAGS = (
    *("--headless", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--no-first-run"),
    *("--disable-dev-shm-usage", "--disable-extensions", "--disable-background-networking"),
    *("--disable-component-update", "--hide-scrollbars", "--mute-audio"),
)
# Puts two descriptors where Chromium looks for them, out of each other's way, and becomes it.
LAUNCH = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(word), fcntl.F_DUPFD, 10) for word in sys.argv[1:3]]
for number, end in enumerate(ends, 3):
    os.dup2(end, number)
os.execv(sys.argv[3], sys.argv[3:])
"""
DEADLINE_S = 60.0
PHONE = (360, 740)
DESK = (1280, 900)


class Browser:
    """One process of Chromium."""

    def __init__(self, commands: IO[bytes], happenings: IO[bytes]) -> None:
        self._commands = commands
        self._happenings = happenings
        self._ids = itertools.count(1)
        self._answers: dict[int, queue.Queue[Mapping[str, Any]]] = {}
        self.happened: list[Mapping[str, Any]] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        left = b""
        with contextlib.suppress(ValueError, OSError):  # it is closed
            while data := os.read(self._happenings.fileno(), 65536):
                *documents, left = (left + data).split(b"\0")
                for document in map(json.loads, documents):
                    if "id" in document:
                        self._answers[document["id"]].put(document)
                    else:
                        self.happened.append(document)

    def ask(self, method: str, session: str | None = None, /, **parameters: object) -> Any:
        """Have something done and return its result."""
        number = next(self._ids)
        answers = self._answers[number] = queue.Queue()
        document = {"id": number, "method": method, "params": parameters}
        if session is not None:
            document["sessionId"] = session
        self._commands.write(json.dumps(document).encode() + b"\0")
        answer = answers.get(timeout=DEADLINE_S)
        assert "error" not in answer, (method, answer)
        return answer["result"]

    @contextlib.contextmanager
    def tab(
        self,
        *,
        size: tuple[int, int] = DESK,
        scripts: bool = True,
        features: Mapping[str, str] | None = None,
    ) -> Iterator["Tab"]:
        """Open a tab of that size; `features` are what media queries ask for."""
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        try:
            session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            tab = Tab(self, session)
            for domain in ("Page", "Runtime", "Log", "Accessibility"):
                tab.ask(f"{domain}.enable")
            width, height = size
            tab.ask(
                "Emulation.setDeviceMetricsOverride",
                **{"width": width, "height": height, "mobile": width < 600},
                deviceScaleFactor=1,
            )
            tab.ask("Emulation.setScriptExecutionDisabled", value=not scripts)
            wanted = [{"name": name, "value": value} for name, value in (features or {}).items()]
            tab.ask("Emulation.setEmulatedMedia", features=wanted)
            yield tab
        finally:
            self.ask("Target.closeTarget", targetId=target)


class Tab:
    """One page that is shown."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session

    def ask(self, method: str, /, **parameters: object) -> Any:
        return self._browser.ask(method, self._session, **parameters)

    def happened(self, method: str) -> list[Mapping[str, Any]]:
        """Return what was told of under that name since the tab was opened."""
        return [
            one["params"]
            for one in self._browser.happened
            if one["method"] == method and one.get("sessionId") == self._session
        ]

    def open(self, url: str) -> None:
        """Show a page, and return when it has been loaded."""
        before = len(self.happened("Page.loadEventFired"))
        found = self.ask("Page.navigate", url=url)
        assert "errorText" not in found, found
        wait_for(lambda: len(self.happened("Page.loadEventFired")) > before, DEADLINE_S)

    def run(self, expression: str) -> Any:
        """Evaluate JavaScript in the page, also where the page's own scripts are off."""
        found = self.ask(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def text(self, selector: str = "body") -> str:
        """Return what can be read of the first element that fits."""
        return str(self.run(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    def shot(self, file: Path) -> None:
        """Save a picture of the whole page."""
        found = self.ask("Page.captureScreenshot", captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(found["data"]))

    def complaints(self) -> list[str]:
        """Return what the browser had to complain of: blocked styles, scripts, errors."""
        said = [one["entry"]["text"] for one in self.happened("Log.entryAdded")]
        return said + [str(one) for one in self.happened("Runtime.exceptionThrown")]


@contextlib.contextmanager
def chromium(*flags: str) -> Iterator[Browser]:
    """Run a browser with a profile of its own; both are gone afterwards."""
    program = next(filter(None, map(shutil.which, NAMES)), None)
    assert program, f"none of {', '.join(NAMES)} is here; apt-get install {NAMES[0]}"
    with contextlib.ExitStack() as stack:
        profile = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="it-", ignore_cleanup_errors=True)
        )
        (commands, ours_out), (ours_in, happenings) = os.pipe(), os.pipe()
        to_it = stack.enter_context(os.fdopen(ours_out, "wb", buffering=0))
        from_it = stack.enter_context(os.fdopen(ours_in, "rb", buffering=0))
        launcher = (sys.executable, "-I", "-S", "-c", LAUNCH, str(commands), str(happenings))
        try:
            process = subprocess.Popen(
                (*launcher, program, *FLAGS, *flags, f"--user-data-dir={profile}"),
                pass_fds=(commands, happenings),
                stderr=subprocess.DEVNULL,
                env={**os.environ, "HOME": profile},
                start_new_session=True,
            )
        finally:
            os.close(commands)
            os.close(happenings)
        stack.callback(_end, process)
        yield Browser(to_it, from_it)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the browser with all that it started, which is a process group of its own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, 9)
    process.wait()
