"""Throwaway network namespaces for tests: named `it-...`, removed on every exit."""

import contextlib
import secrets
import subprocess
from collections.abc import Iterator
from pathlib import Path

PREFIX = "it-"
# An address on trial (DAD) comes into its own a second after a test began to look.
NO_TRIAL = "for one in all default; do echo 0 >/proc/sys/net/ipv6/conf/$one/accept_dad; done"


def run(*command: str, stdin: str | None = None, check: bool = True) -> str:
    """Run a command and return its output; a failure shows what it said."""
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise AssertionError(f"{' '.join(command)}: exit {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def inside(namespace: str, *command: str, stdin: str | None = None, check: bool = True) -> str:
    """Run a command in a namespace, given by name or path, and return its output."""
    path = path_of(namespace)
    return run("nsenter", f"--net={path}", "--", *command, stdin=stdin, check=check)


@contextlib.contextmanager
def namespace(label: str = "t", *, lo_up: bool = True) -> Iterator[str]:
    """Make a namespace `it-LABEL-RANDOM` without trial of addresses, yield its name, remove it."""
    name = f"{PREFIX}{label}-{secrets.token_hex(3)}"
    try:
        run("ip", "netns", "add", name)
        inside(name, "sh", "-c", NO_TRIAL)
        if lo_up:
            run("ip", "-n", name, "link", "set", "lo", "up")
        yield name
    finally:
        run("ip", "netns", "del", name, check=False)


def path_of(name: str) -> Path:
    """Return where a namespace is; what is a path already stays one."""
    return Path("/run/netns") / name


def snapshot(name: str) -> dict[str, str]:
    """Return everything that a capture could change in a namespace, as the tools print it.

    Counters and comment lines are dropped. Reading leaves no trace: iptables-legacy-save without
    a table name prints only the tables that exist.
    """
    commands = {
        "legacy4": ("iptables-legacy-save",),
        "legacy6": ("ip6tables-legacy-save",),
        "nft4": ("iptables-nft-save",),
        "nft6": ("ip6tables-nft-save",),
        "nft": ("nft", "-s", "list", "ruleset"),
        "rules4": ("ip", "-4", "rule"),
        "rules6": ("ip", "-6", "rule"),
        "routes4": ("ip", "-4", "route", "show", "table", "all"),
        "routes6": ("ip", "-6", "route", "show", "table", "all"),
        "addresses": ("ip", "-o", "addr"),
    }
    return {key: _plain(inside(name, *command)) for key, command in commands.items()}


def _plain(text: str) -> str:
    lines = []
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        lines.append(line.split(" [")[0] if line.startswith(":") else line)
    return "\n".join(lines)
