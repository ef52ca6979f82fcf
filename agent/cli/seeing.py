"""What reports share: parts that are read each by itself, and findings for people."""

from collections.abc import Callable, Iterable
from typing import TypeVar

from agent.cli import output
from agent.explain.finding import Finding, Severity
from agent.explain.pod.page import plain
from agent.model.errors import AgentError

T = TypeVar("T")

COLOURS = {
    Severity.CRITICAL: output.RED,
    Severity.WARNING: output.YELLOW,
    Severity.INFO: output.BOLD,
    Severity.OK: output.GREEN,
}
WIDTH = 9


class Seen:
    """Reads one part after the other; one that cannot be read hides no other.

    `unseen` has a sentence for each that could not be read.
    """

    def __init__(self) -> None:
        self.unseen: list[str] = []

    def part(self, what: str, read: Callable[[], T]) -> T | None:
        """Return a part, or None with the reason in `unseen`."""
        try:
            return read()
        except (AgentError, OSError) as error:
            self.unseen.append(f"{what}: {error}")
            return None


def print_findings(findings: Iterable[Finding], unseen: Iterable[str]) -> None:
    """Print each finding with what it means and the command that mends it, then what is unknown."""
    for finding in findings:
        word = output.paint(f"{finding.severity.value:<{WIDTH}}", COLOURS[finding.severity])
        print(f"{word}{finding.kind}: {plain(finding.seen)}")
        if finding.means:
            print(f"{'':<{WIDTH}}{plain(finding.means)}")
        if finding.fix:
            print(f"{'':<{WIDTH}}-> {plain(finding.fix)}")
    for sentence in unseen:
        print(f"{'unseen':<{WIDTH}}{plain(sentence)}")
