"""What a known owner has in a namespace, by the backend that holds it. Pure."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from agent.backends.iptables_nft import NFT_FAMILY
from agent.formats.iptables_save import render_rule
from agent.leftovers.finding import ChainRef, Takes, Where
from agent.leftovers.look import NativeTable, Seen
from agent.leftovers.node import Node
from agent.leftovers.reach import Goal, goals
from agent.model import catalogue
from agent.model.owner import Owner
from agent.model.ruleset import BASIC, BUILTIN_CHAINS, Family, Rule, Ruleset, Table
from agent.model.state import IPTABLES_LEGACY, IPTABLES_NFT, NFTABLES


@dataclass(slots=True)
class Remains:
    """What one owner has in one namespace, by the backend that holds it."""

    owner: Owner
    chains: dict[str, set[ChainRef]] = field(default_factory=dict)
    rules: dict[str, list[tuple[Family, str, str, Rule]]] = field(default_factory=dict)
    tables: list[NativeTable] = field(default_factory=list)
    sets: list[str] = field(default_factory=list)
    links: list[str] = field(default_factory=list)

    @property
    def backends(self) -> list[str]:
        found = [b for b in (IPTABLES_NFT, IPTABLES_LEGACY) if b in self.chains or b in self.rules]
        return [*found, *([NFTABLES] if self.tables else [])]

    def chain_names(self, backend: str) -> set[str]:
        return {chain for *_, chain in self.chains.get(backend, ())}

    def take(self, other: "Remains", backend: str, patterns: tuple[str, ...] | None = None) -> None:
        """Take over what another one has in a backend of iptables: all of it, or the chains that
        fit, as `TABLE/CHAIN`, and the rules that lead to them."""
        chains, rules = other.chains.get(backend, set()), other.rules.get(backend, [])
        if patterns is not None:
            chains = {ref for ref in chains if catalogue.fits(patterns, f"{ref[2]}/{ref[3]}")}
            names = {ref[1:] for ref in chains}
            rules = [r for r in rules if r[3].target and (*r[:2], r[3].target.name) in names]
        if chains:
            self.chains[backend] = chains
        if rules:
            self.rules[backend] = rules


def remains(seen: Seen) -> dict[str, Remains]:
    """Return, by owner, everything in the namespace whose owner is known."""
    found: dict[str, Remains] = {}

    def of(owner: Owner) -> Remains:
        return found.setdefault(owner.name, Remains(owner))

    for backend in (IPTABLES_NFT, IPTABLES_LEGACY):
        for family, ruleset in seen.state.of(backend).items():
            for table in ruleset.tables:
                for chain in table.chains:
                    builtin = chain.name in BUILTIN_CHAINS.get(table.name, ())
                    owner = catalogue.owner_of_chain(table.name, chain.name)
                    if owner and not builtin:
                        ref = (backend, family, table.name, chain.name)
                        of(owner).chains.setdefault(backend, set()).add(ref)
                    if builtin:
                        for marked, rule in _marked(table, chain.rules):
                            place = (family, table.name, chain.name, rule)
                            of(marked).rules.setdefault(backend, []).append(place)
    for native in seen.tables:
        if owner := catalogue.owner_of_table(native.family, native.name):
            of(owner).tables.append(native)
    for each in seen.sets:
        if owner := catalogue.owner_of_set(each.name):
            of(owner).sets.append(each.name)
    for link in seen.links:
        if owner := catalogue.owner_of_link(link):
            of(owner).links.append(link)
    return found


def _marked(table: Table, rules: Iterable[Rule]) -> Iterator[tuple[Owner, Rule]]:
    """Yield the rules of a built-in chain that lead to an owner's chain, or bear its comment, or
    are about an interface of which nobody else writes rules."""
    for rule in rules:
        owner = None
        if rule.target is not None and table.chain(rule.target.name):
            owner = catalogue.owner_of_chain(table.name, rule.target.name)
        if owner is None:
            comments = [v for o in rule.options("comment") for v in o.values]
            owner = catalogue.owner_of_comments(comments) if comments else None
        if owner is None:
            names = (rule.option(BASIC, flag) for flag in ("-i", "-o"))
            owner = catalogue.owner_of_bridge(
                tuple(v for o in names if o and not o.negated for v in o.values)
            )
        if owner is not None:
            yield owner, rule


def takes(
    mine: Remains, backend: str, *, sets: Iterable[str] = (), links: Iterable[str] = ()
) -> Takes:
    """Return what taking away this owner's part of a backend takes."""
    tables = mine.tables if backend == NFTABLES else []
    return Takes(
        chains=frozenset(mine.chains.get(backend, ())),
        rules=frozenset(
            ((backend, family, table, chain), rule)
            for family, table, chain, rule in mine.rules.get(backend, ())
        ),
        tables=frozenset((t.family, t.name) for t in tables),
        sets=frozenset(sets),
        links=frozenset(links),
    )


