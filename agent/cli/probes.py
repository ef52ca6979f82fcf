"""How the outcome of probes is shown."""

from agent.capture.probing.probe import Outcome, ProbeResult
from agent.cli import output


def print_probes(results: tuple[ProbeResult, ...]) -> None:
    for result in results:
        colour = output.RED if result.outcome is Outcome.FAILED else output.GREEN
        print(f"{output.paint(f'{result.outcome.value:<8}', colour)}{result.name}: {result.detail}")


def print_failures(name: str, results: tuple[ProbeResult, ...]) -> None:
    """Print how many of the probes of a namespace failed, if any."""
    failed = sum(result.outcome is Outcome.FAILED for result in results)
    if failed:
        lost = output.paint(f"{output.count(failed, 'probe')} failed", output.RED)
        print(f"{name}: {lost}")
