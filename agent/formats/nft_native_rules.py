"""The rules of a foreign nftables table, in libnftables' JSON, as rules of the model.

See `nft_native`, which finds the tables.
"""

import itertools
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

from agent.formats.nft_rule_json import FAMILY_SPELLINGS, conditions, field_of, foreign, span_of
from agent.formats.nft_target_json import target_of
from agent.model.ruleset import Chain, Family, Match, Option, Rule, Target, match

# No more rules than this, and elements of sets, are made of a table; the rest is not understood.
MAX_RULES = 50_000
# Statements, and fields that statements write, on which no walk depends.
PASSIVE = frozenset({"comment", "counter", "log"})
PASSIVE_FIELDS = frozenset(
    {"ip dscp", "ip ecn", "ip ttl", "ip6 dscp", "ip6 ecn", "ip6 hoplimit", "meta nftrace"}
    | {"meta priority"}
)
# Statements that put into a set or map what a packet has, or take that out.
NOTES = frozenset({"set", "map"})
CHOICES = {"fully-random": "--random-fully"}
# Fields that mean the same to a TCP or UDP packet.
L4PROTO = {"meta": {"key": "l4proto"}}
# Fields that a list of ports or states is read of as a whole.
WHOLE_SETS = frozenset({"tcp dport", "tcp sport", "udp dport", "udp sport", "ct state"})
NEVER_OURS = frozenset({"icmp", "icmpv6", "igmp", "arp", "ether", "vlan", "sctp", "dccp", "ah"})
DNAT_BIT, SNAT_BIT = 32, 16


class _Never(Exception):
    """The rule cannot match a TCP or UDP packet of this family."""


