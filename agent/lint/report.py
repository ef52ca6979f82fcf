"""What is found in manifests: a verdict for each document, and problems with their lines."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    """ERROR: Kubernetes or the agent refuses it. WARNING: it will not do what was meant.

    INFO: it may be right, and somebody should know it.
    """

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One mistake; `line` counts from 1 in `file`, `path` leads there from the document's top."""

    severity: Severity
    file: str
    line: int
    path: str
    message: str
    hint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One document and what is decided about its pods; `captured` is None where nothing can be.

    `reason` is a word for scripts, `text` the sentence behind it. `settings` are there if and only
    if the pods are captured.
    """

    file: str
    line: int
    kind: str
    namespace: str
    name: str
    captured: bool | None
    reason: str
    text: str
    settings: Mapping[str, object] | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that was found, in the order of the files."""

    documents: tuple[Verdict, ...]
    problems: tuple[Problem, ...]

    def count(self, severity: Severity) -> int:
        return sum(problem.severity is severity for problem in self.problems)
