"""eBPF: no rules, no conntrack. Programs of the node turn connections at the socket (bpf/).

A namespace is captured by one entry in a map, keyed by its cookie, and by one program of its own
for what arrives; the programs for what is sent are attached once, at the root of cgroup2, when the
first namespace is enrolled, and go with the last. All of it is pinned and works without the agent.

The entry is written last when a namespace is enrolled and taken out first, and it is replaced as a
whole: whatever stops half way has not changed what becomes of a connection.
"""

import contextlib
import os
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from agent.backends.protocol import Step
from agent.backends.session import Session
from agent.formats import bpf_capture, bpf_object
from agent.kernel import bpf, bpf_loader, bpf_pins
from agent.kernel.borrowed import borrowed, cookie_of
from agent.kernel.netns import own_id, refuse_node
from agent.kernel.places import read_places
from agent.kernel.user_ids import user_ids
from agent.model import enrolment
from agent.model.enrolment import Enrolment, Site
from agent.model.errors import EnvironmentLacks, KernelRejected, StateUnreadable
from agent.model.settings import Settings
from agent.model.state import EBPF

SLOTS = 4  # bpf/capture.h
LISTENER = struct.Struct("=QIHH")  # cookie, port, family, slot
ADOPTING = struct.Struct("=QII")
FAMILIES = {4: 2, 6: 10}  # AF_INET, AF_INET6
COOKIE = struct.Struct("=Q")


class Ebpf:
    name = EBPF

    def missing(self) -> str | None:
        if reason := bpf_pins.not_built():
            return reason
        if bpf_pins.about() is not None:
            return None
        reason = bpf_pins.unloadable()
        return reason and f"the kernel does not load its programs: {reason}"

    def refusals(self, settings: Settings) -> tuple[str, ...]:
        return enrolment.refusals(settings)

    def read(self, session: Session) -> Enrolment | None:
        """Return what is loaded for the namespace. Leaves no trace.

        Raises: StateUnreadable if it is of another version's making.
        """
        try:
            about = bpf_pins.about()
            cookie = session.netns.cookie()
            if about is None or cookie is None:
                return None
            _refuse_other_layout(about)
            return _read(session, about, cookie)
        except FileNotFoundError:  # taken away meanwhile
            return None
        except OSError as error:
            raise StateUnreadable(
                f"cannot read {bpf_pins.base()}: {error.strerror or error}"
            ) from error

    def steps(
        self, session: Session, have: Enrolment | None, want: Enrolment | None
    ) -> tuple[Step, ...]:
        if have == want and not (have and have.stale):
            return ()
        if want is None or want.settings is None:
            what = "take the namespace out of the eBPF programs"
            return (Step(what, lambda: _writing(lambda: _release(session)), self.name),)
        settings = want.settings
        what = "enrol the namespace with the eBPF programs"
        return (Step(what, lambda: _writing(lambda: _enrol(session, settings)), self.name),)


def _refuse_other_layout(about: bpf_pins.About) -> None:
    if about.layout not in (0, enrolment.LAYOUT):
        raise StateUnreadable(
            f"{bpf_pins.base()} holds the programs of another version of the agent (layout "
            f"{about.layout}, and here {enrolment.LAYOUT}), which this one cannot take over; "
            f"`rm -r {bpf_pins.base()}` ends every capture of theirs"
        )


# --- reading --------------------------------------------------------------------------------------


def _read(session: Session, about: bpf_pins.About, cookie: int) -> Enrolment | None:
    if about.layout == 0:
        return None if bpf_pins.busy() else Enrolment(None, ("the programs are loaded half",))
    with _map("captures") as captures:
        entry = captures.lookup(COOKIE.pack(cookie))
        if entry is None and _pod_pin(cookie).exists():
            return Enrolment(None, ("a program is attached, and the namespace is not enrolled",))
        if entry is None:
            idle = not bpf_pins.busy() and not any(captures.keys())
            return Enrolment(None, ("the programs are loaded for nobody",)) if idle else None
    try:
        settings, known = bpf_capture.decode(entry)
    except ValueError as error:
        return Enrolment(None, (f"the entry of the namespace is damaged: {error}",))
    faults = (
        *_node_faults(about),
        *_inbound_faults(session, cookie),
        *_listener_faults(session, cookie, settings.inbound_capture_port),
    )
    stale = tuple(_stale(known, _site(session, settings)))
    return Enrolment(settings, faults, stale, tuple(_ahead()))


