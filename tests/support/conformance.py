"""Runs the command line as a user would, and reads back what the kernel then holds.

The goldens are not in this repository: they are looked for in `shared/cases` next to it or above.
"""

import contextlib
import difflib
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from agent.cli.main import main
from tests.support.netns import inside

ROOT = Path(__file__).resolve().parents[2]
NOBODY = 65534
BACKENDS = ("iptables-legacy", "iptables-nft")

# What `istio-iptables` calls the settings; those without a flag are set by the environment.
FLAGS = {
    "proxy_port": "--envoy-port",
    "inbound_capture_port": "--inbound-capture-port",
    "inbound_tunnel_port": "--inbound-tunnel-port",
    "proxy_uid": "--proxy-uid",
    "proxy_gid": "--proxy-gid",
    "inbound_interception_mode": "--istio-inbound-interception-mode",
    "inbound_ports_include": "--istio-inbound-ports",
    "inbound_ports_exclude": "--istio-local-exclude-ports",
    "outbound_ip_ranges_include": "--istio-service-cidr",
    "outbound_ip_ranges_exclude": "--istio-service-exclude-cidr",
    "outbound_ports_include": "--istio-outbound-ports",
    "outbound_ports_exclude": "--istio-local-outbound-ports-exclude",
    "exclude_interfaces": "--istio-exclude-interfaces",
    "reroute_virtual_interfaces": "--kube-virt-interfaces",
    "inbound_tproxy_mark": "--istio-inbound-tproxy-mark",
    "inbound_tproxy_route_table": "--istio-inbound-tproxy-route-table",
}
SHORT = dict(zip(FLAGS, "pzeugmbdixqocktr", strict=True))
SWITCHES = {
    "redirect_dns": "--redirect-dns",
    "capture_all_dns": "--capture-all-dns",
    "drop_invalid": "--drop-invalid",
    "dual_stack": "--dual-stack",
}
ENVIRONMENT = {
    "owner_groups_include": "ISTIO_OUTBOUND_OWNER_GROUPS",
    "owner_groups_exclude": "ISTIO_OUTBOUND_OWNER_GROUPS_EXCLUDE",
    "host_ipv4_loopback_cidr": "ISTIO_OUTBOUND_IPV4_LOOPBACK_CIDR",
}

Rules = dict[str, dict[str, list[str]]]
"""The rules in order, by table and chain; what holds nothing is left out."""


# --- the command line -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ran:
    """How a run of the command ended and what it said."""

    code: int
    stdout: str
    stderr: str

    @property
    def document(self) -> Any:
        """Return the one JSON document on stdout; anything else there is an error."""
        return json.loads(self.stdout)

    @property
    def lines(self) -> list[str]:
        return self.stderr.splitlines()


def cli(*words: str, environment: Mapping[str, str] | None = None) -> Ran:
    """Run the command in this process."""
    stdout, stderr = io.StringIO(), io.StringIO()
    with (
        _environment(environment or {}),
        contextlib.redirect_stdout(stdout),
        contextlib.redirect_stderr(stderr),
    ):
        try:
            code = main(words)
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 1
    return Ran(code, stdout.getvalue(), stderr.getvalue())


@contextlib.contextmanager
def _environment(extra: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(extra)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def cli_process(
    *words: str,
    user: int = 0,
    groups: Path | None = None,
    within: tuple[str, ...] = (),
) -> Ran:
    """Run the command as a process of its own.

    `user` has no privileges unless it is root; `groups` is what it finds at /etc/group; `within` is
    put in front of the command.
    """
    command = (*within, sys.executable, "-m", "agent.cli.main", *words)
    return _process(command, user, groups)


def python_process(program: str, *words: str, user: int = 0, groups: Path | None = None) -> Ran:
    """Run a Python program that may import the agent; for the rest see `cli_process`."""
    return _process((sys.executable, "-c", program, *words), user, groups)


def _process(command: tuple[str, ...], user: int, groups: Path | None) -> Ran:
    if user:
        command = ("setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", *command)
    if groups is not None:
        bind = 'mount --bind "$0" /etc/group && exec "$@"'
        command = ("unshare", "--mount", "sh", "-c", bind, str(groups), *command)
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=60
    )
    return Ran(done.returncode, done.stdout, done.stderr)


# --- the goldens ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Golden:
    """One case of the corpus: settings that differ from the defaults, and what they load."""

    name: str
    config: Mapping[str, object]
    canonical: Mapping[int, str]
    restore: Mapping[int, str]
    ip_commands: tuple[str, ...]
    ip_readback: Mapping[str, list[str]]
    pod: Mapping[str, Any] = field(default_factory=dict)

    @property
    def group_names(self) -> bool:
        return "ftp" in str(self.config.get("owner_groups_exclude", ""))


def cases_dir() -> Path:
    return ROOT / "tests" / "cases"


def defaults() -> dict[str, object]:
    """Return what a case's settings are relative to: those of `istio-iptables`."""
    return dict(json.loads((cases_dir() / "defaults.json").read_text())["sidecar"])


