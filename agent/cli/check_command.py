"""Tell whether a namespace is captured as it should be: every rule, its order, and the routes."""

import argparse
import sys
from dataclasses import asdict, replace

from agent.capture import record
from agent.capture.check import Report, check
from agent.capture.inputs import Target, settings_for
from agent.capture.probing.probe import ProbeResult, passed, probe
from agent.cli import output
from agent.cli.advice import apply_command
from agent.cli.apply_command import add_backend_option
from agent.cli.istio_flags import add_istio_flags, asked
from agent.cli.options import add_capture_options, given_settings, guarded, whole
from agent.cli.probes import print_failures, print_probes
from agent.cli.target import add_netns_option, opened
from agent.model.settings import dump, widened
from agent.model.state import EBPF
from agent.model.values import SIDECAR

EXAMPLES = """examples:
  intercept-agent check --netns web                    against what was applied there
  intercept-agent check --netns web -i '*' -b 80       against these settings
  intercept-agent check --netns web --probe            and prove it with real connections

exit code: 0 in sync, 1 differences or failed probes
"""
VERBOSE = "say on stderr what it is compared with"
WITHOUT = (
    "Without any of these the namespace is compared with what was applied there; where nothing "
    "was, with what a whole captured pod has."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    add_netns_option(parser)
    add_backend_option(parser)
    parser.add_argument("--probe", action="store_true", help="prove it with real connections")
    output.add_output_option(parser)
    add_capture_options(parser, without=WITHOUT)
    add_istio_flags(parser, writes=False)


def run(arguments: argparse.Namespace) -> int:
    backend = asked(arguments).backend
    raw = given_settings(arguments)
    if raw is not None:
        settings_for(raw, None)
    with opened(arguments.netns) as target:
        if raw is None:
            raw, origin = _applied(target, arguments.mode)
        else:
            raw, origin = record.as_applied(target.netns, raw), "the settings given here"
        raw = guarded(raw, arguments)
        settings = settings_for(raw, target)
        if arguments.verbose:
            print(f"{target.name}: compared with {origin}: {dump(settings)}", file=sys.stderr)
        report = check(target.netns, settings, backend=backend)
        report = replace(report, warnings=(*widened(raw), *report.warnings))
        probes = probe(target.netns, settings) if arguments.probe else ()
        backend = EBPF if report.backend == EBPF else backend
        with output.printing():
            _print(target, report, probes, arguments, apply_command(target.name, raw, backend))
    return 0 if report.in_sync and passed(probes) else 1


def _applied(target: Target, mode: str | None) -> tuple[dict[str, object], str]:
    """Return the settings that were applied here, or those of a pod without annotations.

    And the words for which of the two they are.
    """
    found = record.load(target.netns)
    usable = found is not None and found.known().plans  # not of a version that is not understood
    if found is None or not usable or mode not in (None, found.settings.get("mode", SIDECAR)):
        return whole(mode), "a whole captured pod (nothing is on record here)"
    return dict(found.settings), "what was applied here"


def _print(
    target: Target,
    report: Report,
    probes: tuple[ProbeResult, ...],
    arguments: argparse.Namespace,
    applies: str,
) -> None:
    if arguments.output == "json":
        document = to_json(target, report)
        if arguments.probe:
            document["probes"] = [asdict(result) for result in probes]
        output.print_json(document)
        return
    output.warn(report.warnings)
    for sentence in report.foreign:
        print(output.paint(f"! {sentence}", output.YELLOW))
    for difference in report.differences:
        print(difference.line())
    print_probes(probes)
    if report.in_sync:
        print(f"{target.name}: {output.paint('in sync', output.GREEN)} ({report.backend})")
    else:
        found = output.count(len(report.differences) + len(report.foreign), "difference")
        print(f"{target.name}: {output.paint(found, output.RED)} ({report.backend})")
        if report.differences:
            print(f"{'':<8}-> {applies}")
    print_failures(target.name, probes)


def to_json(target: Target, report: Report) -> dict[str, object]:
    netns = target.netns
    return {
        "netns": {"path": netns.path, "dev": netns.id.dev, "ino": netns.id.ino},
        "backend": report.backend,
        "in_sync": report.in_sync,
        "differences": [asdict(difference) for difference in report.differences],
        "foreign": list(report.foreign),
        "warnings": list(report.warnings),
    }
