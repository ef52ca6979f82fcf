"""Settings of the node's kernel that change what a capture or the agent can do. Pure."""

from collections.abc import Callable, Iterator

from agent.explain.finding import Finding, Severity
from agent.explain.node.facts import NodeFacts

CONNTRACK_FULL, CONNTRACK_FILLING = 0.95, 0.8
INOTIFY_FULL = 0.9


def network_findings(facts: NodeFacts) -> Iterator[Finding]:
    for rule in _RULES:
        yield from rule(facts)


def _conntrack(facts: NodeFacts) -> Iterator[Finding]:
    if facts.conntrack is None:
        return
    count, limit = facts.conntrack
    share = count / limit if limit else 0.0
    seen = f"{count} of {limit} connections are tracked ({share:.0%})"
    if share < CONNTRACK_FILLING:
        yield Finding(kind="conntrack", severity=Severity.OK, seen=seen)
        return
    full = share >= CONNTRACK_FULL
    yield Finding(
        kind="conntrack",
        severity=Severity.CRITICAL if full else Severity.WARNING,
        seen=seen,
        means="when the table is full, the kernel drops new connections, and every captured "
        "connection takes an entry in its pod as well",
        fix=f"sysctl -w net.netfilter.nf_conntrack_max={limit * 2}",
    )


def _ipv6(facts: NodeFacts) -> Iterator[Finding]:
    if facts.ipv6:
        yield Finding(
            kind="ipv6",
            severity=Severity.INFO,
            seen=facts.ipv6,
            means="pods are captured in IPv4 only, where they have no IPv6 either",
        )
    else:
        yield Finding(kind="ipv6", severity=Severity.OK, seen="on")


def _rp_filter(facts: NodeFacts) -> Iterator[Finding]:
    if facts.rp_filter == 1:
        yield Finding(
            kind="rp-filter",
            severity=Severity.INFO,
            seen="net.ipv4.conf.all.rp_filter is 1 (strict), which new namespaces take over",
            means="a pod with several interfaces loses what comes in by another one than the "
            "route back to its sender",
            fix="sysctl -w net.ipv4.conf.all.rp_filter=2",
        )


def _bridge(facts: NodeFacts) -> Iterator[Finding]:
    if facts.bridge_calls_iptables is None:
        return
    word = "on" if facts.bridge_calls_iptables else "off"
    yield Finding(
        kind="br-netfilter",
        severity=Severity.OK,
        seen=f"net.bridge.bridge-nf-call-iptables is {word}: what pods of this node send each "
        f"other over a bridge {'also meets' if word == 'on' else 'does not meet'} the node's rules",
    )


def _inotify(facts: NodeFacts) -> Iterator[Finding]:
    if facts.inotify is None:
        return
    used, limit = facts.inotify
    seen = f"{used} of {limit} inotify instances of this user are in use"
    if used < limit * INOTIFY_FULL:
        yield Finding(kind="inotify", severity=Severity.OK, seen=seen)
        return
    yield Finding(
        kind="inotify",
        severity=Severity.WARNING,
        seen=seen,
        means="the agent cannot watch the CNI configuration, and learns of changes later",
        fix=f"sysctl -w fs.inotify.max_user_instances={limit * 4}",
    )


def _clock(facts: NodeFacts) -> Iterator[Finding]:
    if facts.synchronised is False:
        yield Finding(
            kind="clock",
            severity=Severity.INFO,
            seen="nothing keeps this node's clock right (the kernel says: unsynchronised)",
            means="certificates of the mesh live for hours: a clock that is off makes them "
            "invalid too early, or not valid yet",
            fix="timedatectl set-ntp true",
        )
    elif facts.synchronised:
        yield Finding(kind="clock", severity=Severity.OK, seen="synchronised")


_RULES: tuple[Callable[[NodeFacts], Iterator[Finding]], ...] = (
    _conntrack,
    _ipv6,
    _rp_filter,
    _bridge,
    _inotify,
    _clock,
)
