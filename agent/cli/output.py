"""How commands speak: people get lines, machines one JSON document, errors go to stderr."""

import argparse
import contextlib
import io
import json
import os
import re
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TextIO

from agent.model.errors import AgentError, InvalidSettings

UNEXPECTED = 70  # EX_SOFTWARE of sysexits.h

GREEN, RED, YELLOW, BOLD = "32", "31", "33", "1"
# Our own colours, and what could steer a terminal: control characters but for the tabulator and the
# line feed, and what Unicode turns the direction of writing with.
STEERING = re.compile(
    "(\033\\[(?:0|1|3[123])m)|[\0-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]"
)


def paint(text: str, colour: str) -> str:
    """Colour a text where a person watches."""
    if not sys.stdout.isatty() or "NO_COLOR" in os.environ:
        return text
    return f"\033[{colour}m{text}\033[0m"


def harmless(text: str) -> str:
    """Return a text of others as a terminal may have it: what would steer it is spelled out."""
    return STEERING.sub(lambda found: found[1] or ascii(found[0])[1:-1], text)


class Unwritable(AgentError):
    """What was printed went nowhere, such as to a full disk; what was done is done all the same."""


class _Stream:
    """A stream that is the one given, but for what it does with what is written."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Output(_Stream):
    """Standard output, which steers no terminal, and says so when it cannot be written."""

    def __init__(self, stream: TextIO, *, late: bool) -> None:
        super().__init__(stream)
        self._watched = stream.isatty()
        self._late = late
        self._lost: Unwritable | None = None

    def write(self, text: str) -> int:
        with self._told():
            self._stream.write(harmless(text) if self._watched else text)
        return len(text)

    def flush(self) -> None:
        with self._told():
            self._stream.flush()

    def end(self) -> None:
        """Flush, and raise what was kept for the end."""
        self.flush()
        if self._lost is not None:
            raise self._lost

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            raise
        except OSError as error:
            _discard(self._stream)
            lost = Unwritable(f"cannot write the output: {error.strerror}")
            if not self._late:
                raise lost from error
            self._lost = lost


class _Errors(_Stream):
    """Standard error: whether anybody can read it changes nothing."""

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
        except OSError:
            _discard(self._stream)
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            _discard(self._stream)


@contextlib.contextmanager
def speaking() -> Iterator[None]:
    """Have three standard streams in here, whichever of them were closed before the start.

    Else a file of ours would take the number of one that is closed, and what is said end up there.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest that is free
    if sys.stdin is None:
        sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False))
    if sys.stdout is None:
        sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False))
    errors = sys.stderr or io.StringIO()
    with contextlib.redirect_stderr(_Errors(errors)):
        yield


def watched() -> bool:
    """Whether a person sees what goes to stderr while it goes on."""
    return sys.stderr.isatty() and sys.stdout.isatty()


def add_output_option(parser: argparse.ArgumentParser, *flags: str) -> None:
    parser.add_argument(
        *flags,
        "--output",
        choices=("table", "json"),
        default="table",
        help="lines for people or one JSON document (table)",
    )


def print_json(document: object) -> None:
    json.dump(document, sys.stdout, indent=2)
    sys.stdout.write("\n")


@contextlib.contextmanager
def printing(*, late: bool = False) -> Iterator[None]:
    """Print to a reader who may leave early (`| head`): that changes no exit code.

    `late` is for what has more to do than to print: that it cannot be told is said at the end.

    All that is written in here is flushed, because at the end of the process it would be too late
    to do anything about a reader who has gone.

    Much of it was written by others, such as comments of rules: it cannot steer a terminal, and it
    may hold bytes that are no text.
    """
    out = sys.stdout
    if isinstance(out, io.TextIOWrapper):
        out.reconfigure(errors="backslashreplace")
    try:
        with contextlib.redirect_stdout(_Output(out, late=late)) as printed:
            try:
                yield
            except SystemExit:  # of --help and --version, which print, too
                printed.end()
                raise
            printed.end()
    except BrokenPipeError:
        _discard(sys.stdout)


def _discard(stream: TextIO) -> None:
    """Have nothing more come of what is written to a stream, or has been and is on its way."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


def count(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural where it has to be."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print columns as wide as their widest cell."""
    lines = [list(head), *(list(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    for line in lines:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        print("  ".join(cells).rstrip())


def say(sentence: str) -> None:
    """Say how it goes, beside what is printed."""
    print(harmless(sentence), file=sys.stderr, flush=True)


def warn(sentences: Iterable[str]) -> None:
    for sentence in sentences:
        print(f"warning: {harmless(sentence)}", file=sys.stderr)


def fail(error: AgentError) -> int:
    """Say what is wrong, one sentence a line, and return the exit code."""
    problems = error.problems if isinstance(error, InvalidSettings) else (str(error),)
    for problem in problems:
        print(f"error: {harmless(problem)}", file=sys.stderr)
    return error.exit_code


def fail_unexpectedly(error: Exception, *, verbose: bool) -> int:
    """Say that we are at fault and what helps to find out why, and return the exit code."""
    if verbose:
        traceback.print_exception(error)
    what = " ".join(f"{type(error).__name__}: {error}".split())
    hint = "please report it" if verbose else "please report it with what -v shows"
    print(f"error: this is a bug in intercept-agent ({what}); {hint}", file=sys.stderr)
    return UNEXPECTED
