"""Which of the loaded rules belong to a capture, whoever loaded them, and what is left without.

Chains named ISTIO_* and every rule that jumps to one are a capture's. Besides, versions of Istio
put rules straight into built-in chains, where no name tells (kernel fact 12): those are known by
their shape, or exactly, where it is known which settings were applied here.

Nothing here reads or writes; a foreign rule is never changed, moved or dropped.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from agent.model import numbers
from agent.model.catalogue import owner_of_comments
from agent.model.ruleset import (
    BASIC,
    BUILTIN_CHAINS,
    Chain,
    Family,
    Option,
    Rule,
    Ruleset,
    Rulesets,
    Table,
    Target,
    basic,
)

CHAIN_PREFIX = "ISTIO_"
# Those of Istio's own nftables mode, in family inet, for a sidecar and for the node's proxy.
ISTIO_TABLES = frozenset(
    f"istio-{whose}-{table}" for whose in ("proxy", "ambient") for table in ("nat", "mangle", "raw")
)
AMBIENT_CHAIN = "ISTIO_PRERT"

TPROXY_MARKS = frozenset({numbers.TPROXY_MARK, numbers.TPROXY_SELF_MARK})
DNS_ZONES = frozenset({numbers.ZONE_PROXY_TO_UPSTREAM, numbers.ZONE_CLIENT_TO_PROXY})

# What istio-iptables puts ahead in every chain of filter while it exchanges a capture.
GUARD_RAILS = frozenset(Rule((basic(protocol=p),), Target("DROP")) for p in ("tcp", "udp"))


def is_capture_chain(name: str) -> bool:
    return name.startswith(CHAIN_PREFIX)


@dataclass(frozen=True, slots=True)
class Evidence:
    """What tells a capture's rules in built-in chains where neither their name nor shape does.

    `known` are captures that may be what is loaded, in one family. `interfaces` are named by a
    capture's rules of either family. Where there is a record of what was applied (`recorded`), no
    rule is taken for a capture's just because of where it stands. `railed` says that a killed run
    of istio-iptables left its guard rails in either family, and so a part of them in the other.
    """

    known: tuple[Ruleset, ...] = ()
    interfaces: frozenset[str] = frozenset()
    recorded: bool = False
    railed: bool = False

    def expected(self, table: str, chain: str) -> Counter[Rule]:
        """Return how often each rule may stand in a chain: as often as any known capture has it."""
        found: Counter[Rule] = Counter()
        for ruleset in self.known:
            wanted = ruleset.chain(table, chain)
            found |= Counter(wanted.rules if wanted else ())
        return found


NO_EVIDENCE = Evidence()


def foreign(loaded: Ruleset, evidence: Evidence = NO_EVIDENCE) -> Ruleset:
    """Return what is left of `loaded` without any capture."""
    return _sift(loaded, evidence, ours=False)


def capture_of(loaded: Ruleset, evidence: Evidence = NO_EVIDENCE) -> Ruleset:
    """Return only what belongs to a capture: the counterpart of `foreign`."""
    return _sift(loaded, evidence, ours=True)


def interfaces_of(rulesets: Iterable[Ruleset]) -> frozenset[str]:
    """Return the interfaces that a capture names: those it reroutes, and those it leaves alone."""
    found: set[str] = set()
    for ruleset in rulesets:
        arriving, leaving = (ruleset.chain("nat", name) for name in ("PREROUTING", "OUTPUT"))
        for rule in arriving.rules if arriving else ():
            option = rule.option(BASIC, "-i")
            if is_named(rule) and option is not None:
                found.update(option.values)
        if _has_capture_chain(ruleset):
            found |= set(_bare(arriving, "-i").values()) & set(_bare(leaving, "-o").values())
    return frozenset(found)


def _sift(loaded: Ruleset, evidence: Evidence, *, ours: bool) -> Ruleset:
    marks = TPROXY_MARKS | diverted_marks(loaded)
    present = _has_capture_chain(loaded)
    rails = GUARD_RAILS if evidence.railed or railed([loaded]) else frozenset()
    tables = []
    for table in loaded.tables:
        chains = []
        for chain in table.chains:
            if is_capture_chain(chain.name):
                chains += [chain] if ours else []
                continue
            owned = _owned(table.name, chain, marks, present, evidence)
            if table.name == "filter":
                owned |= {i for i, rule in enumerate(chain.rules[:2]) if rule in rails}
            rules = tuple(r for i, r in enumerate(chain.rules) if (i in owned) is ours)
            if rules or not ours:
                chains.append(replace(chain, rules=rules))
        if chains or not ours:
            tables.append(Table(table.name, tuple(chains)))
    return Ruleset(loaded.family, tuple(tables))


def merge(others: Ruleset, capture: Ruleset) -> Ruleset:
    """Return `others` with the capture in it, its rules ahead of all others in built-in chains.

    Ahead, because a rule that runs before the capture can take traffic past the proxy.
    """
    merged = others
    for table in capture.tables:
        known = others.table(table.name)
        chains = {c.name: c for c in (known.chains if known else ())}
        for chain in table.chains:
            before = chains.get(chain.name)
            policy = before.policy if before else chain.policy
            behind = before.rules if before else ()
            chains[chain.name] = Chain(chain.name, policy, chain.rules + behind)
        merged = merged.with_chains(table.name, chains.values())
    return merged


def merged(others: Rulesets, captures: Rulesets) -> Rulesets:
    """Return `others` with the captures in it, family by family; see `merge`."""
    return {
        family: merge(others.get(family, Ruleset(family)), captures[family])
        if family in captures
        else others[family]
        for family in Family
        if family in captures or family in others
    }


def is_ambient(loaded: Ruleset) -> bool:
    """Tell a capture for the node's proxy: no other has this chain."""
    return any(table.chain(AMBIENT_CHAIN) for table in loaded.tables)


