"""Capture a namespace: all of it, in both families, or nothing. Repeating it changes nothing."""

import argparse
import sys
from dataclasses import replace

from agent.capture.apply import Result, apply
from agent.capture.inputs import Target, settings_for
from agent.cli import output
from agent.cli.options import WITHOUT, add_capture_options, raw_settings
from agent.cli.target import add_netns_option, opened
from agent.model.settings import widened
from agent.model.state import BACKENDS, EBPF

EXAMPLES = """examples:
  intercept-agent apply --netns web                    capture everything, in and out
  intercept-agent apply --netns pid:4711 -i 10.0.0.0/8 -b '*' -d 22
  intercept-agent apply --netns self -p 15001 -z 15006 -u 1337 -m REDIRECT -i '*' -b '*'
  intercept-agent apply --netns web --dry-run          show the writes, make none
"""
VERBOSE = "list the writes on stderr"


def add_options(parser: argparse.ArgumentParser) -> None:
    add_netns_option(parser)
    add_backend_option(parser)
    parser.add_argument("-n", "--dry-run", action="store_true", help="list the writes, make none")
    output.add_output_option(parser)
    add_capture_options(parser, without=WITHOUT)


def add_backend_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--backend",
        choices=("auto", *BACKENDS, EBPF),
        default="auto",
        help="auto keeps what the namespace uses, else takes the first of these that the node "
        "can do, but for ebpf, which is taken only where it is named (auto)",
    )


def run(arguments: argparse.Namespace) -> int:
    raw = raw_settings(arguments)
    settings_for(raw, None)  # bad input is refused before anything is opened
    with opened(arguments.netns) as target:
        settings = settings_for(raw, target)
        done = apply(target.netns, settings, backend=arguments.backend, dry_run=arguments.dry_run)
    done = replace(done, warnings=(*widened(raw), *done.warnings))
    word = "captured" if settings.captures else "set up to capture nothing"
    report(target, done, arguments, done_word=word, already=f"already {word} like this")
    return 0


def report(
    target: Target, done: Result, arguments: argparse.Namespace, *, done_word: str, already: str
) -> None:
    """Print what a run did."""
    if arguments.output == "json":
        output.print_json(to_json(target, done))
        return
    output.warn(done.warnings)
    if not done.changed:
        print(f"{target.name}: {already}")
        return
    if arguments.dry_run:
        print(f"{target.name}: nothing was written; these writes would be made:")
        for step in done.steps:
            print(f"  {step}")
        return
    if arguments.verbose:
        for step in done.steps:
            print(f"  {step}", file=sys.stderr)
    by = f" by {done.backend}" if done.backend else ""
    what = output.paint(done_word, output.GREEN)
    rules = f", {done.rules} rules" if done.rules else ""
    print(f"{target.name}: {what}{by}{rules}, {done.duration_ms:.0f} ms")
    if done.spared:
        print(f"  {done.spared} connections that were open go on past the proxy until they end")


def to_json(target: Target, done: Result) -> dict[str, object]:
    netns = target.netns
    return {
        "netns": {"path": netns.path, "dev": netns.id.dev, "ino": netns.id.ino},
        "backend": done.backend,
        "changed": done.changed,
        "rules": done.rules,
        "duration_ms": done.duration_ms,
        "warnings": list(done.warnings),
        "spared": done.spared,
        "steps": list(done.steps),
    }
