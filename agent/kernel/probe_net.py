"""An outside for a probe: a namespace that nobody else knows, joined to a pod's by a veth pair.

    the pod's namespace                       the outside
    icpt-probe, `Link.pod` per family  <--->  far, `Link.far` and the addresses of all `Road`s

The outside has no name, only a descriptor. So however this process ends, the outside ends with it,
and with the outside its end of the pair, the pod's end, and all addresses and routes on that.

Nothing of the pod's own is changed. A `Road` is a host route; it is open to the probe's packets
only, unless it says `everyone`: IPv4 by a TOS that no program sets, IPv6 by the source address.
Both ends have one hardware address and no ARP, so that neighbour discovery, which may be filtered
like any packet, plays no part. A hop limit of 1 makes a packet that strays die at the node.
"""

import contextlib
import errno
import ipaddress
import os
import socket
import struct
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agent.kernel import libc
from agent.kernel.netlink import (
    NETLINK_ROUTE,
    NetlinkSocket,
    attribute,
    attributes,
)
from agent.kernel.netns import Netns, NetnsId
from agent.kernel.routing import IPV6_CONF
from agent.kernel.sockets import AF
from agent.model.errors import EnvironmentLacks
from agent.model.ruleset import Family
from agent.model.values import Address, Network

if TYPE_CHECKING:
    from pyroute2 import IPRoute

FAR = "far"
HARDWARE_ADDRESS = "02:00:00:00:00:01"
PROBE_TOS = 0x1C  # all three bits that IPv4 routes can tell apart; no DSCP class has this value
HOP_LIMIT = 1

IFF_UP, IFF_NOARP = 0x1, 0x80  # linux/if.h
IF_OPER_UP = 6  # RFC 2863
ADDR_GEN_MODE_NONE = 1  # linux/if_link.h: no link-local address
IFA_F_NODAD = 0x02
FOREVER = 0xFFFFFFFF
RTM_GETROUTE = 26  # linux/rtnetlink.h
RTMSG_SIZE = 12
RTA_DST, RTA_SRC, RTA_OIF, RTA_UID = 1, 2, 4, 25

BUSY_S = 3.0  # how long another probe of the same namespace, or what a killed one left, may take
UP_S = 2.0
POLL_S = 0.002
WORK_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The addresses of both ends in one family."""

    family: Family
    pod: Address
    far: Address
    prefix: int


@dataclass(frozen=True, slots=True)
class Road:
    """An address outside, and whether everyone in the pod is led there or only the probe."""

    address: Address
    everyone: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What a namespace holds that a probe must keep clear of.

    `addresses` are its own with their networks, in the kernel's order; `networks` the destinations
    that it has routes to, without the default ones. `ipv6` tells whether a new interface can have
    IPv6.
    """

    addresses: tuple[ipaddress.IPv4Interface | ipaddress.IPv6Interface, ...] = ()
    networks: tuple[Network, ...] = ()
    interfaces: frozenset[str] = frozenset()
    lo_up: bool = True
    ipv6: bool = True


def look() -> Surroundings:
    """Return the surroundings in the calling thread's namespace. Reads only."""
    from pyroute2 import IPRoute  # costs 100 ms and 20 MB, so only where routes are needed

    with IPRoute() as ipr:
        links = {dict(link["attrs"])["IFLA_IFNAME"]: link for link in ipr.get_links()}
        return Surroundings(
            addresses=tuple(a for family in Family for a in _addresses(ipr, family)),
            networks=tuple(n for family in Family for n in _networks(ipr, family)),
            interfaces=frozenset(links),
            lo_up=bool(links["lo"]["flags"] & IFF_UP),
            ipv6=_ipv6_possible(),
        )


def _ipv6_possible() -> bool:
    path = IPV6_CONF / "default" / "disable_ipv6"
    try:
        return path.read_text().strip() == "0" or os.access(path, os.W_OK)
    except OSError:
        return False


def _addresses(
    ipr: "IPRoute", family: Family
) -> Iterator[ipaddress.IPv4Interface | ipaddress.IPv6Interface]:
    for message in ipr.get_addr(family=AF[family]):
        attributes = dict(message["attrs"])
        # With a peer IFA_ADDRESS is the other end's.
        own = attributes.get("IFA_LOCAL", attributes.get("IFA_ADDRESS"))
        yield ipaddress.ip_interface(f"{own}/{message['prefixlen']}")


