"""One namespace that is watched: who listens in it, and what became of a connection of it."""

import contextlib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass

from agent.flows.event import Endpoint, Event
from agent.flows.fate import Became, Flow, judge
from agent.flows.view import View, Viewer
from agent.kernel import holders
from agent.kernel.netns import Netns
from agent.kernel.sockets import Conntrack, SocketTable
from agent.kernel.user_ids import user_ids
from agent.model.enrolment import IdRange
from agent.model.errors import AgentError, EnvironmentLacks
from agent.model.numbers import INBOUND_CAPTURE_PORT
from agent.model.packet import Packet

VIEW_AGE_NS = 2_000_000_000
LISTENERS_AGE_NS = 200_000_000
NOBODY = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Listener:
    """Who waits for connections on a port; pid 0 and no name where that cannot be seen."""

    pid: int
    name: str
    uid: int


class Space:
    """One namespace. It is held open, so whoever has this must give it up when the pod is gone."""

    def __init__(self, netns: Netns, title: str) -> None:
        """Takes the namespace over; `title` is what to call it.

        Raises: EnvironmentLacks if it cannot be entered.
        """
        cookie = netns.cookie()
        if cookie is None:
            raise EnvironmentLacks("flows needs Linux 5.15 or newer: namespaces have no cookies")
        self.netns = netns
        self.title = title
        self.cookie = cookie
        self._users, self._groups = user_ids(netns.fd)
        self._viewer = Viewer(netns)
        self._listeners: Mapping[int, Listener] = {}
        self._listeners_at_ns = 0
        self._conntrack: Conntrack | None = None

    def close(self) -> None:
        if self._conntrack is not None:
            self._conntrack.close()
        self.netns.close()

    def outside(self, uid: int) -> int:
        """Return the node's id of a user of the pod."""
        ids = self._users
        return ids.outside + uid - ids.inside if ids.count else uid

    def prepare(self) -> None:
        """Look once, so that what that takes is loaded when the first connection comes.

        Raises: AgentError if the namespace cannot be read.
        """
        self._viewer.seen_since(time.monotonic_ns())

    def flow(self, event: Event) -> Flow | None:
        """Return what became of a connection; None for the other end of one that is told of.

        Raises: AgentError if the namespace cannot be read.
        """
        # What dropped it must be looked for in the rules of that time.
        view = self._viewer.seen_since(event.at_ns - (VIEW_AGE_NS if event.left else 0))
        if event.inbound and view.is_local(event.source[0]):
            return None
        port = self._accepting_port(event, view)
        listener = self._listener(port) if event.inbound else None
        meant = self._meant(event, view)
        packet = self._packet(event, meant or event.went)
        landed = (event.went[0], port) if event.inbound else event.went
        judged = judge(view, event, packet, landed)
        if judged.became in (Became.BYPASSED, Became.UNCAPTURED):  # or it has just been changed
            view = self._viewer.seen_since(event.at_ns)
            judged = judge(view, event, packet, landed)
        return Flow(
            at_ns=event.at_ns,
            took_ms=event.took_ns / 1e6,
            inbound=event.inbound,
            protocol=event.protocol,
            pid=listener.pid if listener else event.pid,
            # The event has the name of the thread, which with Envoy is that of a worker.
            process=listener.name if listener else holders.name(event.pid) or event.name,
            uid=listener.uid if listener else packet.uid,
            source=event.source,
            destination=meant,
            became=judged.became,
            port=judged.port,
            setting=judged.setting,
            result=event.result,
            text=judged.text,
        )

    def _packet(self, event: Event, meant: Endpoint) -> Packet:
        """Return the first packet of a connection as it was made, or as it arrived."""
        source, (to, port) = event.source[0], meant
        if event.inbound:
            return Packet(protocol="tcp", destination=to, dport=port, source=source)
        return Packet(
            protocol=event.protocol,
            destination=to,
            dport=port,
            source=source if event.left and source.version == to.version else None,
            uid=_inside(self._users, event.uid),
            gid=_inside(self._groups, event.gid),
            mark=event.mark,
        )

    # --- the receiving end ------------------------------------------------------------------------

    def _meant(self, event: Event, view: View) -> Endpoint | None:
        """Return where a connection was to go before it was given to somebody else.

        Of one that came in, conntrack knows for some seconds after its end; then it is not known.
        """
        if not event.inbound:
            return event.asked
        found = None
        with contextlib.suppress(AgentError):
            if self._conntrack is None:
                self._conntrack = self.netns.run(Conntrack)
            found = self._conntrack.meant("tcp", event.went, event.source)
        lost = view.translated and event.went[1] == _capture_port(view)
        return found or (None if lost else event.went)

    def _accepting_port(self, event: Event, view: View) -> int:
        """Return the port of the listener; of one that began before the watch it may be unknown."""
        port = event.went[1]
        if event.listening or not event.inbound or self._listener(port) is not None:
            return event.listening or port
        capture = _capture_port(view)
        return capture if self._listener(capture) is not None else port

    def _listener(self, port: int) -> Listener | None:
        found = self._listeners.get(port)
        now = time.monotonic_ns()
        age = now - self._listeners_at_ns
        if age > (VIEW_AGE_NS if found else LISTENERS_AGE_NS):
            self._listeners_at_ns = now
            with contextlib.suppress(AgentError, OSError):
                self._listeners = self._who_listens()
        return self._listeners.get(port)

    def _who_listens(self) -> Mapping[int, Listener]:
        with self.netns.run(SocketTable) as table:
            sockets = table.listeners("tcp")
        held = holders.holders(self.netns.id, {each.inode for each in sockets})
        found = {}
        for each in sockets:
            holder = held.get(each.inode)
            uid = each.uid
            pid, name = (holder.pid, holder.name) if holder else (0, "")
            with contextlib.suppress(OSError):  # whoever made the socket may be another user now
                uid = os.stat(f"/proc/{pid}").st_uid if pid else uid
            found[each.local[1]] = Listener(pid, name, _inside(self._users, uid))
        return found


def _capture_port(view: View) -> int:
    return view.settings.inbound_capture_port if view.settings else INBOUND_CAPTURE_PORT


def _inside(ids: IdRange, outside: int) -> int:
    """Return an id as the pod has it; one that it does not know is nobody's."""
    if not ids.count:
        return outside
    return outside - ids.outside + ids.inside if 0 <= outside - ids.outside < ids.count else NOBODY
