"""The one model of packet-filter rules.

`plan` makes it, backends render it, readers parse the kernel back into it, `check` compares two of
them, `trace` walks a packet through one. It has the vocabulary of iptables-save, which is the
canonical spelling of a rule here: two rules are the same if and only if they are equal.

Values are kept as the text that iptables-save prints (`0x539`, `127.0.0.6/32`), so that a rule
nobody here understands survives a round trip letter for letter.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from enum import StrEnum


class Family(StrEnum):
    """An address family; its value names the family in output."""

    IPV4 = "ipv4"
    IPV6 = "ipv6"

    @property
    def version(self) -> int:
        return 4 if self is Family.IPV4 else 6

    @property
    def label(self) -> str:
        """What people call it."""
        return f"IPv{self.version}"

    @property
    def other(self) -> "Family":
        return Family.IPV6 if self is Family.IPV4 else Family.IPV4


# Built-in chains of each iptables table in the order in which iptables-save prints them.
BUILTIN_CHAINS: Mapping[str, tuple[str, ...]] = {
    "filter": ("INPUT", "FORWARD", "OUTPUT"),
    "mangle": ("PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"),
    "nat": ("PREROUTING", "INPUT", "OUTPUT", "POSTROUTING"),
    "raw": ("PREROUTING", "OUTPUT"),
    "security": ("INPUT", "FORWARD", "OUTPUT"),
}

# The basic conditions of a rule belong to no match module; they share this module name.
BASIC = ""


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a match or target, such as `! --dport 53`."""

    name: str
    values: tuple[str, ...] = ()
    negated: bool = False


@dataclass(frozen=True, slots=True)
class Match:
    """The options of one match module; the module `BASIC` holds `-s -d -i -o -p -f`."""

    module: str
    options: tuple[Option, ...] = ()


@dataclass(frozen=True, slots=True)
class Target:
    """What a rule does: a verdict, an extension with options, or a chain to jump (or go) to."""

    name: str
    options: tuple[Option, ...] = ()
    goto: bool = False


@dataclass(frozen=True, slots=True)
class Rule:
    """Conditions, all of which must hold, and a target (None: the rule only counts)."""

    matches: tuple[Match, ...] = ()
    target: Target | None = None

    def options(self, module: str) -> Iterator[Option]:
        """Yield the options of every match of `module`, in order."""
        for match in self.matches:
            if match.module == module:
                yield from match.options

    def option(self, module: str, name: str) -> Option | None:
        """Return the first option of that name in that module, if the rule has one."""
        return next((o for o in self.options(module) if o.name == name), None)


@dataclass(frozen=True, slots=True)
class Chain:
    """A chain; `policy` is None for a user-defined one."""

    name: str
    policy: str | None = None
    rules: tuple[Rule, ...] = ()


@dataclass(frozen=True, slots=True)
class Table:
    """A table with its chains: built-in ones first, then user-defined ones by name."""

    name: str
    chains: tuple[Chain, ...] = ()

    def chain(self, name: str) -> Chain | None:
        return next((c for c in self.chains if c.name == name), None)


@dataclass(frozen=True, slots=True)
class Ruleset:
    """All tables of one family, sorted by name."""

    family: Family
    tables: tuple[Table, ...] = ()

    def table(self, name: str) -> Table | None:
        return next((t for t in self.tables if t.name == name), None)

    def chain(self, table: str, chain: str) -> Chain | None:
        found = self.table(table)
        return found.chain(chain) if found else None

    def only(self, table: str) -> "Ruleset":
        """Return a copy with no other table than `table`."""
        return replace(self, tables=tuple(t for t in self.tables if t.name == table))

    def rule_count(self) -> int:
        return sum(len(chain.rules) for table in self.tables for chain in table.chains)

    def with_chains(self, table: str, chains: Iterable[Chain]) -> "Ruleset":
        """Return a copy in which `table` has exactly `chains`; no chains means no table."""
        kept = {t.name: t for t in self.tables if t.name != table}
        ordered = sort_chains(table, chains)
        if ordered:
            kept[table] = Table(table, ordered)
        return replace(self, tables=tuple(kept[name] for name in sorted(kept)))


