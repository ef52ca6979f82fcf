"""Capture a namespace: all of it, in both families, or nothing. Repeating it changes nothing."""

import argparse
import sys
from dataclasses import asdict, replace

from agent.capture.apply import Result, apply, remove
from agent.capture.inputs import Target, settings_for
from agent.capture.probing.probe import ProbeResult, passed, probe
from agent.cli import output
from agent.cli.istio_flags import add_istio_flags, asked
from agent.cli.options import WITHOUT, add_capture_options, raw_settings
from agent.cli.probes import print_failures, print_probes
from agent.cli.target import add_netns_option, opened
from agent.model.settings import widened
from agent.model.state import BACKENDS, EBPF

EXAMPLES = """examples:
  intercept-agent apply --netns web                    capture everything, in and out
  intercept-agent apply --netns pid:4711 -i 10.0.0.0/8 -b '*' -d 22
  intercept-agent apply --netns self -p 15001 -z 15006 -u 1337 -m REDIRECT -i '*' -b '*'
  intercept-agent apply --netns web --dry-run          show the writes, make none

exit code: 0 done, or already so; 1 --run-validation: a probe failed; 2 bad usage, 3 something is
missing: nothing was touched; 4 the kernel refused: everything is as it was
"""
VERBOSE = "list the writes on stderr"
REMOVED = ("capture removed", "nothing to remove")


def add_options(parser: argparse.ArgumentParser) -> None:
    add_netns_option(parser)
    add_backend_option(parser)
    output.add_output_option(parser)
    add_capture_options(parser, without=WITHOUT)
    add_istio_flags(parser, writes=True)


def add_backend_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--backend",
        choices=("auto", *BACKENDS, EBPF),
        default="auto",
        help="auto keeps what the namespace uses, else takes the first of these that the node "
        "can do, but for ebpf, which is taken only where it is named (auto)",
    )


def run(arguments: argparse.Namespace) -> int:
    wish = asked(arguments)
    raw = raw_settings(arguments)
    settings_for(raw, None)  # bad input is refused before anything is opened
    probes: tuple[ProbeResult, ...] = ()
    with opened(arguments.netns) as target:
        settings = settings_for(raw, target)
        if wish.cleanup_only:
            done = remove(target.netns, dry_run=wish.dry_run)
        else:
            done = apply(target.netns, settings, backend=wish.backend, dry_run=wish.dry_run)
            done = replace(done, warnings=(*widened(raw), *done.warnings))
        if wish.run_validation:
            probes = probe(target.netns, settings)
    word = "captured" if settings.captures else "set up to capture nothing"
    words = REMOVED if wish.cleanup_only else (word, f"already {word} like this")
    report(target, done, arguments, words, dry_run=wish.dry_run, probes=probes)
    return 0 if passed(probes) else 1


def report(
    target: Target,
    done: Result,
    arguments: argparse.Namespace,
    words: tuple[str, str],
    *,
    dry_run: bool,
    probes: tuple[ProbeResult, ...] = (),
) -> None:
    """Print what a run did; `words` are for what is done and for what was so before."""
    if arguments.output == "json":
        document = to_json(target, done)
        if probes:
            document["probes"] = [asdict(result) for result in probes]
        output.print_json(document)
        return
    output.warn(done.warnings)
    _print(target, done, arguments, words, dry_run=dry_run)
    print_probes(probes)
    print_failures(target.name, probes)


def _print(
    target: Target,
    done: Result,
    arguments: argparse.Namespace,
    words: tuple[str, str],
    *,
    dry_run: bool,
) -> None:
    done_word, already = words
    if not done.changed:
        print(f"{target.name}: {already}")
        return
    if dry_run:
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
