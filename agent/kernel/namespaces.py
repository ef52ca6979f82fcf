"""Every network namespace of the node, each once, and the processes that live in them.

Three places know of namespaces: processes (/proc), names (/run/netns and Docker's folder) and the
runtime. A pod whose pause process died lives on in a name alone (field report 8), and a container
made by hand has none, so no one place is enough.
"""

import contextlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from agent.kernel import node
from agent.kernel.netns import INITIAL_PIDNS_INODE, RUN_NETNS, Netns, NetnsId, id_at, own_id
from agent.model.errors import NamespaceRefused

FOLDERS = (RUN_NETNS, Path("/run/docker/netns"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A process: its name as the kernel has it, the words it was started with, its namespace."""

    pid: int
    name: str
    words: tuple[str, ...]
    netns: NetnsId | None

    @property
    def names(self) -> frozenset[str]:
        """What it is called: the kernel cuts its own name off after 15 letters.

        A Python program is called by its script or module.
        """
        found = {self.name}
        if self.words:
            first = os.path.basename(self.words[0])
            found.add(first)
            if first.startswith("python"):
                found |= {os.path.basename(word) for word in self.words[1:4] if word[:1] != "-"}
        return frozenset(found)


@dataclass(frozen=True, slots=True)
class Place:
    """A namespace and the best path to it; `name` is what to call it and what commands take."""

    id: NetnsId
    path: str
    name: str


def processes() -> tuple[Process, ...]:
    """Return every process that can be seen from here, without those that have ended (zombies).

    Raises: EnvironmentLacks where nothing shows processes.
    """
    import psutil

    own_id()  # psutil does not say that there is no /proc
    found = []
    for each in psutil.process_iter(["name", "cmdline", "status"]):
        if each.info["status"] == psutil.STATUS_ZOMBIE:
            continue
        netns = id_at(f"/proc/{each.pid}/ns/net")
        words = tuple(each.info["cmdline"] or ())
        found.append(Process(pid=each.pid, name=each.info["name"] or "", words=words, netns=netns))
    return tuple(found)


def all_visible() -> bool:
    """Tell whether every process of the node can be seen: that a program is not there then counts.

    In a container with a process namespace of its own it does not.
    """
    found = id_at("/proc/self/ns/pid")
    return found is not None and found.ino == INITIAL_PIDNS_INODE


def places(running: Iterable[Process], more: Iterable[str] = ()) -> tuple[Place, ...]:
    """Return every namespace once, by name; `more` are paths that the runtime or the agent told.

    Names come first, since they stay when processes come and go.
    """
    paths = [(str(path), path.name) for folder in FOLDERS for path in _entries(folder)]
    paths += [(path, path) for path in more]
    paths += [(f"/proc/{each.pid}/ns/net", f"pid:{each.pid}") for each in running]
    found: dict[NetnsId, Place] = {}
    for path, name in paths:
        identity = id_at(path)
        if identity is None or identity in found:
            continue
        named = Path(path).parent != FOLDERS[0] and not path.startswith("/proc/")
        found[identity] = Place(identity, path, path if named else name)
    return tuple(sorted((p for p in found.values() if _is_netns(p.path)), key=lambda p: p.name))


def cookies() -> frozenset[int]:
    """Return the cookies of all namespaces that can be seen: by a process, a name, or a mount."""
    paths = [path for kind, path in node.mounts() if kind == "nsfs"]
    paths += (str(path) for path in Path("/proc").glob("[0-9]*/ns/net"))
    by_id = {identity: path for path in paths if (identity := id_at(path))}
    found = set()
    for path in by_id.values():
        with contextlib.suppress(NamespaceRefused), Netns.open(path) as opened:
            if (cookie := opened.cookie()) is not None:
                found.add(cookie)
    return frozenset(found)


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _is_netns(path: str) -> bool:
    """A name under /run/netns is an ordinary file before anything is mounted on it."""
    try:
        Netns.open(path).close()
    except NamespaceRefused:
        return False
    return True
