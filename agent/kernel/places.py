"""What a namespace calls its own, and with which address it goes elsewhere.

A connection that is turned at the socket would leave with loopback's address. To give it the one
that it would have had, the programs are told what the routes say: for every route the kernel is
asked which source it chooses.
"""

import errno
import ipaddress
import socket
from collections.abc import Iterable, Iterator

from agent.kernel.netlink import NetlinkSocket, attribute, attributes
from agent.kernel.routing import (
    AF,
    IFA_ADDRESS,
    IFADDRMSG,
    RTA_DST,
    RTA_TABLE,
    RTM_GETADDR,
    RTM_GETROUTE,
    RTMSG,
    RTN_LOCAL,
    WORD,
)
from agent.model.enrolment import MAX_PLACES, Place
from agent.model.host import LOOPBACK_NETWORKS
from agent.model.ruleset import Family
from agent.model.values import Address, Network

IFA_LOCAL = 2
RTA_PREFSRC = 7
RTN_UNICAST = 1
RT_TABLE_LOCAL = 255


def read_places(rtnl: NetlinkSocket, families: Iterable[Family]) -> tuple[Place, ...]:
    """Return the places of a namespace, the longest prefixes first; not more than fit.

    Raises: OSError if the kernel does not tell.
    """
    local: set[Network] = set()
    routed: set[Network] = set()
    for family in families:
        local |= {ipaddress.ip_network(address) for address in _addresses(rtnl, family)}
        for network, kind, table in _routes(rtnl, family):
            if kind == RTN_LOCAL and table == RT_TABLE_LOCAL:
                local.add(network)
            elif kind == RTN_UNICAST and not network.network_address.is_link_local:
                routed.add(network)
    local = {network for network in local if not network.network_address.is_loopback}
    everything = (local | routed).union(LOOPBACK_NETWORKS)
    found = [Place(network, None, local=True) for network in LOOPBACK_NETWORKS]
    for network in local | routed:
        source = _source(rtnl, network, everything)
        found.append(Place(network, source, local=network in local))
    return _essential(found)


def _essential(places: Iterable[Place]) -> tuple[Place, ...]:
    """Leave out what the next shorter prefix says anyway; the namespace's own come first."""
    ordered = sorted(places, key=_order)
    kept = []
    for index, place in enumerate(ordered):
        wider = next((p for p in ordered[index + 1 :] if _covers(p.network, place.network)), None)
        if wider is None or (wider.source, wider.local) != (place.source, place.local):
            kept.append(place)
    fitting = sorted(kept, key=lambda place: not place.local)[:MAX_PLACES]
    return tuple(sorted(fitting, key=_order))


def _order(place: Place) -> tuple[int, int, int]:
    network = place.network
    hosts = network.max_prefixlen - network.prefixlen
    return hosts, network.version, int(network.network_address)


def _covers(wide: Network, narrow: Network) -> bool:
    return wide.version == narrow.version and narrow.network_address in wide


def _addresses(rtnl: NetlinkSocket, family: Family) -> Iterator[Address]:
    for message in _dump(rtnl, RTM_GETADDR, IFADDRMSG.pack(AF[family], 0, 0, 0, 0)):
        found = attributes(message, IFADDRMSG.size)
        yield ipaddress.ip_address(found.get(IFA_LOCAL) or found[IFA_ADDRESS])


def _routes(rtnl: NetlinkSocket, family: Family) -> Iterator[tuple[Network, int, int]]:
    """Yield destination, type and table of every route."""
    nothing = bytes(4 if family is Family.IPV4 else 16)
    for message in _dump(rtnl, RTM_GETROUTE, RTMSG.pack(AF[family], 0, 0, 0, 0, 0, 0, 0, 0)):
        _, length, _, _, table, _, _, kind, _ = RTMSG.unpack_from(message)
        found = attributes(message, RTMSG.size)
        table = WORD.unpack(found[RTA_TABLE])[0] if RTA_TABLE in found else table
        address = ipaddress.ip_address(found.get(RTA_DST, nothing))
        yield ipaddress.ip_network((address, length)), kind, table


def _source(rtnl: NetlinkSocket, network: Network, others: Iterable[Network]) -> Address | None:
    """Ask the kernel which address it takes towards a network."""
    narrower = [n for n in others if n != network and _covers(network, n)]
    address = next(
        (a for a in _inside(network) if not any(_covers(n, _alone(a)) for n in narrower)), None
    )
    if address is None:
        return None
    family = socket.AF_INET if network.version == 4 else socket.AF_INET6
    query = RTMSG.pack(family, network.max_prefixlen, 0, 0, 0, 0, 0, 0, 0)
    try:
        answer = rtnl.get(RTM_GETROUTE, query + attribute(RTA_DST, address.packed))
    except OSError:  # nobody gets there now
        return None
    raw = attributes(answer, RTMSG.size).get(RTA_PREFSRC)
    return ipaddress.ip_address(raw) if raw else None


def _alone(address: Address) -> Network:
    return ipaddress.ip_network(address)


def _inside(network: Network) -> Iterator[Address]:
    """Yield addresses of a network that are far from each other."""
    for bit in range(network.max_prefixlen - network.prefixlen - 1, -1, -1):
        yield network.network_address + (1 << bit)
    yield network.network_address


def _dump(rtnl: NetlinkSocket, kind: int, payload: bytes) -> Iterator[bytes]:
    try:
        yield from (message.payload for message in rtnl.dump(kind, payload))
    except OSError as error:
        if error.errno not in (errno.EAFNOSUPPORT, errno.EOPNOTSUPP):
            raise