class RuleReader:
    """Reads the rules of one table as packets of one family meet them.

    `sets` are those, by name, in which neither time nor traffic changes anything.
    """

    def __init__(
        self, family: Family, chains: Container[str], sets: Mapping[str, list[Any]]
    ) -> None:
        self._family = family
        self._chains = chains
        self._sets = sets
        self._left = MAX_RULES

    def chain(self, name: str, items: Iterable[Mapping[str, Any]]) -> Chain:
        rules: list[Rule] = []
        for item in items:
            rules += self._rules(item.get("expr"))
        return Chain(name, None, tuple(rules))

    def _rules(self, expressions: object) -> list[Rule]:
        if not isinstance(expressions, list):
            return [_unknown(expressions)]
        conditions_of: list[list[list[object]]] = []  # each with its alternatives
        actions: list[object] = []
        try:
            for expression in expressions:
                kind = kind_of(expression)
                if kind == "match" and not actions:
                    conditions_of.append(self._alternatives(expression))
                elif kind in ("limit", "quota", "match", "meter"):
                    conditions_of.append([[{"xt": expression}]])  # understood by nobody
                elif kind not in PASSIVE and not _is_passive(expression):
                    actions.append(expression)
        except _Never:
            return []
        # Whether there is room for what a rule notes down matters only to what stands behind that.
        while actions and kind_of(actions[-1]) in NOTES:
            actions.pop()
        if len(actions) == 1 and kind_of(actions[0]) == "vmap":
            return self._map(conditions_of, actions[0])
        return self._made(conditions_of, [self._target(action) for action in actions] or [None])

    def _affords(self, elements: Sequence[object] | None) -> bool:
        """Whether there are few enough elements; they are then counted."""
        self._left -= len(elements or ())
        return self._left >= 0

    def _made(
        self, conditions_of: Sequence[list[list[object]]], targets: Sequence[Target | None]
    ) -> list[Rule]:
        count = 1
        for one in conditions_of:
            count *= len(one)
        self._left -= count * len(targets)
        if self._left < 0:
            return [_unknown("one of too many", target) for target in targets]
        found = []
        for chosen in itertools.product(*conditions_of):
            matches = self._matches([expression for part in chosen for expression in part])
            for position, target in enumerate(targets):
                # Behind a statement that sets marks, conditions on marks are not the same any more.
                again = position and any(m.module in ("mark", "connmark") for m in matches)
                found.append(_unknown("marks", target) if again else Rule(matches, target))
        return found

    def _matches(self, expressions: Sequence[object]) -> tuple[Match, ...]:
        known: list[Match] = []
        plain: list[object] = []
        for expression in expressions:
            own = self._own_match(expression)
            if own is not None:
                known += own
            elif kind_of(expression) == "match":
                plain.append(expression)
            else:
                known.append(foreign("--expr", expression))
        found, _ = conditions(self._family, plain)
        if any(option.negated for m in found if m.module == "owner" for option in m.options):
            # Without a socket nothing is known of its owner, and the rule does not match.
            known.append(Match("owner", (Option("--socket-exists"),)))
        return (*found, *known)

    # --- conditions ------------------------------------------------------------------------------

    def _alternatives(self, expression: Any) -> list[list[object]]:
        """Return lists of conditions of which one must hold as a whole."""
        body = expression["match"]
        if not isinstance(body, dict):
            return [[{"xt": expression}]]
        left, right, operator = body.get("left"), self._set(body.get("right")), body.get("op")
        name = field_of(left)
        elements = _elements(right)
        if not self._affords(elements):
            return [[{"xt": "one of too many"}]]
        if elements is None or name in WHOLE_SETS or operator not in ("==", "!="):
            return [self._one(left, operator, right, name)]
        if operator == "!=":
            each = [self._one(left, "!=", element, name) for element in elements]
            return [[expression for part in each for expression in part]]
        found = []
        for element in elements:
            try:
                found.append(self._one(left, "==", element, name))
            except _Never:
                continue
        if not found:
            raise _Never
        return found

    def _one(self, left: object, operator: object, right: object, name: str) -> list[object]:
        """Return the conditions that one comparison is, without those that always hold."""
        if isinstance(left, dict) and isinstance(left.get("concat"), list):
            values = right.get("concat") if isinstance(right, dict) else None
            fields = left["concat"]
            if operator == "==" and isinstance(values, list) and len(values) == len(fields):
                pairs = zip(fields, values, strict=True)
                parts = (self._one(one, "==", value, field_of(one)) for one, value in pairs)
                return [expression for part in parts for expression in part]
            return [{"xt": [left, operator, right]}]
        own = self._of_family(name, operator, right)
        if own is False:
            raise _Never
        if own:
            return []
        if name in ("ip protocol", "ip6 nexthdr"):
            left = L4PROTO
        elif name in ("meta iif", "meta oif") and right in ("lo", 1):
            # The index of lo is 1 everywhere. Others are shown by the names of another namespace.
            left, right = {"meta": {"key": f"{name[5:]}name"}}, "lo"
        found: list[object] = [{"match": {"op": operator, "left": left, "right": right}}]
        masked = left.get("&") if isinstance(left, dict) else None
        inner = field_of(masked[0]) if isinstance(masked, list) and masked else name
        protocol = inner.partition(" ")[0]
        if protocol in ("tcp", "udp") and name not in WHOLE_SETS:
            found.append({"match": {"op": "==", "left": L4PROTO, "right": protocol}})
        return found

    def _of_family(self, name: str, operator: object, right: object) -> bool | None:
        """Whether a comparison holds, or never does, because of the packet's family alone."""
        protocol = name.partition(" ")[0]
        if protocol in NEVER_OURS:
            return False
        if protocol in ("ip", "ip6"):
            return None if (protocol == "ip") is (self._family is Family.IPV4) else False
        if name not in ("meta nfproto", "meta protocol") or operator not in ("==", "!="):
            return None
        spelled = {"ip": "ipv4", "ip6": "ipv6"}.get(str(right), right)
        for family in Family:
            if spelled in FAMILY_SPELLINGS[family] and not isinstance(spelled, bool):
                return (family is self._family) is (operator == "==")
        return operator == "!="

    def _set(self, right: object) -> object:
        if isinstance(right, str) and right.startswith("@"):
            found = self._sets.get(right[1:])
            return right if found is None else {"set": found}
        return right

    def _own_match(self, expression: object) -> list[Match] | None:
        """Return a condition that our own tables never have, None for all others."""
        body = expression.get("match") if isinstance(expression, dict) else None
        if not isinstance(body, dict):
            return None
        left, right, operator = body.get("left"), body.get("right"), body.get("op")
        name = field_of(left)
        if name == "ct status" and operator in ("in", "&"):
            states = {"dnat": "DNAT", DNAT_BIT: "DNAT", "snat": "SNAT", SNAT_BIT: "SNAT"}
            state = states.get(right) if isinstance(right, (str, int)) else None
            return [match("conntrack", "--ctstate", state)] if state else None
        if operator not in ("==", "!="):
            return None
        if name in ("th dport", "th sport"):
            return _either_ports(name[3:], right, negated=operator == "!=")
        return _of_type(left, right, negated=operator == "!=")

    # --- statements ------------------------------------------------------------------------------

    def _map(self, conditions_of: list[list[list[object]]], statement: object) -> list[Rule]:
        body = statement["vmap"] if isinstance(statement, dict) else None
        data = self._set(body.get("data")) if isinstance(body, dict) else None
        elements = _elements(data)
        if not isinstance(body, dict) or elements is None or not self._affords(elements):
            return self._made(conditions_of, [Target("nft vmap")])
        rules: list[Rule] = []
        number = _counts(body.get("key"), elements)
        for at, element in enumerate(elements, start=1):
            if not isinstance(element, list) or len(element) != 2:
                return self._made(conditions_of, [Target("nft vmap")])
            key, verdict = _value(element[0]), element[1]
            # For what no other element is for; of numbers of a generator one must be the last.
            if key == "*" or (number and at == len(elements)):
                rules += self._made(conditions_of, [self._target(verdict)])
                continue
            try:
                one = self._alternatives(
                    {"match": {"op": "==", "left": body.get("key"), "right": key}}
                )
            except _Never:
                continue
            rules += self._made([*conditions_of, one], [self._target(verdict)])
        return rules

    def _target(self, statement: object) -> Target:
        kind = kind_of(statement)
        body = statement[kind] if isinstance(statement, dict) and kind else None
        known = target_of(self._family, "", [statement]) if kind not in ("jump", "goto") else None
        if known is not None:
            return known
        match kind, body:
            case (("jump" | "goto"), {"target": str(name)}) if name in self._chains:
                return Target(name, goto=kind == "goto")
            case "reject", _:
                return Target("REJECT")
            case "masquerade", None:
                return Target("MASQUERADE")
            case "masquerade", {"flags": flags, **rest} if not rest:
                return Target("MASQUERADE", _flags(flags))
            case (("dnat" | "snat"), dict()):
                return self._translation(kind, body) or Target(f"nft {kind}")
        return Target(f"nft {kind or 'statement'}")

    def _translation(self, kind: str, body: Mapping[str, Any]) -> Target | None:
        if set(body) - {"addr", "port", "family", "flags"}:
            return None
        address, port = body.get("addr", ""), body.get("port")
        ports = span_of(port, "-", 65535) if port is not None else ""
        if not isinstance(address, str) or ports is None or address.startswith("@"):
            return None
        bracketed = f"[{address}]" if ":" in address and ports else address
        option = "--to-destination" if kind == "dnat" else "--to-source"
        place = Option(option, (f"{bracketed}:{ports}" if ports else address,))
        return Target(kind.upper(), (place, *_flags(body.get("flags", []))))


