"""Run the agent: watch this node's pods, capture those of the mesh, and keep them captured."""

import argparse
import asyncio
import logging
import os
import sys

from agent.kernel import open_files
from agent.model.errors import EnvironmentLacks
from agent.node import config

EXAMPLES = """examples:
  intercept-agent run                                  with the defaults, as root
  intercept-agent run --config /etc/intercept-agent/config.yaml
"""


class _Lines(logging.Formatter):
    """One line a record: the level, the message and, as key=value, what was given with it."""

    USUAL = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}

    def format(self, record: logging.LogRecord) -> str:
        given = vars(record).items()
        more = "".join(f" {key}={value!s}" for key, value in given if key not in self.USUAL)
        return f"{record.levelname} {super().format(record)}{more}"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", metavar="FILE", help="YAML; every key also as INTERCEPT_...")


def run(arguments: argparse.Namespace) -> int:
    found = config.load(arguments.config)
    if os.geteuid() != 0:
        raise EnvironmentLacks("the agent enters namespaces, which needs root; run this as root")
    level = logging.DEBUG if arguments.verbose else logging.INFO
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Lines())
    logging.basicConfig(handlers=[handler], level=level)
    open_files.allow_many()
    # Read when grpc is loaded: it has nothing to say on stderr, and only the worker is forked.
    os.environ.update(GRPC_VERBOSITY="NONE", GRPC_ENABLE_FORK_SUPPORT="0")
    from agent.cli.daemon import Daemon

    asyncio.run(Daemon(found, arguments.config).run())
    return 0
