"""Findings about what lies around the rules: two backends at once, routes, what cannot be read."""

from collections.abc import Iterable, Iterator

from agent.leftovers import policy
from agent.leftovers.finding import Finding, Kind, Severity, Takes, Where
from agent.leftovers.look import Seen, Unreadable
from agent.leftovers.node import Node, sign_of_life
from agent.model import catalogue, owned
from agent.model.owner import Owner, Role
from agent.model.plan import LoopbackAddress, Route
from agent.model.ruleset import BUILTIN_CHAINS, Family, Rulesets, Table
from agent.model.state import IPTABLES_LEGACY, IPTABLES_NFT
from agent.model.wanted import captures


def mixed(seen: Seen, pod: str, command: str) -> Iterator[Finding]:
    """Yield one finding if both flavours of iptables have rules for the same hook (report 37)."""
    hooks: list[tuple[Family, str, str, int, int]] = []
    for family, table, chain, nft in _hooked(seen.state.of(IPTABLES_NFT)):
        legacy = {place[:3]: place[3] for place in _hooked(seen.state.of(IPTABLES_LEGACY))}
        if count := legacy.get((family, table, chain)):
            hooks.append((family, table, chain, nft, count))
    if not hooks:
        return
    sides = {b: _owners(seen.state.of(b)) for b in (IPTABLES_NFT, IPTABLES_LEGACY)}
    totals = {b: sum(r.rule_count() for r in seen.state.of(b).values()) for b in sides}
    both = sorted(
        name
        for name in set.intersection(*sides.values())
        if catalogue.by_name(name).role is not Role.NEVER
    )
    named = sorted(set.union(*sides.values()))
    whose = {
        b: f" (of {', '.join(sorted(owners))})" if owners else "" for b, owners in sides.items()
    }
    yield Finding(
        kind=Kind.MIXED_BACKENDS,
        severity=Severity.CRITICAL if both else Severity.WARNING,
        where=Where(
            netns=seen.name,
            pod=pod,
            family=",".join(f.value for f in Family if f in {h[0] for h in hooks}),
            backend=f"{IPTABLES_NFT},{IPTABLES_LEGACY}",
            table=",".join(sorted({h[1] for h in hooks})),
        ),
        objects=tuple(f"{table} {chain}" for _, table, chain, _, _ in hooks),
        owner=",".join(both or named) or "unknown",
        evidence=(
            *(f"{totals[b]} rules in {b}{whose[b]}" for b in sides),
            *(
                f"{family.value} {table} {chain}: {nft} rules in {IPTABLES_NFT}, {legacy} in "
                f"{IPTABLES_LEGACY}"
                for family, table, chain, nft, legacy in hooks
            ),
        ),
        explanation="Both flavours of iptables have rules for the same hook. The kernel asks both; "
        "in nat the one whose table was made last decides, whatever the other says, and "
        "`iptables-save` shows only one of them.",
        fix=f"intercept-agent clean {command}, if one side is listed as a leftover; else empty the "
        f"side that nobody uses: iptables-legacy-save and iptables-nft-save show both",
    )


def _hooked(rulesets: Rulesets) -> Iterator[tuple[Family, str, str, int]]:
    for family, ruleset in rulesets.items():
        for table in ruleset.tables:
            for name in BUILTIN_CHAINS.get(table.name, ()):
                chain = table.chain(name)
                if chain and chain.rules:
                    yield family, table.name, name, len(chain.rules)


def _owners(rulesets: Rulesets) -> set[str]:
    found: set[str] = set()
    for ruleset in rulesets.values():
        for table in ruleset.tables:
            found |= _owners_in(table)
    return found


def _owners_in(table: Table) -> set[str]:
    owners = (catalogue.owner_of_chain(table.name, chain.name) for chain in table.chains)
    return {owner.name for owner in owners if owner}


# --- routes ---------------------------------------------------------------------------------------


