"""Reads everything in one namespace that somebody can have left there. Leaves no trace.

No legacy table comes into being (only those that exist are asked for), no module is loaded, no lock
is taken. Rules are read through the tools and not as libnftables' JSON: of 10,000 rules that would
take 150 MB. Namespaces that hold the same rules are read once.
"""

import contextlib
import fcntl
import socket
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from agent.backends import registry
from agent.backends.iptables_nft import NFT_FAMILY, only_existing
from agent.backends.iptables_tools import missing_tool, read_printable, without_empty
from agent.backends.nftables import TABLE
from agent.backends.session import Session
from agent.formats import nft_json
from agent.kernel import modules, routing, tools, topology
from agent.kernel.filters import NftChain
from agent.kernel.ipset import IpSet, read_sets
from agent.kernel.netns import NetnsId
from agent.kernel.nft import NftDoor, ToolDoor
from agent.kernel.sockets import KernelSocket, SocketTable
from agent.leftovers import proxy_mode
from agent.model import catalogue
from agent.model.enrolment import Enrolment
from agent.model.errors import EnvironmentLacks, StateUnreadable
from agent.model.ruleset import BUILTIN_CHAINS, Family, Rulesets
from agent.model.state import GUARD, IPTABLES_LEGACY, IPTABLES_NFT, NFTABLES, NamespaceState

REMEMBERED = 256
TOO_MANY_TO_REMEMBER = 500  # chains; their digest alone takes as long as reading them

IPVS = Path("/proc/thread-self/net/ip_vs")
SIOCGIFADDR = 0x8915  # linux/sockios.h

OWN_TABLES = {TABLE: NFTABLES, registry.GUARD_TABLE: GUARD}


@dataclass(frozen=True, slots=True)
class NativeTable:
    """A table of nf_tables that iptables does not print; `text` makes it, if its owner is known."""

    family: str
    name: str
    chains: tuple[NftChain, ...]
    text: str = ""


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Rules that are there and that nobody here can show."""

    backend: str
    family: str
    table: str
    why: str
    chains: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Rules:
    loaded: Mapping[str, Rulesets]
    tables: tuple[NativeTable, ...]
    unreadable: tuple[Unreadable, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What one namespace holds. `listeners` is None where the kernel does not say; `proxy_mode` is
    that of a kube-proxy that answers, asked only where something of one is."""

    id: NetnsId
    name: str
    state: NamespaceState
    tables: tuple[NativeTable, ...] = ()
    unreadable: tuple[Unreadable, ...] = ()
    sets: tuple[IpSet, ...] = ()
    links: tuple[str, ...] = ()
    listeners: tuple[KernelSocket, ...] | None = None
    addressed: frozenset[Family] = frozenset()
    ipvs_services: int = 0
    proxy_mode: str = ""
    route_localnet: bool = False

    @property
    def rule_count(self) -> int:
        rulesets = (r for parts in self.state.loaded.values() for r in parts.values())
        return sum(ruleset.rule_count() for ruleset in rulesets)


_seen: OrderedDict[bytes, _Rules] = OrderedDict()


def look(session: Session, name: str) -> Seen:
    """Return what the namespace holds now; what cannot be read is named in it.

    Raises: StateUnreadable if nothing at all can be read.
    """
    session.forget()
    try:
        rules = _rules(session)
        routes = routing.read_routes(session.rtnl)
        around = session.netns.run(lambda: _surroundings(serving=_serving(rules)))
        enrolment = _enrolment(session)
    except OSError as error:
        raise StateUnreadable(f"cannot look into {name}: {error.strerror or error}") from error
    return Seen(
        id=session.netns.id,
        name=name,
        state=NamespaceState(loaded=rules.loaded, enrolment=enrolment, routes=routes),
        tables=rules.tables,
        unreadable=rules.unreadable,
        sets=around.sets,
        links=around.links,
        listeners=around.listeners,
        addressed=around.addressed,
        ipvs_services=around.ipvs_services,
        proxy_mode=around.proxy_mode,
        route_localnet=around.route_localnet,
    )


