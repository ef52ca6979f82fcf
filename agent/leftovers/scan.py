"""The scan: looks into namespaces, judges what is there, and says what it has looked at.

Nothing is written. One namespace that cannot be read is a finding and does not end the scan.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from agent.backends.session import reading
from agent.kernel.namespaces import Place
from agent.kernel.netns import Netns, NetnsId
from agent.leftovers import around, captures, cni, ebpf, owners, service_proxy
from agent.leftovers.finding import Finding, Kind, Severity, Where
from agent.leftovers.look import Seen, look
from agent.leftovers.node import Node, sign_of_life
from agent.leftovers.remains import remains
from agent.model.catalogue import by_name
from agent.model.errors import AgentError, NamespaceRefused

REMEMBERED = 512  # namespaces


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A namespace to look into: how commands call it, and whether it is the node's own."""

    place: Place
    host: bool = False

    @property
    def command(self) -> str:
        return "--host" if self.host else f"--netns {self.place.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What was found, the worst first, and what was looked at."""

    findings: tuple[Finding, ...]
    namespaces: int
    rules: int
    kube_chains: int
    remarks: tuple[str, ...]
    duration_ms: float

    def document(self) -> dict[str, object]:
        return {
            "findings": [finding.document() for finding in self.findings],
            "scanned": {
                "namespaces": self.namespaces,
                "rules": self.rules,
                "kube_chains": self.kube_chains,
                "remarks": list(self.remarks),
                "duration_ms": self.duration_ms,
            },
        }


@dataclass(slots=True)
class _Totals:
    namespaces: int = 0
    rules: int = 0
    kube_chains: int = 0
    remarks: list[str] = field(default_factory=list)


Progress = Callable[[str], None]


def scan(
    subjects: Sequence[Subject],
    node: Node,
    *,
    folders: cni.Folders | None = None,
    progress: Progress = lambda _: None,
) -> Report:
    """Look into every subject once; with `folders` also at what belongs to the node as a whole.

    `progress` is told the name of each namespace before it is looked into.
    """
    started = time.monotonic()
    totals = _Totals()
    found: list[Finding] = []
    if folders is not None:
        found += on_node(folders, node)
    for subject in subjects:
        progress(subject.place.name)
        try:
            found += _look_into(subject, node, totals, alone=len(subjects) == 1)
        except NamespaceRefused:
            continue  # it ended meanwhile
        except AgentError as error:
            found.append(_hidden(subject, str(error)))
    found.sort(key=lambda f: (-f.severity.rank, f.where.netns, f.kind.value))
    return Report(
        findings=tuple(found),
        namespaces=totals.namespaces,
        rules=totals.rules,
        kube_chains=totals.kube_chains,
        remarks=tuple(totals.remarks),
        duration_ms=round((time.monotonic() - started) * 1000, 3),
    )


def inspect(netns: Netns, subject: Subject, node: Node) -> tuple[Seen, tuple[Finding, ...]]:
    """Return what an open namespace holds and what of it is left over.

    Raises: StateUnreadable, EnvironmentLacks.
    """
    with reading(netns) as session:
        seen = look(session, subject.place.name)
    return seen, tuple(judge(seen, node, subject))


@dataclass(frozen=True, slots=True)
class _Judged:
    seen: Seen
    node: Node
    subject: Subject
    findings: tuple[Finding, ...]


class Memory:
    """What was found in each namespace, for whoever looks into the same ones again and again.

    Looking is done anew each time, and judging, which takes as long, only where something changed:
    in the namespace, in what is known of its pod, or among the processes that own rules.
    """

    def __init__(self) -> None:
        self._judged: OrderedDict[NetnsId, _Judged] = OrderedDict()
        self._lock = threading.Lock()

    def inspect(self, netns: Netns, subject: Subject, node: Node) -> tuple[Finding, ...]:
        """Return what of an open namespace is left over.

        Raises: StateUnreadable, EnvironmentLacks.
        """
        with reading(netns) as session:
            seen = look(session, subject.place.name)
        with self._lock:
            known = self._judged.pop(netns.id, None)
        if known is None or (known.seen, known.node, known.subject) != (seen, node, subject):
            known = _Judged(seen, node, subject, tuple(judge(seen, node, subject)))
        with self._lock:
            self._judged[netns.id] = known
            if len(self._judged) > REMEMBERED:
                self._judged.popitem(last=False)
        return known.findings


def on_node(folders: cni.Folders, node: Node) -> tuple[Finding, ...]:
    """Return what is left over on the node outside of namespaces: CNI files, pins of eBPF."""
    return (*cni.findings(folders, node), *ebpf.findings(node))


def _look_into(
    subject: Subject, node: Node, totals: _Totals, *, alone: bool
) -> tuple[Finding, ...]:
    with Netns.open(subject.place.path) as netns:
        if netns.id != subject.place.id:
            raise NamespaceRefused(f"{subject.place.name} is another namespace now")
        seen, found = inspect(netns, subject, node)
    totals.namespaces += 1
    totals.rules += seen.rule_count
    chains = _kube_chains(seen)
    totals.kube_chains += chains
    if subject.host or alone:
        totals.remarks.append(_kube_remark(subject, seen, node, chains))
    return found


def judge(seen: Seen, node: Node, subject: Subject) -> Iterator[Finding]:
    """Yield everything that is left over in one namespace. Pure."""
    pod = node.pods.get(seen.id)
    title, command = pod.title if pod else "", subject.command
    capture = captures.find(seen, pod, command)
    if capture:
        yield from (
            captures.on_host(capture, node) if subject.host else captures.on_pod(capture, node)
        )
    else:
        yield from captures.lone_guard(seen, pod, command)
        yield from captures.lone_sets(seen, node, command)
    known = remains(seen)
    yield from service_proxy.service_proxy(seen, node, known, command)
    yield from owners.networks(seen, node, known, command)
    yield from owners.meshes(
        seen, node, known, command, host=subject.host, captured=capture is not None
    )
    if subject.host or capture is None or len(capture.parts) < 2:  # else it is told already
        yield from around.mixed(seen, title, command)
    yield from around.routes(seen, node, title, command)
    yield from around.unreadable(seen, title)


def _kube_chains(seen: Seen) -> int:
    return sum(
        chain.name.startswith("KUBE-")
        for parts in seen.state.loaded.values()
        for ruleset in parts.values()
        for table in ruleset.tables
        for chain in table.chains
    ) + sum(len(table.chains) for table in seen.tables if table.name == "kube-proxy")


def _kube_remark(subject: Subject, seen: Seen, node: Node, chains: int) -> str:
    alive = sign_of_life(by_name("kube-proxy"), seen, node)
    if chains == 0 and alive is None and not seen.unreadable:
        return f"{subject.place.name}: 0 KUBE- chains and no kube-proxy: it has left nothing here"
    return f"{subject.place.name}: {chains} KUBE- chains; {alive or 'no kube-proxy runs'}"


def _hidden(subject: Subject, why: str) -> Finding:
    return Finding(
        kind=Kind.UNREADABLE,
        severity=Severity.WARNING,
        where=Where(netns=subject.place.name),
        objects=(),
        owner="unknown",
        evidence=(why,),
        explanation="This namespace could not be looked into, so nothing is known of it.",
        fix=f"intercept-agent scan {subject.command} -v",
    )