def _site(session: Session, settings: Settings) -> Site:
    users, groups = user_ids(session.netns.fd)
    return Site(read_places(session.rtnl, settings.families), users, groups)


def _node_faults(about: bpf_pins.About) -> Iterator[str]:
    if about != bpf_pins.About(enrolment.LAYOUT, bpf_pins.build()):
        yield "the programs are not those of this version of the agent"
    for hook in bpf_loader.HOOKS:
        target = _target(bpf_pins.base() / "links" / hook)
        if target is None:
            yield f"{hook} is not attached"
        elif target != bpf_pins.ROOT_CGROUP:
            yield f"{hook} was detached from the root of cgroup2"


def _ahead() -> Iterator[str]:
    """Say whose programs see a connection first, such as another's load balancer at the socket.

    Those of another agent, which has other pins, ask for its own pods only.
    """
    root = bpf_pins.cgroup_root()
    if root is None:
        return
    with _open(os.open(root, os.O_RDONLY | os.O_DIRECTORY)) as target:
        for hook in ("connect4", "connect6"):
            ours = _link(bpf_pins.base() / "links" / hook)
            order = bpf.attached(target, bpf_loader.HOOKS[hook])
            if ours is None or ours.program not in order:
                continue
            for program in order[: order.index(ours.program)]:
                name = bpf.program_name(program)
                if name != hook:
                    yield (
                        f"cgroup {hook}: the program {name or '?'} (id {program}) of somebody else "
                        "runs before the capture and may turn a connection first"
                    )


def _target(pin: Path) -> int | None:
    found = _link(pin)
    return None if found is None else found.target


def _link(pin: Path) -> bpf.LinkInfo | None:
    try:
        fd = bpf.get(pin)
    except FileNotFoundError:
        return None
    with _open(fd):
        return bpf.link_info(fd)


def _inbound_faults(session: Session, cookie: int) -> Iterator[str]:
    try:
        fd = bpf.get(_pod_pin(cookie))
    except FileNotFoundError:
        yield "the program for inbound connections is not attached"
        return
    try:
        info = bpf.link_info(fd)
        if info.target != session.netns.id.ino:
            yield "the program for inbound connections was detached"
        elif bpf.program_name(info.program) != _inbound_name():
            yield "the program for inbound connections is not that of this version of the agent"
    finally:
        os.close(fd)


def _stale(known: Site, there: Site) -> Iterator[str]:
    """Say what changed in the namespace's addresses and routes since it was enrolled."""
    if (known.users, known.groups) != (there.users, there.groups):
        yield "the programs take the ids of another user namespace for those of this one"
    before = {place.network: place for place in known.places}
    after = {place.network: place for place in there.places}
    for network, place in after.items():
        if before.get(network) != place:
            what = "an address of the namespace" if place.local else "where a route leads"
            yield f"the programs do not know that {network} is {what}, from {place.source}"
    for network in before.keys() - after.keys():
        yield f"the programs know {network}, which is no address or route of the namespace now"


def _listener_faults(session: Session, cookie: int, port: int) -> Iterator[str]:
    with _map("listeners") as listeners:
        for version in _listening(session, port):
            keys = _listener_keys(cookie, port, FAMILIES[version])
            if not any(listeners.lookup(key) for key in keys):
                yield f"the programs do not know who listens on port {port} (IPv{version})"


def _listening(session: Session, port: int) -> set[int]:
    """Return the IP versions of the sockets that listen on a port."""
    listeners = session.sockets.listeners("tcp")
    return {found.local[0].version for found in listeners if found.local[1] == port}


def _listener_keys(cookie: int, port: int, family: int) -> list[bytes]:
    return [LISTENER.pack(cookie, port, family, slot) for slot in range(SLOTS)]


def _map(name: str) -> bpf.Map:
    return bpf.Map.at(bpf_pins.base() / "maps" / name)


def _pod_pin(cookie: int) -> Path:
    return bpf_pins.base() / "pods" / str(cookie)


def _inbound_name() -> str:
    return f"inbound_{bpf_pins.build().hex()[:7]}"


# --- writing --------------------------------------------------------------------------------------


def _writing(work: Callable[[], None]) -> None:
    """Do it under the lock of the node's programs.

    Raises: KernelRejected with what the kernel said.
    """
    try:
        with bpf_pins.lock():
            work()
    except OSError as error:
        raise KernelRejected(f"eBPF: {error.strerror or error}") from error


