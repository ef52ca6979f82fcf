"""From one state of a namespace to another: all of it, or back to where it was.

The order is chosen so that traffic never finds a gap: what routing needs comes first, then the
rules of the backend that gains some, then the removal from the others, then routes that nobody
needs any more. Where that takes more than one atomic write, a guard stands meanwhile: it drops new
connections (their first packets are sent again) and leaves established ones alone. A process that
is killed on the way leaves the guard, so the namespace is closed and not half open; the next run
takes it away.
"""

from collections.abc import Callable
from dataclasses import replace
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


def run(
    session: Session,
    have: NamespaceState,
    want: NamespaceState,
    *,
    before_step: BeforeStep = no_hook,
) -> bool:
    """Turn `have`, which was just read, into `want`; return whether anything was written.

    Raises: RolledBack if a write was refused or did not have its effect (everything is then as it
    was in `have`), RollbackFailed if that could not be undone either (the guard then stands).
    """
    todo = steps(session, have, want)
    if not todo:
        return False
    stages = [(have, want)]
    if registry.GUARD in have.loaded or _needs_guard(todo):
        families = tuple(
            {**dict.fromkeys(guard.families(have)), **dict.fromkeys(guard.families(want))}
        )
        guarded_have = with_guard(session, have, families)
        guarded_want = with_guard(session, want, families)
        stages = [(have, guarded_have), (guarded_have, guarded_want), (guarded_want, want)]
    try:
        for before, after in stages:
            for step in steps(session, before, after):
                before_step(step)
                step.run()
            _verify(session, after)
    except BaseException as error:  # an interrupt or a bug must not leave half a change either
        _roll_back(session, have, error)
    return True


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
        found.append(_route_step(session, "remove", surplus))
    return tuple(found)


def _route_step(session: Session, verb: str, routes: tuple[Route, ...]) -> Step:
    # Dependents go last when they are made and first when they are taken away.
    ordered = routes if verb == "add" else tuple(reversed(routes))

    def change() -> None:
        if verb == "add":
            routing.change(session.rtnl, (), ordered)
        else:
            routing.change(session.rtnl, ordered, ())

    return Step(f"{verb} {len(routes)} routes, policy rules or addresses", change, atomic=False)


def _needs_guard(todo: tuple[Step, ...]) -> bool:
    writes = [step for step in todo if "policy rules" not in step.what]
    return len(writes) > 1 or any(not step.atomic for step in writes)


def with_guard(
    session: Session, state: NamespaceState, families: tuple[Family, ...]
) -> NamespaceState:
    """Return the state with the guard in it: as an nft table, or in legacy filter without nft."""
    if session.nft is not None:
        loaded = {**state.loaded, registry.GUARD: guard.rulesets(families)}
    else:
        legacy = guard.merged(state.of(IPTABLES_LEGACY), families)
        loaded = {**state.loaded, IPTABLES_LEGACY: legacy}
    return replace(state, loaded=loaded)


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
