"""What a watched namespace's capture should be, and what is loaded; read anew when it is old."""

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from agent.backends.session import reading
from agent.capture import gate, record
from agent.capture.observe import observe
from agent.capture.record import Record
from agent.explain.branch import Layer
from agent.explain.enrolled import walk_enrolled
from agent.explain.trace import trace
from agent.explain.walk import walk
from agent.kernel.netns import Netns
from agent.kernel.topology import read_host
from agent.model.errors import InvalidSettings
from agent.model.host import Host
from agent.model.packet import Address, Packet, Trace
from agent.model.plan import plan
from agent.model.settings import Settings, parse
from agent.model.state import BACKENDS, NamespaceState
from agent.model.wanted import captures

REMEMBERED = 1024
YOUNG_NS = 30_000_000  # looking takes some 5 ms: whoever connects in a loop must not make it one

Walk = Callable[[Packet], Trace]


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What is known of a namespace: whether it is captured, and by rules that translate, the
    settings of that where they are known, which addresses are its own, and two walks: through what
    the capture should be, and through what is loaded now.

    A packet without a uid is one that arrives.
    """

    captured: bool
    translated: bool
    settings: Settings | None
    is_local: Callable[[Address], bool]
    expected: Walk
    loaded: Walk


class Viewer:
    """Looks at one namespace, as seldom as will do."""

    def __init__(self, netns: Netns) -> None:
        self._netns = netns
        self._view: View | None = None
        self._at_ns = 0
        self._standing: NamespaceState | None = None
        self._recorded = False

    def seen_since(self, ns: int) -> View:
        """Return a view that is not older than that (CLOCK_MONOTONIC), or very young.

        Raises: AgentError if the namespace cannot be read.
        """
        now = time.monotonic_ns()
        if self._view is None or self._at_ns < min(ns, now - YOUNG_NS):
            self._view = self._look()
            self._at_ns = now
        return self._view

    def _look(self) -> View:
        with reading(self._netns) as session:
            state = observe(session)
        host = read_host(self._netns)
        known = record.load(self._netns)
        settings = _settings(state, known)
        if is_loaded(state):
            self._standing = state
        elif self._recorded and settings is None:  # taken out, by us
            self._standing = None
        self._recorded = settings is not None
        loaded = partial(_trace, state, host)
        expected: Walk = loaded
        if settings is not None and state.enrolment is not None:
            expected = partial(_walk_enrolled, settings, host)
        elif settings is not None:
            layers = tuple(Layer(BACKENDS[0], r) for r in plan(settings).rulesets.values())
            expected = partial(_walk, layers, host)
        elif self._standing is not None:
            expected = partial(_trace, self._standing, host)
        return View(
            captured=settings is not None or self._standing is not None,
            translated=bool(captures(state)),
            settings=settings,
            is_local=lru_cache(REMEMBERED)(host.is_local),
            expected=lru_cache(REMEMBERED)(expected),
            loaded=lru_cache(REMEMBERED)(loaded),
        )


def _settings(state: NamespaceState, known: Record | None) -> Settings | None:
    """Return the settings of the capture: as applied here, or as the eBPF programs have them.

    Its gate is as it stands now. The settings of a capture that somebody else wrote as rules are
    not known.
    """
    found = state.enrolment.settings if state.enrolment is not None else None
    if known is not None:
        with contextlib.suppress(InvalidSettings):  # of another version; what is loaded has to do
            found = parse(known.settings)
    if found is not None and gate.stands(state, known) == gate.CLOSED:
        return replace(found, gate=gate.CLOSED, init_cgroups=())
    return found


def is_loaded(state: NamespaceState) -> bool:
    """Whether anything captures the namespace."""
    enrolled = state.enrolment is not None and state.enrolment.settings is not None
    return enrolled or bool(captures(state))


def is_captured(netns: Netns) -> bool:
    """Whether a capture stands there, or should.

    Raises: AgentError if that cannot be read.
    """
    if record.load(netns) is not None:
        return True
    with reading(netns) as session:
        return is_loaded(observe(session))


def _trace(state: NamespaceState, host: Host, packet: Packet) -> Trace:
    return trace(state, host, packet, inbound=packet.uid is None)


def _walk(layers: tuple[Layer, ...], host: Host, packet: Packet) -> Trace:
    return walk(layers, packet, host, inbound=packet.uid is None)


def _walk_enrolled(settings: Settings, host: Host, packet: Packet) -> Trace:
    return walk_enrolled(settings, partial(walk, ()), packet, host, inbound=packet.uid is None)
