"""Says that something changed in a namespace: nf_tables, routes or routing rules, not what.

The kernel multicasts every change of these to netlink sockets of that namespace. It has no such
news of iptables-legacy, so how much those tables hold is asked every second, which costs some
microseconds. A socket keeps its namespace alive, so it is closed as soon as nobody listens at the
other end of the pipe.
"""

import contextlib
import os
import select
import socket
import threading
import time
from dataclasses import dataclass

from agent.kernel.legacy_tables import LegacyEye
from agent.kernel.netlink import NETLINK_NETFILTER, NETLINK_ROUTE, RECEIVE_BYTES
from agent.kernel.netns import Netns

# Group numbers: linux/netfilter/nfnetlink.h and linux/rtnetlink.h.
NFNLGRP_NFTABLES = 7
RTNLGRP_IPV4_ROUTE, RTNLGRP_IPV4_RULE, RTNLGRP_IPV6_ROUTE, RTNLGRP_IPV6_RULE = 7, 8, 11, 19
NETFILTER_GROUPS = 1 << (NFNLGRP_NFTABLES - 1)
ROUTE_GROUPS = sum(
    1 << (group - 1)
    for group in (RTNLGRP_IPV4_ROUTE, RTNLGRP_IPV4_RULE, RTNLGRP_IPV6_ROUTE, RTNLGRP_IPV6_RULE)
)


LEGACY_PAUSE_S = 1.0


@dataclass(slots=True)
class _Watched:
    sockets: tuple[socket.socket, ...]
    legacy: LegacyEye
    pipe: int
    sizes: bytes


class Changes:
    """All namespaces that are watched, and one thread for them. For use from any thread."""

    def __init__(self) -> None:
        self._poll = select.epoll()
        self._by_fd: dict[int, _Watched] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def watch(self, netns: Netns, pipe: int) -> None:
        """Write a byte to the pipe after every change, until its reading end is closed.

        `pipe` is duplicated and must not block. Raises: OSError if the kernel refuses the groups.
        """
        sockets, legacy = netns.run(_listening)
        watched = _Watched(sockets, legacy, os.dup(pipe), legacy.sizes())
        with self._lock:
            for sock in sockets:
                self._by_fd[sock.fileno()] = watched
                self._poll.register(sock, select.EPOLLIN)
            self._by_fd[watched.pipe] = watched
            self._poll.register(watched.pipe, 0)  # an error is told in any case: nobody reads
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="changes", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        due_s = time.monotonic() + LEGACY_PAUSE_S
        while True:
            for fd, _ in self._poll.poll(max(due_s - time.monotonic(), 0)):
                watched = self._by_fd.get(fd)
                if watched is not None and (fd == watched.pipe or not _heard(watched, fd)):
                    self._end(watched)
            if time.monotonic() >= due_s:
                due_s = time.monotonic() + LEGACY_PAUSE_S
                for watched in {w.pipe: w for w in list(self._by_fd.values())}.values():
                    if not _asked(watched):
                        self._end(watched)

    def _end(self, watched: _Watched) -> None:
        with self._lock:
            for fd in (watched.pipe, *(sock.fileno() for sock in watched.sockets)):
                self._poll.unregister(fd)
                del self._by_fd[fd]
        for sock in watched.sockets:
            sock.close()
        watched.legacy.close()
        os.close(watched.pipe)


def _listening() -> tuple[tuple[socket.socket, ...], LegacyEye]:
    found: list[socket.socket] = []
    with contextlib.ExitStack() as stack:
        for protocol, groups in (
            (NETLINK_NETFILTER, NETFILTER_GROUPS),
            (NETLINK_ROUTE, ROUTE_GROUPS),
        ):
            sock = stack.enter_context(socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, protocol))
            sock.setblocking(False)
            sock.bind((0, groups))
            found.append(sock)
        legacy = LegacyEye()
        stack.pop_all()
    return tuple(found), legacy


def _asked(watched: _Watched) -> bool:
    """Tell if a legacy table holds more or less than before; return whether anybody listens."""
    try:
        sizes = watched.legacy.sizes()
    except OSError:  # a table went or came just now: the next second shows it
        return True
    if sizes == watched.sizes:
        return True
    watched.sizes = sizes
    return _tell(watched)


def _heard(watched: _Watched, fd: int) -> bool:
    """Read what there is and pass one byte on; return whether anybody still listens."""
    sock = next(sock for sock in watched.sockets if sock.fileno() == fd)
    try:
        while sock.recv(RECEIVE_BYTES):
            pass
    except OSError:  # nothing left, or more than the socket holds: something changed in any case
        pass
    return _tell(watched)


def _tell(watched: _Watched) -> bool:
    try:
        os.write(watched.pipe, b"!")
    except BlockingIOError:  # it is full of the same news
        return True
    except OSError:
        return False
    return True
