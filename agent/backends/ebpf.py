"""eBPF: no rules, no conntrack. Programs of the node turn connections at the socket (bpf/).

A namespace is captured by one entry in a map, keyed by its cookie, and by one program of its own
for what arrives; the programs for what is sent are attached once, at the root of cgroup2, when the
first namespace is enrolled, and go with the last. All of it is pinned and works without the agent.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeVar

from agent.backends import ebpf_enrol, ebpf_gate, ebpf_inbound, ebpf_node, ebpf_sweep
from agent.backends.ebpf_sweep import Swept
from agent.backends.protocol import Step
from agent.backends.session import Session
from agent.formats import bpf_capture
from agent.formats.bpf_capture import COOKIE
from agent.kernel import bpf, bpf_pins, bpffs
from agent.kernel.places import read_places
from agent.kernel.user_ids import user_ids
from agent.model import enrolment
from agent.model.enrolment import Enrolment, Site
from agent.model.errors import KernelRejected, StateUnreadable
from agent.model.settings import Settings
from agent.model.state import EBPF

T = TypeVar("T")


class Ebpf:
    name = EBPF

    def missing(self) -> str | None:
        if reason := bpf_pins.not_built():
            return reason
        if bpf_pins.about() is not None:
            return None
        if reason := bpffs.missing_for(bpf_pins.base()):
            return reason
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
            ebpf_node.refuse_other_layout(about)
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
            return (Step(what, lambda: _writing(lambda: ebpf_enrol.release(session)), self.name),)
        settings = want.settings

        def enrol() -> None:
            ebpf_enrol.enrol(session, have, settings, _site(session, settings))

        what = "enrol the namespace with the eBPF programs"
        return (Step(what, lambda: _writing(enrol), self.name),)


def sweep() -> Swept:
    """Take out what namespaces that are gone left on the node, and look at the rest in passing.

    The last one takes the programs along. Raises: KernelRejected, EnvironmentLacks.
    """
    return _writing(ebpf_sweep.sweep_node) if bpf_pins.about() else Swept()


def _writing(work: Callable[[], T]) -> T:
    """Do it under the lock of the node's programs.

    Raises: KernelRejected with what the kernel said.
    """
    try:
        with bpf_pins.lock():
            return work()
    except OSError as error:
        raise KernelRejected(f"eBPF: {error.strerror or error}") from error


# --- reading --------------------------------------------------------------------------------------


def _read(session: Session, about: bpf_pins.About, cookie: int) -> Enrolment | None:
    if about.layout == 0:
        return None if bpf_pins.busy() else Enrolment(None, (enrolment.HALF_LOADED,))
    with bpf_pins.open_map("captures") as captures:
        entry = captures.lookup(COOKIE.pack(cookie))
        if entry is None and bpf_pins.pod_pin(cookie).exists():
            return Enrolment(None, ("a program is attached, and the namespace is not enrolled",))
        if entry is None:
            idle = not bpf_pins.busy() and not any(captures.keys())
            return Enrolment(None, (enrolment.IDLE,)) if idle else None
    try:
        settings, known = bpf_capture.decode(entry, about.layout)
    except ValueError as error:
        return Enrolment(None, (f"the entry of the namespace is damaged: {error}",))
    if about.layout != enrolment.LAYOUT:
        return Enrolment(settings, (f"the programs are not those {enrolment.OTHER_VERSION}",))
    faults = (
        *ebpf_node.faults(about),
        *_inbound_faults(session, cookie),
        *_own_faults(cookie, known),
        *_listener_faults(session, cookie, settings.inbound_capture_port),
    )
    stale = tuple(_stale(known, _site(session, settings)))
    settings = replace(settings, init_cgroups=ebpf_gate.passing(cookie))
    listened = ebpf_gate.has_listened(cookie)
    foreign = (*ebpf_node.ahead(), *ebpf_inbound.others(session.netns, cookie))
    return Enrolment(settings, faults, stale, foreign, listened)


def _site(session: Session, settings: Settings) -> Site:
    users, groups = user_ids(session.netns.fd)
    return Site(read_places(session.rtnl, settings.families), users, groups)


def _inbound_faults(session: Session, cookie: int) -> Iterator[str]:
    found = bpf.link_at(bpf_pins.pod_pin(cookie))
    if found is None:
        yield "the program for inbound connections is not attached"
    elif found.target != session.netns.id.ino:
        yield "the program for inbound connections was detached"
    elif bpf.program_name(found.program) != bpf_pins.inbound_name():
        yield f"the program for inbound connections is not that {enrolment.OTHER_VERSION}"


def _own_faults(cookie: int, known: Site) -> Iterator[str]:
    with bpf_pins.open_map("own_addresses") as own:
        if any(own.lookup(key) is None for key in bpf_capture.own_keys(cookie, known)):
            yield "the program for inbound connections does not know the namespace's addresses"


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
    with bpf_pins.open_map("listeners") as listeners:
        for version in ebpf_enrol.listening(session, port):
            keys = ebpf_enrol.listener_keys(cookie, port, version)
            if not any(listeners.lookup(key) for key in keys):
                yield f"the programs do not know who listens on port {port} (IPv{version})"
