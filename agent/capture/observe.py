"""Reads everything in a namespace that a capture can be made of. Leaves no trace."""

from agent.backends import registry
from agent.backends.session import Session
from agent.formats import nft_json
from agent.kernel import routing
from agent.model.errors import StateUnreadable
from agent.model.ruleset import Rulesets
from agent.model.state import BaseChain, NamespaceState


def observe(session: Session) -> NamespaceState:
    """Return what the namespace holds now.

    An iptables-nft table that its own tool cannot print, because somebody put native rules into it,
    is reported in `unreadable`; nothing may then be written through iptables-nft.

    Raises: StateUnreadable if anything else cannot be read, EnvironmentLacks if a tool is missing.
    """
    session.forget()
    loaded: dict[str, Rulesets] = {}
    unreadable = []
    for name, backend in (*registry.ALL.items(), (registry.GUARD, registry.GUARD_BACKEND)):
        try:
            found = backend.read(session)
        except StateUnreadable as error:
            if name != "iptables-nft":
                raise
            unreadable.append(f"{name}: {error}")
            continue
        if found:
            loaded[name] = found
    return NamespaceState(
        loaded=loaded,
        routes=session.netns.run(routing.read_routes),
        base_chains=_base_chains(session),
        unreadable=tuple(unreadable),
    )


def _base_chains(session: Session) -> tuple[BaseChain, ...]:
    return tuple(nft_json.base_chains({"nftables": session.nft_ruleset()}))
