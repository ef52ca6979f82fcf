"""List the pods that the running agent knows, and whether each is captured and why."""

import argparse

from agent.cli import output
from agent.cli.agent_client import AgentClient, add_agent_options, socket_path

EXAMPLES = """examples:
  intercept-agent pods
  intercept-agent pods -o json
"""
COLUMNS = ("namespace", "name", "state", "captured", "backend", "reason")


def add_options(parser: argparse.ArgumentParser) -> None:
    add_agent_options(parser)


def run(arguments: argparse.Namespace) -> int:
    with AgentClient(socket_path(arguments)) as agent:
        pods = agent.ask("pods")
    if arguments.output == "json":
        output.print_json({"pods": pods})
        return 0
    rows = [[_cell(pod[column]) for column in COLUMNS] for pod in pods]
    output.print_table([column.upper() for column in COLUMNS], rows)
    for pod in pods:
        if pod["state"] in ("failed", "drifted"):
            print(f"{pod['namespace']}/{pod['name']}: {pod['text']}")
    return 0


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "-" if value in (None, "") else str(value)