def _flags(flags: object) -> tuple[Option, ...]:
    """Return how a port is chosen, in the words of iptables."""
    words = flags if isinstance(flags, list) else [flags]
    return tuple(Option(CHOICES.get(str(word), f"--{word}")) for word in words)


def _either_ports(side: str, right: object, *, negated: bool) -> list[Match] | None:
    """Return a condition on ports whatever the protocol is, which multiport is to a walk."""
    listed = _elements(right)
    ports = [span_of(one, ":", 65535) for one in ([right] if listed is None else listed)]
    known = [port for port in ports if port]
    if not known or known != ports:
        return None
    return [match("multiport", f"--{side}s", ",".join(known), negated=negated)]


def _of_type(left: object, right: object, *, negated: bool) -> list[Match] | None:
    """Return the condition that an address is local, as `fib daddr type local` has it."""
    fib = left.get("fib") if isinstance(left, dict) else None
    if not isinstance(fib, dict) or fib.get("result") != "type" or right not in ("local", 2):
        return None
    flags = fib.get("flags")
    word = flags[0] if isinstance(flags, list) and len(flags) == 1 else flags
    sides = {"daddr": "--dst-type", "saddr": "--src-type"}
    side = sides.get(word) if isinstance(word, str) else None
    return [match("addrtype", side, "LOCAL", negated=negated)] if side else None


def _is_passive(expression: object) -> bool:
    """Whether a statement writes something on which no walk depends, such as the TCP MSS."""
    body = expression.get("mangle") if isinstance(expression, dict) else None
    key = body.get("key") if isinstance(body, dict) else None
    return field_of(key) in PASSIVE_FIELDS or (isinstance(key, dict) and set(key) == {"tcp option"})


def _counts(key: object, elements: Sequence[object]) -> bool:
    """Whether the elements are all the numbers that a generator gives."""
    body = key.get("numgen") if isinstance(key, dict) else None
    if not isinstance(body, dict) or body.get("mod") != len(elements) or body.get("offset"):
        return False
    numbers = [_value(one[0]) for one in elements if isinstance(one, list) and one]
    return all(isinstance(one, int) for one in numbers) and len(set(map(str, numbers))) == len(
        elements
    )


def kind_of(expression: object) -> str:
    """Return the name of an expression; nothing for what is none."""
    if isinstance(expression, dict) and len(expression) == 1:
        return str(next(iter(expression)))
    return ""


def _value(element: object) -> object:
    """Return an element of a set without its comment or counter."""
    if isinstance(element, dict) and set(element) == {"elem"} and isinstance(element["elem"], dict):
        return element["elem"].get("val")
    return element


def _elements(value: object) -> list[object] | None:
    if not isinstance(value, dict) or set(value) != {"set"}:
        return None
    listed = value["set"] if isinstance(value["set"], list) else [value["set"]]
    return [_value(one) for one in listed]


def _unknown(expression: object, target: Target | None = None) -> Rule:
    return Rule((foreign("--expr", expression),), target or Target("nft statement"))
