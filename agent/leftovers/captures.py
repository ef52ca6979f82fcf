"""Findings about captures of Istio's kind: unwanted, leading nowhere, torn, in the wrong place."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from agent.formats.iptables_save import render_rule
from agent.leftovers.finding import Finding, Kind, Severity, Takes, Where
from agent.leftovers.flaws import flaws, one_sided, shadows
from agent.leftovers.found import ENTRY, Found, find
from agent.leftovers.look import OWN_TABLES, Seen
from agent.leftovers.node import Node, PodFact, running
from agent.leftovers.reach import Goal, goals
from agent.model import catalogue
from agent.model.owner import Role
from agent.model.ruleset import Family, Ruleset
from agent.model.state import EBPF, GUARD, NFTABLES

__all__ = ["find", "lone_guard", "lone_sets", "on_host", "on_pod"]


def on_pod(found: Found, node: Node) -> Iterator[Finding]:
    """Yield what is wrong with the captures of a namespace that is not the node's own."""
    closed = unanswered(found)
    wants = found.pod.wants if found.pod else None
    life = found.life(node)
    if found.pod and found.is_stale(closed=bool(closed)):
        yield _stale(found, found.pod, life)
    if closed:
        yield _blackhole(found, closed, life, wants=wants)
    yield from _partial(found, wants=wants)
    if len(found.parts) + (found.enrolment is not None) > 1:
        yield _doubled(found)


def lone_guard(seen: Seen, pod: PodFact | None, command: str) -> Iterator[Finding]:
    """Yield the finding about a guard without its capture, which lets nothing through."""
    if GUARD not in seen.state.loaded:
        return
    yield Finding(
        kind=Kind.PARTIAL_CAPTURE,
        severity=Severity.CRITICAL,
        where=Where(netns=seen.name, pod=pod.title if pod else "", backend=NFTABLES),
        objects=tuple(f"table inet {t}" for t, b in OWN_TABLES.items() if b == GUARD),
        owner="intercept-agent",
        evidence=("the guard of a capture is loaded, and no capture",),
        explanation="What should be redirected is dropped and nothing redirects it: a run was "
        "killed, or somebody took the capture out and left its guard.",
        fix=f"intercept-agent check {command}"
        if pod and pod.wants
        else _clean(command, Kind.PARTIAL_CAPTURE),
        takes=Takes() if pod and pod.wants else Takes(capture=True),
    )


def lone_sets(seen: Seen, node: Node, command: str) -> Iterator[Finding]:
    """Yield the finding about ipsets of the ambient agent that no rule asks any more."""
    sets = _ambient_sets(seen)
    owner = catalogue.by_name("istio-ambient")
    if not sets or running(owner, node):
        return
    yield Finding(
        kind=Kind.HOST_RULES,
        severity=Severity.INFO,
        where=Where(netns=seen.name),
        objects=tuple(f"ipset {name}" for name in sets),
        owner=owner.name,
        evidence=(f"{len(sets)} ipsets, no rule that asks them, and no process of {owner.title}",),
        explanation="The addresses of enrolled pods are still kept; nothing asks for them.",
        fix=_clean(command, Kind.HOST_RULES),
        takes=Takes(sets=frozenset(sets)),
    )


def _ambient_sets(seen: Seen) -> tuple[str, ...]:
    owners = ((each.name, catalogue.owner_of_set(each.name)) for each in seen.sets)
    return tuple(name for name, owner in owners if owner and owner.role is Role.CAPTURE)


def on_host(found: Found, node: Node) -> Iterator[Finding]:
    """Yield the finding about mesh rules in the node's own namespace.

    The ambient agent has one chain there by design, as long as it lives.
    """
    names = {o for o in found.objects() if o.startswith("ISTIO_")}
    agent = catalogue.by_name("istio-ambient")
    if names == {"ISTIO_POSTRT"} and running(agent, node):
        return
    closed = unanswered(found)
    yield Finding(
        kind=Kind.HOST_RULES,
        severity=Severity.CRITICAL if found.targets else Severity.WARNING,
        where=found.where(),
        objects=found.objects(),
        owner=found.owner,
        evidence=(found.size(), *map(str, closed)),
        explanation="Rules of a mesh are in the node's own network namespace, where they meet the "
        "traffic of the node and of every pod that shares its network. A capture belongs into a "
        "pod's namespace.",
        fix=_clean(found.command, Kind.HOST_RULES),
        takes=replace(found.takes(), sets=frozenset(_ambient_sets(found.seen))),
    )