def _enrol(session: Session, settings: Settings) -> None:
    refuse_node(session.netns, is_self=session.netns.id == own_id())
    cookie = session.netns.cookie()
    if cookie is None:
        raise EnvironmentLacks("eBPF needs Linux 5.15 or newer: namespaces have no cookies here")
    _bring_up()
    _sweep()
    port = settings.inbound_capture_port
    entry = bpf_capture.encode(settings, _site(session, settings))
    if _listening(session, port):
        _adopt(session, cookie, port)
    _attach(session, cookie)
    with _map("captures") as captures:
        captures.update(COOKIE.pack(cookie), entry)
    if _listening(session, port):  # also whoever began to listen just before the entry was there
        _adopt(session, cookie, port)
    _forget_listeners(cookie, but=port)


def _release(session: Session) -> None:
    about, cookie = bpf_pins.about(), session.netns.cookie()
    if about is None or cookie is None:
        return
    if about.layout == 0:
        bpf_pins.unload()
        return
    with _map("captures") as captures:
        captures.delete(COOKIE.pack(cookie))
        _pod_pin(cookie).unlink(missing_ok=True)
        _forget_listeners(cookie)
        _sweep()
        idle = not any(captures.keys())
    if idle:
        bpf_pins.unload()


def _bring_up() -> None:
    """Load the programs of this version, if what is loaded is not that already."""
    about = bpf_pins.about()
    if about is not None:
        _refuse_other_layout(about)
        if not any(_node_faults(about)):
            return
    bpf_pins.load()


def _attach(session: Session, cookie: int) -> None:
    """Attach the namespace's own program, or put this version's in its place."""
    path = _pod_pin(cookie)
    with contextlib.suppress(FileNotFoundError), _open(bpf.get(path)) as fd:
        info = bpf.link_info(fd)
        if info.target == session.netns.id.ino:
            if bpf.program_name(info.program) != _inbound_name():
                with _inbound_program(cookie) as program:
                    bpf.exchange(fd, program)
            return
        path.unlink()
    with (
        _inbound_program(cookie) as program,
        _open(bpf.link(program, session.netns.fd, bpf.ATTACH_SK_LOOKUP)) as fd,
    ):
        bpf.pin(fd, path)


@contextlib.contextmanager
def _inbound_program(cookie: int) -> Iterator[int]:
    with _map("captures") as captures, _map("listeners") as listeners:
        code = bpf_object.link(
            bpf_pins.object_file("inbound.bpf.o"),
            "sk_lookup",
            {
                "captures": bpf_object.MapFd(captures.fd),
                "listeners": bpf_object.MapFd(listeners.fd),
                "netns_cookie": bpf_object.Number(cookie),
            },
        )
        with _open(bpf.load_sk_lookup(code, _inbound_name())) as fd:
            yield fd


def _adopt(session: Session, cookie: int, port: int) -> None:
    """Let the programs know who listens already. Reading the pinned iterator does it.

    Where the kernel has no type information there is none; then the sockets are borrowed.
    """
    path = bpf_pins.base() / "adopt"
    if path.exists():
        with _map("adopting") as adopting:
            adopting.update(bytes(4), ADOPTING.pack(cookie, port, 0))
        session.netns.run(path.read_bytes)
        return
    inodes = (s.inode for s in session.sockets.listeners("tcp") if s.local[1] == port)
    with borrowed(frozenset(inodes)) as found, _map("listeners") as listeners:
        for held in found:
            slot = cookie_of(held) % SLOTS
            key = LISTENER.pack(cookie, port, held.family, slot)
            listeners.update(key, held.fileno().to_bytes(8, sys.byteorder))


def _forget_listeners(cookie: int, but: int | None = None) -> None:
    with _map("listeners") as listeners:
        for key in list(listeners.keys()):
            owner, port, _, _ = LISTENER.unpack(key)
            if owner == cookie and port != but:
                listeners.delete(key)


def _sweep() -> None:
    """Take out what namespaces that are gone left behind."""
    with _map("captures") as captures:
        for path in list((bpf_pins.base() / "pods").iterdir()):
            if _target(path) == 0:
                captures.delete(COOKIE.pack(int(path.name)))
                path.unlink(missing_ok=True)


@contextlib.contextmanager
def _open(fd: int) -> Iterator[int]:
    try:
        yield fd
    finally:
        os.close(fd)
