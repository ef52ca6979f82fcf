"""Which processes get past the proxy by who they are, and which could undo the capture. Pure."""

from collections.abc import Iterator

from agent.explain.finding import Finding, Severity
from agent.explain.pod.facts import Facts
from agent.explain.pod.flows import is_among, mesh_ports
from agent.kernel.processes import Process
from agent.model.pod import PROXY

# What runs in the proxy's container beside the proxy, where no container tells.
PROXY_NAMES = frozenset({"envoy", "pilot-agent"})
SHOWN = 5


def proxies(facts: Facts) -> tuple[Process, ...]:
    """Return the proxy's processes, all of which run as its user or group.

    They are who takes the redirected traffic, who is in the proxy's container, all of the same
    containers, and their parents and children; where nobody is, who has a proxy's name.
    """
    known = {p.pid: p for p in facts.processes or () if _exempt(facts, p)}
    ours = {pid for pid in _takers(facts) if pid in known}
    ours |= {pid for pid, process in known.items() if container_of(facts, process) == PROXY}
    if not ours:
        ours = {pid for pid, process in known.items() if process.name in PROXY_NAMES}
    containers = {known[pid].container for pid in ours} - {""}
    ours |= {pid for pid, process in known.items() if process.container in containers}
    for pid in list(ours):
        while (pid := known[pid].parent) in known:
            ours.add(pid)
    for pid in sorted(known):
        if known[pid].parent in ours:
            ours.add(pid)
    return tuple(known[pid] for pid in sorted(ours))


def _takers(facts: Facts) -> set[int]:
    """Return the processes that listen where traffic is redirected to."""
    ports = [port for port, use in mesh_ports(facts).items() if use in ("outbound", "inbound")]
    listeners = [listener for port in ports for listener in facts.listening(port)]
    return {process.pid for listener in listeners for process in listener.processes}


def impostors(facts: Facts) -> tuple[Process, ...]:
    """Return the processes that are not the proxy and run as its user or group."""
    ours = {process.pid for process in proxies(facts)}
    return tuple(p for p in facts.processes or () if p.pid not in ours and _exempt(facts, p))


def powerful(facts: Facts) -> tuple[Process, ...]:
    """Return the processes besides the proxy that can change the rules of the namespace."""
    ours = {process.pid for process in proxies(facts)}
    return tuple(p for p in facts.processes or () if p.net_admin and p.pid not in ours)


def identities(facts: Facts, *, captured: bool) -> Iterator[Finding]:
    """Return findings about processes of a captured namespace."""
    if not captured or facts.processes is None:
        return
    if found := impostors(facts):
        yield Finding(
            kind="bypass-by-id",
            severity=Severity.CRITICAL,
            seen=f"not the proxy, and run as its user or group: {listed(facts, found)}",
            means="what they send is taken for the proxy's own and goes past it",
            fix="",
        )
    if found := powerful(facts):
        yield Finding(
            kind="net-admin",
            severity=Severity.WARNING,
            seen=f"can change the rules here (CAP_NET_ADMIN): {listed(facts, found)}",
            means="they can undo the capture; it steers traffic, it is no sandbox",
        )


def listed(facts: Facts, processes: tuple[Process, ...]) -> str:
    """Return the processes in words, with their containers where those are known."""
    words = [_named(facts, process) for process in processes[:SHOWN]]
    more = len(processes) - SHOWN
    return ", ".join(words) + (f" and {more} more" if more > 0 else "")


def _named(facts: Facts, process: Process) -> str:
    container = container_of(facts, process)
    where = f" in container {container}" if container else ""
    return f"{process.name} (PID {process.pid}, UID {process.uid}, GID {process.gid}){where}"


def container_of(facts: Facts, process: Process) -> str:
    """Return the name of a process's container, else the begin of its id, else nothing."""
    known = facts.pod.containers if facts.pod else {}
    return known.get(process.container, process.container[:12])


def _exempt(facts: Facts, process: Process) -> bool:
    return is_among(process.uid, facts.proxy_uids) or is_among(process.gid, facts.proxy_gids)
