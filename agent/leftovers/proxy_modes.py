"""What a kube-proxy that lives left of the mode in which it ran before: iptables or ipvs. Pure.

It cleans up nothing of the other one of these when it starts (kubernetes/kubernetes#109286, KEP-
2448). In which it runs shows in the chain that both rewrite whole: nat KUBE-SERVICES.
"""

from collections.abc import Iterator
from dataclasses import replace

from agent.leftovers.finding import Finding, Kind, Severity
from agent.leftovers.look import Seen
from agent.leftovers.node import Node
from agent.leftovers.remains import Remains, objects, size, takes, where
from agent.model.catalogue import fits
from agent.model.state import NFTABLES

IPTABLES, IPVS = "iptables", "ipvs"
# The chains that one of the modes has and the other has not (pkg/proxy/{iptables,ipvs}/proxier.go).
CHAINS = {
    IPTABLES: (
        *("filter/KUBE-SERVICES", "filter/KUBE-EXTERNAL-SERVICES", "*/KUBE-NODEPORTS"),
        *("*/KUBE-SVC-*", "*/KUBE-SVL-*", "*/KUBE-SEP-*", "*/KUBE-FW-*", "*/KUBE-EXT-*"),
        "*/KUBE-XLB-*",
    ),
    IPVS: (
        *("*/KUBE-NODE-PORT", "*/KUBE-LOAD-BALANCER", "nat/KUBE-FIREWALL"),
        *("*/KUBE-SOURCE-RANGES-FIREWALL", "*/KUBE-IPVS-*"),
    ),
}


def of_the_other_mode(
    seen: Seen, node: Node, mine: Remains, alive: str, command: str
) -> Iterator[Finding]:
    """Yield what is left of the other mode; nothing where it does not show which one lives."""
    for backend in mine.backends:
        mode = None if backend == NFTABLES else _lives(seen, backend)
        if mode is None:
            continue
        other = IPVS if mode == IPTABLES else IPTABLES
        left = _part(mine, backend, CHAINS[other])
        if other == IPVS:
            left = replace(left, sets=mine.sets, links=mine.links)
        services = seen.ipvs_services if other == IPVS else 0
        if left.chains or left.sets or left.links or services:
            yield _finding(seen, node, left, backend, (mode, other, alive, command), services)


def _lives(seen: Seen, backend: str) -> str | None:
    """Return the mode by what KUBE-SERVICES asks: sets of addresses, or a chain for each."""
    found = set()
    for ruleset in seen.state.of(backend).values():
        chain = ruleset.chain("nat", "KUBE-SERVICES")
        for rule in chain.rules if chain else ():
            if any(match.module == "set" for match in rule.matches):
                found.add(IPVS)
            elif rule.target and fits(CHAINS[IPTABLES], f"nat/{rule.target.name}"):
                found.add(IPTABLES)
    return found.pop() if len(found) == 1 else None


def _part(mine: Remains, backend: str, patterns: tuple[str, ...]) -> Remains:
    """Return these chains of an owner, with the rules that lead into them."""
    chains = {ref for ref in mine.chains.get(backend, ()) if fits(patterns, f"{ref[2]}/{ref[3]}")}
    rules = [
        place
        for place in mine.rules.get(backend, ())
        if place[3].target and fits(patterns, f"{place[1]}/{place[3].target.name}")
    ]
    return Remains(
        mine.owner,
        chains={backend: chains} if chains else {},
        rules={backend: rules} if rules else {},
    )


def _finding(
    seen: Seen,
    node: Node,
    left: Remains,
    backend: str,
    about: tuple[str, str, str, str],
    services: int,
) -> Finding:
    mode, other, alive, command = about
    evidence = [size(seen, left, backend)]
    if other == IPVS:
        evidence.append(
            f"of the ipvs mode: {len(left.sets)} ipsets, {len(left.links)} interfaces and "
            f"{services} virtual services"
        )
    evidence.append(f"{alive}, and nat KUBE-SERVICES is that of its {mode} mode")
    asked = bool(left.rules or left.links or services)
    ipvs = "; ipvsadm --clear takes out the virtual services" if services else ""
    return Finding(
        kind=Kind.KUBE_PROXY,
        severity=Severity.CRITICAL if asked else Severity.WARNING,
        where=where(seen, node, left, backend),
        objects=(
            *objects(left, backend),
            *(f"ipset {name}" for name in left.sets),
            *(f"interface {name}" for name in left.links),
        ),
        owner=left.owner.name,
        evidence=tuple(evidence),
        explanation=f"kube-proxy runs in {mode} mode, and what it left of its {other} mode is "
        + (
            "still asked: it refuses or translates what is sent to Services by what was true then."
            if asked
            else "still there; nothing leads to it."
        ),
        fix=f"intercept-agent clean {command} --only kube-proxy{ipvs}",
        takes=takes(left, backend, sets=left.sets, links=left.links),
    )
