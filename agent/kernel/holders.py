"""Which processes hold a socket, found in /proc."""

import contextlib
import functools
import os
import re
import socket
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from agent.kernel.netns import NetnsId, id_at

SOCKET = re.compile(r"socket:\[(\d+)\]")
FILE = re.compile(r"^mnt_id:\s*(\d+)$.*^ino:\s*(\d+)$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Holder:
    """A process and the name of its program."""

    pid: int
    name: str


def holders(netns: NetnsId, inodes: Collection[int]) -> Mapping[int, Holder]:
    """Return for each socket the first process of its namespace that has it open.

    Sockets whose processes cannot be seen from here (another PID namespace) are left out.
    """
    living = [pid for pid in pids() if id_at(f"/proc/{pid}/ns/net") == netns]
    found = _search(living, inodes)
    return {inode: Holder(held[0], name(held[0])) for inode, held in found.items()}


def all_holders(inodes: Iterable[int], first: Iterable[int] = ()) -> Mapping[int, tuple[int, ...]]:
    """Return for each socket all processes that have it open, of whatever namespace.

    `first` are asked first, and others only about sockets that none of them has.
    """
    wanted = set(inodes) - {0}
    found = _search(first, wanted)
    rest = wanted - found.keys()
    return found | _search(pids(), rest) if rest else found


def name(pid: int) -> str:
    """Return the name of a process; an empty one of a process that is gone.

    A program that was executed by descriptor has that number for its own name, which tells nothing.
    """
    found = ""
    with contextlib.suppress(OSError):
        found = Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
        if found.isdigit():
            found = os.path.basename(os.readlink(f"/proc/{pid}/exe"))
    return found


def pids() -> list[int]:
    """Return the processes that can be seen from here."""
    return sorted(int(entry) for entry in os.listdir("/proc") if entry.isdigit())


def sockets_of(pid: int) -> Iterator[tuple[int, int]]:
    """Yield descriptor and inode of each socket that a process has open.

    A process of another user shows its descriptors only to who may read any file, which the agent's
    container may not; what each of them is it also shows to who may trace it (Linux 5.15).

    Raises: OSError if it shows neither, or is gone.
    """
    try:
        entries = os.listdir(f"/proc/{pid}/fd")
    except PermissionError:
        yield from _told(pid)
        return
    for entry in entries:
        with contextlib.suppress(OSError):
            if match := SOCKET.fullmatch(os.readlink(f"/proc/{pid}/fd/{entry}")):
                yield int(entry), int(match[1])


def _told(pid: int) -> Iterator[tuple[int, int]]:
    mount = _sockets_mount()
    for entry in os.listdir(f"/proc/{pid}/fdinfo"):
        with contextlib.suppress(OSError):
            match = FILE.search(Path(f"/proc/{pid}/fdinfo/{entry}").read_text())
            if match and match[1] == mount:
                yield int(entry), int(match[2])


@functools.cache
def _sockets_mount() -> str:
    """Return the mount on which all sockets are, and nothing else, whatever the namespace."""
    with socket.socket(socket.AF_UNIX) as one:
        match = FILE.search(Path(f"/proc/self/fdinfo/{one.fileno()}").read_text())
    return match[1] if match else ""


def _search(among: Iterable[int], inodes: Collection[int]) -> dict[int, tuple[int, ...]]:
    found: dict[int, list[int]] = {}
    for pid in among:
        with contextlib.suppress(OSError):
            for inode in {inode for _, inode in sockets_of(pid)} & {*inodes}:
                found.setdefault(inode, []).append(pid)
    return {inode: tuple(held) for inode, held in found.items()}
