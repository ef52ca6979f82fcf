"""The file that a removal is saved to before it is made, and what is read back from it.

It is text in sections, one for each tool that can load it, and each is what that tool takes:
`iptables-restore --noflush`, `nft -f`, `ipset restore`, and commands for a shell. What stands
around them are comments to all of these, so a file of one section can be given to its tool as it
is; beside a file of several stands one for each.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from agent.formats.iptables_save import SaveTextError, parse_rule, render_rule
from agent.kernel import files
from agent.kernel.netns import Netns, NetnsId, own_id
from agent.leftovers.removal import Cut, Removal, ordered
from agent.model.errors import InvalidSettings
from agent.model.plan import LoopbackAddress, PolicyRule, Route
from agent.model.ruleset import Chain, Family, Rule, Ruleset, Table
from agent.model.settings import dump
from agent.model.state import EBPF

MAX_BYTES = 64 << 20  # 200,000 rules
FIRST_LINE = "# intercept-agent clean: backup, format 1"
NAMESPACE = "# namespace "
SECTION = "# section "
LOADERS = {
    "iptables-nft": "iptables-nft-restore --noflush",
    "ip6tables-nft": "ip6tables-nft-restore --noflush",
    "iptables-legacy": "iptables-legacy-restore --noflush",
    "ip6tables-legacy": "ip6tables-legacy-restore --noflush",
    "nft": "nft -f",
    "ipset": "ipset restore",
    EBPF: f"intercept-agent apply --netns NS --backend {EBPF} --settings",
    "sh": "sh",
}
INSERT = re.compile(r"-I (\S+) (\d+) ")


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a backup: the tool that it is for, and what that tool takes."""

    tool: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """What was taken from one namespace.

    `birth` tells it from every other one (`Netns.birth`); None where the kernel, or the agent that
    wrote the file, knew of none. The node's own is known by `id`, which outlives a reboot.
    """

    name: str
    id: NetnsId
    birth: str | None
    host: bool
    sections: tuple[Section, ...]

    def is_of(self, netns: Netns) -> bool:
        """Tell whether this was taken from that namespace, and not from one with its number."""
        if netns.id != self.id:
            return False
        of_node = self.host and netns.id == own_id()
        return of_node or (self.birth is not None and self.birth == netns.birth())


def sections(removed: Removal, sets: str, links: Sequence[str]) -> tuple[Section, ...]:
    """Return a removal as sections, in the order in which they have to be loaded.

    `sets` is what `ipset save` says of the sets, `links` the commands that make the interfaces.
    """
    found = [Section("ipset", sets)] if sets else []
    tools: dict[str, str] = {}
    for cut in removed.cuts:
        tools[cut.tool] = tools.get(cut.tool, "") + "".join(f"{line}\n" for line in _restore(cut))
    found += (Section(tool, text) for tool, text in tools.items())
    if removed.tables:
        found.append(Section("nft", "".join(table.text for table in removed.tables)))
    commands = [*links, *(command_of(route) for route in reversed(removed.routes))]
    if commands:
        found.append(Section("sh", "".join(f"{line}\n" for line in commands)))
    if removed.enrolment and removed.enrolment.settings:
        text = json.dumps(dump(removed.enrolment.settings))
        found.append(Section(EBPF, f"{text}\n"))
    return tuple(found)


def _restore(cut: Cut) -> Iterator[str]:
    yield f"*{cut.table}"
    for whole in cut.chains:
        yield f":{whole.name} - [0:0]"
    for whole in reversed(ordered(cut.chains)):
        yield from (render_rule(whole.name, rule) for rule in whole.rules)
    for chain, position, rule in cut.rules:
        line = render_rule(chain, rule)
        if (chain, position) not in cut.tails:
            line = line.replace(f"-A {chain} ", f"-I {chain} {position} ", 1)
        yield line
    yield "COMMIT"


def command_of(route: Route) -> str:
    """Return the command that makes an entry again, as it was.

    An address is taken without a trial (nodad): a proxy could not bind to it meanwhile.
    """
    if isinstance(route, LoopbackAddress):
        return f"{route.command()} nodad"
    if isinstance(route, PolicyRule) and route.priority is not None:
        plain = replace(route, priority=None).command()
        return plain.replace(" add ", f" add pref {route.priority} ", 1)
    return route.command()


# --- the file -------------------------------------------------------------------------------------


def render(saved: Sequence[Saved]) -> str:
    """Return the text of a backup."""
    lines = [FIRST_LINE, "# `intercept-agent clean --restore FILE` puts back what is in it."]
    for each in saved:
        about = {
            "name": each.name,
            "dev": each.id.dev,
            "ino": each.id.ino,
            "birth": each.birth,
            "host": each.host,
        }
        lines.append(NAMESPACE + json.dumps(about))
        for section in each.sections:
            lines.append(f"{SECTION}{section.tool}: {LOADERS[section.tool]}")
            lines.append(section.text.rstrip("\n"))
    return "".join(f"{line}\n" for line in lines)


