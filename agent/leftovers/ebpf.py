"""Findings about eBPF: programs and pins whose owner is gone. They go on working without it."""

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from agent.kernel import bpf_programs, bpffs
from agent.kernel.bpf_programs import Program
from agent.leftovers.finding import Finding, Kind, Severity, Where
from agent.leftovers.node import Node, running
from agent.model import catalogue
from agent.model.owner import Owner

# Captured pods still depend on them, so they are not simply to be deleted.
OWN_FIX = (
    "intercept-agent run keeps them again; to be rid of them, take the capture out of every pod "
    "(intercept-agent remove --netns NS): the last one takes them along"
)
Pins = Mapping[Path, list[str]]
"""Pins by the mount of the bpf file system that they are in."""


def findings(node: Node) -> Iterator[Finding]:
    """Yield one finding an owner. Where not every process can be seen, nothing can be said."""
    if not node.all_visible:
        return
    pins: dict[str, dict[Path, list[str]]] = defaultdict(dict)
    for mount in bpffs.mounts():
        for path in bpffs.pins(mount):
            if owner := catalogue.owner_of_pin(os.path.relpath(path, mount)):
                pins[owner.name].setdefault(mount, []).append(path)
    loaded: dict[str, list[Program]] = defaultdict(list)
    for program in bpf_programs.programs():
        if owner := catalogue.owner_of_program(program.name):
            loaded[owner.name].append(program)
    for name in sorted(pins.keys() | loaded.keys()):
        owner = catalogue.by_name(name)
        if running(owner, node) is None:
            yield _finding(owner, pins[name], loaded[name])


def _finding(owner: Owner, pins: Pins, loaded: Iterable[Program]) -> Finding:
    own = owner.name == "intercept-agent"
    paths = [path for found in pins.values() for path in found]
    names = [f"program {program.name} (id {program.id})" for program in loaded]
    evidence = [
        f"{len(found)} pins of {owner.title} below {mount}" for mount, found in pins.items()
    ]
    if names:
        evidence.append(f"{len(names)} programs of {owner.title} are loaded")
    return Finding(
        kind=Kind.EBPF,
        # What this agent pins is made to outlive it, so it may only be down for a while.
        severity=Severity.INFO if own else Severity.WARNING,
        where=Where(backend="ebpf"),
        objects=(*paths, *names),
        owner=owner.name,
        evidence=(*evidence, f"no process {' or '.join(owner.processes[:2])} runs on this node"),
        explanation=f"Programs and maps of {owner.title} live on without it: what is attached goes "
        "on steering traffic by maps that nobody keeps up to date.",
        fix=OWN_FIX if own else "; ".join(_fixes(pins, unpinned=bool(names))),
    )


def _fixes(pins: Pins, *, unpinned: bool) -> Iterator[str]:
    for mount, paths in pins.items():
        tops = sorted({Path(path).relative_to(mount).parts[0] for path in paths})
        yield f"rm -r {' '.join(str(mount / top) for top in tops)}"
    if unpinned:
        yield "bpftool net and bpftool cgroup tree show what is attached, bpftool detaches it"
