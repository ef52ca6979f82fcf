"""How the rule model is laid out in a native nftables table: names, hooks, and the fork.

`nft_text` writes this layout and `nft_json` reads it, so both take it from here.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from agent.model.ruleset import BUILTIN_CHAINS, Family, Match, Rule

ALL_BITS = 0xFFFFFFFF
# Every id that a file can have: the last number means "no id". A full range would not be a match.
ANY_ID = "0-4294967294"
SOCKET, REST = "socket", "rest"

# Numbers of the protocols that iptables-save prints by name.
PROTOCOLS: Mapping[str, int] = {
    "icmp": 1,
    "igmp": 2,
    "tcp": 6,
    "udp": 17,
    "dccp": 33,
    "gre": 47,
    "esp": 50,
    "ah": 51,
    "ipv6-icmp": 58,
    "sctp": 132,
    "udplite": 136,
}

CT_STATES: Mapping[str, int] = {
    "INVALID": 1,
    "NEW": 8,
    "RELATED": 4,
    "ESTABLISHED": 2,
    "UNTRACKED": 64,
}


@dataclass(frozen=True, slots=True)
class Hook:
    """Where a base chain is attached."""

    type: str
    hook: str
    priority: int


def _hooks() -> dict[tuple[str, str], Hook]:
    # nat comes one before everybody else's (-100 and 100): the first chain that translates a
    # connection decides. All others stand where iptables has them.
    priorities = {"raw": -300, "mangle": -150, "filter": 0, "security": 50}
    found = {}
    for table, chains in BUILTIN_CHAINS.items():
        for chain in chains:
            if table == "nat":
                priority = -101 if chain in ("PREROUTING", "OUTPUT") else 99
                found[table, chain] = Hook("nat", chain.lower(), priority)
            else:
                # Only a route chain makes the kernel route again when mangle has set a mark.
                kind = "route" if (table, chain) == ("mangle", "OUTPUT") else "filter"
                found[table, chain] = Hook(kind, chain.lower(), priorities[table])
    return found


HOOKS: Mapping[tuple[str, str], Hook] = _hooks()


def base_name(table: str, chain: str) -> str:
    """Return the name of the base chain of a built-in chain."""
    return f"{table}-{chain}"


def chain_name(family: Family, table: str, chain: str) -> str:
    """Return the name of the regular chain that holds the rules of a chain of the model."""
    return f"v{family.version}-{table}-{chain}"


_NAME = re.compile(r"v([46])-([a-z]+)-([^/]+)(?:/(socket|rest))?")


def model_place(name: str) -> tuple[Family, str, str, str] | None:
    """Return family, table, chain and part ("" is the chain itself) of a regular chain's name.

    None if `chain_name` could not have made it.
    """
    found = _NAME.fullmatch(name)
    if not found:
        return None
    return Family(f"ipv{found[1]}"), found[2], found[3], found[4] or ""


# --- packets with and without a socket -----------------------------------------------------------


def without_socket(rules: Iterable[Rule]) -> tuple[Rule, ...]:
    """Return what is left of rules for a packet without a socket, by the semantics of xt_owner.

    An owner condition never holds for it and a negated one always does.
    """
    kept = []
    for rule in rules:
        owners = tuple(rule.options("owner"))
        if all(option.negated for option in owners):
            kept.append(replace(rule, matches=_others(rule, "owner")) if owners else rule)
    return tuple(kept)


def _others(rule: Rule, module: str) -> tuple[Match, ...]:
    return tuple(match for match in rule.matches if match.module != module)


def _needs_fork(rule: Rule) -> bool:
    owners = tuple(rule.options("owner"))
    return bool(owners) and all(option.negated for option in owners)


def fork(rules: tuple[Rule, ...]) -> tuple[tuple[Rule, ...], tuple[Rule, ...], tuple[Rule, ...]]:
    """Split into rules before, from the first to the last that need the fork, and after."""
    at = [index for index, rule in enumerate(rules) if _needs_fork(rule)]
    if not at:
        return rules, (), ()
    first, end = at[0], at[-1] + 1
    return rules[:first], rules[first:end], rules[end:]
