"""Proves with real connections that a namespace is captured as its settings say.

A throwaway outside is joined to the namespace (agent.kernel.probe_net); connections that the
settings capture or exempt are made into it and out of it, and where each lands is seen. Nothing of
the probe's own leaves the machine, and nothing of it stays.
"""

import random
from collections.abc import Iterator
from dataclasses import replace

from agent.backends import registry
from agent.backends.session import reading
from agent.capture.probing.attempt import (
    Attempt,
    Facts,
    Outcome,
    ProbePlan,
    ProbeResult,
    Way,
)
from agent.capture.probing.exchange import exchange
from agent.capture.probing.plan import choose
from agent.capture.probing.verdict import Judge
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
        plan = _without_strays(outside, plan, settings)
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
    with reading(netns) as session:
        enrolled = registry.EBPF_BACKEND.read(session) is not None
    return Facts(surroundings=surroundings, listeners=listeners, enrolled=enrolled)


def _without_strays(outside: Outside, plan: ProbePlan, settings: Settings) -> ProbePlan:
    """Leave out what the namespace's policy routing would lead elsewhere, which is past the link.

    An inbound connection whose answers would go elsewhere takes the link's own address instead.
    """
    kept: list[Attempt] = []
    skipped = list(plan.skipped)
    for attempt in plan.attempts:
        moved = replace(attempt, destination=plan.link(attempt.family).pod)
        choices = (attempt, moved) if attempt.way is Way.IN else (attempt,)
        packets = (tuple(_packets(plan, choice, settings)) for choice in choices)
        led = (c for c, p in zip(choices, packets, strict=True) if all(outside.leads(p)))
        if (found := next(led, None)) is not None:
            kept.append(found)
        else:
            skipped.append(_stray(attempt))
    return replace(plan, attempts=tuple(kept), skipped=tuple(skipped))


def _packets(
    plan: ProbePlan, attempt: Attempt, settings: Settings
) -> Iterator[tuple[Address, Address, int]]:
    """Yield destination, source and uid of what the namespace sends over the link in an attempt."""
    link = plan.link(attempt.family)
    if attempt.way is Way.OUT and attempt.owner and not attempt.local:
        yield attempt.destination, link.pod, attempt.owner.uid
    elif attempt.way is Way.IN:
        # The answer is the proxy's, or the kernel's own if nobody listens.
        for uid in (settings.proxy_uid[0].first, 0):
            yield link.far, attempt.destination, uid


def _stray(attempt: Attempt) -> ProbeResult:
    why = (
        f"nothing was sent to {attempt.destination}: the policy routing of the namespace leads "
        "past the probe's link"
    )
    return ProbeResult(name=attempt.name, outcome=Outcome.SKIPPED, detail=why)
