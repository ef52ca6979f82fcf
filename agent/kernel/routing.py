"""Policy rules, routes and addresses of a namespace, over a route socket that was made in it."""

import errno
import ipaddress
import os
import socket
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from agent.kernel.netlink import (
    NLM_F_CREATE,
    NLM_F_EXCL,
    NetlinkSocket,
    attribute,
    attributes,
)
from agent.model.errors import KernelRejected
from agent.model.plan import LocalRoute, LoopbackAddress, PolicyRule, Route
from agent.model.ruleset import Family

AF = {Family.IPV4: socket.AF_INET, Family.IPV6: socket.AF_INET6}

# linux/rtnetlink.h
RTM_GETLINK = 18
IFF_UP = 1
RTM_NEWADDR, RTM_DELADDR, RTM_GETADDR = 20, 21, 22
RTM_NEWROUTE, RTM_DELROUTE, RTM_GETROUTE = 24, 25, 26
RTM_NEWRULE, RTM_DELRULE, RTM_GETRULE = 32, 33, 34
RTN_LOCAL = 2
RTPROT_BOOT = 3
RT_SCOPE_UNIVERSE, RT_SCOPE_HOST = 0, 254
RTA_DST, RTA_OIF, RTA_TABLE = 1, 4, 15
FR_ACT_TO_TBL = 1
FIB_RULE_INVERT = 0x02
FRA_PRIORITY, FRA_FWMARK, FRA_SUPPRESS_PREFIXLEN, FRA_TABLE, FRA_FWMASK = 6, 10, 14, 15, 16
FRA_PROTOCOL = 21
# What the kernel says of a rule that selects by nothing but its mark.
FRA_PLAIN = {FRA_PRIORITY, FRA_FWMARK, FRA_SUPPRESS_PREFIXLEN, FRA_TABLE, FRA_FWMASK, FRA_PROTOCOL}
IFA_ADDRESS = 1
IFA_F_NODAD = 0x02

RTMSG = struct.Struct("=BBBBBBBBI")  # struct rtmsg, and struct fib_rule_hdr of the same layout
IFADDRMSG = struct.Struct("=BBBBI")
IFINFOMSG = struct.Struct("=BxHiII")
WORD = struct.Struct("=I")
FULL_MASK = 0xFFFFFFFF
LO_INDEX = 1  # the kernel gives lo the first index in every namespace (LOOPBACK_IFINDEX)

IPV6_CONF = Path("/proc/sys/net/ipv6/conf")


def read_routes(rtnl: NetlinkSocket) -> tuple[Route, ...]:
    """Return what could be a capture's: fwmark rules, local default routes, addresses on lo."""
    found: list[Route] = []
    for family in Family:
        found += _policy_rules(rtnl, family)
        found += _local_routes(rtnl, family)
    found += _addresses(rtnl)
    return tuple(found)


def change(rtnl: NetlinkSocket, remove: Iterable[Route], add: Iterable[Route]) -> None:
    """Take routes out and put routes in, in the order given; what is already so is fine.

    Raises: KernelRejected, naming the command that says the same.
    """
    gone = (errno.ENOENT, errno.ESRCH, errno.EADDRNOTAVAIL)
    for route in remove:
        _request(rtnl, "del", route, ignore=gone)
    for route in add:
        _request(rtnl, "add", route, ignore=(errno.EEXIST,))


def lo_is_up(rtnl: NetlinkSocket) -> bool:
    """Tell whether lo is up; while it is down, no route goes through it."""
    query = IFINFOMSG.pack(socket.AF_UNSPEC, 0, LO_INDEX, 0, 0)
    for message in rtnl.dump(RTM_GETLINK, query):
        _, _, index, flags, _ = IFINFOMSG.unpack_from(message.payload)
        if index == LO_INDEX:
            return bool(flags & IFF_UP)
    return False


