"""The process that has the programs: compiles them, attaches them, hands on what they tell.

It is a process of its own because bcc brings a whole compiler with it (125 MB), and because its
links are held by nothing but its descriptors: however it ends, the programs are gone with it. It
ends when its standard input does, so also with whoever started it.

Standard input has one JSON document a line: first the job, then `{"watch": [[COOKIE, PATH], ...],
"forget": [COOKIE, ...]}`. Standard output has records of `agent.flows.event`. Standard error has a
sentence if it ends by itself.
"""

import contextlib
import ctypes
import glob
import importlib.util
import json
import os
import select
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from agent.flows import event
from agent.flows.query import Query, source
from agent.kernel import bpf
from agent.kernel.borrowed import borrowed
from agent.kernel.bpf_loader import BPF_F_PREORDER
from agent.kernel.netns import Netns
from agent.kernel.sockets import SocketTable
from agent.model.errors import AgentError, EnvironmentLacks

HERE = Path(__file__).parent
# Where distributions put it; the package index has another program under that name.
FOLDERS = (
    "/usr/lib/python3/dist-packages",
    "/usr/lib/python3*/site-packages",
    "/usr/lib64/python3*/site-packages",
    "/usr/local/lib/python3*/dist-packages",
    "/usr/local/lib/python3*/site-packages",
)
INSTALL = (
    "install it: apt-get install python3-bpfcc (Debian, Ubuntu), dnf install python3-bcc "
    "(Fedora, RHEL), zypper install python3-bcc (SUSE), pacman -S python-bcc (Arch), "
    "apk add py3-bcc (Alpine)"
)

# linux/bpf.h, enum bpf_prog_type and bpf_attach_type
PROGRAMS = {
    "flows_connect4": (18, 10),
    "flows_connect6": (18, 11),
    "flows_sendmsg4": (18, 14),
    "flows_sendmsg6": (18, 15),
    "flows_egress": (8, 1),
    "flows_release": (9, 34),
    "flows_sockops": (13, 3),
}
POLL_MS = 100
READ_BYTES = 1 << 16
WORDS_KEPT = 400


def main() -> int:
    try:
        with open(0, "rb", buffering=0, closefd=False) as unbuffered:  # what follows is not for it
            job = unbuffered.readline()
        _watch(json.loads(job))
    except AgentError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except (BrokenPipeError, KeyboardInterrupt):
        pass
    return 0


