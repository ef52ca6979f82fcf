"""Which pods of this node still hold a capture: what an uninstall leaves to be taken out."""

import argparse
import os
from dataclasses import dataclass

from agent.backends import registry
from agent.backends.session import reading
from agent.capture.observe import observe
from agent.cli import leftover_inputs
from agent.kernel.netns import Netns
from agent.leftovers.scan import Subject
from agent.model.errors import AgentError
from agent.model.state import GUARD


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A namespace with a capture. `netns` is what commands take, `pod` is empty if not known."""

    pod: str
    netns: str
    backends: tuple[str, ...]


def held(config: str | None) -> tuple[tuple[Held, ...], tuple[str, ...]]:
    """Return the namespaces that hold a capture, and sentences on what could not be looked at.

    `config` is the agent's configuration file. Nothing is changed by looking.
    """
    if os.geteuid() != 0:
        return (), ("which pods still hold a capture only root can see: `intercept-agent scan`",)
    everywhere = argparse.Namespace(host=False, all=True, netns=[], config=config, socket=None)
    subjects, node, remarks = leftover_inputs.gather(everywhere)
    found, unread = [], [*remarks]
    for subject in subjects:
        if subject.host:
            continue
        try:
            backends = _backends(subject)
        except AgentError as error:
            unread.append(f"{subject.place.name} cannot be looked into: {error}")
            continue
        if backends:
            pod = node.pods.get(subject.place.id)
            title = pod.title if pod else ""
            found.append(Held(pod=title, netns=subject.place.name, backends=backends))
    return tuple(found), tuple(unread)


def _backends(subject: Subject) -> tuple[str, ...]:
    with Netns.open(subject.place.path) as netns, reading(netns) as session:
        have = observe(session)
    guard = (GUARD,) if have.of(GUARD) else ()
    return (*registry.in_use(have), *guard)
