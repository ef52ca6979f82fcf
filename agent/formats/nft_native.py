"""Foreign nftables tables in libnftables' JSON, as rules that a packet walk can follow.

An nft rule may say in one line what the model says in several: a set is one rule for each element,
a verdict map is one for each entry, and every statement with an effect is a rule of its own with
the same conditions. The order and the effect stay those of the kernel. What is not understood
becomes a match or a target that nobody knows, so that a walk says `maybe` there and only there.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from agent.formats import nft_json
from agent.formats.nft_native_rules import RuleReader, kind_of
from agent.model.native import NativeHook
from agent.model.ruleset import Family
from agent.model.state import BaseChain

HOOKS = frozenset({"prerouting", "input", "forward", "output", "postrouting"})
KINDS: Mapping[str, str] = {"nat": "nat", "route": "mangle", "filter": "filter"}
FAMILIES: Mapping[str, tuple[Family, ...]] = {
    "inet": tuple(Family),
    "ip": (Family.IPV4,),
    "ip6": (Family.IPV6,),
}
WORDS = frozenset({"ACCEPT", "DROP", "RETURN", "REJECT", "REDIRECT", "DNAT", "SNAT", "MARK"})


@dataclass(slots=True)
class _Table:
    """What lies in one foreign table."""

    family: str
    name: str
    chains: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    rules: dict[str, list[Mapping[str, Any]]] = field(default_factory=dict)
    sets: dict[str, list[Any]] = field(default_factory=dict)
    hooked: list[BaseChain] = field(default_factory=list)


def native_hooks(document: object, ours: frozenset[str]) -> tuple[NativeHook, ...]:
    """Return the base chains of all tables but those of iptables and `inet` ones in `ours`.

    Left out are base chains at other hooks (ingress), tables of other families, dormant tables, and
    tables with a chain whose name the model has for a verdict.

    Raises: NftJsonError if the document is no listing.
    """
    tables: dict[tuple[str, str], _Table] = {}
    for base in nft_json.base_chains(document):
        own = base.family == "inet" and base.table in ours
        if base.family in FAMILIES and not base.is_xtables and not own:
            table = tables.setdefault((base.family, base.table), _Table(base.family, base.table))
            table.hooked.append(base)
    if not tables:
        return ()
    _fill(tables, document)
    return tuple(
        hook
        for table in tables.values()
        if not WORDS & set(table.chains)
        for family in FAMILIES[table.family]
        for hook in _hooks(table, family)
    )


def _fill(tables: dict[tuple[str, str], _Table], document: object) -> None:
    changed: set[tuple[str, str, str]] = set()
    for kind, item in nft_json.items(document):
        if kind == "table" and not _flags(item) <= {"owner", "persist"}:
            # Dormant: its chains are not hooked in. (nft 1.0.6 prints the table's name instead.)
            tables.pop((str(item.get("family")), str(item.get("name"))), None)
        table = tables.get((str(item.get("family")), str(item.get("table"))))
        if table is None:
            continue
        if kind == "chain":
            table.chains[str(item.get("name"))] = item
        elif kind == "rule":
            table.rules.setdefault(str(item.get("chain")), []).append(item)
            changed |= {(table.family, table.name, name) for name in _changes(item.get("expr"))}
        elif kind in ("set", "map") and "timeout" not in _flags(item):
            elements = item.get("elem", [])
            table.sets[str(item.get("name"))] = elements if isinstance(elements, list) else []
    for family, name, changing in changed:
        if (family, name) in tables:
            tables[family, name].sets.pop(changing, None)


def _changes(expressions: object) -> Iterator[str]:
    """Yield the names of the sets that a rule adds to or takes from, as packets pass."""
    for expression in expressions if isinstance(expressions, list) else ():
        body = expression.get(kind_of(expression)) if isinstance(expression, dict) else None
        for kind in ("set", "map"):
            name = body.get(kind) if isinstance(body, dict) else None
            if kind_of(expression) == kind and isinstance(name, str):
                yield name.removeprefix("@")


def _flags(item: Mapping[str, Any]) -> frozenset[str]:
    flags = item.get("flags", [])
    return frozenset(str(flag) for flag in (flags if isinstance(flags, list) else [flags]))


def _hooks(table: _Table, family: Family) -> Iterator[NativeHook]:
    reader = RuleReader(family, table.chains, table.sets)
    known = [
        base
        for base in table.hooked
        if base.hook in HOOKS and base.type in KINDS and base.name in table.chains
    ]
    made = (
        {name: reader.chain(name, table.rules.get(name, ())) for name in table.chains}
        if known
        else {}
    )
    for base in known:
        made[base.name] = replace(made[base.name], policy=base.policy.upper())
    chains = MappingProxyType(made)
    for base in known:
        yield NativeHook(
            family=family,
            table=f"{table.family} {table.name}",
            entry=base.name,
            kind=KINDS[base.type],
            hook=base.hook.upper(),
            priority=base.priority,
            chains=chains,
        )