def _watch(job: Mapping[str, Any]) -> None:
    bcc = _bcc()
    made = _compiled(bcc, job)
    cgroup = os.open(job["cgroup"], os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name, (kind, where) in PROGRAMS.items():
            _attach(_loaded(made, name, kind, where), cgroup, where)
    except OSError as error:
        raise EnvironmentLacks(
            f"cannot attach to {job['cgroup']}: {error.strerror}; it takes Linux 5.15 or newer"
        ) from error
    names = ("lost", "listening") if job["netns"] is not None else ("lost", "listening", "watched")
    sizes = {"lost": (4, 8), "listening": (4, 4), "watched": (8, 1)}
    _follow(
        made,
        {n: bpf.Map(bcc.lib.bpf_table_fd(made.module, n.encode()), *sizes[n]) for n in names},
    )


# --- bcc ------------------------------------------------------------------------------------------


def _bcc() -> Any:
    """Import the distribution's bcc and nothing else from where it lies.

    Raises: EnvironmentLacks.
    """
    folders = [found for pattern in FOLDERS for found in sorted(glob.glob(pattern))]
    spec = PathFinder.find_spec("bcc", folders)
    if spec is None or spec.loader is None:
        raise EnvironmentLacks(f"flows needs bcc, the BPF compiler, which is not here; {INSTALL}")
    module = importlib.util.module_from_spec(spec)
    sys.modules["bcc"] = module
    try:
        spec.loader.exec_module(module)
    except (ImportError, OSError) as error:
        raise EnvironmentLacks(f"bcc cannot be loaded: {error}; {INSTALL}") from error
    if not hasattr(module, "BPF"):
        raise EnvironmentLacks(f"{spec.origin} is another program than the BPF compiler; {INSTALL}")
    return module


def _compiled(bcc: Any, job: Mapping[str, Any]) -> Any:
    """Compile the programs against the stub headers: no kernel headers are needed."""
    os.environ["BCC_KERNEL_SOURCE"] = str(HERE / "stub")
    query = Query(uids=tuple(job["uids"]), ports=tuple(job["ports"]), netns=job["netns"])
    text = source(
        query,
        (HERE / "programs.c").read_text(),
        page_bytes=os.sysconf("SC_PAGE_SIZE"),
        dialled_pin=job["dialled"],
    )
    with _said() as said:
        try:
            return bcc.BPF(text=text)
        except Exception as error:  # bcc raises nothing more special
            raise EnvironmentLacks(f"bcc cannot compile: {said() or error}") from error


def _loaded(made: Any, name: str, kind: int, where: int) -> int:
    with _said() as said:
        try:
            return int(made.load_func(name, kind, attach_type=where).fd)
        except Exception as error:
            raise EnvironmentLacks(f"the kernel refuses {name}: {said() or error}") from error


def _attach(program: int, cgroup: int, where: int) -> None:
    """Attach it among those of the eBPF backend, in the order of their coming.

    So whoever was dialled is known: from the backend's map if it was there first, else from the
    call itself.
    """
    try:
        bpf.link(program, cgroup, where, BPF_F_PREORDER)
    except OSError:  # before Linux 6.15 there is no other order
        bpf.link(program, cgroup, where)


@contextlib.contextmanager
def _said() -> Iterator[Any]:
    """Catch what the compiler and the verifier print to standard error; yield how to read it."""
    kept = os.dup(2)
    caught = os.memfd_create("said")
    os.dup2(caught, 2)

    def last() -> str:
        raw = os.pread(caught, 1 << 20, 0).decode(errors="replace")
        return " ".join(raw.split())[-WORDS_KEPT:]

    try:
        yield last
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(caught)


# --- following ------------------------------------------------------------------------------------


def _follow(made: Any, maps: Mapping[str, bpf.Map]) -> None:
    """Hand on what the programs tell until standard input ends, and what they have told by then."""
    out = sys.stdout.buffer
    pending: list[bytes] = []

    def keep(_: object, data: int, size: int) -> int:
        pending.append(ctypes.string_at(data, size))
        return 0

    made["events"].open_ring_buffer(keep)
    lost, rest, data = 0, b"", b"?"
    while data:
        if select.select([0], [], [], 0)[0]:
            data = os.read(0, READ_BYTES)
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                _obey(json.loads(line), maps)
                pending.append(event.ready())
        made.ring_buffer_poll(POLL_MS if data else 0)
        now = int.from_bytes(maps["lost"].lookup(bytes(4)) or b"", sys.byteorder)
        if now > lost:
            pending.append(event.lost(now - lost))
            lost = now
        if pending:
            out.write(b"".join(pending))
            out.flush()
            pending.clear()


def _obey(command: Mapping[str, Any], maps: Mapping[str, bpf.Map]) -> None:
    if watched := maps.get("watched"):
        for cookie, _ in command["watch"]:
            watched.update(cookie.to_bytes(8, sys.byteorder), b"\1")
        for cookie in command["forget"]:
            watched.delete(cookie.to_bytes(8, sys.byteorder))
    _note_listeners(maps["listening"], [path for _, path in command["watch"]])


def _note_listeners(listening: bpf.Map, paths: Iterable[str]) -> None:
    """Tell the programs on which port those listen who do already."""
    inodes: set[int] = set()
    for path in paths:
        with (
            contextlib.suppress(AgentError, OSError),
            Netns.open(path) as netns,
            netns.run(SocketTable) as table,
        ):
            inodes |= {found.inode for found in table.listeners("tcp")}
    with borrowed(frozenset(inodes)) as found:
        for each in found:
            key, value = each.fileno(), each.getsockname()[1]
            with contextlib.suppress(OSError):  # closed meanwhile
                listening.update(key.to_bytes(4, sys.byteorder), value.to_bytes(4, sys.byteorder))


if __name__ == "__main__":
    sys.exit(main())
