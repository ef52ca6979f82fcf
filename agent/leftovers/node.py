"""What is known of the node around the namespaces, and whether an owner of rules still lives."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache

from agent.kernel.namespaces import Process
from agent.kernel.netns import NetnsId
from agent.leftovers import proxy_mode
from agent.leftovers.look import Seen
from agent.model import catalogue
from agent.model.decision import Reason
from agent.model.owner import Owner, Role

COMM_LENGTH = 15  # the kernel keeps no more of a process's name (TASK_COMM_LEN)


@dataclass(frozen=True, slots=True, kw_only=True)
class PodFact:
    """What the agent or the runtime says of a pod.

    `wants` tells whether its labels and annotations ask for capture, None where that is not known;
    `ambient` whether they ask for the node's proxy; `reason` is a sentence that says why.
    """

    title: str
    wants: bool | None
    reason: str
    ambient: bool | None = None

    @classmethod
    def of(cls, title: str, reason: str, text: str, *, captured: bool) -> "PodFact":
        """Return what follows from a decision: its reason in one word, and in words."""
        ambient: dict[str, bool] = {Reason.AMBIENT: True, Reason.NOT_ENROLLED: False}
        return cls(
            title=title,
            wants=wants_capture(reason, captured=captured),
            reason=text,
            ambient=ambient.get(reason),
        )


# What a decision's reason means for rules that are there: these pods have rightful ones, though
# this agent did not make them; of those nothing is known. Every other uncaptured pod wants none.
OTHERS_CAPTURE = frozenset(
    {Reason.INIT_CONTAINER, Reason.AMBIENT, Reason.INVALID_ANNOTATIONS, Reason.RUNTIME_CLASS}
)
NOT_KNOWN = frozenset({Reason.NOT_KUBERNETES, Reason.UNKNOWN_POD, Reason.UNKNOWN_LABELS})


def wants_capture(reason: str, *, captured: bool) -> bool | None:
    """Return whether a pod about which this was decided asks for a capture; None if unknown."""
    if captured or reason in OTHERS_CAPTURE:
        return True
    return None if reason in NOT_KNOWN else False


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """The processes of the node and the pods in its namespaces.

    Without `all_visible` a program that is not among the processes may still run.
    """

    processes: tuple[Process, ...] = ()
    all_visible: bool = True
    pods: Mapping[NetnsId, PodFact] = field(default_factory=dict)


def owners_among(processes: Iterable[Process]) -> tuple[Process, ...]:
    """Return the processes by which some owner of rules may be known to live."""
    return tuple(process for process in processes if process.names & _owner_names())


@cache
def _owner_names() -> frozenset[str]:
    names = {
        name
        for owner in catalogue.OWNERS
        for name in (
            *(each.split()[0] for each in owner.processes),
            *(name for name, _ in owner.embedded),
        )
    }
    return frozenset(names | {name[:COMM_LENGTH] for name in names})


def sign_of_life(owner: Owner, seen: Seen, node: Node) -> str | None:
    """Return what proves that an owner of rules in this namespace lives, or None.

    Its process must run in the namespace itself, or in one that cannot be told (who may not trace
    a process is not shown its namespaces). A kube-proxy lives, too, if one says which mode it works
    in, whatever its program is called. Where processes cannot be seen, a listener on one of its
    health ports counts; otherwise it does not, for others listen there too (Cilium does on
    kube-proxy's).
    """
    for process in node.processes:
        if process.netns in (seen.id, None) and _is(process, owner):
            where = "" if process.netns else ", in which namespace cannot be told"
            return f"{process.name} (PID {process.pid}) runs{where}"
    if owner.role is Role.SERVICE_PROXY and seen.proxy_mode:
        return f"a kube-proxy answers on TCP port {proxy_mode.PORT}"
    if not node.all_visible:
        for port in owner.health:
            if listens(seen, "tcp", port):
                return f"TCP port {port}, its health port, is answered"
    return None


def running(owner: Owner, node: Node) -> str | None:
    """Return what proves that an owner runs anywhere on this node, or None."""
    for process in node.processes:
        if _is(process, owner):
            return f"{process.name} (PID {process.pid}) runs"
    return None


def lack_of_life(owner: Owner, seen: Seen, node: Node) -> tuple[str, ...]:
    """Return what was looked for and not found, as evidence."""
    found = []
    if owner.processes:
        hidden = "" if node.all_visible else " among the processes that can be seen from here"
        found.append(f"no process {' or '.join(owner.processes[:2])} runs in it{hidden}")
    closed = [str(port) for port in owner.health if not listens(seen, "tcp", port)]
    if closed and seen.listeners is not None:
        found.append(f"nothing listens on its TCP port {' or '.join(closed)}")
    return tuple(found)


def listens(seen: Seen, protocol: str, port: int) -> bool:
    return any(s.protocol == protocol and s.local[1] == port for s in seen.listeners or ())


def _is(process: Process, owner: Owner) -> bool:
    if any(_was_started(process, *each.split()) for each in owner.processes):
        inside = {name for name, _ in owner.embedded}
        return not (process.names & inside) or not _switched_off(process, owner)
    embedding = process.names & {name for name, _ in owner.embedded}
    return bool(embedding) and not _switched_off(process, owner)


def _was_started(process: Process, name: str, word: str = "") -> bool:
    """Tell a program by its name, and the one of many that it is by the word behind that."""
    named = bool(process.names & {name, name[:COMM_LENGTH]})
    return named and (not word or word in process.words)


def _switched_off(process: Process, owner: Owner) -> bool:
    off = {word for _, word in owner.embedded}
    return any(word in off or word.removesuffix("=true") in off for word in process.words)
