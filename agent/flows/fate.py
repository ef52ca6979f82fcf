"""What became of a connection with regard to the capture. Pure.

Where it went was seen (agent.flows.event). Why it was left alone is not seen but explained, by the
same walk that `trace` and `explain` take (agent.explain), through what the capture should be.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

from agent.explain.effects import endpoint
from agent.flows.event import Endpoint, Event, Result
from agent.flows.view import View
from agent.model import numbers
from agent.model.enrolment import verdict
from agent.model.host import LOOPBACK
from agent.model.packet import Kind, Packet, Trace
from agent.model.settings import Settings

GATE, GUARD = "gate", "guard"
LEFT_ALONE = (Kind.PASS, Kind.ACCEPT)
ENDS = {
    Result.SENT: "",
    Result.CONNECTED: "",
    Result.REFUSED: "; it was refused there",
    Result.UNANSWERED: "; no answer yet",
    Result.FAILED: "; it ended before an answer came",
}


class Became(StrEnum):
    """What became of a connection, in one word."""

    PROXIED = "proxied"  # it was given to the proxy
    EXEMPT = "exempt"  # a setting leaves it alone
    REFUSED = "refused"  # it was not given to the proxy, and not let past it either
    BYPASSED = "bypassed"  # it passed the proxy by, which the capture does not allow
    UNCAPTURED = "uncaptured"  # nothing captures the namespace


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """One connection, ready to be shown.

    `destination` is the original one, None where that is not known any more. `port` is where it
    arrived instead, if it did. `setting` says by which setting it is exempt, or what refused it
    (`gate`, `guard`), or which setting wants captured what passed by. `uid` is that of the process
    at the pod's end, as the pod's user namespace has it; it is None, and `pid` 0, where that is not
    known.
    """

    at_ns: int
    took_ms: float
    inbound: bool
    protocol: str
    pid: int
    process: str
    uid: int | None
    source: Endpoint
    destination: Endpoint | None
    became: Became
    port: int | None
    setting: str | None
    result: Result
    text: str


@dataclass(frozen=True, slots=True)
class Judgement:
    """`port` and `setting` as a flow has them, and the sentence."""

    became: Became
    text: str
    port: int | None = None
    setting: str | None = None


def judge(view: View, event: Event, packet: Packet, landed: Endpoint) -> Judgement:
    """Return what became of a connection.

    `packet` is its first one, as it was made or arrived; `landed` is where it was delivered to or
    sent on, the packet's own destination if nobody turned it.
    """
    asked = (packet.destination, packet.dport)
    if not event.left:
        return _dropped(view, packet)
    local = event.inbound or view.is_local(landed[0])
    if local and landed != asked and _is_proxy(view, landed[1]):
        return _turned(event, landed[1])
    return _untouched(view, event, packet, landed)


def _is_proxy(view: View, port: int) -> bool:
    settings = view.settings
    if settings is None:  # rules of somebody else: wherever they send it
        return True
    return port in (settings.proxy_port, settings.inbound_capture_port, numbers.DNS_PROXY_PORT)


def _turned(event: Event, port: int) -> Judgement:
    if event.result in (Result.CONNECTED, Result.SENT):
        return Judgement(Became.PROXIED, f"to the proxy, port {port}", port)
    why = {
        Result.REFUSED: f"nobody listens on port {port}",
        Result.UNANSWERED: f"nobody on port {port} answers",
        Result.FAILED: f"port {port} did not answer",
    }[event.result]
    return Judgement(Became.REFUSED, f"refused by the gate: {why}", port, GATE)


def _dropped(view: View, packet: Packet) -> Judgement:
    """It never left: say which rule drops such packets now."""
    step = next(
        (o.decided_by for o in view.loaded(packet).outcomes if o.verdict.kind is Kind.DROP), None
    )
    if step is not None and step.setting == GUARD:
        return Judgement(Became.REFUSED, "refused by the standing guard", None, GUARD)
    by = f" by {step.backend} {step.table} {step.chain}" if step and step.table else ""
    return Judgement(Became.REFUSED, f"dropped{by} before it left")


def _untouched(view: View, event: Event, packet: Packet, landed: Endpoint) -> Judgement:
    elsewhere = landed != (packet.destination, packet.dport)
    more = (f", sent on to {endpoint(*landed)}" if elsewhere else "") + ENDS[event.result]
    if not view.captured:
        return Judgement(Became.UNCAPTURED, f"not captured{more}")
    walked = view.expected(packet)
    # What a rule decides that nobody can foresee has been decided: by the branch that let it pass.
    past = next((o for o in walked.outcomes if o.verdict.kind in LEFT_ALONE), None)
    outcome = past or walked.outcomes[0]
    setting = outcome.decided_by.setting if outcome.decided_by else None
    if past is None and walked.verdict.kind in (Kind.REDIRECT, Kind.MAYBE):
        port = walked.verdict.port
        if event.inbound and port == landed[1]:
            return _turned(event, port)  # the proxy's own port was dialled
        asks = f": {setting} asks for port {port}" if setting else ""
        return Judgement(Became.BYPASSED, f"passed the proxy by{asks}{more}", None, setting)
    why = "the rules that are loaded"
    if setting is None and view.settings is not None:
        setting, why = _lack(view, view.settings, walked)
    by = f" by {setting}" if setting else f": {why}"
    return Judgement(Became.EXEMPT, f"exempt{by}{more}", None, setting)


def _lack(view: View, settings: Settings, walked: Trace) -> tuple[str | None, str]:
    """Return the setting that leaves a packet alone where no rule does but the lack of one."""
    if settings.ambient:
        return "mode", ""
    packet = walked.packet
    if not walked.inbound and view.is_local(packet.destination):
        packet = replace(packet, out_interface=LOOPBACK)
    decision = verdict(settings, packet, inbound=walked.inbound)
    if decision.setting is None and packet.protocol == "udp":
        servers = f"dns_servers_v{packet.destination.version}"
        return servers if settings.dns_active else "redirect_dns", ""
    known = decision.verdict.kind is not Kind.REDIRECT
    return (decision.setting, decision.why) if known else (None, "the rules that are loaded")
