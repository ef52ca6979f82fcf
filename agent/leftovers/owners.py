"""Findings about rules of known programs that are gone: CNIs and other meshes."""

from collections.abc import Iterator, Mapping

from agent.leftovers.finding import Finding, Kind, Severity
from agent.leftovers.look import Seen
from agent.leftovers.node import Node, lack_of_life, listens, sign_of_life
from agent.leftovers.reach import Goal
from agent.leftovers.remains import Remains, objects, size, takes, targets_of, where
from agent.model.owner import Role


def networks(
    seen: Seen, node: Node, found: Mapping[str, Remains], command: str
) -> Iterator[Finding]:
    """Yield what CNIs left that are gone."""
    for mine in found.values():
        held = mine.backends or ([""] if mine.sets else [])
        if mine.owner.role is not Role.CNI or sign_of_life(mine.owner, seen, node):
            continue
        if mine.links and not held and node.all_visible:
            yield _interfaces(seen, node, mine)
        for backend in held:
            last = backend == held[-1]
            left = [f"interface {name} is still there" for name in mine.links if last]
            sets = mine.sets if last else []
            yield Finding(
                kind=Kind.FOREIGN_CNI,
                severity=Severity.WARNING,
                where=where(seen, node, mine, backend),
                objects=(*objects(mine, backend), *(f"ipset {name}" for name in sets)),
                owner=mine.owner.name,
                evidence=(size(seen, mine, backend), *lack_of_life(mine.owner, seen, node), *left),
                explanation=f"{mine.owner.title} is gone and its rules are still asked for every "
                "packet: they can drop or translate traffic by what was true when it ended.",
                fix=f"intercept-agent clean {command} --only foreign-cni",
                takes=takes(mine, backend, sets=sets),
            )


def _interfaces(seen: Seen, node: Node, mine: Remains) -> Finding:
    """Return the finding about interfaces without rules, which clean leaves: it cannot put back
    what they are made of."""
    return Finding(
        kind=Kind.FOREIGN_CNI,
        severity=Severity.WARNING,
        where=where(seen, node, mine, ""),
        objects=tuple(f"interface {name}" for name in mine.links),
        owner=mine.owner.name,
        evidence=lack_of_life(mine.owner, seen, node),
        explanation=f"{mine.owner.title} is gone and its interfaces are still there: their "
        "addresses and routes count before others', and they keep what another CNI may need, such "
        "as the port of a tunnel.",
        fix="; ".join(f"ip link del {name}" for name in mine.links),
    )


def meshes(
    seen: Seen,
    node: Node,
    found: Mapping[str, Remains],
    command: str,
    *,
    host: bool,
    captured: bool,
) -> Iterator[Finding]:
    """Yield what other meshes left, or have beside a capture of Istio's kind."""
    for mine in found.values():
        if mine.owner.role is not Role.MESH:
            continue
        for backend in mine.backends:
            targets = targets_of(seen, mine, backend)
            closed = [goal for goal in targets if not listens(seen, goal.protocol, goal.port)]
            alive = sign_of_life(mine.owner, seen, node)
            if targets and not closed:
                alive = alive or f"something listens on {' and '.join(map(str, targets))}"
            if alive is None:
                sets = mine.sets if backend == mine.backends[-1] else []
                yield _mesh(seen, node, mine, backend, command, tuple(closed), sets, host=host)
            elif host or captured:
                yield _beside(seen, node, mine, backend, command, alive, host=host)


def _mesh(
    seen: Seen,
    node: Node,
    mine: Remains,
    backend: str,
    command: str,
    closed: tuple[Goal, ...],
    sets: list[str],
    *,
    host: bool,
) -> Finding:
    kind = Kind.HOST_RULES if host else Kind.FOREIGN_MESH
    ports = ", ".join(str(goal) for goal in closed)
    evidence = [size(seen, mine, backend), *lack_of_life(mine.owner, seen, node)]
    meaning = f"Rules of {mine.owner.title} are here and its proxy is not"
    if closed:
        evidence.append(f"nobody listens on {ports}, where they send traffic")
        meaning += f": new connections are sent to {ports} and are refused"
    return Finding(
        kind=kind,
        severity=Severity.CRITICAL if closed or host else Severity.WARNING,
        where=where(seen, node, mine, backend),
        objects=(*objects(mine, backend), *(f"ipset {name}" for name in sets)),
        owner=mine.owner.name,
        evidence=(*evidence, *(f"interface {name} is still there" for name in mine.links)),
        explanation=meaning + ".",
        fix=f"intercept-agent clean {command} --only {kind.value}",
        takes=takes(mine, backend, sets=sets),
    )


def _beside(
    seen: Seen, node: Node, mine: Remains, backend: str, command: str, alive: str, *, host: bool
) -> Finding:
    kind = Kind.HOST_RULES if host else Kind.FOREIGN_MESH
    beside = "in the node's own namespace" if host else "beside another mesh's capture"
    return Finding(
        kind=kind,
        severity=Severity.CRITICAL if host else Severity.WARNING,
        where=where(seen, node, mine, backend),
        objects=objects(mine, backend),
        owner=mine.owner.name,
        evidence=(size(seen, mine, backend), alive),
        explanation=f"Rules of {mine.owner.title} stand {beside}: which of them gets a connection "
        "depends on their order alone.",
        fix=f"intercept-agent clean {command} --only {kind.value}",
        takes=takes(mine, backend),
    )
