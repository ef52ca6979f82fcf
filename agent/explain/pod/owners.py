"""What captures a namespace, in which backend, and who loaded it, each with its evidence. Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from agent.model import owned
from agent.model.annotations import STATUS, injected_names
from agent.model.catalogue import by_name, owner_of_chain, owner_of_table
from agent.model.owner import Role
from agent.model.pod import INIT
from agent.model.state import (
    BACKENDS,
    EBPF,
    IPTABLES_LEGACY,
    IPTABLES_NFT,
    NFTABLES,
    BaseChain,
    NamespaceState,
)

AGENT = "this agent"
ISTIO = "istio-init or istio-cni"
AMBIENT = "Istio's node agent (ambient mode)"
STEERING = (Role.MESH, Role.CAPTURE)
NATIVE = {"istio": f"{ISTIO} (Istio's own nftables mode)", "istio-ambient": AMBIENT}
VALIDATION = "istio-validation"  # the container that comes with istio-cni


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """One set of rules that captures. `walked` says whether a packet walk knows its rules."""

    backend: str
    families: tuple[str, ...]
    rules: int
    owner: str
    evidence: str
    walked: bool = True
    ambient: bool = False


def loaded(
    state: NamespaceState, *, chosen: str, recorded: str, annotations: Mapping[str, str] | None
) -> tuple[Loaded, ...]:
    """Return what captures a namespace.

    `chosen` is the backend that this agent takes here, `recorded` its record of the namespace (or
    empty), `annotations` those of the pod.
    """
    found = [_of_backend(state, name, chosen, recorded, annotations or {}) for name in BACKENDS]
    rules = (one for one in found if one is not None)
    return (*_enrolled(state), *rules, *_native(state), *_meshes(state))


def _enrolled(state: NamespaceState) -> Iterator[Loaded]:
    settings = state.enrolment.settings if state.enrolment else None
    if settings is not None:
        yield Loaded(
            backend=EBPF,
            families=tuple(family.value for family in settings.families),
            rules=0,
            owner=AGENT,
            evidence="the programs at the node's root cgroup have its settings",
        )


def _of_backend(
    state: NamespaceState,
    backend: str,
    chosen: str,
    recorded: str,
    annotations: Mapping[str, str],
) -> Loaded | None:
    captures = {family: owned.capture_of(rules) for family, rules in state.of(backend).items()}
    counts = {family: rules.rule_count() for family, rules in captures.items()}
    if not any(counts.values()):
        return None
    chains = {c.name for rules in captures.values() for table in rules.tables for c in table.chains}
    recorded = recorded if backend == chosen else ""
    owner, evidence = _owner(backend, chains, recorded, annotations)
    return Loaded(
        backend=backend,
        families=tuple(family.value for family, count in counts.items() if count),
        rules=sum(counts.values()),
        owner=owner,
        evidence=evidence,
        ambient=owned.AMBIENT_CHAIN in chains,
    )


def _owner(
    backend: str, chains: set[str], recorded: str, annotations: Mapping[str, str]
) -> tuple[str, str]:
    if backend == NFTABLES:
        more = f", recorded in {recorded}" if recorded else ", of which there is no record"
        return AGENT, f"table inet intercept-agent{more}"
    if recorded:
        return AGENT, f"recorded in {recorded}"
    if owned.AMBIENT_CHAIN in chains:
        return AMBIENT, f"chain {owned.AMBIENT_CHAIN}"
    injected = injected_names(annotations.get(STATUS, "")) or frozenset()
    for container, who in ((INIT, INIT), (VALIDATION, "istio-cni")):
        if container in injected:
            return who, f"annotation {STATUS} lists container {container}"
    return ISTIO, "chains named ISTIO_*, of which this agent has no record"


def _native(state: NamespaceState) -> Iterator[Loaded]:
    """Yield what others wrote for nf_tables itself: Istio's own nftables mode, and meshes."""
    found: dict[str, list[BaseChain]] = {}
    for chain in state.base_chains:
        owner = owner_of_table(chain.family, chain.table)
        if owner is not None and owner.name != "intercept-agent" and owner.role in STEERING:
            found.setdefault(owner.name, []).append(chain)
    hooks = {(hook.table, hook.entry): hook for hook in state.native}
    for name, chains in found.items():
        tables = sorted({f"{chain.family} {chain.table}" for chain in chains})
        known = [hooks.get((f"{chain.family} {chain.table}", chain.name)) for chain in chains]
        laid_out = {hook.table: hook.chains.values() for hook in known if hook is not None}
        walked = None not in known
        yield Loaded(
            backend=NFTABLES,
            families=tuple(sorted({chain.family for chain in chains})),
            rules=sum(len(one.rules) for each in laid_out.values() for one in each)
            if walked
            else sum(chain.rules for chain in chains),
            owner=NATIVE.get(name, by_name(name).title),
            evidence=f"nftables tables {', '.join(tables)}",
            walked=walked,
            ambient=name == "istio-ambient",
        )


def _meshes(state: NamespaceState) -> Iterator[Loaded]:
    for backend in (IPTABLES_NFT, IPTABLES_LEGACY):
        found: dict[str, list[tuple[str, str, int]]] = {}  # family, chain, rules
        for family, rules in state.of(backend).items():
            for table in rules.tables:
                for chain in table.chains:
                    owner = owner_of_chain(table.name, chain.name)
                    if owner is not None and owner.role is Role.MESH:
                        one = (family.value, chain.name, len(chain.rules))
                        found.setdefault(owner.title, []).append(one)
        for title, chains in found.items():
            yield Loaded(
                backend=backend,
                families=tuple(dict.fromkeys(family for family, _, _ in chains)),
                rules=sum(count for _, _, count in chains),
                owner=title,
                evidence=f"chain {chains[0][1]}",
            )
