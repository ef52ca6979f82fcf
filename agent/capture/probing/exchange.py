"""Makes the connections of a probe and sees where each of them lands.

A receiver answers with its own nonce and the original destination, and a client says nothing over
TCP: so nothing is ever sent to an application or a proxy that a connection reaches by mistake or on
purpose. Over UDP the query is one that every DNS server ignores.

Where nobody listens, the receiver is the probe's own; it is bound to the one address that the
captured packet arrives at, where there is one. It never takes a port from a live proxy: it binds
exclusively. Only then is the port made shareable with the proxy's own uid, so that a proxy that
starts at this very moment (with SO_REUSEPORT, as Envoy does) is not turned away. Where somebody
listens, sock_diag and conntrack tell who got the connection.
"""

import contextlib
import errno
import os
import secrets
import selectors
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass, field

from agent.capture.probing.attempt import Attempt, Observation, ProbePlan, Way
from agent.kernel.netns import Netns
from agent.kernel.probe_net import HOP_LIMIT, PROBE_TOS
from agent.kernel.sockets import (
    Conntrack,
    Endpoint,
    KernelSocket,
    Owner,
    SocketTable,
    acting_as,
    endpoint,
    make_transparent,
    open_socket,
    original_destination,
)
from agent.model import numbers
from agent.model.errors import AgentError, EnvironmentLacks
from agent.model.ruleset import Family
from agent.model.settings import Settings
from agent.model.values import Address

PATIENCE_S = 1.5  # for all attempts together: on one machine an answer takes less than 1 ms
GRACE_S = 0.3  # for what must follow a connection at once
TICK_S = 0.01
RESEND_LOOKS = 25  # that found nothing: then a datagram is sent again, as every resolver does
MAX_MESSAGE = 512
ZONES = (0, numbers.ZONE_CLIENT_TO_PROXY, numbers.ZONE_PROXY_TO_UPSTREAM)
SO_LINGER_AT_ONCE = struct.pack("ii", 1, 0)  # close by reset: no TIME_WAIT is left in the pod
UNDER_WAY = (0, errno.EINPROGRESS)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Receiver:
    """A socket of the probe that waits for what lands there."""

    place: Endpoint
    owner: Owner | None
    socket: socket.socket
    nonce: bytes = field(default_factory=lambda: secrets.token_hex(16).encode())

    @property
    def outside(self) -> bool:
        return self.owner is None


@dataclass(slots=True, kw_only=True)
class _Call:
    """An attempt under way."""

    attempt: Attempt
    socket: socket.socket
    local: Endpoint
    error: int = 0
    connected: bool = False
    waited: int = 0  # looks that found nothing since then
    closed: bool = False
    answer: bytes = b""
    accepted: KernelSocket | None = None
    translated: Endpoint | None = None
    done: bool = False


def exchange(
    plan: ProbePlan, settings: Settings, pod: Netns, outside: Netns
) -> tuple[Observation, ...]:
    """Make all attempts at the same time; return what became of each, in order.

    Takes `PATIENCE_S` or more if one of them is not answered.

    Raises: EnvironmentLacks, StateUnreadable.
    """
    try:
        with contextlib.ExitStack() as stack:
            work = _Exchange(plan, settings, pod, outside, stack)
            work.start()
            # In a thread of its own, because it changes its ids.
            pod.run(work.wait)
            return work.observations()
    except OSError as error:
        raise EnvironmentLacks(f"the probe cannot make its connections: {error}") from error


