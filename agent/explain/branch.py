"""Where a packet is on its way through the hooks, and in which order the kernel calls tables."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from agent.model.native import NativeHook
from agent.model.packet import Packet, Step
from agent.model.ruleset import Chain, Rule, Ruleset
from agent.model.state import NFTABLES

CONNTRACK = "conntrack"

# The tables of each hook. The kernel calls them by priority.
HOOKS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "PREROUTING": ("raw", CONNTRACK, "mangle", "nat"),
        "INPUT": ("mangle", "filter", "security", "nat"),
        "FORWARD": ("mangle", "filter", "security"),
        "OUTPUT": ("raw", CONNTRACK, "mangle", "nat", "filter", "security"),
        "POSTROUTING": ("mangle", "nat"),
    }
)
PRIORITIES: Mapping[str, int] = MappingProxyType(
    {"raw": -300, CONNTRACK: -200, "mangle": -150, "filter": 0, "security": 50}
)
# Where nat changes the destination; at the other two of its hooks it changes the source.
DESTINATION_HOOKS = frozenset({"PREROUTING", "OUTPUT"})


@dataclass(frozen=True, slots=True)
class Layer:
    """One loaded set of rules.

    At equal priority the kernel calls layers in the order in which they are given: the reverse of
    that in which they were programmed (kernel fact 11). `backend` is a name of `agent.model.state`.
    """

    backend: str
    ruleset: Ruleset


@dataclass(frozen=True, slots=True)
class Visit:
    """One table of one layer at one hook, or conntrack (then there are no chains)."""

    table: str
    backend: str = ""
    chains: Mapping[str, Chain] = field(default_factory=dict)
    native: NativeHook | None = None

    @property
    def kind(self) -> str:
        """The table of iptables that works like it: only nat translates, only mangle reroutes."""
        return self.native.kind if self.native else self.table

    def entry(self, hook: str) -> str:
        """Return the chain at which it begins."""
        return self.native.entry if self.native else hook


def visits(
    layers: Sequence[Layer], native: Sequence[NativeHook] = ()
) -> dict[str, tuple[Visit, ...]]:
    """Return for each hook what a packet visits there, in order."""
    tables = [
        Visit(table.name, layer.backend, {chain.name: chain for chain in table.chains})
        for layer in layers
        for table in layer.ruleset.tables
    ]
    tables.append(Visit(CONNTRACK))
    others = [Visit(one.table, NFTABLES, one.chains, one) for one in native]
    found = {}
    for hook, names in HOOKS.items():
        here = [t for t in tables if t.table in names and (hook in t.chains or not t.backend)]
        here += [visit for visit in others if visit.native and visit.native.hook == hook]
        # Sorting keeps the order of layers where priorities are equal.
        found[hook] = tuple(sorted(here, key=lambda visit: _priority(visit, hook)))
    return found


def _priority(visit: Visit, hook: str) -> int:
    if visit.native is not None:
        return visit.native.priority
    if visit.table == "nat":
        first = -1 if visit.backend == "nftables" else 0  # ours is there to be asked first
        return (-100 if hook in DESTINATION_HOOKS else 100) + first
    if visit.table == "security" and visit.backend == "iptables-nft":
        return 150  # where iptables-nft 1.8.9 hooks it, behind that of iptables-legacy
    return PRIORITIES[visit.table]


@dataclass(frozen=True, slots=True)
class Entry:
    """A jump that was taken, and by that a chain that is open."""

    chain: str
    step: Step
    rule: Rule


@dataclass(frozen=True, slots=True)
class Frame:
    """Where a RETURN leads: a chain, the index of its next rule, and how it had been reached."""

    chain: str
    index: int
    path: tuple[Entry, ...]


@dataclass(slots=True)
class Branch:
    """A packet on its way, and what has been done to it. Copies share nothing that changes."""

    number: int
    packet: Packet
    hook: str
    route: str  # the interface by which it will leave; rules at OUTPUT keep seeing the first one
    visit: int = -1
    entered_with: Packet | None = None  # the packet as it entered the table
    chain: str = ""  # empty between two tables
    index: int = 0
    callers: tuple[Frame, ...] = ()
    path: tuple[Entry, ...] = ()
    assumed: str = ""  # why the next rule is taken to match
    redirected: bool = False
    exempt: bool = False
    tproxy_port: int | None = None
    destination_bound: bool = False
    source_bound: bool = False
    decided_by: Step | None = None

    def enter(self, chain: str) -> None:
        """Begin a table at its built-in chain."""
        self.chain, self.index, self.callers, self.path = chain, 0, (), ()
        self.entered_with = self.packet

    def call(self, entry: Entry, *, goto: bool) -> None:
        """Go to another chain; a goto leaves no way back into the present one."""
        if not goto:
            self.callers = (*self.callers, Frame(self.chain, self.index, self.path))
        self.chain, self.index, self.path = entry.chain, 0, (*self.path, entry)

    def back(self) -> bool:
        """Return to the caller of the last jump; False if there is none."""
        if not self.callers:
            return False
        frame, self.callers = self.callers[-1], self.callers[:-1]
        self.chain, self.index, self.path = frame.chain, frame.index, frame.path
        return True

    def place(self) -> tuple[object, ...]:
        """Return all that what follows depends on: two branches with equal places end alike."""
        callers = tuple((frame.chain, frame.index) for frame in self.callers)
        here = (self.hook, self.visit, self.chain, self.index, callers, self.assumed)
        nat = (self.redirected, self.exempt, self.destination_bound, self.source_bound)
        return (self.packet, self.route, self.tproxy_port, self.entered_with, here, nat)