def _has_capture_chain(loaded: Ruleset) -> bool:
    return any(is_capture_chain(c.name) for table in loaded.tables for c in table.chains)


def are_rails_up(loaded: Ruleset) -> bool:
    """Tell whether istio-iptables was killed while its guard rails stood: nothing gets through."""
    chains = [loaded.chain("filter", name) for name in BUILTIN_CHAINS["filter"]]
    return all(chain is not None and set(chain.rules[:2]) == GUARD_RAILS for chain in chains)


def railed(rulesets: Iterable[Ruleset]) -> bool:
    """Tell the same of a namespace, of which these are the families."""
    return any(_has_capture_chain(one) and are_rails_up(one) for one in rulesets)


def diverted_marks(loaded: Ruleset) -> frozenset[int]:
    """Return the marks that the loaded TPROXY rules set, whatever setting they came from."""
    found = set()
    chain = loaded.chain("mangle", "ISTIO_DIVERT")
    for rule in chain.rules if chain else ():
        for option in rule.target.options if rule.target else ():
            if option.name == "--set-xmark" and (mark := _mark(option)) is not None:
                found.add(mark)
    return frozenset(found)


def _owned(
    table: str, chain: Chain, marks: frozenset[int], present: bool, evidence: Evidence
) -> frozenset[int]:
    """Return the indexes of the rules in a chain that belong to a capture."""
    owned = {i for i, rule in enumerate(chain.rules) if is_named(rule)}
    if chain.name not in BUILTIN_CHAINS.get(table, ()):
        return frozenset(owned)
    owned |= {i for i, rule in enumerate(chain.rules) if _shaped(table, rule, marks, present)}
    if present and not evidence.recorded:
        owned |= _interface_returns(table, chain, owned, evidence.interfaces)
    wanted = evidence.expected(table, chain.name)
    wanted -= Counter(chain.rules[i] for i in owned)
    for index, rule in enumerate(chain.rules):
        if index not in owned and wanted[rule] > 0:
            wanted[rule] -= 1
            owned.add(index)
    return frozenset(owned)


def is_named(rule: Rule) -> bool:
    """Tell a rule that leads into a capture's chain."""
    return rule.target is not None and is_capture_chain(rule.target.name)


