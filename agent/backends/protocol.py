"""What every way to program a namespace offers; the floors above do not know which it is."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from agent.backends.session import Session
from agent.model.settings import Settings

Loaded = TypeVar("Loaded")
"""What a backend loads: rules by family, or an enrolment."""


@dataclass(frozen=True, slots=True)
class Step:
    """One write: what it is, in words for a person, and the call that makes it.

    An `atomic` one is made as a whole or not at all, whatever happens meanwhile.

    `run` raises KernelRejected or EnvironmentLacks if it cannot; it may then have done a part,
    which the caller finds out by reading, and undoes.
    """

    what: str
    run: Callable[[], None]
    backend: str
    atomic: bool = True


class Backend(Protocol[Loaded]):
    """Reads and writes what one kind of capture consists of in one namespace."""

    @property
    def name(self) -> str: ...

    def missing(self) -> str | None:
        """Return why this node cannot use the backend, as a sentence, or None if it can."""

    def refusals(self, settings: Settings) -> tuple[str, ...]:
        """Return a sentence for every setting that the backend cannot honour."""

    def read(self, session: Session) -> Loaded:
        """Return what is loaded. Leaves no trace.

        Raises: StateUnreadable if anything is there that cannot be read.
        """

    def steps(self, session: Session, have: Loaded, want: Loaded) -> tuple[Step, ...]:
        """Return the writes that turn `have` into `want`; none if they are the same."""
