"""Makes a namespace captured as its settings say, or not captured at all."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from agent.backends import registry
from agent.backends.protocol import Step
from agent.backends.session import Session, writing
from agent.capture import gate, record, transition
from agent.capture.observe import hidden, observe
from agent.capture.transition import BeforeStep, no_hook
from agent.kernel import cgroups, routing
from agent.kernel.adoption import adopt
from agent.kernel.netns import Netns
from agent.model.errors import ConnectionsAtRisk, EnvironmentLacks, StateUnreadable
from agent.model.plan import LocalRoute, plan
from agent.model.settings import Settings, dump
from agent.model.state import EBPF, GUARD, NFTABLES, NamespaceState, routes_without
from agent.model.wanted import Before, Known, before_of, captured, captures, uncaptured

# containerd has lo brought up beside the chain of plugins, so that may come later than a call.
LO_SOON_S, LO_LOOK_S = 2.0, 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a run did. `changed` tells whether anything was written to the kernel.

    `passed_over` are those of the warnings that say why the backend in use gave way to another.
    """

    backend: str | None
    changed: bool
    rules: int
    duration_ms: float
    warnings: tuple[str, ...] = ()
    steps: tuple[str, ...] = field(default=())
    passed_over: tuple[str, ...] = ()
    spared: int = 0  # connections that were open before there was a capture, and go on past it


def apply(
    netns: Netns,
    settings: Settings,
    *,
    backend: str = "auto",
    dry_run: bool = False,
    careful: bool = False,
    kept: bool = False,
    before_step: BeforeStep = no_hook,
) -> Result:
    """Make the namespace so: all of it, in every family and table, or nothing.

    Whatever captured it before (another version, other flags, another backend, istio-init, half of
    any of these) is replaced. What is already so is not written again. Connections that are open go
    on as they are; where that cannot be had, a `careful` run writes nothing. `kept` is for whoever
    stays and closes the gate when the proxy listens: it is taken as it stands in the namespace; and
    lo is waited for there.

    Raises: ConnectionsAtRisk, if careful; RolledBack, RollbackFailed, StateUnreadable,
    EnvironmentLacks; InvalidSettings if the backend that was asked for cannot honour them.
    """
    started = time.monotonic()
    with writing(netns) as session:
        have = observe(session)
        chosen = registry.choose(backend, have, settings)
        found = record.load(netns)
        if kept and settings.gate != gate.CLOSED:
            settings = _with_gate(session, have, settings, chosen.name, found)
        wanted = plan(settings)
        _refuse_unreadable(have, chosen)
        _refuse_hidden(session, have)
        known, standing = _known(found, have)
        native = registry.GUARD_BACKEND.missing() is None
        change = transition.prepare(
            session, have, lambda state: captured(state, wanted, chosen.name, known, native=native)
        )
        _refuse_lo_down(session, have, change.want, LO_SOON_S if kept else 0.0)
        spared = Spared(netns)
        if _is_first(found, have) and chosen.name != EBPF and not dry_run:
            spared.at_first(careful=careful)
        if not dry_run:
            new = record.Record(dump(settings), known.before or before_of(have))
            with _recorded(netns, standing, new):
                change.run(spared.before(before_step))
    return Result(
        backend=chosen.name,
        changed=bool(change.steps),
        rules=0 if chosen.name == EBPF else wanted.rule_count(),
        duration_ms=round((time.monotonic() - started) * 1000, 3),
        warnings=(
            *settings.warnings(),
            *chosen.passed_over,
            *spared.warnings,
            *_surroundings(have, chosen.name),
        ),
        steps=tuple(step.what for step in change.steps),
        passed_over=chosen.passed_over,
        spared=spared.number,
    )


class Spared:
    """The connections that are open when a namespace is captured for the first time.

    They are looked for before anything is written and, where there are any, once more ahead of each
    step: by then the guard has woken conntrack, which sees whatever is opened from there on.
    """

    def __init__(self, netns: Netns) -> None:
        self.number = 0
        self.warnings: tuple[str, ...] = ()
        self._netns = netns

    def at_first(self, *, careful: bool) -> None:
        """Raises: ConnectionsAtRisk, if careful."""
        try:
            self.number = adopt(self._netns)
        except ConnectionsAtRisk as error:
            if careful:
                raise
            self.warnings = (str(error),)

    def before(self, hook: BeforeStep) -> BeforeStep:
        """Return what is to be called before each step, besides what was to be called anyway."""

        def both(step: Step) -> None:
            hook(step)
            if self.number and step.backend != GUARD:
                self.number += adopt(self._netns)

        return both


