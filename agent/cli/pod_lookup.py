"""Finds the namespace of `pod:NAMESPACE/NAME`: asks the running agent, or else the runtime."""

import asyncio
import contextlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from agent.cli.agent_client import AgentClient, AgentSays
from agent.kernel.netns import NetnsId, id_at
from agent.model.errors import EnvironmentLacks, NamespaceRefused
from agent.node import config
from agent.node.config import Config

if TYPE_CHECKING:
    from agent.node.cri.pods import View

PREFIX = "pod:"


def meant(text: str) -> str:
    """Return what is meant by `shop/web`: a pod, unless there is such a file."""
    plain = text.count("/") == 1 and not text.startswith(("/", ".", PREFIX))
    return f"{PREFIX}{text}" if plain and not Path(text).exists() else text


def netns_of(target: str, known: Config | None = None) -> str:
    """Return the path of a pod's namespace; anything but `pod:...` is returned as it is.

    Raises: NamespaceRefused if there is no such pod here, it has none of its own, or nobody can be
    asked.
    """
    if not target.startswith(PREFIX):
        return target
    namespace, slash, name = target.removeprefix(PREFIX).partition("/")
    if not (namespace and slash and name):
        raise NamespaceRefused(f"{target} is not a pod: write {PREFIX}NAMESPACE/NAME")
    known = known or config.load(None)
    try:
        who, pods = "the agent knows", _ask_agent(known)
    except EnvironmentLacks as agent:
        who = "the container runtime knows"
        try:
            pods = asyncio.run(_ask_runtime(known))
        except EnvironmentLacks as runtime:
            raise NamespaceRefused(f"{target} cannot be looked up: {agent}; {runtime}") from None
    found = [netns for *pod, netns in pods if pod == [namespace, name]]
    if not found:
        raise NamespaceRefused(f"{who} no pod {name} of the namespace {namespace} on this node")
    if found[-1] is None:
        raise NamespaceRefused(f"{target} has no network namespace of its own (host network)")
    return found[-1]


def titles(known: Config) -> Mapping[NetnsId, str]:
    """Return what the pods of namespaces are called; nothing where nobody can be asked."""
    rows: Iterable[Row] = ()
    try:
        rows = _ask_agent(known)
    except (EnvironmentLacks, AgentSays):
        with contextlib.suppress(EnvironmentLacks):
            rows = asyncio.run(_ask_runtime(known))
    found = {}
    for namespace, name, path in rows:
        if path is not None and (identity := id_at(path)) is not None:
            found[identity] = f"{namespace}/{name}" if namespace else name
    return found


Row = tuple[str, str, str | None]


def _ask_agent(known: Config) -> Iterable[Row]:
    with AgentClient(known.socket) as agent:
        return [(pod["namespace"], pod["name"], pod["netns"]) for pod in agent.ask("pods")]


async def _ask_runtime(known: Config) -> Iterable[Row]:
    view = await runtime_view(known)
    return [(pod.namespace, pod.name, pod.netns) for pod in view.pods.values()]


async def runtime_view(known: Config) -> "View":
    """Return the pods that the container runtime has.

    Raises: EnvironmentLacks if none can be asked.
    """
    if known.cri_endpoint == "none":
        raise EnvironmentLacks("no runtime is configured")
    # Here and not above: loading grpc takes longer than most commands.
    from agent.node.cri import pods
    from agent.node.cri.client import CriClient
    from agent.node.cri.source import alive

    async with CriClient(known.cri_endpoint) as client:
        return pods.view(await client.sandboxes(), alive)
