"""What is missing from a capture, or stands in the wrong order, by its shape alone. Pure.

No settings are needed: what is looked for is wrong under any. So it finds less than `check` does,
and never calls a capture torn that istio-iptables would write.
"""

from collections.abc import Iterator, Mapping

from agent.leftovers.reach import goals, leads, reached, sends
from agent.model import owned
from agent.model.ruleset import BASIC, BUILTIN_CHAINS, Family, Option, Rule, Ruleset, Table

# Chains that Istio always makes, whether anything leads to them or not.
LEAVES = frozenset({"ISTIO_REDIRECT", "ISTIO_IN_REDIRECT", "ISTIO_DIVERT", "ISTIO_TPROXY"})
NEVER_EMPTY = LEAVES | {"ISTIO_OUTPUT", "ISTIO_INBOUND", "ISTIO_OUTPUT_DNS"}
VERDICTS = frozenset({"RETURN", "ACCEPT"})

Conditions = frozenset[tuple[str, Option]]


def flaws(capture: Ruleset) -> tuple[str, ...]:
    """Return what is wrong with the capture of one family, one sentence each."""
    found: list[str] = []
    if capture.tables and capture.table("nat") is None:
        tables = " and ".join(table.name for table in capture.tables)
        found.append(f"there are capture rules in {tables}, and none in nat")
    if owned.are_rails_up(capture):
        found.append("the guard rails of istio-iptables, which was killed, drop all TCP and UDP")
    ambient = owned.is_ambient(capture)
    for table in capture.tables:
        found += _unreached(table)
        if not ambient:
            found += _empty(table)
            found += _disordered(table)
    return tuple(dict.fromkeys(found))


def one_sided(captures: Mapping[Family, Ruleset], addressed: frozenset[Family]) -> tuple[str, ...]:
    """Return a sentence for every family with an address that traffic can take past a capture."""
    captured = {family for family, ruleset in captures.items() if goals(ruleset)}
    if not captured:
        return ()
    return tuple(
        f"{family.value} has an address here and no rules: its traffic is not captured"
        for family in Family
        if family in addressed and family not in captured
    )


def shadows(loaded: Ruleset) -> tuple[tuple[str, str, int, Rule], ...]:
    """Return (table, chain, position, rule) of foreign verdicts that stand before a capture's."""
    found = []
    for table in loaded.tables:
        for name in ("PREROUTING", "OUTPUT"):
            chain = table.chain(name)
            rules = chain.rules if chain else ()
            first = next((i for i, rule in enumerate(rules) if owned.is_named(rule)), 0)
            found += [
                (table.name, name, i + 1, rule)
                for i, rule in enumerate(rules[:first])
                if rule.target is not None
                and rule.target.name in VERDICTS
                and not _of_an_interface(rule)
            ]
    return tuple(found)


def _unreached(table: Table) -> Iterator[str]:
    there = reached(table)
    ours = [c.name for c in table.chains if owned.is_capture_chain(c.name)]
    for name in ours:
        if name not in there and name not in LEAVES and leads(table, name):
            chain = table.chain(name)
            count = len(chain.rules) if chain else 0
            yield f"no rule leads to {table.name} {name}: its rules ({count}) are never asked"
    if table.name == "nat" and ours and not there & set(ours):
        yield f"no rule leads to any of the {len(ours)} chains of table nat"


def _empty(table: Table) -> Iterator[str]:
    there = reached(table)
    for chain in table.chains:
        if chain.name in NEVER_EMPTY and chain.name in there and not chain.rules:
            yield f"{table.name} {chain.name} is empty: what is sent there goes on uncaptured"


def _disordered(table: Table) -> Iterator[str]:
    """Yield rules that can never match, because an earlier one takes all that they ask for."""
    for chain in table.chains:
        if chain.name in BUILTIN_CHAINS.get(table.name, ()):
            continue
        earlier: list[tuple[int, Conditions, bool]] = []
        for position, rule in enumerate(chain.rules, start=1):
            conditions, captures = _conditions(rule), _captures(rule)
            for at, taken, captured in earlier:
                if taken <= conditions and captured is not captures:
                    yield (
                        f"{table.name} {chain.name} is out of order: rule {at} takes all that "
                        f"rule {position} is for"
                    )
            # An exempt network that is captured, too, is a matter of settings; an owner is not.
            owner = any(True for _ in rule.options("owner"))
            if captures or (_exempts(rule) and owner):
                earlier.append((position, conditions, captures))


def _conditions(rule: Rule) -> Conditions:
    return frozenset((m.module, option) for m in rule.matches for option in m.options)


def _captures(rule: Rule) -> bool:
    return sends(rule) or (rule.target is not None and rule.target.name in LEAVES)


def _exempts(rule: Rule) -> bool:
    return rule.target is not None and rule.target.name in VERDICTS


def _of_an_interface(rule: Rule) -> bool:
    """Whether it is a bare `-i X -j RETURN`, which Istio itself writes for excluded interfaces."""
    options = [option for match in rule.matches for option in match.options]
    return bool(options) and all(
        match.module == BASIC and option.name in ("-i", "-o")
        for match in rule.matches
        for option in match.options
    )
