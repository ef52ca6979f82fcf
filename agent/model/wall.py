"""The wall that stands while a capture is exchanged: new connections are dropped, both ways.

It needs no exemptions, since a first packet that is dropped is sent again within a second and the
wall stands for milliseconds. Established connections pass, so nothing that runs is cut.
"""

from functools import cache

from agent.model import owned
from agent.model.ruleset import (
    Family,
    Rule,
    Rulesets,
    Target,
    match,
    ruleset_of,
)
from agent.model.state import NamespaceState

# Known to `owned` by its prefix, so a wall that was left behind goes with the next change.
CHAIN = "ISTIO_GUARD"

_DROP_NEW = Rule((match("conntrack", "--ctstate", "NEW"),), Target("DROP"))
_JUMP = Rule((), Target(CHAIN))


@cache
def rulesets(families: tuple[Family, ...]) -> Rulesets:
    """Return the wall for these families, the same object for the same families."""
    hooks = {"INPUT": [_JUMP], "OUTPUT": [_JUMP], CHAIN: [_DROP_NEW]}
    return {family: ruleset_of(family, {"filter": hooks}) for family in families}


def families(*states: NamespaceState) -> tuple[Family, ...]:
    """Return the families in which anything is loaded in any state; others are left alone."""
    loaded = {f for state in states for found in state.loaded.values() for f in found}
    return tuple(family for family in Family if family in loaded)


def merged(loaded: Rulesets, wanted: tuple[Family, ...]) -> Rulesets:
    """Return what is loaded with the wall ahead of it in the filter table."""
    return owned.merged(loaded, rulesets(wanted))
