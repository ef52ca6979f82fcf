"""Proves with real connections that a namespace is captured as its settings say.

A throwaway outside is joined to the namespace (agent.kernel.probe_net); connections that the
settings capture or exempt are made into it and out of it, and where each lands is seen. Nothing of
the probe's own leaves the machine, and nothing of it stays.
"""

import random
from dataclasses import replace

from agent.capture.probe_attempt import (
    Attempt,
    Facts,
    Outcome,
    ProbePlan,
    ProbeResult,
    Way,
)
from agent.capture.probe_exchange import exchange
from agent.capture.probe_plan import choose
from agent.capture.probe_verdict import Judge
from agent.kernel import probe_net
from agent.kernel.netns import Netns
from agent.kernel.probe_net import Outside
from agent.kernel.sockets import SocketTable
from agent.model.settings import Settings
from agent.model.values import Address

__all__ = ["Outcome", "ProbeResult", "passed", "probe"]


def probe(netns: Netns, settings: Settings) -> tuple[ProbeResult, ...]:
    """Return a result for everything that the settings capture or exempt.

    Takes a fraction of a second, or two seconds if something is not answered. A proxy that runs
    sees connections that say nothing and are reset; applications see none, unless every captured
    port is an application's.

    Raises: EnvironmentLacks if the kernel lacks what the probe needs, or another probe of the
    namespace does not end; StateUnreadable if sockets cannot be listed.
    """
    facts = _facts(netns)
    plan = choose(settings, facts, random.Random())
    if not plan.attempts:
        return plan.skipped
    with probe_net.outside(netns, plan.name, plan.links, plan.roads()) as outside:
        plan = _without_strays(outside, plan)
        seen = exchange(plan, settings, netns, outside.netns)
    judge = Judge(settings, facts, netns.path)
    judged = (judge.result(a, s) for a, s in zip(plan.attempts, seen, strict=True))
    return (*judged, *plan.skipped)


def passed(results: tuple[ProbeResult, ...]) -> bool:
    """Tell whether nothing failed; what was skipped is no failure."""
    return all(result.outcome is not Outcome.FAILED for result in results)


def _facts(netns: Netns) -> Facts:
    surroundings = netns.run(probe_net.look)
    with netns.run(SocketTable) as table:
        listeners = (*table.listeners("tcp"), *table.listeners("udp"))
    return Facts(surroundings=surroundings, listeners=listeners)


def _without_strays(outside: Outside, plan: ProbePlan) -> ProbePlan:
    """Leave out what the namespace's policy routing would lead elsewhere, which is past the link.

    An inbound connection whose answers would go elsewhere takes the link's own address instead.
    """
    packets = tuple(_packet(plan, attempt) for attempt in plan.attempts)
    kept: list[Attempt] = []
    skipped = list(plan.skipped)
    for attempt, leads in zip(plan.attempts, outside.leads(packets), strict=True):
        if leads or attempt.local or attempt.way is Way.BACK:
            kept.append(attempt)
        elif attempt.way is Way.IN:
            kept.append(replace(attempt, destination=plan.link(attempt.family).pod))
        else:
            skipped.append(_stray(attempt))
    return replace(plan, attempts=tuple(kept), skipped=tuple(skipped))


def _packet(plan: ProbePlan, attempt: Attempt) -> tuple[Address, Address, int]:
    """Return destination, source and uid of what the namespace sends in an attempt."""
    link = plan.link(attempt.family)
    if attempt.way is Way.OUT:
        return attempt.destination, link.pod, attempt.owner.uid if attempt.owner else 0
    return link.far, attempt.destination, 0


def _stray(attempt: Attempt) -> ProbeResult:
    why = (
        f"nothing was sent to {attempt.destination}: the policy routing of the namespace leads "
        "past the probe's link"
    )
    return ProbeResult(name=attempt.name, outcome=Outcome.SKIPPED, detail=why)