def routes(seen: Seen, node: Node, pod: str, command: str) -> Iterator[Finding]:
    """Yield routing that only rules could need which are not there, one finding an owner."""
    left: dict[str, list[Route]] = {}
    for route in seen.state.routes:
        owner = policy.owner_of(route, seen.state.routes)
        if owner is not None and not _needed(seen, node, route, owner):
            left.setdefault(owner.name, []).append(route)
    for name, found in left.items():
        commands = tuple(route.command("del") for route in found)
        untidy = all(isinstance(route, LoopbackAddress) for route in found)
        families = {route.family for route in found}
        yield Finding(
            kind=Kind.ROUTE,
            severity=Severity.INFO if untidy else Severity.WARNING,
            where=Where(
                netns=seen.name,
                pod=pod,
                family=",".join(f.value for f in Family if f in families),
                backend="routing",
                table=",".join(
                    sorted({str(r.table) for r in found if not isinstance(r, LoopbackAddress)})
                ),
            ),
            objects=tuple(route.command().replace(" add ", " ", 1) for route in found),
            owner=name,
            evidence=(
                f"{len(found)} of {catalogue.by_name(name).title}'s routing entries, and no rules "
                "that need them",
            ),
            explanation=_meaning(catalogue.by_name(name), untidy=untidy),
            fix=f"intercept-agent clean {command} --only route, or: {'; '.join(commands)}",
            takes=Takes(routes=tuple(found)),
        )


def _meaning(owner: Owner, *, untidy: bool) -> str:
    if untidy:
        return "The address from which a proxy passes traffic on is still on lo; nobody uses it."
    if owner.role is not Role.CAPTURE:
        return f"Packets with a mark of {owner.title}, which is gone, still take its routes."
    return (
        "Packets with the mark of a capture that is gone are still delivered to this namespace "
        "itself."
    )


def _needed(seen: Seen, node: Node, route: Route, owner: Owner) -> bool:
    if seen.state.enrolment is not None:
        return True  # the eBPF backend keeps and takes away what it needs
    if owner.role is not Role.CAPTURE:
        return sign_of_life(owner, seen, node) is not None
    native = [catalogue.owner_of_table(t.family, t.name) for t in seen.tables]
    if any(o and o.name in ("istio", "istio-ambient") for o in native):
        return True
    parts = [p[route.family] for p in captures(seen.state).values() if route.family in p]
    if isinstance(route, LoopbackAddress):
        return bool(parts)
    marks = {mark for mark, _, table in owner.policies if table == route.table}
    if owner.name == "istio-ambient":
        return any(table.chain("ISTIO_PRERT") for p in parts for table in p.tables)
    return any(marks & owned.diverted_marks(ruleset) for ruleset in parts)


# --- what cannot be read --------------------------------------------------------------------------


def unreadable(seen: Seen, pod: str) -> Iterator[Finding]:
    """Yield what is there and cannot be shown: that is not the same as nothing (report 34)."""
    for found in seen.unreadable:
        owners = _owners_of(found)
        what = f"table {found.table}" if found.table else "the tables"
        listing = f"nft list table {'ip6' if found.family == 'ipv6' else 'ip'} {found.table}"
        yield Finding(
            kind=Kind.UNREADABLE,
            severity=Severity.WARNING,
            where=Where(
                netns=seen.name,
                pod=pod,
                family=found.family,
                backend=found.backend,
                table=found.table,
            ),
            objects=found.chains,
            owner=",".join(owners) or "unknown",
            evidence=(found.why, f"{len(found.chains)} chains are in it"),
            explanation=f"What {what} of {found.backend} holds cannot be told: nothing here says "
            "that it is clean. Programs that read it through iptables see an empty table and write "
            "their rules again and again.",
            fix=f"{listing} shows it; move the native rules to a table of their own"
            if found.table
            else "install the package iptables, then scan again",
        )


def _owners_of(found: Unreadable) -> list[str]:
    return sorted({o.name for o in _each_owner(found.table, found.chains)})


def _each_owner(table: str, chains: Iterable[str]) -> Iterator[Owner]:
    for chain in chains:
        if owner := catalogue.owner_of_chain(table, chain):
            yield owner
