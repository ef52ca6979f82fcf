"""Addresses and routes of a namespace, as a packet walk has to know them, through pyroute2."""

import ipaddress
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agent.kernel.netns import Netns
from agent.model.host import Host, Interface, LocalMark, Route

RTN_UNICAST, RTN_LOCAL = 1, 2  # linux/rtnetlink.h
FULL_MASK = 0xFFFFFFFF


def read_host(netns: Netns) -> Host:
    """Return what a walk must know of the namespace besides its rules.

    Raises: EnvironmentLacks without the right to enter.
    """
    return netns.run(_read)


def _read() -> Host:
    from pyroute2 import IPRoute  # costs 100 ms and 20 MB, so only where it is needed

    # The socket is made in this thread and is gone with it: pyroute2's own `netns=` forks, and
    # creates a namespace that is missing.
    with IPRoute() as ipr:
        names = {link["index"]: dict(link["attrs"])["IFLA_IFNAME"] for link in ipr.get_links()}
        marks = tuple(_local_marks(ipr))
        return Host(
            interfaces=tuple(_interfaces(ipr, names)),
            routes=tuple(_routes(ipr, names, {mark_table for _, mark_table in marks})),
            local_marks=tuple(mark for mark, _ in marks),
            forwarding=switched_on("ipv4/ip_forward"),
            route_localnet=switched_on("ipv4/conf/all/route_localnet"),
        )


def _interfaces(ipr: Any, names: dict[int, str]) -> Iterator[Interface]:
    addresses: dict[str, list[Any]] = {name: [] for name in names.values()}
    for message in ipr.get_addr():
        found = dict(message["attrs"])
        text = found.get("IFA_LOCAL") or found.get("IFA_ADDRESS")
        name = names.get(message["index"])
        if text and name:
            addresses[name].append(ipaddress.ip_interface(f"{text}/{message['prefixlen']}"))
    for name, found_addresses in addresses.items():
        yield Interface(name, tuple(found_addresses))


def _routes(ipr: Any, names: dict[int, str], marked: set[int]) -> Iterator[Route]:
    """Yield unicast routes of every table that an unmarked packet can reach."""
    for family in (socket.AF_INET, socket.AF_INET6):
        for message in ipr.get_routes(family=family):
            found = dict(message["attrs"])
            table = found.get("RTA_TABLE", message["table"])
            device = names.get(found.get("RTA_OIF", 0))
            if message["type"] != RTN_UNICAST or table in marked or device is None:
                continue
            everything = "0.0.0.0" if family == socket.AF_INET else "::"
            network = f"{found.get('RTA_DST', everything)}/{message['dst_len']}"
            source = found.get("RTA_PREFSRC")
            yield Route(
                ipaddress.ip_network(network, strict=False),
                device,
                ipaddress.ip_address(source) if source else None,
            )


def _local_marks(ipr: Any) -> Iterator[tuple[LocalMark, int]]:
    """Yield the marks whose packets are delivered here, and the table that does it."""
    for family in (socket.AF_INET, socket.AF_INET6):
        local_tables = {
            dict(message["attrs"]).get("RTA_TABLE", message["table"])
            for message in ipr.get_routes(family=family, type=RTN_LOCAL)
            if message["type"] == RTN_LOCAL and message["dst_len"] == 0
        }
        for message in ipr.get_rules(family=family):
            found = dict(message["attrs"])
            table = found.get("FRA_TABLE", message["table"])
            if "FRA_FWMARK" in found and table in local_tables:
                mask = found.get("FRA_FWMASK", FULL_MASK)
                yield LocalMark(found["FRA_FWMARK"], mask), table


def switched_on(name: str) -> bool:
    """Tell whether a switch below /proc/sys/net is 1 in the calling thread's namespace."""
    try:
        return (Path("/proc/sys/net") / name).read_text().strip() == "1"
    except OSError:
        return False
