"""Whose a policy rule, a local route or an address on lo is. Pure."""

from collections.abc import Sequence

from agent.model import catalogue
from agent.model.owner import Owner
from agent.model.plan import PASSTHROUGH, LocalRoute, PolicyRule, Route

# Numbers that everybody takes who follows a guide: a route there says nothing of who made it.
COMMON_TABLES = frozenset({100})


def owner_of(route: Route, routes: Sequence[Route]) -> Owner | None:
    """Return whose an entry is; `routes` are all entries of the namespace.

    A route table belongs to the owner of the rules that lead to it, and to nobody known if a rule
    of somebody else does. Without any rule its number alone tells, unless that is a common one.
    """
    if isinstance(route, PolicyRule):
        return catalogue.owner_of_policy(route.mark, route.mask, route.table)
    if isinstance(route, LocalRoute):
        leading = [
            catalogue.owner_of_policy(r.mark, r.mask, r.table)
            for r in routes
            if isinstance(r, PolicyRule) and (r.family, r.table) == (route.family, route.table)
        ]
        if leading:
            return leading[0] if all(owner is leading[0] for owner in leading) else None
        if route.table in COMMON_TABLES:
            return None
        return catalogue.owner_of_route_table(route.table)
    return catalogue.by_name("istio") if route == PASSTHROUGH else None
