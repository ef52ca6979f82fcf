"""Opens the namespace that a command is for, and refuses those that it must not touch."""

import argparse
import contextlib
import os
from collections.abc import Iterator

from agent.capture.inputs import Target
from agent.cli.pod_lookup import netns_of
from agent.kernel import netns
from agent.model.errors import EnvironmentLacks


def add_netns_option(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    parser.add_argument(
        "--netns",
        metavar="NS",
        required=required,
        help="a name under /run/netns, a path, pid:N, container:ID, pod:NAMESPACE/NAME or self",
    )


@contextlib.contextmanager
def opened(name: str, *, allow_node: bool = False) -> Iterator[Target]:
    """Open the namespace; the node's own is refused unless allowed.

    Raises: EnvironmentLacks without root, NamespaceRefused.
    """
    if os.geteuid() != 0:
        raise EnvironmentLacks(f"entering the namespace {name} needs root; run this as root")
    found, is_self = netns.open_target(netns_of(name))
    with found:
        if not allow_node:
            netns.refuse_node(found, is_self=is_self)
        yield Target(found, name)
