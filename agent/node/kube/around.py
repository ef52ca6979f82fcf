"""What the API server's part of the agent needs of the rest."""

from collections.abc import Callable
from dataclasses import dataclass

from agent.node.events import Events
from agent.node.feed import Feed


@dataclass(frozen=True, slots=True, kw_only=True)
class Around:
    """`moved` is called whenever the server comes or goes. `ready` tells whether the agent does its
    work, whatever the server does; `uncaptured` whether the pod of a key still runs so.
    `started` is when the agent was, in seconds since the epoch."""

    events: Events
    feed: Feed
    moved: Callable[[], None]
    ready: Callable[[], bool]
    uncaptured: Callable[[str], bool]
    started: float
    own_namespace: str
