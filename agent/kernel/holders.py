"""Which processes hold a socket, found in /proc."""

import contextlib
import os
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from agent.kernel.netns import NetnsId, id_at

SOCKET = re.compile(r"socket:\[(\d+)\]")


@dataclass(frozen=True, slots=True)
class Holder:
    """A process and the name of its program."""

    pid: int
    name: str


def holders(netns: NetnsId, inodes: Collection[int]) -> Mapping[int, Holder]:
    """Return for each socket the first process of its namespace that has it open.

    Sockets whose processes cannot be seen from here (another PID namespace) are left out.
    """
    living = [pid for pid in _pids() if id_at(f"/proc/{pid}/ns/net") == netns]
    return {
        inode: Holder(pids[0], name(pids[0])) for inode, pids in _search(living, inodes).items()
    }


def all_holders(inodes: Iterable[int], first: Iterable[int] = ()) -> Mapping[int, tuple[int, ...]]:
    """Return for each socket all processes that have it open, of whatever namespace.

    `first` are asked first, and others only about sockets that none of them has.
    """
    wanted = set(inodes) - {0}
    found = _search(first, wanted)
    rest = wanted - found.keys()
    return found | _search(_pids(), rest) if rest else found


def name(pid: int) -> str:
    """Return the name of a process; an empty one of a process that is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def _pids() -> list[int]:
    return sorted(int(entry) for entry in os.listdir("/proc") if entry.isdigit())


def _search(pids: Iterable[int], inodes: Collection[int]) -> dict[int, tuple[int, ...]]:
    found: dict[int, list[int]] = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            for inode in {*_sockets(Path(f"/proc/{pid}/fd"))} & {*inodes}:
                found.setdefault(inode, []).append(pid)
    return {inode: tuple(pids) for inode, pids in found.items()}


def _sockets(folder: Path) -> list[int]:
    found = []
    for entry in os.listdir(folder):
        with contextlib.suppress(OSError):
            if match := SOCKET.fullmatch(os.readlink(folder / entry)):
                found.append(int(match[1]))
    return found
