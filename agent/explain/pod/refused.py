"""Rules that lead to a port where nobody listens: connections are refused."""

from collections.abc import Iterator

from agent.explain.finding import Finding, Severity
from agent.explain.pod import labels
from agent.explain.pod.facts import Facts
from agent.explain.pod.flows import Fate, Flow
from agent.model.ruleset import Family


def found(
    facts: Facts, flows: tuple[Flow, ...], should_be: bool | None, reason: str
) -> Iterator[Finding]:
    """Yield what is to be said of connections that a capture sends to nobody."""
    lost = [flow for flow in flows if flow.fate is Fate.REFUSED]
    if not lost:
        return
    ports = " and ".join(sorted({str(flow.port) for flow in lost}))
    where = lost[0].result.partition(", ")[2]
    ways = ", ".join(dict.fromkeys(flow.direction for flow in lost))
    sent = f"are sent to {ports}, {where}"
    served = _served(flows, lost)
    if served is not None and should_be is not False:
        yield Finding(
            kind="blackhole",
            severity=Severity.WARNING,
            seen=f"new connections ({ways}) by {served.other.label} {sent}",
            means=f"the proxy listens for {served.label} alone: the pod has addresses of both "
            "families, and its mesh is not made for both (Istio: ISTIO_DUAL_STACK)",
        )
        return
    fix = f"intercept-agent remove --netns {facts.target}"
    means = "start it, or take the capture out:"
    if should_be is not False and facts.pod is not None:
        if reason == labels.NAMED:  # by the configuration of the agent, which keeps it
            means, fix = "start it, or take it out of the agent's configuration", ""
        else:
            means, fix = "its log says why:", labels.proxy_command(facts)
    yield Finding(
        kind="blackhole",
        severity=Severity.CRITICAL,
        seen=f"new connections ({ways}) {sent}",
        means=f"the proxy is stopped or not ready yet; {means}",
        fix=fix,
    )


def _served(flows: tuple[Flow, ...], lost: list[Flow]) -> Family | None:
    """Return the family in which the proxy takes all that it loses in the other, if it is so."""
    families = {flow.family for flow in lost}
    taken = {(flow.direction, flow.family) for flow in flows if flow.fate is Fate.PROXIED}
    for served in Family:
        if families == {served.other} and all((flow.direction, served) in taken for flow in lost):
            return served
    return None
