"""What a scan says: one value for each thing that somebody left behind. Pure."""

from dataclasses import dataclass, field
from enum import StrEnum

from agent.model.plan import Route
from agent.model.ruleset import Family, Rule


class Kind(StrEnum):
    """What is wrong. Stable: metrics, `--only` and scripts go by these words."""

    STALE_CAPTURE = "stale-capture"
    BLACKHOLE = "blackhole"
    PARTIAL_CAPTURE = "partial-capture"
    KUBE_PROXY = "kube-proxy"
    FOREIGN_MESH = "foreign-mesh"
    FOREIGN_CNI = "foreign-cni"
    MIXED_BACKENDS = "mixed-backends"
    ROUTE = "route"
    EBPF = "ebpf"
    CNI_CONFIG = "cni-config"
    HOST_RULES = "host-rules"
    UNREADABLE = "unreadable"


class Severity(StrEnum):
    """`critical`: traffic goes wrong now, or will. `warning`: it may. `info`: it is only untidy."""

    INFO = "info"
    WARNING = "warning"
    CRITICAL = "critical"

    @property
    def rank(self) -> int:
        return list(Severity).index(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """Where it is. Lists are joined by commas; empty means that it does not apply."""

    netns: str = ""
    pod: str = ""
    family: str = ""
    backend: str = ""
    table: str = ""

    def document(self) -> dict[str, str | None]:
        names = ("netns", "pod", "family", "backend", "table")
        return {name: getattr(self, name) or None for name in names}


ChainRef = tuple[str, Family, str, str]
"""A chain: backend, family, table, chain."""

NftTable = tuple[str, str]
"""A table of nf_tables: family and name, as nft has them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Takes:
    """What `clean` takes away for a finding: what is named here and the rules that lead to it.

    `capture` stands for everything that a capture of Istio's kind consists of. `rules` are rules of
    built-in chains, by the chain that they stand in; each stands for all that are equal.
    """

    capture: bool = False
    chains: frozenset[ChainRef] = frozenset()
    rules: frozenset[tuple[ChainRef, Rule]] = frozenset()
    tables: frozenset[NftTable] = frozenset()
    routes: tuple[Route, ...] = ()
    sets: frozenset[str] = frozenset()
    links: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        named = (self.chains, self.rules, self.tables, self.sets, self.links, self.routes)
        return self.capture or any(named)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One leftover, with what was seen, what it means and the command that ends it."""

    kind: Kind
    severity: Severity
    where: Where
    objects: tuple[str, ...]
    owner: str
    evidence: tuple[str, ...]
    explanation: str
    fix: str
    takes: Takes = field(default=Takes())

    def document(self) -> dict[str, object]:
        return {
            "kind": self.kind.value,
            "severity": self.severity.value,
            "where": self.where.document(),
            "objects": list(self.objects),
            "owner": self.owner,
            "evidence": list(self.evidence),
            "explanation": self.explanation,
            "fix": self.fix,
        }
