"""From what a namespace holds to what it should hold, with a capture or without. Pure.

Built-in chains and tables of nf_tables exist only because somebody asked for them, so a removal has
to know which were there before the capture; `Before` is that knowledge, taken when it was applied.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from agent.model import numbers, owned
from agent.model.enrolment import enrolment
from agent.model.plan import PASSTHROUGH, WHOLE_MARK, CapturePlan, LocalRoute, PolicyRule, Route
from agent.model.ruleset import BUILTIN_CHAINS, Chain, Family, Ruleset, Rulesets, Table
from agent.model.state import (
    EBPF,
    GUARD,
    IPTABLES_LEGACY,
    IPTABLES_NFT,
    NFTABLES,
    NamespaceState,
    same,
)

Policy = tuple[int, int, int]
"""What a policy rule of a capture is about: mark, mask and table."""

ISTIO_POLICY: Policy = (numbers.TPROXY_MARK, WHOLE_MARK, numbers.TPROXY_ROUTE_TABLE)
AMBIENT_POLICY: Policy = numbers.AMBIENT_POLICY

Shell = tuple[Family, str, str]
"""A built-in chain of iptables-nft: family, table, chain."""

TRIALS = frozenset((family, "nat", "INPUT") for family in Family)
"""Where istio-iptables tries whether a tool works, whichever family it then writes to."""

RAILED = frozenset((f, "filter", chain) for f in Family for chain in BUILTIN_CHAINS["filter"])
"""Where it puts guard rails while it reconciles."""


@dataclass(frozen=True, slots=True)
class Before:
    """What of a capture's surroundings was there before it, and is to be there after it."""

    shells: frozenset[Shell] = frozenset()
    routes: tuple[Route, ...] = ()


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of an earlier capture here: its plan, and what was there before it.

    There are two plans while one takes the place of the other."""

    plans: tuple[CapturePlan, ...] = ()
    before: Before | None = None


def captured(
    have: NamespaceState, plan: CapturePlan, backend: str, known: Known, *, native: bool = True
) -> NamespaceState:
    """Return the namespace with exactly this capture in it, loaded by `backend`.

    A standing guard is in a table of its own, or, where nothing can write `native` nftables rules,
    in the filter table of the backend. eBPF needs none: there are no rules to flush.
    """
    base = _others(have, (*known.plans, plan), known.before)
    kept = [route for route in base.routes if route not in plan.routes]
    there = {route: route for route in have.routes}  # as it is there, with its priority
    needed = [there.get(route, route) for route in plan.routes]
    base = replace(base, routes=(*kept, *needed))
    if backend == EBPF:
        return replace(base, enrolment=enrolment(plan.settings))
    want = replace(base, loaded=_loaded(base, plan, backend, native=native))
    # What its trials and rails left is taken away with the rest, and by itself no reason to write.
    right = same(have, want) and _shells(have) - _shells(want) <= TRIALS | RAILED
    return have if right else want


def _shells(state: NamespaceState) -> frozenset[Shell]:
    return frozenset(
        (family, table.name, chain.name)
        for family, ruleset in state.of(IPTABLES_NFT).items()
        for table in ruleset.tables
        for chain in table.chains
        if _is_shell(chain, BUILTIN_CHAINS.get(table.name, ()))
    )


def _loaded(
    base: NamespaceState, plan: CapturePlan, backend: str, *, native: bool
) -> dict[str, Rulesets]:
    loaded = dict(base.loaded)
    rulesets = plan.native
    if backend != NFTABLES:
        rulesets = owned.merged(base.of(backend), plan.rulesets)
    if plan.guard and native:
        loaded[GUARD] = plan.guard
    elif plan.guard:
        filters = {family: guard.only("filter") for family, guard in plan.guard.items()}
        rulesets = owned.merged(rulesets, filters)
    return {**loaded, backend: rulesets}


def uncaptured(have: NamespaceState, known: Known) -> NamespaceState:
    """Return the namespace without any capture, whoever made it."""
    return _others(have, known.plans, known.before)


def before_of(have: NamespaceState) -> Before:
    """Return what a removal is to leave, seen before a capture is applied: not what istio-iptables
    left of a trial."""
    shells: set[Shell] = set()
    loaded = have.of(IPTABLES_NFT)
    rulesets = tuple(loaded.values())
    evidence = owned.Evidence(
        interfaces=owned.interfaces_of(rulesets), railed=owned.railed(rulesets)
    )
    for ruleset in loaded.values():
        shells |= set(_needed_shells(ruleset, owned.foreign(ruleset, evidence)))
    if any(owned.capture_of(ruleset).tables for ruleset in loaded.values()):
        shells -= TRIALS
    policies = _policies(have, ())
    routes = tuple(r for r in have.routes if _is_ours(r, policies, have.routes))
    captured_before = (
        have.enrolment is not None
        or have.istio_tables
        or any(owned.capture_of(r).tables for rs in have.loaded.values() for r in rs.values())
    )
    return Before(frozenset(shells), () if captured_before else routes)


def _needed_shells(have: Ruleset, rest: Ruleset) -> Iterator[Shell]:
    """Yield the built-in chains to keep, of which some rules may go, so that only `rest` is left.

    A chain counts if anything else is in its table, or nothing of what goes is.
    """
    for table in have.tables:
        left = rest.table(table.name)
        others = left is not None and any(c.rules or c.policy is None for c in left.chains)
        if left is None or left == table or others:
            yield from ((have.family, table.name, chain) for chain in _untouched(table, left))


def _untouched(table: Table, left: Table | None) -> list[str]:
    """Return the built-in chains that hold foreign rules or held nothing at all."""
    found = []
    for chain in table.chains:
        rest = left.chain(chain.name) if left else None
        if rest is not None and (rest.rules or not chain.rules):
            found.append(chain.name)
    return found


def _others(
    have: NamespaceState, plans: tuple[CapturePlan, ...], before: Before | None
) -> NamespaceState:
    """Return the state with every capture taken out."""
    loaded: dict[str, Rulesets] = {}
    known = before or before_of(have)
    for name in (IPTABLES_NFT, IPTABLES_LEGACY):
        left: dict[Family, Ruleset] = {}
        interfaces = owned.interfaces_of(have.of(name).values())
        rails = owned.railed(have.of(name).values())
        for family, ruleset in have.of(name).items():
            plans_here = tuple(p.rulesets[family] for p in plans if family in p.rulesets)
            evidence = owned.Evidence(plans_here, interfaces, before is not None, rails)
            rest = owned.foreign(ruleset, evidence)
            if name == IPTABLES_NFT:
                rest = _without_shells(rest, known.shells)
            if rest.tables:
                left[family] = rest
        if left:
            loaded[name] = left
    policies = _policies(have, plans)
    planned = [route for plan in plans for route in plan.routes]
    known_routes = (*have.routes, *planned)
    routes = tuple(r for r in have.routes if not _is_ours(r, policies, known_routes))
    return NamespaceState(
        loaded=loaded,
        routes=(*routes, *(known.routes if before else ())),
        base_chains=have.base_chains,
        unreadable=have.unreadable,
    )


def without_emptied(have: Ruleset, rest: Ruleset) -> Ruleset:
    """Return what is left of a ruleset of iptables-nft, without built-in chains that nobody needs:
    those that lost all their rules, and every one of a table in which nothing else is left."""
    return _without_shells(rest, frozenset(_needed_shells(have, rest)))


def _without_shells(ruleset: Ruleset, kept: frozenset[Shell]) -> Ruleset:
    """Return the ruleset without the empty built-in chains that only the capture needed."""
    tables = []
    for table in ruleset.tables:
        builtin = BUILTIN_CHAINS.get(table.name, ())
        chains = tuple(
            c
            for c in table.chains
            if not _is_shell(c, builtin) or (ruleset.family, table.name, c.name) in kept
        )
        if chains:
            tables.append(replace(table, chains=chains))
    return replace(ruleset, tables=tuple(tables))


def _is_shell(chain: Chain, builtin: tuple[str, ...]) -> bool:
    return chain.name in builtin and not chain.rules and chain.policy == "ACCEPT"


def _policies(have: NamespaceState, plans: tuple[CapturePlan, ...]) -> frozenset[Policy]:
    """Return the policies by which captures route: Istio's, planned and loaded ones."""
    found = {ISTIO_POLICY, AMBIENT_POLICY}
    marks: set[int] = set()
    for rulesets in (*have.loaded.values(), *(plan.rulesets for plan in plans)):
        for ruleset in rulesets.values():
            marks |= owned.diverted_marks(ruleset)
    planned = [r for plan in plans for r in plan.routes]
    found |= {_policy(r) for r in planned if isinstance(r, PolicyRule)}
    routes = (*have.routes, *planned)
    tables = {r.table for r in routes if isinstance(r, LocalRoute)}
    for route in routes:
        if not isinstance(route, PolicyRule) or route.mask != WHOLE_MARK:
            continue
        if route.mark in marks and route.table in tables:
            found.add(_policy(route))
    return frozenset(found)


