"""Asks the running agent over its socket, for the commands that show what it knows."""

import argparse
import socket
from pathlib import Path
from typing import Any

from agent.cli import output
from agent.cni import frames
from agent.model.errors import AgentError, EnvironmentLacks
from agent.node import config

TIMEOUT_S = 30.0


class AgentSays(AgentError):
    """The agent refused a request, in its own words."""


def add_agent_options(parser: argparse.ArgumentParser) -> None:
    """Add what says where the agent is, and how it is shown what it says."""
    parser.add_argument(
        "--config", metavar="FILE", help="the agent's configuration file, which names its socket"
    )
    parser.add_argument(
        "--socket", metavar="PATH", help=f"the agent's socket ({config.Config().socket})"
    )
    output.add_output_option(parser, "-o")


def socket_path(arguments: argparse.Namespace) -> Path:
    if arguments.socket:
        return Path(arguments.socket)
    return config.load(arguments.config).socket


class AgentClient:
    """One connection to the agent."""

    def __init__(self, path: Path) -> None:
        """Raises: EnvironmentLacks if no agent answers there."""
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(TIMEOUT_S)
        try:
            self._socket.connect(str(path))
        except PermissionError as error:
            self._socket.close()
            raise EnvironmentLacks(
                f"the agent's socket {path} is for root only; run this as root"
            ) from error
        except OSError as error:
            self._socket.close()
            raise EnvironmentLacks(
                f"no agent answers on {path}: {error.strerror or error}; start it by "
                "`intercept-agent run`, or name its socket by INTERCEPT_SOCKET"
            ) from error

    def ask(self, do: str, **request: object) -> Any:
        """Return the agent's answer.

        Raises: AgentSays with its refusal, EnvironmentLacks if it ends or hangs meanwhile or is
        none.
        """
        try:
            self._socket.sendall(frames.encode({"do": do, **request}))
            size = frames.size_of(self._exactly(frames.HEADER.size), frames.MAX_REPLY)
            reply = frames.decode(self._exactly(size))
        except TimeoutError as error:
            raise EnvironmentLacks(
                f"the agent behind {self._path} does not answer within {TIMEOUT_S:.0f} seconds"
            ) from error
        except OSError as error:
            raise EnvironmentLacks(f"the agent behind {self._path} ended: {error}") from error
        except frames.BadFrame as error:
            raise EnvironmentLacks(
                f"who answers on {self._path} is no agent of this version: {error}"
            ) from error
        if "error" in reply:
            raise AgentSays(reply["error"]["message"])
        return reply["result"]

    def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            chunk = self._socket.recv(size - len(data))
            if not chunk:
                raise ConnectionError("it closed the connection")
            data += chunk
        return data

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> "AgentClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