def write(path: Path, saved: Sequence[Saved]) -> tuple[str, ...]:
    """Write a backup, and beside one of several sections a file for each; return their paths.

    Nothing may be removed before this has returned: then all of it is on the disk.

    Raises: OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    parts = [(each.name, section) for each in saved for section in each.sections]
    written = [path]
    files.replace(path, render(saved).encode(errors="surrogateescape"))
    if len(parts) > 1:
        for number, (name, section) in enumerate(parts, start=1):
            plain = re.sub(r"[^\w.-]", "_", name)
            part = path.with_name(f"{path.stem}.{number}.{plain}.{section.tool}{path.suffix}")
            files.replace(part, section.text.encode(errors="surrogateescape"))
            written.append(part)
    for each in (*written, path.parent):
        _to_disk(each)
    return tuple(str(each) for each in written)


def _to_disk(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def read(path: Path) -> tuple[Saved, ...]:
    """Return what a backup holds.

    Raises: InvalidSettings if it is none; OSError.
    """
    with path.open("rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise InvalidSettings((f"{path} is no backup of `clean`: it is larger than one can be",))
    # Only at line feeds: a comment may hold all else that Unicode calls the end of a line.
    lines = data.decode(errors="surrogateescape").removesuffix("\n").split("\n")
    if lines[0] != FIRST_LINE:
        raise InvalidSettings((f"{path} is no backup of `clean`: its first line is not ours",))
    found: list[Saved] = []
    for number, line in enumerate(lines[1:], start=2):
        try:
            if line.startswith(NAMESPACE):
                found.append(_namespace(json.loads(line.removeprefix(NAMESPACE))))
            elif line.startswith(SECTION):
                tool = line.removeprefix(SECTION).partition(":")[0]
                if tool not in LOADERS:
                    raise ValueError(f"no tool {tool} is known")
                last = found[-1]
                found[-1] = replace(last, sections=(*last.sections, Section(tool, "")))
            elif found and found[-1].sections:
                *before, section = found[-1].sections
                if section.tool == "sh" and not line.startswith("ip "):
                    raise ValueError(f"{line!r} is no command of ip")
                longer = replace(section, text=f"{section.text}{line}\n")
                found[-1] = replace(found[-1], sections=(*before, longer))
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise InvalidSettings((f"{path}, line {number}: {error}",)) from error
    return tuple(found)


def _namespace(about: Mapping[str, object]) -> Saved:
    birth = about.get("birth")
    return Saved(
        name=str(about["name"]),
        id=NetnsId(int(str(about["dev"])), int(str(about["ino"]))),
        birth=None if birth is None else str(birth),
        host=bool(about["host"]),
        sections=(),
    )


# --- back into the model --------------------------------------------------------------------------


def put_back(have: Ruleset, text: str) -> Ruleset:
    """Return a ruleset with everything that an iptables section holds in it.

    Chains become what they were. Rules of other chains are put where they were, as often as they
    are missing: what is there already, or was put back by hand, is not put back twice.

    Raises: InvalidSettings for text that is none of a section.
    """
    want, table = have, ""
    pending: list[tuple[str, int, Rule]] = []
    chains: dict[str, list[Rule]] = {}
    for line in text.split("\n"):
        try:
            if line.startswith("*"):
                table, chains, pending = line[1:], {}, []
            elif line.startswith(":"):
                chains[line[1:].split(" ")[0]] = []
            elif line == "COMMIT":
                want, table = _merged(want, table, chains, pending), ""
            elif line and not line.startswith("#"):
                found = INSERT.match(line)
                position = int(found[2]) if found else 0
                name, rule = parse_rule(INSERT.sub(r"-A \1 ", line, count=1))
                if name in chains:
                    chains[name].append(rule)
                else:
                    pending.append((name, position, rule))
        except (SaveTextError, IndexError) as error:
            raise InvalidSettings(
                (f"the backup holds what is no rule: {error}: {line!r}",)
            ) from None
    if table:
        raise InvalidSettings((f"the backup is cut short: its table {table} has no COMMIT",))
    return want


def _merged(
    have: Ruleset,
    table: str,
    chains: Mapping[str, Sequence[Rule]],
    pending: Sequence[tuple[str, int, Rule]],
) -> Ruleset:
    known = have.table(table) or Table(table)
    made = {chain.name: chain for chain in known.chains}
    for name, rules in chains.items():
        made[name] = Chain(name, None, tuple(rules))
    for name in dict.fromkeys(name for name, _, _ in pending):
        chain = made.get(name, Chain(name, "ACCEPT"))
        wanted = [(position, rule) for n, position, rule in pending if n == name]
        made[name] = replace(chain, rules=_woven(chain.rules, wanted))
    return have.with_chains(table, made.values())


def _woven(there: Sequence[Rule], wanted: Sequence[tuple[int, Rule]]) -> tuple[Rule, ...]:
    rules = list(there)
    left = list(there)
    for position, rule in wanted:
        if rule in left:
            left.remove(rule)
            continue
        rules.insert(position - 1 if position else len(rules), rule)
    return tuple(rules)


def family_of(tool: str) -> Family:
    return Family.IPV6 if tool.startswith("ip6") else Family.IPV4
