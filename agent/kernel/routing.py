"""Policy rules, routes and addresses of a namespace, by rtnetlink through pyroute2.

Every function here runs in the calling thread's namespace: call it through `Netns.run`. pyroute2's
own `netns=` is not used: it forks, and it creates a namespace that is missing.
"""

import errno
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from agent.model.errors import KernelRejected
from agent.model.plan import LocalRoute, LoopbackAddress, PolicyRule, Route
from agent.model.ruleset import Family

if TYPE_CHECKING:
    from pyroute2 import IPRoute

RTN_LOCAL = 2  # linux/rtnetlink.h
AF = {Family.IPV4: socket.AF_INET, Family.IPV6: socket.AF_INET6}
FULL_MASK = 0xFFFFFFFF
IPV6_CONF = Path("/proc/sys/net/ipv6/conf")


def read_routes() -> tuple[Route, ...]:
    """Return what could be a capture's: fwmark rules, local default routes, addresses on lo."""
    from pyroute2 import IPRoute  # costs 100 ms and 20 MB, so only where routes are needed

    with IPRoute() as ipr:
        lo = _lo(ipr)
        found: list[Route] = []
        for family in Family:
            found += _policy_rules(ipr, family)
            found += _local_routes(ipr, family, lo)
        found += _addresses(ipr, lo)
    return tuple(found)


def change(remove: Iterable[Route], add: Iterable[Route]) -> None:
    """Take routes out and put routes in, in the order given; what is already so is fine.

    Raises: KernelRejected, naming the command that says the same.
    """
    from pyroute2 import IPRoute

    with IPRoute() as ipr:
        lo = _lo(ipr)
        for route in remove:
            _do(ipr, lo, "del", route, ignore=(errno.ENOENT, errno.ESRCH, errno.EADDRNOTAVAIL))
        for route in add:
            _do(ipr, lo, "add", route, ignore=(errno.EEXIST,))


def _lo(ipr: "IPRoute") -> int:
    return int(ipr.link_lookup(ifname="lo")[0])


def _policy_rules(ipr: "IPRoute", family: Family) -> Iterable[PolicyRule]:
    for message in ipr.get_rules(family=AF[family]):
        attributes = dict(message["attrs"])
        mark = attributes.get("FRA_FWMARK")
        if mark is None or attributes.get("FRA_FWMASK", FULL_MASK) != FULL_MASK:
            continue
        if message["src_len"] or message["dst_len"] or "FRA_IIFNAME" in attributes:
            continue
        yield PolicyRule(family, mark, attributes.get("FRA_TABLE", message["table"]))


def _local_routes(ipr: "IPRoute", family: Family, lo: int) -> Iterable[LocalRoute]:
    for message in ipr.get_routes(family=AF[family], type=RTN_LOCAL):
        attributes = dict(message["attrs"])
        everything = message["dst_len"] == 0 and message["type"] == RTN_LOCAL
        if everything and attributes.get("RTA_OIF") == lo:
            yield LocalRoute(family, attributes.get("RTA_TABLE", message["table"]))


def _addresses(ipr: "IPRoute", lo: int) -> Iterable[LoopbackAddress]:
    for message in ipr.get_addr(family=socket.AF_INET6, index=lo):
        attributes = dict(message["attrs"])
        address = f"{attributes['IFA_ADDRESS']}/{message['prefixlen']}"
        if message["index"] == lo and address != "::1/128":
            yield LoopbackAddress(Family.IPV6, address)


def _do(ipr: "IPRoute", lo: int, verb: str, route: Route, ignore: tuple[int, ...]) -> None:
    from pyroute2.netlink.exceptions import NetlinkError

    try:
        if isinstance(route, PolicyRule):
            ipr.rule(verb, family=AF[route.family], fwmark=route.mark, table=route.table, action=1)
        elif isinstance(route, LocalRoute):
            everything = "0.0.0.0/0" if route.family is Family.IPV4 else "::/0"
            ipr.route(
                verb,
                family=AF[route.family],
                dst=everything,
                type=RTN_LOCAL,
                scope=254 if route.family is Family.IPV4 else 0,
                oif=lo,
                table=route.table,
            )
        else:
            address, prefix = route.network.split("/")
            ipr.addr(verb, index=lo, address=address, prefixlen=int(prefix))
    except NetlinkError as error:
        if error.code not in ignore:
            command = route.command().replace(" add ", f" {verb} ")
            raise KernelRejected(f"`{command}` was refused: {error}", script=command) from error


# --- what an automatic setting needs to know ------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ipv6State:
    """Whether IPv6 exists, is switched on, and has an address beyond loopback and link-local."""

    present: bool
    enabled: bool
    addressed: bool
    lo_enabled: bool


def read_ipv6() -> Ipv6State:
    """Look at IPv6 in the calling thread's namespace. Reads /proc only."""
    try:
        lines = Path("/proc/thread-self/net/if_inet6").read_text().splitlines()
    except OSError:
        return Ipv6State(present=False, enabled=False, addressed=False, lo_enabled=False)
    # Fields: address, index, prefix length, scope (00 global, 10 host, 20 link), flags, device.
    addressed = any(line.split()[3] == "00" and line.split()[5] != "lo" for line in lines)
    devices = [path for path in _conf_dirs() if path.name not in ("all", "default", "lo")]
    enabled = any(not _disabled(path.name) for path in devices)
    if not devices:
        enabled = not _disabled("default")
    return Ipv6State(
        present=True, enabled=enabled, addressed=addressed, lo_enabled=not _disabled("lo")
    )


def _conf_dirs() -> list[Path]:
    try:
        return list(IPV6_CONF.iterdir())
    except OSError:
        return []


def _disabled(device: str) -> bool:
    try:
        return (IPV6_CONF / device / "disable_ipv6").read_text().strip() == "1"
    except OSError:
        return True
