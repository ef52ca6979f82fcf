"""Where the programs of the node are pinned, and what they need of the node's file systems.

Whatever is pinned outlives the agent. INTERCEPT_BPF_DIR moves the pins; where that is no bpffs yet,
one is mounted there.
"""

import contextlib
import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from hashlib import sha1
from pathlib import Path
from typing import Any

from agent.kernel import bpf, bpf_loader, bpffs, libc, node
from agent.model.enrolment import LAYOUT
from agent.model.errors import EnvironmentLacks, KernelRejected

OBJECTS = Path(__file__).parent / "objects"
MAPS = frozenset(
    (
        *("about", "captures", "own_addresses", "listeners", "listened", "passing"),
        *("handshakes", "dialled", "accepted"),
    )
)
OBJECT_NAMES = ("adopt.bpf.o", "inbound.bpf.o", "redirect.bpf.o")
ROOT_CGROUP = bpf_loader.ROOT_CGROUP
LOADER_TIMEOUT_S = 60.0
LOCK_TIMEOUT_S = 60.0
POLL_S = 0.005


@dataclass(frozen=True, slots=True)
class About:
    """What is loaded: the layout of its maps and which build it is of. Zero: not all of it yet."""

    layout: int
    build: bytes


def root() -> Path:
    return base().parent


def base() -> Path:
    return _below(os.environ.get("INTERCEPT_BPF_DIR") or "/sys/fs/bpf")


@cache
def _below(folder: str) -> Path:  # a path costs more to make than to use
    return Path(folder) / "intercept-agent"


def about() -> About | None:
    """Return what is loaded, None if nothing is: then not even the right to ask is needed."""
    if not base().exists():
        return None
    try:
        with open_map("about") as found:
            value = found.lookup(bytes(4)) or bytes(24)
    except FileNotFoundError:
        value = bytes(24)
    return About(int.from_bytes(value[:4], sys.byteorder), value[4:24])


def upcoming() -> Path:
    """Return where a set of programs is prepared that is to take the place of the one in force."""
    return base() / "upcoming"


def open_map(name: str) -> bpf.Map:
    """Open one of the maps, also if its pin is gone.

    Raises: FileNotFoundError where nothing is loaded.
    """
    try:
        return bpf.Map.at(f"{base()}/maps/{name}")
    except FileNotFoundError:
        for found, fd in _held():
            if found == name:
                return bpf.Map.of(os.dup(fd))
        raise


def lost() -> frozenset[str]:
    """Return the names of the maps whose pins somebody removed."""
    with contextlib.suppress(FileNotFoundError):
        return MAPS - frozenset(os.listdir(f"{base()}/maps"))
    return MAPS


def _held() -> Iterator[tuple[str, int]]:
    """Yield the maps that the pinned programs hold, by name; some of them more than once."""
    for path in (*(links() / hook for hook in bpf_loader.HOOKS), adopter()):
        found = bpf.link_at(path)
        if found is not None:
            yield from bpf.maps_of(found.program)


def links() -> Path:
    """Return the folder with the links of the node's programs, named after them."""
    return base() / "links"


def pods() -> Path:
    """Return the folder with one link a captured namespace, named after its cookie."""
    return base() / "pods"


def pod_pin(cookie: int) -> Path:
    return pods() / str(cookie)


def adopter() -> Path:
    """Return where the iterator is that finds listeners, if the kernel can have it."""
    return base() / "adopt"


# --- what this version brings ---------------------------------------------------------------------


def not_built() -> str | None:
    """Return why the objects are not here, or None."""
    if all((OBJECTS / name).exists() for name in OBJECT_NAMES):
        return None
    return (
        "its programs were not built: clang was missing when the package was; install clang and "
        "build it again (in a checkout: python3 bpf/build.py)"
    )


def object_file(name: str) -> bytes:
    return _content(OBJECTS / name)


@cache
def _content(path: Path) -> bytes:
    return path.read_bytes()


@cache
def build() -> bytes:
    """Return what tells this version's objects from others; zeros where there are none."""
    if not_built():
        return bytes(20)
    return sha1(
        b"".join(object_file(name) for name in OBJECT_NAMES), usedforsecurity=False
    ).digest()


def inbound_name() -> str:
    """Return what this version's program for arriving connections is called in the kernel."""
    return f"inbound_{build().hex()[:7]}"


# --- loading --------------------------------------------------------------------------------------


@cache
def unloadable() -> str | None:
    """Return why the kernel does not take the programs, or None; asked once a process."""
    said = _run_loader("probe", base()).get("error")
    return None if said is None else str(said)


def load() -> None:
    """Load the programs, or put this version's in the place of another's. Hold the lock.

    Pins that somebody removed come back, with what their maps hold.

    Raises: KernelRejected, EnvironmentLacks.
    """
    if base().exists():
        (base() / "maps").mkdir(exist_ok=True)
    for name, fd in _held():
        with contextlib.suppress(FileExistsError):
            bpf.pin(fd, base() / "maps" / name)
    _load(base(), None)


