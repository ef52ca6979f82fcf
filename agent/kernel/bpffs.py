"""The bpf file systems of this node, the names of what is pinned in them, and one for our pins.

Pins live as long as their file system does, and that as long as it is mounted anywhere. So one is
mounted only where it stays: what a service or a container mounts for itself ends with it.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from agent.kernel import libc, node
from agent.model.errors import EnvironmentLacks


def mounts() -> tuple[Path, ...]:
    """Return where a bpf file system is mounted, each once: the same one may be so twice."""
    found: dict[int, Path] = {}
    for kind, path in node.mounts():
        with contextlib.suppress(OSError):  # mounted over, or gone meanwhile
            if kind == "bpf":
                found.setdefault(os.stat(path).st_dev, Path(path))
    return tuple(found.values())


def pins(mount: Path) -> Iterator[str]:
    """Yield the path of every pin below a mount, sorted."""
    for folder, folders, files in os.walk(mount):
        folders.sort()
        yield from (os.path.join(folder, name) for name in sorted(files))


def missing_for(base: Path) -> str | None:
    """Return why nothing can be pinned in a folder to stay, or None."""
    place = base.parent
    if base.exists() or _is_in_bpffs(place) or not _mounts_alone():
        return None
    return (
        f"no bpffs is seen at {place} from here (a container, a service, `ip netns exec`), and one "
        "that is mounted here would go again, and every capture with it; on the node, "
        f"mount -t bpf bpf {place}"
    )


def mount_for(base: Path) -> None:
    """See to it that a folder is, or can be made, in a bpffs.

    Raises: EnvironmentLacks.
    """
    if base.exists():  # made by somebody who found or mounted it
        return
    if reason := missing_for(base):
        raise EnvironmentLacks(reason)
    place = base.parent
    try:
        place.mkdir(parents=True, exist_ok=True)
        if not _is_in_bpffs(place):
            libc.mount("bpf", str(place.resolve()), 0, "bpf")
    except OSError as error:
        raise EnvironmentLacks(f"cannot mount a bpffs at {place}: {error.strerror}") from error


def _is_in_bpffs(place: Path) -> bool:
    real = place.resolve()
    above = {str(real), *(str(parent) for parent in real.parents)}
    over = [(len(path), at, kind) for at, (kind, path) in enumerate(node.mounts()) if path in above]
    return max(over, default=(0, 0, ""))[2] == "bpf"


def _mounts_alone() -> bool:
    """Whether what this process mounts is not the node's; where nobody can tell, it is."""
    with contextlib.suppress(OSError):
        return not os.path.samefile("/proc/self/ns/mnt", "/proc/1/ns/mnt")
    return False