def _interface_returns(
    table: str, chain: Chain, owned: set[int], interfaces: frozenset[str]
) -> set[int]:
    """Return the bare `-i X -j RETURN` (`-o X` in OUTPUT) that a capture has made.

    Those of interfaces that it names elsewhere, those that stand directly above rules of its own,
    where Istio writes them, and all where nat PREROUTING holds nothing else.
    """
    if table not in ("nat", "mangle") or chain.name not in ("PREROUTING", "OUTPUT"):
        return set()
    option = "-i" if chain.name == "PREROUTING" else "-o"
    bare = _bare(chain, option)
    if chain.rules and len(bare) == len(chain.rules) and (table, option) == ("nat", "-i"):
        return set(bare)
    found = {index for index, name in bare.items() if name in interfaces}
    for index in reversed(range(len(chain.rules))):
        below = index + 1
        if index in bare and (below in owned or below in found):
            found.add(index)
    return found


def _bare(chain: Chain | None, option: str) -> dict[int, str]:
    """Return the interface of each rule that does nothing but RETURN for one, by its index."""
    found = {}
    for index, rule in enumerate(chain.rules if chain else ()):
        if rule.target != Target("RETURN") or len(rule.matches) != 1:
            continue
        options = rule.matches[0].options
        if len(options) == 1 and options[0].name == option and not options[0].negated:
            found[index] = options[0].values[0]
    return found


def _shaped(table: str, rule: Rule, marks: frozenset[int], present: bool) -> bool:
    if rule.target is None or _is_of_another(rule):
        return False
    if table == "mangle":
        return _tproxy_shaped(rule, marks)
    if table == "raw":
        return present and _zone_shaped(rule)
    if table == "nat":
        return _dns_redirect_shaped(rule) or (present and _dns_exemption_shaped(rule))
    return False


def _is_of_another(rule: Rule) -> bool:
    """Whether a comment says that another mesh, whose rules look the same, has written a rule."""
    return owner_of_comments(v for o in rule.options("comment") for v in o.values) is not None


def _tproxy_shaped(rule: Rule, marks: frozenset[int]) -> bool:
    """Tell the rules that Istio's TPROXY mode puts straight into mangle PREROUTING and OUTPUT."""
    name = rule.target.name if rule.target else ""
    if not _is_protocol(rule, "tcp"):
        return False
    matched = [_mark(o) for m in ("mark", "connmark") for o in rule.options(m)]
    if name in ("CONNMARK", "RETURN"):
        return any(mark in marks for mark in matched)
    if name == "MARK" and rule.target:
        return any(_mark(o) == numbers.TPROXY_SELF_MARK for o in rule.target.options)
    return False


def _zone_shaped(rule: Rule) -> bool:
    """Tell the conntrack-zone rules for DNS that older versions put straight into raw."""
    if rule.target is None or rule.target.name != "CT" or not _is_protocol(rule, "udp"):
        return False
    zones = [o.values for o in rule.target.options if o.name == "--zone"]
    return any(_number(v) in DNS_ZONES for v in zones) and _is_dns_port(rule, "udp")


def _dns_redirect_shaped(rule: Rule) -> bool:
    if rule.target is None or rule.target.name != "REDIRECT":
        return False
    ports = [o.values for o in rule.target.options if o.name in ("--to-ports", "--to-port")]
    return (str(numbers.DNS_PROXY_PORT),) in ports and any(
        _is_protocol(rule, p) and _is_dns_port(rule, p) for p in ("tcp", "udp")
    )


def _dns_exemption_shaped(rule: Rule) -> bool:
    if rule.target is None or rule.target.name != "RETURN" or not _is_protocol(rule, "udp"):
        return False
    return _is_dns_port(rule, "udp") and any(True for _ in rule.options("owner"))


def _is_dns_port(rule: Rule, protocol: str) -> bool:
    ports = {str(numbers.DNS_PORT), str(numbers.DNS_PROXY_PORT)}
    return any(
        o.name in ("--dport", "--sport") and not o.negated and set(o.values) <= ports
        for o in rule.options(protocol)
    )


def _is_protocol(rule: Rule, protocol: str) -> bool:
    option = rule.option(BASIC, "-p")
    return option is not None and option.values == (protocol,) and not option.negated


def _mark(option: Option) -> int | None:
    """Return the mark of a `--mark` or `--set-xmark` over all bits, else None."""
    if option.name not in ("--mark", "--set-xmark") or len(option.values) != 1:
        return None
    value, _, mask = option.values[0].partition("/")
    if mask not in ("", "0xffffffff"):
        return None
    return _number((value,))


def _number(values: tuple[str, ...]) -> int | None:
    try:
        return int(values[0], 0)
    except (IndexError, ValueError):
        return None
