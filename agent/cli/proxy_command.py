"""Ask the proxy of a pod how it is, at Envoy's admin port inside the pod's namespace.

  ready      Envoy's own state, and who listens on the ports that traffic is redirected to
  listeners  where Envoy listens, what for, and whether the kernel has a socket there
  clusters   the upstreams that Envoy knows, with the names that Istio makes taken apart
  certs      the certificates that Envoy holds, the first to expire first

Exit 1: the proxy is not ready (Envoy is not LIVE, or nobody listens on a port that traffic is
redirected to), or a certificate has expired or is not valid yet. Exit 3: no Envoy answers there.
"""

import argparse
import asyncio
import re
import socket
from collections.abc import Callable, Coroutine, Mapping
from datetime import UTC, datetime

from agent.capture import record
from agent.capture.inputs import Target
from agent.cli import output, proxy_views
from agent.cli.proxy_views import View
from agent.cli.target import opened
from agent.kernel.holders import holders
from agent.model import numbers
from agent.model.errors import EnvironmentLacks, InvalidSettings
from agent.model.values import MAX_PORT
from agent.proxy import ports
from agent.proxy.admin import Admin

EXAMPLES = """examples:
  intercept-agent proxy ready pod:shop/web
  intercept-agent proxy listeners demo
  intercept-agent proxy clusters container:3f2a9c -o json
  intercept-agent proxy certs pid:42 --admin-port 15000
"""
DEADLINE_S = 10.0
LONGEST_DEADLINE_S = 600.0


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what", choices=tuple(ASK), metavar="{" + ",".join(ASK) + "}", help="what to ask for"
    )
    parser.add_argument(
        "netns",
        metavar="NS",
        help="a name under /run/netns, a path, pid:N, container:ID, pod:NAMESPACE/NAME or self",
    )
    parser.add_argument(
        "--admin-port",
        metavar="PORT",
        default=str(numbers.ENVOY_ADMIN_PORT),
        help=f"Envoy's admin port ({numbers.ENVOY_ADMIN_PORT})",
    )
    parser.add_argument(
        "--timeout",
        metavar="SECONDS",
        default=str(DEADLINE_S),
        help=f"how long Envoy may take to answer ({DEADLINE_S:.0f})",
    )
    output.add_output_option(parser, "-o")


def run(arguments: argparse.Namespace) -> int:
    port, deadline_s = _port(arguments.admin_port), _seconds(arguments.timeout)
    # Reading does no harm, and a gateway's proxy may live in the node's own namespace.
    with opened(arguments.netns, allow_node=True) as target:

        async def connect() -> socket.socket:
            try:
                return ports.connect(target.netns, port)
            except ports.NobodyListens as error:
                raise EnvironmentLacks(
                    f"{error}: Envoy does not run in {target.name}, or has its admin port "
                    "elsewhere (--admin-port)"
                ) from error

        where = f"what listens on port {port} in {target.name}"
        view = asyncio.run(ASK[arguments.what](Admin(connect, where, deadline_s), target))
        if arguments.output == "json":
            output.print_json({"netns": _netns(target), "admin_port": port, **view.document})
        else:
            view.show(target.name)
    return 0 if view.good else 1


async def _ready(admin: Admin, target: Target) -> View:
    state = await admin.state()
    sockets = ports.listeners(target.netns)
    found = record.load(target.netns)
    capture = ports.capture_ports(found.settings if found else {})
    inodes = {s.inode for s in sockets if s.local[1] in {*capture, numbers.HEALTH_PORT}}
    return proxy_views.ready(state, sockets, capture, holders(target.netns.id, inodes))


async def _listeners(admin: Admin, target: Target) -> View:
    return proxy_views.listeners(await admin.listeners(), ports.listeners(target.netns))


async def _clusters(admin: Admin, _: Target) -> View:
    return proxy_views.clusters(await admin.clusters())


async def _certs(admin: Admin, _: Target) -> View:
    return proxy_views.certificates(await admin.certificates(), datetime.now(UTC))


ASK: Mapping[str, Callable[[Admin, Target], Coroutine[None, None, View]]] = {
    "ready": _ready,
    "listeners": _listeners,
    "clusters": _clusters,
    "certs": _certs,
}


def _netns(target: Target) -> dict[str, object]:
    netns = target.netns
    return {"path": netns.path, "dev": netns.id.dev, "ino": netns.id.ino}


def _port(text: str) -> int:
    if re.fullmatch(r"[0-9]{1,5}", text) and 0 < int(text) <= MAX_PORT:
        return int(text)
    raise InvalidSettings((f"--admin-port: {text!r} is not a port from 1 to {MAX_PORT}",))


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if 0 < value <= LONGEST_DEADLINE_S:
        return value
    longest = f"{LONGEST_DEADLINE_S:.0f}"
    raise InvalidSettings((f"--timeout: {text!r} is not a number of seconds up to {longest}",))
