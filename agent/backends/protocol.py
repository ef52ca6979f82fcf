"""What every way to program a namespace offers; the floors above do not know which it is."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from agent.backends.session import Session
from agent.model.ruleset import Rulesets


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


class Backend(Protocol):
    """Reads and writes the rules of one flavour in one namespace."""

    @property
    def name(self) -> str: ...

    def missing(self) -> str | None:
        """Return why this node cannot use the backend, as a sentence, or None if it can."""

    def read(self, session: Session) -> Rulesets:
        """Return what is loaded. Leaves no trace.

        Raises: StateUnreadable if anything is there that cannot be read.
        """

    def steps(self, session: Session, have: Rulesets, want: Rulesets) -> tuple[Step, ...]:
        """Return the writes that turn `have` into `want`; none if they are the same."""
