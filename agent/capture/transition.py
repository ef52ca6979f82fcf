"""From one state of a namespace to another: all of it, or back to where it was.

The order is chosen so that traffic never finds a gap: what routing needs comes first, then the
rules or the enrolment of the backend that gains some, then the removal from the others, then routes
that nobody needs any more. Where that takes more than one atomic write, a wall stands meanwhile in
the guard's table: it drops new connections (their first packets are sent again) and leaves
established ones alone. A process that is killed on the way leaves the wall, so the namespace is
closed and not half open; the next run takes it away. A capture with a standing guard needs no wall:
the guard is written first, and what is not redirected yet does not pass it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NoReturn

from agent.backends import registry
from agent.backends.protocol import Step
from agent.backends.session import Session
from agent.capture.observe import observe
from agent.kernel import routing
from agent.model import wall
from agent.model.errors import AgentError, KernelRejected, RollbackFailed, RolledBack
from agent.model.plan import Route
from agent.model.ruleset import Family
from agent.model.state import (
    GUARD,
    IPTABLES_LEGACY,
    IPTABLES_NFT,
    NFTABLES,
    IstioTable,
    NamespaceState,
    routes_without,
    same,
)
from agent.model.undo import undone

BeforeStep = Callable[[Step], None]


def no_hook(_step: Step) -> None:
    """Do nothing before a step; tests put their faults here."""


Aim = Callable[[NamespaceState], NamespaceState]
"""From any state of a namespace to what it should be; what is as it should be, it returns."""

Stage = tuple[tuple[Step, ...], Aim | None]
"""Writes, and what stands in the namespace besides the aim after them; None: look later."""


@dataclass(frozen=True)
class Transition:
    """The way from `have`, which was just read, to what `aim` makes of it.

    Nothing is written before `run`.
    """

    session: Session
    have: NamespaceState
    aim: Aim
    want: NamespaceState
    steps: tuple[Step, ...]

    def run(self, before_step: BeforeStep = no_hook) -> None:
        """Go all the way.

        Raises: RolledBack if a write was refused or did not have its effect (everything is then as
        it was in `have`), RollbackFailed if that could not be undone (the guard then stands).
        """
        if not self.steps:
            return
        try:
            for stage, dressed in self._stages():
                for step in stage:
                    before_step(step)
                    step.run()
                if dressed is not None:
                    self._verify(dressed)
        except BaseException as error:  # an interrupt or a bug must not leave half a change either
            _roll_back(self.session, self.have, self.want, error)

    def _verify(self, dressed: Aim) -> None:
        """Read everything back. A tool's word that it has done a thing proves nothing.

        What others do to their own rules meanwhile is none of our business, so in the end the
        question is whether what is there now is what should become of it.
        """
        found = observe(self.session)
        if not same(found, dressed(self.want)) and not same(found, dressed(self.aim(found))):
            raise KernelRejected(
                "what was loaded reads back differently; see `check` for the difference"
            )

    def _stages(self) -> Iterator[Stage]:
        """Yield the stages; that the wall was put up is seen after the stage that follows."""
        untouched = self.have.of(GUARD) == self.want.of(GUARD)
        if self.want.of(GUARD) or (untouched and not _needs_wall(self.steps)):
            yield self.steps, _bare
            return
        families = wall.families(self.have, self.want)
        if registry.GUARD_BACKEND.missing():
            yield from self._stages_in_iptables(families)
            return
        walls = wall.rulesets(families)
        backend = registry.GUARD_BACKEND

        def guarded(state: NamespaceState) -> NamespaceState:
            return replace(state, loaded={**state.loaded, GUARD: walls})

        changes = tuple(step for step in self.steps if step.backend != GUARD)
        yield backend.steps(self.session, self.have.of(GUARD), walls), None
        yield changes, guarded
        yield backend.steps(self.session, walls, {}), _bare

    def _stages_in_iptables(self, families: tuple[Family, ...]) -> Iterator[Stage]:
        """Without the nftables tools the wall stands in a filter table among what is changed."""
        nft = self.have.of(IPTABLES_NFT) or self.want.of(IPTABLES_NFT)
        flavour = IPTABLES_NFT if nft else IPTABLES_LEGACY

        def guarded(state: NamespaceState) -> NamespaceState:
            walled = wall.merged(state.of(flavour), families)
            return replace(state, loaded={**state.loaded, flavour: walled})

        before, after = guarded(self.have), guarded(self.want)
        yield steps(self.session, self.have, before), None
        yield steps(self.session, before, after), guarded
        yield steps(self.session, after, self.want), _bare


def _bare(state: NamespaceState) -> NamespaceState:
    return state


def prepare(session: Session, have: NamespaceState, aim: Aim) -> Transition:
    """Return the way from what the namespace holds to what it should hold."""
    want = aim(have)
    return Transition(session, have, aim, want, steps(session, have, want))


def steps(session: Session, have: NamespaceState, want: NamespaceState) -> tuple[Step, ...]:
    """Return the writes that turn one state into the other, in a safe order."""
    missing = routes_without(want.routes, have.routes)
    surplus = routes_without(have.routes, want.routes)
    found: list[Step] = []
    if missing:
        found.append(_route_step(session, "add", missing))
    names = [GUARD, *registry.WITH_RULES]
    names.sort(key=lambda name: not want.of(name))
    if not want.of(GUARD):  # what closes comes first and goes last
        names = [*(name for name in names if name != GUARD), GUARD]
    if made := tuple(t for t in want.istio_tables if t not in have.istio_tables):
        script = "".join(table.text for table in made)
        found.append(_tables_step(session, "load", made, script))
    turned = registry.EBPF_BACKEND.steps(session, have.enrolment, want.enrolment)
    if want.enrolment is not None:
        found += turned
    for name in names:
        backend = registry.GUARD_BACKEND if name == GUARD else registry.WITH_RULES[name]
        found += backend.steps(session, have.of(name), want.of(name))
    if want.enrolment is None:
        found += turned
    if gone := tuple(t for t in have.istio_tables if t not in want.istio_tables):
        script = "".join(f"delete table inet {table.name}\n" for table in gone)
        found.append(_tables_step(session, "delete", gone, script))
    if surplus:
        found.append(_route_step(session, "del", surplus))
    return tuple(found)


def _tables_step(session: Session, verb: str, tables: tuple[IstioTable, ...], script: str) -> Step:
    what = f"{verb} {', '.join(f'table inet {table.name}' for table in tables)}"
    return Step(what, lambda: session.require_nft().run(script), NFTABLES)


def _route_step(session: Session, verb: str, routes: tuple[Route, ...]) -> Step:
    # Dependents go last when they are made and first when they are taken away.
    ordered = routes if verb == "add" else tuple(reversed(routes))

    def change() -> None:
        if verb == "add":
            routing.change(session.rtnl, (), ordered)
        else:
            routing.change(session.rtnl, ordered, ())

    what = "; ".join(route.command(verb) for route in ordered)
    return Step(what, change, backend="routing")


def _needs_wall(todo: tuple[Step, ...]) -> bool:
    """Routes do nothing without the rules that mark packets for them; one atomic write is safe."""
    writes = [step for step in todo if step.backend != "routing"]
    return len(writes) > 1 or any(not step.atomic for step in writes)


def _roll_back(
    session: Session, before: NamespaceState, want: NamespaceState, cause: BaseException
) -> NoReturn:
    """Put everything back and raise; nothing is left of the attempt but this error.

    Raises: RolledBack or RollbackFailed, always.
    """
    said = "interrupted" if isinstance(cause, KeyboardInterrupt) else str(cause)
    try:
        now = observe(session)
        for step in steps(session, now, undone(now, before, want)):
            step.run()
        found = observe(session)
        if not same(found, undone(found, before, want)):
            raise KernelRejected("what was put back reads back differently")
    except (AgentError, TimeoutError, KeyboardInterrupt) as failure:
        why = "interrupted again" if isinstance(failure, KeyboardInterrupt) else failure
        raise RollbackFailed(
            f"{said}; undoing it failed too ({why}); new connections may be closed by the "
            "guard until `apply` or `remove` is run again"
        ) from cause
    raise RolledBack(f"{said}; everything was put back as it was before") from cause
