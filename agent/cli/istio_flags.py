"""The options of istio-iptables that say how it runs and not what it captures.

The injector writes some of them into a pod's init container, and its variables may have any.
"""

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass

from agent.model import values
from agent.model.errors import InvalidSettings
from agent.model.state import IPTABLES_LEGACY, IPTABLES_NFT, NFTABLES
from agent.model.values import BadValue

AUTO = "auto"
BINARIES = {"": AUTO, "nft": IPTABLES_NFT, "legacy": IPTABLES_LEGACY}

_HELP = {
    "dry_run": "list the writes, make none",
    "skip_rule_apply": "the same",
    "cleanup_only": "remove the capture that is there, and make none",
    "run_validation": "then prove the capture with real connections, as `check --probe` does",
    "native_nftables": "the same as --backend nftables",
    "force_iptables_binary": "nft or legacy: the same as --backend iptables-nft or iptables-legacy",
}
_SWITCHES = ("dry_run", "skip_rule_apply", "cleanup_only", "run_validation", "native_nftables")
_OF_EVERY_COMMAND = ("native_nftables", "force_iptables_binary")
# These say what this agent always does, or speak of its own log and probe.
_IGNORED_SWITCHES = ("--reconcile", "--force-apply", "--cni-mode", "--log_as_json")
_IGNORED_VALUES = (
    *("--network-namespace", "--iptables-probe-port", "--probe-timeout"),
    *("--log_output_level", "--log_caller", "--log_stacktrace_level", "--log_target"),
)


@dataclass(frozen=True, slots=True)
class Asked:
    """How a run is to go: by which backend, and how much of it."""

    backend: str
    dry_run: bool
    cleanup_only: bool
    run_validation: bool


def add_istio_flags(parser: argparse.ArgumentParser, *, writes: bool) -> None:
    """Add them all; a command that writes nothing takes those about writes, and ignores them."""
    group = parser.add_argument_group("as istio-iptables has it")
    for key, said in _HELP.items():
        flags = (*(("-n",) if key == "dry_run" else ()), f"--{key.replace('_', '-')}")
        shown = writes or key in _OF_EVERY_COMMAND
        text = f"{said} [env {key.upper()}]" if shown else argparse.SUPPRESS
        if key in _SWITCHES:
            group.add_argument(*flags, nargs="?", const="true", metavar="BOOL", help=text)
        else:
            group.add_argument(*flags, metavar="WHICH", help=text)
    for name in _IGNORED_SWITCHES:
        parser.add_argument(name, nargs="?", const="true", help=argparse.SUPPRESS)
    for name in _IGNORED_VALUES:
        parser.add_argument(name, help=argparse.SUPPRESS)


def asked(arguments: argparse.Namespace, environment: Mapping[str, str] | None = None) -> Asked:
    """Return what flags, or else the environment, say; `--backend` wins over its other names.

    Raises: InvalidSettings.
    """
    environment = os.environ if environment is None else environment
    given = {}
    for key in _HELP:
        flag = getattr(arguments, key)
        given[key] = environment.get(key.upper(), "") if flag is None else flag
    problems = []
    switched = {}
    for key in _SWITCHES:
        try:
            switched[key] = values.boolean(given[key] or False)
        except BadValue as mistake:
            problems.append(f"{key}: {mistake}")
    binary = given["force_iptables_binary"]
    if binary not in BINARIES:
        known = " or ".join(name for name in BINARIES if name)
        problems.append(f"force_iptables_binary: {values.shown(binary)} is none; write {known}")
    if problems:
        raise InvalidSettings(tuple(problems))
    named = NFTABLES if switched["native_nftables"] else BINARIES[binary]
    return Asked(
        backend=named if arguments.backend == AUTO else arguments.backend,
        dry_run=switched["dry_run"] or switched["skip_rule_apply"],
        cleanup_only=switched["cleanup_only"],
        run_validation=switched["run_validation"],
    )
