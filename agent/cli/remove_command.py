"""Take out everything a capture can have put into a namespace, and nothing else."""

import argparse

from agent.capture.apply import remove
from agent.cli import output
from agent.cli.apply_command import REMOVED, VERBOSE, report
from agent.cli.target import add_netns_option, opened

EXAMPLES = """examples:
  intercept-agent remove --netns web
  intercept-agent remove --netns web --dry-run         show the writes, make none

exit code: 0 done, or already so; 2 bad usage, 3 something is missing: nothing was touched; 4 the
kernel refused: everything is as it was
"""
__all__ = ["EXAMPLES", "VERBOSE", "add_options", "run"]


def add_options(parser: argparse.ArgumentParser) -> None:
    add_netns_option(parser)
    parser.add_argument("--host", action="store_true", help="allow the node's own namespace too")
    parser.add_argument("-n", "--dry-run", action="store_true", help="list the writes, make none")
    output.add_output_option(parser, "-o")


def run(arguments: argparse.Namespace) -> int:
    with opened(arguments.netns, allow_node=arguments.host) as target:
        done = remove(target.netns, dry_run=arguments.dry_run)
    report(target, done, arguments, REMOVED, dry_run=arguments.dry_run)
    return 0