def _serving(rules: _Rules) -> bool:
    """Whether there are rules by which kube-proxy serves; asked of two names that it always has."""
    loaded = (ruleset for parts in rules.loaded.values() for ruleset in parts.values())
    tables = (table for ruleset in loaded for table in ruleset.tables)
    return any(table.name == "kube-proxy" for table in rules.tables) or any(
        table.chain("KUBE-SERVICES") for table in tables
    )


def _enrolment(session: Session) -> Enrolment | None:
    """Return what the eBPF programs were told of the namespace; it needs the routes for ::6."""
    with contextlib.suppress(StateUnreadable, EnvironmentLacks):
        return registry.EBPF_BACKEND.read(session)
    return None


# --- rules ----------------------------------------------------------------------------------------


def _rules(session: Session) -> _Rules:
    chains = session.eye.nft_chains() if modules.present("nf_tables") else []
    if len(chains) > TOO_MANY_TO_REMEMBER:
        return _read(session, chains)
    digest = session.eye.digest() if modules.present("nf_tables") else b""
    known = _seen.get(digest) if digest else None
    if known is None:
        known = _read(session, chains)
        if digest and not known.unreadable:
            _seen[digest] = known
        while len(_seen) > REMEMBERED:
            _seen.popitem(last=False)
    return known


def _read(session: Session, chains: Sequence[NftChain]) -> _Rules:
    loaded: dict[str, Rulesets] = {}
    unreadable: list[Unreadable] = []
    legacy = [f for f in Family if session.eye.legacy.tables().get(f.version)]
    compatible = {f: _compatible(chains, f) for f in Family}
    for name, flavour, families in (
        (IPTABLES_NFT, "nft", [f for f in Family if compatible[f]]),
        (IPTABLES_LEGACY, "legacy", legacy),
    ):
        if not families:
            continue
        if missing := missing_tool(flavour, ("save",)):
            unreadable.append(Unreadable(name, ",".join(families), "", missing))
            continue
        found, lacking = read_printable(session, flavour, families)
        unreadable += [
            Unreadable(name, family.value, table, why, _names(chains, family, table))
            for family, table, why in lacking
        ]
        if name == IPTABLES_NFT:
            unreadable += _silent(found, lacking, compatible, chains)
            there = {f: only_existing(r, _there(chains, f)) for f, r in found.items()}
            found = without_empty(there)
        if found:
            loaded[name] = found
    tables = tuple(_native(session, chains, unreadable))
    for table in tables:
        if table.family == "inet" and table.name in OWN_TABLES:
            loaded |= _own(session, table, unreadable)
    return _Rules(loaded, tables, tuple(unreadable))


def _compatible(chains: Iterable[NftChain], family: Family) -> frozenset[str]:
    """Return the tables of a family that iptables-nft calls its own."""
    return frozenset(
        c.table for c in chains if c.family == NFT_FAMILY[family] and c.table in BUILTIN_CHAINS
    )


def _there(chains: Iterable[NftChain], family: Family) -> set[tuple[str, str]]:
    """Return (table, chain) of what there is: the tool prints every built-in chain of a table."""
    return {(c.table, c.name) for c in chains if c.family == NFT_FAMILY[family]}


def _names(chains: Iterable[NftChain], family: Family, table: str) -> tuple[str, ...]:
    return tuple(c.name for c in chains if (c.family, c.table) == (NFT_FAMILY[family], table))


def _silent(
    found: Mapping[Family, object],
    lacking: Iterable[tuple[Family, str, str]],
    compatible: Mapping[Family, frozenset[str]],
    chains: Sequence[NftChain],
) -> Iterator[Unreadable]:
    """Yield tables that are there, were not printed, and of which the tool did not say so."""
    named = {(family, table) for family, table, _ in lacking}
    for family, ruleset in found.items():
        printed = {table.name for table in getattr(ruleset, "tables", ())}
        for table in sorted(compatible[family] - printed):
            if (family, table) not in named:
                why = "iptables-nft-save does not print it, and does not say why"
                names = _names(chains, family, table)
                yield Unreadable(IPTABLES_NFT, family.value, table, why, names)


