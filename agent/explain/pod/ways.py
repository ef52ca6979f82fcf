"""The way of each kind of connection through what is loaded, place by place, for drawings. Pure.

It is the walk of `explain.trace`, less the rules that did not match: nothing here knows a rule.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

from agent.explain.pod.facts import Facts
from agent.explain.pod.flows import Fate, Flow, Walked, walked
from agent.model.packet import Hit, Kind, Step, Trace
from agent.model.state import EBPF, GUARD


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """A rule or program that had a say, or what the kernel did by itself.

    `kind` is rule, program, kernel or guard. `at` is the chain or program, `where` its hook, table
    and backend, `number` that of the rule in its chain. `text` is the rule as iptables-save spells
    it, `why` what it did, `setting` where it comes from. `sure` is false where nobody can foresee
    whether it matches. `missed` counts the rules of that chain that were asked before, in vain.
    """

    kind: str
    at: str
    where: str
    why: str
    number: int | None = None
    text: str = ""
    setting: str = ""
    sure: bool = True
    missed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One kind of connection: who makes it, every stop, and what becomes of it.

    `direction` and `fate` are those of `Flow`; `summary` is the whole of it in one sentence.
    """

    direction: str
    family: str
    packet: str
    start: str
    stops: tuple[Stop, ...]
    end: str
    result: str
    fate: str
    summary: str


def ways(facts: Facts) -> tuple[Way, ...]:
    """Return the ways of new connections; none where the rules could not be seen.

    The proxy's own is left out where nothing has a say about it.
    """
    found = (_way(one) for one in walked(facts))
    return tuple(way for way in found if way.stops or way.direction != "proxy")


class _Place(NamedTuple):
    """A chain, as seen from one hook; empty words where there is none."""

    hook: str
    backend: str
    table: str
    chain: str


def _way(one: Walked) -> Way:
    flow = one.flow
    return Way(
        direction=flow.direction,
        family=flow.family,
        packet=flow.packet,
        start=_start(flow, one.trace),
        stops=tuple(_stops(one.trace)),
        end=_end(flow),
        result=flow.result,
        fate=flow.fate.value,
        summary=flow.text,
    )


def _start(flow: Flow, trace: Trace) -> str:
    if flow.direction == "in":
        return "A client outside the pod"
    who = "The proxy" if flow.direction == "proxy" else "The application"
    return f"{who}, UID {trace.packet.uid}"


def _end(flow: Flow) -> str:
    if flow.fate is Fate.PROXIED:
        return f"The proxy, port {flow.port}"
    if flow.fate is Fate.REFUSED:
        return f"Nobody takes it on port {flow.port}"
    if flow.fate is Fate.DROPPED:
        return "Dropped"
    if flow.fate is Fate.UNKNOWN:
        return f"Port {flow.port}" if flow.port else "Nobody can foresee it"
    return "The pod itself, as it came" if flow.direction == "in" else "Out, as it is"


def _stops(trace: Trace) -> list[Stop]:
    """Return the stops of the first branch, to where others part from it and end elsewhere.

    The guard's rules are one stop unless one of them decides.
    """
    deciding = [outcome.decided_by for outcome in trace.outcomes]
    parting = _parting(trace)
    found: list[Stop] = []
    missed, before = 0, _Place("", "", "", "")
    for step in trace.steps:
        if step.branch != 1:
            continue
        decides = any(step is one for one in deciding)
        place = _place(step)
        if place != before:
            if found and missed and found[-1].why == f"jumps to {before.chain}":
                found[-1] = replace(found[-1], why=f"{found[-1].why}, where no rule matches")
            missed = 0
        if step.backend == GUARD and not decides:
            if (before.hook, before.backend) != (step.hook, GUARD):
                found.append(_guard(step))
        elif step.hit is Hit.NO and step.backend != EBPF:
            missed += 1
        elif step.number is not None or not step.table or decides:
            found.append(_stop(step, missed))
            missed = 0
        before = place
        if parting and (place, step.number) == parting:
            break
    return found


def _parting(trace: Trace) -> tuple[_Place, int | None] | None:
    """Return the rule at which nobody can foresee how it goes on; None if all ways end alike."""
    if trace.verdict.kind is not Kind.MAYBE:
        return None
    return next(((_place(step), step.number) for step in trace.steps if step.branch == 2), None)


def _place(step: Step) -> _Place:
    return _Place(step.hook, step.backend, step.table, step.chain)


def _guard(step: Step) -> Stop:
    where = f"{step.hook} {step.table}"
    return Stop(kind="guard", at="the standing guard", where=where, why="lets it through")


def _stop(step: Step, missed: int) -> Stop:
    kind = "program" if step.backend == EBPF else "rule" if step.table else "kernel"
    places = {
        "program": "eBPF",
        "kernel": step.hook,
        "rule": f"{step.hook} {step.table}, {step.backend}",
    }
    return Stop(
        kind=kind,
        at=step.chain or "the kernel",
        where=places[kind],
        why=step.why,
        number=step.number,
        text=step.text if kind == "rule" else "",
        setting=step.setting or "",
        sure=step.hit is not Hit.MAYBE,
        missed=missed,
    )
