"""From what was seen of a namespace to an explanation of it. Pure."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from agent.explain.finding import WORST_FIRST, Finding, Severity
from agent.explain.pod import expiry, labels, refused
from agent.explain.pod.exemptions import Exemption, captures_dns, exemptions
from agent.explain.pod.facts import Facts
from agent.explain.pod.flows import Fate, Flow, flows
from agent.explain.pod.identities import identities
from agent.explain.pod.owners import Loaded, loaded
from agent.model.decision import Reason
from agent.model.plan import plan
from agent.model.state import BACKENDS, EBPF, NamespaceState

MESH_STATES = {
    (True, True): "captured, and should be",
    (True, False): "captured, and should not be",
    (False, True): "NOT captured, and should be",
    (False, False): "not captured, and need not be",
    (True, None): "captured",
    (False, None): "not captured",
}
TAKEN = frozenset({Fate.PROXIED, Fate.REFUSED})  # sent to the proxy's ports


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What is to be said of a namespace. `captured` and `should_be` are None if not known."""

    facts: Facts
    captured: bool | None
    should_be: bool | None
    reason: str
    why: str
    summary: str
    loaded: tuple[Loaded, ...] = ()
    exemptions: tuple[Exemption, ...] = ()
    captures_dns: bool = False
    flows: tuple[Flow, ...] = ()
    findings: tuple[Finding, ...] = ()

    @property
    def healthy(self) -> bool:
        return all(finding.severity is not Severity.CRITICAL for finding in self.findings)


def explain(facts: Facts) -> Explanation:
    """Return what the facts mean, the worst findings first."""
    there = _loaded(facts)
    captured = None if facts.state is None else bool(there)
    should_be, reason, why = labels.wanted(facts)
    if facts.node:
        return _node(facts, there, captured)
    if facts.pod is not None and facts.pod.host_network:
        return _host_network(facts, reason, why)
    seen = Explanation(
        facts=facts,
        captured=captured,
        should_be=should_be,
        reason=reason,
        why=why,
        summary="",
        loaded=there,
        exemptions=exemptions(_as_rules(facts.state)) if facts.state else (),
        captures_dns=facts.state is not None and captures_dns(_as_rules(facts.state)),
        flows=flows(facts),
    )
    found = sorted(_findings(seen), key=lambda finding: WORST_FIRST.index(finding.severity))
    return replace(seen, findings=tuple(found), summary=_summary(seen, found))


def _as_rules(state: NamespaceState) -> NamespaceState:
    """Return the state with the rules that the eBPF programs, if they capture, are equal to."""
    settings = state.enrolment.in_force if state.enrolment else None
    return state if settings is None else replace(state, loaded={EBPF: plan(settings).rulesets})


def _loaded(facts: Facts) -> tuple[Loaded, ...]:
    if facts.state is None:
        return ()
    said = facts.pod.created if facts.pod else None
    return loaded(
        facts.state,
        chosen=facts.backend,
        recorded=facts.recorded,
        annotations=said.annotations if said else None,
    )


def _node(facts: Facts, there: tuple[Loaded, ...], captured: bool | None) -> Explanation:
    text = (
        f"{facts.target} is the node's own network namespace ({facts.node}), which is never "
        "captured: all that the node does would go into one pod's proxy"
    )
    found = tuple(
        Finding(
            kind="host-rules",
            severity=Severity.CRITICAL,
            seen=f"{one.rules} rules of a capture in {one.backend} ({one.evidence})",
            means="they steer the traffic of the node itself and of every host-network pod",
            fix="intercept-agent remove --netns host --host",
        )
        for one in there
    )
    return Explanation(
        facts=facts,
        captured=captured,
        should_be=False,
        reason="node",
        why=text,
        summary="the node itself, never captured" + (": rules of a capture are here" * bool(found)),
        loaded=there,
        findings=found,
    )


def _host_network(facts: Facts, reason: str, why: str) -> Explanation:
    return Explanation(
        facts=facts,
        captured=False,
        should_be=False,
        reason=reason or "host-network",
        why=why,
        summary="not captured: it uses the node's network, which is never captured",
    )


def _summary(seen: Explanation, found: Sequence[Finding]) -> str:
    if seen.captured is None:
        return "what is loaded could not be seen"
    text = MESH_STATES[seen.captured, seen.should_be]
    worst = [finding for finding in found if finding.severity is Severity.CRITICAL]
    if seen.captured and any(finding.kind == "blackhole" for finding in worst):
        return f"{text}, but nobody listens where its traffic is sent"
    if seen.captured and worst:
        return f"{text}, but not as it should be"
    if seen.captured and seen.should_be and not seen.facts.differences:
        return f"{text}; as it should be"
    return text


