"""The processes of a network namespace: who they are, and what they may do.

psutil walks them; what it does not know (capabilities, namespaces, the container) is read under
/proc. Nothing is resolved by name: user names would be asked of the network (field report 92).
"""

import contextlib
import fcntl
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from agent.kernel import holders
from agent.kernel.netns import Netns, id_at

if TYPE_CHECKING:
    import psutil

NS_GET_USERNS = 0xB701  # linux/nsfs.h
CAP_NET_ADMIN = 12  # linux/capability.h
# containerd: ID, or cri-containerd-ID.scope under systemd; CRI-O: crio-ID.scope.
CONTAINER = re.compile(r"(?:[a-z-]+-)?([0-9a-f]{64})(?:\.scope)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One process. `uid` and `gid` are the effective ones, as its own user namespace shows them.

    `net_admin` says that it can change the rules of the namespace. `container` is the id that its
    cgroup names, or empty.
    """

    pid: int
    parent: int
    name: str
    uid: int
    gid: int
    container: str = ""
    net_admin: bool = False


@dataclass(frozen=True, slots=True)
class Processes:
    """The processes of a namespace; of `hidden` others nobody here may know where they live."""

    found: tuple[Process, ...]
    hidden: int = 0


def living_in(netns: Netns) -> Processes:
    """Return the processes that live in a namespace, oldest first, without this one itself."""
    import psutil  # costs 15 ms, so only where it is needed

    owner = _owner(netns)
    found, hidden = [], 0
    for pid in psutil.pids():
        home = id_at(f"/proc/{pid}/ns/net")
        if home is None:
            hidden += Path(f"/proc/{pid}").exists() and not _is_kernel_thread(pid)
        elif home == netns.id and pid != os.getpid():
            with contextlib.suppress(psutil.Error, OSError):
                found.append(_process(psutil.Process(pid), owner))
    return Processes(tuple(found), hidden)


def capabilities(pid: int | str) -> int:
    """Return the effective capabilities of a process, one bit each. Raises: OSError."""
    return int(_status(pid)["CapEff"], 16)


def _process(process: "psutil.Process", owner: int | None) -> Process:
    with process.oneshot():
        pid = process.pid
        return Process(
            pid=pid,
            parent=process.ppid(),
            name=_name(process),
            uid=_inside(pid, "uid_map", process.uids().effective),
            gid=_inside(pid, "gid_map", process.gids().effective),
            container=_container(pid),
            net_admin=_may_change(pid, owner),
        )


def _name(process: "psutil.Process") -> str:
    """Return the name, which psutil completes where the kernel has cut it off."""
    name = process.name()
    return holders.name(process.pid) if name.isdigit() else name


def _inside(pid: int, mapping: str, number: int) -> int:
    """Return an id as the process's own user namespace shows it."""
    for line in Path(f"/proc/{pid}/{mapping}").read_text().splitlines():
        inside, outside, count = map(int, line.split())
        if outside <= number < outside + count:
            return inside + number - outside
    return number


def _may_change(pid: int, owner: int | None) -> bool:
    """Whether it has CAP_NET_ADMIN over the namespace, which its owner's user namespace decides."""
    if not capabilities(pid) >> CAP_NET_ADMIN & 1:
        return False
    home, ours = id_at(f"/proc/{pid}/ns/user"), id_at("/proc/self/ns/user")
    return owner is None or home is None or home == ours or home.ino == owner


def _owner(netns: Netns) -> int | None:
    """Return the inode of the user namespace that a network namespace belongs to, if we may ask."""
    try:
        fd = fcntl.ioctl(netns.fd, NS_GET_USERNS)
    except OSError:
        return None
    try:
        return os.fstat(fd).st_ino
    finally:
        os.close(fd)


def _container(pid: int) -> str:
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        if found := CONTAINER.fullmatch(line.rsplit("/", 1)[-1]):
            return found[1]
    return ""


def _is_kernel_thread(pid: int) -> bool:
    try:
        return not Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return True


def _status(pid: int | str) -> Mapping[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}
