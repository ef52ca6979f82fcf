"""All backends of this node, and which of them a namespace takes."""

from dataclasses import dataclass
from typing import Any

from agent.backends.ebpf import Ebpf
from agent.backends.iptables_legacy import IptablesLegacy
from agent.backends.iptables_nft import IptablesNft
from agent.backends.nftables import Nftables
from agent.backends.protocol import Backend
from agent.model import owned
from agent.model.enrolment import Enrolment
from agent.model.errors import EnvironmentLacks, InvalidSettings
from agent.model.ruleset import Rulesets
from agent.model.settings import Settings
from agent.model.state import (
    BACKENDS,
    EBPF,
    GUARD,
    IPTABLES_LEGACY,
    IPTABLES_NFT,
    NamespaceState,
)

GUARD_TABLE = "intercept-agent-guard"

_with_rules: tuple[Backend[Rulesets], ...] = (Nftables(), IptablesNft(), IptablesLegacy())
WITH_RULES: dict[str, Backend[Rulesets]] = {backend.name: backend for backend in _with_rules}
EBPF_BACKEND: Backend[Enrolment | None] = Ebpf()
ALL: dict[str, Backend[Any]] = {**WITH_RULES, EBPF: EBPF_BACKEND}
GUARD_BACKEND: Backend[Rulesets] = Nftables(GUARD, GUARD_TABLE)


@dataclass(frozen=True, slots=True)
class Choice:
    """A backend by name, and sentences on those that would have come first."""

    name: str
    passed_over: tuple[str, ...] = ()


def in_use(state: NamespaceState) -> list[str]:
    """Return the backends in which a capture is loaded: eBPF, then the one with most rules."""
    counts = {}
    for name in BACKENDS:
        rulesets = state.of(name).values()
        counts[name] = sum(owned.capture_of(r).rule_count() for r in rulesets)
    by_rules = sorted((n for n in BACKENDS if counts[n]), key=lambda n: -counts[n])
    enrolled = state.enrolment is not None and state.enrolment.settings is not None
    return [EBPF, *by_rules] if enrolled else by_rules


def choose(wanted: str, state: NamespaceState, settings: Settings) -> Choice:
    """Return the backend to use: the wanted one, or with `auto` the best that can do it here.

    auto keeps what the namespace already uses.

    Raises: InvalidSettings if the wanted one cannot honour them; EnvironmentLacks, with the reason
    for every backend that was considered, if the node lacks what it takes.
    """
    if wanted != "auto":
        if refusals := ALL[wanted].refusals(settings):
            raise InvalidSettings(tuple(f"backend {wanted}: {said}" for said in refusals))
        if lack := _lack(wanted, state):
            raise EnvironmentLacks(f"backend {wanted} cannot be used here: {lack}")
        return Choice(wanted)
    using = in_use(state)
    reasons: list[str] = []
    kept: list[str] = []
    for name in dict.fromkeys((*using, *BACKENDS)):
        reason = "; ".join(ALL[name].refusals(settings)) or _lack(name, state)
        if reason is None:
            return Choice(name, tuple(f"{name} takes the place of {why}" for why in kept))
        reasons.append(f"{name}: {reason}")
        if name in using:
            kept.append(reasons[-1])
    raise EnvironmentLacks(f"no backend can be used here: {'; '.join(reasons)}")


def _lack(name: str, state: NamespaceState) -> str | None:
    """Return why a backend cannot be used in this namespace, or None."""
    if state.user_namespace and name in (IPTABLES_NFT, IPTABLES_LEGACY):
        # net/netfilter/xt_owner.c, owner_check
        return (
            "the namespace belongs to a user namespace (hostUsers: false), and the kernel takes "
            "iptables' owner rules only from inside it; nftables' rules have no such limit"
        )
    return ALL[name].missing()