# --- each kind ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Closed:
    """A port that rules lead to and on which nobody takes what they send, by family of address."""

    goal: Goal
    families: tuple[Family | None, ...]  # none: of a table that says none
    rules: int

    def __str__(self) -> str:
        families = ", ".join(family.value if family else "nftables" for family in self.families)
        rules = "rule sends" if self.rules == 1 else "rules send"
        return f"nobody listens on {self.goal} ({families}), to which {self.rules} {rules} traffic"


def unanswered(found: Found) -> list[Closed]:
    """Return the ports that the rules lead to and nobody listens on."""
    listeners = found.seen.listeners
    if listeners is None:
        return []
    closed: dict[Goal, list[Family | None]] = {}
    rules: Counter[Goal] = Counter()
    for (family, goal), count in sorted(found.targets.items(), key=lambda item: item[0][1]):
        here = [s for s in listeners if s.protocol == goal.protocol and s.local[1] == goal.port]
        version = family.version if family else None
        fitting = [s for s in here if version in (None, s.local[0].version) or s.dual]
        if goal.transparent:
            fitting = [s for s in fitting if s.transparent]
        if not fitting:
            closed.setdefault(goal, []).append(family)
            rules[goal] += count
    return [Closed(goal, tuple(families), rules[goal]) for goal, families in closed.items()]


def _served(found: Found, closed: list[Closed]) -> Family | None:
    """Return the family for which alone somebody listens on all of these ports, if it is so."""
    lost = {family for one in closed for family in one.families}
    for family in Family:
        if lost == {family.other} and all(_listens(found, one.goal, family) for one in closed):
            return family
    return None


def _listens(found: Found, goal: Goal, family: Family) -> bool:
    return any(
        (one.protocol, one.local[1], one.local[0].version)
        == (goal.protocol, goal.port, family.version)
        for one in found.seen.listeners or ()
    )


def _stale(found: Found, pod: PodFact, life: tuple[str, ...]) -> Finding:
    return Finding(
        kind=Kind.STALE_CAPTURE,
        severity=Severity.WARNING,
        where=found.where(),
        objects=found.objects(),
        owner=found.owner,
        evidence=(found.size(), pod.reason, *life),
        explanation="The pod's labels and annotations do not ask for a capture (any more), but its "
        "rules are still there: its traffic goes on through the proxy for as long as that runs.",
        fix=_clean(found.command, Kind.STALE_CAPTURE),
        takes=found.takes(),
    )


def _blackhole(
    found: Found, closed: list[Closed], life: tuple[str, ...], *, wants: bool | None
) -> Finding:
    ports = ", ".join(str(one.goal) for one in closed)
    what = f"New connections are sent to {ports}, where nobody listens, and are refused. "
    if wants:
        why = (
            "The pod asks for its capture, so it is the proxy that is missing: it has not started "
            "yet, or has ended."
        )
        if (served := _served(found, closed)) is not None:
            what = f"New connections by {served.other.label} are sent to {ports}, where "
            what += f"the proxy listens for {served.label} alone, and are refused. "
            why = "The pod has addresses of both families, and its mesh is not made for both: "
            why += "Istio's istiod and proxies are told so by ISTIO_DUAL_STACK."
        return Finding(
            kind=Kind.BLACKHOLE,
            severity=Severity.WARNING,
            where=found.where(),
            objects=found.objects(),
            owner=found.owner,
            evidence=(found.size(), *map(str, closed), *life),
            explanation=what + why,
            fix=f"intercept-agent check {found.command} --probe",
        )
    if wants is False and found.pod:
        why = f"Nobody needs these rules: {found.pod.reason}."
    else:
        why = "If no proxy is to start there again, the rules are left over."
    return Finding(
        kind=Kind.BLACKHOLE,
        severity=Severity.CRITICAL,
        where=found.where(),
        objects=found.objects(),
        owner=found.owner,
        evidence=(found.size(), *map(str, closed), *life),
        explanation=what + why,
        fix=_clean(found.command, Kind.BLACKHOLE),
        takes=found.takes(),
    )


