"""Who is likely to undo our edits: known products by their plugin, and processes by what they do.

The kernel does not tell who wrote a file. Who holds one of the directory open, or watches it, is
told under /proc, and that is whom an operator should look at.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

# They watch the directory too, and write nothing there.
RUNTIMES = frozenset({"containerd", "crio", "cri-dockerd", "dockerd", "kubelet", "k3s", "rke2"})

KNOWN = {
    "cilium-cni": "Cilium's exclusive mode (turn it off: Helm value cni.exclusive=false)",
    "calico": "Calico's install-cni (the DaemonSet calico-node)",
    "flannel": "flannel's DaemonSet (kube-flannel-ds)",
    "aws-cni": "the Amazon VPC CNI (the DaemonSet aws-node)",
    "azure-vnet": "the Azure CNI (azure-cns)",
    "multus": "Multus, which writes its configuration from another one",
    "multus-shim": "Multus, which writes its configuration from another one",
    "ptp": "the node's own network set-up (GKE's netd, kindnet)",
    "weave-net": "Weave Net",
    "antrea": "antrea-agent",
    "ovn-k8s-cni-overlay": "OVN-Kubernetes (ovnkube-node)",
}


def describe(main_type: str | None, processes: tuple[str, ...]) -> str:
    """Return the likely opponent in words for a warning."""
    known = KNOWN.get(main_type or "")
    who = " ".join(processes)
    if known and who:
        return f"likely {known}; processes at work in the directory: {who}"
    if known:
        return f"likely {known}"
    if who:
        return f"processes at work in the directory: {who}"
    return f"likely what installs {main_type}" if main_type else "nobody can be named"


def processes(directory: str, proc: str = "/proc") -> tuple[str, ...]:
    """Return `name[pid]` of those that hold a file of the directory open or watch it.

    Never fails: what cannot be read is left out. Our own process and runtimes are left out too.
    """
    try:
        there = os.stat(directory)
    except OSError:
        return ()
    # An inotify watch has the device as the kernel has it: 12 bits major, 20 bits minor.
    device = os.major(there.st_dev) << 20 | os.minor(there.st_dev)
    watch = f"ino:{there.st_ino:x} sdev:{device:x} "
    found = []
    for pid in _pids(proc):
        base = Path(proc, str(pid))
        with contextlib.suppress(OSError):
            name = (base / "comm").read_text().strip()
            if name not in RUNTIMES and _at_work(base, os.path.realpath(directory), watch):
                found.append(f"{name}[{pid}]")
    return tuple(found)


def _pids(proc: str) -> Iterator[int]:
    with contextlib.suppress(OSError):
        yield from (int(n) for n in os.listdir(proc) if n.isdigit() and int(n) != os.getpid())


def _at_work(base: Path, directory: str, watch: str) -> bool:
    for fd in os.listdir(base / "fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(base / "fd" / fd)
            if target.startswith(f"{directory}/") or _is_in(directory, base / "fd" / fd, target):
                return True
            if target == "anon_inode:inotify" and watch in (base / "fdinfo" / fd).read_text():
                return True
    return False


def _is_in(directory: str, fd: Path, target: str) -> bool:
    """Tell whether an open file is one of the directory, also under the path of another container.

    By name first: to look at a file of a network that is down could take for ever.
    """
    with contextlib.suppress(OSError):
        return os.path.samestat(os.stat(Path(directory, os.path.basename(target))), os.stat(fd))
    return False
