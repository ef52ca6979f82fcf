"""Paths of cgroups as nft has them: from /sys/fs/cgroup on.

Where cgroup2 is mounted besides version 1 (`/sys/fs/cgroup/unified`) that is not its root.
"""

from dataclasses import replace

from agent.kernel import bpf_pins
from agent.model.ruleset import Chain, Match, Option, Rule, Rulesets, Table

NFT_ROOT = "/sys/fs/cgroup"
MODULE = "cgroup"


def named_in(rulesets: Rulesets) -> bool:
    """Whether any rule asks for a cgroup."""
    return any(
        match.module == MODULE
        for ruleset in rulesets.values()
        for table in ruleset.tables
        for chain in table.chains
        for rule in chain.rules
        for match in rule.matches
    )


def to_nft(rulesets: Rulesets) -> Rulesets:
    """Return the rules with the paths that nft looks up."""
    return _moved(rulesets, "", _prefix())


def from_nft(rulesets: Rulesets) -> Rulesets:
    """Return the rules that nft printed with the paths of the model."""
    return _moved(rulesets, _prefix(), "")


def _prefix() -> str:
    root = bpf_pins.cgroup_root() or NFT_ROOT
    return root.removeprefix(NFT_ROOT) if root.startswith(f"{NFT_ROOT}/") else ""


def _moved(rulesets: Rulesets, old: str, new: str) -> Rulesets:
    if old == new or not named_in(rulesets):
        return rulesets

    def of_chain(chain: Chain) -> Chain:
        return replace(chain, rules=tuple(map(of_rule, chain.rules)))

    def of_rule(rule: Rule) -> Rule:
        return replace(rule, matches=tuple(map(of_match, rule.matches)))

    def of_match(match: Match) -> Match:
        if match.module != MODULE:
            return match
        return replace(match, options=tuple(map(of_option, match.options)))

    def of_option(option: Option) -> Option:
        paths = (
            f"{new}{p.removeprefix(old)}" if p.startswith(f"{old}/") else p for p in option.values
        )
        return replace(option, values=tuple(paths))

    def of_table(table: Table) -> Table:
        return replace(table, chains=tuple(map(of_chain, table.chains)))

    return {
        family: replace(ruleset, tables=tuple(map(of_table, ruleset.tables)))
        for family, ruleset in rulesets.items()
    }