def _policy_rules(rtnl: NetlinkSocket, family: Family) -> Iterator[PolicyRule]:
    """Yield the rules that select by their mark alone; any other selector is somebody's."""
    for message in _dump(rtnl, RTM_GETRULE, RTMSG.pack(AF[family], 0, 0, 0, 0, 0, 0, 0, 0)):
        _, dst_len, src_len, tos, table, _, _, action, flags = RTMSG.unpack_from(message)
        found = attributes(message, RTMSG.size)
        if FRA_FWMARK not in found or dst_len or src_len or tos:
            continue
        if action != FR_ACT_TO_TBL or flags & FIB_RULE_INVERT or set(found) - FRA_PLAIN:
            continue
        whole = WORD.pack(FULL_MASK)  # which also stands for "suppresses nothing"
        mask = found.get(FRA_FWMASK, whole)
        if found.get(FRA_SUPPRESS_PREFIXLEN, whole) != whole:
            continue
        table = WORD.unpack(found[FRA_TABLE])[0] if FRA_TABLE in found else table
        priority = WORD.unpack(found[FRA_PRIORITY])[0] if FRA_PRIORITY in found else 0
        mark = WORD.unpack(found[FRA_FWMARK])[0]
        yield PolicyRule(family, mark, table, priority, WORD.unpack(mask)[0])


def _local_routes(rtnl: NetlinkSocket, family: Family) -> Iterator[LocalRoute]:
    query = RTMSG.pack(AF[family], 0, 0, 0, 0, 0, 0, 0, 0)
    for message in _dump(rtnl, RTM_GETROUTE, query):
        _, dst_len, _, _, table, _, _, kind, _ = RTMSG.unpack_from(message)
        if kind != RTN_LOCAL or dst_len:
            continue
        found = attributes(message, RTMSG.size)
        if found.get(RTA_OIF) == WORD.pack(LO_INDEX):
            table = WORD.unpack(found[RTA_TABLE])[0] if RTA_TABLE in found else table
            yield LocalRoute(family, table)


def _addresses(rtnl: NetlinkSocket) -> Iterator[LoopbackAddress]:
    query = IFADDRMSG.pack(socket.AF_INET6, 0, 0, 0, 0)
    for message in _dump(rtnl, RTM_GETADDR, query):
        _, prefix, _, _, index = IFADDRMSG.unpack_from(message)
        if index == LO_INDEX:
            raw = attributes(message, IFADDRMSG.size)[IFA_ADDRESS]
            address = ipaddress.ip_address(raw)
            if not address.is_loopback:
                yield LoopbackAddress(Family.IPV6, str(address), prefix)


def _dump(rtnl: NetlinkSocket, kind: int, payload: bytes) -> list[bytes]:
    """Return the messages of a dump; a kernel without IPv6 answers that it has no such family."""
    try:
        return [message.payload for message in rtnl.dump(kind, payload)]
    except OSError as error:
        if error.errno in (errno.EAFNOSUPPORT, errno.EOPNOTSUPP):
            return []
        raise


def _request(rtnl: NetlinkSocket, verb: str, route: Route, ignore: tuple[int, ...]) -> None:
    new, old, payload = _message(route)
    flags = NLM_F_CREATE | NLM_F_EXCL if verb == "add" else 0
    try:
        rtnl.request(new if verb == "add" else old, flags, payload)
    except OSError as error:
        if error.errno not in ignore:
            command = route.command(verb)
            said = os.strerror(error.errno or 0)
            raise KernelRejected(f"`{command}` was refused: {said}", script=command) from error


def _message(route: Route) -> tuple[int, int, bytes]:
    """Return the request types to make and to remove a route, and their payload."""
    family = AF[route.family]
    if isinstance(route, PolicyRule):
        head = RTMSG.pack(family, 0, 0, 0, 0, 0, 0, FR_ACT_TO_TBL, 0)
        words = {FRA_FWMARK: route.mark, FRA_FWMASK: route.mask, FRA_TABLE: route.table}
        if route.priority is not None:
            words[FRA_PRIORITY] = route.priority
        body = b"".join(attribute(kind, WORD.pack(word)) for kind, word in words.items())
        return RTM_NEWRULE, RTM_DELRULE, head + body
    if isinstance(route, LocalRoute):
        scope = RT_SCOPE_HOST if route.family is Family.IPV4 else RT_SCOPE_UNIVERSE
        head = RTMSG.pack(family, 0, 0, 0, 0, RTPROT_BOOT, scope, RTN_LOCAL, 0)
        device = attribute(RTA_OIF, WORD.pack(LO_INDEX))
        body = device + attribute(RTA_TABLE, WORD.pack(route.table))
        return RTM_NEWROUTE, RTM_DELROUTE, head + body
    # Without NODAD the kernel takes the address on trial first, and a bind to it fails meanwhile.
    head = IFADDRMSG.pack(family, route.prefix, IFA_F_NODAD, 0, LO_INDEX)
    packed = ipaddress.ip_address(route.address).packed
    return RTM_NEWADDR, RTM_DELADDR, head + attribute(IFA_ADDRESS, packed)


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
