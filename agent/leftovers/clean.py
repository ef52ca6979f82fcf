"""Takes leftovers out of a namespace, and puts them back: only what was shown, and all of it.

Each tool's part is one transaction (nf_tables as a whole, iptables by table). In front of them
stands a backup on the disk, so whoever is killed on the way can run the same again, or restore.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from agent.backends import registry
from agent.backends.protocol import Step
from agent.backends.session import Session, reading, writing
from agent.kernel import routing, tools
from agent.kernel.netns import Netns
from agent.leftovers import backup
from agent.leftovers.backup import Saved, Section
from agent.leftovers.finding import Finding, Kind, Takes
from agent.leftovers.look import Seen, look
from agent.leftovers.node import Node
from agent.leftovers.removal import FLAVOURS, Removal, removal
from agent.leftovers.scan import Subject, judge
from agent.model.enrolment import enrolment
from agent.model.errors import (
    AgentError,
    EnvironmentLacks,
    KernelRejected,
    RollbackFailed,
    RolledBack,
)
from agent.model.ruleset import Family, Ruleset, Rulesets
from agent.model.settings import parse
from agent.model.state import EBPF
from agent.model.wanted import Known

THERE = ("File exists", "already assigned")  # what `ip` says, depending on its version

BeforeStep = Callable[[Step], None]
KnownOf = Callable[[Netns], Known]


def no_hook(_step: Step) -> None:
    """Do nothing before a step; tests put their faults here."""


class Moved(EnvironmentLacks):
    """What is there is not what was shown any more; nothing was touched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """What is to go from one namespace, what was found there, and how to get it back."""

    subject: Subject
    findings: tuple[Finding, ...]
    removal: Removal
    saved: Saved


def prepare(
    subject: Subject, node: Node, *, kinds: frozenset[Kind], known_of: KnownOf
) -> Planned | None:
    """Return what a clean of one namespace takes away, or None if it has nothing to take.

    Raises: StateUnreadable, NamespaceRefused, EnvironmentLacks where something could not be saved.
    """
    with _open(subject) as netns, reading(netns) as session:
        planned = _plan(session, subject, node, kinds, known_of(netns))
        if not planned.removal.lines():
            return None
        sections = _saved(session, planned.removal)
        return replace(planned, saved=replace(planned.saved, sections=sections))


def perform(
    planned: Planned,
    node: Node,
    *,
    kinds: frozenset[Kind],
    known_of: KnownOf,
    before_step: BeforeStep = no_hook,
) -> None:
    """Make a removal that was shown.

    Raises: Moved if what is there now is something else (nothing was touched), RolledBack if a
    write was refused (everything was put back), RollbackFailed if that did not work either.
    """
    subject = planned.subject
    with _open(subject) as netns, writing(netns) as session:
        if netns.birth() != planned.saved.birth:
            raise _another(subject)
        now = _plan(session, subject, node, kinds, known_of(netns)).removal
        if now.lines() != planned.removal.lines():
            raise Moved(
                f"{subject.place.name}: what is there is not what was shown any more, so nothing "
                "was removed; look again and decide anew"
            )
        try:
            for step in _steps(session, now):
                before_step(step)
                step.run()
            _verify(session, subject, planned)
        except (AgentError, TimeoutError, KeyboardInterrupt) as error:
            _undo(session, planned, error)


def restore(subject: Subject, saved: Saved, *, before_step: BeforeStep = no_hook) -> bool:
    """Put back what was taken from a namespace; return whether anything was missing.

    Raises: KernelRejected, naming what was refused; what was put back before stays, and the same
    can be run again.
    """
    with _open(subject) as netns, writing(netns) as session:
        steps = list(_restore_steps(session, saved.sections))
        for step in steps:
            before_step(step)
            step.run()
        if left := list(_restore_steps(session, saved.sections)):
            raise KernelRejected(f"what was put back is not there: {left[0].what}")
    return bool(steps)


def _open(subject: Subject) -> Netns:
    netns = Netns.open(subject.place.path)
    if netns.id != subject.place.id:
        netns.close()
        raise _another(subject)
    return netns


def _another(subject: Subject) -> Moved:
    return Moved(f"{subject.place.name} is another namespace now; nothing was touched")


def _plan(
    session: Session, subject: Subject, node: Node, kinds: frozenset[Kind], known: Known
) -> Planned:
    seen = look(session, subject.place.name)
    found = tuple(f for f in judge(seen, node, subject) if not kinds or f.kind in kinds)
    gone = removal(seen, _takes(found), known)
    saved = Saved(
        name=subject.place.name,
        id=seen.id,
        birth=session.netns.birth(),
        host=subject.host,
        sections=(),
    )
    return Planned(subject=subject, findings=found, removal=gone, saved=saved)


def _takes(findings: Sequence[Finding]) -> tuple[Takes, ...]:
    return tuple(finding.takes for finding in findings if finding.takes)


# --- away -----------------------------------------------------------------------------------------


def _steps(session: Session, gone: Removal) -> Iterator[Step]:
    """Yield the writes, rules before what they need."""
    for name in FLAVOURS:
        backend = registry.ALL[name]
        yield from backend.steps(session, gone.have.of(name), gone.want.of(name))
    if gone.enrolment:
        yield from registry.EBPF_BACKEND.steps(session, gone.have.enrolment, None)
    if gone.tables:
        script = "".join(f"delete table {t.family} {t.name}\n" for t in gone.tables)
        yield Step("delete tables", lambda: session.require_nft().run(script), "nftables")
    if gone.routes:
        routes = tuple(reversed(gone.routes))
        yield Step("delete routing", lambda: routing.change(session.rtnl, routes, ()), "routing")
    for name in gone.sets:
        yield _tool(session, ("ipset", "destroy", name), package="ipset")
    for name in gone.links:
        yield _tool(session, ("ip", "link", "del", name), package="iproute2")


