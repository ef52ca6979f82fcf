"""Takes out what namespaces left with the eBPF programs: maps and pins outlive everybody.

A namespace that ended leaves its link without a target. So does somebody who detaches it from one
that lives, whose capture must not end with that: a link without a target, or an entry without a
link, is of a namespace that is gone only if none that can be seen has its cookie.
"""

import contextlib
import os
import random
from collections.abc import Iterable
from dataclasses import dataclass, replace

from agent.backends import ebpf_node
from agent.formats.bpf_capture import COOKIE
from agent.kernel import bpf, bpf_pins, namespaces
from agent.model.enrolment import LAYOUT

OF_A_NAMESPACE = ("own_addresses", "listeners", "passing", "listened")


@dataclass(frozen=True, slots=True)
class Swept:
    """How many namespaces were gone, and what was seen that is wrong about those that live."""

    gone: int = 0
    faults: tuple[str, ...] = ()


def sweep(most: int | None = None) -> Swept:
    """Take out what namespaces that are gone left behind. Hold the lock.

    `most` looks at so many links of all, taken at random: enough, if it is done with every new one.

    Raises: OSError.
    """
    names = os.listdir(bpf_pins.pods()) if bpf_pins.pods().exists() else []
    looked_at = names if most is None else random.sample(names, min(most, len(names)))
    lost = {int(name) for name in looked_at if _is_without_target(int(name))}
    if most is None and namespaces.all_visible():
        lost |= enrolled() - {int(name) for name in names}
    gone = lost - namespaces.cookies() if lost else lost
    for cookie in gone:
        let_go(cookie)
    said = (f"the program of namespace {cookie} is not attached" for cookie in sorted(lost - gone))
    return Swept(len(gone), tuple(said))


def sweep_node() -> Swept:
    """Sweep everything, and let the programs go if nobody is left to need them. Hold the lock.

    What is of another version's making is left alone. Raises: OSError.
    """
    about = bpf_pins.about()
    if about is None or about.layout not in (0, LAYOUT):
        return Swept()
    if not about.layout and enrolled():  # else half of them: whoever loaded them was killed
        ebpf_node.migrate_older(about)
    swept = sweep()
    if not enrolled():
        bpf_pins.unload()
        return swept
    return replace(swept, faults=(*swept.faults, *ebpf_node.faults(about)))


def let_go(cookie: int) -> None:
    """Take a namespace out: first what captures it. Raises: OSError."""
    with bpf_pins.open_map("captures") as captures:
        captures.delete(COOKIE.pack(cookie))
    bpf_pins.pod_pin(cookie).unlink(missing_ok=True)
    for name in OF_A_NAMESPACE:
        forget(name, cookie)


def forget(name: str, cookie: int, but: Iterable[bytes] = ()) -> None:
    """Take a namespace's keys out of a map; they begin with its cookie."""
    start, kept = COOKIE.pack(cookie), frozenset(but)
    with bpf_pins.open_map(name) as found:
        for key in [key for key in found.keys() if key.startswith(start)]:  # noqa: SIM118
            if key not in kept:
                found.delete(key)


def _is_without_target(cookie: int) -> bool:
    found = bpf.link_at(bpf_pins.pod_pin(cookie))
    return found is not None and found.target == 0


def enrolled() -> set[int]:
    """Return the cookies of all namespaces that are captured. Raises: OSError."""
    with (
        contextlib.suppress(FileNotFoundError),  # loaded half, and not that far
        bpf_pins.open_map("captures") as captures,
    ):
        return {COOKIE.unpack(key)[0] for key in captures.keys()}  # noqa: SIM118
    return set()
