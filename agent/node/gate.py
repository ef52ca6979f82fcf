"""One pod's gate as the reconciler keeps it: open until the proxy is heard to listen.

The worker says how it stands and tells a pipe of the first listener. From then on the pod is asked
for with its gate closed, in whose record the worker then finds it.
"""

from collections.abc import Awaitable, Callable, Mapping

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
    """For one event loop. `wake` is called when there is something to do."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._news = News(wake)
        self._stands = ""
        self._shut = ""  # the sandbox whose gate was closed for good
        self._passing: tuple[str, tuple[str, ...]] = ("", ())  # of which sandbox, and which cgroups

    def settings(self, wished: str, sandbox: str) -> dict[str, object]:
        """Return what to ask for where this gate is wished."""
        if wished == CLOSED or self._news.told_of(sandbox):
            return {"gate": CLOSED}
        return {"gate": wished, "init_cgroups": list(self._cgroups(sandbox))}

    def _cgroups(self, sandbox: str) -> tuple[str, ...]:
        about, cgroups = self._passing
        return cgroups if about == sandbox else ()

    def let_pass(self, sandbox: str, cgroups: tuple[str, ...]) -> bool:
        """Take note of whom a gate of that kind lets pass; tell whether that is news."""
        news = self._cgroups(sandbox) != cgroups
        self._passing = (sandbox, cgroups)
        return news

    def matters(self, wished: str, sandbox: str) -> bool:
        """Whether anything changes once the proxy listens."""
        waits = wished == OPEN or (wished == LISTENER and bool(self._cgroups(sandbox)))
        return waits and self._shut != sandbox and not self._news.told_of(sandbox)

    def is_followed(self, sandbox: str) -> bool:
        return self._news.are_about(sandbox)

    async def follow(self, ask: Ask, sandbox: str) -> None:
        """Find out how it stands, and hear of the proxy from now on unless it is closed."""
        answer = await self._news.follow(ask, sandbox)
        self._stands = str(answer["gate"])
        if self._stands == CLOSED:
            self.shut(sandbox)

    @property
    def is_open(self) -> bool:
        """Whether nothing is captured, and nothing should be yet."""
        return self._stands == OPEN

    def falls(self, sandbox: str) -> bool:
        """Whether the proxy has listened, and what is loaded is yet to be closed."""
        return self._news.told_of(sandbox) and self._shut != sandbox

    def shut(self, sandbox: str) -> None:
        """Take note that it is closed for good."""
        self._shut, self._stands = sandbox, CLOSED
        self._news.close()

    def text(self, wished: str, sandbox: str) -> str:
        """Say who passes, or nothing."""
        some = self.matters(wished, sandbox) and self._stands in (ARMED, OPEN)
        return SAID[wished] if some else ""

    def close(self) -> None:
        """Hear no more news."""
        self._news.close()