def objects(mine: Remains, backend: str) -> tuple[str, ...]:
    if backend == NFTABLES:
        return tuple(f"table {t.family} {t.name}" for t in mine.tables)
    rules = (
        f"-t {table} {render_rule(chain, rule)}"
        for _, table, chain, rule in mine.rules.get(backend, ())
    )
    return (*sorted(mine.chain_names(backend)), *rules)


def size(seen: Seen, mine: Remains, backend: str) -> str:
    if backend == NFTABLES:
        chains = sum(len(table.chains) for table in mine.tables)
        return f"{len(mine.tables)} tables of nf_tables with {chains} chains"
    refs = mine.chains.get(backend, set())
    rules = len(mine.rules.get(backend, ()))
    names = {(family, table, chain) for _, family, table, chain in refs}
    for family, ruleset in seen.state.of(backend).items():
        for each in ruleset.tables:
            rules += sum(len(c.rules) for c in each.chains if (family, each.name, c.name) in names)
    return f"{len(refs)} chains and {rules} rules in {backend}" if backend else "no rules"


def where(seen: Seen, node: Node, mine: Remains, backend: str) -> Where:
    pod = node.pods.get(seen.id)
    refs = mine.chains.get(backend, set())
    places = mine.rules.get(backend, [])
    families = {family for _, family, *_ in refs} | {family for family, *_ in places}
    tables = {table for _, _, table, _ in refs} | {table for _, table, *_ in places}
    if backend == NFTABLES:
        tables = {f"{t.family} {t.name}" for t in mine.tables}
        names = {t.family for t in mine.tables}
        families = {f for f in Family if names & {"inet", NFT_FAMILY[f]}}
    return Where(
        netns=seen.name,
        pod=pod.title if pod else "",
        family=",".join(f.value for f in Family if f in families),
        backend=backend,
        table=",".join(sorted(tables)),
    )


def owned_part(seen: Seen, mine: Remains, backend: str) -> Iterator[Ruleset]:
    """Yield, by family, the ruleset of this owner alone, with the rules that lead into it."""
    names = {ref[1:] for ref in mine.chains.get(backend, ())}
    starts: dict[tuple[Family, str, str], list[Rule]] = {}
    for family, table, chain, rule in mine.rules.get(backend, ()):
        starts.setdefault((family, table, chain), []).append(rule)
    for family, ruleset in seen.state.of(backend).items():
        part = Ruleset(family)
        for each in ruleset.tables:
            chains = [c for c in each.chains if (family, each.name, c.name) in names]
            chains += [
                type(c)(c.name, c.policy, tuple(starts[family, each.name, c.name]))
                for c in each.chains
                if (family, each.name, c.name) in starts
            ]
            part = part.with_chains(each.name, chains)
        yield part


def targets_of(seen: Seen, mine: Remains, backend: str) -> tuple[Goal, ...]:
    found: set[Goal] = set()
    for part in owned_part(seen, mine, backend):
        found |= set(goals(part))
    return tuple(sorted(found))


def endpoints_of(seen: Seen, mine: Remains, backend: str) -> tuple[str, ...]:
    """Return where the rules send Services, in order."""
    found: dict[str, None] = {}
    for part in owned_part(seen, mine, backend):
        for table in part.tables:
            for chain in table.chains:
                for rule in chain.rules:
                    for option in rule.target.options if rule.target else ():
                        if option.name == "--to-destination":
                            found |= dict.fromkeys(option.values)
    for native in mine.tables if backend == NFTABLES else ():
        found |= dict.fromkeys(_nativeendpoints(native.text))
    return tuple(found)


def _nativeendpoints(text: str) -> list[str]:
    """kube-proxy's nftables mode has a chain an endpoint, which ends in `dnat to ADDR:PORT`."""
    return [word.split()[0] for word in text.split(" dnat to ")[1:]]
