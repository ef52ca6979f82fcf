"""What the worker sees of a pod for the drawing of its ways: rules, routes, and who listens."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import Any

from agent.backends.session import reading
from agent.capture import record
from agent.capture.inputs import Target, settings_for
from agent.capture.observe import observe
from agent.explain.pod.facts import Facts
from agent.explain.pod.flows import OUTSIDE
from agent.explain.pod.listeners import listeners
from agent.explain.pod.ways import ways
from agent.explain.trace import not_walked
from agent.kernel import processes
from agent.kernel.netns import Netns
from agent.kernel.topology import read_host
from agent.model.settings import Settings


def look(netns: Netns, raw: Mapping[str, Any] | None) -> dict[str, object]:
    """Return the ways through what is loaded now, and what they leave out, as plain values.

    `raw` are the settings that the pod should be captured with, if it should. Nothing is written.

    Raises: AgentError if the namespace cannot be looked at.
    """
    facts = Facts(
        target=netns.path,
        settings=None if raw is None else _settings(netns, raw),
        host=read_host(netns),
        processes=processes.living_in(netns).found,
        now=datetime.now(UTC),
    )
    facts = replace(facts, listeners=listeners(netns, facts), name_servers=_servers(facts.settings))
    with reading(netns) as session:
        state = observe(session)
    found = ways(replace(facts, state=state))
    return {"ways": [asdict(way) for way in found], "not_walked": list(not_walked(state))}


def _settings(netns: Netns, raw: Mapping[str, Any]) -> Settings:
    return settings_for(record.as_applied(netns, raw), Target(netns, netns.path))


def _servers(settings: Settings | None) -> tuple[str, ...]:
    """Return the name servers to ask about; nobody asks where DNS is not captured."""
    if settings is None or not settings.redirect_dns:
        return ()
    known = (*settings.dns_servers_v4, *settings.dns_servers_v6)
    return tuple(str(server) for server in known or OUTSIDE.values())
