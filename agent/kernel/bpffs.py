"""The bpf file systems of this node and what is pinned in them; reading names only."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from agent.kernel import node


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
