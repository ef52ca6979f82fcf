"""One thing that is to be known: what was seen, what it means, and the command that mends it."""

from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    """How bad it is; only `critical` breaks or opens something."""

    OK = "ok"
    INFO = "info"
    WARNING = "warning"
    CRITICAL = "critical"


WORST_FIRST = (Severity.CRITICAL, Severity.WARNING, Severity.INFO, Severity.OK)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """`kind` is a stable word for machines. `fix` is a command, or empty where there is none."""

    kind: str
    severity: Severity
    seen: str
    means: str = ""
    fix: str = ""
