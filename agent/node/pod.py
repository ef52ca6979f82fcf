"""A pod as the reconciler keeps it: what it should be, and how it stands. For one event loop."""

import asyncio
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from agent.model.errors import AgentError
from agent.node.gate import Gate
from agent.node.news import News

FIRST_PAUSE_S = 1.0
# How long a change is given to be complete. It doubles with every repair that somebody undoes.
SETTLE_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What one pod's namespace should be. `settings` is None for a pod that is left alone.

    `reason` is a short code, `text` the sentence behind it. `sandbox_id` names the namespace for
    good: under another one, nothing that was done before counts. `network` is the name of the CNI
    network that the plugin was called for, or nothing where it was not the plugin that told.
    `init_names` are its init containers, as far as they are known.
    """

    key: str
    namespace: str
    name: str
    uid: str
    sandbox_id: str
    netns: str | None
    settings: Mapping[str, object] | None
    reason: str
    text: str
    source: str
    network: str = ""
    init_names: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        return f"{self.namespace}/{self.name}" if self.namespace else self.name


@dataclass(slots=True)
class Pod:
    """One pod as it stands. `state` is one of the contract's words."""

    wish: Wish
    state: str = "repairing"
    backend: str | None = None
    detail: str = ""
    enrolled: bool = False
    announced: bool = False  # by the plugin, before anything ran in it
    failures: int = 0
    pause_s: float = FIRST_PAUSE_S
    settle_s: float = SETTLE_S
    whole_s: float = 0.0  # when it was last seen as it should be, on the monotonic clock
    told_s: float | None = None  # when the kernel first told of a change since
    changes: News = field(init=False)  # of rules and routes
    gate: Gate = field(init=False)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    busy: asyncio.Lock = field(default_factory=asyncio.Lock)
    task: asyncio.Task[None] | None = None
    # Its sandbox and the path that leads to its namespace, and which one that is.
    space: tuple[tuple[str, str | None], tuple[int, int]] | None = None
    published: Mapping[str, object] | None = None  # its last row
    asked: Mapping[str, object] | None = None  # the last settings that were wished

    def __post_init__(self) -> None:
        self.asked = self.wish.settings
        self.changes = News(self._changed)
        self.gate = Gate(self.wake.set)

    def turn_to(self, wish: Wish) -> None:
        """Take another wish; what differs because of that is no drift."""
        if wish.sandbox_id != self.wish.sandbox_id:
            self.enrolled = self.announced = False
        if wish.settings is not None:
            self.enrolled = self.enrolled and wish.settings == self.asked
            self.asked = wish.settings
        self.wish, self.pause_s, self.failures = wish, FIRST_PAUSE_S, 0
        self.wake.set()

    def recognise(self, fd: int, wish: Wish) -> None:
        """Take the namespace in which a sandbox is found first for its own, for good.

        A path through a process leads elsewhere once its number is another's.

        Raises: AgentError if it is another one now.
        """
        found = os.fstat(fd)
        sandbox, here = (wish.sandbox_id, wish.netns), (found.st_dev, found.st_ino)
        if self.space is None or self.space[0] != sandbox:
            self.space = sandbox, here
        if self.space[1] != here:
            raise AgentError(f"{wish.netns} leads to another network namespace than its own now")

    def asks_for(self, wish: Wish) -> bool:
        """Whether what was done by a wish still is what is wished."""
        return self.asked == wish.settings and self.wish.sandbox_id == wish.sandbox_id

    def _changed(self) -> None:
        """Look soon; where the worker is gone, which ends the news, that look asks for it anew."""
        self.told_s = self.told_s or time.monotonic()
        self.wake.set()

    def deaf(self) -> None:
        """Hear no more news. Without that, a namespace would be kept by whoever watches it."""
        self.changes.close()
        self.gate.close()

    def row(self) -> dict[str, object]:
        """Return the pod as the contract's JSON has it."""
        return {
            "namespace": self.wish.namespace,
            "name": self.wish.name,
            "uid": self.wish.uid,
            "netns": self.wish.netns,
            "captured": self.wish.settings is not None,
            "backend": self.backend,
            "reason": self.wish.reason,
            "text": self.detail or self.wish.text,
            "state": self.state,
            "source": self.wish.source,
        }


def opened(path: str) -> int:
    """Return a descriptor of a pod's namespace. Raises: AgentError."""
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        said = f"its network namespace {path} cannot be opened: {error.strerror}"
        raise AgentError(said) from error


def gap(since_s: float, told: bool) -> str:
    """Say for how long connections could get past the proxy: what is not known is not hidden."""
    open_s = time.monotonic() - since_s
    return f"connections could get past the proxy for {'' if told else 'at most '}{open_s:.2f} s"