def _networks(ipr: "IPRoute", family: Family) -> Iterator[Network]:
    for message in ipr.get_routes(family=AF[family]):
        destination = dict(message["attrs"]).get("RTA_DST")
        if destination and message["dst_len"]:
            yield ipaddress.ip_network(f"{destination}/{message['dst_len']}", strict=False)


# --- the outside ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Outside:
    """The other end: its namespace, and the index of the pod's end of the link."""

    netns: Netns
    pod: Netns
    index: int

    def leads(self, packets: Iterable[tuple[Address, Address, int]]) -> tuple[bool, ...]:
        """Tell which packets of the probe the pod sends over the link.

        A packet is its destination, its source and the uid of its sender.
        """
        with self.pod.run(_Router) as router:
            return tuple(router.interface(*packet) == self.index for packet in packets)


class _Router(NetlinkSocket):
    """Asks for the way of a packet. pyroute2 cannot: its request has no uid."""

    def __init__(self) -> None:
        super().__init__(NETLINK_ROUTE)

    def interface(self, destination: Address, source: Address, uid: int) -> int | None:
        """Return the index of the interface that such a packet leaves by, None if it does not."""
        bits = destination.max_prefixlen
        family, tos = (socket.AF_INET, PROBE_TOS) if bits == 32 else (socket.AF_INET6, 0)
        body = struct.pack("=BBBBBBBBI", family, bits, bits, tos, 0, 0, 0, 0, 0)
        body += attribute(RTA_DST, destination.packed) + attribute(RTA_SRC, source.packed)
        body += attribute(RTA_UID, struct.pack("=I", uid))
        try:
            answer = self.get(RTM_GETROUTE, body)
        except OSError:  # no route at all, or one that refuses
            return None
        found = attributes(answer, RTMSG_SIZE).get(RTA_OIF)
        return int.from_bytes(found, sys.byteorder) if found else None


@contextlib.contextmanager
def outside(
    pod: Netns, name: str, links: Iterable[Link], roads: Iterable[Road]
) -> Iterator[Outside]:
    """Give a pod an outside with these addresses for as long as the block lasts.

    `name` is the pod's end of the link; where there is one already, the one who made it is waited
    for. Nothing is left when the block ends, in whatever way.

    Raises: EnvironmentLacks if the kernel refuses, or another probe does not end in time.
    """
    links, roads = tuple(links), tuple(roads)
    with _fresh_namespace() as far:
        index = pod.run(lambda: _add_link(name, far.fd), timeout_s=WORK_S)
        try:
            far.run(lambda: _prepare_far(links, roads), timeout_s=WORK_S)
            pod.run(lambda: _prepare_pod(index, name, links, roads), timeout_s=WORK_S)
            far.run(_wait_until_up, timeout_s=WORK_S)
            yield Outside(far, pod, index)
        finally:
            # The end of the outside would do it too, but only some time later.
            pod.run(lambda: _delete_link(index), timeout_s=WORK_S)


def _fresh_namespace() -> Netns:
    """Return a new namespace that lives as long as its descriptor."""
    own = Netns.open("/proc/thread-self/ns/net")

    def make() -> Netns:
        try:
            libc.unshare(libc.CLONE_NEWNET)
        except PermissionError as error:
            raise _refused("make a namespace without CAP_SYS_ADMIN", error) from error
        fd = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        status = os.fstat(fd)
        return Netns("the outside of the probe", NetnsId(status.st_dev, status.st_ino), fd)

    with own:
        return own.run(make, timeout_s=WORK_S)


def _refused(what: str, error: Exception) -> EnvironmentLacks:
    return EnvironmentLacks(f"the probe cannot {what}: {error}; nothing was left behind")


def _add_link(name: str, far_fd: int) -> int:
    from pyroute2 import IPRoute
    from pyroute2.netlink.exceptions import NetlinkError

    deadline = time.monotonic() + BUSY_S
    peer = {"ifname": FAR, "net_ns_fd": far_fd, "address": HARDWARE_ADDRESS}
    with IPRoute() as ipr:
        while True:
            try:
                ipr.link("add", ifname=name, kind="veth", address=HARDWARE_ADDRESS, peer=peer)
                return int(ipr.link_lookup(ifname=name)[0])
            except NetlinkError as error:
                if error.code != errno.EEXIST:
                    raise _refused("make a veth pair", error) from error
            if time.monotonic() > deadline:
                raise EnvironmentLacks(
                    f"an interface {name} is there already and stays: another probe of this "
                    f"namespace hangs, or somebody made it; `ip link del {name}` in it helps"
                )
            time.sleep(POLL_S)