class _Exchange:
    def __init__(
        self,
        plan: ProbePlan,
        settings: Settings,
        pod: Netns,
        outside: Netns,
        stack: contextlib.ExitStack,
    ) -> None:
        self._plan, self._settings, self._stack = plan, settings, stack
        self._pod, self._outside = pod, outside
        self._selector = stack.enter_context(selectors.DefaultSelector())
        self._table = stack.enter_context(pod.run(SocketTable))
        self._conntrack: Conntrack | None = None
        with contextlib.suppress(AgentError):
            self._conntrack = stack.enter_context(pod.run(Conntrack))
        self._receivers: list[_Receiver] = []
        self._unbound: dict[Endpoint, int] = {}
        self._arrivals: dict[Endpoint, tuple[_Receiver, Endpoint]] = {}
        self._calls: list[_Call] = []

    def start(self) -> None:
        """Open the receivers, then start every call."""
        self._outside.run(self._receive_outside)
        self._pod.run(self._receive_inside)
        self._pod.run(lambda: self._call(Way.OUT, Way.BACK))
        self._outside.run(lambda: self._call(Way.IN))

    # receivers

    def _receive_outside(self) -> None:
        wanted = {
            (a.protocol, a.goal): a for a in self._plan.attempts if a.way is Way.OUT and not a.local
        }
        for attempt in wanted.values():
            self._receive(attempt, attempt.goal, None)

    def _receive_inside(self) -> None:
        settings = self._settings
        proxy = Owner(settings.proxy_uid[0].first, settings.proxy_gid[0].first)
        wanted = {
            (a.protocol, place): a
            for a in self._plan.attempts
            if (place := self._plan.landing(a, settings)) is not None and not a.live
        }
        for (_, place), attempt in wanted.items():
            # The application's side of TPROXY's way back is no proxy.
            owner = attempt.owner if attempt.way is Way.BACK and attempt.owner else proxy
            try:
                self._receive(attempt, place, owner)
            except OSError as error:
                if error.errno not in (errno.EADDRINUSE, errno.EADDRNOTAVAIL):
                    raise
                self._unbound[place] = error.errno

    def _receive(self, attempt: Attempt, place: Endpoint, owner: Owner | None) -> None:
        with _as(owner):
            made = self._open(attempt.family, attempt.protocol)
        if owner is not None and attempt.way is Way.IN and self._settings.tproxy:
            make_transparent(made)
        with _as(owner):
            made.bind((str(place[0]), place[1]))
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if attempt.protocol == "tcp":
            made.listen(socket.SOMAXCONN)
        receiver = _Receiver(place=place, owner=owner, socket=made)
        self._receivers.append(receiver)
        handler = self._accept if attempt.protocol == "tcp" else self._reply
        self._selector.register(made, selectors.EVENT_READ, lambda: handler(receiver))

    def _open(self, family: Family, protocol: str) -> socket.socket:
        made = self._stack.enter_context(open_socket(family, protocol))
        if family is Family.IPV4:
            made.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, PROBE_TOS)
        if protocol == "tcp":
            made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, SO_LINGER_AT_ONCE)
        return made

    def _accept(self, receiver: _Receiver) -> None:
        with contextlib.suppress(OSError):  # gone again
            with _as(receiver.owner):  # or it would be root's, and the port no longer shareable
                accepted, raw = receiver.socket.accept()
            self._stack.enter_context(accepted)
            accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, SO_LINGER_AT_ONCE)
            peer, original = endpoint(raw), original_destination(accepted)
            if self._is_ours(peer) or any(original == c.attempt.goal for c in self._calls):
                self._arrivals[peer] = receiver, original
                accepted.send(receiver.nonce)
            else:  # somebody in the pod, to whom a port without a listener has to look so
                accepted.close()

    def _reply(self, receiver: _Receiver) -> None:
        with contextlib.suppress(OSError):
            _, raw = receiver.socket.recvfrom(MAX_MESSAGE)
            peer = endpoint(raw)
            if self._is_ours(peer):
                self._arrivals[peer] = receiver, receiver.place
                receiver.socket.sendto(receiver.nonce, raw)

    def _is_ours(self, peer: Endpoint) -> bool:
        return any(call.local == peer for call in self._calls)

    # calls

    def _call(self, *ways: Way) -> None:
        for attempt in self._plan.attempts:
            if attempt.way not in ways:
                continue
            with _as(attempt.owner):
                call = self._connect(attempt)
            self._calls.append(call)
            if call.error:
                call.done = True
                continue
            events = selectors.EVENT_WRITE if attempt.protocol == "tcp" else selectors.EVENT_READ
            handler = self._connected if attempt.protocol == "tcp" else self._answered
            self._selector.register(call.socket, events, _bound(handler, call))

    def _connect(self, attempt: Attempt) -> _Call:
        made = self._open(attempt.family, attempt.protocol)
        if attempt.family is Family.IPV4:
            made.setsockopt(socket.IPPROTO_IP, socket.IP_TTL, HOP_LIMIT)
        else:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_UNICAST_HOPS, HOP_LIMIT)
        if attempt.way is Way.BACK:
            make_transparent(made)
        if attempt.mark:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, attempt.mark)
        if (source := self._source(attempt)) is not None:
            made.bind((str(source), 0))
        goal = (str(attempt.destination), attempt.port)
        error = made.connect_ex(goal)
        if attempt.protocol == "udp" and not error:
            error = _send(made)
        call = _Call(attempt=attempt, socket=made, local=endpoint(made.getsockname()))
        call.error = 0 if error in UNDER_WAY else error
        return call

    def _source(self, attempt: Attempt) -> Address | None:
        link = self._plan.link(attempt.family)
        if attempt.local:
            return None
        return link.pod if attempt.way is Way.OUT else link.far

    def _connected(self, call: _Call) -> None:
        call.error = call.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if call.error:
            self._end(call)
            return
        call.connected = True
        self._selector.modify(call.socket, selectors.EVENT_READ, _bound(self._answered, call))
        self._look(call, idle=False)  # at once: a proxy may close again within a millisecond

    def _answered(self, call: _Call) -> None:
        try:
            call.answer = call.socket.recv(MAX_MESSAGE)
        except OSError as error:
            if not call.connected:
                call.error = error.errno or errno.EIO
        if call.answer or not call.connected:
            self._end(call)
        else:
            call.closed = True
            self._selector.unregister(call.socket)

    def _end(self, call: _Call) -> None:
        call.done = True
        with contextlib.suppress(KeyError):
            self._selector.unregister(call.socket)

    # waiting

    def wait(self) -> None:
        """Serve receivers and calls until every call is done or patience is at its end.

        It is counted in looks that found nothing: on a node too busy to answer they take longer.
        """
        looks = round(PATIENCE_S / TICK_S)
        while looks and not all(call.done for call in self._calls):
            events = self._selector.select(TICK_S)
            looks -= not events
            for key, _ in events:
                key.data()
            for call in self._calls:
                if not call.done:
                    self._look(call, idle=not events)
            if not events and looks % RESEND_LOOKS == 0:
                self._resend()
        for call in self._calls:
            if not call.answer and call.translated is None:
                call.translated = self._translation(call)

    def _resend(self) -> None:
        """Repeat what the network may lose, and the kernel itself drops on a link's first moments.

        Until a workqueue has made the route of a new IPv6 address its packets go nowhere
        (net/ipv6/addrconf.c, addrconf_dad_start), on a busy node for milliseconds.
        """
        for call in self._calls:
            if call.attempt.protocol == "udp" and not call.done and (error := _send(call.socket)):
                call.error = error
                self._end(call)

    def _look(self, call: _Call, *, idle: bool) -> None:
        """See what the kernel knows of a call, and end the call if that is all there will be."""
        if call.attempt.protocol == "udp":
            if call.attempt.live:
                call.translated = self._translation(call)
                call.done = call.translated is not None
            return
        if not call.connected:
            return
        call.waited += idle
        found = self._table.facing("tcp", call.local)
        call.accepted = next(iter(found), call.accepted)
        if self._is_known(call) or call.waited > GRACE_S / TICK_S:
            self._end(call)

    def _is_known(self, call: _Call) -> bool:
        """Tell whether it is known who has the connection, where no nonce will come.

        Until a process has accepted it the kernel may not say whose it is, but the port does.
        """
        if call.accepted is None or not call.attempt.live:
            return False
        return call.accepted.inode != 0 or call.accepted.local[1] == call.attempt.lands

    def _translation(self, call: _Call) -> Endpoint | None:
        protocol, goal = call.attempt.protocol, call.attempt.goal
        with contextlib.suppress(AgentError):
            if self._conntrack is not None:
                found = self._conntrack.answers(protocol, call.local, goal, ZONES)
                if found is not None:
                    return found
        with contextlib.suppress(AgentError):
            # Turned by eBPF, the socket itself sends elsewhere, and conntrack need not be there.
            remote = self._table.remote_of(protocol, call.local)
            return remote if remote != goal else None
        return None

    def observations(self) -> tuple[Observation, ...]:
        """Return what became of each attempt, in the plan's order."""
        calls = {call.attempt.name: call for call in self._calls}
        return tuple(self._observed(calls[attempt.name]) for attempt in self._plan.attempts)

    def _observed(self, call: _Call) -> Observation:
        arrived = self._arrivals.get(call.local)
        by_nonce = (r for r in self._receivers if r.nonce == call.answer)
        receiver = next(by_nonce, None)
        place = self._plan.landing(call.attempt, self._settings)
        return Observation(
            answered_by=receiver.place if receiver else None,
            outside=receiver.outside if receiver else bool(arrived and arrived[0].outside),
            arrived=arrived[0].place if arrived else None,
            original=arrived[1] if arrived else None,
            accepted=call.accepted,
            translated=call.translated,
            connected=call.connected,
            error=call.error,
            unbound=self._unbound.get(place, 0) if place else 0,
        )


def _as(owner: Owner | None) -> contextlib.AbstractContextManager[None]:
    return acting_as(owner) if owner else contextlib.nullcontext()


def _bound(handler: Callable[[_Call], None], call: _Call) -> Callable[[], None]:
    return lambda: handler(call)


def _send(made: socket.socket) -> int:
    try:
        made.send(query())
    except OSError as error:
        return error.errno or errno.EIO
    return 0


def query() -> bytes:
    """Return a DNS message about a random name that no server acts on: it is marked an answer."""
    head = os.urandom(2) + struct.pack("!HHHHH", 0x8000, 1, 0, 0, 0)
    labels = (secrets.token_hex(16).encode(), b"invalid")
    name = b"".join(bytes([len(label)]) + label for label in labels) + b"\0"
    return head + name + struct.pack("!HH", 1, 1)
