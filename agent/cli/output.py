"""How commands speak: people get lines, machines one JSON document, errors go to stderr."""

import json
import os
import sys
from collections.abc import Iterable

from agent.model.errors import AgentError, InvalidSettings

GREEN, RED, YELLOW, BOLD = "32", "31", "33", "1"


def paint(text: str, colour: str) -> str:
    """Colour a text where a person watches."""
    if not sys.stdout.isatty() or "NO_COLOR" in os.environ:
        return text
    return f"\033[{colour}m{text}\033[0m"


def print_json(document: object) -> None:
    json.dump(document, sys.stdout, indent=2)
    sys.stdout.write("\n")


def warn(sentences: Iterable[str]) -> None:
    for sentence in sentences:
        print(f"warning: {sentence}", file=sys.stderr)


def fail(error: AgentError) -> int:
    """Say what is wrong, one sentence a line, and return the exit code."""
    problems = error.problems if isinstance(error, InvalidSettings) else (str(error),)
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return error.exit_code
