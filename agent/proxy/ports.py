"""The proxy's ports inside a pod's namespace: who listens there, and a connection to one of them.

Only the pod itself can be reached so: a connection goes to loopback and is bound to `lo`. That
holds for whoever the socket is handed to, also if it connects it anew: to unbind needs CAP_NET_RAW
(Linux 5.7).
"""

import errno
import ipaddress
import os
import socket
from collections.abc import Collection, Mapping

from agent.kernel.netns import Netns
from agent.kernel.sockets import KernelSocket, SocketTable, open_socket
from agent.model import numbers
from agent.model.errors import AgentError, EnvironmentLacks
from agent.model.ruleset import Family

# The way that is tried first: Envoy's own ports are on IPv4 loopback unless a pod has only IPv6.
LOOPBACKS = (
    (Family.IPV4, ipaddress.IPv4Address("127.0.0.1")),
    (Family.IPV6, ipaddress.IPv6Address("::1")),
)
UNDER_WAY = (0, errno.EINPROGRESS)


# What a process that may enter no namespace can be handed a connection to.
HANDED_OVER = frozenset({numbers.ENVOY_ADMIN_PORT, numbers.ENVOY_METRICS_PORT})


def capture_ports(settings: Mapping[str, object]) -> frozenset[int]:
    """Return the two ports that a capture with these settings redirects traffic to."""
    out = settings.get("proxy_port") or numbers.PROXY_PORT
    into = settings.get("inbound_capture_port") or numbers.INBOUND_CAPTURE_PORT
    return frozenset((int(str(out)), int(str(into))))


class NobodyListens(EnvironmentLacks):
    """No process in the namespace takes connections there."""


def listeners(netns: Netns) -> tuple[KernelSocket, ...]:
    """Return the TCP sockets of a namespace that wait for connections.

    Raises: EnvironmentLacks, StateUnreadable.
    """
    return netns.run(_listeners)


def listening(netns: Netns, ports: Collection[int]) -> tuple[int, ...]:
    """Return those of the ports that somebody listens on, in order.

    Raises: EnvironmentLacks, StateUnreadable.
    """
    return tuple(sorted({s.local[1] for s in listeners(netns)} & set(ports)))


def connect(netns: Netns, port: int) -> socket.socket:
    """Return a non-blocking TCP socket that is being connected to a port on loopback.

    It does not wait for whoever listens: what becomes of the connection shows in the first use.

    Raises: NobodyListens, EnvironmentLacks, StateUnreadable.
    """
    return netns.run(lambda: _connect(netns.path, port))


def hand_over(netns: Netns, port: int, there: int) -> None:
    """Connect to one of the proxy's own ports and send the connection through a Unix socket.

    `there` is the descriptor of that socket, which stays open. Raises: AgentError for another port,
    and what `connect` raises.
    """
    if port not in HANDED_OVER:
        raise AgentError(f"port {port} is none of the proxy's that are read")
    with connect(netns, port) as made, socket.socket(fileno=os.dup(there)) as way:
        socket.send_fds(way, [b"."], [made.fileno()])


def _listeners() -> tuple[KernelSocket, ...]:
    with SocketTable() as table:
        return table.listeners("tcp")


def _connect(name: str, port: int) -> socket.socket:
    there = [found for found in _listeners() if found.local[1] == port]
    ways = [way for way in LOOPBACKS if any(found.accepts(way[1]) for found in there)]
    if not ways:
        raise NobodyListens(f"nobody listens on port {port} of the loopback of {name}")
    family, address = ways[0]
    made = open_socket(family, "tcp")
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo")
        code = made.connect_ex((str(address), port))
        if code not in UNDER_WAY:
            raise OSError(code, os.strerror(code))
    except OSError as error:
        made.close()
        raise EnvironmentLacks(
            f"port {port} of the loopback of {name} cannot be reached: {error.strerror}"
        ) from error
    return made
