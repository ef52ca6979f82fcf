"""Findings about eBPF: pins whose owner is gone."""

import os
from collections.abc import Iterator
from pathlib import Path

from agent.kernel import bpffs
from agent.leftovers import catalogue
from agent.leftovers.finding import Finding, Kind, Severity, Where
from agent.leftovers.node import Node, running
from agent.leftovers.owner import Owner


def findings(node: Node) -> Iterator[Finding]:
    """Yield, by owner, the pins of programs that are gone. They go on working without them.

    Where not every process can be seen, nothing can be said.
    """
    if not node.all_visible:
        return
    for mount in bpffs.mounts():
        pins: dict[str, list[str]] = {}
        for path in bpffs.pins(mount):
            owner = catalogue.owner_of_pin(os.path.relpath(path, mount))
            if owner is not None:
                pins.setdefault(owner.name, []).append(path)
        for name, paths in pins.items():
            owner = catalogue.by_name(name)
            if running(owner, node) is None:
                yield _pinned(owner, mount, paths)


def _pinned(owner: Owner, mount: Path, paths: list[str]) -> Finding:
    tops = sorted({Path(path).relative_to(mount).parts[0] for path in paths})
    return Finding(
        kind=Kind.EBPF,
        # What this agent pins is made to outlive it, so it may only be down for a while.
        severity=Severity.INFO if owner.name == "intercept-agent" else Severity.WARNING,
        where=Where(backend="ebpf"),
        objects=tuple(paths),
        owner=owner.name,
        evidence=(
            f"{len(paths)} pins of {owner.title} below {mount}",
            f"no process {' or '.join(owner.processes[:2])} runs on this node",
        ),
        explanation=f"Programs and maps of {owner.title} live on without it: what is attached goes "
        "on steering traffic by maps that nobody keeps up to date.",
        fix=f"rm -r {' '.join(str(mount / top) for top in tops)}",
    )
