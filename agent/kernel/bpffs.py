"""The bpf file systems of this node and what is pinned in them; reading names only."""

import os
from collections.abc import Iterator
from pathlib import Path

MOUNTS = Path("/proc/self/mountinfo")
USUAL = Path("/sys/fs/bpf")


def mounts() -> tuple[Path, ...]:
    """Return where a bpf file system is mounted, each once: the same one may be so twice."""
    found: dict[int, Path] = {}
    for line in MOUNTS.read_text().splitlines():
        before, _, after = line.partition(" - ")
        if after.split(" ", 1)[0] == "bpf":
            path = Path(before.split(" ")[4].encode().decode("unicode_escape"))
            try:
                found.setdefault(os.stat(path).st_dev, path)
            except OSError:
                continue  # mounted over, or gone meanwhile
    return tuple(found.values())


def pins(mount: Path) -> Iterator[str]:
    """Yield the path of every pin below a mount, sorted."""
    for folder, folders, files in os.walk(mount):
        folders.sort()
        yield from (os.path.join(folder, name) for name in sorted(files))
