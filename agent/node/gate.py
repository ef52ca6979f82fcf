"""One pod's gate as the reconciler keeps it: open until the proxy is heard to listen.

The worker says how it stands and tells a pipe of the first listener. From then on the pod is asked
for with its gate closed, in whose record the worker then finds it.
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import Self

from agent.node.news import News

CLOSED, ARMED, OPEN = "closed", "armed", "open"
LISTENER = "listener"

SAID = {
    OPEN: "its traffic passes until its proxy listens for the first time (gate: open)",
    LISTENER: "its init containers pass until its proxy listens for the first time "
    "(gate: listener)",
}

Ask = Callable[[int], Awaitable[Mapping[str, object]]]


class Gate:
    """For one event loop. `wake` is called when there is something to do.

    What is known of one sandbox counts for no other.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._news = News(wake)
        self._about = ""
        self._stands = ""
        self._shut = False  # found to be closed for good
        self._settled = False  # and so loaded
        self._told: tuple[str, ...] | None = None  # whom the gate `listener` is to let pass
        self._passing: tuple[str, ...] = ()
        self._loaded: tuple[str, ...] | None = None
        self._asked: tuple[str, tuple[str, ...]] = ("", ())

    def of(self, sandbox: str) -> Self:
        """Go by this sandbox from now on."""
        if sandbox != self._about:
            self._about, self._stands = sandbox, ""
            self._shut = self._settled = False
            self._told, self._passing, self._loaded = None, (), None
        return self

    # --- who passes -------------------------------------------------------------------------------

    def let_pass(self, cgroups: tuple[str, ...]) -> None:
        """Take note of the cgroups whose processes pass the gate `listener`."""
        if cgroups != self._told:
            self._told = self._passing = cgroups
            if not cgroups == self._loaded == self._asked[1]:  # else that is in the way of the next
                self._wake()

    def refuse(self) -> tuple[str, ...]:
        """Let nobody pass of those whom `settings` named last, and return them."""
        asked = self._asked[1]
        if self._passing == asked:  # else others are to pass by now, or nobody is
            self._passing = ()
        return asked

    def settings(self, wished: str) -> Mapping[str, object]:
        """Return what to ask for where this gate is wished."""
        closed = wished == CLOSED or self._shut or self._listened
        self._asked = (CLOSED, ()) if closed else (wished, self._passing)
        return dict(zip(("gate", "init_cgroups"), self._asked, strict=True))

    def due(self, wished: str) -> bool:
        """Whether what is loaded is not what it should be by what was heard since."""
        if self._shut or self._listened:
            return wished != CLOSED and not self._settled
        told = wished == LISTENER and self._told is not None
        return told and self._passing != self._loaded

    def loaded(self) -> None:
        """Take note that what `settings` returned last is loaded."""
        gate, self._loaded = self._asked
        self._settled = gate == CLOSED
        if self._listened:
            self.shut()

    # --- the proxy --------------------------------------------------------------------------------

    @property
    def _listened(self) -> bool:
        return self._news.told_of(self._about)

    def matters(self, wished: str) -> bool:
        """Whether anything changes once the proxy listens."""
        waits = wished == OPEN or (wished == LISTENER and bool(self._passing))
        return waits and not self._shut and not self._listened

    @property
    def is_followed(self) -> bool:
        return self._news.are_about(self._about)

    async def follow(self, ask: Ask) -> None:
        """Find out how it stands, and hear of the proxy from now on unless it is closed."""
        answer = await self._news.follow(ask, self._about)
        self._stands = str(answer["gate"])
        if self._stands == CLOSED:
            self.shut()

    @property
    def is_open(self) -> bool:
        """Whether nothing is captured, and nothing should be yet."""
        return self._stands == OPEN

    def shut(self) -> None:
        """Take note that it is closed for good."""
        self._shut, self._stands, self._passing = True, CLOSED, ()
        self._news.close()

    def text(self, wished: str) -> str:
        """Say who passes, or nothing."""
        some = self.matters(wished) and self._stands in (ARMED, OPEN)
        return SAID[wished] if some else ""

    def close(self) -> None:
        """Hear no more news."""
        self._news.close()