def _policy(rule: PolicyRule) -> Policy:
    return rule.mark, rule.mask, rule.table


def _is_ours(route: Route, policies: frozenset[Policy], routes: Sequence[Route]) -> bool:
    """Tell a capture's entry among all of them.

    Table 100 is one that many others take, too: the route in it is a capture's only where the
    capture's rule alone leads there.
    """
    if isinstance(route, PolicyRule):
        return _policy(route) in policies
    if not isinstance(route, LocalRoute):
        return route == PASSTHROUGH
    if route.table != AMBIENT_POLICY[2]:
        return route.table in {table for _, _, table in policies}
    leading = [
        _policy(r) in policies
        for r in routes
        if isinstance(r, PolicyRule) and (r.family, r.table) == (route.family, route.table)
    ]
    return bool(leading) and all(leading)


def captures(state: NamespaceState) -> Mapping[str, Rulesets]:
    """Return what belongs to captures, by backend; backends without any are left out."""
    found: dict[str, Rulesets] = {}
    for name in (NFTABLES, IPTABLES_NFT, IPTABLES_LEGACY):
        parts = {family: owned.capture_of(r) for family, r in state.of(name).items()}
        parts = {family: part for family, part in parts.items() if part.tables}
        if parts:
            found[name] = parts
    return found
