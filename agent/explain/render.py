"""A walk for people and for machines."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from agent.explain.effects import endpoint
from agent.model.packet import Hit, Kind, Outcome, Packet, Step, Trace
from agent.model.state import EBPF

# Of a run of rules that did not match, this many are printed before the rest is summed up.
SHOWN_MISSES = 12
# Of what may become of a packet, as many are told: a Service has one way for each endpoint.
SHOWN_WAYS = 8


def to_json(trace: Trace) -> dict[str, object]:
    """Return the document of the contract, with the verdict also as a sentence."""
    return {
        "verdict": trace.verdict.kind.value,
        "port": trace.verdict.port,
        "summary": summary(trace),
        "steps": [_step(step) for step in trace.steps],
    }


def _step(step: Step) -> dict[str, object]:
    return {
        "hook": step.hook,
        "family": step.family.value,
        "backend": step.backend or None,
        "table": step.table or None,
        "chain": step.chain or None,
        "rule": step.number,
        "text": step.text,
        "hit": step.hit.value,
        "why": step.why,
        "setting": step.setting,
        "branch": step.branch,
    }


def to_text(trace: Trace, *, all_rules: bool = False) -> str:
    """Return the walk as lines: a heading for each table of each hook, its rules, the verdict.

    Long runs of rules that did not match are summed up unless `all_rules` is set.
    """
    lines = [_packet_line(trace)]
    for (branch, hook, where), group in groupby(trace.steps, key=_heading):
        label = f"branch {branch}: " if trace.steps[-1].branch > 1 else ""
        lines += ("", f"{label}{hook} {where}".rstrip())
        lines += _rules(list(group), all_rules=all_rules)
    lines += ("", summary(trace))
    return "\n".join(lines) + "\n"


def _heading(step: Step) -> tuple[int, str, str]:
    where = f"{step.table} ({step.backend})" if step.table else step.backend
    return step.branch, step.hook, where


def _packet_line(trace: Trace) -> str:
    packet = trace.packet
    if trace.inbound:
        return f"{_subject(trace)}, in by {packet.in_interface or '?'}"
    return f"{_subject(trace)}, source {packet.source or 'unknown'}, {_out(packet)}"


def _out(packet: Packet) -> str:
    return f"out by {packet.out_interface or 'no route'}"


def _rules(steps: list[Step], *, all_rules: bool) -> Iterator[str]:
    for missed, group in groupby(steps, key=lambda step: step.hit is Hit.NO):
        run = list(group)
        if missed and not all_rules and len(run) > SHOWN_MISSES + 1:
            yield from (_line(step) for step in run[:SHOWN_MISSES])
            yield f"     ... {len(run) - SHOWN_MISSES} more rules that do not match"
        else:
            yield from (_line(step) for step in run)


SIGNS = {Hit.YES: "hit", Hit.NO: " - ", Hit.MAYBE: " ? "}


def _line(step: Step) -> str:
    setting = f"  [{step.setting}]" if step.setting else ""
    if step.number is None:
        return f"     {step.text + ': ' if step.text else ''}{step.why}"
    return f" {SIGNS[step.hit]} {step.chain} {step.number}: {step.text}  ({step.why}){setting}"


# --- sentences -----------------------------------------------------------------------------------


def summary(trace: Trace) -> str:
    """Return the verdict and its reason as a sentence, as two where there are several ways."""
    subject, ways = _subject(trace), _ways(trace)
    if trace.verdict.kind is not Kind.MAYBE and len(ways) == 1:
        return f"{subject} {ways[0]}."
    parting = next((step for step in trace.steps if step.hit is Hit.MAYBE), None)
    where = f": {_rule(parting)} decides, and nobody can foresee how" if parting else ""
    return f"{subject} may go several ways{where}. It {some(ways)}."


def _ways(trace: Trace) -> list[str]:
    """Return what may become of the packet; of a sure verdict only where it may lead to."""
    kind = trace.verdict.kind
    if kind is Kind.MAYBE:
        return list(dict.fromkeys(_fate(one, one.verdict.kind) for one in trace.outcomes))
    ends: dict[str, str] = {}
    for one in trace.outcomes:
        ends.setdefault(_target(one) if kind is Kind.REDIRECT else "", _fate(one, kind))
    return list(ends.values())


def some(ways: Sequence[str]) -> str:
    """Return the first few of what may be, as one text."""
    more = len(ways) - SHOWN_WAYS
    return ", or ".join((*ways[:SHOWN_WAYS], *([f"{more} more"] if more > 0 else ())))


def _subject(trace: Trace) -> str:
    packet = trace.packet
    text = f"{packet.protocol.upper()} to {endpoint(packet.destination, packet.dport)}"
    if trace.inbound:
        return f"{text} from {packet.source}" if packet.source else f"{text} from outside"
    return f"{text} from {_sender(packet)}" if packet.uid is not None else text


def _sender(packet: Packet) -> str:
    gid = f" gid {packet.gid}" if packet.gid not in (None, packet.uid) else ""
    mark = f" with mark {packet.mark:#x}" if packet.mark else ""
    return f"uid {packet.uid}{gid}{mark}"


def _fate(outcome: Outcome, kind: Kind) -> str:
    step = outcome.decided_by
    rule = _rule(step) if step and (step.table or step.backend == EBPF) else ""
    if kind is Kind.REDIRECT:
        return f"is redirected to {_target(outcome)} by {rule}"
    if kind is Kind.DROP:
        return f"is dropped by {rule}" if rule else f"is dropped: {outcome.why}"
    if kind is Kind.MAYBE:
        return f"cannot be followed: {outcome.why}"
    if not rule:
        return "is not redirected: no rule applies to it"
    return f"is not redirected: {rule} exempts it"


def _target(outcome: Outcome) -> str:
    port = outcome.verdict.port or outcome.packet.dport
    if outcome.local:
        return f"port {port}"
    return endpoint(outcome.packet.destination, port)


def _rule(step: Step) -> str:
    if step.backend == EBPF:
        return f"the eBPF program {step.chain}" + (f" ({step.setting})" if step.setting else "")
    if step.number is None:
        return f"the {step.text} of {step.table} {step.chain}"
    setting = f" ({step.setting})" if step.setting else ""
    return f"{step.table} {step.chain} rule {step.number}{setting}"
