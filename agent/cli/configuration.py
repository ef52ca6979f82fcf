"""The agent's configuration, for the commands that are told where it is."""

import os
from dataclasses import replace
from pathlib import Path

from agent.capture import record
from agent.node import config
from agent.node.config import Config


def configuration(path: str | None, socket: str | None = None) -> Config:
    """Return the configuration, and have this process look for records where it says.

    `socket` is that of an agent which listens elsewhere.

    Raises: InvalidSettings.
    """
    found = config.load(path)
    if found.state_dir != record.state_dir():
        os.environ[record.STATE_DIR] = str(found.state_dir)
    return replace(found, socket=Path(socket)) if socket else found
