"""Captures as tests need them: settings with a name, and the agent's use cases by name."""

import json
import os
import re
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from agent.capture import apply as use_cases
from agent.capture.check import Report, check
from agent.capture.transition import BeforeStep, no_hook
from agent.kernel.netns import Netns
from agent.model.settings import Settings, parse
from tests.support.netns import path_of, snapshot

BACKENDS = ("nftables", "iptables-nft", "iptables-legacy")
ROOT = Path(__file__).parents[2]
STATE_DIR = "INTERCEPT_STATE_DIR"
CLI_TIMEOUT_S = 60.0

Raw = Mapping[str, object]

EVERYTHING: Raw = {
    "inbound_ports_include": "*",
    "outbound_ip_ranges_include": "*",
    "enable_ipv6": True,
}
DNS: Raw = {
    "redirect_dns": True,
    "dns_servers_v4": "10.96.0.10",
    "dns_servers_v6": "fd00:96::10",
    "drop_invalid": True,
}
TPROXY: Raw = {**EVERYTHING, "inbound_interception_mode": "TPROXY"}

# Each captures what the clients of the escape tests dial, so changing from one to another must
# never let anything through.
SETTINGS: Mapping[str, Raw] = {
    "redirect": EVERYTHING,
    "tproxy": TPROXY,
    "redirect-dns": {**EVERYTHING, **DNS},
    "other-mark-and-table": {
        **TPROXY,
        "inbound_tproxy_mark": 1400,
        "inbound_tproxy_route_table": 140,
    },
    "tproxy-dns": {**TPROXY, **DNS},
    "other-ports": {**EVERYTHING, "proxy_port": 15101, "inbound_capture_port": 15106},
    "other-table": {**TPROXY, "inbound_tproxy_route_table": 140},
    "listed-ports": {
        **EVERYTHING,
        "inbound_ports_include": "8080,9090",
        "outbound_ip_ranges_exclude": "10.1.0.0/16,fd00:1::/32",
    },
    "other-mark": {**TPROXY, **DNS, "inbound_tproxy_mark": 1400},
    "ambient": {"mode": "ambient", "enable_ipv6": True, "redirect_dns": True},
}
RICH = SETTINGS["tproxy-dns"]

NFTABLES_SUBSYSTEM, GET_GENERATION = 10, 16  # linux/netfilter/nfnetlink.h, nf_tables.h
NETLINK_NETFILTER = 12
# RTNLGRP_IPV4_IFADDR, IPV4_ROUTE, IPV4_RULE, IPV6_IFADDR, IPV6_ROUTE, IPV6_RULE
ROUTING_GROUPS = (5, 7, 8, 9, 11, 19)


def settings(raw: Raw) -> Settings:
    return parse(dict(raw))


def capture(
    name: str, raw: Raw, backend: str, *, before_step: BeforeStep = no_hook
) -> use_cases.Result:
    with Netns.open(path_of(name)) as opened:
        return use_cases.apply(opened, settings(raw), backend=backend, before_step=before_step)


def release(name: str, *, before_step: BeforeStep = no_hook) -> use_cases.Result:
    with Netns.open(path_of(name)) as opened:
        return use_cases.remove(opened, before_step=before_step)


def report(name: str, raw: Raw, backend: str) -> Report:
    with Netns.open(path_of(name)) as opened:
        return check(opened, settings(raw), backend=backend)


def assert_in_sync(name: str, raw: Raw, backend: str) -> None:
    found = report(name, raw, backend)
    assert found.in_sync, [*found.foreign, *(d.line() for d in found.differences)]


def state(name: str) -> dict[str, str]:
    """Return everything in a namespace, as text that is the same whenever the state is.

    nft prints what follows the counter of an iptables-nft rule now so, now so: it depends on which
    family's extension it happens to load first. iptables-nft-save has those rules in full.
    """
    found = snapshot(name)
    return {**found, "nft": re.sub(r" counter .*", " counter", found["nft"])}


def words(raw: Raw) -> tuple[str, ...]:
    """Return the settings as the command line takes them: JSON is YAML."""
    complete = {"dns_servers_v4": "", "dns_servers_v6": "", "enable_ipv6": False, **raw}
    path = Path(os.environ[STATE_DIR]) / f"settings-{abs(hash(json.dumps(complete)))}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(complete))
    return ("--settings", str(path))


def started(
    *arguments: str, path: str = "", stderr: int = subprocess.PIPE
) -> subprocess.Popen[str]:
    """Start the command line; `path` is searched for tools before the usual folders."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    if path:
        environment["PATH"] = f"{path}:{os.environ['PATH']}"
    return subprocess.Popen(
        # Whoever runs the tests in the background of a shell has them ignore an interrupt.
        ("env", "--default-signal=INT", sys.executable, "-m", "agent.cli.main", *arguments),
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if stderr == subprocess.PIPE else subprocess.DEVNULL,
        stderr=stderr,
        text=True,
    )


def command(*arguments: str, path: str = "") -> tuple[int, str, str]:
    """Run the command line; return its exit code and what it printed."""
    with started(*arguments, path=path) as process:
        out, err = process.communicate(timeout=CLI_TIMEOUT_S)
    assert "Traceback" not in err, err
    return process.returncode, out, err


# --- what the kernel itself says about writes -----------------------------------------------------


def generation(name: str) -> int:
    """Return the generation of the namespace's nf_tables: any transaction makes it another."""

    def ask() -> int:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_NETFILTER) as door:
            kind = NFTABLES_SUBSYSTEM << 8 | GET_GENERATION
            door.send(struct.pack("=IHHIIBBH", 20, kind, 1, 1, 0, 0, 0, 0))
            answer = door.recv(4096)
        return int(struct.unpack_from("!I", answer, 24)[0])

    with Netns.open(path_of(name)) as opened:
        return opened.run(ask)


def routing_monitor(name: str) -> socket.socket:
    """Return a socket that hears of every change of addresses, routes and policy rules."""

    def make() -> socket.socket:
        door = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)
        door.bind((0, 0))
        for group in ROUTING_GROUPS:
            door.setsockopt(270, 1, group)  # SOL_NETLINK, NETLINK_ADD_MEMBERSHIP
        door.setblocking(False)
        return door

    with Netns.open(path_of(name)) as opened:
        return opened.run(make)


def heard(door: socket.socket) -> int:
    """Return how many messages have come in since."""
    count = 0
    while True:
        try:
            door.recv(65536)
        except BlockingIOError:
            return count
        count += 1