# --- findings -------------------------------------------------------------------------------------


def _findings(seen: Explanation) -> Iterator[Finding]:
    for rule in _RULES:
        yield from rule(seen)
    yield from labels.findings(seen.facts, captured=bool(seen.captured))
    yield from identities(seen.facts, captured=bool(seen.captured))
    yield from expiry.findings(seen.facts)


def _gate_open(seen: Explanation) -> bool:
    """Whether nothing is to be captured yet: the proxy has not listened for the first time."""
    settings = seen.facts.settings
    return (
        settings is not None
        and settings.gate == "open"
        and not seen.facts.listening(settings.proxy_port)
    )


def _uncaptured(seen: Explanation) -> Iterator[Finding]:
    state = seen.facts.state
    enrolled = state.enrolment.in_force if state and state.enrolment else None
    if enrolled is not None and enrolled.gate == "open":
        yield Finding(
            kind="gate-open",
            severity=Severity.INFO,
            seen="the eBPF programs have not seen its proxy listen yet (gate: open)",
            means="its traffic passes until its proxy listens for the first time",
        )
    elif seen.captured is False and seen.should_be and _gate_open(seen):
        yield Finding(
            kind="gate-open",
            severity=Severity.INFO,
            seen="no rule of a capture is loaded yet, and its proxy does not listen (gate: open)",
            means="its traffic passes until its proxy listens for the first time",
        )
    elif seen.captured is False and seen.should_be:
        yield Finding(
            kind="not-captured",
            severity=Severity.CRITICAL,
            seen="no rule of a capture is loaded, in any backend",
            means="its traffic goes past the proxy, in and out, unencrypted and unchecked",
            fix=seen.facts.applies,
        )


def _stale(seen: Explanation) -> Iterator[Finding]:
    # Who captures sidecars only does not know whether a label asks for the node's proxy.
    theirs = any(one.ambient for one in seen.loaded) and seen.reason != Reason.NOT_ENROLLED
    if seen.captured and seen.should_be is False and not theirs:
        yield Finding(
            kind="stale-capture",
            severity=Severity.WARNING,
            seen=f"{_by_whom(seen)}; {seen.why}",
            means="rules stay in a running pod until they are removed or the pod ends",
            fix=f"intercept-agent remove --netns {seen.facts.target}",
        )


def _blackhole(seen: Explanation) -> Iterator[Finding]:
    if seen.captured:
        yield from refused.found(seen.facts, seen.flows, seen.should_be, seen.reason)


def _differs(seen: Explanation) -> Iterator[Finding]:
    facts = seen.facts
    if not seen.captured or not facts.differences or seen.should_be is False:
        return
    twice = len(_backends(seen)) > 1
    yield Finding(
        kind="captured-twice" if twice else "partial-capture",
        severity=Severity.CRITICAL,
        seen=_twice(seen) if twice else _some(facts.differences, "difference"),
        means=(
            "of two backends the one that was programmed last handles a packet; the other one's "
            "rules come back into force when that one is removed"
            if twice
            else f"what is loaded does not agree with {facts.origin or 'its settings'}"
        ),
        fix=facts.applies,
    )


def _foreign(seen: Explanation) -> Iterator[Finding]:
    if seen.captured and seen.facts.foreign:
        yield Finding(
            kind="foreign-rules",
            severity=Severity.WARNING,
            seen=_some(seen.facts.foreign, "rule of others", "rules of others"),
            means="they see packets before the capture does and can take them past it",
            fix=seen.facts.applies,
        )


def _unasked_twice(seen: Explanation) -> Iterator[Finding]:
    """Two backends, where nobody knows what should be."""
    if len(_backends(seen)) > 1 and (not seen.facts.differences or seen.should_be is False):
        yield Finding(
            kind="captured-twice",
            severity=Severity.WARNING,
            seen=_twice(seen),
            means="of two backends the one that was programmed last handles a packet",
            fix=f"intercept-agent remove --netns {seen.facts.target}",
        )


