"""What is taken out of one namespace, in the order in which that can be done. Pure.

The order is that of a graph: what leads to a thing goes before the thing. Rules that jump to a
chain go before the chain, chains that jump to others before those, rules before the sets that they
ask, and routing after the rules that mark packets for it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from agent.formats.iptables_save import render_rule
from agent.leftovers.finding import ChainRef, Takes
from agent.leftovers.look import OWN_TABLES, NativeTable, Seen
from agent.model.enrolment import Enrolment
from agent.model.plan import Route
from agent.model.ruleset import BUILTIN_CHAINS, Chain, Family, Rule, Ruleset, Table, matching
from agent.model.state import EBPF, IPTABLES_LEGACY, IPTABLES_NFT, NamespaceState, routes_without
from agent.model.wanted import Known, uncaptured, without_emptied

FLAVOURS = (IPTABLES_NFT, IPTABLES_LEGACY)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """What goes from one iptables table: whole chains, and rules of chains that stay.

    `rules` have the 1-based position that each had; `tails` are those behind which nothing stays.
    """

    backend: str
    family: Family
    table: str
    chains: tuple[Chain, ...]
    rules: tuple[tuple[str, int, Rule], ...]
    tails: frozenset[tuple[str, int]]

    @property
    def tool(self) -> str:
        return self.backend if self.family is Family.IPV4 else self.backend.replace("ip", "ip6", 1)

    def lines(self) -> Iterator[str]:
        """Yield the commands that say the same, in order."""
        for name, _, rule in self.rules:
            yield f"{self.tool} -t {self.table} {_delete(name, rule)}"
        for chain in ordered(self.chains):
            yield from (
                f"{self.tool} -t {self.table} {_delete(chain.name, r)}" for r in chain.rules
            )
            yield f"{self.tool} -t {self.table} -X {chain.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    """Everything that goes from one namespace; `want` is what it then holds."""

    name: str
    have: NamespaceState
    want: NamespaceState
    cuts: tuple[Cut, ...] = ()
    tables: tuple[NativeTable, ...] = ()
    routes: tuple[Route, ...] = ()
    sets: tuple[str, ...] = ()
    links: tuple[str, ...] = ()
    capture: bool = field(default=False)

    @property
    def enrolment(self) -> Enrolment | None:
        """What eBPF was told of the namespace, if that goes."""
        return self.have.enrolment if self.want.enrolment is None else None

    def lines(self) -> tuple[str, ...]:
        """Return the commands that say the same as the removal, in order."""
        found = [line for cut in self.cuts for line in cut.lines()]
        found += [f"nft delete table {table.family} {table.name}" for table in self.tables]
        found += [route.command("del") for route in self.routes]
        found += [f"ipset destroy {name}" for name in self.sets]
        found += [f"ip link del {name}" for name in self.links]
        if self.enrolment:
            found.append(f"# {EBPF}: the programs of the node let go of the namespace")
        return tuple(found)


def removal(seen: Seen, takes: Sequence[Takes], known: Known) -> Removal:
    """Return how to take all of this away; `known` is what is on record of a capture here."""
    capture = any(each.capture for each in takes)
    want = uncaptured(seen.state, known) if capture else seen.state
    named = frozenset(ref for each in takes for ref in each.chains)
    marked = frozenset(place for each in takes for place in each.rules)
    sets = frozenset(name for each in takes for name in each.sets)
    loaded = {
        backend: {
            family: _without(backend, ruleset, named, marked, sets)
            for family, ruleset in want.of(backend).items()
        }
        for backend in FLAVOURS
        if want.of(backend)
    }
    extra = tuple(route for each in takes for route in each.routes)
    want = replace(want, loaded=loaded, routes=routes_without(want.routes, extra))
    tables = frozenset(table for each in takes for table in each.tables)
    own = OWN_TABLES if capture else {}
    return Removal(
        name=seen.name,
        have=seen.state,
        want=want,
        cuts=tuple(_cuts(seen.state, want)),
        tables=tuple(
            t
            for t in seen.tables
            if (t.family, t.name) in tables or (t.family == "inet" and t.name in own)
        ),
        routes=routes_without(seen.state.routes, want.routes),
        sets=tuple(each.name for each in seen.sets if each.name in sets),
        links=tuple(name for name in seen.links if any(name in each.links for each in takes)),
        capture=capture,
    )


def _without(
    backend: str,
    ruleset: Ruleset,
    named: frozenset[ChainRef],
    marked: frozenset[tuple[ChainRef, Rule]],
    sets: frozenset[str],
) -> Ruleset:
    """Return a ruleset without these chains and rules, nor any that needs such a chain or set.

    Only nf_tables can let go of a built-in chain that is empty then.
    """
    tables = []
    for table in ruleset.tables:
        gone = {
            chain for b, f, t, chain in named if (b, f, t) == (backend, ruleset.family, table.name)
        }
        chains = []
        for chain in table.chains:
            ref = (backend, ruleset.family, table.name, chain.name)
            if chain.name in gone:
                continue
            kept = tuple(
                rule
                for rule in chain.rules
                if (ref, rule) not in marked
                and not (rule.target and rule.target.name in gone)
                and not (sets and sets & _asked(rule))
            )
            chains.append(replace(chain, rules=kept) if len(kept) < len(chain.rules) else chain)
        tables.append(replace(table, chains=tuple(chains)))
    rest = replace(ruleset, tables=tuple(tables))
    return without_emptied(ruleset, rest) if backend == IPTABLES_NFT else rest


def _asked(rule: Rule) -> frozenset[str]:
    """Return the ipsets that a rule asks or fills."""
    options = list(rule.options("set"))
    options += rule.target.options if rule.target is not None else ()
    named = ("--match-set", "--add-set", "--del-set", "--map-set")
    return frozenset(o.values[0] for o in options if o.name in named and o.values)


def _cuts(have: NamespaceState, want: NamespaceState) -> Iterator[Cut]:
    for backend in FLAVOURS:
        for family, ruleset in have.of(backend).items():
            after = want.of(backend).get(family, Ruleset(family))
            for table in ruleset.tables:
                cut = _cut(backend, family, table, after.table(table.name) or Table(table.name))
                if cut.chains or cut.rules:
                    yield cut


def _cut(backend: str, family: Family, have: Table, want: Table) -> Cut:
    builtin = BUILTIN_CHAINS.get(have.name, ())
    chains, rules = [], []
    tails: set[tuple[str, int]] = set()
    for chain in have.chains:
        left = want.chain(chain.name)
        if left is None and chain.name not in builtin:
            chains.append(chain)
            continue
        staying = {a for a, _ in matching(chain.rules, left.rules if left else ())}
        last = max(staying, default=-1)
        for index, rule in enumerate(chain.rules):
            if index not in staying:
                rules.append((chain.name, index + 1, rule))
                if index > last:
                    tails.add((chain.name, index + 1))
    return Cut(
        backend=backend,
        family=family,
        table=have.name,
        chains=tuple(chains),
        rules=tuple(rules),
        tails=frozenset(tails),
    )


def ordered(chains: Iterable[Chain]) -> tuple[Chain, ...]:
    """Return chains so that each comes before those that it jumps to."""
    known: Mapping[str, Chain] = {chain.name: chain for chain in chains}
    done: dict[str, Chain] = {}

    def visit(start: str) -> None:
        # Without recursion: chains may lead to each other a thousand deep.
        todo = [(start, iter(_leads_to(known[start])))]
        entered = {start}
        while todo:
            name, targets = todo[-1]
            following = next(
                (t for t in targets if t in known and t not in done and t not in entered), None
            )
            if following is None:
                done[name] = known[name]
                todo.pop()
            else:
                entered.add(following)
                todo.append((following, iter(_leads_to(known[following]))))

    for name in known:
        if name not in done:
            visit(name)
    return tuple(reversed(done.values()))


def _leads_to(chain: Chain) -> list[str]:
    return [rule.target.name for rule in chain.rules if rule.target is not None]


def _delete(chain: str, rule: Rule) -> str:
    return render_rule(chain, rule).replace("-A ", "-D ", 1)
