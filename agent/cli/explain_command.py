"""Explain a pod or namespace on one page: is it captured, should it be, by whom, and what to do.

`explain flow` names the rule, and the setting it comes from, that decides about one connection.
"""

import argparse
from collections.abc import Sequence

from agent.cli import output
from agent.cli.agent_client import add_agent_options
from agent.cli.configuration import configuration
from agent.cli.explain_facts import gather
from agent.cli.pod_facts import PodFinder
from agent.cli.pod_lookup import meant
from agent.cli.seeing import print_findings
from agent.cli.trace_command import add_packet_options, packet_of
from agent.explain import render
from agent.explain.pod import flows, page
from agent.explain.pod.judge import Explanation, explain
from agent.explain.trace import not_walked, trace
from agent.model.errors import EnvironmentLacks, InvalidSettings

EXAMPLES = """examples:
  intercept-agent explain shop/web                     a pod, as pod:shop/web
  intercept-agent explain pid:4711 -o json
  intercept-agent explain shop/web --pod-manifest <(kubectl -n shop get pod web -o yaml)
  intercept-agent explain flow --uid 1000 --to 10.0.0.9:5432 shop/web
  intercept-agent explain flow --in --from 10.0.0.7 --to 10.0.0.5:8080 shop/web
"""
POD, FLOW = KINDS = ("pod", "flow")


def completed(words: Sequence[str]) -> list[str]:
    """Return the words with the kind of explanation put first, which users leave out for a pod."""
    at = words.index("explain") + 1
    rest = list(words[at:])
    if FLOW in rest and any(word.partition("=")[0] == "--to" for word in rest):
        rest.remove(FLOW)
        return [*words[:at], FLOW, *rest]
    kind = [] if (len(rest) > 1 and rest[0] in KINDS) or {"-h", "--help"} & set(rest) else [POD]
    return [*words[:at], *kind, *rest]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [flow --uid U --to ADDR:PORT] [options] POD|NS"
    parser.add_argument("kind", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument(
        "target",
        metavar="POD|NS",
        help="NAMESPACE/NAME, or a namespace as --netns of the other commands takes it, or host",
    )
    parser.add_argument(
        "--pod-manifest",
        metavar="FILE",
        help="the pod as it is now, from the API server: what changed since its start is told",
    )
    packet = parser.add_argument_group("flow", "one connection, for `explain flow`")
    add_packet_options(packet, required=False)
    add_agent_options(parser)


def run(arguments: argparse.Namespace) -> int:
    if arguments.kind == FLOW and not arguments.to:
        raise InvalidSettings(("explain flow: say where to by --to ADDR:PORT",))
    packet = packet_of(arguments) if arguments.to else None
    finder = PodFinder(configuration(arguments.config, arguments.socket), arguments.pod_manifest)
    facts = gather(meant(arguments.target), finder)
    if packet is None:
        return _page(explain(facts), arguments)
    if facts.state is None or facts.host is None:
        raise EnvironmentLacks("; ".join(facts.unseen) or f"{facts.target} has no rules of its own")
    walked = trace(facts.state, facts.host, packet, inbound=arguments.inbound)
    flow = flows.judged(facts, walked, "in" if arguments.inbound else "out")
    left_out = not_walked(facts.state)
    if arguments.output == "json":
        document = {**page.flow_json(flow), "verdict": walked.verdict.kind.value}
        source = facts.sources.get(flow.setting or "")
        steps = render.to_json(walked)["steps"]
        output.print_json(
            {**document, "source": source, "steps": steps, "not_walked": list(left_out)}
        )
        return 0
    output.warn(left_out)
    print(page.plain(flow.text))
    return 0


def _page(found: Explanation, arguments: argparse.Namespace) -> int:
    if arguments.output == "json":
        output.print_json(page.to_json(found))
        return 0
    colour = output.GREEN if found.healthy else output.RED
    print(f"{found.facts.target}: {output.paint(found.summary, colour)}")
    for label, line in page.rows(found):
        print(page.text(label, line))
    print_findings(found.findings, found.facts.unseen)
    return 0
