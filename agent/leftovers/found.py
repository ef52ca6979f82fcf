"""All captures of Istio's kind in one namespace, however they were made, and where they lead."""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from agent.formats.iptables_save import render_rule
from agent.leftovers import policy
from agent.leftovers.finding import Takes, Where
from agent.leftovers.look import OWN_TABLES, NativeTable, Seen
from agent.leftovers.node import Node, PodFact, running
from agent.leftovers.reach import Goal, goals, turned
from agent.model import catalogue, owned
from agent.model.enrolment import Enrolment
from agent.model.owner import Owner, Role
from agent.model.ruleset import BUILTIN_CHAINS, Family, Rulesets
from agent.model.state import EBPF, NFTABLES
from agent.model.wanted import captures

ENTRY = "ebpf: the namespace is enrolled with the programs of the node"
NOTHING = Enrolment(None)
NATIVE_GOAL = re.compile(r"(redirect to|tproxy (?:ip |ip6 )?to) \S*:(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """All captures of one namespace, however they were made."""

    seen: Seen
    parts: Mapping[str, Rulesets]
    native: tuple[NativeTable, ...]
    pod: PodFact | None
    command: str
    targets: Counter[tuple[Family | None, Goal]] = field(default_factory=Counter)

    @property
    def ambient(self) -> bool:
        native = any(table.name.startswith("istio-ambient-") for table in self.native)
        return native or any(
            owned.is_ambient(ruleset) or ruleset.chain("nat", "ISTIO_POSTRT")
            for parts in self.parts.values()
            for ruleset in parts.values()
        )

    @property
    def enrolment(self) -> Enrolment | None:
        """What eBPF was told of the namespace."""
        found = self.seen.state.enrolment
        return found if found is not None and found.is_of_namespace else None

    @property
    def owner(self) -> str:
        if not self.native and (set(self.parts) == {NFTABLES} or not self.parts):
            return "intercept-agent"
        return "istio-ambient" if self.ambient else "istio"

    def life(self, node: Node) -> tuple[str, ...]:
        """Say whether the node's proxy and its agent run, where the capture is theirs."""
        if not self.ambient:
            return ()
        owner = catalogue.by_name("istio-ambient")
        hidden = "" if node.all_visible else " among the processes that can be seen from here"
        found = running(owner, node) or f"no process of {owner.title} runs on this node{hidden}"
        return (found,)

    def is_stale(self, *, closed: bool) -> bool:
        """Whether the pod asks for no such capture.

        Who looks for sidecars only does not know of an ambient pod by which label it is one, so
        there it counts only with nobody behind it.
        """
        if self.pod is None:
            return False
        if self.ambient and self.pod.ambient is not None:
            return not self.pod.ambient
        return self.pod.wants is False and (closed or not self.ambient)

    def where(self) -> Where:
        families = {f for parts in self.parts.values() for f in parts}
        if self.enrolment and self.enrolment.settings:
            families |= set(self.enrolment.settings.families)
        tables = {t.name for p in self.parts.values() for r in p.values() for t in r.tables}
        backends = [
            *self.parts,
            *([NFTABLES] if self.native and NFTABLES not in self.parts else []),
            *([EBPF] if self.enrolment else []),
        ]
        return Where(
            netns=self.seen.name,
            pod=self.pod.title if self.pod else "",
            family=",".join(f.value for f in Family if f in families),
            backend=",".join(backends),
            table=",".join(sorted(tables | {f"{t.family} {t.name}" for t in self.native})),
        )

    def objects(self) -> tuple[str, ...]:
        named: dict[str, None] = {}
        for backend, parts in self.parts.items():
            for ruleset in parts.values():
                for table in ruleset.tables:
                    for chain in table.chains:
                        if chain.name not in BUILTIN_CHAINS.get(table.name, ()):
                            named[chain.name] = None
                            continue
                        for rule in chain.rules:
                            named[f"-t {table.name} {render_rule(chain.name, rule)}"] = None
            named |= {f"table inet {t}": None for t, b in OWN_TABLES.items() if b == backend}
        named |= {f"table {t.family} {t.name}": None for t in self.native}
        named |= {ENTRY: None} if self.enrolment else {}
        return tuple(named)

    def size(self) -> str:
        rules = sum(r.rule_count() for parts in self.parts.values() for r in parts.values())
        rules += sum(len(re.findall(r"(?m)^\t\t\S", t.text)) for t in self.native)
        if self.enrolment and not rules:
            return ENTRY
        return f"{rules} capture rules in {' and '.join(self.where().backend.split(','))}"

    def takes(self) -> Takes:
        """What taking all of it away takes: rules, tables, and the routes that only it needs."""
        routes = self.seen.state.routes
        return Takes(
            capture=bool(self.parts) or self.enrolment is not None,
            tables=frozenset((t.family, t.name) for t in self.native),
            routes=tuple(r for r in routes if _of_a_capture(policy.owner_of(r, routes))),
        )


def _of_a_capture(owner: Owner | None) -> bool:
    return owner is not None and owner.role is Role.CAPTURE


def find(seen: Seen, pod: PodFact | None, command: str) -> Found | None:
    """Return the captures of a namespace, or None; `command` says how to name it to a command."""
    parts = captures(seen.state)
    native = tuple(
        table
        for table in seen.tables
        if table.name not in OWN_TABLES
        and (owner := catalogue.owner_of_table(table.family, table.name))
        and owner.role is Role.CAPTURE
    )
    if not parts and not native and not (seen.state.enrolment or NOTHING).is_of_namespace:
        return None
    targets: Counter[tuple[Family | None, Goal]] = Counter()
    for rulesets in parts.values():
        for family, ruleset in rulesets.items():
            targets.update({(family, goal): n for goal, n in goals(ruleset).items()})
    for table in native:
        for how, port in NATIVE_GOAL.findall(table.text):
            targets[None, Goal("tcp", int(port), how.startswith("tproxy"))] += 1
    if seen.state.enrolment and (settings := seen.state.enrolment.in_force):
        targets.update((family, goal) for family in settings.families for goal in turned(settings))
    return Found(seen=seen, parts=parts, native=native, pod=pod, command=command, targets=targets)