@cache
def goldens() -> tuple[Golden, ...]:
    return tuple(
        Golden(
            name=f"{file}-{case['name']}",
            config=case["config"],
            canonical={v: case[f"canonical_v{v}"] or "" for v in (4, 6)},
            restore={v: case[f"iptables_restore_v{v}"] or "" for v in (4, 6)},
            ip_commands=tuple(case["ip_commands"]),
            ip_readback=case["ip_readback"] or {},
            pod=case.get("pod", {}),
        )
        for file in ("sidecar", "cni_annotations")
        for case in json.loads((cases_dir() / f"{file}.json").read_text())
    )


# --- settings as a user gives them ----------------------------------------------------------------


def settings_file(folder: Path, config: Mapping[str, object], *, full: bool = True) -> str:
    """Write settings as YAML and return the path; `full` adds the defaults of istio-iptables."""
    path = folder / f"settings-{len(list(folder.iterdir()))}.yaml"
    path.write_text(yaml.safe_dump({**defaults(), **config} if full else dict(config)))
    path.chmod(0o644)
    return str(path)


def flags(config: Mapping[str, object], *, short: bool = False) -> list[str]:
    """Return the settings as the flags of istio-iptables, and what it finds out by itself."""
    words = ["--enable-ipv6", "true" if config.get("enable_ipv6") else "false"]
    servers = [*_texts(config, "dns_servers_v4"), *_texts(config, "dns_servers_v6")]
    if servers or config.get("redirect_dns"):
        words += ["--dns-servers", ",".join(servers)]
    for key, value in config.items():
        if key in FLAGS:
            words += [f"-{SHORT[key]}" if short else FLAGS[key], str(value)]
        elif key in SWITCHES and value:
            words.append(SWITCHES[key])
    return words


def environment(config: Mapping[str, object]) -> dict[str, str]:
    """Return the settings that `istio-iptables` takes from the environment only."""
    return {ENVIRONMENT[key]: str(value) for key, value in config.items() if key in ENVIRONMENT}


def _texts(config: Mapping[str, object], key: str) -> list[str]:
    value = config.get(key, [])
    return [str(item) for item in value] if isinstance(value, list) else []


# --- what the kernel holds ------------------------------------------------------------------------


def rules_of(text: str) -> Rules:
    """Return what iptables-save text holds; what is empty, counters and comments do not count."""
    found: Rules = {}
    chains: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line.startswith("*"):
            chains = found.setdefault(line[1:].strip(), {})
        elif line.startswith(":"):
            name, policy = line[1:].split()[:2]
            if policy == "-":  # an own chain counts even if it is empty
                chains.setdefault(name, [])
        elif line.startswith("-A "):
            _, chain, rule = line.split(" ", 2)
            chains.setdefault(chain, []).append(re.sub(r"\[\d+:\d+\] ?", "", rule).rstrip())
    return {table: dict(sorted(held.items())) for table, held in sorted(found.items()) if held}


def loaded(namespace: str, backend: str, version: int) -> Rules:
    return rules_of(inside(namespace, f"{_tool(backend, version)}-save"))


def assert_same(have: Rules, want: Rules) -> None:
    """Fail with the difference as one reads it: `-` is missing, `+` should not be there."""
    difference = difflib.unified_diff(
        _listing(want), _listing(have), "expected", "loaded", lineterm="", n=1
    )
    assert have == want, "\n".join(("rules differ", *difference))


def _listing(rules: Rules) -> list[str]:
    return [
        f"{table} {chain} {rule}"
        for table, chains in rules.items()
        for chain, held in chains.items()
        for rule in held
    ]


def load(namespace: str, backend: str, version: int, text: str) -> None:
    """Load restore text as istio-init does: beside what is there."""
    inside(namespace, f"{_tool(backend, version)}-restore", "--noflush", stdin=text)


def _tool(backend: str, version: int) -> str:
    name = "iptables" if version == 4 else "ip6tables"
    return f"{name}-{backend.removeprefix('iptables-')}"


def routing(namespace: str, table: str = "133") -> dict[str, list[str]]:
    """Return what the corpus has as `ip_readback`, in the same words."""

    def lines(*command: str) -> list[str]:
        printed = inside(namespace, "ip", *command, check=False).splitlines()
        return [" ".join(line.split(" ")).rstrip() for line in printed]

    addresses = lines("-6", "-o", "addr", "show", "dev", "lo")
    return {
        "rule4": lines("-4", "rule"),
        "rule6": lines("-6", "rule"),
        f"route4_{table}": lines("-4", "route", "show", "table", table),
        f"route6_{table}": lines("-6", "route", "show", "table", table),
        "lo_v6_addrs": sorted(line.split()[3] for line in addresses),
    }


def sections(text: str) -> dict[str, str]:
    """Split the output of `plan --format restore` at its headlines."""
    parts: dict[str, str] = {}
    title = ""
    for line in text.splitlines(keepends=True):
        if line.startswith("# "):
            title = line[2:].strip()
            parts[title] = ""
        else:
            parts[title] = parts.get(title, "") + line
    return parts
