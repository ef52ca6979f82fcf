"""Walks a packet through what is loaded in a namespace now. Reads only."""

from collections.abc import Sequence
from functools import partial

from agent.backends import registry
from agent.backends.nftables import TABLE
from agent.explain.branch import Layer
from agent.explain.enrolled import walk_enrolled
from agent.explain.walk import walk
from agent.model.host import Host
from agent.model.packet import Packet, Trace
from agent.model.state import GUARD, NFTABLES, NamespaceState


def trace(state: NamespaceState, host: Host, packet: Packet, *, inbound: bool) -> Trace:
    """Return the walk of a packet through every loaded set of rules, and eBPF programs. Pure."""
    native = state.native
    if state.enrolment is not None and (settings := state.enrolment.in_force) is not None:
        rules = partial(walk, layers(state), native=native)
        return walk_enrolled(settings, rules, packet, host, inbound=inbound)
    return walk(layers(state), packet, host, inbound=inbound, native=native)


def not_walked(state: NamespaceState) -> tuple[str, ...]:
    """Return sentences about loaded rules that the walk leaves out: a verdict holds without them.

    They stand at hooks that it does not know (ingress), or in tables that it cannot take apart.
    """
    ours = {TABLE, registry.GUARD_TABLE}
    walked = {(hook.table, hook.entry) for hook in state.native}
    native = (
        f"nftables {base.family} table {base.table}, chain {base.name} ({base.hook}, priority "
        f"{base.priority}, policy {base.policy}) was not walked: {base.rules} rules"
        for base in state.base_chains
        if base.family in ("ip", "ip6", "inet", "netdev")
        and (base.rules or base.policy != "accept")
        and not (base.family == "inet" and base.table in ours)
        and not base.is_xtables
        and (f"{base.family} {base.table}", base.name) not in walked
    )
    return (*state.unreadable, *native)


def layers(state: NamespaceState) -> Sequence[Layer]:
    """Return the loaded sets of rules in the order in which the kernel calls them.

    Our nftables table stands at priority -101, before everybody's. Between the iptables flavours
    the order is that of their making (kernel fact 11), which cannot be read back.
    """
    order = (NFTABLES, GUARD, *(n for n in registry.WITH_RULES if n != NFTABLES))
    return [Layer(name, ruleset) for name in order for ruleset in state.of(name).values()]
