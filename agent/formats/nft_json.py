"""What libnftables says in JSON, back into the rule model; the inverse of `nft_text`.

Nothing is dropped. Whatever is not exactly as `nft_text` writes it becomes a match of the module
"nft" that holds the JSON itself (or names what is missing), so that no altered table equals a
wanted one. Only counters and handles are left out: they have no effect.

The JSON may come from nft 1.0.6 or a newer one, with symbols or (flags NUMERIC_ALL) numbers.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import wraps
from typing import ParamSpec, TypeVar

from agent.formats.nft_rule_json import FAMILY_SPELLINGS, conditions, foreign
from agent.formats.nft_shape import (
    ANY_ID,
    HOOKS,
    REST,
    SOCKET,
    base_name,
    model_place,
    without_socket,
)
from agent.formats.nft_target_json import target_of
from agent.model.ruleset import (
    Chain,
    Family,
    Rule,
    Ruleset,
    Rulesets,
    Table,
    Target,
    match,
    ruleset_of,
    sort_chains,
)
from agent.model.state import BaseChain
from agent.model.values import shown

Json = Mapping[str, object]

UNFORESEEABLE = Target("NFT")
FOREIGN_TABLE = "nft"  # stands for what lies in our table and belongs to no chain of ours


class NftJsonError(ValueError):
    """The document is not what libnftables prints."""


P = ParamSpec("P")
R = TypeVar("R")


def _bounded(read: Callable[P, R]) -> Callable[P, R]:
    """Make an error of this module of what is nested so deeply that Python gives up."""

    @wraps(read)
    def reading(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return read(*args, **kwargs)
        except RecursionError:
            raise NftJsonError("not a listing of nftables: it is nested too deeply") from None

    return reading


@_bounded
def base_chains(document: object) -> list[BaseChain]:
    """Return every base chain in a listing, by hook and in the order in which packets meet them.

    Raises: NftJsonError.
    """
    rules: dict[tuple[str, str, str], int] = {}
    untracking = set()
    found = []
    for kind, item in items(document):
        if kind == "rule":
            place = (_text(item, "family"), _text(item, "table"), _text(item, "chain"))
            rules[place] = rules.get(place, 0) + 1
            if _untracks(item.get("expr")):
                untracking.add(place[:2])
        elif kind == "chain" and "hook" in item:
            found.append(item)
    chains = []
    for item in found:
        priority = item.get("prio")
        place = (_text(item, "family"), _text(item, "table"), _text(item, "name"))
        chains.append(
            BaseChain(
                *place,
                type=_text(item, "type"),
                hook=_text(item, "hook"),
                priority=priority if isinstance(priority, int) else 0,
                policy=_text(item, "policy") or "accept",
                rules=rules.get(place, 0),
                untracks=place[:2] in untracking,
            )
        )
    return sorted(chains, key=lambda c: (c.hook, c.priority))


def _untracks(expressions: object) -> bool:
    """Whether a rule takes packets out of connection tracking that may be of TCP."""
    if not isinstance(expressions, list) or {"notrack": None} not in expressions:
        return False
    return not any(f'"protocol": "{name}"' in json.dumps(expressions) for name in ("udp", "icmp"))


@_bounded
def parse_table(document: object, name: str) -> Rulesets | None:
    """Return what `table inet NAME` holds in a listing of it or of everything; None without it.

    A family of which the table has no chain is absent from the result.

    Raises: NftJsonError if the document is no listing at all; odd content never raises.
    """
    contents = _Contents()
    exists = False
    for kind, item in items(document):
        if item.get("family") != "inet":
            continue
        if kind == "table" and item.get("name") == name:
            exists = True
            contents.flags = item.get("flags")
        elif item.get("table") == name:
            contents.add(kind, item)
    return contents.rulesets() if exists else None


def items(document: object) -> Iterator[tuple[str, Json]]:
    listing = document.get("nftables") if isinstance(document, dict) else None
    if not isinstance(listing, list):
        raise NftJsonError("not a listing of nftables: there is no array 'nftables'")
    for entry in listing:
        if not isinstance(entry, dict):
            raise NftJsonError(f"not a listing of nftables: {_kind(entry)} is no object")
        for kind, item in entry.items():
            if isinstance(item, dict):
                yield kind, item
            elif kind != "metainfo":
                name = shown(kind)
                raise NftJsonError(f"not a listing of nftables: {name} is {_kind(item)}")


def _kind(value: object) -> str:
    """Return what a value is; itself, too, where it is simple."""
    return shown(value) if isinstance(value, (str, int, float)) else f"a {type(value).__name__}"


def _text(item: Json, key: str) -> str:
    value = item.get(key, "")
    return value if isinstance(value, str) else json.dumps(value)


def _pseudo(option: str, value: object) -> Rule:
    """Return a rule that says what is odd. Where it stands nobody can foresee what happens."""
    return Rule((foreign(option, value),), UNFORESEEABLE)


# --- rules ---------------------------------------------------------------------------------------


def _rule(family: Family, table: str, item: Json) -> Rule:
    expressions = item.get("expr")
    if not isinstance(expressions, list):
        return _pseudo("--rule", {key: item[key] for key in item if key != "handle"})
    relevant = [e for e in expressions if not _is_counter(e)]
    matches, rest = conditions(family, relevant)
    target = target_of(family, table, rest) if rest else None
    if target is None:
        matches += tuple(foreign("--expr", expression) for expression in rest)
    if "comment" in item:
        matches += (match("comment", "--comment", _text(item, "comment")),)
    return Rule(matches, target)


def _is_counter(expression: object) -> bool:
    """Tell an anonymous counter; a named one is somebody's."""
    if not isinstance(expression, dict) or set(expression) != {"counter"}:
        return False
    return expression["counter"] is None or isinstance(expression["counter"], dict)


