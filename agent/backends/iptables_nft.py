"""iptables-nft: Istio's rules in the xtables-compatible tables of nf_tables, through its own tools.

One restore a family, tried with --test first; the two families run at the same time. A table is
atomic, a file of several tables is not: a failing one leaves those before it applied (kernel fact
13), which the caller undoes.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

from agent.backends.edit import Shells, restore_text, shells, table_edits
from agent.backends.iptables_tools import (
    missing_tool,
    read_saves,
    require_tool,
    without_empty,
)
from agent.backends.protocol import Step
from agent.backends.session import Session
from agent.kernel import tools
from agent.model.errors import KernelRejected
from agent.model.ruleset import BUILTIN_CHAINS, Family, Ruleset, Rulesets, Table
from agent.model.settings import Settings
from agent.model.state import IPTABLES_NFT

NFT_FAMILY = {Family.IPV4: "ip", Family.IPV6: "ip6"}

REMEMBERED = 64

# Scripts that tool and kernel have taken before: pods of a node mostly get the same.
_accepted: OrderedDict[tuple[tuple[Family, str], ...], None] = OrderedDict()


class IptablesNft:
    name = IPTABLES_NFT

    def missing(self) -> str | None:
        return missing_tool("nft", ("save", "restore"))

    def refusals(self, _settings: Settings) -> tuple[str, ...]:
        return ()

    def read(self, session: Session) -> Rulesets:
        if session.nft is None:
            return without_empty(read_saves(session, "nft", list(Family)))
        hooked = _existing_chains(session.nft_ruleset())
        families = [family for family in Family if hooked.get(family)]
        if not families:
            return {}
        saves = read_saves(session, "nft", families)
        return without_empty({f: only_existing(saves[f], hooked[f]) for f in families})

    def steps(self, session: Session, have: Rulesets, want: Rulesets) -> tuple[Step, ...]:
        scripts: dict[Family, str] = {}
        empty: dict[Family, Shells] = {}
        for family in Family:
            before = have.get(family, Ruleset(family))
            after = want.get(family, Ruleset(family))
            if edits := table_edits(before, after):
                scripts[family] = restore_text(edits)
            if left := shells(before, after):
                empty[family] = left
        steps = []
        if scripts:
            what = "load rules by iptables-nft"
            atomic = sum(script.count("COMMIT") for script in scripts.values()) == 1
            steps.append(Step(what, lambda: _restore(session, scripts), self.name, atomic))
        if empty and session.nft is not None:  # without a door to nf_tables they stay, empty
            script = "".join(_drop_text(family, left) for family, left in empty.items())
            what = "drop emptied tables and chains"
            steps.append(Step(what, lambda: session.require_nft().run(script), self.name))
        return tuple(steps)


def _existing_chains(objects: Iterable[Mapping[str, Any]]) -> dict[Family, set[tuple[str, str]]]:
    """Return (table, chain) of every chain in a table that iptables-nft could print."""
    found: dict[Family, set[tuple[str, str]]] = {}
    for item in objects:
        chain = item.get("chain")
        if chain and chain["table"] in BUILTIN_CHAINS:
            for family, name in NFT_FAMILY.items():
                if chain["family"] == name:
                    found.setdefault(family, set()).add((chain["table"], chain["name"]))
    return found


def only_existing(ruleset: Ruleset, existing: set[tuple[str, str]]) -> Ruleset:
    """Return the ruleset without built-in chains that are not there: the tool prints them all."""
    tables = []
    for table in ruleset.tables:
        chains = tuple(c for c in table.chains if (table.name, c.name) in existing)
        if chains:
            tables.append(Table(table.name, chains))
    return Ruleset(ruleset.family, tuple(tables))


def _restore(session: Session, scripts: dict[Family, str]) -> None:
    """Load the scripts; one that was never loaded before is tried first, which costs 20 ms.

    Raises: KernelRejected.
    """
    key = tuple(scripts.items())
    trial = [] if key in _accepted else [("--noflush", "--test")]
    for options in (*trial, ("--noflush",)):
        calls = [
            tools.Call((require_tool(family, "nft", "restore"), *options), script)
            for family, script in scripts.items()
        ]
        failed = [done for done in tools.run(session.netns, calls, session.lock_fd) if done.status]
        if failed:
            raise KernelRejected(failed[0].failure(), script=failed[0].call.stdin)
    _accepted[key] = None
    while len(_accepted) > REMEMBERED:
        _accepted.popitem(last=False)


def _drop_text(family: Family, left: Shells) -> str:
    """Deleting a chain that still holds a rule fails, and with it the whole transaction."""
    name = NFT_FAMILY[family]
    lines = [f"delete chain {name} {table} {chain}\n" for table, chain in left.chains]
    lines += [f"delete table {name} {table}\n" for table in left.tables]
    return "".join(lines)
