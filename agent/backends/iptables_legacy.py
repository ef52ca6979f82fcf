"""iptables-legacy: Istio's rules in the kernel's own ip_tables, written through libiptc.

Each table is committed as a whole, so a namespace takes one commit a table and family. Reading goes
through iptables-legacy-save without a table name, which prints the tables that exist; to name one
would create it in the namespace for good.
"""

from typing import Any

from agent.backends.edit import ChainEdit, TableEdit, table_edits
from agent.backends.iptables_tools import missing_tool, read_saves
from agent.backends.protocol import Step
from agent.backends.session import Session
from agent.kernel.xtables_worker import XtablesClient
from agent.model.ruleset import Family, Option, Rule, Ruleset, Rulesets
from agent.model.settings import Settings
from agent.model.state import IPTABLES_LEGACY

# One worker a family: with rules of both families in one process libxtables registers the TPROXY
# target twice and exits.
_workers = {family: XtablesClient() for family in Family}


class IptablesLegacy:
    name = IPTABLES_LEGACY

    def missing(self) -> str | None:
        return missing_tool("legacy", ("save",))

    def refusals(self, _settings: Settings) -> tuple[str, ...]:
        return ()

    def read(self, session: Session) -> Rulesets:
        tables = session.eye.legacy.tables()
        families = [family for family in Family if tables.get(family.version)]
        return read_saves(session, "legacy", families) if families else {}

    def steps(self, session: Session, have: Rulesets, want: Rulesets) -> tuple[Step, ...]:
        steps: list[Step] = []
        for family in Family:
            before = have.get(family, Ruleset(family))
            after = want.get(family, Ruleset(family))
            edits = table_edits(before, after)
            steps += (self._step(session, family, edit, before) for edit in edits)
        return tuple(steps)

    def _step(self, session: Session, family: Family, edit: TableEdit, before: Ruleset) -> Step:
        known = before.table(edit.table)
        existing = {chain.name for chain in known.chains} if known else set()
        ops = table_ops(edit, existing)
        job = [{"version": family.version, "table": edit.table, "ops": ops}]
        what = f"load {family} table {edit.table} by iptables-legacy"
        return Step(
            what, lambda: _workers[family].run(session.netns, job, session.lock_fd), self.name
        )


def table_ops(edit: TableEdit, existing: set[str]) -> list[list[Any]]:
    """Return the edits of a table as the worker's operations."""
    ops: list[list[Any]] = []
    rewritten = (chain.name for chain in edit.chains if chain.rewrite)
    ops += (["flush" if name in existing else "new", name] for name in rewritten)
    for chain in edit.chains:
        ops += (["delete", chain.name, rule_spec(rule)] for rule in chain.delete)
    for chain in edit.chains:
        ops += _inserts(chain)
    ops += (["flush", name] for name in edit.drop_chains)
    ops += (["drop", name] for name in edit.drop_chains)
    return ops


def _inserts(chain: ChainEdit) -> list[list[Any]]:
    if chain.rewrite:
        return [["insert", chain.name, -1, rule_spec(rule)] for _, rule in chain.insert]
    return [["insert", chain.name, at - 1, rule_spec(rule)] for at, rule in chain.insert]


def rule_spec(rule: Rule) -> dict[str, Any]:
    """Return a rule in the form in which the worker takes it."""

    def plain(options: tuple[Option, ...]) -> list[list[Any]]:
        return [[o.name, list(o.values), o.negated] for o in options]

    target = rule.target
    return {
        "matches": [[m.module, plain(m.options)] for m in rule.matches],
        "target": [target.name, target.goto, plain(target.options)] if target else None,
    }
