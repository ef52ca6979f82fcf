"""Reads everything in a namespace that a capture can be made of. Leaves no trace.

The rules are read by the backends only if they are not known yet: the kernel's own dumps are
digested first, and equal digests mean equal rules (agent/kernel/filters.py). So looking at a pod
again, or at one that holds the same as another, costs next to nothing.
"""

import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from agent.backends import registry
from agent.backends.nftables import TABLE
from agent.backends.session import Session
from agent.formats import nft_json
from agent.formats.nft_native import native_hooks
from agent.kernel import nft, routing, user_ids
from agent.model import owned
from agent.model.errors import EnvironmentLacks, StateUnreadable
from agent.model.native import NativeHook
from agent.model.ruleset import Rulesets
from agent.model.state import EBPF, GUARD, BaseChain, IstioTable, NamespaceState
from agent.model.wanted import captures

# How long others may work before each look: a tool that restores its rules in a loop needs some
# milliseconds at a time.
PAUSES_S = (0, 0, 0.02, 0.05, 0.1, 0.2, 0.4)
REMEMBERED = 128


@dataclass(frozen=True, slots=True)
class _Filters:
    """All packet-filter rules of a namespace, as the backends read them."""

    loaded: Mapping[str, Rulesets]
    base_chains: tuple[BaseChain, ...]
    unreadable: tuple[str, ...]
    native: tuple[NativeHook, ...]
    istio_tables: tuple[IstioTable, ...]


_seen: OrderedDict[bytes, _Filters] = OrderedDict()


def observe(session: Session) -> NamespaceState:
    """Return what the namespace holds now.

    An iptables flavour whose tables cannot be read (native rules in them, or the tool missing), or
    eBPF programs of another version, are named in `unreadable`; nothing may then be written there.

    Raises: StateUnreadable if anything else cannot be read.
    """
    filters = _filters(session)
    try:
        routes = routing.read_routes(session.rtnl)
    except OSError as error:
        raise StateUnreadable(f"cannot read the routes: {error.strerror}") from error
    unreadable = filters.unreadable
    enrolment = None
    try:
        enrolment = registry.EBPF_BACKEND.read(session)
    except StateUnreadable as error:
        unreadable = (*unreadable, f"{EBPF}: {error}")
    return NamespaceState(
        loaded=filters.loaded,
        enrolment=enrolment,
        routes=routes,
        istio_tables=filters.istio_tables,
        base_chains=filters.base_chains,
        unreadable=unreadable,
        native=filters.native,
        user_namespace=user_ids.owned_by_others(session.netns.fd),
    )


def hidden(session: Session, have: NamespaceState) -> tuple[str, ...]:
    """Return sentences about captures that the kernel holds and nobody here can show or change.

    Raises: StateUnreadable.
    """
    if not have.unreadable and nft.missing() is None:  # asking the session would open its door
        return ()
    try:
        signs = session.eye.capture_signs(owned.CHAIN_PREFIX, TABLE)
    except OSError as error:
        raise StateUnreadable(f"cannot read the loaded rules: {error.strerror}") from error
    why = dict(reason.split(": ", 1) for reason in have.unreadable)
    return tuple(
        f"a capture is loaded in {name}, which cannot be read here: "
        + why.get(name, "neither libnftables.so.1 nor nft is installed (package nftables)")
        for name in sorted(signs - set(captures(have)))
    )


def _filters(session: Session) -> _Filters:
    """Return the rules, read anew while somebody else changes them, or known by their digest."""
    previous: _Filters | None = None
    for pause in PAUSES_S:
        time.sleep(pause)
        session.forget()
        digest = _digest(session)
        known = _seen.get(digest)
        if known is not None:
            _seen.move_to_end(digest)
            return known
        found = _read(session)
        if _digest(session) == digest:
            if not found.unreadable:  # a missing tool may be installed, with the rules unchanged
                _seen[digest] = found
            while len(_seen) > REMEMBERED:
                _seen.popitem(last=False)
            return found
        if found == previous:
            return found  # only numbers move that traffic moves, in a kind of rule not known here
        previous = found
    raise StateUnreadable("the rules keep changing while they are read; is another tool at work?")


def _digest(session: Session) -> bytes:
    try:
        return session.eye.digest()
    except OSError as error:
        raise StateUnreadable(f"cannot read the loaded rules: {error.strerror}") from error


def _read(session: Session) -> _Filters:
    loaded: dict[str, Rulesets] = {}
    unreadable = []
    for name, backend in (*registry.WITH_RULES.items(), (GUARD, registry.GUARD_BACKEND)):
        try:
            found = backend.read(session)
        except (StateUnreadable, EnvironmentLacks) as error:
            if not name.startswith("iptables"):
                raise
            unreadable.append(f"{name}: {error}")
            continue
        if found:
            loaded[name] = found
    document = {"nftables": session.nft_ruleset()}
    try:
        chains = nft_json.base_chains(document)
        native = native_hooks(document, frozenset({TABLE, registry.GUARD_TABLE}))
    except nft_json.NftJsonError as error:
        raise StateUnreadable(f"cannot list nf_tables: {error}") from error
    return _Filters(loaded, tuple(chains), tuple(unreadable), native, tuple(_istio_tables(session)))


def _istio_tables(session: Session) -> Iterator[IstioTable]:
    """Yield the tables of Istio's own nftables mode, with what makes them again."""
    for item in session.nft_ruleset():
        table = item.get("table")
        if table and table["family"] == "inet" and table["name"] in owned.ISTIO_TABLES:
            name = str(table["name"])
            yield IstioTable(name, session.require_nft().list_table("inet", name))
