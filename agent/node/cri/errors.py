"""Why a runtime could not be asked. Each answers: wait for it, give it up, or try again?"""

from agent.model.errors import EnvironmentLacks


class CriError(EnvironmentLacks):
    """The runtime did not answer as hoped. Nothing may be concluded about pods."""


class RuntimeAbsent(CriError):
    """Nobody listens: no runtime here, not yet, or it is just being restarted. Wait for it."""


class CriUnsupported(CriError):
    """Somebody answers who does not speak this part of CRI v1. Asking again does not help."""


class CriBroken(CriError):
    """Too slow, or what came back is no CRI answer. The connection is made anew."""


class CriRefused(CriError):
    """The runtime answered one request with an error of its own; the connection is fine."""


class CriMissing(CriRefused):
    """What was asked about is not there (any more). Normal: pods end at any time."""
