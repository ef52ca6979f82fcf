"""Walks a packet through a namespace whose connections eBPF turns at the socket. Pure.

What is sent meets the program before any rule does, and rules see where it goes instead. What
arrives meets the rules first, and the program when a listener is looked for.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from agent.explain.walk import walk
from agent.model.enrolment import Decision, verdict
from agent.model.host import LOOPBACK, Host, loopback
from agent.model.packet import Hit, Kind, Outcome, Packet, Step, Trace, Verdict
from agent.model.settings import Settings
from agent.model.state import EBPF

LEFT_ALONE = (Kind.PASS, Kind.ACCEPT)


class Walk(Protocol):
    """A walk through the rules that are loaded besides."""

    def __call__(self, packet: Packet, host: Host, *, inbound: bool = False) -> Trace: ...


def walk_enrolled(
    settings: Settings, rules: Walk, packet: Packet, host: Host, *, inbound: bool
) -> Trace:
    """Return what the programs and the rules do to a packet on its whole way."""
    if inbound:
        return _arriving(settings, rules(packet, host, inbound=True), host)
    return _leaving(settings, rules, packet, host)


def _leaving(settings: Settings, rules: Walk, packet: Packet, host: Host) -> Trace:
    alone = walk((), packet, host)  # for its source and interface
    start = alone.packet
    if start.out_interface != LOOPBACK and host.is_local(start.destination):
        start = replace(start, out_interface=LOOPBACK)
    program = "connect" if packet.protocol == "tcp" else "sendmsg"
    decision = verdict(settings, start, inbound=False)
    step = _step(f"{program}{packet.family.version}", decision, packet)
    if decision.verdict.kind is Kind.MAYBE:
        return _either(settings, rules, packet, host)
    if decision.verdict.kind in LEFT_ALONE:
        found = rules(packet, host)
        outcomes = tuple(_explained(o, step) if o.decided_by is None else o for o in found.outcomes)
        return replace(found, outcomes=outcomes, steps=(step, *found.steps))
    turned = replace(
        start,
        destination=loopback(packet.destination),
        dport=decision.verdict.port or packet.dport,
        out_interface="",
    )
    found = rules(turned, host)
    return replace(_redirected(found, decision, step), packet=start, steps=(step, *found.steps))


def _either(settings: Settings, rules: Walk, packet: Packet, host: Host) -> Trace:
    """Return both ways of a packet whose sender may be one that a gate lets pass."""
    ways = [
        _leaving(settings, rules, replace(packet, cgroup=cgroup), host)
        for cgroup in (settings.passing[0], "/")
    ]
    outcomes = [outcome for way in ways for outcome in way.outcomes]
    return replace(
        ways[0],
        outcomes=tuple(outcomes),
        steps=tuple(step for way in ways for step in way.steps),
        verdict=_common(outcomes, Verdict(Kind.MAYBE)),
    )


def _arriving(settings: Settings, found: Trace, host: Host) -> Trace:
    """Ask the program about every branch that the rules deliver here."""
    steps = list(found.steps)
    outcomes = []
    for outcome in found.outcomes:
        end = outcome.packet
        delivered = outcome.verdict.kind is not Kind.DROP and host.is_local(end.destination)
        if not delivered or outcome.verdict.kind is Kind.MAYBE:
            outcomes.append(outcome)
            continue
        decision = verdict(settings, end, inbound=True)
        step = replace(_step("inbound", decision, end), branch=outcome.branch)
        steps.append(step)
        if decision.verdict.kind is Kind.REDIRECT:
            outcome = replace(outcome, verdict=decision.verdict, local=True, decided_by=step)
        elif outcome.decided_by is None:
            outcome = _explained(outcome, step)
        outcomes.append(outcome)
    return replace(
        found,
        outcomes=tuple(outcomes),
        steps=tuple(steps),
        verdict=_common(outcomes, found.verdict),
    )


def _redirected(found: Trace, decision: Decision, step: Step) -> Trace:
    """Return the walk of a packet that was turned before: to go on undisturbed is a redirect."""
    outcomes = tuple(
        replace(outcome, verdict=decision.verdict, local=True, decided_by=step)
        if outcome.verdict.kind in LEFT_ALONE
        else outcome
        for outcome in found.outcomes
    )
    return replace(found, outcomes=outcomes, verdict=_common(outcomes, found.verdict))


def _common(outcomes: Sequence[Outcome], otherwise: Verdict) -> Verdict:
    verdicts = {outcome.verdict for outcome in outcomes}
    if len(verdicts) == 1:
        return verdicts.pop()
    return Verdict(Kind.MAYBE) if verdicts else otherwise


def _explained(outcome: Outcome, step: Step) -> Outcome:
    return replace(outcome, decided_by=step)


def _step(program: str, decision: Decision, packet: Packet) -> Step:
    return Step(
        hook=program,
        family=packet.family,
        backend=EBPF,
        chain=program,
        text=decision.setting or "",
        hit=Hit.YES if decision.verdict.kind is Kind.REDIRECT else Hit.NO,
        why=decision.why,
        setting=decision.setting,
    )
