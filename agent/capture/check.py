"""Tells whether a namespace is captured as its settings say. Reads only."""

from dataclasses import dataclass

from agent.backends import registry
from agent.backends.session import reading
from agent.capture import record
from agent.capture.difference import Difference, differences
from agent.capture.observe import observe
from agent.kernel.netns import Netns
from agent.model import owned
from agent.model.plan import CapturePlan, plan
from agent.model.ruleset import BUILTIN_CHAINS
from agent.model.settings import Settings
from agent.model.state import NFTABLES, NamespaceState
from agent.model.wanted import Known, captured, captures


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
    found = []
    for family, ruleset in have.of(backend).items() if backend != NFTABLES else ():
        ours = owned.capture_of(ruleset, wanted.rulesets.get(family))
        for table in ours.tables:
            for chain in table.chains:
                loaded = ruleset.chain(table.name, chain.name)
                if loaded is None or chain.name not in BUILTIN_CHAINS.get(table.name, ()):
                    continue
                ahead = next((i for i, r in enumerate(loaded.rules) if r in chain.rules), 0)
                if ahead:
                    found.append(
                        f"{backend} {family} {table.name} {chain.name}: {ahead} foreign rules run "
                        "before the capture"
                    )
    found += (
        f"nftables {base.family} {base.table} {base.name}: {base.rules} foreign rules at "
        f"priority {base.priority} of {base.hook} translate before the capture"
        for base in have.base_chains
        if _runs_before(base.type, base.priority, base.rules, base.table)
    )
    return tuple(found) if captures(have) else ()


def _runs_before(kind: str, priority: int, rules: int, table: str) -> bool:
    """Only a translation can take a connection from a later one; ours are made at -101 or -100."""
    return kind == "nat" and priority < -101 and rules > 0 and not table.startswith("intercept-")
