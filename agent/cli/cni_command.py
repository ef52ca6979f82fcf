"""Put the CNI plugin and its entry on this node, take both away, or tell what differs."""

import argparse
import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from agent.cli import holding, output
from agent.cli.agent_client import AgentClient, AgentSays
from agent.cli.cni_places import told, unfound, unread, usual
from agent.cli.holding import Held
from agent.cni import installer
from agent.cni.folder import Busy, Changed
from agent.cni.installer import Place, Report
from agent.formats.cni_config import POLICIES, Entry
from agent.model.errors import EnvironmentLacks
from agent.node import config
from agent.node.config import Config

if TYPE_CHECKING:
    from agent.node.cri.details import CniPlaces

EXAMPLES = """examples:
  intercept-agent cni install                          where the runtime looks for plugins
  intercept-agent cni check -o json                    exit 1 if anything differs
  intercept-agent cni install --conf-dir /host/etc/cni/net.d --bin-dir /host/opt/cni/bin
  intercept-agent cni install --config /etc/intercept-agent/config.yaml
  intercept-agent cni uninstall                        every byte as it was before, and which
                                                       pods still hold a capture

The configuration of the base CNI must be there first: the entry is chained behind it. What a
running agent keeps up by itself (`run` with cni.conf_dir) is put back after an uninstall by hand.

exit code: 0 done, or nothing differs; 1 something differs still
"""


ACTIONS = ("install", "uninstall", "check")
TRIES, PAUSE_S = 50, 0.1


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action",
        choices=ACTIONS,
        metavar="{" + ",".join(ACTIONS) + "}",
        help="put plugin and entry there; take both away; or tell what differs and change nothing",
    )
    parser.add_argument(
        "--conf-dir",
        metavar="D",
        help=f"CNI configurations (what the runtime says, or {installer.CONF_DIR})",
    )
    parser.add_argument(
        "--bin-dir",
        metavar="D",
        help=f"plugins (what the runtime says, or {installer.BIN_DIR})",
    )
    parser.add_argument(
        "--config", metavar="FILE", help="the agent's configuration: socket, cni.conf_dir, ..."
    )
    parser.add_argument(
        "--failure-policy",
        choices=POLICIES,
        default="closed",
        help="what becomes of a mesh pod that starts while no agent answers (closed)",
    )
    parser.add_argument(
        "--file", metavar="NAME", help="chain into this file instead of the first one"
    )
    parser.add_argument(
        "--interpreter", metavar="PATH", help="the node's python3 that is to run the plugin"
    )
    parser.add_argument(
        "--program",
        metavar="PATH",
        help="an executable to install as the plugin, for nodes without Python: the static one, "
        "built by `make cni-static` (the Python one, or cni.program)",
    )
    parser.add_argument(
        "--keep-binary",
        action="store_true",
        help="uninstall: leave the plugin for runtimes that remember the entry (Multus)",
    )
    output.add_output_option(parser, "-o")


def run(arguments: argparse.Namespace) -> int:
    found = config.load(arguments.config)
    places = asyncio.run(told(found.cri_endpoint))
    place = _place(arguments, found, places)
    if arguments.action == "install" and (reason := unfound(place, places)):
        raise EnvironmentLacks(f"{reason}; name one of these with --bin-dir; nothing was changed")
    done = _patiently(lambda: _act(arguments, place))
    if arguments.action != "uninstall" and (reason := unread(place, places)):
        done = replace(done, warnings=(*done.warnings, reason))
    still: tuple[Held, ...] = ()
    if arguments.action == "uninstall":
        still, remarks = holding.held(arguments.config)
        done = replace(done, warnings=(*done.warnings, *_kept_by(found), *remarks))
    if arguments.output == "json":
        output.print_json(_to_json(arguments.action, place, done, still))
    else:
        _print(arguments.action, place, done)
        _print_holding(still)
    return 0 if done.in_sync else 1


def _kept_by(found: Config) -> tuple[str, ...]:
    """Tell of a running agent that puts back what is taken away."""
    with contextlib.suppress(EnvironmentLacks, AgentSays), AgentClient(found.socket) as agent:
        if agent.ask("status")["cni"]:
            return (
                "the agent that runs here keeps the plugin and puts it back: stop it, or take "
                "cni.conf_dir out of its configuration, and uninstall again",
            )
    return ()


def _act(arguments: argparse.Namespace, place: Place) -> Report:
    if arguments.action == "uninstall":
        return installer.uninstall(place, keep_binary=arguments.keep_binary)
    return installer.install(place) if arguments.action == "install" else installer.check(place)


def _patiently(act: Callable[[], Report]) -> Report:
    """Try again while the running agent or another program is writing there, which takes a moment.

    Raises: Busy or Changed if that does not end.
    """
    for _ in range(TRIES - 1):
        with contextlib.suppress(Busy, Changed):
            return act()
        time.sleep(PAUSE_S)
    return act()


def _place(arguments: argparse.Namespace, found: Config, places: "CniPlaces | None") -> Place:
    """Return what to work on: an option counts before a variable, that before the file.

    Where none says it, the runtime does.
    """
    program = arguments.program or found.cni_program
    conf_dir, bin_dir = usual(places)
    return Place(
        conf_dir=arguments.conf_dir or str(found.cni_conf_dir or conf_dir),
        bin_dir=arguments.bin_dir or str(found.cni_bin_dir or bin_dir),
        entry=Entry(socket=str(found.socket), failure_policy=arguments.failure_policy),
        pinned=arguments.file,
        interpreter=arguments.interpreter,
        program=str(program) if program else None,
    )


def _print(action: str, place: Place, done: Report) -> None:
    output.warn(done.warnings)
    for change in done.changes:
        print(change)
    for difference in done.differences:
        print(output.paint(f"~ {difference}", output.YELLOW))
    if not done.in_sync:
        count = f"{len(done.differences)} difference{'s' if len(done.differences) > 1 else ''}"
        # Without a file that can be edited it would be refused as well.
        hint = "; `intercept-agent cni install` puts it right" if done.file else ""
        print(f"{place.conf_dir}: {output.paint(count, output.RED)}{hint}")
    elif action == "uninstall":
        word = "uninstalled" if done.changed else "nothing to remove"
        print(f"{place.conf_dir}: {output.paint(word, output.GREEN)}")
    else:
        word = "installed" if done.changed else "in sync"
        print(f"{place.conf_dir}/{done.file}: {output.paint(word, output.GREEN)}")


def _print_holding(still: tuple[Held, ...]) -> None:
    if still:
        where = output.count(len(still), "namespace")
        print(f"{where} with a capture, which stays until the pod ends or it is taken out:")
    for one in still:
        print(
            f"  {one.pod or one.netns} ({', '.join(one.backends)}): "
            f"intercept-agent remove --netns {one.netns}"
        )


def _to_json(action: str, place: Place, done: Report, still: tuple[Held, ...]) -> dict[str, object]:
    return {
        "action": action,
        "conf_dir": place.conf_dir,
        "bin_dir": place.bin_dir,
        "file": done.file,
        "changed": done.changed,
        "in_sync": done.in_sync,
        "changes": list(done.changes),
        "differences": list(done.differences),
        "warnings": list(done.warnings),
        "holding": [asdict(one) for one in still],
    }
