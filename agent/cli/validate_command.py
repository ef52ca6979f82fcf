"""Lint manifests: which of their pods are captured, how, and every mistake with its line."""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from agent.cli import output
from agent.formats import documents
from agent.lint.report import Problem, Report, Severity, Verdict
from agent.lint.validate import INVALID, NO_POD, validate
from agent.model.errors import InvalidSettings
from agent.model.pod import Policy
from agent.model.values import MODES, SIDECAR

EXAMPLES = """examples:
  intercept-agent validate -f web.yaml
  intercept-agent validate -f deploy/ -R --strict          a folder, and what lies in it
  intercept-agent validate --mode ambient -f shop.yaml     a Namespace with its pods
  helm template . | intercept-agent validate -f - -o json
  intercept-agent validate -n shop -f namespace.yaml -f web.yaml

exit code: 0 no errors, 1 errors, or warnings with --strict
"""
VERBOSE = "show the settings of every captured pod"
SUFFIXES = (".yaml", ".yml", ".json")
STDIN = "-"
COLOURS = {Severity.ERROR: output.RED, Severity.WARNING: output.YELLOW, Severity.INFO: output.BOLD}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-f",
        "--filename",
        metavar="FILE",
        dest="files",
        nargs="+",
        action="extend",
        required=True,
        help="a file of YAML or JSON, a folder of them, or - for standard input; may be repeated",
    )
    parser.add_argument(
        "-R", "--recursive", action="store_true", help="look into the folders in a folder, too"
    )
    parser.add_argument(
        "-n",
        "--namespace",
        metavar="NAMESPACE",
        default="default",
        help="the namespace of documents that name none (default)",
    )
    parser.add_argument(
        "--mode",
        choices=MODES,
        default=SIDECAR,
        help="ambient: for an agent that captures the pods of the node's own proxy, too (sidecar)",
    )
    parser.add_argument("--strict", action="store_true", help="end with 1 for warnings, too")
    output.add_output_option(parser, "-o")


def run(arguments: argparse.Namespace) -> int:
    files = list(_files(arguments.files, recursive=arguments.recursive))
    policy = Policy(mode=arguments.mode)
    report = validate(files, namespace=arguments.namespace, policy=policy)
    if arguments.output == "json":
        output.print_json(to_json(report))
    else:
        _print(report, verbose=arguments.verbose)
    failed = report.count(Severity.ERROR) or (arguments.strict and report.count(Severity.WARNING))
    return 1 if failed else 0


def _files(names: list[str], *, recursive: bool) -> Iterator[tuple[str, bytes]]:
    """Yield the name and the bytes of every file, each once.

    Raises: InvalidSettings for what cannot be read.
    """
    seen = set()
    for name in names:
        for file in _in_folder(name, recursive=recursive):
            if file in seen:
                continue
            seen.add(file)
            if file == STDIN:
                yield "<stdin>", _standard_input()
            else:
                yield file, documents.contents(file)


def _in_folder(name: str, *, recursive: bool) -> list[str]:
    if name == STDIN:
        return [name]
    if name.startswith(("http://", "https://")):
        raise InvalidSettings((f"{name}: nothing is fetched; pipe it into `validate -f -`",))
    try:
        if not Path(name).is_dir():
            return [name]
        found = Path(name).rglob("*") if recursive else Path(name).iterdir()
        files = sorted(str(file) for file in found if file.suffix in SUFFIXES and file.is_file())
    except (OSError, ValueError) as error:
        said = error.strerror if isinstance(error, OSError) else error
        raise InvalidSettings((f"cannot read {documents.shown_path(name)}: {said}",)) from error
    if not files:
        deeper = "" if recursive else ", or -R to look deeper"
        endings = ", ".join(SUFFIXES)
        raise InvalidSettings((f"{name}: no file in it ends with {endings}; name one{deeper}",))
    return files


def _standard_input() -> bytes:
    data = sys.stdin.buffer.read(documents.MAX_BYTES + 1)
    if len(data) > documents.MAX_BYTES:
        raise InvalidSettings((f"standard input is larger than {documents.MAX_BYTES} bytes",))
    return data


# --- output --------------------------------------------------------------------------------------


def to_json(report: Report) -> dict[str, object]:
    return {
        "documents": [asdict(document) for document in report.documents],
        "problems": [asdict(problem) for problem in report.problems],
        "errors": report.count(Severity.ERROR),
        "warnings": report.count(Severity.WARNING),
    }


def _print(report: Report, *, verbose: bool) -> None:
    """Print each document's verdict and then the problems, as compilers do: FILE:LINE first."""
    pods = [document for document in report.documents if document.reason != NO_POD]
    for document in pods:
        print(_verdict(document))
        if verbose and document.settings is not None:
            for key, value in document.settings.items():
                print(f"    {key}: {json.dumps(value)}")
    for problem in report.problems:
        print(_problem(problem))
    others = len(report.documents) - len(pods)
    print(
        f"{output.count(len(pods), 'document')} with pods, {others} without: "
        f"{output.count(report.count(Severity.ERROR), 'error')}, "
        f"{output.count(report.count(Severity.WARNING), 'warning')}"
    )


def _verdict(document: Verdict) -> str:
    where = f"{document.namespace}/{document.name}" if document.namespace else document.name
    word = output.paint("captured", output.GREEN) if document.captured else "not captured"
    if document.reason == INVALID:
        word = output.paint("invalid", output.RED)
    return (
        f"{document.file}:{document.line}: {_line(document.kind)} {_line(where)}: {word}: "
        f"{document.text}"
    )


def _problem(problem: Problem) -> str:
    word = output.paint(problem.severity.value, COLOURS[problem.severity])
    hint = f"; {problem.hint}" if problem.hint else ""
    place = f" [{problem.path}]" if problem.path else ""
    return f"{problem.file}:{problem.line}: {word}: {problem.message}{hint}{place}"


def _line(text: str) -> str:
    """Return text of a manifest so that it stays on its line."""
    return text if text.isprintable() else repr(text)
