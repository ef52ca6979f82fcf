"""Find what somebody left behind: captures nobody wants, rules of programs that are gone."""

import argparse
import dataclasses

from agent.cli import leftover_inputs, output
from agent.leftovers.finding import Finding, Severity
from agent.leftovers.scan import Report, scan

EXAMPLES = """examples:
  intercept-agent scan                                 the node and every namespace on it
  intercept-agent scan --host                          the node's own namespace, CNI, eBPF
  intercept-agent scan --netns web pod:shop/cart-1     these only
  intercept-agent scan -o json

exit code: 0 nothing found, 1 something found
"""
VERBOSE = "list every object"

COLOURS = {
    Severity.CRITICAL: output.RED,
    Severity.WARNING: output.YELLOW,
    Severity.INFO: output.BOLD,
}
SHOWN_OBJECTS = 6


def add_options(parser: argparse.ArgumentParser) -> None:
    leftover_inputs.add_options(parser, many=True)


def run(arguments: argparse.Namespace) -> int:
    leftover_inputs.require_root("scan")
    report = _scan(arguments)
    if arguments.output == "json":
        output.print_json(report.document())
    else:
        show(report, verbose=arguments.verbose)
    return 1 if report.findings else 0


def _scan(arguments: argparse.Namespace) -> Report:
    subjects, node, remarks = leftover_inputs.gather(arguments)
    whole = arguments.host or arguments.all or not arguments.netns
    folders = leftover_inputs.folders(arguments) if whole else None
    with leftover_inputs.progress(arguments, len(subjects)) as progress:
        report = scan(subjects, node, folders=folders, progress=progress)
    return dataclasses.replace(report, remarks=(*report.remarks, *remarks))


def show(report: Report, *, verbose: bool) -> None:
    for finding in report.findings:
        _show(finding, verbose=verbose)
    for remark in report.remarks:
        print(remark)
    looked = f"{output.count(report.namespaces, 'namespace')}, {output.count(report.rules, 'rule')}"
    verdict = output.count(len(report.findings), "finding") if report.findings else "nothing found"
    print(f"{looked} in {report.duration_ms / 1000:.1f} s: {verdict}")


def _show(finding: Finding, *, verbose: bool) -> None:
    where = [v for v in (finding.where.pod, finding.where.netns, finding.where.backend) if v]
    head = output.paint(f"{finding.severity.value} {finding.kind.value}", COLOURS[finding.severity])
    print(f"{head}  {' '.join(where)}  ({finding.owner})")
    print(f"  {finding.explanation}")
    for line in finding.evidence:
        print(f"  - {line}")
    shown = finding.objects if verbose else finding.objects[:SHOWN_OBJECTS]
    more = len(finding.objects) - len(shown)
    print(f"  objects: {', '.join(shown)}{f' and {more} more' if more else ''}")
    print(f"  fix: {finding.fix}\n")