def _native(
    session: Session, chains: Sequence[NftChain], unreadable: list[Unreadable]
) -> Iterator[NativeTable]:
    """Yield the tables that iptables does not print; those of known owners with their text."""
    if not modules.present("nf_tables"):
        return
    ours = set(NFT_FAMILY.values())
    for family, name in session.eye.nft_tables():
        if family in ours and name in BUILTIN_CHAINS:
            continue
        inside = tuple(c for c in chains if (c.family, c.table) == (family, name))
        text = ""
        if catalogue.owner_of_table(family, name):
            try:
                text = _door(session, inside).list_table(family, name)
            except (StateUnreadable, EnvironmentLacks) as error:
                names = tuple(c.name for c in inside)
                unreadable.append(Unreadable(NFTABLES, family, name, str(error), names))
        yield NativeTable(family, name, inside, text)


def _door(session: Session, chains: Sequence[NftChain]) -> NftDoor:
    """Return what lists a table: of a big one libnftables would keep twice as much in memory."""
    tool = tools.find("nft") if len(chains) > TOO_MANY_TO_REMEMBER else None
    return ToolDoor(session.netns, tool) if tool else session.require_nft()


def _own(session: Session, table: NativeTable, unreadable: list[Unreadable]) -> dict[str, Rulesets]:
    """Return a table of this agent's in the rule model."""
    try:
        objects = {"nftables": session.nft_ruleset()}
        parsed = nft_json.parse_table(objects, table.name)
    except (nft_json.NftJsonError, StateUnreadable) as error:
        unreadable.append(Unreadable(NFTABLES, table.family, table.name, str(error)))
        return {}
    return {OWN_TABLES[table.name]: parsed} if parsed else {}


# --- what is around the rules ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Surroundings:
    sets: tuple[IpSet, ...]
    links: tuple[str, ...]
    listeners: tuple[KernelSocket, ...] | None
    addressed: frozenset[Family]
    ipvs_services: int
    proxy_mode: str
    route_localnet: bool


def _surroundings(*, serving: bool) -> _Surroundings:
    """Look around in the calling thread's namespace, in which kube-proxy may be `serving`."""
    listeners = _listeners()
    links = tuple(name for _, name in socket.if_nameindex())
    return _Surroundings(
        sets=read_sets(),
        links=links,
        listeners=listeners,
        addressed=_addressed(links),
        ipvs_services=_ipvs_services(),
        proxy_mode=proxy_mode.ask(listeners or ()) if serving else "",
        route_localnet=topology.switched_on("ipv4/conf/all/route_localnet"),
    )


def _ipvs_services() -> int:
    """Return how many virtual services ipvs has; the file is there only with the module."""
    try:
        lines = IPVS.read_text().splitlines()
    except OSError:
        return 0
    return sum(line.startswith(("TCP ", "UDP ", "SCTP ")) for line in lines)


def _listeners() -> tuple[KernelSocket, ...] | None:
    if not modules.present("tcp_diag"):
        return None
    with contextlib.suppress(StateUnreadable, EnvironmentLacks), SocketTable() as table:
        return (*table.listeners("tcp"), *table.listeners("udp"))
    return None


def _addressed(links: Sequence[str]) -> frozenset[Family]:
    """Return the families in which the namespace has an address that others can reach."""
    found = set()
    if routing.read_ipv6().addressed:
        found.add(Family.IPV6)
    if any(name != "lo" and _has_ipv4(name) for name in links):
        found.add(Family.IPV4)
    return frozenset(found)


def _has_ipv4(link: str) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            fcntl.ioctl(probe, SIOCGIFADDR, link.encode()[:15].ljust(40, b"\0"))
        except OSError:
            return False
    return True
