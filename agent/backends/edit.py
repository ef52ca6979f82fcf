"""From one full ruleset to another as the smallest set of edits, table by table. Pure.

A foreign rule that is in both is not touched: it is neither deleted nor written again, so it keeps
its counters and its handle. Rules are deleted by value, never by number, because a number may mean
another rule by the time the kernel reads it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from agent.formats.iptables_save import render_spec
from agent.model.ruleset import BUILTIN_CHAINS, Chain, Rule, Ruleset, Table, matching


@dataclass(frozen=True, slots=True)
class ChainEdit:
    """Edits of one chain, in the order in which they are made.

    With `rewrite` the chain is made or emptied first, and `insert` holds its rules in order.
    `insert` numbers are the 1-based positions that the rules have in the end. With `touch` it is a
    built-in chain that is to be there without any rule.
    """

    name: str
    rewrite: bool
    touch: bool = False
    delete: tuple[Rule, ...] = ()
    insert: tuple[tuple[int, Rule], ...] = ()


@dataclass(frozen=True, slots=True)
class TableEdit:
    """Edits of one table. The kernel takes them as a whole or not at all."""

    table: str
    chains: tuple[ChainEdit, ...] = ()
    drop_chains: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Shells:
    """Built-in chains and tables that should not be there at all; only nf_tables can drop them."""

    chains: tuple[tuple[str, str], ...] = ()
    tables: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.chains or self.tables)


def table_edits(have: Ruleset, want: Ruleset) -> tuple[TableEdit, ...]:
    """Return the edits that turn the rules of `have` into those of `want`."""
    names = sorted({t.name for t in have.tables} | {t.name for t in want.tables})
    edits = (
        _table_edit(have.table(name) or Table(name), want.table(name) or Table(name))
        for name in names
    )
    return tuple(edit for edit in edits if edit.chains or edit.drop_chains)


def shells(have: Ruleset, want: Ruleset) -> Shells:
    """Return the built-in chains and tables that are in `have` and not in `want`."""
    chains, tables = [], []
    for table in have.tables:
        wanted = want.table(table.name)
        kept = {c.name for c in wanted.chains} if wanted else set()
        builtin = BUILTIN_CHAINS.get(table.name, ())
        chains += [
            (table.name, c.name) for c in table.chains if c.name in builtin and c.name not in kept
        ]
        if wanted is None:
            tables.append(table.name)
    return Shells(tuple(chains), tuple(tables))


def _table_edit(have: Table, want: Table) -> TableEdit:
    builtin = BUILTIN_CHAINS.get(have.name, ())
    wanted = {c.name for c in want.chains}
    drop = tuple(c.name for c in have.chains if c.name not in wanted and c.name not in builtin)
    chains = [
        edit
        for chain in want.chains
        if (edit := _chain_edit(have.chain(chain.name), chain, builtin=chain.name in builtin))
    ]
    chains += [
        ChainEdit(chain.name, rewrite=False, delete=chain.rules)
        for chain in have.chains
        if chain.name in builtin and chain.name not in wanted and chain.rules
    ]
    # User-defined chains are made first, so that every jump finds its chain.
    chains.sort(key=lambda edit: edit.name in builtin)
    return TableEdit(have.name, tuple(chains), drop)


def _chain_edit(have: Chain | None, want: Chain, *, builtin: bool) -> ChainEdit | None:
    loaded = have.rules if have else ()
    if builtin and have is None and not want.rules:
        return ChainEdit(want.name, rewrite=False, touch=True)
    if not builtin and (have is None or loaded != want.rules):
        return ChainEdit(want.name, rewrite=True, insert=tuple(enumerate(want.rules, start=1)))
    if loaded == want.rules:
        return None
    kept = _kept(loaded, want.rules)
    staying = {a for a, _ in kept}
    delete = tuple(rule for i, rule in enumerate(loaded) if i not in staying)
    positions = {b for _, b in kept}
    insert = tuple((i + 1, rule) for i, rule in enumerate(want.rules) if i not in positions)
    return ChainEdit(want.name, rewrite=False, delete=delete, insert=insert)


def _kept(loaded: tuple[Rule, ...], wanted: tuple[Rule, ...]) -> set[tuple[int, int]]:
    """Return the pairs of positions whose rule stays untouched.

    Deleting by value takes the first rule that is equal. So where some copies of a rule would go
    and others stay, all of them go and the wanted ones are written again.
    """
    pairs = matching(loaded, wanted)
    staying = {a for a, _ in pairs}
    going = {rule for i, rule in enumerate(loaded) if i not in staying}
    return {(a, b) for a, b in pairs if loaded[a] not in going}


def restore_text(edits: tuple[TableEdit, ...]) -> str:
    """Return the edits as input for `iptables-restore --noflush`."""
    return "".join(f"{line}\n" for edit in edits for line in _table_lines(edit))


def _table_lines(edit: TableEdit) -> Iterator[str]:
    yield f"*{edit.table}"
    for chain in edit.chains:
        if chain.rewrite:
            yield f":{chain.name} - [0:0]"
    for chain in edit.chains:
        if chain.touch:  # the tool makes a chain for a rule only: one that no packet meets
            yield from (f"{verb} {chain.name} -p 255 -j RETURN" for verb in ("-A", "-D"))
        for rule in chain.delete:
            yield f"-D {chain.name} {render_spec(rule)}"
    for chain in edit.chains:
        for position, rule in chain.insert:
            verb = f"-A {chain.name}" if chain.rewrite else f"-I {chain.name} {position}"
            yield f"{verb} {render_spec(rule)}"
    for name in edit.drop_chains:
        yield f"-F {name}"
    for name in edit.drop_chains:
        yield f"-X {name}"
    yield "COMMIT"
