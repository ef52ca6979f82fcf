"""Which process holds a socket, found in /proc."""

import contextlib
import os
import re
from collections.abc import Collection, Mapping
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
    found: dict[int, Holder] = {}
    for entry in sorted(Path("/proc").glob("[0-9]*"), key=lambda path: int(path.name)):
        if id_at(entry / "ns/net") != netns:
            continue
        with contextlib.suppress(OSError):
            holder = Holder(int(entry.name), (entry / "comm").read_text().strip())
            for inode in _sockets(entry / "fd"):
                if inode in inodes:
                    found.setdefault(inode, holder)
    return found


def _sockets(folder: Path) -> list[int]:
    found = []
    for name in os.listdir(folder):
        with contextlib.suppress(OSError):
            if match := SOCKET.fullmatch(os.readlink(folder / name)):
                found.append(int(match[1]))
    return found
