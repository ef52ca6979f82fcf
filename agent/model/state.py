"""What a namespace holds and what it should hold, as one comparable value."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from agent.model.enrolment import Enrolment
from agent.model.native import NativeHook
from agent.model.plan import Route
from agent.model.ruleset import BUILTIN_CHAINS, Family, Ruleset, Rulesets

NFTABLES = "nftables"
IPTABLES_NFT = "iptables-nft"
IPTABLES_LEGACY = "iptables-legacy"
EBPF = "ebpf"
# No way to capture: the table of what is dropped, for a moment or as long as a capture stands.
GUARD = "guard"

# The order in which `auto` prefers them where a namespace holds nothing yet.
BACKENDS = (NFTABLES, IPTABLES_NFT, IPTABLES_LEGACY)


@dataclass(frozen=True, slots=True)
class BaseChain:
    """A chain that is hooked into the kernel by nf_tables, of whatever owner.

    `untracks` says that its table has a rule which takes packets out of connection tracking.
    """

    family: str
    table: str
    name: str
    type: str
    hook: str
    priority: int
    policy: str
    rules: int
    untracks: bool = False

    @property
    def is_xtables(self) -> bool:
        """Whether it is one of iptables-nft, whose rules are looked at one by one."""
        return self.family in ("ip", "ip6") and self.name in BUILTIN_CHAINS.get(self.table, ())


@dataclass(frozen=True, slots=True)
class IstioTable:
    """A table of Istio's own nftables mode, in family inet; `text` is a script that makes it."""

    name: str
    text: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class NamespaceState:
    """Everything in a namespace that a capture can be made of.

    `loaded` has, by backend, every table of the iptables flavours (foreign rules included) and of
    nftables only our own table; `istio_tables` are those in which Istio has captures. `enrolment`
    is what the eBPF programs were told. `routes` has each policy rule as often as it is there: the
    kernel takes any number of copies. `base_chains` and `unreadable` are for reports only, `native`
    (the nftables tables of others) for packet walks. `user_namespace` says that it belongs to
    another user namespace than the node's.
    """

    loaded: Mapping[str, Rulesets] = field(default_factory=dict)
    enrolment: Enrolment | None = None
    routes: tuple[Route, ...] = ()
    istio_tables: tuple[IstioTable, ...] = ()
    base_chains: tuple[BaseChain, ...] = field(default=(), compare=False)
    unreadable: tuple[str, ...] = field(default=(), compare=False)
    native: tuple[NativeHook, ...] = field(default=(), compare=False)
    user_namespace: bool = field(default=False, compare=False)

    def of(self, backend: str) -> Rulesets:
        return self.loaded.get(backend, {})


def routes_without(routes: Iterable[Route], taken: Iterable[Route]) -> tuple[Route, ...]:
    """Return `routes` less `taken`, copy for copy: what is there twice, taken once, stays once."""
    left = list(taken)
    kept = []
    for route in routes:
        if route in left:
            left.remove(route)
        else:
            kept.append(route)
    return tuple(kept)


def same(one: NamespaceState, other: NamespaceState) -> bool:
    """Tell whether two states have the same rules, tables of Istio's, enrolment and routes.

    Built-in chains without rules do not count: legacy tables always have all of theirs, nf_tables
    has those that somebody asked for.
    """
    names = {*one.loaded, *other.loaded}
    for name in names:
        left, right = one.of(name), other.of(name)
        if left != right and _essence(left) != _essence(right):
            return False
    if one.istio_tables != other.istio_tables:
        return False
    return one.enrolment == other.enrolment and Counter(one.routes) == Counter(other.routes)


def _essence(rulesets: Rulesets) -> dict[Family, Ruleset]:
    found = {}
    for family, ruleset in rulesets.items():
        tables = []
        for table in ruleset.tables:
            chains = tuple(c for c in table.chains if c.rules or c.policy in (None, "DROP"))
            if chains:
                tables.append(replace(table, chains=chains))
        if tables:
            found[family] = replace(ruleset, tables=tuple(tables))
    return found
