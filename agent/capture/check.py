"""Tells whether a namespace is captured as its settings say. Reads only."""

from collections.abc import Iterator
from dataclasses import dataclass

from agent.backends import registry
from agent.backends.session import reading
from agent.capture import record
from agent.capture.difference import Difference, differences
from agent.capture.observe import observe
from agent.formats.iptables_save import render_rule
from agent.kernel.netns import Netns
from agent.model import owned
from agent.model.plan import CapturePlan, plan
from agent.model.ruleset import BUILTIN_CHAINS, Ruleset
from agent.model.settings import Settings
from agent.model.state import (
    IPTABLES_LEGACY,
    IPTABLES_NFT,
    NFTABLES,
    BaseChain,
    NamespaceState,
)
from agent.model.wanted import Known, captured, captures

TRANSLATIONS = frozenset({"REDIRECT", "DNAT"})
OWN_NAT_PRIORITY = -101
IPTABLES_NAT_PRIORITY = -100


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The outcome of a check. `foreign` holds sentences on others' rules that run before ours."""

    backend: str
    differences: tuple[Difference, ...]
    foreign: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def in_sync(self) -> bool:
        return not self.differences and not self.foreign


def check(netns: Netns, settings: Settings, *, backend: str = "auto") -> Report:
    """Compare what is loaded with the plan: every rule and its order, both families, and routes.

    Raises: StateUnreadable, EnvironmentLacks.
    """
    with reading(netns) as session:
        return compare(observe(session), plan(settings), backend, _known(netns), settings)


def compare(
    have: NamespaceState, wanted: CapturePlan, backend: str, known: Known, settings: Settings
) -> Report:
    """Compare a state that was read with a plan. Pure."""
    name = registry.choose(backend, have).name
    want = captured(have, wanted, name, known)
    return Report(
        backend=name,
        differences=differences(have, want),
        foreign=foreign_ahead(have, wanted, name),
        warnings=(*have.unreadable, *settings.warnings()),
    )


def _known(netns: Netns) -> Known:
    found = record.load(netns)
    return found.known() if found else Known()


def foreign_ahead(have: NamespaceState, wanted: CapturePlan, backend: str) -> tuple[str, ...]:
    """Return sentences about rules of others that see a packet before the capture does."""
    if not captures(have):
        return ()
    found: list[str] = []
    for family, ruleset in have.of(backend).items() if backend != NFTABLES else ():
        found += _ahead_in_chain(backend, ruleset, wanted.rulesets.get(family))
    if backend != NFTABLES:
        found += _other_flavour(have, backend)
    found += (
        f"nftables {base.family} table {base.table}, chain {base.name}: {base.rules} foreign rules "
        f"at priority {base.priority} of {base.hook} may translate before the capture"
        for base in have.base_chains
        if _runs_before(base, backend)
    )
    return tuple(found)


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
    for family, ruleset in have.of(other).items():
        table = owned.foreign(ruleset).table("nat")
        rules = [rule for chain in (table.chains if table else ()) for rule in chain.rules]
        count = sum(rule.target is not None and rule.target.name in TRANSLATIONS for rule in rules)
        if count:
            yield f"{other} {family} nat: {count} foreign translations may run before the capture"


def _runs_before(base: BaseChain, backend: str) -> bool:
    """Only a translation can take a connection from a later one."""
    if base.type != "nat" or not base.rules or base.table.startswith("intercept-agent"):
        return False
    return base.priority < (OWN_NAT_PRIORITY if backend == NFTABLES else IPTABLES_NAT_PRIORITY)