def _one_family(seen: Explanation) -> Iterator[Finding]:
    """Traffic of one family goes to the proxy and that of the other does not (field report 76)."""
    if seen.facts.differences:
        return
    ways = [way for way in ("out", "in") if _parted(seen, way)]
    if not ways:
        return
    taken, left = _parted(seen, ways[0])
    wanted = seen.facts.settings is not None
    yield Finding(
        kind="one-family",
        severity=Severity.WARNING if wanted else Severity.CRITICAL,
        seen=f"{' and '.join(ways)}: {taken} is redirected and {left} is not",
        means=f"whoever uses {left} goes past the proxy"
        + ("; its settings say so" if wanted else ""),
        fix="" if wanted else seen.facts.applies,
    )


def _parted(seen: Explanation, direction: str) -> tuple[str, ...]:
    """Return the family that is redirected and the one that is not, or nothing if they agree."""
    fates: dict[str, set[Fate]] = {}
    for flow in seen.flows:
        if flow.direction == direction and flow.setting != "inbound_ports_exclude":
            fates.setdefault(flow.family, set()).add(flow.fate)
    taken = [family for family, found in fates.items() if found & TAKEN]
    left = [family for family, found in fates.items() if found == {Fate.DIRECT}]
    return (taken[0], left[0]) if taken and left else ()


def _loop(seen: Explanation) -> Iterator[Finding]:
    for flow in seen.flows if seen.captured else ():
        if flow.direction == "proxy" and flow.fate in TAKEN:
            yield Finding(
                kind="proxy-loop",
                severity=Severity.CRITICAL,
                seen=f"what the proxy itself sends is captured: {flow.text}",
                means="it gets its own connections back, in a circle",
                fix=seen.facts.applies,
            )


def _idle(seen: Explanation) -> Iterator[Finding]:
    """Rules that nothing leads to, where no settings are known that would show it."""
    walked = [one for one in seen.loaded if one.walked]
    ways = [flow for flow in seen.flows if flow.direction in ("out", "in")]
    direct = ways and all(flow.fate is Fate.DIRECT for flow in ways)
    if walked and direct and seen.facts.settings is None:
        yield Finding(
            kind="idle-capture",
            severity=Severity.CRITICAL if seen.should_be else Severity.WARNING,
            seen=f"{_by_whom(seen)}, and no new connection is redirected, in or out",
            means="jumps into its chains are missing, or its settings exempt everything",
            fix=f"intercept-agent check --netns {seen.facts.target}",
        )


def _dropped(seen: Explanation) -> Iterator[Finding]:
    for flow in seen.flows:
        if flow.direction in ("out", "in") and flow.fate is Fate.DROPPED and flow.rule:
            guarded = flow.setting == "guard"
            yield Finding(
                kind="dropped",
                severity=Severity.WARNING,
                seen=flow.text,
                means="the standing guard keeps it from going past the proxy"
                if guarded
                else "a rule of somebody wants it so, or was left behind",
                fix=f"intercept-agent trace --netns {seen.facts.target} --to ADDR:PORT",
            )
            return


def _unwalked(seen: Explanation) -> Iterator[Finding]:
    for one in seen.loaded:
        if not one.walked:
            yield Finding(
                kind="not-walked",
                severity=Severity.INFO,
                seen=f"{one.evidence}, {one.rules} rules",
                means="rules that others wrote for nftables itself are not walked here, so what "
                "is said of new connections leaves them out",
            )


def _unreadable(seen: Explanation) -> Iterator[Finding]:
    for reason in seen.facts.state.unreadable if seen.facts.state else ():
        yield Finding(
            kind="unreadable",
            severity=Severity.WARNING,
            seen=reason,
            means="what is loaded there is not part of this explanation",
        )


_RULES: tuple[Callable[[Explanation], Iterator[Finding]], ...] = (
    _uncaptured,
    _stale,
    _blackhole,
    _differs,
    _unasked_twice,
    _foreign,
    _one_family,
    _loop,
    _idle,
    _dropped,
    _unwalked,
    _unreadable,
)


def _backends(seen: Explanation) -> list[str]:
    ours = {one.backend for one in seen.loaded if one.walked}
    return [name for name in (EBPF, *BACKENDS) if name in ours]


def _twice(seen: Explanation) -> str:
    return "captured twice: " + ", and ".join(
        f"{one.rules} rules in {one.backend} ({one.owner}: {one.evidence})" for one in seen.loaded
    )


def _by_whom(seen: Explanation) -> str:
    return "; ".join(f"captured in {one.backend} by {one.owner}" for one in seen.loaded)


def _some(sentences: tuple[str, ...], one: str, many: str = "") -> str:
    count = f"{len(sentences)} {one if len(sentences) == 1 else many or f'{one}s'}"
    return f"{count}: {sentences[0]}" + (" ..." if len(sentences) > 1 else "")
