"""Tells whether a namespace is captured as its settings say. Reads only."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from agent.backends import registry
from agent.backends.nftables import TABLE
from agent.backends.session import reading
from agent.capture import gate, record
from agent.capture.difference import Difference, differences
from agent.capture.observe import hidden, observe
from agent.formats.iptables_save import render_rule
from agent.kernel.netns import Netns
from agent.model import owned
from agent.model.plan import CapturePlan, plan
from agent.model.ruleset import BASIC, BUILTIN_CHAINS, Family, Rule, Ruleset
from agent.model.settings import Settings
from agent.model.state import (
    EBPF,
    IPTABLES_LEGACY,
    IPTABLES_NFT,
    NFTABLES,
    BaseChain,
    NamespaceState,
)
from agent.model.wanted import Known, captured, captures

TRANSLATIONS = frozenset({"REDIRECT", "DNAT"})
TRANSLATING = frozenset({"output", "prerouting"})
OWN_NAT_PRIORITY = -101
IPTABLES_NAT_PRIORITY = -100
CONNTRACK_PRIORITY = -200
OWN_TABLES = frozenset({TABLE, registry.GUARD_TABLE})


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The outcome of a check. `foreign` holds sentences on others' rules that run before ours.

    `guarded` says that a standing guard is there and whole: nothing gets past the proxy, whatever
    else differs. `passing` says that some processes are to, until it listens.
    """

    backend: str
    differences: tuple[Difference, ...]
    foreign: tuple[str, ...]
    warnings: tuple[str, ...]
    guarded: bool = False
    bare: bool = False  # there is no capture, and none was recorded
    passing: bool = False

    @property
    def in_sync(self) -> bool:
        return not self.differences and not self.foreign


def check(netns: Netns, settings: Settings, *, backend: str = "auto", kept: bool = False) -> Report:
    """Compare what is loaded with the plan: every rule and its order, both families, and routes.

    `kept` is for whoever closes an open gate in time: until then it is to be as it was applied.

    Raises: StateUnreadable, EnvironmentLacks.
    """
    with reading(netns) as session:
        have = observe(session)
        found = record.load(netns)
        if kept:
            settings = gate.as_applied(settings, have, found)
        known = found.known() if found else Known()
        report = compare(have, plan(settings), backend, known, settings)
        bare = not (captures(have) or have.istio_tables or have.enrolment or found)
        return replace(report, foreign=(*report.foreign, *hidden(session, have)), bare=bare)


def compare(
    have: NamespaceState, wanted: CapturePlan, backend: str, known: Known, settings: Settings
) -> Report:
    """Compare a state that was read with a plan. Pure."""
    chosen = registry.choose(backend, have, settings)
    name = chosen.name
    native = registry.GUARD_BACKEND.missing() is None
    want = captured(have, wanted, name, known, native=native)
    found = differences(have, want)
    return Report(
        backend=name,
        differences=found,
        foreign=foreign_ahead(have, wanted, name),
        warnings=(*have.unreadable, *settings.warnings(), *chosen.passed_over),
        passing=bool(settings.passing),
        guarded=name != EBPF and bool(wanted.guard) and not any(each.is_of_guard for each in found),
    )


def foreign_ahead(have: NamespaceState, wanted: CapturePlan, backend: str) -> tuple[str, ...]:
    """Return sentences about what of others sees a connection before the capture does.

    What eBPF turned to the proxy is on its way there still and meets every translation.
    """
    if backend == EBPF:
        return (*have.enrolment.foreign, *_leading_elsewhere(have)) if have.enrolment else ()
    if not captures(have):
        return ()
    found: list[str] = []
    for family, ruleset in have.of(backend).items() if backend != NFTABLES else ():
        found += _ahead_in_chain(backend, ruleset, wanted.rulesets.get(family))
    if backend != NFTABLES:
        found += _other_flavour(have, backend)
    for flavour in (IPTABLES_NFT, IPTABLES_LEGACY):
        found += _untracked(have, flavour)
    for base in have.base_chains:
        where = f"nftables {base.family} table {base.table}, chain {base.name}"
        if _runs_before(base, backend):
            what = f"at priority {base.priority} of {base.hook} may translate before the capture"
            found.append(f"{where}: {base.rules} foreign rules {what}")
        elif base.untracks and base.priority < CONNTRACK_PRIORITY and not base.is_xtables:
            found.append(f"{where}: notrack takes packets past the capture, which needs conntrack")
    return tuple(found)


