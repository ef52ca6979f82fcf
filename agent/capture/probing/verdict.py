"""From what became of an attempt to a result that a person can act on. Pure."""

import errno
import os
from dataclasses import dataclass, replace

from agent.capture.probing.attempt import Attempt, Facts, Observation, Outcome, ProbeResult, Way
from agent.capture.probing.space import LOOPBACK
from agent.kernel.sockets import Endpoint
from agent.model.plan import PolicyRule, routes
from agent.model.settings import Settings

Judged = tuple[Outcome, str]


def text(end: Endpoint) -> str:
    """Return an address and port as people write them."""
    address, port = end
    return f"{address}:{port}" if address.version == 4 else f"[{address}]:{port}"


@dataclass(frozen=True, slots=True)
class Judge:
    """Judges the attempts of one probe; `path` names the namespace in advice."""

    settings: Settings
    facts: Facts
    path: str

    def result(self, attempt: Attempt, seen: Observation) -> ProbeResult:
        """Return what an attempt proved."""
        judge = self._exempt if attempt.lands is None else self._captured
        outcome, what = judge(attempt, seen)
        sent = f"{attempt.protocol} {self._who(attempt)} to {text(attempt.goal)}"
        return ProbeResult(name=attempt.name, outcome=outcome, detail=f"{sent} {what}")

    def _who(self, attempt: Attempt) -> str:
        if attempt.way is Way.BACK:
            return f"with mark {attempt.mark} from a client's address"
        if attempt.mark:
            return f"with mark {attempt.mark:#x} from {attempt.owner}"
        return f"from {attempt.owner}" if attempt.owner else "from outside"

    # what must be captured

    def _captured(self, attempt: Attempt, seen: Observation) -> Judged:
        if seen.unbound == errno.EADDRINUSE:
            what = (
                f"was not sent: somebody uses port {attempt.lands} in a way that the probe cannot"
            )
            return Outcome.SKIPPED, f"{what} follow, or just began to; repeat the probe"
        if seen.unbound:
            return Outcome.FAILED, f"cannot be captured: {self._no_loopback(attempt)}"
        if seen.outside:
            return self._escaped(attempt)
        if seen.arrived:
            return self._received(attempt, seen, seen.arrived)
        if seen.accepted:
            return self._accepted(attempt, seen)
        return self._traces(attempt, seen)

    def _received(self, attempt: Attempt, seen: Observation, place: Endpoint) -> Judged:
        if place[1] != attempt.lands:
            return self._wrong_port(attempt, place[1], "")
        if seen.answered_by is None:
            return Outcome.FAILED, (
                f"landed on port {place[1]}, but the answer did not come back: a rule drops it or "
                f"sends it elsewhere{self._zones(attempt)}; {self._advice(attempt)}"
            )
        if (
            attempt.protocol == "tcp"
            and attempt.way is not Way.BACK
            and (seen.original != attempt.goal)
        ):
            told = text(seen.original) if seen.original else "nothing"
            return Outcome.FAILED, (
                f"landed on port {place[1]}, but the proxy is told {told} as its original "
                "destination and would call that: another rule translates it before"
            )
        if attempt.way is Way.BACK:
            return Outcome.OK, "was answered through the loopback route that the mark takes"
        kept = " with its original destination" if attempt.protocol == "tcp" else ""
        return Outcome.OK, f"landed on port {place[1]}{kept}, and the answer came back"

    def _accepted(self, attempt: Attempt, seen: Observation) -> Judged:
        assert seen.accepted is not None
        place, uid = seen.accepted.local, seen.accepted.uid
        whose = f" (uid {uid})" if seen.accepted.inode else ""
        if self._is_capture(attempt, place, uid):
            return Outcome.OK, f"was accepted by the proxy{whose} at {text(place)}"
        if place == attempt.goal:
            return Outcome.FAILED, (
                f"was not captured: the application's own socket{whose} accepted it; "
                f"{self._cause(attempt)}"
            )
        return self._wrong_port(attempt, place[1], whose)

    def _is_capture(self, attempt: Attempt, place: Endpoint, uid: int) -> bool:
        """Tell whether a socket of the pod is the proxy's.

        Those of TPROXY and of eBPF have the original address.
        """
        kept = self.settings.tproxy or self.facts.enrolled
        if not (kept and attempt.way is Way.IN):
            return place[1] == attempt.lands
        if place != attempt.goal:
            return False
        return not self._listening(place) or any(uid in span for span in self.settings.proxy_uid)

    def _listening(self, place: Endpoint) -> bool:
        return self.facts.live("tcp", place[0], place[1])

    def _traces(self, attempt: Attempt, seen: Observation) -> Judged:
        """Judge by conntrack and errors: nobody of whom the probe knows got it."""
        moved = seen.translated if seen.translated != attempt.goal else None
        if moved and moved[1] != attempt.lands:
            return self._wrong_port(attempt, moved[1], "")
        if moved and (seen.connected or attempt.protocol == "udp") and attempt.live:
            who = "its own socket" if self.facts.enrolled else "conntrack"
            return Outcome.OK, f"was redirected to the proxy at {text(moved)}, {who} says"
        if moved and seen.error == errno.ECONNREFUSED:
            return Outcome.FAILED, f"was redirected to {text(moved)}, which refused it"
        if attempt.live and (seen.connected or attempt.protocol == "udp"):
            return self._unproven(attempt, seen)
        if seen.connected:
            return Outcome.FAILED, f"was accepted, but not by the probe; {self._cause(attempt)}"
        if seen.error == errno.ECONNREFUSED and attempt.way is Way.IN:
            return Outcome.FAILED, (
                f"was not captured: it reached port {attempt.port} itself, where nobody listens; "
                f"{self._cause(attempt)}"
            )
        if seen.error == errno.ECONNREFUSED:
            return Outcome.FAILED, (
                "was refused: a rule rejects it or redirects it to a port where nobody listens; "
                f"{self._advice(attempt)}"
            )
        if seen.error:
            return Outcome.FAILED, (
                f"could not be sent ({os.strerror(seen.error)}): a rule or route rejects it; "
                f"{self._advice(attempt)}"
            )
        return self._lost(attempt)

    def _unproven(self, attempt: Attempt, seen: Observation) -> Judged:
        """Judge what a live proxy may have got: TPROXY alone can answer where nobody listens."""
        if seen.connected and attempt.way is Way.IN and self.settings.tproxy:
            if not self._listening(attempt.goal):
                return Outcome.OK, "was accepted where nobody listens, so TPROXY handed it over"
        elif seen.translated == attempt.goal:
            return self._escaped(attempt)
        return Outcome.SKIPPED, "is not provable while the proxy listens: no trace of it was left"

    def _escaped(self, attempt: Attempt) -> Judged:
        return Outcome.FAILED, (
            f"was not captured: it left the pod past the proxy; {self._cause(attempt)}"
        )

    def _wrong_port(self, attempt: Attempt, port: int, whose: str) -> Judged:
        return Outcome.FAILED, (
            f"landed on port {port}{whose} instead of {attempt.lands}: another rule takes it "
            f"first; {self._advice(attempt)}"
        )

    def _lost(self, attempt: Attempt) -> Judged:
        settings = self.settings
        if attempt.way is Way.BACK:
            return Outcome.FAILED, (
                "got no answer: the application's answers leave the pod instead of going back to "
                f"the proxy. Marked packets need `{self._policy(attempt)}` and a local default "
                "route in that table, the mangle rules that restore the mark, and rp_filter 0"
            )
        cause = "a rule drops it"
        if not self.facts.surroundings.lo_up:
            cause = self._no_loopback(attempt)
        elif attempt.way is Way.IN and settings.tproxy:
            cause = "TPROXY found no listener to hand it to, or a rule drops it"
            port = attempt.lands or 0
            if any(s.local[1] == port and not s.transparent for s in self.facts.listeners):
                cause = f"the listener on port {port} lacks IP_TRANSPARENT, so TPROXY drops it"
        return Outcome.FAILED, f"got no answer: {cause}; {self._advice(attempt)}"

    def _policy(self, attempt: Attempt) -> str:
        """Return the command that makes the policy rule of the capture."""
        rules = (route for route in routes(self.settings) if isinstance(route, PolicyRule))
        return next((r.command() for r in rules if r.family is attempt.family), "ip rule")

    def _no_loopback(self, attempt: Attempt) -> str:
        if self.facts.surroundings.lo_up:
            return f"{LOOPBACK[attempt.family]} is missing on lo, where REDIRECT delivers"
        return "lo is down, so nothing can be redirected: `ip link set lo up`"

    def _zones(self, attempt: Attempt) -> str:
        if attempt.protocol == "udp":
            return ", or the raw table's conntrack zones are not as they must be"
        return ""

    # what must not be captured

    def _exempt(self, attempt: Attempt, seen: Observation) -> Judged:
        if attempt.way is Way.IN:
            return self._exempt_inbound(attempt, seen)
        if seen.outside and seen.answered_by:
            return Outcome.OK, "went its own way, as it must"
        if seen.outside:
            return Outcome.FAILED, (
                "went its own way, but the answer did not come back: a rule drops it or sends it "
                f"elsewhere{self._zones(attempt)}; {self._advice(attempt)}"
            )
        place = self._place(seen)
        if place and place != attempt.goal:
            return self._caught(attempt, place)
        why = os.strerror(seen.error) if seen.error else "no answer"
        return Outcome.FAILED, (
            f"must pass uncaptured and did not arrive ({why}): a rule drops it or sends it "
            f"elsewhere; {self._advice(attempt)}"
        )

    def _exempt_inbound(self, attempt: Attempt, seen: Observation) -> Judged:
        place = self._place(seen)
        if place and (seen.arrived or place != attempt.goal):
            return self._caught(attempt, place)
        if seen.accepted and self.settings.tproxy:
            inbound = replace(attempt, lands=self.settings.inbound_capture_port)
            if self._is_capture(inbound, seen.accepted.local, seen.accepted.uid):
                return self._caught(attempt, (attempt.destination, inbound.lands or 0))
        if seen.accepted or seen.connected:
            return Outcome.OK, "reached the socket that listens there, as it must"
        if seen.error == errno.ECONNREFUSED:
            return Outcome.OK, "reached the pod itself, where nobody listens, as it must"
        return Outcome.SKIPPED, "got no answer: a rule drops it, which is no matter of the capture"

    def _place(self, seen: Observation) -> Endpoint | None:
        """Return where something in the pod got it."""
        accepted = seen.accepted.local if seen.accepted else None
        return seen.arrived or accepted or seen.translated

    def _caught(self, attempt: Attempt, place: Endpoint) -> Judged:
        return Outcome.FAILED, (
            f"was captured to port {place[1]}, and must not be: the rule that exempts it is "
            f"missing or comes too late; {self._advice(attempt)}"
        )

    # advice

    def _cause(self, attempt: Attempt) -> str:
        if self.facts.enrolled:
            return (
                "an eBPF program is not attached, or was told otherwise, or another turns the "
                f"connection first; {self._advice(attempt)}"
            )
        family = attempt.family
        table = "mangle" if attempt.way is Way.IN and self.settings.tproxy else "nat"
        chain = "PREROUTING" if attempt.way is Way.IN else "OUTPUT"
        return (
            f"the {family} rules of {table} {chain} are missing, incomplete or behind a rule of "
            f"somebody else; {self._advice(attempt)}"
        )

    def _advice(self, attempt: Attempt) -> str:
        """Return the command that shows which rule decides."""
        way = "--in"
        if attempt.owner:
            way = f"--uid {attempt.owner.uid} --gid {attempt.owner.gid}"
        if attempt.mark:
            way = f"{way} --mark {attempt.mark:#x}"
        protocol = " --proto udp" if attempt.protocol == "udp" else ""
        command = f"intercept-agent trace --netns {self.path} {way} --to {text(attempt.goal)}"
        return f"`{command}{protocol}` shows the way"
