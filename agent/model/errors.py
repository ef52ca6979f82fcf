"""Every error that is raised on purpose, and the exit code that the command line gives it.

Each leaf answers one question for the caller: was anything touched? Codes are those of the
contract: 1 there are findings, 2 bad input, 3 the environment lacks something, 4 the kernel refused
part way and all was rolled back.
"""

from typing import ClassVar


class AgentError(Exception):
    """Root of every error raised on purpose; anything else is a bug."""

    exit_code: ClassVar[int] = 3


class InvalidSettings(AgentError):
    """The input is wrong; nothing was touched. `problems` has a sentence for every mistake."""

    exit_code = 2

    def __init__(self, problems: tuple[str, ...]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


class EnvironmentLacks(AgentError):
    """Root, a tool, a kernel feature or the target is missing; nothing was touched."""


class NamespaceRefused(EnvironmentLacks):
    """The target is not a network namespace, is gone, or is one that must not be changed."""


class StateUnreadable(EnvironmentLacks):
    """What is loaded cannot be read, so nothing may be concluded from it and nothing is written."""


class ConnectionsAtRisk(EnvironmentLacks):
    """A change would reset connections that are open, and nothing can spare them."""


class Declined(AgentError):
    """Somebody was asked and said no: what was found is still there, and nothing was touched."""

    exit_code = 1


class KernelRejected(AgentError):
    """The kernel or its tool refused a write. That write changed nothing.

    `script` is the exact input, kept because it is the best diagnostic there is.
    """

    exit_code = 4

    def __init__(self, message: str, *, script: str = "") -> None:
        super().__init__(message)
        self.script = script


class RolledBack(AgentError):
    """A change failed part way; the namespace was put back as it was before."""

    exit_code = 4


class RollbackFailed(AgentError):
    """A change failed and undoing it failed too; the guard was left, so that nothing escapes."""

    exit_code = 4
