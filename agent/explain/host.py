"""Moved to agent.model.host."""

from agent.model.host import *  # noqa: F403
from agent.model.host import LOOPBACK, LOOPBACK_NETWORKS, Host  # noqa: F401
