"""Network namespaces: opened by path, known by (dev, inode), entered by throwaway threads only.

The thread that does setns never returns to a pool, because a failed setns back would leave a
poisoned worker. What it makes (a netlink socket, a libnftables context) may be handed out; nothing
that lives on may be started in it, since threads and children stay in the pod and pin its
namespace.
"""

import contextlib
import fcntl
import os
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from agent.kernel import libc
from agent.model.errors import EnvironmentLacks, NamespaceRefused

T = TypeVar("T")

NS_GET_NSTYPE = 0xB703  # linux/nsfs.h
SO_NETNS_COOKIE = 71  # asm-generic/socket.h, Linux 5.14

# The inode of the initial namespace: fixed in linux/nsfs.h since 6.18, and before that the first
# dynamic number, which the kernel hands to init_net at boot.
INITIAL_NETNS_INODES = frozenset({0xEFFFFFF9, 0xF0000000})
INITIAL_PIDNS_INODE = 0xEFFFFFFC  # linux/proc_ns.h PROC_PID_INIT_INO

RUN_NETNS = Path("/run/netns")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True, order=True)
class NetnsId:
    """What identifies a namespace while somebody holds it open."""

    dev: int
    ino: int


@dataclass(slots=True)
class Netns:
    """An open network namespace. Close it, or use it as a context manager."""

    path: str
    id: NetnsId
    fd: int = field(repr=False)
    _cookie: int | None = field(default=None, repr=False)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """Open a namespace by path; it is never created.

        Raises: NamespaceRefused if the path is missing or is not a network namespace.
        """
        text = os.fspath(path)
        try:
            fd = os.open(text, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise NamespaceRefused(
                f"cannot open the network namespace {text}: {error.strerror}; "
                "`ip netns list` and `lsns -t net` show which there are"
            ) from error
        return cls.of(fd, text)

    @classmethod
    def of(cls, fd: int, path: str) -> Self:
        """Take over a descriptor, which is closed if it is refused. `path` is for messages.

        Raises: NamespaceRefused.
        """
        try:
            kind = fcntl.ioctl(fd, NS_GET_NSTYPE)
        except OSError:
            kind = 0
        if kind != libc.CLONE_NEWNET:
            os.close(fd)
            raise NamespaceRefused(f"{path} is not a network namespace")
        status = os.fstat(fd)
        return cls(path, NetnsId(status.st_dev, status.st_ino), fd)

    def run(self, work: Callable[[], T], *, timeout_s: float = 30.0) -> T:
        """Run `work` in a throwaway thread inside this namespace and return its result.

        `work` must start nothing that outlives it but what it returns.

        Raises: EnvironmentLacks without the privilege to enter, TimeoutError after `timeout_s`
        (the thread is abandoned), and whatever `work` raises, unchanged.
        """
        outcome: list[tuple[T | None, BaseException | None]] = []
        ended = threading.Event()

        def enter() -> None:
            try:
                enter_at(self.fd, self.path)
                outcome.append((work(), None))
            except BaseException as error:  # carried over to the caller's thread
                outcome.append((None, error))
            finally:
                ended.set()

        thread = threading.Thread(target=enter, name=f"netns-{self.id.ino}", daemon=True)
        thread.start()
        try:
            ended.wait(timeout_s)
        except BaseException:
            # Interrupted: whatever the work is writing must not come after what the caller undoes.
            # An interrupted join cannot be taken up again, so it is an event that is waited for.
            ended.wait(timeout_s)
            raise
        if not outcome:
            raise TimeoutError(f"work in {self.path} did not end within {timeout_s} seconds")
        thread.join()
        result, error = outcome[0]
        if error is not None:
            raise error
        return result  # type: ignore[return-value]

    def cookie(self) -> int | None:
        """Return the number that the kernel never gives to another namespace until reboot."""
        if self._cookie is None:
            self.run(self.learn_cookie)
        return self._cookie

    def birth(self) -> str | None:
        """Return what no other namespace has or will have, also after a reboot; None before 5.14.

        An inode's number is given out again, mostly to the very next namespace (seen on 6.18).
        """
        cookie = self.cookie()
        return None if cookie is None else f"{boot()}:{cookie}"

    def learn_cookie(self) -> None:
        """Learn the cookie; for threads that are in the namespace already."""
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
            raw = probe.getsockopt(socket.SOL_SOCKET, SO_NETNS_COOKIE, 8)
            self._cookie = int(struct.unpack("Q", raw)[0])

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def boot() -> str:
    """Return what tells the time since the kernel was started from those before it."""
    return BOOT_ID.read_text().strip()


def enter_at(fd: int, path: str) -> None:
    """Move the calling thread into the namespace behind `fd`; `path` is for messages.

    Raises: EnvironmentLacks without the privilege to enter.
    """
    try:
        libc.setns(fd, libc.CLONE_NEWNET)
    except PermissionError as error:
        status = os.fstat(fd)
        if own_id() == NetnsId(status.st_dev, status.st_ino):
            return  # where one is already needs no privilege to enter
        raise EnvironmentLacks(
            f"entering {path} needs root (CAP_SYS_ADMIN); run this as root"
        ) from error


def id_at(path: str | os.PathLike[str]) -> NetnsId | None:
    """Return the identity of the namespace at a path, or None if it cannot be looked at."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return NetnsId(status.st_dev, status.st_ino)


def own_id() -> NetnsId:
    """Return the namespace that this process runs in."""
    found = id_at("/proc/thread-self/ns/net")
    if found is None:
        raise EnvironmentLacks("/proc is not mounted here; mount it, the agent cannot work without")
    return found


def refuse_node(netns: Netns, *, is_self: bool) -> None:
    """Refuse the node's own namespace, by every sign of it that can be had.

    `/proc/1/ns/net` alone is not enough: it can be unreadable even to root, and inside a container
    PID 1 is the container's own.

    Raises: NamespaceRefused.
    """
    if reason := node_reason(netns, is_self=is_self):
        raise NamespaceRefused(
            f"{netns.path} is the node's own network namespace ({reason}); "
            "a capture belongs into a pod's"
        )


def node_reason(netns: Netns, *, is_self: bool) -> str | None:
    """Return why this namespace is taken for the node's own, or None."""
    if netns.id.ino in INITIAL_NETNS_INODES:
        return f"inode {netns.id.ino} is the kernel's first"
    if not is_self and netns.id == own_id():
        return "this command itself runs in it; from inside a pod say 'self'"
    for pid, name in _node_processes():
        if id_at(f"/proc/{pid}/ns/net") == netns.id:
            return f"{name} (PID {pid}) lives in it"
    if is_self and (device := _physical_device()):
        return f"it holds the hardware interface {device}"
    return None


def _node_processes() -> list[tuple[int, str]]:
    """Return processes that live in the node's namespace, if this is the node's PID namespace."""
    pidns = id_at("/proc/self/ns/pid")
    found = []
    if pidns is not None and pidns.ino == INITIAL_PIDNS_INODE:
        found.append((1, "init"))
    with contextlib.suppress(OSError):
        if Path("/proc/2/comm").read_text() == "kthreadd\n":
            found.append((2, "kthreadd"))
    return found


def _physical_device() -> str | None:
    """Return a hardware interface of the calling thread's namespace.

    /sys shows the namespace of whoever mounted it, which `unshare --net` alone does not do anew.
    So only interfaces that this namespace has too, under the same number, count.
    """
    ours = {name: index for index, name in socket.if_nameindex()}
    for link in sorted(Path("/sys/class/net").glob("*/device")):
        with contextlib.suppress(OSError, ValueError):
            if ours.get(link.parent.name) == int((link.parent / "ifindex").read_text()):
                return link.parent.name
    return None


# --- what a user may call a namespace -------------------------------------------------------------


def open_target(text: str) -> tuple[Netns, bool]:
    """Open the namespace that a user named; the flag says whether it was named as `self`.

    Accepts a path, a name under /run/netns, `pid:N`, `container:ID`, `self` and `host`.

    Raises: NamespaceRefused with what to do.
    """
    kind, colon, rest = text.partition(":")
    if text == "self":
        return Netns.open("/proc/thread-self/ns/net"), True
    if text == "host":
        return _open_host(), False
    if colon and kind == "pid":
        return Netns.open(_pid_path(rest)), False
    if colon and kind == "container":
        return Netns.open(_pid_path(str(container_pid(rest)))), False
    if "/" in text:
        return Netns.open(text), False
    if not text or text in (".", ".."):
        raise NamespaceRefused(f"{text!r} is not a namespace name; see `ip netns list`")
    return Netns.open(RUN_NETNS / text), False


def _open_host() -> Netns:
    for pid, _ in _node_processes():
        with contextlib.suppress(NamespaceRefused):
            return Netns.open(f"/proc/{pid}/ns/net")
    return Netns.open("/proc/thread-self/ns/net")


def _pid_path(text: str) -> str:
    if not text.isascii() or not text.isdigit():
        raise NamespaceRefused(f"pid:{text} is not a process: write pid: and a number")
    path = f"/proc/{text}/ns/net"
    if not os.path.lexists(f"/proc/{text}"):
        raise NamespaceRefused(f"there is no process {text} here")
    return path


def container_pid(container: str) -> int:
    """Return a process of the container, found by its cgroup; the runtime is not asked.

    Raises: NamespaceRefused.
    """
    if len(container) < 6 or not container.isalnum():
        raise NamespaceRefused(
            f"container:{container} is not a container id: give at least its first 6 characters"
        )
    for entry in sorted(Path("/proc").glob("[0-9]*"), key=lambda p: int(p.name)):
        with contextlib.suppress(OSError):
            for line in (entry / "cgroup").read_text().splitlines():
                last = line.rsplit("/", 1)[-1]
                # ID, or under systemd cri-containerd-ID.scope, crio-ID.scope, docker-ID.scope
                name = last.removesuffix(".scope").rsplit("-", 1)[-1]
                if name.startswith(container):
                    return int(entry.name)
    raise NamespaceRefused(f"no running process belongs to a container {container}")
