"""Where the cgroups of cgroup2 are in the file system, by their paths from its root on."""

import os

from agent.kernel.bpf_pins import cgroup_root


def folder(path: str) -> str | None:
    """Return the folder of a cgroup that may not exist; None where cgroup2 is not mounted."""
    root = cgroup_root()
    return None if root is None else f"{root}{path}"


def identity(path: str) -> int | None:
    """Return the id of a cgroup, which is its inode; None if there is none of that path."""
    place = folder(path)
    try:
        return None if place is None else os.stat(place).st_ino
    except OSError:
        return None
