"""The mode that kube-proxy works in, as it says itself on its metrics port (`/proxyMode`)."""

import contextlib
import socket
import time
from collections.abc import Iterable

from agent.kernel.sockets import KernelSocket
from agent.model.host import loopback
from agent.model.packet import Address

PORT = 10249  # kubernetes pkg/cluster/ports
MODES = frozenset({"iptables", "ipvs", "nftables"})
REQUEST = b"GET /proxyMode HTTP/1.0\r\nHost: localhost\r\n\r\n"
DEADLINE_S = 1.0
MOST_BYTES = 4096


def ask(listeners: Iterable[KernelSocket]) -> str:
    """Ask whoever listens on the port in the calling thread's namespace; nothing if none answers.

    No other program answers so: neither Cilium, which takes kube-proxy's health port, nor one that
    listens here for something else. All of them together have the deadline: a pod may listen on
    many addresses and never say a word.
    """
    ends = time.monotonic() + DEADLINE_S
    here = {s.local[0] for s in listeners if (s.protocol, s.local[1]) == ("tcp", PORT)}
    for address in sorted(here, key=str):
        found = _answer(loopback(address) if address.is_unspecified else address, ends)
        if found in MODES:
            return found
    return ""


def _answer(address: Address, ends: float) -> str:
    """Return the body of the answer, or nothing if there is none in time."""
    reply = b""
    if (left := ends - time.monotonic()) <= 0:
        return ""
    with (
        contextlib.suppress(OSError),
        socket.create_connection((str(address), PORT), left) as door,
    ):
        door.sendall(REQUEST)
        while len(reply) < MOST_BYTES and (left := ends - time.monotonic()) > 0:
            door.settimeout(left)
            part = door.recv(MOST_BYTES)
            if not part:
                break
            reply += part
    head, _, body = reply.partition(b"\r\n\r\n")
    return body.decode(errors="replace").strip() if b" 200 " in head.split(b"\r\n")[0] else ""
