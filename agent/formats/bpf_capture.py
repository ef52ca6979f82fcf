"""Entries of the programs' maps <-> settings, as bpf/capture.h lays them out."""

import array
import ipaddress
import struct
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from agent.model import numbers
from agent.model.enrolment import (
    LAYOUT,
    MAX_NETWORKS,
    MAX_PLACES,
    MAX_SERVERS,
    MAX_SPANS,
    IdRange,
    Place,
    Site,
)
from agent.model.settings import Settings
from agent.model.values import EVERYTHING, Address, Network, Networks, Selection, Span

IPV6, INBOUND_ALL, OUTBOUND_ALL, GROUPS_ALL = 1, 2, 4, 8
DNS, DNS_ALL, LOOPBACK_INCLUDED = 16, 32, 64
GATE_OPEN, GATE_LISTENER = 128, 256

PRESENT = (1).to_bytes(4, sys.byteorder)
"""The value of every key in `own_addresses`."""

_MAPPED = bytes(10) + b"\xff\xff"
_HEAD = struct.Struct("=IHHHH")
_COUNT = struct.Struct("=I")
_RANGE = struct.Struct("=III")
_SPANS = struct.Struct(f"={1 + 2 * MAX_SPANS}I")
_PORTS_SIZE = 65536 // 8
_NETWORK = struct.Struct("=16s16s")
COOKIE = struct.Struct("=Q")
_ADDRESS = struct.Struct("=16s")
_OWN = struct.Struct("=Q16s")
_PLACE = struct.Struct("=16s16s16sI")
SIZE = (
    _HEAD.size
    + 2 * _RANGE.size
    + 5 * _SPANS.size
    + _PORTS_SIZE
    + _NETWORK.size
    + 2 * (_COUNT.size + MAX_NETWORKS * _NETWORK.size)
    + (_COUNT.size + MAX_SERVERS * _ADDRESS.size)
    + (_COUNT.size + MAX_PLACES * _PLACE.size)
)


def encode(settings: Settings, site: Site) -> bytes:
    """Return the entry for effective settings; the longest prefixes of places must come first."""
    loopback = settings.host_ipv4_loopback_cidr
    inbound, groups = settings.inbound_ports_include, settings.owner_groups_include
    include = settings.outbound_ip_ranges_include
    servers = (*settings.dns_servers_v4, *settings.dns_servers_v6)
    return b"".join(
        (
            _HEAD.pack(
                _flags(settings),
                settings.proxy_port,
                settings.inbound_capture_port,
                settings.inbound_tunnel_port,
                numbers.DNS_PROXY_PORT if settings.dns_active else 0,
            ),
            _RANGE.pack(site.users.inside, site.users.outside, site.users.count),
            _RANGE.pack(site.groups.inside, site.groups.outside, site.groups.count),
            _spans(settings.proxy_uid),
            _spans(settings.proxy_gid),
            _spans(settings.owner_groups_exclude if groups.everything else groups.items),
            _spans(settings.outbound_ports_exclude),
            _spans(settings.outbound_ports_include),
            _ports(settings.inbound_ports_exclude if inbound.everything else inbound.items),
            _network(loopback),
            _table(MAX_NETWORKS, _NETWORK, map(_network, settings.outbound_ip_ranges_exclude)),
            _table(MAX_NETWORKS, _NETWORK, map(_network, include.items)),
            _table(MAX_SERVERS, _ADDRESS, map(_address, servers)),
            _table(MAX_PLACES, _PLACE, map(_place, site.places)),
        )
    )


def _flags(settings: Settings) -> int:
    include = settings.outbound_ip_ranges_include
    marks = {
        IPV6: settings.enable_ipv6,
        INBOUND_ALL: settings.inbound_ports_include.everything,
        OUTBOUND_ALL: include.everything,
        GROUPS_ALL: settings.owner_groups_include.everything,
        DNS: settings.dns_active,
        DNS_ALL: settings.dns_active and settings.capture_all_dns,
        LOOPBACK_INCLUDED: any(n.network_address.is_loopback for n in include.items),
        GATE_OPEN: settings.gate == "open",
        GATE_LISTENER: settings.gate == "listener",
    }
    return sum(mark for mark, on in marks.items() if on)


