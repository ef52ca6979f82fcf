"""What a proxy's certificates mean for the hours to come. Pure."""

from collections.abc import Iterator

from agent.explain.finding import Finding, Severity
from agent.explain.pod.certificates import (
    due,
    expired,
    is_authority,
    not_yet,
    overdue,
    span,
    title,
)
from agent.explain.pod.facts import Facts
from agent.formats.envoy import Certificate

STOPS = "no new mutual TLS connection can be made, in or out; plain ones still go through"


def findings(facts: Facts) -> Iterator[Finding]:
    """Return what is wrong with the certificates that the proxy holds."""
    for one in facts.certificates or ():
        kind = "authority" if is_authority(one) else "certificate"
        ends = f"{one.expires:%Y-%m-%d %H:%M} UTC"
        if expired(one, facts.now):
            since = span(facts.now - one.expires)
            yield Finding(
                kind="certificate-expired",
                severity=Severity.CRITICAL,
                seen=f"{kind} {title(one)} expired at {ends}, {since} ago",
                means=f"the control plane (istiod) has not renewed it in time: {STOPS}",
                fix=_ask(facts),
            )
        elif not_yet(one, facts.now):
            yield Finding(
                kind="certificate-not-yet",
                severity=Severity.CRITICAL,
                seen=f"{kind} {title(one)} is valid from {one.valid_from:%Y-%m-%d %H:%M} UTC only",
                means="the clock of this node is behind, or the issuer's is ahead",
                fix="timedatectl",
            )
        elif overdue(one, facts.now):
            yield Finding(
                kind="certificate-overdue",
                severity=Severity.WARNING,
                seen=f"{kind} {title(one)} expires at {ends}, in {span(one.expires - facts.now)}, "
                "and should have been renewed at half of its life",
                means="the control plane (istiod) does not answer, and the clock runs: at "
                f"{ends} {STOPS}",
                fix=_ask(facts),
            )


def clock(one: Certificate, facts: Facts) -> str:
    """Return how long a certificate holds, and what that means should the control plane fail."""
    if expired(one, facts.now):
        return f"expired {span(facts.now - one.expires)} ago"
    left = span(one.expires - facts.now)
    if is_authority(one):
        return f"authority, expires in {left}"
    half = due(one, 0.5)
    when = f"renewed from {half:%H:%M} UTC on" if half and half > facts.now else "renewal is due"
    return f"expires in {left} ({when}; so long it lasts if istiod is down)"


def _ask(facts: Facts) -> str:
    pod = facts.pod
    if pod is None:
        return ""
    return f"kubectl -n istio-system get pods -l app=istiod  # and: kubectl -n {pod.namespace} logs {pod.name} -c istio-proxy"  # noqa: E501
