"""The rule model as a native nftables table, with the effect that iptables gives the same rules.

One `inet` table holds both families. For each built-in chain there is a base chain such as
`nat-OUTPUT`, which only sends each family to a chain of its own: `v4-nat-OUTPUT`. All chains of
the model, built-in ones too, are regular chains with such names, so RETURN in a built-in chain
leads to the policy, as it must. A family without a ruleset has no rule and is left alone.

Where nftables differs, the difference is rendered away:

- `meta skuid` and `meta skgid` match nothing at all for a packet without a socket, even negated,
  while `! --uid-owner` matches it. A chain with such rules forks: packets with a socket go on in
  `CHAIN/socket`, the others pass the same rules with their owner conditions decided, and both end
  in `CHAIN/rest`.
- `tproxy` lets a packet pass if nobody listens, TPROXY drops it. A drop with the same conditions
  follows.
- Of two `ct zone set` the first counts, as with two CT targets: the second finds the packet taken.

Rules carry counters as iptables' do. `nft_json` reads all this back into the model.
"""

import re
from collections.abc import Iterable, Iterator, Mapping

from agent.formats.iptables_save import render_rule
from agent.formats.nft_rule_text import Unable, statements
from agent.formats.nft_shape import (
    ANY_ID,
    HOOKS,
    REST,
    SOCKET,
    base_name,
    chain_name,
    fork,
    without_socket,
)
from agent.model.ruleset import BUILTIN_CHAINS, Chain, Family, Rule, Ruleset, Rulesets, Table

_TABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_CHAIN_NAME = re.compile(r"[A-Za-z0-9_.-]+")


class NoNftForm(ValueError):
    """A rule that nftables cannot express with the same effect; the message names the rule."""


def _lines(family: Family, table: Table, chain: Chain, rules: Iterable[Rule]) -> Iterator[str]:
    for rule in rules:
        try:
            yield from statements(family, table, rule)
        except Unable as error:
            spec = render_rule(chain.name, rule)
            raise NoNftForm(
                f"no nftables form of {error}: {family.value} {table.name}: {spec}"
            ) from None


def _block(name: str, lines: Iterable[str]) -> Iterator[str]:
    yield f"\tchain {name} {{"
    yield from (f"\t\t{line}" for line in lines)
    yield "\t}"


def _chain(family: Family, table: Table, chain: Chain) -> Iterator[str]:
    if not _CHAIN_NAME.fullmatch(chain.name):
        raise NoNftForm(f"no nftables form of the chain name {chain.name!r} in {table.name}")
    name = chain_name(family, table.name, chain.name)
    before, forked, after = fork(chain.rules)
    lines = list(_lines(family, table, chain, before))
    if not forked:
        yield from _block(name, lines)
        return
    go_on = (f"goto {name}/{REST}",) if after else ()
    lines.append(f"meta skuid {ANY_ID} goto {name}/{SOCKET}")
    lines += (*_lines(family, table, chain, without_socket(forked)), *go_on)
    yield from _block(name, lines)
    yield from _block(f"{name}/{SOCKET}", (*_lines(family, table, chain, forked), *go_on))
    if after:
        yield from _block(f"{name}/{REST}", _lines(family, table, chain, after))


def _base(table: str, chain: str, policies: Mapping[Family, str]) -> Iterator[str]:
    """Yield the base chain that sends each family to its own chain.

    A policy of DROP is a rule here: the chain's own would also drop the other family.
    """
    hook = HOOKS[table, chain]
    lines = [f"type {hook.type} hook {hook.hook} priority {hook.priority}; policy accept;"]
    for family, policy in policies.items():
        if policy not in ("ACCEPT", "DROP"):
            raise NoNftForm(f"no nftables form of the policy {policy} of {table} {chain}")
        lines.append(f"meta nfproto {family.value} jump {chain_name(family, table, chain)}")
        if policy == "DROP":
            lines.append(f"meta nfproto {family.value} drop")
    yield from _block(base_name(table, chain), lines)


def _bases(rulesets: Iterable[Ruleset]) -> Iterator[str]:
    found: dict[tuple[str, str], dict[Family, str]] = {}
    for ruleset in rulesets:
        for table in ruleset.tables:
            for chain in table.chains:
                if (table.name, chain.name) in HOOKS:
                    policies = found.setdefault((table.name, chain.name), {})
                    policies[ruleset.family] = chain.policy or "ACCEPT"
    for (table_name, name), policies in found.items():
        yield from _base(table_name, name, policies)


def _check_name(name: str) -> None:
    if not _TABLE_NAME.fullmatch(name):
        raise NoNftForm(f"no nftables form of the table name {name!r}")


def render_table(name: str, rulesets: Rulesets, *, replace: bool = True) -> str:
    """Return a script that makes `table inet NAME` hold exactly these rules, as one transaction.

    With `replace` whatever the table held is gone afterwards, and running it again changes nothing
    but counters. Without it the script fails if the table exists (EEXIST).

    Raises: NoNftForm.
    """
    _check_name(name)
    ordered = [rulesets[family] for family in Family if family in rulesets]
    head = render_delete(name) if replace else f"create table inet {name}\n"
    lines = [f"table inet {name} {{", *_bases(ordered)]
    for ruleset in ordered:
        for table in ruleset.tables:
            if table.name not in BUILTIN_CHAINS:
                raise NoNftForm(f"no nftables form of the table {table.name!r}")
            for chain in table.chains:
                lines += _chain(ruleset.family, table, chain)
    return head + "\n".join([*lines, "}"]) + "\n"


def render_delete(name: str) -> str:
    """Return a script after which there is no `table inet NAME`, whether there was one or not.

    Raises: NoNftForm for a name that nft could misread.
    """
    _check_name(name)
    return f"add table inet {name}\ndelete table inet {name}\n"
