"""From sandboxes to pods, and from two lists of pods to what changed. Pure: no I/O, no clock."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from agent.node.cri.details import Sandbox
from agent.node.source import Changed, Gone, PodKey, PodRecord, Update


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The pods that one list shows. `unknown` are those of which it says too little."""

    pods: Mapping[PodKey, PodRecord] = field(default_factory=dict)
    unknown: frozenset[PodKey] = frozenset()


def key_of(sandbox: Sandbox) -> PodKey:
    return PodKey(sandbox.namespace, sandbox.name, sandbox.uid)


def view(sandboxes: Iterable[Sandbox], alive: Callable[[str], bool]) -> View:
    """Return one record a pod: of its newest ready sandbox, or else of its newest live one.

    A sandbox that is not ready still counts while its namespace is there (`alive` of its path):
    the pause process may have died under containers that run on. One that is stopped stays listed
    for minutes and counts no more. Where the newest of a pod was not read yet, the pod is unknown.
    """
    newest: dict[PodKey, Sandbox] = {}
    for sandbox in sandboxes:
        if not _counts(sandbox, alive):
            continue
        key = key_of(sandbox)
        if key not in newest or _rank(sandbox) > _rank(newest[key]):
            newest[key] = sandbox
    pods = {key: record(sandbox) for key, sandbox in newest.items() if sandbox.detailed}
    return View(pods=pods, unknown=frozenset(newest.keys() - pods.keys()))


def _counts(sandbox: Sandbox, alive: Callable[[str], bool]) -> bool:
    if sandbox.ready or not sandbox.detailed:
        return True
    return sandbox.netns_path is not None and alive(sandbox.netns_path)


def _rank(sandbox: Sandbox) -> tuple[bool, int, int, str]:
    return (sandbox.ready, sandbox.attempt, sandbox.created_at_ns, sandbox.id)


def record(sandbox: Sandbox) -> PodRecord:
    return PodRecord(
        namespace=sandbox.namespace,
        name=sandbox.name,
        uid=sandbox.uid,
        sandbox_id=sandbox.id,
        netns=sandbox.netns_path,
        annotations=sandbox.annotations,
        labels=sandbox.labels,
        host_network=sandbox.host_network,
        ips=sandbox.ips,
        runtime_handler=sandbox.runtime_handler,
        ready=sandbox.ready,
    )


def with_doubts(
    now: View,
    before: Mapping[PodKey, PodRecord],
    doubted: frozenset[PodKey],
    alive: Callable[[str], bool],
) -> tuple[View, frozenset[PodKey]]:
    """Return the view with pods that may only seem to be gone among the unknown, and these.

    A pod that is not listed while its namespace is there is believed to be gone only when a second
    list says so too (`doubted` are those of the list before).
    """
    missing = before.keys() - now.pods.keys() - now.unknown - doubted
    doubts = frozenset(key for key in missing if (path := before[key].netns) and alive(path))
    return View(pods=now.pods, unknown=now.unknown | doubts), doubts


def changes(source: str, before: Mapping[PodKey, PodRecord], now: View) -> tuple[Update, ...]:
    """Return what to say so that whoever knew `before` knows `now`: first who is gone."""
    gone = sorted(before.keys() - now.pods.keys() - now.unknown)
    changed = [pod for key, pod in now.pods.items() if before.get(key) != pod]
    return (
        *(Gone(source=source, key=key) for key in gone),
        *(Changed(source=source, pod=pod) for pod in changed),
    )


def known(before: Mapping[PodKey, PodRecord], now: View) -> dict[PodKey, PodRecord]:
    """Return what is known after `now`: of the unknown, what was known before."""
    stays = {key: before[key] for key in now.unknown if key in before}
    return {**stays, **now.pods}