def _partial(found: Found, *, wants: bool | None) -> Iterator[Finding]:
    said: dict[str, None] = {}
    for backend, parts in found.parts.items():
        for family, ruleset in parts.items():
            said |= {f"{backend} {family.value}: {flaw}": None for flaw in flaws(ruleset)}
    said |= dict.fromkeys(_one_sided(found))
    if found.enrolment:
        said |= {f"{EBPF}: {gap}": None for gap in found.enrolment.gaps}
    if said:
        yield _torn(found, tuple(said), wants=wants)
    shaded = tuple(
        f"{backend} {family.value}: a rule of somebody else stands before the capture, at position "
        f"{position} of {table} {chain}: -t {table} {render_rule(chain, rule)}"
        for backend in found.parts
        for family, ruleset in found.seen.state.of(backend).items()
        for table, chain, position, rule in shadows(ruleset)
    )
    if shaded:
        yield _shadowed(found, shaded)


def _one_sided(found: Found) -> tuple[str, ...]:
    """Return what only one family's capture leaves open, over all backends together."""
    if found.native or found.enrolment:
        return ()
    together = dict[Family, Ruleset]()
    for parts in found.parts.values():
        for family, ruleset in parts.items():
            if family not in together or not goals(together[family]):
                together[family] = ruleset
    return one_sided(together, found.seen.addressed)


def _torn(found: Found, said: tuple[str, ...], *, wants: bool | None) -> Finding:
    stays = bool(wants)
    return Finding(
        kind=Kind.PARTIAL_CAPTURE,
        severity=Severity.WARNING,
        where=found.where(),
        objects=found.objects(),
        owner=found.owner,
        evidence=(found.size(), *said),
        explanation="A part of the capture is missing or in the wrong place, so some traffic goes "
        "past the proxy, or to it and no further.",
        fix=f"intercept-agent check {found.command}"
        if stays
        else _clean(found.command, Kind.PARTIAL_CAPTURE),
        takes=Takes() if stays else found.takes(),
    )


def _shadowed(found: Found, said: tuple[str, ...]) -> Finding:
    return Finding(
        kind=Kind.PARTIAL_CAPTURE,
        severity=Severity.WARNING,
        where=found.where(),
        objects=tuple(line.rpartition(": ")[2] for line in said),
        owner="unknown",
        evidence=said,
        explanation="A rule that is not the mesh's runs before the capture and ends the walk, so "
        "what it matches is not captured. Whose it is cannot be told, and `clean` leaves it.",
        fix=f"intercept-agent check {found.command}",
    )


def _doubled(found: Found) -> Finding:
    counts = {
        backend: sum(ruleset.rule_count() for ruleset in parts.values())
        for backend, parts in found.parts.items()
    }
    return Finding(
        kind=Kind.MIXED_BACKENDS,
        severity=Severity.WARNING,
        where=found.where(),
        objects=found.objects(),
        owner=found.owner,
        evidence=(
            *(f"{count} capture rules in {name}" for name, count in counts.items()),
            *([ENTRY] if found.enrolment else []),
        ),
        explanation="A capture is loaded in more than one backend. The kernel asks both, and for "
        "each connection the one that was loaded last decides: altering the other has no effect.",
        fix=f"intercept-agent apply {found.command} (with the settings it is to have) leaves one; "
        f"{_clean(found.command, Kind.MIXED_BACKENDS)} takes out both",
        takes=found.takes() if not (found.pod and found.pod.wants) else Takes(),
    )


def _clean(command: str, kind: Kind) -> str:
    return f"intercept-agent clean {command} --only {kind.value}"
