"""Show how the running agent is: ready or what it waits for, its sources, its pods by state."""

import argparse
from collections.abc import Mapping
from typing import Any

from agent.cli import output
from agent.cli.agent_client import AgentClient, add_agent_options, socket_path
from agent.model.state import EBPF

EXAMPLES = """examples:
  intercept-agent status
  intercept-agent status --socket /run/intercept-agent/agent.sock -o json
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    add_agent_options(parser)


def run(arguments: argparse.Namespace) -> int:
    with AgentClient(socket_path(arguments)) as agent:
        found = agent.ask("status")
    if arguments.output == "json":
        output.print_json(found)
        return 0
    if found["ready"]:
        print(output.paint("ready", output.GREEN))
    else:
        print(output.paint("not ready", output.RED))
        for reason in found["pending"]:
            print(f"  {reason}")
    for source in found["sources"]:
        word = "connected" if source["connected"] else "not connected"
        told = f"{source['name']}: {source['detail']}" in found["pending"]
        print(f"source {source['name']}: {word}" + ("" if told else f"; {source['detail']}"))
    if found["cni"]:
        word = f"in {found['cni']['file']}" if found["cni"]["present"] else found["cni"]["reason"]
        print(f"cni entry: {word}")
    states = ", ".join(f"{count} {state}" for state, count in sorted(found["pods"].items()))
    print(f"pods: {states or 'none'}")
    worker = f", worker PID {found['worker_pid']}" if found["worker_pid"] else ""
    print(f"mode {found['mode']}, backend {found['backend']}{worker}")
    print(f"guard: {_guard(found)}")
    for name in ("health", "status"):
        if found[name]:
            print(f"{name}: {found[name]}")
    return 0


def _guard(found: Mapping[str, Any]) -> str:
    if found["backend"] == EBPF:
        return "none, since eBPF has no rules that somebody in a pod could flush"
    return found["guard"] or "each pod's is left as it stands"