def _delete_link(index: int) -> None:
    from pyroute2 import IPRoute
    from pyroute2.netlink.exceptions import NetlinkError

    with IPRoute() as ipr, contextlib.suppress(NetlinkError):
        ipr.link("del", index=index)


def _bring_up(ipr: "IPRoute", index: int) -> None:
    mode = {"attrs": [("IFLA_INET6_ADDR_GEN_MODE", ADDR_GEN_MODE_NONE)]}
    flags = IFF_UP | IFF_NOARP
    with_ipv6 = {"IFLA_AF_SPEC": {"attrs": [("AF_INET6", mode)]}}
    extra = with_ipv6 if os.path.exists("/proc/thread-self/net/if_inet6") else {}
    ipr.link("set", index=index, flags=flags, change=flags, **extra)


def _add_address(ipr: "IPRoute", index: int, address: Address, prefix: int) -> None:
    extra: dict[str, object] = {}
    if address.version == 6:
        # Not preferred: no connection of anybody else is to take it as its source.
        extra = {"flags": IFA_F_NODAD, "preferred_lft": 0, "valid_lft": FOREVER}
    ipr.addr("add", index=index, address=str(address), prefixlen=prefix, **extra)


def _prepare_far(links: tuple[Link, ...], roads: tuple[Road, ...]) -> None:
    from pyroute2 import IPRoute
    from pyroute2.netlink.exceptions import NetlinkError

    try:
        with IPRoute() as ipr:
            index = int(ipr.link_lookup(ifname=FAR)[0])
            _bring_up(ipr, index)
            for link in links:
                _add_address(ipr, index, link.far, link.prefix)
            for road in roads:
                _add_address(ipr, index, road.address, road.address.max_prefixlen)
            for link in links:
                ipr.route("add", family=AF[link.family], dst="default", oif=index)
    except NetlinkError as error:
        raise _refused("set up its own namespace", error) from error


def _prepare_pod(index: int, name: str, links: tuple[Link, ...], roads: tuple[Road, ...]) -> None:
    from pyroute2 import IPRoute
    from pyroute2.netlink.exceptions import NetlinkError

    sources = {link.family.version: link for link in links}
    if 6 in sources:
        _enable_ipv6(name)
    try:
        with IPRoute() as ipr:
            _bring_up(ipr, index)
            for link in links:
                _add_address(ipr, index, link.pod, link.prefix)
            for road in roads:
                _add_road(ipr, index, road, sources[road.address.version].pod)
    except NetlinkError as error:
        raise _refused("set up its link in the pod's namespace", error) from error


def _enable_ipv6(name: str) -> None:
    """Switch IPv6 on for the link alone, where new interfaces come without it."""
    path = IPV6_CONF / name / "disable_ipv6"
    with contextlib.suppress(OSError):
        if path.read_text().strip() == "1":
            path.write_text("0")


def _add_road(ipr: "IPRoute", index: int, road: Road, source: Address) -> None:
    narrow: dict[str, object] = {}
    if not road.everyone and source.version == 4:
        narrow = {"tos": PROBE_TOS}
    elif not road.everyone:
        narrow = {"src": f"{source}/128"}
    family = socket.AF_INET if source.version == 4 else socket.AF_INET6
    destination = f"{road.address}/{road.address.max_prefixlen}"
    ipr.route("add", family=family, dst=destination, oif=index, **narrow)


def _wait_until_up() -> None:
    """Wait for the end that was set up first: the other's arrival reaches it a moment later."""
    from pyroute2 import IPRoute

    deadline = time.monotonic() + UP_S
    with IPRoute() as ipr:
        index = int(ipr.link_lookup(ifname=FAR)[0])
        while True:
            (link,) = ipr.get_links(index)
            if dict(link["attrs"])["IFLA_OPERSTATE"] in (IF_OPER_UP, "UP"):
                return
            if time.monotonic() > deadline:
                raise EnvironmentLacks("the probe's link did not come up; nothing was left behind")
            time.sleep(POLL_S)
