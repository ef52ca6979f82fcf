"""The record of a walk: steps in the order in which they happened, and how each branch ended."""

from collections.abc import Sequence

from agent.explain.branch import Branch, Entry, Visit
from agent.explain.origin import CAPTURE_PREFIX, setting_of
from agent.formats.nft_words import spec_in_words
from agent.model.packet import Hit, Kind, Outcome, Step, Verdict
from agent.model.ruleset import BASIC, Family, Rule, Table

# Rules that say where to; the rule that led to them says why.
ONLY_WHERE = frozenset({"proxy_port", "inbound_capture_port"})

KERNEL = Visit("")


class Journal:
    """Collects steps and outcomes."""

    def __init__(self, family: Family) -> None:
        self.steps: list[Step] = []
        self.outcomes: list[Outcome] = []
        self._family = family
        self._captures: dict[int, Table | None] = {}

    def rule(self, branch: Branch, visit: Visit, rule: Rule, hit: Hit, why: str) -> Step:
        """Record that a rule was looked at: the one before the branch's present index."""
        capture = self._capture(visit)
        step = Step(
            hook=branch.hook,
            family=self._family,
            backend=visit.backend,
            table=visit.table,
            chain=branch.chain,
            number=branch.index,
            text=spec_in_words(rule),
            hit=hit,
            why=why,
            setting=setting_of(capture, branch.chain, branch.index) if capture else None,
            branch=branch.number,
        )
        self.steps.append(step)
        return step

    def event(self, branch: Branch, why: str, visit: Visit = KERNEL, text: str = "") -> Step:
        """Record what the kernel does without a rule, or by a policy."""
        step = Step(
            hook=branch.hook,
            family=self._family,
            backend=visit.backend,
            table=visit.table,
            chain=visit.entry(branch.hook) if visit.table else "",
            text=text,
            why=why,
            branch=branch.number,
        )
        self.steps.append(step)
        return step

    def end(
        self, branch: Branch, kind: Kind, why: str = "", *, local: bool = False, by: Step | None
    ) -> None:
        """Record how a branch ends, or may end."""
        port = None
        if kind is Kind.REDIRECT:
            port = branch.tproxy_port or branch.packet.dport
        outcome = Outcome(
            verdict=Verdict(kind, port),
            packet=branch.packet,
            local=local,
            branch=branch.number,
            decided_by=by,
            why=why,
        )
        self.outcomes.append(outcome)

    def verdict(self) -> Verdict:
        """Return what all outcomes have in common; `maybe` if that is nothing."""
        found = {outcome.verdict for outcome in self.outcomes}
        if len(found) == 1:
            return found.pop()
        if {verdict.kind for verdict in found} == {Kind.ACCEPT, Kind.PASS}:
            return Verdict(Kind.PASS)  # it goes where it was going, whichever rule says so
        return Verdict(Kind.MAYBE)

    def _capture(self, visit: Visit) -> Table | None:
        """Return the table of a visit if it holds a capture; looked up once, for big tables."""
        key = id(visit)
        if key not in self._captures:
            ours = any(name.startswith(CAPTURE_PREFIX) for name in visit.chains)
            self._captures[key] = Table(visit.table, tuple(visit.chains.values())) if ours else None
        return self._captures[key]


def reason(step: Step, rule: Rule, path: Sequence[Entry]) -> Step:
    """Return the rule that explains a verdict better than the rule that spoke it.

    A chain that only holds a verdict (`-p tcp -j REDIRECT`, `-j DROP`) was made to be jumped to:
    the jump has the conditions.
    """
    for entry in reversed(path):
        plain = step.number == 1 and not _conditions(rule)
        if not plain and step.setting not in ONLY_WHERE:
            break
        step, rule = entry.step, entry.rule
    return step


def _conditions(rule: Rule) -> bool:
    """Whether a rule has conditions beyond the protocol."""
    return any(
        match.module not in ("tcp", "udp", "comment", BASIC)
        or any(option.name not in ("-p", "--comment") for option in match.options)
        for match in rule.matches
    )
