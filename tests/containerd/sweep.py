"""Removes everything of a test node, knowing only its folder: works from cold, and twice.

As a program it waits for its standard input to end, which it does when whoever started it is gone,
even by kill -9, and sweeps then.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

GRACE_S = 5.0
CNI_RESULTS = Path("/var/lib/cni/results")


def sweep(base: Path) -> None:
    """End the node's processes and take away its mounts, cgroups, sockets, netns and folder."""
    if not base.is_dir():
        return
    _kill(_processes(str(base / "config.toml")))
    stray = list(_strays(base))
    _kill(_inits(base))
    _kill(_processes(str(base / "containerd.sock")))  # the shims; they ignore SIGTERM
    _kill(_members(base.name))  # of containers without a process namespace of their own
    for path in stray:
        path.unlink(missing_ok=True)
    for mount in sorted(_mounts_below(base), reverse=True):
        subprocess.run(["umount", "-l", mount], check=False, capture_output=True)
    _remove_cgroups(base.name)
    subprocess.run(["ip", "netns", "del", base.name], check=False, capture_output=True)
    shutil.rmtree(base, ignore_errors=True)


def _processes(argument: str) -> Iterator[int]:
    """Yield the processes that were started with this argument; no other command has it."""
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes().split(b"\0")
            program = Path(os.fsdecode(words[0])).name
            if argument.encode() in words and program.startswith("containerd"):
                yield int(entry.name)


def _tasks(base: Path) -> list[Path]:
    return list(base.glob("state/io.containerd.runtime.v2.task/k8s.io/*"))


def _inits(base: Path) -> Iterator[int]:
    for task in _tasks(base):
        with contextlib.suppress(OSError, ValueError):
            yield int((task / "init.pid").read_text())


def _cgroups(name: str) -> list[Path]:
    """Return the node's own cgroup in every hierarchy."""
    return [*Path("/sys/fs/cgroup").glob(f"*/{name}"), Path("/sys/fs/cgroup", name)]


def _members(name: str) -> Iterator[int]:
    for top in _cgroups(name):
        for listed in top.rglob("cgroup.procs"):
            with contextlib.suppress(OSError):
                yield from map(int, listed.read_text().split())


def _strays(base: Path) -> Iterator[Path]:
    """Yield what containerd keeps elsewhere whatever it is told: CNI results, shim sockets."""
    for sandbox in base.glob("root/io.containerd.grpc.v1.cri/sandboxes/*"):
        yield from CNI_RESULTS.glob(f"*-{sandbox.name}-*")
    for shim in _processes(str(base / "containerd.sock")):
        with contextlib.suppress(OSError):  # /proc/net shows the sockets of that one's namespace
            table = Path(f"/proc/{shim}/net/unix").read_text()
            yield from map(Path, re.findall(r" (/run/containerd/s/\w+)$", table, re.MULTILINE))
    for task in _tasks(base):
        for name in ("address", "bootstrap.json"):  # 1.6 and 1.7, 2.x
            with contextlib.suppress(OSError):
                found = re.findall(r"unix://(/run/containerd/s/\w+)", (task / name).read_text())
                yield from map(Path, found)


def _kill(pids: Iterator[int]) -> None:
    killed = list(pids)
    for pid in killed:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + GRACE_S
    while any(_running(pid) for pid in killed) and time.monotonic() < deadline:
        time.sleep(0.01)


def _running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _mounts_below(base: Path) -> list[str]:
    with open("/proc/self/mounts") as mounts:
        points = [line.split()[1] for line in mounts]
    return [point for point in points if point.startswith(f"{base}/")]


def _remove_cgroups(name: str) -> None:
    """Remove the node's cgroups; its processes take a moment to leave them."""
    deadline = time.monotonic() + GRACE_S
    for top in _cgroups(name):
        while top.is_dir() and time.monotonic() < deadline:
            for folder, _, _ in os.walk(top, topdown=False):
                with contextlib.suppress(OSError):
                    os.rmdir(folder)
            if top.is_dir():
                time.sleep(0.02)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in the terminal is the parent's affair
    sys.stdin.buffer.read()
    sweep(Path(sys.argv[1]))
