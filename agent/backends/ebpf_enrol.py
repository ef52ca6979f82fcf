"""One namespace, enrolled with the eBPF programs of the node or taken out again.

The entry is written last when it is enrolled and taken out first, and it is replaced as a whole:
whatever stops half way has not changed what becomes of a connection.
"""

import struct
import sys
from collections.abc import Iterable, Iterator

from agent.backends import ebpf_gate, ebpf_inbound, ebpf_node, ebpf_sweep
from agent.backends.session import Session
from agent.formats import bpf_capture
from agent.formats.bpf_capture import COOKIE
from agent.kernel import bpf_pins
from agent.kernel.borrowed import borrowed
from agent.kernel.netns import own_id, refuse_node
from agent.kernel.sockets import KernelSocket
from agent.model.enrolment import Enrolment, Site
from agent.model.errors import EnvironmentLacks
from agent.model.settings import Settings

SLOTS = 8  # bpf/capture.h
LISTENER = struct.Struct("=QIHH")  # cookie, port, family, slot
ADOPTING = struct.Struct("=QII")
FAMILIES = {4: 2, 6: 10}  # AF_INET, AF_INET6
SWEPT_AT_ONCE = 4


def enrol(session: Session, have: Enrolment | None, settings: Settings, site: Site) -> None:
    """Capture the namespace. Hold the lock.

    Raises: OSError, NamespaceRefused, StateUnreadable, KernelRejected, EnvironmentLacks.
    """
    refuse_node(session.netns, is_self=session.netns.id == own_id())
    cookie = session.netns.cookie()
    if cookie is None:
        raise EnvironmentLacks("eBPF needs Linux 5.15 or newer: namespaces have no cookies here")
    ebpf_node.bring_up()
    port = settings.inbound_capture_port
    listeners = session.sockets.listeners("tcp")
    _adopt(session, cookie, port, listeners)
    now = bpf_capture.own_keys(cookie, site)
    with ebpf_inbound.opened_maps() as maps:
        ebpf_inbound.attach(session.netns, cookie, maps)
        if settings.passing and not ebpf_gate.passing(cookie):
            ebpf_gate.open_anew(cookie)
        if settings.gate != "closed":
            ebpf_gate.close_if_listening(cookie, settings, listeners)
        if settings.passing or have is not None:
            ebpf_gate.let_pass(cookie, settings.passing)
        for key in now:
            maps["own_addresses"].update(key, bpf_capture.PRESENT)
        maps["captures"].update(COOKIE.pack(cookie), bpf_capture.encode(settings, site))
    listeners = session.sockets.listeners("tcp")  # also who began just before the entry was there
    ebpf_gate.close_if_listening(cookie, settings, listeners)
    _adopt(session, cookie, port, listeners)
    if have is not None:
        ebpf_sweep.forget("own_addresses", cookie, but=now)
        ebpf_sweep.forget("listeners", cookie, but=_slots(cookie, port))
    ebpf_sweep.sweep(SWEPT_AT_ONCE)


def release(session: Session) -> None:
    """Let go of the namespace, and of the programs if nobody else needs them. Hold the lock.

    Raises: OSError.
    """
    about, cookie = bpf_pins.about(), session.netns.cookie()
    if about is None or cookie is None:
        return
    if not about.layout and not ebpf_sweep.enrolled():
        bpf_pins.unload()
        return
    ebpf_node.migrate_older(about)
    ebpf_sweep.let_go(cookie)
    ebpf_sweep.sweep()
    if not ebpf_sweep.enrolled():
        bpf_pins.unload()


# --- who listens ----------------------------------------------------------------------------------


def listening(session: Session, port: int) -> set[int]:
    """Return the IP versions of the sockets that listen on a port."""
    listeners = session.sockets.listeners("tcp")
    return {found.local[0].version for found in listeners if found.local[1] == port}


def listener_keys(cookie: int, port: int, version: int) -> list[bytes]:
    """Return the keys under which the programs look for a listener."""
    return [LISTENER.pack(cookie, port, FAMILIES[version], slot) for slot in range(SLOTS)]


def _slots(cookie: int, port: int) -> Iterator[bytes]:
    for version in FAMILIES:
        yield from listener_keys(cookie, port, version)


def _adopt(session: Session, cookie: int, port: int, there: Iterable[KernelSocket]) -> None:
    """Let the programs know who listens there already. Reading the pinned iterator does it.

    Where the kernel has no type information there is none; then the sockets are borrowed.
    """
    there = [found for found in there if found.local[1] == port]
    if not there:
        return
    with bpf_pins.open_map("listeners") as listeners:
        slots = {key: listeners.lookup(key) for key in _slots(cookie, port)}
        known = {int.from_bytes(value, sys.byteorder) for value in slots.values() if value}
        unknown = frozenset(s.inode for s in there if s.cookie not in known)
        if not unknown:
            return
        path = bpf_pins.adopter()
        if path.exists():
            with bpf_pins.open_map("adopting") as adopting:
                adopting.update(bytes(4), ADOPTING.pack(cookie, port, 0))
            session.netns.run(path.read_bytes)
            return
        with borrowed(unknown) as found:
            for held in found:
                mine = [key for key in slots if LISTENER.unpack(key)[2] == held.family]
                free = next((key for key in mine if slots[key] is None), mine[0])
                slots[free] = value = held.fileno().to_bytes(8, sys.byteorder)
                listeners.update(free, value)
