"""From one state of a namespace to another: all of it, or back to where it was.

The order is chosen so that traffic never finds a gap: what routing needs comes first, then the
rules of the backend that gains some, then the removal from the others, then routes that nobody
needs any more. Where that takes more than one atomic write, a guard stands meanwhile: it drops new
connections (their first packets are sent again) and leaves established ones alone. A process that
is killed on the way leaves the guard, so the namespace is closed and not half open; the next run
takes it away.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NoReturn

from agent.backends import registry
from agent.backends.protocol import Step
from agent.backends.session import Session
from agent.capture.observe import observe
from agent.kernel import routing
from agent.model import guard
from agent.model.errors import AgentError, KernelRejected, RollbackFailed, RolledBack
from agent.model.plan import Route
from agent.model.ruleset import Family
from agent.model.state import IPTABLES_LEGACY, NamespaceState, routes_without, same

BeforeStep = Callable[[Step], None]


def no_hook(_step: Step) -> None:
    """Do nothing before a step; tests put their faults here."""


@dataclass(frozen=True)
class Transition:
    """The way from `have`, which was just read, to `want`. Nothing is written before `run`."""

    session: Session
    have: NamespaceState
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
            for stage, expected in self._stages():
                for step in stage:
                    before_step(step)
                    step.run()
                if expected is not None:
                    _verify(self.session, expected)
        except BaseException as error:  # an interrupt or a bug must not leave half a change either
            _roll_back(self.session, self.have, error)

    def _stages(self) -> Iterator[tuple[tuple[Step, ...], NamespaceState | None]]:
        """Yield writes and the state after them; the guard is seen in the state that follows it."""
        if registry.GUARD not in self.have.loaded and not _needs_guard(self.steps):
            yield self.steps, self.want
            return
        families = tuple({*guard.families(self.have), *guard.families(self.want)})
        if self.session.nft is None:
            yield from self._legacy_stages(families)
            return
        wall = guard.rulesets(families)
        guarded = replace(self.want, loaded={**self.want.loaded, registry.GUARD: wall})
        backend = registry.GUARD_BACKEND
        changes = tuple(step for step in self.steps if step.backend != registry.GUARD)
        yield backend.steps(self.session, self.have.of(registry.GUARD), wall), None
        yield changes, guarded
        yield backend.steps(self.session, wall, {}), self.want

    def _legacy_stages(
        self, families: tuple[Family, ...]
    ) -> Iterator[tuple[tuple[Step, ...], NamespaceState | None]]:
        """Without nf_tables the guard stands in the legacy filter table, among what is changed."""
        before, after = (
            replace(s, loaded={**s.loaded, IPTABLES_LEGACY: guard.merged(legacy, families)})
            for s in (self.have, self.want)
            for legacy in (s.of(IPTABLES_LEGACY),)
        )
        yield steps(self.session, self.have, before), None
        yield steps(self.session, before, after), after
        yield steps(self.session, after, self.want), self.want


def prepare(session: Session, have: NamespaceState, want: NamespaceState) -> Transition:
    """Return the way from what the namespace holds to what it should hold."""
    return Transition(session, have, want, steps(session, have, want))


def steps(session: Session, have: NamespaceState, want: NamespaceState) -> tuple[Step, ...]:
    """Return the writes that turn one state into the other, in a safe order."""
    missing = routes_without(want.routes, have.routes)
    surplus = routes_without(have.routes, want.routes)
    found: list[Step] = []
    if missing:
        found.append(_route_step(session, "add", missing))
    names = [*registry.ALL, registry.GUARD]
    names.sort(key=lambda name: not want.of(name))
    for name in names:
        backend = registry.GUARD_BACKEND if name == registry.GUARD else registry.ALL[name]
        found += backend.steps(session, have.of(name), want.of(name))
    if surplus:
        found.append(_route_step(session, "del", surplus))
    return tuple(found)


def _route_step(session: Session, verb: str, routes: tuple[Route, ...]) -> Step:
    # Dependents go last when they are made and first when they are taken away.
    ordered = routes if verb == "add" else tuple(reversed(routes))

    def change() -> None:
        if verb == "add":
            routing.change(session.rtnl, (), ordered)
        else:
            routing.change(session.rtnl, ordered, ())

    what = "; ".join(route.command().replace(" add ", f" {verb} ") for route in ordered)
    return Step(what, change, backend="routing")


def _needs_guard(todo: tuple[Step, ...]) -> bool:
    """Routes do nothing without the rules that mark packets for them; one atomic write is safe."""
    writes = [step for step in todo if step.backend != "routing"]
    return len(writes) > 1 or any(not step.atomic for step in writes)


def _verify(session: Session, wanted: NamespaceState) -> None:
    """Read everything back. A tool's word that it has done a thing proves nothing."""
    found = observe(session)
    if not same(found, wanted):
        raise KernelRejected(
            "what was loaded reads back differently; see `check` for the difference"
        )


def _roll_back(session: Session, before: NamespaceState, cause: BaseException) -> NoReturn:
    """Put everything back and raise; nothing is left of the attempt but this error.

    Raises: RolledBack or RollbackFailed, always.
    """
    said = "interrupted" if isinstance(cause, KeyboardInterrupt) else str(cause)
    try:
        now = observe(session)
        for step in steps(session, now, before):
            step.run()
        _verify(session, before)
    except (AgentError, TimeoutError) as failure:
        raise RollbackFailed(
            f"{said}; undoing it failed too ({failure}); new connections may be closed by the "
            "guard until `apply` or `remove` is run again"
        ) from cause
    raise RolledBack(f"{said}; everything was put back as it was before") from cause
