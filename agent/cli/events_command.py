"""Show what happened to pods, oldest first; with --follow, go on as it happens."""

import argparse
import json
import time

from agent.cli import output
from agent.cli.agent_client import AgentClient, add_agent_options, socket_path

EXAMPLES = """examples:
  intercept-agent events
  intercept-agent events --follow -o json              one JSON document a line
"""
WAIT_S = 20.0


def add_options(parser: argparse.ArgumentParser) -> None:
    add_agent_options(parser)
    parser.add_argument("-f", "--follow", action="store_true", help="go on as events happen")


def run(arguments: argparse.Namespace) -> int:
    last = 0
    with AgentClient(socket_path(arguments)) as agent:
        events = agent.ask("events", since=0, wait_s=0)
        if arguments.output == "json" and not arguments.follow:
            output.print_json({"events": events})
            return 0
        while True:
            for event in events:
                last = event["number"]
                _show(event, arguments)
            if not arguments.follow:
                return 0
            events = agent.ask("events", since=last, wait_s=WAIT_S)


def _show(event: dict[str, object], arguments: argparse.Namespace) -> None:
    if arguments.output == "json":
        print(json.dumps(event), flush=True)
        return
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(float(str(event["time"]))))
    print(f"{when}  {event['kind']:<14} {event['pod']}: {event['message']}", flush=True)
