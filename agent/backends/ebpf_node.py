"""The programs of the node: whether they are loaded and in force, and how that is put right."""

import os
from collections.abc import Iterator

from agent.backends import ebpf_migration
from agent.formats.bpf_capture import READABLE
from agent.kernel import bpf, bpf_loader, bpf_pins
from agent.kernel.bpf_programs import LOOKING_ON
from agent.model.enrolment import LAYOUT, OTHER_VERSION
from agent.model.errors import StateUnreadable


def refuse_other_layout(about: bpf_pins.About) -> None:
    """Refuse to read or write what a version laid out of which this one knows nothing.

    Raises: StateUnreadable.
    """
    if about.layout and about.layout not in READABLE:
        raise StateUnreadable(
            f"{bpf_pins.base()} holds the programs of another version of the agent (layout "
            f"{about.layout}, and here {LAYOUT}), which this one cannot take over; install that "
            f"version again to go on; `rm -r {bpf_pins.base()}` ends every capture of theirs"
        )


def bring_up() -> None:
    """Load the programs of this version, if what is loaded is not that already. Hold the lock.

    Raises: StateUnreadable, KernelRejected, EnvironmentLacks.
    """
    about = bpf_pins.about()
    if about is not None and about.layout != LAYOUT:
        migrate_older(about)
        about = bpf_pins.about()
    if about is None or any(faults(about)):
        bpf_pins.load()
    if bpf_pins.upcoming().exists():  # a migration was killed when all but this was done
        bpf_pins.clear(bpf_pins.upcoming())


def migrate_older(about: bpf_pins.About) -> None:
    """Take over what an older version laid out in another way, or loaded half. Hold the lock.

    Raises: as `bring_up`.
    """
    refuse_other_layout(about)
    if not about.layout:
        bpf_pins.load()
    elif about.layout != LAYOUT:
        ebpf_migration.migrate(about.layout)


def faults(about: bpf_pins.About) -> Iterator[str]:
    """Say what is not as this version would have it."""
    if about != bpf_pins.About(LAYOUT, bpf_pins.build()):
        yield f"the programs are not those {OTHER_VERSION}"
    for name in sorted(bpf_pins.lost()):
        yield f"the pin of the map {name} is gone"
    if not bpf_pins.pods().exists():
        yield "the folder of the namespaces' pins is gone"
    links = str(bpf_pins.links())
    for hook in bpf_loader.HOOKS:
        found = bpf.link_at(f"{links}/{hook}")
        if found is None:
            yield f"{hook} is not attached"
        elif found.target != bpf_pins.ROOT_CGROUP:
            yield f"{hook} was detached from the root of cgroup2"


def ahead() -> Iterator[str]:
    """Say whose programs see a connection first, such as another's load balancer at the socket.

    Those of another agent, which has other pins, ask for its own pods only.
    """
    root = bpf_pins.cgroup_root()
    if root is None:
        return
    with bpf.opened(os.open(root, os.O_RDONLY | os.O_DIRECTORY)) as target:
        for hook in ("connect4", "connect6"):
            ours = bpf.link_at(bpf_pins.links() / hook)
            order = bpf.attached(target, bpf_loader.HOOKS[hook])
            if ours is None or ours.program not in order:
                continue
            for program in order[: order.index(ours.program)]:
                name = bpf.program_name(program)
                if name != hook and not name.startswith(LOOKING_ON):
                    yield (
                        f"cgroup {hook}: the program {name or '?'} (id {program}) of somebody else "
                        "runs before the capture and may turn a connection first"
                    )
