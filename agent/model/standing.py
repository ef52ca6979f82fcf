"""The standing guard: drops what the capture must redirect and did not. Pure.

It is derived from the capture's own rules, so it cannot disagree with them: the chains of nat (and
of mangle, for TPROXY) are asked once more in the filter hooks, behind every translation, about what
the packet was before (`--ctorigdst`). Where they redirect, the guard drops, unless the packet is on
its way to the proxy. What a whole capture lets through therefore passes, and a table that was
flushed, or that another rule came ahead of, closes the pod instead of opening it.

It keeps conntrack and the translation of live connections in use, too: with the last rule that
needs them the kernel would forget both, and every redirected connection (kernel fact 10).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from agent.model import numbers
from agent.model.ruleset import (
    BASIC,
    Chain,
    Family,
    Match,
    Option,
    Rule,
    Ruleset,
    Target,
    basic,
    match,
    ruleset_of,
)
from agent.model.values import without_length

PREFIX = "ISTIO_GUARD_"
IN, OUT, FORWARD, LO, SELF, SELF_IN = (
    f"{PREFIX}{name}" for name in ("IN", "OUT", "FORWARD", "LO", "SELF", "SELF_IN")
)

_RETURN = Target("RETURN")
_OLD = Rule((match("conntrack", "--ctstate", "NEW", negated=True),), _RETURN)
_DROP = Target("DROP")
_CAPTURES = frozenset({"REDIRECT", "TPROXY"})


def standing(capture: Ruleset) -> Ruleset | None:
    """Return the guard of one family, or None if its capture redirects nothing.

    The base chain in nat has no rules: that it is there keeps the kernel's translation at work.
    """
    leaving = _Copy(capture, "nat").body("OUTPUT")
    arriving = _Copy(capture, "nat").body("PREROUTING")
    diverted = _Copy(capture, "mangle").body("PREROUTING")
    # On the loopback hop mangle sees what nat OUTPUT made of the packet.
    looped = _Copy(capture, "mangle", prefix=f"{LO}_", translated=True).body("PREROUTING")
    to_self = _Copy(capture, "mangle", prefix=f"{SELF}_", ahead=True).body("PREROUTING")
    unmarked = tuple(_unmarked(capture)) if to_self.rules else ()
    hooks: dict[str, tuple[Rule, ...]] = {}
    chains: dict[str, tuple[Rule, ...]] = {}
    if leaving.rules or unmarked:
        hooks["OUTPUT"] = (Rule((), Target(OUT)),)
        jump = (Rule((), Target(SELF)),) if unmarked else ()
        chains[OUT] = (_OLD, *_to_proxy(capture, "OUTPUT"), *jump, *leaving.rules)
    if unmarked:
        chains |= {SELF: unmarked, SELF_IN: to_self.rules, **to_self.chains}
    if arriving.rules or diverted.rules:
        # The loopback hop does not pass nat PREROUTING again (kernel fact 2), but mangle's.
        chains[LO] = looped.rules
        on_lo = Rule((basic(in_interface="lo"),), Target(LO, goto=True))
        proxy = tuple(_to_proxy(capture, "PREROUTING"))
        hooks["INPUT"] = (Rule((), Target(IN)),)
        hooks["FORWARD"] = (Rule((), Target(FORWARD)),)
        chains[IN] = (_OLD, on_lo, *diverted.rules, *proxy, *arriving.rules)
        chains[FORWARD] = (_OLD, *diverted.rules, *arriving.rules)
    if not chains:
        return None
    copies = {**leaving.chains, **arriving.chains, **diverted.chains, **looped.chains}
    return ruleset_of(
        capture.family, {"filter": {**hooks, **chains, **copies}, "nat": {"POSTROUTING": ()}}
    )


def _unmarked(capture: Ruleset) -> Iterator[Rule]:
    """Yield the rules that find what the proxy sends to its own pod without the mark for it.

    TPROXY diverts on the loopback hop what mangle OUTPUT has marked, and nothing else.
    """
    chain = capture.chain("mangle", "OUTPUT")
    for rule in chain.rules if chain else ():
        if rule.target == _RETURN:
            yield Rule(tuple(_before_translation(rule)), _RETURN)
        elif rule.target and rule.target.name == "MARK":
            mark = rule.target.options[0].values[0].partition("/")[0]
            without = match("mark", "--mark", mark, negated=True)
            yield Rule((*_before_translation(rule), without), Target(SELF_IN))


def _to_proxy(capture: Ruleset, hook: str) -> Iterator[Rule]:
    """Yield the rules that let pass what has been sent to the proxy.

    Not by `--ctstate DNAT`: the kernel does not set it where a packet had the right port already
    (fact 4), and another's translation sets it too. REDIRECT leads to loopback from OUTPUT, and to
    an address of this namespace from PREROUTING, which the hook INPUT says.
    """
    loopback = None
    if hook == "OUTPUT":
        loopback = "127.0.0.1/32" if capture.family is Family.IPV4 else numbers.LOOPBACK_V6
    for place in dict.fromkeys(_redirects(capture, hook)):
        where = basic(
            destination=loopback, in_interface=place.in_interface, protocol=place.protocol
        )
        yield Rule((where, match(place.protocol, "--dport", place.port)), _RETURN)


@dataclass(frozen=True, slots=True)
class _Redirect:
    """One way to the proxy: protocol and port, and the only interface that leads there, if any."""

    protocol: str
    port: str
    in_interface: str | None


def _redirects(capture: Ruleset, hook: str) -> Iterator[_Redirect]:
    """Yield where the chains behind a built-in chain of nat redirect to."""
    start = capture.chain("nat", hook)
    waiting: list[tuple[Chain, str | None]] = [(start, None)] if start else []
    seen: set[tuple[str, str | None]] = set()
    while waiting:
        chain, interface = waiting.pop(0)
        for rule in chain.rules:
            arriving = rule.option(BASIC, "-i")
            only = arriving.values[0] if arriving and not arriving.negated else interface
            name = rule.target.name if rule.target else ""
            if name == "REDIRECT" and rule.target:
                protocol = rule.option(BASIC, "-p")
                ports = rule.target.options[0].values[0]
                yield _Redirect(protocol.values[0] if protocol else "tcp", ports, only)
            behind = capture.chain("nat", name)
            if behind is not None and (name, only) not in seen:
                seen.add((name, only))
                waiting.append((behind, only))


@dataclass(frozen=True, slots=True)
class _Body:
    rules: tuple[Rule, ...]
    chains: dict[str, tuple[Rule, ...]]


class _Copy:
    """The chains of one table as questions about the packet as it was before translation.

    With `translated`, about the packet as it is now. With `ahead`, about what is yet to come to the
    loopback hop, and as if it had its mark.
    """

    def __init__(
        self,
        capture: Ruleset,
        table: str,
        *,
        prefix: str = PREFIX,
        translated: bool = False,
        ahead: bool = False,
    ) -> None:
        self._capture = capture
        self._table = table
        self._prefix = prefix
        self._translated = translated
        self._ahead = ahead
        self._chains: dict[str, tuple[Rule, ...]] = {}

    def body(self, name: str) -> _Body:
        """Return the copy of a chain and of those behind it; no rules if none of them captures."""
        found = self._capture.chain(self._table, name)
        rules = tuple(self._rules(found)) if found else ()
        if not any(rule.target != _RETURN for rule in rules):
            return _Body((), {})
        return _Body(rules, self._chains)

    def _rules(self, chain: Chain) -> Iterator[Rule]:
        for rule in chain.rules:
            verdict = self._verdict(rule.target)
            if verdict is None or (self._ahead and rule.option("mark", "--mark")):
                continue
            if self._ahead:
                yield Rule(tuple(_on_its_way(rule)), verdict)
            else:
                matches = rule.matches if self._translated else _before_translation(rule)
                yield Rule(tuple(matches), verdict)

    def _verdict(self, target: Target | None) -> Target | None:
        """Return what the copy does; None for a rule that leads to no capture."""
        if target is None or target == _RETURN:
            return target
        if target.name == "ACCEPT":
            return _RETURN  # nothing behind it captures, and in the filter table it would end all
        if target.name in _CAPTURES:
            return _DROP
        behind = self._capture.chain(self._table, target.name)
        if behind is None:
            return None
        name = self._prefix + target.name.removeprefix("ISTIO_")
        if name not in self._chains:
            self._chains[name] = ()
            self._chains[name] = tuple(self._rules(behind))
        if not any(rule.target != _RETURN for rule in self._chains[name]):
            del self._chains[name]
            return None
        return Target(name, goto=target.goto)


def _on_its_way(rule: Rule) -> Iterator[Match]:
    """Yield the conditions of a rule, asked before the packet comes in by the same interface."""
    for found in rule.matches:
        options = (replace(o, name="-o") if o.name == "-i" else o for o in found.options)
        yield replace(found, options=tuple(options))


def _before_translation(rule: Rule) -> Iterator[Match]:
    """Yield the conditions of a rule, asked of the original destination."""
    for found in rule.matches:
        kept: list[Option] = []
        asked: list[Option] = []
        for option in found.options:
            if (found.module, option.name) == (BASIC, "-d"):
                network = without_length(option.values[0])
                asked.append(Option("--ctorigdst", (network,), option.negated))
            elif option.name in ("--dport", "--dports"):
                asked += (_port(option.negated, port) for port in option.values[0].split(","))
            else:
                kept.append(option)
        if kept:
            yield Match(found.module, tuple(kept))
        yield from (Match("conntrack", (option,)) for option in asked)


def _port(negated: bool, port: str) -> Option:
    return Option("--ctorigdstport", (port,), negated)