def own_keys(cookie: int, site: Site) -> frozenset[bytes]:
    """Return the keys in `own_addresses` of a namespace; that loopback is its own goes without."""
    networks = (place.network for place in site.places if place.local)
    alone = (n.network_address for n in networks if n.prefixlen == n.max_prefixlen)
    return frozenset(_OWN.pack(cookie, _address(a)) for a in alone if not a.is_loopback)


def _spans(spans: tuple[Span, ...]) -> bytes:
    words = [word for span in spans for word in (span.first, span.last)]
    return _SPANS.pack(len(spans), *words, *([0] * (2 * MAX_SPANS - len(words))))


def _ports(spans: tuple[Span, ...]) -> bytes:
    bits = 0
    for span in spans:
        bits |= (1 << span.last + 1) - (1 << span.first)
    return _little(bits.to_bytes(_PORTS_SIZE, "little"))


def _little(words: bytes) -> bytes:
    """Turn words of 32 bits between this machine's order of bytes and little-endian."""
    if sys.byteorder == "little":
        return words
    swapped = array.array("I", words)
    swapped.byteswap()
    return swapped.tobytes()


def _table(most: int, item: struct.Struct, items: Iterable[bytes]) -> bytes:
    packed = list(items)
    return _COUNT.pack(len(packed)) + b"".join(packed).ljust(most * item.size, b"\0")


def _address(address: Address | None) -> bytes:
    if address is None:
        return bytes(16)
    return _MAPPED + address.packed if address.version == 4 else address.packed


def _network(network: Network) -> bytes:
    length = network.prefixlen + (96 if network.version == 4 else 0)
    mask = ((1 << 128) - (1 << (128 - length))).to_bytes(16, "big")
    return _address(network.network_address) + mask


def _place(place: Place) -> bytes:
    return _network(place.network) + _address(place.source) + _COUNT.pack(place.local)


# --- older layouts -------------------------------------------------------------------------------

READABLE = frozenset({1, 2, LAYOUT})
"""Whoever raises LAYOUT says here how the entries of the last one become those of the new."""

_SIZE_1 = SIZE - _PORTS_SIZE + _SPANS.size + _COUNT.size + 32 * _ADDRESS.size


def _from_1(data: bytes) -> bytes:
    """Its inbound ports were spans, before those of outbound ones, and own addresses came last."""
    if len(data) != _SIZE_1:
        raise ValueError(f"an entry of {len(data)} bytes, and not {_SIZE_1}")
    start = _HEAD.size + 2 * _RANGE.size + 3 * _SPANS.size
    inbound = _Reader(data, start).spans()
    middle = start + _SPANS.size
    rest = middle + 2 * _SPANS.size
    end = rest + SIZE - (start + 2 * _SPANS.size + _PORTS_SIZE)
    return data[:start] + data[middle:rest] + _ports(inbound) + data[rest:end]


# --- back again -----------------------------------------------------------------------------------


@dataclass
class _Reader:
    """Takes one thing after the other from an entry."""

    data: bytes
    at: int = 0

    def take(self, form: struct.Struct) -> tuple[int, ...]:
        found = form.unpack_from(self.data, self.at)
        self.at += form.size
        return found

    def spans(self) -> tuple[Span, ...]:
        count, *words = self.take(_SPANS)
        return tuple(Span(words[2 * i], words[2 * i + 1]) for i in range(_within(count, MAX_SPANS)))

    def ports(self) -> tuple[Span, ...]:
        words = self.data[self.at : self.at + _PORTS_SIZE]
        self.at += _PORTS_SIZE
        return tuple(_runs(int.from_bytes(_little(words), "little")))

    def table(self, most: int, item: struct.Struct) -> Iterator[bytes]:
        (count,) = self.take(_COUNT)
        start = self.at
        self.at += most * item.size
        for i in range(_within(count, most)):
            yield self.data[start + i * item.size : start + (i + 1) * item.size]

    def network(self) -> Network:
        start = self.at
        self.at += _NETWORK.size
        return _network_of(self.data[start : self.at])