def _is_first(found: record.Record | None, have: NamespaceState) -> bool:
    """Tell whether nothing captured this namespace before.

    What was opened while a capture was flushed got past the proxy, and is not spared.
    """
    return not (captures(have) or have.istio_tables or found)


def remove(netns: Netns, *, dry_run: bool = False, before_step: BeforeStep = no_hook) -> Result:
    """Take out everything that a capture can have put into the namespace, whoever did.

    Raises: as `apply`.
    """
    started = time.monotonic()
    with writing(netns) as session:
        have = observe(session)
        _refuse_hidden(session, have)
        known, _ = _known(record.load(netns), have)
        change = transition.prepare(session, have, lambda state: uncaptured(state, known))
        if not dry_run:
            change.run(before_step)
            record.drop(netns)
    removed = sum(r.rule_count() for parts in captures(have).values() for r in parts.values())
    backends = registry.in_use(have)
    return Result(
        backend=backends[0] if backends else None,
        changed=bool(change.steps),
        rules=removed,
        duration_ms=round((time.monotonic() - started) * 1000, 3),
        warnings=have.unreadable,
        steps=tuple(step.what for step in change.steps),
    )


def _with_gate(
    session: Session,
    have: NamespaceState,
    settings: Settings,
    backend: str,
    found: record.Record | None,
) -> Settings:
    listeners = {found.local[1] for found in session.sockets.listeners("tcp")}
    ahead = {settings.proxy_port, settings.inbound_capture_port}
    there = tuple(one for one in settings.init_cgroups if cgroups.identity(one) is not None)
    settings = replace(settings, init_cgroups=there)
    return gate.settled(settings, have, found, backend, listening=bool(listeners & ahead))


def _refuse_unreadable(have: NamespaceState, chosen: registry.Choice) -> None:
    for reason in have.unreadable:
        if reason.startswith(f"{chosen.name}:"):
            raise StateUnreadable(f"{reason}; nothing was written. Use --backend {NFTABLES}")


def _refuse_lo_down(
    session: Session, have: NamespaceState, want: NamespaceState, patience_s: float
) -> None:
    missing = routes_without(want.routes, have.routes)
    if not any(isinstance(route, LocalRoute) for route in missing):
        return
    ends = time.monotonic() + patience_s
    while not routing.lo_is_up(session.rtnl):
        if time.monotonic() >= ends:
            raise EnvironmentLacks(
                "lo is down in the namespace, and TPROXY needs a route through it; nothing was "
                "written. Run `ip link set lo up` there"
            )
        time.sleep(LO_LOOK_S)


def _refuse_hidden(session: Session, have: NamespaceState) -> None:
    """Refuse to call a namespace captured anew, or free, while an old capture cannot be reached."""
    if found := hidden(session, have):
        raise StateUnreadable(f"{'; '.join(found)}; nothing was written")


def _known(found: record.Record | None, have: NamespaceState) -> tuple[Known, record.Record | None]:
    """Return what is known of the capture that stands here, and its record.

    A record whose rules somebody flushed, or a removal that was killed took out, is stale but for
    what that leaves: routes and empty tables.
    """
    if found is None:
        return Known(), None
    known = found.known()
    if captures(have) or have.enrolment is not None:
        return known, found
    plans = tuple(replace(one, rulesets={}) for one in known.plans)
    tables = {
        (family, table.name)
        for one in known.plans
        for family, ruleset in one.rulesets.items()
        for table in ruleset.tables
    }
    # An empty table that the capture used is its own if it was not there before.
    kept = (shell for shell in before_of(have).shells if shell[:2] not in tables)
    shells = found.before.shells.union(kept)
    return Known(plans, Before(shells, found.before.routes)), None


@contextlib.contextmanager
def _recorded(netns: Netns, old: record.Record | None, new: record.Record) -> Iterator[None]:
    """Keep the record true at every moment of a change, also of one that is killed or undone."""
    if old == new:
        yield
        return
    saved = replace(old, pending=new.settings) if old else new
    record.save(netns, saved)
    try:
        yield
    except BaseException:
        if old:
            record.save(netns, old)
        else:
            record.drop(netns)
        raise
    if saved != new:
        record.save(netns, new)


def _surroundings(have: NamespaceState, backend: str) -> tuple[str, ...]:
    """Return sentences about what else in the namespace bears on the capture."""
    found = list(have.unreadable)
    for name, rulesets in captures(have).items():
        if name != backend:
            count = sum(ruleset.rule_count() for ruleset in rulesets.values())
            found.append(f"{count} rules of a capture in {name} were replaced by {backend}")
    if backend != EBPF and EBPF in registry.in_use(have):
        found.append(f"a capture by {EBPF} was replaced by {backend}")
    return tuple(found)
