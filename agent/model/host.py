"""What a packet walk must know of a namespace besides its rules: addresses and routes. Pure."""

import ipaddress
from collections.abc import Iterator
from dataclasses import dataclass

from agent.model.packet import Address

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
InterfaceAddress = ipaddress.IPv4Interface | ipaddress.IPv6Interface

LOOPBACK = "lo"
LOOPBACK_NETWORKS: tuple[Network, ...] = (
    ipaddress.IPv4Network("127.0.0.0/8"),
    ipaddress.IPv6Network("::1/128"),
)


@dataclass(frozen=True, slots=True)
class Interface:
    """An interface and its addresses in the kernel's order, with their prefix lengths."""

    name: str
    addresses: tuple[InterfaceAddress, ...] = ()


@dataclass(frozen=True, slots=True)
class Route:
    """An entry of the route tables. A route of type local has the interface `lo`."""

    network: Network
    interface: str
    source: Address | None = None


@dataclass(frozen=True, slots=True)
class LocalMark:
    """An `ip rule` that delivers packets with this mark locally, as TPROXY needs it."""

    value: int
    mask: int = 0xFFFFFFFF

    def __contains__(self, mark: object) -> bool:
        return isinstance(mark, int) and mark & self.mask == self.value & self.mask


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One namespace. Loopback is always there; routes to the addresses themselves are implied."""

    interfaces: tuple[Interface, ...] = ()
    routes: tuple[Route, ...] = ()
    local_marks: tuple[LocalMark, ...] = ()
    forwarding: bool = False
    route_localnet: bool = False

    def lookup(self, destination: Address, mark: int = 0) -> Route | None:
        """Return the route that a packet takes; None if there is none."""
        if any(mark in local for local in self.local_marks):
            return Route(ipaddress.ip_network(destination), LOOPBACK)
        fitting = [
            route
            for route in self._routes()
            if route.network.version == destination.version and destination in route.network
        ]
        return max(fitting, key=lambda route: route.network.prefixlen, default=None)

    def is_local(self, address: Address, mark: int = 0) -> bool:
        """Whether packets to `address` are delivered in this namespace."""
        route = self.lookup(address, mark)
        return route is not None and route.interface == LOOPBACK

    def source_for(self, destination: Address, route: Route) -> Address | None:
        """Return the source that the kernel picks for a socket that is bound to no address."""
        if route.source is not None:
            return route.source
        return self.masquerade(route.interface, destination)

    def addresses(self, interface: str, like: Address) -> Iterator[Address]:
        """Yield the addresses of an interface that suit a peer `like`, best first.

        Where it has none, those of the other interfaces follow, as the kernel does.
        """
        ordered = sorted(self.interfaces, key=lambda found: found.name != interface)
        for found in ordered:
            for address in found.addresses:
                if address.version != like.version or address.ip.is_loopback:
                    continue
                if address.ip.is_link_local == like.is_link_local or like.version == 4:
                    yield address.ip

    def masquerade(self, interface: str, destination: Address) -> Address | None:
        """Return the source that MASQUERADE gives to packets that leave by `interface`."""
        if destination.version == 6 and self.is_local(destination):
            return destination  # IPv6 prefers the destination itself where it is one of its own
        return next(self.addresses(interface, destination), None)

    def own(self, interface: str, like: Address) -> Address | None:
        """Return the address that REDIRECT gives to packets that arrive on `interface`."""
        if interface == LOOPBACK:
            return loopback(like)
        for found in self.interfaces:
            for address in found.addresses if found.name == interface else ():
                fits = address.version == like.version
                if fits and (like.version == 4 or not like.is_link_local or address.is_link_local):
                    return address.ip
        return None

    def is_broadcast(self, address: Address) -> bool:
        """Whether an IPv4 address is the broadcast address of a connected network."""
        return any(
            address == own.network.broadcast_address and own.network.prefixlen < 31
            for interface in self.interfaces
            for own in interface.addresses
            if own.version == address.version == 4
        )

    def _routes(self) -> Iterator[Route]:
        for network in LOOPBACK_NETWORKS:
            yield Route(network, LOOPBACK, network.network_address + (network.version == 4))
        for interface in self.interfaces:
            for own in interface.addresses:
                # The routes of a secondary IPv4 address have the primary one as their source.
                primary = next(a.ip for a in interface.addresses if a.network == own.network)
                source = own.ip if own.version == 6 else primary
                yield Route(ipaddress.ip_network(own.ip), LOOPBACK, source)
                if own.network.prefixlen < own.max_prefixlen:
                    yield Route(own.network, interface.name, None if own.version == 6 else primary)
        yield from self.routes


def loopback(like: Address) -> Address:
    """Return the loopback address of the family of `like`."""
    text = "127.0.0.1" if like.version == 4 else "::1"
    return ipaddress.ip_address(text)
