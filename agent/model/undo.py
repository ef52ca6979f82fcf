"""What a failed change is undone to: what was before, and what others did since. Pure."""

from collections import Counter
from dataclasses import replace

from agent.model import owned
from agent.model.enrolment import Enrolment
from agent.model.ruleset import Chain, Family, Rule, Ruleset
from agent.model.state import (
    IPTABLES_LEGACY,
    IPTABLES_NFT,
    NamespaceState,
    routes_without,
)


def undone(now: NamespaceState, before: NamespaceState, wanted: NamespaceState) -> NamespaceState:
    """Return `before` with what others did meanwhile: theirs that is new stays, and gone is gone.

    A rule that is neither in `before` nor in `wanted` was made by somebody else meanwhile: it
    stays, at the top of its chain if it stands there, else at the end. One of others' that is in
    both and not there now was deleted by its owner: it does not come back.
    """
    loaded = dict(before.loaded)
    for name in (IPTABLES_NFT, IPTABLES_LEGACY):
        merged: dict[Family, Ruleset] = {}
        for family in Family:
            parts = (state.of(name).get(family, Ruleset(family)) for state in (now, before, wanted))
            found = _ruleset(*parts)
            if found.tables:
                merged[family] = found
        if merged:
            loaded[name] = merged
    since = routes_without(routes_without(now.routes, before.routes), wanted.routes)
    both = routes_without(before.routes, routes_without(before.routes, wanted.routes))
    gone = routes_without(both, now.routes)
    left = routes_without(before.routes, gone)
    enrolled = before.enrolment
    if enrolled is not None and enrolled != now.enrolment:
        # What was wrong with it does not come back.
        enrolled = None if enrolled.settings is None else Enrolment(enrolled.settings)
    return replace(before, loaded=loaded, enrolment=enrolled, routes=(*left, *since))


def _ruleset(now: Ruleset, before: Ruleset, wanted: Ruleset) -> Ruleset:
    found = before
    for table in now.tables:
        old = before.table(table.name)
        chains = {c.name: c for c in (old.chains if old else ())}
        for chain in table.chains:
            known = before.chain(table.name, chain.name)
            planned = wanted.chain(table.name, chain.name)
            merged = _chain(chain, known, planned)
            # A chain that is ours goes; one that somebody made meanwhile stays, also an empty one.
            if known is not None or merged.rules or planned is None:
                chains[chain.name] = merged
        found = found.with_chains(table.name, chains.values())
    return found


def _chain(now: Chain, before: Chain | None, wanted: Chain | None) -> Chain:
    old = before.rules if before else ()
    planned = Counter(wanted.rules if wanted else ())
    ours = Counter(old) | planned
    if not owned.is_capture_chain(now.name):
        old = _without(old, (Counter(old) & planned) - Counter(now.rules))
    fresh: list[tuple[int, Rule]] = []
    for index, rule in enumerate(now.rules):
        if ours[rule] > 0:
            ours[rule] -= 1
        else:
            fresh.append((index, rule))
    top = tuple(rule for place, (index, rule) in enumerate(fresh) if index == place)
    rest = tuple(rule for _, rule in fresh[len(top) :])
    return Chain(now.name, before.policy if before else now.policy, (*top, *old, *rest))


def _without(rules: tuple[Rule, ...], gone: Counter[Rule]) -> tuple[Rule, ...]:
    """Return the rules less those of others that are gone, copy for copy."""
    kept = []
    for rule in rules:
        if gone[rule] > 0 and not owned.is_named(rule):
            gone[rule] -= 1
        else:
            kept.append(rule)
    return tuple(kept)