def _join_tproxy(rules: Iterable[Rule]) -> tuple[Rule, ...]:
    """Take each TPROXY rule and the drop behind it for one; without its drop it is not ours."""
    joined: list[Rule] = []
    waiting = False
    for rule in rules:
        if waiting:
            waiting = False
            if rule == Rule(joined[-1].matches, Target("DROP")):
                continue
            joined[-1] = _without_drop(joined[-1])
        joined.append(rule)
        waiting = rule.target is not None and rule.target.name == "TPROXY"
    if waiting:
        joined[-1] = _without_drop(joined[-1])
    return tuple(joined)


def _without_drop(rule: Rule) -> Rule:
    return Rule((*rule.matches, foreign("--missing", "drop")), rule.target)


# --- chains --------------------------------------------------------------------------------------


def _join_fork(name: str, parts: Mapping[str, tuple[Rule, ...]]) -> tuple[Rule, ...]:
    """Return the rules of a chain whose parts are given by suffix ("" is the chain itself)."""
    main = parts.get("", ())
    if not set(parts) - {""}:
        return main
    fork = Rule((match("owner", "--uid-owner", ANY_ID),), Target(f"{name}/{SOCKET}", goto=True))
    if fork in main and SOCKET in parts:
        at = main.index(fork)
        before, others, forked = main[:at], main[at + 1 :], parts[SOCKET]
        go_on = (Rule((), Target(f"{name}/{REST}", goto=True)),)
        after: tuple[Rule, ...] = ()
        if REST in parts and others[-1:] == forked[-1:] == go_on:
            others, forked, after = others[:-1], forked[:-1], parts[REST]
        if (after or REST not in parts) and others == without_socket(forked):
            return (*before, *forked, *after)
    torn = [_pseudo("--fork", [f"{name}/{part}" if part else name for part in sorted(parts)])]
    for suffix in sorted(parts):
        torn += parts[suffix]
    return tuple(torn)


Place = tuple[Family, str, str]
"""A chain of the model: family, table, chain."""


