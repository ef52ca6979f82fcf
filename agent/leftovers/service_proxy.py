"""Findings about what kube-proxy left: all of it if it is gone, else what its mode has no use for.

Three modes share chains, so what one left can stand beside what another one works with.
"""

from collections.abc import Iterator, Mapping

from agent.leftovers.finding import Finding, Kind, Severity
from agent.leftovers.look import Seen
from agent.leftovers.node import Node, lack_of_life, sign_of_life
from agent.leftovers.remains import Remains, endpoints_of, objects, size, takes, where
from agent.model import catalogue
from agent.model.catalogue import IPTABLES_MODE, IPVS_MODE, SHARED_WITH_KUBELET
from agent.model.ruleset import Table
from agent.model.state import NFTABLES

SHOWN_ENDPOINTS = 4
# Set for NodePorts on localhost; who else has come to need it nobody can tell.
ROUTE_LOCALNET = (
    "sysctl net.ipv4.conf.all.route_localnet is 1, as kube-proxy sets it in iptables mode; clean "
    "leaves it, for others may need it"
)
STILL_ASKED = "still asked: it refuses or translates what is sent to Services by what was true then"
IPTABLES, IPVS = "iptables", "ipvs"  # and NFTABLES: as kube-proxy calls its modes
USELESS: Mapping[str, tuple[str, ...]] = {IPTABLES: IPVS_MODE, IPVS: IPTABLES_MODE}
# Chains that the kubelet alone makes, in the flavour of iptables that the node uses.
HINTS = frozenset({"KUBE-IPTABLES-HINT", "KUBE-KUBELET-CANARY"})


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
    mode, services = "", seen.ipvs_services
    if alive is not None:
        mode = _mode(seen, mine)
        mine = _idle(seen, mine, mode, used=_flavour(found, mine))
        services = 0 if mode in ("", IPVS) else services
    left = mine.backends or ([""] if mine.sets or mine.links or services else [])
    for backend in left:
        last = services if backend == left[-1] else None
        yield _finding(seen, node, mine, backend, alive, mode, command, last)


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


# --- what a living one does not use ---------------------------------------------------------------


def _mode(seen: Seen, mine: Remains) -> str:
    """Return the mode of a living kube-proxy: what it says, or what it has written; else nothing.

    One in another mode takes its table of nf_tables away when it starts, if its image has nft.
    """
    if seen.proxy_mode:
        return seen.proxy_mode
    if mine.tables:
        return NFTABLES
    written = {_written(seen, backend) for backend in mine.backends} - {""}
    return written.pop() if len(written) == 1 else ""


def _written(seen: Seen, backend: str) -> str:
    """Return the mode that last wrote the chain in which all Services begin; nothing if none did.

    ipvs asks ipsets there, where the iptables mode has one rule for each Service.
    """
    modes: set[str] = set()
    for ruleset in seen.state.of(backend).values():
        table = ruleset.table("nat") or Table("nat")
        chain = table.chain("KUBE-SERVICES")
        for rule in chain.rules if chain else ():
            if any(True for _ in rule.options("set")):
                modes.add(IPVS)
            elif rule.target and catalogue.fits(IPTABLES_MODE, f"nat/{rule.target.name}"):
                modes.add(IPTABLES)
    return modes.pop() if len(modes) == 1 else ""


def _flavour(found: Mapping[str, Remains], mine: Remains) -> str:
    """Return the flavour of iptables that the node uses, as the kubelet shows it.

    Nothing if kube-proxy has no rules in that: its image then brings another one.
    """
    kubelet = found.get("kubelet")
    used = [b for b in kubelet.chains if kubelet.chain_names(b) & HINTS] if kubelet else []
    return used[0] if len(used) == 1 and used[0] in mine.backends else ""


def _idle(seen: Seen, mine: Remains, mode: str, *, used: str) -> Remains:
    """Return what of it a kube-proxy in this mode does not use; nothing where that is not known."""
    idle, changing = Remains(mine.owner), False
    for backend in mine.backends:
        wrote = _written(seen, backend)
        if backend == NFTABLES:
            idle.tables = [] if mode in ("", NFTABLES) else mine.tables
        elif mode == NFTABLES or (used and backend != used):
            idle.take(mine, backend)
        elif wrote and mode and wrote != mode:
            changing = True  # it has only just been started
        else:
            idle.take(mine, backend, USELESS.get(wrote or mode, ()))
    if mode in (IPTABLES, NFTABLES) and not changing:
        idle.sets, idle.links = mine.sets, mine.links
    return idle


# --- what is said of it ---------------------------------------------------------------------------


def _finding(
    seen: Seen,
    node: Node,
    mine: Remains,
    backend: str,
    alive: str | None,
    mode: str,
    command: str,
    services: int | None,
) -> Finding:
    """Return the finding about one backend; with `services`, those of ipvs, about the rest, too."""
    endpoints = endpoints_of(seen, mine, backend)
    sets, links = ([], []) if services is None else (mine.sets, mine.links)
    evidence = [size(seen, mine, backend), *_endpoints_said(endpoints)]
    if sets or links or services:
        evidence.append(
            f"of the ipvs mode: {len(sets)} ipsets, {len(links)} interfaces and "
            f"{services or 0} virtual services"
        )
    if alive is None:
        evidence += (*lack_of_life(mine.owner, seen, node), *_heartbeat(mine, backend))
        if seen.route_localnet and backend not in ("", NFTABLES):
            evidence.append(ROUTE_LOCALNET)
        asked = bool(endpoints or services)
        meaning = "kube-proxy is gone and its rules are still asked"
        if endpoints:
            meaning += (
                ": what is sent to a cluster IP goes to endpoints that nobody keeps up to date"
            )
    else:
        evidence.append(alive)
        asked = bool(services or links or mine.rules.get(backend) or backend == NFTABLES)
        what = f"in {backend}" if backend else "of its ipvs mode"
        meaning = (
            f"kube-proxy runs{f' in {mode} mode' if mode else ''}, and what it left {what} is "
        )
        meaning += STILL_ASKED if asked else "still there; nothing leads to it"
    ipvs = "; ipvsadm --clear takes out the virtual services" if services else ""
    return Finding(
        kind=Kind.KUBE_PROXY,
        severity=Severity.CRITICAL if asked else Severity.WARNING,
        where=where(seen, node, mine, backend),
        objects=(
            *objects(mine, backend),
            *(f"ipset {name}" for name in sets),
            *(f"interface {name}" for name in links),
        ),
        owner="kube-proxy",
        evidence=tuple(evidence),
        explanation=meaning + ".",
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
