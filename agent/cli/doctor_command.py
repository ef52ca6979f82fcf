"""Tell what on this node keeps the agent from working, or may: each with what it means and a fix.

Reading changes nothing: no table is asked for, no module loaded, no lock taken.
"""

import argparse
from dataclasses import asdict

from agent.cli import output
from agent.cli.agent_client import add_agent_options, socket_path
from agent.cli.configuration import configuration
from agent.cli.doctor_facts import gather
from agent.cli.seeing import print_findings
from agent.explain.finding import Severity
from agent.explain.node.backends import unusable
from agent.explain.node.diagnosis import Diagnosis, diagnose
from agent.model.state import BACKENDS

EXAMPLES = """examples:
  intercept-agent doctor
  intercept-agent doctor --config /etc/intercept-agent/config.yaml -o json

exit code: 0 the agent can work here, 1 something keeps it from working
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    add_agent_options(parser)


def run(arguments: argparse.Namespace) -> int:
    found = diagnose(gather(configuration(arguments.config), socket_path(arguments)))
    if arguments.output == "json":
        output.print_json(to_json(found))
    else:
        _print(found)
    return 0 if found.works else 1


def _print(found: Diagnosis) -> None:
    print_findings(found.findings, found.facts.unseen)
    bad, warned = found.count(Severity.CRITICAL), found.count(Severity.WARNING)
    if bad:
        keeps = "keeps" if bad == 1 else "keep"
        words = f"{output.count(bad, 'finding')} {keeps} the agent from working"
        text = output.paint(words, output.RED)
    else:
        text = output.paint("nothing keeps the agent from working", output.GREEN)
    print(text + (f"; {output.count(warned, 'warning')}" if warned else ""))


def to_json(found: Diagnosis) -> dict[str, object]:
    facts = found.facts
    return {
        "works": found.works,
        "kernel": facts.release,
        "auto": {
            "backend": facts.chosen,
            "reasons": {name: unusable(facts, name) or None for name in BACKENDS},
        },
        "features": dict(facts.features),
        "tools": [asdict(tool) for tool in facts.tools],
        "findings": [asdict(finding) for finding in found.findings],
        "errors": found.count(Severity.CRITICAL),
        "warnings": found.count(Severity.WARNING),
        "unseen": list(facts.unseen),
    }
