"""Who has which socket, what conntrack made of a connection, and as whom a socket is made.

`SocketTable` and `Conntrack` belong to the namespace of the thread that makes them, and can be used
from any thread afterwards.
"""

import contextlib
import ctypes
import errno
import ipaddress
import os
import platform
import socket
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from agent.kernel.netlink import (
    NETLINK_NETFILTER,
    NetlinkSocket,
    attribute,
    attributes,
)
from agent.model.errors import EnvironmentLacks, StateUnreadable
from agent.model.ruleset import Family
from agent.model.values import Address

AF = {Family.IPV4: socket.AF_INET, Family.IPV6: socket.AF_INET6}
PROTOCOLS = {"tcp": socket.IPPROTO_TCP, "udp": socket.IPPROTO_UDP}

IP_TRANSPARENT = 19  # linux/in.h
IPV6_TRANSPARENT = 75  # linux/in6.h
SO_ORIGINAL_DST = 80  # linux/netfilter_ipv4.h; the same number for IPv6

Endpoint = tuple[Address, int]


@contextlib.contextmanager
def _present(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise EnvironmentLacks(f"the kernel has no {what}: {error.strerror}") from error


# --- sock_diag ------------------------------------------------------------------------------------

NETLINK_SOCK_DIAG = 4
SOCK_DIAG_BY_FAMILY = 20
INET_DIAG_SKV6ONLY = 11
INET_DIAG_SOCKOPT = 22
TRANSPARENT_BIT = 1 << 5  # struct inet_diag_sockopt
ANY_STATE = 0xFFFFFFFF
# An unconnected UDP socket is in TCP's state CLOSE.
LISTENING = {"tcp": 1 << 10, "udp": 1 << 7}
# All of TCP's states but TIME_WAIT, CLOSE and LISTEN, also while it is being set up or taken down.
CONNECTED = ANY_STATE & ~(1 << 6 | 1 << 7 | 1 << 10)
DIAG_REQUEST = struct.Struct("=BBBxI")
DIAG_ID = struct.Struct("!HH16s16s")
DIAG_REST = struct.Struct("=IIIII")  # expires, receive and send queue, uid, inode
DIAG_ID_OFFSET, DIAG_ID_SIZE = 4, 48
DIAG_COOKIE = struct.Struct("=II")  # the last of the id, the lower half first


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSocket:
    """One TCP or UDP socket. An IPv4 address mapped into IPv6 is given as the IPv4 address.

    `uid` is 0 and `inode` is 0 for a connection that no process has accepted yet. `dual` tells that
    an IPv6 socket takes IPv4 too. Without `transparent` TPROXY drops what it would hand over.
    `cookie` is the number that the kernel never gives to another socket.
    """

    protocol: str
    local: Endpoint
    remote: Endpoint
    uid: int
    inode: int
    dual: bool = False
    transparent: bool = False
    cookie: int = 0

    def accepts(self, address: Address) -> bool:
        """Tell whether a listener takes what arrives for `address`."""
        mine = self.local[0]
        if mine.is_unspecified:
            return mine.version == address.version or self.dual
        return mine == address


class SocketTable(NetlinkSocket):
    """The sockets of the namespace in which this was made."""

    def __init__(self) -> None:
        with _present("sock_diag"):
            super().__init__(NETLINK_SOCK_DIAG)

    def listeners(self, protocol: str) -> tuple[KernelSocket, ...]:
        """Return the sockets that wait for somebody to talk to them.

        Raises: StateUnreadable if the kernel does not say.
        """
        return tuple(self._dump(protocol, LISTENING[protocol], 0))

    def facing(self, protocol: str, remote: Endpoint) -> tuple[KernelSocket, ...]:
        """Return the sockets whose other end is `remote`, accepted by a process or not yet.

        Raises: StateUnreadable if the kernel does not say.
        """
        found = self._dump(protocol, ANY_STATE, remote[1])
        return tuple(s for s in found if s.remote == remote)

    def connections(self) -> tuple[KernelSocket, ...]:
        """Return the sockets that are an end of a TCP connection.

        Raises: StateUnreadable if the kernel does not say.
        """
        return tuple(self._dump("tcp", CONNECTED, 0))

    def remote_of(self, protocol: str, local: Endpoint) -> Endpoint | None:
        """Return where the socket with that own end really sends to.

        Raises: StateUnreadable if the kernel does not say.
        """
        found = self._dump(protocol, ANY_STATE, 0)
        return next((s.remote for s in found if s.local == local and s.remote[1]), None)

    def _dump(self, protocol: str, states: int, remote_port: int) -> Iterator[KernelSocket]:
        for family in (socket.AF_INET, socket.AF_INET6):
            ids = DIAG_ID.pack(0, remote_port, b"", b"").ljust(DIAG_ID_SIZE, b"\0")
            head = DIAG_REQUEST.pack(family, PROTOCOLS[protocol], 0, states)
            try:
                messages = self.dump(SOCK_DIAG_BY_FAMILY, head + ids)
            except OSError as error:
                raise StateUnreadable(f"cannot list sockets: {error}") from error
            yield from (_kernel_socket(protocol, message.payload) for message in messages)


def _kernel_socket(protocol: str, data: bytes) -> KernelSocket:
    local_port, remote_port, local, remote = DIAG_ID.unpack_from(data, DIAG_ID_OFFSET)
    rest = DIAG_ID_OFFSET + DIAG_ID_SIZE
    low, high = DIAG_COOKIE.unpack_from(data, rest - DIAG_COOKIE.size)
    _, _, _, uid, inode = DIAG_REST.unpack_from(data, rest)
    extra = attributes(data, rest + DIAG_REST.size)
    only = extra.get(INET_DIAG_SKV6ONLY, b"\1")
    options = extra.get(INET_DIAG_SOCKOPT, b"\0")
    return KernelSocket(
        protocol=protocol,
        local=(_address(data[0], local), local_port),
        remote=(_address(data[0], remote), remote_port),
        uid=uid,
        inode=inode,
        dual=data[0] == socket.AF_INET6 and only[0] == 0,
        transparent=bool(options[0] & TRANSPARENT_BIT),
        cookie=high << 32 | low,
    )


def _address(family: int, raw: bytes) -> Address:
    if family == socket.AF_INET:
        return ipaddress.IPv4Address(raw[:4])
    found = ipaddress.IPv6Address(raw)
    return found.ipv4_mapped or found


# --- conntrack ------------------------------------------------------------------------------------

NLA_F_NESTED = 0x8000
NFGENMSG_SIZE = 4
CT_GET = 1 << 8 | 1  # subsystem ctnetlink, message IPCTNL_MSG_CT_GET
CTA_TUPLE_ORIG, CTA_TUPLE_REPLY, CTA_ZONE = 1, 2, 18
CTA_TUPLE_IP, CTA_TUPLE_PROTO = 1, 2
CTA_PROTO_NUM, CTA_PROTO_SRC_PORT, CTA_PROTO_DST_PORT = 1, 2, 3
CTA_IP = {4: (1, 2), 6: (3, 4)}  # source and destination


class Conntrack(NetlinkSocket):
    """The connections of the namespace in which this was made, as conntrack knows them."""

    def __init__(self) -> None:
        with _present("conntrack netlink"):
            super().__init__(NETLINK_NETFILTER)

    def answers(
        self, protocol: str, source: Endpoint, destination: Endpoint, zones: Iterable[int]
    ) -> Endpoint | None:
        """Return who answers what `source` sent to `destination`: the end that it was moved to.

        It is `destination` itself for what nobody translated, and None for what is not known.

        Raises: StateUnreadable if the kernel does not say.
        """
        for zone in zones:
            tuples = self._entry(CTA_TUPLE_ORIG, protocol, source, destination, zone)
            if tuples is not None:
                return _ends(tuples[CTA_TUPLE_REPLY])[0]
        return None

    def meant(self, protocol: str, answering: Endpoint, client: Endpoint) -> Endpoint | None:
        """Return where `client` wanted to go, whom `answering` answers now (SO_ORIGINAL_DST).

        It is `answering` itself for what nobody translated, and None for what is not known.

        Raises: StateUnreadable if the kernel does not say.
        """
        tuples = self._entry(CTA_TUPLE_REPLY, protocol, answering, client, 0)
        return None if tuples is None else _ends(tuples[CTA_TUPLE_ORIG])[1]

    def _entry(
        self, direction: int, protocol: str, source: Endpoint, destination: Endpoint, zone: int
    ) -> dict[int, bytes] | None:
        """Return the entry one direction of which is from `source` to `destination`, if any."""
        asked = ct_tuple(direction, protocol, source, destination)
        body = struct.pack("=BBH", ct_family(source[0]), 0, 0) + asked
        if zone:
            body += attribute(CTA_ZONE, struct.pack("!H", zone))
        try:
            answer = self.get(CT_GET, body)
        except OSError as error:
            if error.errno != errno.ENOENT:
                raise StateUnreadable(f"cannot ask conntrack: {error}") from error
            return None
        return attributes(answer, NFGENMSG_SIZE)


def ct_family(address: Address) -> int:
    return AF[Family.IPV4 if address.version == 4 else Family.IPV6]


def nested(kind: int, value: bytes) -> bytes:
    return attribute(kind | NLA_F_NESTED, value)


def ct_tuple(kind: int, protocol: str, source: Endpoint, destination: Endpoint) -> bytes:
    """Return one direction of a connection, as ctnetlink takes it."""
    ends = zip(CTA_IP[source[0].version], (source[0], destination[0]), strict=True)
    addresses = b"".join(attribute(type_, address.packed) for type_, address in ends)
    ports = (
        attribute(CTA_PROTO_NUM, bytes([PROTOCOLS[protocol]]))
        + attribute(CTA_PROTO_SRC_PORT, struct.pack("!H", source[1]))
        + attribute(CTA_PROTO_DST_PORT, struct.pack("!H", destination[1]))
    )
    return nested(kind, nested(CTA_TUPLE_IP, addresses) + nested(CTA_TUPLE_PROTO, ports))


def _ends(data: bytes) -> tuple[Endpoint, Endpoint]:
    """Return source and destination of one direction of an entry."""
    parts = attributes(data, 0)
    addresses = attributes(parts[CTA_TUPLE_IP], 0)
    ports = attributes(parts[CTA_TUPLE_PROTO], 0)
    source, destination = next(kinds for kinds in CTA_IP.values() if kinds[0] in addresses)
    return (
        _end(addresses[source], ports[CTA_PROTO_SRC_PORT]),
        _end(addresses[destination], ports[CTA_PROTO_DST_PORT]),
    )


def _end(address: bytes, port: bytes) -> Endpoint:
    return ipaddress.ip_address(address), int.from_bytes(port, "big")


# --- sockets of somebody --------------------------------------------------------------------------

PR_GET_DUMPABLE, PR_SET_DUMPABLE = 3, 4
NO_CHANGE = 2**32 - 1
SET_IDS = {"x86_64": (117, 119), "generic": (147, 149)}  # setresuid, setresgid

_libc = ctypes.CDLL(None, use_errno=True)
_libc.setfsuid.argtypes = _libc.setfsgid.argtypes = (ctypes.c_uint32,)
_libc.setfsuid.restype = _libc.setfsgid.restype = ctypes.c_uint32
_libc.prctl.argtypes = (ctypes.c_int, *(ctypes.c_ulong,) * 4)


@dataclass(frozen=True, slots=True, order=True)
class Owner:
    """A user and a group."""

    uid: int
    gid: int

    def __str__(self) -> str:
        return f"uid {self.uid} gid {self.gid}"


@contextlib.contextmanager
def acting_as(owner: Owner) -> Iterator[None]:
    """Make sockets of this user and group in the calling thread, for as long as the block lasts.

    The owner match compares the file-system ids with which a socket was created, and eBPF the real
    ids of whoever connects or binds. Both are the thread's own where the system call is made by
    number: glibc would change every thread's.

    Raises: EnvironmentLacks where the ids do not exist (a user namespace) or root is missing.
    """
    dumpable = _libc.prctl(PR_GET_DUMPABLE, 0, 0, 0, 0)
    real = (os.getresuid()[0], os.getresgid()[0])
    _set_real(owner.uid, owner.gid)  # first: it sets the file-system ids, too
    gid, uid = _libc.setfsgid(owner.gid), _libc.setfsuid(owner.uid)
    try:
        now = (_libc.setfsuid(NO_CHANGE), _libc.setfsgid(NO_CHANGE))
        if now != (owner.uid, owner.gid):
            lacks = (
                "it takes CAP_SETUID and CAP_SETGID" if os.geteuid() == 0 else "run this as root"
            )
            raise EnvironmentLacks(f"sockets of {owner} cannot be made here; {lacks}")
        yield
    finally:
        # This order: only setfsuid gives back the capabilities for files that it took away, and it
        # gives none back where setresuid has changed the id before it.
        _libc.setfsuid(uid)
        _libc.setfsgid(gid)
        _set_real(*real)
        # A change of ids makes the whole process undumpable.
        _libc.prctl(PR_SET_DUMPABLE, dumpable, 0, 0, 0)


def _set_real(uid: int, gid: int) -> None:
    """Set the real ids of the calling thread; where that cannot be, the caller finds out."""
    setresuid, setresgid = SET_IDS.get(platform.machine(), SET_IDS["generic"])
    kept = ctypes.c_long(-1)
    _libc.syscall(setresgid, ctypes.c_long(gid), kept, kept)
    _libc.syscall(setresuid, ctypes.c_long(uid), kept, kept)


def open_socket(family: Family, protocol: str) -> socket.socket:
    """Return a non-blocking socket of one family only, in the calling thread's namespace."""
    kind = socket.SOCK_STREAM if protocol == "tcp" else socket.SOCK_DGRAM
    made = socket.socket(AF[family], kind | socket.SOCK_NONBLOCK)
    if family is Family.IPV6:
        made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    return made


def make_transparent(made: socket.socket) -> None:
    """Let a socket take and use addresses that are not this namespace's."""
    if made.family == socket.AF_INET:
        made.setsockopt(socket.IPPROTO_IP, IP_TRANSPARENT, 1)
    else:
        made.setsockopt(socket.IPPROTO_IPV6, IPV6_TRANSPARENT, 1)


def endpoint(raw: tuple[str, int] | tuple[str, int, int, int]) -> Endpoint:
    """Return what getsockname or accept said as a value."""
    return ipaddress.ip_address(raw[0]), raw[1]


def original_destination(accepted: socket.socket) -> Endpoint:
    """Return where the other side wanted to go, before a rule sent it here."""
    inet = accepted.family == socket.AF_INET
    level, size = (socket.IPPROTO_IP, 16) if inet else (socket.IPPROTO_IPV6, 28)
    try:
        raw = accepted.getsockopt(level, SO_ORIGINAL_DST, size)
    except OSError:  # no conntrack entry
        return endpoint(accepted.getsockname())
    (port,) = struct.unpack_from("!H", raw, 2)
    return ipaddress.ip_address(raw[4:8] if inet else raw[8:24]), port
