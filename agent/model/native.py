"""Chains that others hooked into nf_tables themselves, laid out for a packet walk."""

from collections.abc import Mapping
from dataclasses import dataclass

from agent.model.ruleset import Chain, Family


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeHook:
    """One base chain as packets of one family meet it, with all chains of its table.

    `table` is family and name (`inet fw`); `entry` names the base chain in `chains`. `kind` is the
    table of iptables that works alike: nat, mangle (routed anew by mark) or filter. The rules are
    those of nft in the words of the model; what has no such word is a match or a target that nobody
    knows.
    """

    family: Family
    table: str
    entry: str
    kind: str
    hook: str
    priority: int
    chains: Mapping[str, Chain]