Rulesets = Mapping[Family, Ruleset]
"""The rulesets of a namespace by family; a family that is absent holds nothing of ours."""


def sort_chains(table: str, chains: Iterable[Chain]) -> tuple[Chain, ...]:
    """Order chains as iptables-legacy-save does: built-in by hook, then user-defined by name."""
    builtin = BUILTIN_CHAINS.get(table, ())

    def key(chain: Chain) -> tuple[int, str]:
        if chain.name in builtin:
            return builtin.index(chain.name), ""
        return len(builtin), chain.name

    return tuple(sorted(chains, key=key))


def ruleset_of(family: Family, rules: Mapping[str, Mapping[str, Iterable[Rule]]]) -> Ruleset:
    """Build a ruleset from `{table: {chain: rules}}`; built-in chains get the policy ACCEPT."""
    tables = []
    for table in sorted(rules):
        chains = [
            Chain(name, "ACCEPT" if name in BUILTIN_CHAINS.get(table, ()) else None, tuple(body))
            for name, body in rules[table].items()
        ]
        tables.append(Table(table, sort_chains(table, chains)))
    return Ruleset(family, tuple(tables))


def without_bare_matches(ruleset: Ruleset) -> Ruleset:
    """Return the ruleset without matches that have no options, such as `-p tcp -m tcp` prints."""
    tables = []
    for table in ruleset.tables:
        chains = tuple(
            replace(chain, rules=tuple(_without_bare(rule) for rule in chain.rules))
            for chain in table.chains
        )
        tables.append(Table(table.name, chains))
    return Ruleset(ruleset.family, tuple(tables))


def _without_bare(rule: Rule) -> Rule:
    return replace(rule, matches=tuple(match for match in rule.matches if match.options))


def matching(loaded: Sequence[Rule], wanted: Sequence[Rule]) -> set[tuple[int, int]]:
    """Return the pairs of positions of the rules that two chains share, in order.

    What both begin and end with is taken off first: matching is quadratic in equal rules, and
    chains with thousands of copies of one rule exist (field report 35).
    """
    shorter = min(len(loaded), len(wanted))
    head = next((i for i in range(shorter) if loaded[i] != wanted[i]), shorter)
    left = shorter - head
    tail = next((i for i in range(left) if loaded[-1 - i] != wanted[-1 - i]), left)
    ends = len(loaded) - tail, len(wanted) - tail
    middle = SequenceMatcher(None, loaded[head : ends[0]], wanted[head : ends[1]], autojunk=False)
    pairs = {(i, i) for i in range(head)}
    pairs |= {(ends[0] + i, ends[1] + i) for i in range(tail)}
    for a, b, size in middle.get_matching_blocks():
        pairs |= {(head + a + i, head + b + i) for i in range(size)}
    return pairs


def basic(
    *,
    source: str | None = None,
    destination: str | None = None,
    not_destination: str | None = None,
    in_interface: str | None = None,
    out_interface: str | None = None,
    not_out_interface: str | None = None,
    protocol: str | None = None,
) -> Match:
    """Return the basic conditions of a rule in the order in which iptables-save prints them."""
    options = (
        ("-s", source, False),
        ("-d", destination, False),
        ("-d", not_destination, True),
        ("-i", in_interface, False),
        ("-o", out_interface, False),
        ("-o", not_out_interface, True),
        ("-p", protocol, False),
    )
    return Match(BASIC, tuple(Option(n, (v,), neg) for n, v, neg in options if v is not None))


def match(module: str, name: str, value: str, *, negated: bool = False) -> Match:
    """Return a match of one module with one option of one value."""
    return Match(module, (Option(name, (value,), negated),))


def target(name: str, **options: str) -> Target:
    """Return a target; keyword `to_ports="15001"` becomes the option `--to-ports 15001`."""
    return Target(
        name, tuple(Option("--" + key.replace("_", "-"), (v,)) for key, v in options.items())
    )


def connmark(action: str) -> Target:
    """Return the target that saves or restores the whole mark of a connection."""
    masks = (Option("--nfmask", ("0xffffffff",)), Option("--ctmask", ("0xffffffff",)))
    return Target("CONNMARK", (Option(action), *masks))