@dataclass(slots=True)
class _Contents:
    """Collects what lies in the table, then lays it out as the model has it."""

    flags: object = None
    chains: dict[str, Json] = field(default_factory=dict)
    rules: dict[str, list[Json]] = field(default_factory=dict)
    objects: list[object] = field(default_factory=list)

    def add(self, kind: str, item: Json) -> None:
        if kind == "chain":
            self.chains[_text(item, "name")] = item
        elif kind == "rule":
            self.rules.setdefault(_text(item, "chain"), []).append(item)
        else:
            self.objects.append({kind: {key: item[key] for key in item if key != "handle"}})

    def rulesets(self) -> Rulesets:
        parts: dict[Place, dict[str, tuple[Rule, ...]]] = {}
        strange: dict[str, tuple[Rule, ...]] = {}
        bases = {base_name(*place): place for place in HOOKS}
        for name in [*self.chains, *(n for n in self.rules if n not in self.chains)]:
            if found := model_place(name):
                family, table, chain, part = found
                parts.setdefault((family, table, chain), {})[part] = self._body(name, family, table)
            elif name not in bases:
                strange[name] = self._strange(name)
        made = {place: _join_fork(place[2], parts[place]) for place in parts}
        chains = {place: self._chain(place, made) for place in made}
        for name, (table, chain) in bases.items():
            served = any((family, table, chain) in made for family in Family)
            if not served and (name in self.chains or name in self.rules):
                strange[name] = self._strange(name)
        if self.flags:  # a dormant table has no effect at all
            strange["table"] = (_pseudo("--flags", self.flags),)
        if self.objects:
            strange["objects"] = tuple(_pseudo("--object", found) for found in self.objects)
        return _assemble(chains, strange)

    def _body(self, name: str, family: Family, table: str) -> tuple[Rule, ...]:
        rules = _join_tproxy(_rule(family, table, item) for item in self.rules.get(name, ()))
        header = self._header(name)
        return (_pseudo("--base", header), *rules) if header else rules

    def _header(self, name: str) -> dict[str, object]:
        """Return what a chain says of itself: nothing for a regular one."""
        known = ("family", "table", "name", "handle")
        return {k: v for k, v in self.chains.get(name, {}).items() if k not in known}

    def _strange(self, name: str) -> tuple[Rule, ...]:
        found = [_pseudo("--rule", item.get("expr")) for item in self.rules.get(name, ())]
        return (_pseudo("--base", self._header(name)), *found)

    def _chain(self, place: Place, made: Mapping[Place, tuple[Rule, ...]]) -> Chain:
        family, table, chain = place
        if (table, chain) not in HOOKS:
            return Chain(chain, None, made[place])
        families = [f for f in Family if (f, table, chain) in made]
        policies = self._policies(table, chain, families)
        if policies is None:
            name = base_name(table, chain)
            rules = [item.get("expr") for item in self.rules.get(name, ())]
            altered = _pseudo("--base", [self._header(name), rules])
            return Chain(chain, "ACCEPT", (altered, *made[place]))
        return Chain(chain, policies[family], made[place])

    def _policies(self, table: str, chain: str, families: list[Family]) -> dict[Family, str] | None:
        """Return each family's policy, or None if the base chain is not as we write it."""
        name, hook = base_name(table, chain), HOOKS[table, chain]
        wanted = {"type": hook.type, "hook": hook.hook, "prio": hook.priority, "policy": "accept"}
        if self._header(name) != wanted:
            return None
        steps = list(self.rules.get(name, ()))
        policies = {}
        for family in families:
            jump = Rule((), Target(chain))
            if not steps or _dispatch(family, table, steps.pop(0)) != jump:
                return None
            dropping = bool(steps) and _dispatch(family, table, steps[0]) == Rule(
                (), Target("DROP")
            )
            policies[family] = "DROP" if dropping else "ACCEPT"
            steps = steps[1:] if dropping else steps
        return None if steps else policies


def _dispatch(family: Family, table: str, item: Json) -> Rule | None:
    """Return a rule of a base chain without its condition on the family, which it must have."""
    expressions = item.get("expr")
    if not isinstance(expressions, list) or not expressions or "comment" in item:
        return None
    head = expressions[0]
    left = {"meta": {"key": "nfproto"}}
    for spelling in FAMILY_SPELLINGS[family]:
        if head == {"match": {"op": "==", "left": left, "right": spelling}}:
            return _rule(family, table, {"expr": expressions[1:]})
    return None


def _assemble(
    chains: Mapping[Place, Chain], strange: Mapping[str, tuple[Rule, ...]]
) -> dict[Family, Ruleset]:
    laid_out: dict[Family, dict[str, list[Chain]]] = {}
    for (family, table, _), chain in chains.items():
        laid_out.setdefault(family, {}).setdefault(table, []).append(chain)
    if strange:
        first = next((family for family in Family if family in laid_out), Family.IPV4)
        odd = ruleset_of(first, {FOREIGN_TABLE: strange}).tables[0].chains
        laid_out.setdefault(first, {}).setdefault(FOREIGN_TABLE, []).extend(odd)
    return {
        family: Ruleset(
            family,
            tuple(
                Table(name, sort_chains(name, laid_out[family][name]))
                for name in sorted(laid_out[family])
            ),
        )
        for family in Family
        if family in laid_out
    }
