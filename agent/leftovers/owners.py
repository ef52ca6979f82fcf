"""Findings about rules of known programs that are gone: service proxies, CNIs, other meshes."""

from collections.abc import Iterator, Mapping

from agent.leftovers.finding import Finding, Kind, Severity
from agent.leftovers.look import Seen
from agent.leftovers.node import Node, lack_of_life, listens, sign_of_life
from agent.leftovers.proxy_modes import of_the_other_mode
from agent.leftovers.reach import Goal
from agent.leftovers.remains import (
    Remains,
    endpoints_of,
    objects,
    size,
    takes,
    targets_of,
    where,
)
from agent.model import catalogue
from agent.model.catalogue import SHARED_WITH_KUBELET
from agent.model.owner import Role
from agent.model.state import NFTABLES

SHOWN_ENDPOINTS = 4


def service_proxy(
    seen: Seen, node: Node, found: Mapping[str, Remains], command: str
) -> Iterator[Finding]:
    """Yield what kube-proxy left, in the forms that no living kube-proxy uses."""
    mine = found.get("kube-proxy")
    if mine is None:
        return
    kubelet = sign_of_life(catalogue.by_name("kubelet"), seen, node)
    _leave_shared(mine, alive=kubelet is not None)
    alive = sign_of_life(mine.owner, seen, node)
    idle = mine.backends if alive is None else _idle(mine, found)
    if alive is None and not idle and (mine.sets or mine.links or seen.ipvs_services):
        idle = [""]
    for backend in idle:
        last = alive is None and backend == idle[-1]
        yield _kube_proxy(seen, node, mine, backend, alive, command, with_rest=last)
    if alive is not None and not idle:
        yield from of_the_other_mode(seen, node, mine, alive, command)


def _leave_shared(mine: Remains, *, alive: bool) -> None:
    """Leave the kubelet what may be its own: all that it shares, while it runs or stands alone."""
    for backend in list(mine.chains):
        own = mine.chain_names(backend) - SHARED_WITH_KUBELET
        if alive or not own:
            kept = {ref for ref in mine.chains[backend] if ref[3] in own}
            mine.chains[backend] = kept
            mine.rules[backend] = [
                place
                for place in mine.rules.get(backend, [])
                if place[3].target and place[3].target.name in own
            ]
            if not kept:
                del mine.chains[backend], mine.rules[backend]


def _idle(mine: Remains, found: Mapping[str, Remains]) -> list[str]:
    """Return the backends that a living kube-proxy does not use.

    One in nftables mode leaves the rules of other modes; one in another mode deletes its table when
    it starts. Between the two flavours of iptables the kubelet's chains show which is in use.
    """
    if mine.tables:
        return [backend for backend in mine.backends if backend != NFTABLES]
    kubelet = found.get("kubelet")
    used = set(kubelet.chains) if kubelet else set()
    flavours = mine.backends
    if len(flavours) == 2 and len(used) == 1:
        return [backend for backend in flavours if backend not in used]
    return []


def _kube_proxy(
    seen: Seen,
    node: Node,
    mine: Remains,
    backend: str,
    alive: str | None,
    command: str,
    *,
    with_rest: bool,
) -> Finding:
    endpoints = endpoints_of(seen, mine, backend)
    sets, links = (mine.sets, mine.links) if with_rest else ([], [])
    services = seen.ipvs_services if with_rest else 0
    evidence = [size(seen, mine, backend), *_endpoints_said(endpoints)]
    if sets or links or services:
        evidence.append(
            f"of the ipvs mode: {len(sets)} ipsets, {len(links)} interfaces and {services} "
            "virtual services"
        )
    if alive is None:
        evidence += (*lack_of_life(mine.owner, seen, node), *_heartbeat(mine, backend))
        explanation = "kube-proxy is gone and its rules are still asked"
    else:
        evidence.append(f"{alive}, and does not use {backend}")
        explanation = f"kube-proxy runs in another mode; its old rules in {backend} are still asked"
    if endpoints:
        explanation += (
            ": what is sent to a cluster IP goes to endpoints that nobody keeps up to date"
        )
    ipvs = "; ipvsadm --clear takes out the virtual services" if services else ""
    return Finding(
        kind=Kind.KUBE_PROXY,
        severity=Severity.CRITICAL if endpoints or services else Severity.WARNING,
        where=where(seen, node, mine, backend),
        objects=(
            *objects(mine, backend),
            *(f"ipset {name}" for name in sets),
            *(f"interface {name}" for name in links),
        ),
        owner="kube-proxy",
        evidence=tuple(evidence),
        explanation=explanation + ".",
        fix=f"intercept-agent clean {command} --only kube-proxy{ipvs}",
        takes=takes(mine, backend, sets=sets, links=links),
    )


def _heartbeat(mine: Remains, backend: str) -> list[str]:
    """Return what the chain says that a living one makes again whenever it is gone."""
    if backend in ("", NFTABLES):
        return []
    there = mine.chain_names(backend)
    return [
        f"its heartbeat chain {name} is {'there, which is no proof' if name in there else 'gone'}"
        for name in mine.owner.heartbeats
    ]


def _endpoints_said(endpoints: tuple[str, ...]) -> list[str]:
    if not endpoints:
        return []
    shown = ", ".join(endpoints[:SHOWN_ENDPOINTS])
    more = len(endpoints) - SHOWN_ENDPOINTS
    count = "1 endpoint" if len(endpoints) == 1 else f"{len(endpoints)} endpoints"
    return [f"they send Services to {count}: {shown}{f' and {more} more' if more > 0 else ''}"]


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
