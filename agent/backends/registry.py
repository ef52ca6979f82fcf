"""All backends of this node, and which of them a namespace takes."""

from agent.backends.iptables_legacy import IptablesLegacy
from agent.backends.iptables_nft import IptablesNft
from agent.backends.nftables import Nftables
from agent.backends.protocol import Backend
from agent.model import owned
from agent.model.errors import EnvironmentLacks
from agent.model.state import BACKENDS, EBPF, GUARD, NamespaceState

GUARD_TABLE = "intercept-agent-guard"

_backends: tuple[Backend, ...] = (Nftables(), IptablesNft(), IptablesLegacy())
ALL: dict[str, Backend] = {backend.name: backend for backend in _backends}
GUARD_BACKEND: Backend = Nftables(GUARD, GUARD_TABLE)


def in_use(state: NamespaceState) -> list[str]:
    """Return the backends in which a capture is loaded, the one with most rules first."""
    counts = {}
    for name in BACKENDS:
        rulesets = state.of(name).values()
        counts[name] = sum(owned.capture_of(r).rule_count() for r in rulesets)
    return sorted((n for n in BACKENDS if counts[n]), key=lambda n: -counts[n])


def choose(wanted: str, state: NamespaceState) -> Backend:
    """Return the backend to use: the wanted one, or with `auto` the best that the node can do.

    auto keeps what the namespace already uses.

    Raises: EnvironmentLacks with the reason for every backend that was considered.
    """
    if wanted == EBPF:
        raise EnvironmentLacks(
            "the ebpf backend is not part of this version; use nftables, iptables-nft or "
            "iptables-legacy"
        )
    if wanted != "auto":
        if reason := ALL[wanted].missing():
            raise EnvironmentLacks(f"backend {wanted} cannot be used here: {reason}")
        return ALL[wanted]
    reasons = []
    for name in (*in_use(state), *BACKENDS):
        reason = ALL[name].missing()
        if reason is None:
            return ALL[name]
        reasons.append(f"{name}: {reason}")
    raise EnvironmentLacks(f"no backend can be used here: {'; '.join(dict.fromkeys(reasons))}")
