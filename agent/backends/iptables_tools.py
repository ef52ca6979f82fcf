"""What both iptables flavours share: their tools' names and the reading of their save text."""

from collections.abc import Mapping, Sequence
from functools import lru_cache

from agent.backends.session import Session
from agent.formats import iptables_save
from agent.kernel import tools
from agent.model.errors import StateUnreadable
from agent.model.ruleset import Family, Ruleset

PREFIX = {Family.IPV4: "iptables", Family.IPV6: "ip6tables"}


def tool_name(family: Family, flavour: str, action: str) -> str:
    return f"{PREFIX[family]}-{flavour}-{action}"


def require_tool(family: Family, flavour: str, action: str) -> str:
    return tools.require(tool_name(family, flavour, action), "iptables")


def missing_tool(flavour: str, actions: Sequence[str]) -> str | None:
    """Return a sentence naming the first tool that is not installed, or None."""
    for family in Family:
        for action in actions:
            name = tool_name(family, flavour, action)
            if tools.find(name) is None:
                return f"{name} is not installed (package iptables)"
    return None


def read_saves(session: Session, flavour: str, families: Sequence[Family]) -> dict[Family, Ruleset]:
    """Return the rulesets of these families, both tools running at the same time.

    Raises: StateUnreadable if a tool fails or prints that it cannot print a table.
    """
    calls = [tools.Call((require_tool(family, flavour, "save"),)) for family in families]
    found = {}
    for family, done in zip(families, tools.run(session.netns, calls), strict=True):
        if done.status:
            raise StateUnreadable(f"cannot read the loaded rules: {done.failure()}")
        found[family] = parse_save(done.stdout, family, done.call.command[0])
    return found


def read_printable(
    session: Session, flavour: str, families: Sequence[Family]
) -> tuple[dict[Family, Ruleset], tuple[tuple[Family, str, str], ...]]:
    """Return what the tools can print, and (family, table, why) of what they cannot.

    A tool says of a table that native rules are in it by a comment, exits 0 and goes on (field
    report 34); an empty table name stands for all of them.
    """
    calls = [tools.Call((require_tool(family, flavour, "save"),)) for family in families]
    found, lacking = {}, []
    for family, done in zip(families, tools.run(session.netns, calls), strict=True):
        tool = done.call.command[0].rpartition("/")[2]
        lacking += [
            (family, table, f"{tool} cannot print it: it holds rules that only nft can write")
            for table in iptables_save.incompatible(done.stdout)
        ]
        if done.status:
            lacking.append((family, "", done.failure()))
            continue
        try:
            text = iptables_save.without_incompatible(done.stdout)
            found[family] = iptables_save.parse(text, family)
        except iptables_save.SaveTextError as error:
            lacking.append((family, "", f"{tool} printed what cannot be understood: {error}"))
    return found, tuple(lacking)


def parse_save(text: str, family: Family, tool: str) -> Ruleset:
    try:
        return _parse(text, family)
    except iptables_save.SaveTextError as error:
        raise StateUnreadable(f"{tool} printed what cannot be understood: {error}") from error


@lru_cache(maxsize=256)
def _parse(text: str, family: Family) -> Ruleset:
    """Most pods of a node hold the same rules, and a check reads them again and again."""
    return iptables_save.parse(text, family)


def without_empty(rulesets: Mapping[Family, Ruleset]) -> dict[Family, Ruleset]:
    return {family: ruleset for family, ruleset in rulesets.items() if ruleset.tables}
