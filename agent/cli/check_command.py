"""Tell whether a namespace is captured as it should be: every rule, its order, and the routes."""

import argparse
from dataclasses import asdict

from agent.capture import record
from agent.capture.check import Report, check
from agent.capture.inputs import Target, settings_for
from agent.capture.probing.probe import Outcome, ProbeResult, passed, probe
from agent.cli import output
from agent.cli.apply_command import add_backend_option
from agent.cli.options import add_capture_options, given_settings
from agent.cli.target import add_netns_option, opened
from agent.formats import pod

EXAMPLES = """examples:
  intercept-agent check --netns web                    against what was applied there
  intercept-agent check --netns web -i '*' -b 80       against these settings
  intercept-agent check --netns web --probe            and prove it with real connections
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    add_netns_option(parser)
    add_backend_option(parser)
    parser.add_argument("--probe", action="store_true", help="prove it with real connections")
    parser.add_argument("--output", choices=("table", "json"), default="table")
    add_capture_options(parser)


def run(arguments: argparse.Namespace) -> int:
    raw = given_settings(arguments)
    if raw is not None:
        settings_for(raw, None)
    with opened(arguments.netns) as target:
        settings = settings_for(_applied(target) if raw is None else raw, target)
        report = check(target.netns, settings, backend=arguments.backend)
        probes = probe(target.netns, settings) if arguments.probe else ()
        _print(target, report, probes, arguments)
    return 0 if report.in_sync and passed(probes) else 1


def _applied(target: Target) -> dict[str, object]:
    """Return the settings that were applied here, or those of a pod without annotations."""
    found = record.load(target.netns)
    return dict(found.settings if found else pod.DEFAULTS)


def _print(
    target: Target,
    report: Report,
    probes: tuple[ProbeResult, ...],
    arguments: argparse.Namespace,
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
    for result in probes:
        colour = output.RED if result.outcome is Outcome.FAILED else output.GREEN
        print(f"{output.paint(f'{result.outcome.value:<8}', colour)}{result.name}: {result.detail}")
    failed = sum(result.outcome is Outcome.FAILED for result in probes)
    if failed:
        print(f"{target.name}: {output.paint(f'{failed} probes failed', output.RED)}")
    if report.in_sync:
        print(f"{target.name}: {output.paint('in sync', output.GREEN)} ({report.backend})")
    else:
        count = len(report.differences) + len(report.foreign)
        print(
            f"{target.name}: {output.paint(f'{count} differences', output.RED)} "
            f"({report.backend}); `intercept-agent apply` puts it right"
        )


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