def decode(data: bytes, layout: int = LAYOUT) -> tuple[Settings, Site]:
    """Return what `encode` was given, be it that of an older version (one of `READABLE`).

    Raises: ValueError for an entry that nobody can have encoded.
    """
    if layout == 1:
        data = _from_1(data)
    if len(data) != SIZE:
        raise ValueError(f"an entry of {len(data)} bytes, and not {SIZE}")
    reader = _Reader(data)
    flags, proxy_port, inbound_port, tunnel_port, _ = reader.take(_HEAD)
    users, of_groups = (IdRange(*reader.take(_RANGE)) for _ in range(2))
    uids, gids, groups, ports_exclude, ports_include = (reader.spans() for _ in range(5))
    inbound = reader.ports()
    loopback = reader.network()
    exclude = tuple(map(_network_of, reader.table(MAX_NETWORKS, _NETWORK)))
    include = tuple(map(_network_of, reader.table(MAX_NETWORKS, _NETWORK)))
    servers = tuple(map(_address_of, reader.table(MAX_SERVERS, _ADDRESS)))
    places = tuple(map(_place_of, reader.table(MAX_PLACES, _PLACE)))
    settings = Settings(
        proxy_port=proxy_port,
        inbound_capture_port=inbound_port,
        inbound_tunnel_port=tunnel_port,
        proxy_uid=uids,
        proxy_gid=gids,
        inbound_ports_include=EVERYTHING if flags & INBOUND_ALL else Selection(items=inbound),
        inbound_ports_exclude=inbound if flags & INBOUND_ALL else (),
        outbound_ip_ranges_include=Networks(everything=bool(flags & OUTBOUND_ALL), items=include),
        outbound_ip_ranges_exclude=exclude,
        outbound_ports_include=ports_include,
        outbound_ports_exclude=ports_exclude,
        owner_groups_include=EVERYTHING if flags & GROUPS_ALL else Selection(items=groups),
        owner_groups_exclude=groups if flags & GROUPS_ALL else (),
        redirect_dns=bool(flags & DNS),
        capture_all_dns=bool(flags & DNS_ALL),
        dns_servers_v4=tuple(s for s in servers if s.version == 4),
        dns_servers_v6=tuple(s for s in servers if s.version == 6),
        enable_ipv6=bool(flags & IPV6),
        host_ipv4_loopback_cidr=loopback,
        gate=_gate(flags),
    )
    return settings, Site(places, users, of_groups)


def _runs(bits: int) -> Iterator[Span]:
    """Yield the runs of ones."""
    start = 0
    while bits:
        gap = (bits & -bits).bit_length() - 1
        bits >>= gap
        length = (~bits & (bits + 1)).bit_length() - 1
        start += gap
        yield Span(start, start + length - 1)
        bits >>= length
        start += length


def _gate(flags: int) -> str:
    if flags & GATE_OPEN:
        return "open"
    return "listener" if flags & GATE_LISTENER else "closed"


def _within(count: int, most: int) -> int:
    if count > most:
        raise ValueError(f"{count} items where there is room for {most}")
    return count


def _address_of(raw: bytes) -> Address:
    found = ipaddress.IPv6Address(raw)
    return found.ipv4_mapped or found


def _network_of(raw: bytes) -> Network:
    address = _address_of(raw[:16])
    length = int.from_bytes(raw[16:32], "big").bit_count() - (96 if address.version == 4 else 0)
    return ipaddress.ip_network((address, length))


def _place_of(raw: bytes) -> Place:
    source = None if not any(raw[32:48]) else _address_of(raw[32:48])
    return Place(_network_of(raw), source, raw[48:52] != bytes(4))