def _leading_elsewhere(have: NamespaceState) -> Iterator[str]:
    for flavour in (IPTABLES_NFT, IPTABLES_LEGACY):
        for family, count in _translations(have, flavour):
            yield f"{flavour} {family} nat: {count} foreign translations may lead past the proxy"
    for base in have.base_chains:
        if base.type == "nat" and base.rules and base.hook in TRANSLATING and not base.is_xtables:
            where = f"nftables {base.family} table {base.table}, chain {base.name}"
            yield f"{where}: {base.rules} foreign rules at {base.hook} may lead past the proxy"


def _untracked(have: NamespaceState, flavour: str) -> Iterator[str]:
    """What conntrack does not see is not translated, whatever the nat table says."""
    for family, ruleset in have.of(flavour).items():
        table = owned.foreign(ruleset).table("raw")
        for chain in table.chains if table else ():
            for rule in chain.rules:
                if _untracks(rule):
                    text = render_rule(chain.name, rule)
                    yield f"{flavour} {family} raw: takes packets past the capture: {text}"


def _untracks(rule: Rule) -> bool:
    protocol = rule.option(BASIC, "-p")
    if protocol and not protocol.negated and protocol.values != ("tcp",):
        return False
    target = rule.target
    return target is not None and (
        target.name == "NOTRACK" or any(o.name == "--notrack" for o in target.options)
    )


def _ahead_in_chain(backend: str, loaded: Ruleset, wanted: Ruleset | None) -> Iterator[str]:
    evidence = owned.Evidence((wanted,) if wanted else ())
    for table in owned.capture_of(loaded, evidence).tables:
        for chain in table.chains:
            there = loaded.chain(table.name, chain.name)
            if there is None or chain.name not in BUILTIN_CHAINS.get(table.name, ()):
                continue
            first = next((i for i, rule in enumerate(there.rules) if rule in chain.rules), 0)
            for number, rule in enumerate(there.rules[:first], start=1):
                yield (
                    f"{backend} {loaded.family} {table.name}: foreign rule {number} of "
                    f"{chain.name} runs before the capture: {render_rule(chain.name, rule)}"
                )


def _other_flavour(have: NamespaceState, backend: str) -> Iterator[str]:
    """Of two iptables flavours the one programmed last sees a packet first (kernel fact 11)."""
    other = IPTABLES_NFT if backend == IPTABLES_LEGACY else IPTABLES_LEGACY
    for family, count in _translations(have, other):
        yield f"{other} {family} nat: {count} foreign translations may run before the capture"


def _translations(have: NamespaceState, flavour: str) -> Iterator[tuple[Family, int]]:
    """Yield how many foreign rules of an iptables flavour translate destinations."""
    for family, ruleset in have.of(flavour).items():
        table = owned.foreign(ruleset).table("nat")
        rules = [rule for chain in (table.chains if table else ()) for rule in chain.rules]
        count = sum(rule.target is not None and rule.target.name in TRANSLATIONS for rule in rules)
        if count:
            yield family, count


def _runs_before(base: BaseChain, backend: str) -> bool:
    """Only a translation can take a connection from a later one.

    At equal priority the kernel asks the chain first that was made last (kernel fact 11), and who
    that is cannot be read back.
    """
    if base.type != "nat" or not base.rules or (base.family == "inet" and base.table in OWN_TABLES):
        return False
    if backend == NFTABLES:
        return base.priority <= OWN_NAT_PRIORITY
    return base.priority <= IPTABLES_NAT_PRIORITY and not base.is_xtables
