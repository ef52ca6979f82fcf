"""A host that systemd boots, in a container of the tests' own.

It has this machine's files, below an overlay that goes away, and namespaces for everything, so that
nothing of it reaches the machine.

    with made(tmp_path) as host:
        host.write("/etc/...", "...")
        host.boot()
        host.run("systemctl", "start", "intercept-agent")
"""

import contextlib
import json
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.support import installed
from tests.support.agent import wait_for
from tests.support.netns import PREFIX, run

SYSTEMD = "/lib/systemd/systemd"
# What starts by these would look after a whole machine: devices, sysctls, the clock.
EMPTY = (
    *(f"/lib/systemd/system/{name}.target.wants" for name in ("sysinit", "local-fs", "sockets")),
    *(f"/lib/systemd/system/{name}.target.wants" for name in ("multi-user", "timers", "graphical")),
    "/etc/systemd/system",
    "/usr/local/lib/systemd",
)
# eBPF attaches to the root of cgroup2, and what a container has mounted is not that.
NODE_CGROUP = "/mnt/cgroup"
CAPABILITIES = (
    *("CHOWN", "DAC_OVERRIDE", "DAC_READ_SEARCH", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID"),
    *("SETPCAP", "NET_BIND_SERVICE", "NET_ADMIN", "NET_RAW", "SYS_CHROOT", "SYS_PTRACE"),
    *("SYS_ADMIN", "MKNOD", "AUDIT_WRITE", "SETFCAP"),
)


class Host:
    """The container, by the names that runc and the file system have for it."""

    def __init__(self, folder: Path) -> None:
        self.name = f"{PREFIX}host-{secrets.token_hex(3)}"
        self.folder = folder
        self.root = folder / "root"
        self._runc = ("runc", "--root", str(folder / "runc"))

    def run(self, *command: str, check: bool = True) -> str:
        return run(*self._runc, "exec", self.name, *command, check=check)

    def show(self, unit: str, property_: str) -> str:
        """Return what systemd says of a unit."""
        return self.run("systemctl", "show", "--value", "-p", property_, unit).strip()

    def write(self, path: str, text: str, mode: int = 0o644) -> None:
        """Write a file of the host before it boots."""
        where = self.root / path.lstrip("/")
        where.parent.mkdir(parents=True, exist_ok=True)
        where.write_text(text)
        where.chmod(mode)

    # --- making it --------------------------------------------------------------------------------

    def make(self) -> None:
        layers = self.folder / "layers"
        for name in ("root", "runc", "layers", "cgroup"):
            (self.folder / name).mkdir()
        run("mount", "-t", "tmpfs", "it-host", str(layers))
        run("mount", "-t", "cgroup2", "it-host", str(self.folder / "cgroup"))
        for name in ("upper", "work"):
            (layers / name).mkdir()
        where = f"lowerdir=/,upperdir={layers}/upper,workdir={layers}/work"
        run("mount", "-t", "overlay", "-o", where, "it-host", str(self.root))
        for path in EMPTY:
            shutil.rmtree(self.root / path.lstrip("/"), ignore_errors=True)
            (self.root / path.lstrip("/")).mkdir(parents=True)
        self.write("/etc/machine-id", secrets.token_hex(16) + "\n")
        installed.write(self.root)
        libraries = f"[Service]\nEnvironment={installed.LIBRARIES}\n"
        self.write("/etc/systemd/system/service.d/python.conf", libraries)

    def boot(self) -> None:
        (self.folder / "config.json").write_text(
            json.dumps(_container(self.root, self.folder / "cgroup"))
        )
        # What it writes goes to a file: systemd keeps the stream open.
        with (self.folder / "log").open("wb") as log:
            subprocess.run(
                [*self._runc, "run", "--detach", "--bundle", self.folder, self.name],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                check=True,
            )
        wait_for(lambda: self._state() in ("running", "degraded"), 60)
        self.run("mount", "--make-rshared", "/")  # as systemd does outside of containers

    def _state(self) -> str:
        return self.run("systemctl", "is-system-running", check=False).strip()

    def remove(self) -> None:
        run(*self._runc, "kill", self.name, "KILL", check=False)
        run(*self._runc, "delete", "--force", self.name, check=False)
        for mount in (self.root, self.folder / "layers", self.folder / "cgroup"):
            run("umount", "-l", str(mount), check=False)


def _container(root: Path, cgroup: Path) -> dict[str, object]:
    capabilities = [f"CAP_{name}" for name in CAPABILITIES]
    sets = ("bounding", "effective", "permitted")
    return {
        "ociVersion": "1.0.2",
        "hostname": "it-host",
        "root": {"path": str(root)},
        "process": {
            "args": [SYSTEMD, "--system", "--log-target=console", "--log-level=info"],
            "env": [
                *("container=runc", "PATH=/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C"),
                installed.LIBRARIES,
            ],
            "cwd": "/",
            "user": {"uid": 0, "gid": 0},
            "capabilities": {name: capabilities for name in sets},
        },
        "mounts": [
            _mount("/proc", "proc"),
            _mount("/dev", "tmpfs", "mode=755"),
            _mount("/dev/pts", "devpts", "newinstance", "ptmxmode=0666", "mode=0620"),
            _mount("/dev/shm", "tmpfs"),
            _mount("/sys", "sysfs", "ro"),
            _mount("/sys/fs/cgroup", "cgroup2"),
            _mount("/sys/fs/bpf", "bpf"),
            _bound(cgroup, NODE_CGROUP),
            *(_mount(place, "tmpfs", "mode=755") for place in ("/run", "/var/lib/systemd", "/tmp")),
            *(_bound(source, where) for where, source in installed.MOUNTS.items()),
        ],
        "linux": {
            "namespaces": [
                {"type": kind} for kind in ("pid", "network", "ipc", "uts", "mount", "cgroup")
            ],
            "readonlyPaths": ["/proc/sys", "/proc/sysrq-trigger", "/proc/irq", "/proc/bus"],
        },
    }


def _mount(where: str, kind: str, *options: str) -> dict[str, object]:
    return {"destination": where, "type": kind, "source": kind, "options": list(options)}


def _bound(source: Path, where: str) -> dict[str, object]:
    return {"destination": where, "type": "none", "source": str(source), "options": ["bind", "ro"]}


@contextlib.contextmanager
def made(folder: Path) -> Iterator[Host]:
    """Make a host, which is to be booted, and remove it."""
    host = Host(folder)
    try:
        host.make()
        yield host
    finally:
        host.remove()
