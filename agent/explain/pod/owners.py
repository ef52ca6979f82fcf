"""What captures a namespace, in which backend, and who loaded it, each with its evidence. Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from agent.model import owned
from agent.model.annotations import STATUS, injected_names
from agent.model.pod import INIT
from agent.model.state import BACKENDS, IPTABLES_LEGACY, IPTABLES_NFT, NFTABLES, NamespaceState

AGENT = "this agent"
ISTIO = "istio-init or istio-cni"
AMBIENT = "Istio's node agent (ambient mode)"
AMBIENT_CHAIN = "ISTIO_PRERT"
VALIDATION = "istio-validation"  # the container that comes with istio-cni

# Chains and tables by which other meshes, and Istio's own nftables mode, are known.
CHAINS: Mapping[str, str] = {
    "PROXY_INIT_": "Linkerd",
    "KUMA_MESH_": "Kuma",
    "MESH_": "Kuma (an older version)",
    "CONSUL_PROXY_": "Consul",
    "OSM_PROXY_": "Open Service Mesh",
    "APPMESH_": "AWS App Mesh",
}
TABLES: Mapping[str, str] = {
    "istio-proxy-": f"{ISTIO} (Istio's own nftables mode)",
    "istio-ambient-": AMBIENT,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """One set of rules that captures. `walked` says whether a packet walk knows its rules."""

    backend: str
    families: tuple[str, ...]
    rules: int
    owner: str
    evidence: str
    walked: bool = True

    @property
    def ambient(self) -> bool:
        return self.owner == AMBIENT


def loaded(
    state: NamespaceState, *, chosen: str, recorded: str, annotations: Mapping[str, str] | None
) -> tuple[Loaded, ...]:
    """Return what captures a namespace.

    `chosen` is the backend that this agent takes here, `recorded` its record of the namespace (or
    empty), `annotations` those of the pod.
    """
    found = [_of_backend(state, name, chosen, recorded, annotations or {}) for name in BACKENDS]
    return (*(one for one in found if one is not None), *_native(state), *_meshes(state))


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
    owner, evidence = _owner(backend, chains, recorded if backend == chosen else "", annotations)
    return Loaded(
        backend=backend,
        families=tuple(family.value for family, count in counts.items() if count),
        rules=sum(counts.values()),
        owner=owner,
        evidence=evidence,
    )


def _owner(
    backend: str, chains: set[str], recorded: str, annotations: Mapping[str, str]
) -> tuple[str, str]:
    if AMBIENT_CHAIN in chains:
        return AMBIENT, f"chain {AMBIENT_CHAIN}"
    if backend == NFTABLES:
        more = f", recorded in {recorded}" if recorded else ", of which there is no record"
        return AGENT, f"table inet intercept-agent{more}"
    if recorded:
        return AGENT, f"recorded in {recorded}"
    injected = injected_names(annotations.get(STATUS, "")) or frozenset()
    for container, who in ((INIT, INIT), (VALIDATION, "istio-cni")):
        if container in injected:
            return who, f"annotation {STATUS} lists container {container}"
    return ISTIO, "chains named ISTIO_*, of which this agent has no record"


def _native(state: NamespaceState) -> Iterator[Loaded]:
    for prefix, owner in TABLES.items():
        chains = [c for c in state.base_chains if c.table.startswith(prefix)]
        if chains:
            names = sorted({f"{c.family} {c.table}" for c in chains})
            yield Loaded(
                backend=NFTABLES,
                families=tuple(sorted({c.family for c in chains})),
                rules=sum(c.rules for c in chains),
                owner=owner,
                evidence=f"nftables tables {', '.join(names)}",
                walked=False,
            )


def _meshes(state: NamespaceState) -> Iterator[Loaded]:
    for backend in (IPTABLES_NFT, IPTABLES_LEGACY):
        for prefix, owner in CHAINS.items():
            found = {
                family: [c for t in rules.tables for c in t.chains if c.name.startswith(prefix)]
                for family, rules in state.of(backend).items()
            }
            chains = [chain for listed in found.values() for chain in listed]
            if chains:
                yield Loaded(
                    backend=backend,
                    families=tuple(family.value for family, listed in found.items() if listed),
                    rules=sum(len(chain.rules) for chain in chains),
                    owner=owner,
                    evidence=f"chain {chains[0].name}",
                )