def load_beside() -> frozenset[str]:
    """Load the programs in `upcoming()`, beside those that are there. Hold the lock.

    Both are in force then. Returns the maps that both use.

    Raises: KernelRejected, EnvironmentLacks.
    """
    return _load(upcoming(), base())


def _load(pins: Path, beside: Path | None) -> frozenset[str]:
    bpffs.mount_for(base())
    answer = _run_loader("load", pins, beside)
    if said := answer.get("error"):
        raise KernelRejected(f"the eBPF programs were not loaded: {said}")
    return frozenset(answer["shared"])


def unload() -> None:
    """Detach and remove everything that `load` made. Hold the lock."""
    clear(upcoming())
    clear(base())


def clear(top: Path) -> None:
    """Detach and remove a set of programs, with all that is pinned there. Hold the lock."""
    for folder in ("pods", "links", "maps", ""):
        with contextlib.suppress(FileNotFoundError):
            for entry in list((top / folder).iterdir()):
                if not entry.is_dir():
                    entry.unlink()
    for folder in ("pods", "links", "maps", ""):
        with contextlib.suppress(FileNotFoundError):
            (top / folder).rmdir()


def swap_maps() -> None:
    """Put the maps of `upcoming()` in the place of those that are there, and those there."""
    here, there = base() / "maps", upcoming() / "maps"
    try:
        libc.exchange(here, there)
    except OSError:  # before Linux 5.17 the file system cannot: with a moment in between
        aside = upcoming() / "pods"  # always empty
        os.rename(here, aside)
        os.rename(there, here)


def _run_loader(what: str, pins: Path, beside: Path | None = None) -> dict[str, Any]:
    """Run the loader; return its answer, in which `error` is what it complains of."""
    job = {
        "do": what,
        "pins": str(pins),
        "beside": None if beside is None else str(beside),
        "objects": str(OBJECTS),
        "cgroup": cgroup_root(),
        "layout": LAYOUT,
        "build": build().hex(),
    }
    try:
        done = subprocess.run(
            (sys.executable, "-I", "-S", str(Path(bpf_loader.__file__))),
            input=json.dumps(job),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=LOADER_TIMEOUT_S,
            check=False,
            env={"LC_ALL": "C"},
            cwd="/",
        )
    except subprocess.TimeoutExpired:
        return {"error": f"the loader did not end within {LOADER_TIMEOUT_S:.0f} seconds"}
    if done.returncode or not done.stdout:
        said = done.stderr.strip().splitlines()[-1:] or done.returncode
        return {"error": f"the loader died: {said}"}
    answer: dict[str, Any] = json.loads(done.stdout)
    if bpf_loader.LIBRARY in answer.get("error", ""):
        return {"error": f"{bpf_loader.LIBRARY} cannot be loaded; install the package libbpf1"}
    return answer


def cgroup_root() -> str | None:
    """Return where the root of cgroup2 is mounted, also besides version 1; None: nowhere."""
    global _cgroup_root
    if _cgroup_root is None or not _is_same(*_cgroup_root):
        _cgroup_root = next(_cgroup_roots(), None)
    return _cgroup_root and _cgroup_root[0]


_cgroup_root: tuple[str, int] | None = None
"""Where it was found, and on which device."""


def _is_same(where: str, device: int) -> bool:
    with contextlib.suppress(OSError):
        found = os.stat(where)
        return (found.st_dev, found.st_ino) == (device, ROOT_CGROUP)
    return False


def _cgroup_roots() -> Iterator[tuple[str, int]]:
    for kind, where in node.mounts():
        with contextlib.suppress(OSError):
            if kind == "cgroup2" and (found := os.stat(where)).st_ino == ROOT_CGROUP:
                yield where, found.st_dev


# --- one at a time --------------------------------------------------------------------------------


@contextlib.contextmanager
def lock() -> Iterator[None]:
    """Hold the lock of the node's programs.

    Raises: EnvironmentLacks if somebody else does not let go of it.
    """
    bpffs.mount_for(base())
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    fd = os.open(root(), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        while not _take(fd, fcntl.LOCK_EX):
            if time.monotonic() > deadline:
                raise EnvironmentLacks(
                    f"another run works on the eBPF programs of {root()} and did not end in "
                    f"{LOCK_TIMEOUT_S:.0f} seconds"
                )
            time.sleep(POLL_S)
        yield
    finally:
        os.close(fd)


def busy() -> bool:
    """Tell whether somebody is changing something right now."""
    fd = os.open(root(), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return not _take(fd, fcntl.LOCK_SH)
    finally:
        os.close(fd)


def _take(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