def _tool(
    session: Session,
    words: tuple[str, ...],
    *,
    package: str,
    stdin: str = "",
    fine: tuple[str, ...] = (),
) -> Step:
    """Return the run of a tool; a failure that says something `fine` is none."""
    command = (tools.require(words[0], package), *words[1:])

    def run() -> None:
        [done] = tools.run(session.netns, [tools.Call(command, stdin)], session.lock_fd)
        if done.status and not any(said in done.stderr for said in fine):
            raise KernelRejected(done.failure(), script=stdin or " ".join(words))

    return Step(" ".join(words), run, words[0])


def _verify(session: Session, subject: Subject, planned: Planned) -> None:
    """Read back that all is gone, and that everything else of these tables is as it was."""
    seen = look(session, subject.place.name)
    left = removal(seen, _takes(planned.findings), Known()).lines()
    if left:
        raise KernelRejected(f"{len(left)} things are still there after removal, first: {left[0]}")


def _undo(session: Session, planned: Planned, cause: BaseException) -> None:
    said = "interrupted" if isinstance(cause, KeyboardInterrupt) else str(cause)
    try:
        for step in _restore_steps(session, planned.saved.sections):
            step.run()
    except (AgentError, TimeoutError, KeyboardInterrupt) as failure:
        raise RollbackFailed(
            f"{said}; putting it back failed too ({failure}): `clean --restore` has all of it"
        ) from cause
    raise RolledBack(f"{said}; everything was put back as it was before") from cause


# --- and back -------------------------------------------------------------------------------------


def _saved(session: Session, gone: Removal) -> tuple[Section, ...]:
    calls = [tools.Call((tools.require("ipset", "ipset"), "save", name)) for name in gone.sets]
    texts = []
    for done in tools.run(session.netns, calls) if calls else ():
        if done.status:
            raise EnvironmentLacks(
                f"an ipset cannot be saved, so nothing is removed: {done.failure()}"
            )
        texts.append(done.stdout)
    return backup.sections(gone, "".join(texts), _links(session, gone.links))


def _links(session: Session, names: Sequence[str]) -> list[str]:
    """Return the commands that make interfaces again; all that are taken are dummies of ipvs."""
    commands = []
    for name in names:
        call = tools.Call((tools.require("ip", "iproute2"), "-o", "addr", "show", "dev", name))
        [done] = tools.run(session.netns, [call])
        commands.append(f"ip link add {name} type dummy")
        for line in done.stdout.splitlines():
            words = line.split()
            if "inet" in words or "inet6" in words:
                commands.append(f"ip addr add {words[3]} dev {name}")
    return commands


def _restore_steps(session: Session, sections: Sequence[Section]) -> Iterator[Step]:
    """Yield the writes that are needed: what is there already is left alone."""
    seen = look(session, session.netns.path)
    for section in sections:
        if section.tool == "ipset":
            if text := _missing_sets(seen, section.text):
                yield _tool(session, ("ipset", "restore"), package="ipset", stdin=text)
        elif section.tool == "nft":
            if text := _missing_tables(seen, section.text):
                yield Step("load tables", partial(session.require_nft().run, text), "nftables")
        elif section.tool == EBPF:
            if seen.state.enrolment is None or seen.state.enrolment.settings is None:
                want = enrolment(parse(json.loads(section.text)))
                yield from registry.EBPF_BACKEND.steps(session, seen.state.enrolment, want)
        elif section.tool == "sh":
            for line in section.text.splitlines():
                if not _is_there(seen, line):
                    yield _tool(session, tuple(line.split()), package="iproute2", fine=THERE)
    yield from _rules_back(session, seen, sections)


def _rules_back(session: Session, seen: Seen, sections: Sequence[Section]) -> Iterator[Step]:
    for name in FLAVOURS:
        have = seen.state.of(name)
        want: dict[Family, Ruleset] = dict(have)
        for section in sections:
            family = backup.family_of(section.tool)
            if section.tool.removeprefix("ip6").removeprefix("ip") == name.removeprefix("ip"):
                want[family] = backup.put_back(want.get(family, Ruleset(family)), section.text)
        if want != have:
            yield from registry.ALL[name].steps(session, have, _rulesets(want))


def _rulesets(found: dict[Family, Ruleset]) -> Rulesets:
    return {family: found[family] for family in Family if family in found}


def _missing_sets(seen: Seen, text: str) -> str:
    """Return the lines of the sets that are not there."""
    there = {each.name for each in seen.sets}
    lines = (line for line in text.split("\n") if line and line.split()[1] not in there)
    return "".join(f"{line}\n" for line in lines)


def _missing_tables(seen: Seen, text: str) -> str:
    """Return the tables of a section that are not there."""
    there = {f"table {t.family} {t.name} {{" for t in seen.tables}
    parts: list[str] = []
    wanted = True
    for line in text.removesuffix("\n").split("\n"):
        if line.startswith("table "):
            wanted = line.rstrip() not in there
        if wanted:
            parts.append(line)
    return "".join(f"{line}\n" for line in parts)


def _is_there(seen: Seen, line: str) -> bool:
    """Whether what a command makes is there: an interface, which stands for its addresses, too."""
    words = line.split()
    if words[:3] == ["ip", "link", "add"]:
        return words[3] in seen.links
    if words[:3] == ["ip", "addr", "add"] and words[-1] in seen.links:
        return True
    return any(line in (route.command(), backup.command_of(route)) for route in seen.state.routes)
