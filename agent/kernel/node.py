"""The node as the kernel shows it, for a report. Everything here reads, and nothing leaves a trace.

A match module is never probed by naming it to iptables, and a table is never asked for: the first
may load a module, the second creates the table.
"""

import contextlib
import ctypes
import gzip
import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from agent.kernel import tools

SYSCTL = Path("/proc/sys")
VERSION_TIMEOUT_S = 5.0
STA_UNSYNC = 0x0040  # linux/timex.h


def text(path: str | Path) -> str | None:
    """Return what a file says, or None if there is none or it may not be read."""
    try:
        return Path(path).read_text(errors="replace").strip("\0\n ")
    except OSError:
        return None


def sysctl(name: str) -> str | None:
    return text(SYSCTL / name.replace(".", "/"))


def number(name: str) -> int | None:
    """Return a sysctl that is a number."""
    value = sysctl(name)
    return int(value) if value is not None and value.isdigit() else None


def mounts() -> tuple[tuple[str, str], ...]:
    """Return kind and path of every mount, later ones over earlier ones."""
    found = []
    for line in (text("/proc/self/mountinfo") or "").splitlines():
        before, dash, after = line.partition(" - ")
        if dash:
            path = before.split()[4]
            if "\\" in path:  # blanks and the like, in octal
                path = path.encode().decode("unicode_escape")
            found.append((after.split()[0], path))
    return tuple(found)


def clock_synchronised() -> bool | None:
    """Return whether somebody (chrony, ntpd, systemd-timesyncd) keeps the clock right."""
    buffer = (ctypes.c_byte * 512)()  # struct timex, with modes 0: nothing is set
    if ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(buffer)) < 0:
        return None
    # int modes; long offset, freq, maxerror, esterror; int status
    word = ctypes.sizeof(ctypes.c_long)
    status = ctypes.c_int.from_buffer(buffer, 5 * word)
    return not status.value & STA_UNSYNC


def inotify_instances() -> int:
    """Return how many inotify instances processes of this user have open, of those seen here."""
    count = 0
    for pid in (name for name in os.listdir("/proc") if name.isdigit()):
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{pid}").st_uid != os.geteuid():
                continue
            for entry in os.scandir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    count += os.readlink(entry.path) == "anon_inode:inotify"
    return count


# --- tools ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A tool that is installed: where it is in the end, and what it says of its version."""

    name: str
    path: str
    version: str


def tool(name: str) -> Tool | None:
    """Return a tool, or None. `--version` is all that it is asked: that opens no table."""
    found = tools.find(name)
    if found is None:
        return None
    try:
        done = subprocess.run(
            (found, "--version"),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=VERSION_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
            env={"PATH": tools.SEARCH_PATH, "LC_ALL": "C"},
            check=False,
        )
        said = done.stdout.strip().partition("\n")[0]
    except (OSError, subprocess.TimeoutExpired):
        said = ""
    version = re.search(r"v\d.*", said)
    return Tool(name=name, path=os.path.realpath(found), version=version[0] if version else said)


# --- what the kernel has --------------------------------------------------------------------------


class Kernel:
    """What the running kernel has of netfilter, and what it could load.

    Asked in this order: what is registered (/proc/net), loaded (/sys/module), built in by the
    configuration (/proc/config.gz, /boot/config-RELEASE), and there as a file (/lib/modules).
    """

    def __init__(self) -> None:
        self.release = os.uname().release
        self.config = _config(self.release)
        self._folder = Path("/lib/modules") / self.release
        self._files = _module_files(self._folder)
        self._extensions = {
            f"{kind}:{name}"
            for kind in ("matches", "targets")
            for version in ("ip", "ip6")
            for name in (text(f"/proc/net/{version}_tables_{kind}") or "").split()
        }

    @property
    def loads_modules(self) -> bool:
        """Whether the kernel can load modules, and has some to load."""
        return bool(self._files) and sysctl("kernel.modules_disabled") != "1"

    @property
    def lost_its_modules(self) -> bool:
        """Whether it can load modules and those of its release are gone (it was upgraded)."""
        return Path("/proc/modules").exists() and not self._folder.is_dir()

    def has(self, module: str, symbol: str, extension: str = "") -> bool | None:
        """Return whether a feature is there or can be loaded; None if nobody can tell.

        `extension` is `matches:NAME` or `targets:NAME`. Of several symbols (`A|B`) the first that
        this kernel's configuration knows decides.
        """
        if extension in self._extensions or Path("/sys/module", module).is_dir():
            return True
        known = (self.config[one] for one in symbol.split("|") if one in self.config)
        value = next(known, "n") if self.config else "m"
        if value != "m":
            return value == "y"
        if not self._files:
            return None
        return module in self._files and self.loads_modules


def _config(release: str) -> Mapping[str, str]:
    """Return the configuration that the kernel was built with, without CONFIG_, if it is known."""
    for path in ("/proc/config.gz", f"/boot/config-{release}", f"/lib/modules/{release}/config"):
        with contextlib.suppress(OSError, EOFError):
            raw = Path(path).read_bytes()
            plain = gzip.decompress(raw) if path.endswith(".gz") else raw
            words = plain.decode(errors="replace")
            unset = re.findall(r"(?m)^# CONFIG_(\w+) is not set$", words)
            return dict.fromkeys(unset, "n") | dict(re.findall(r"(?m)^CONFIG_(\w+)=([ym])$", words))
    return {}


@lru_cache(maxsize=1)
def _module_files(folder: Path) -> frozenset[str]:
    """Return the modules that are built in or there as files."""
    lines = [
        line.partition(":")[0]
        for name in ("modules.builtin", "modules.dep")
        for line in (text(folder / name) or "").splitlines()
    ]
    return frozenset(Path(line).name.partition(".")[0].replace("-", "_") for line in lines if line)
