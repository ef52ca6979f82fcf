"""Loads the programs of the node, or exchanges them for those of this version, and ends.

A process of its own: libbpf and what it needs stay out of the agent, and a crash in them, too. It
is started as a plain file, so it imports the standard library only. One JSON document on standard
input says what to do, one on standard output says how it went.

What it makes is pinned and outlives it: maps are used again by name, links get the new program at
once, so connections never meet a gap. `about` is written last, so whoever finds it finds all. A
second set can be loaded beside another; maps of the same shape are then used by both.
"""

import contextlib
import ctypes
import errno
import json
import os
import struct
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LIBRARY = "libbpf.so.1"
CLONE_NEWNS = 0x00020000
MS_REC, MS_PRIVATE = 0x4000, 0x40000
BPF_F_PREORDER = 1 << 6  # before the programs of cgroups below, Linux 6.15
LINK_TYPE_CGROUP = 3
ROOT_CGROUP = 1  # the id of the first node of kernfs, also its inode

# The programs and where each is attached: enum bpf_attach_type.
HOOKS = {
    "handshake": 3,
    "original_dst": 21,
    "guard4": 8,
    "guard6": 9,
    "recvmsg4": 19,
    "recvmsg6": 20,
    "getpeername4": 29,
    "getpeername6": 30,
    "sendmsg4": 14,
    "sendmsg6": 15,
    "connect4": 10,
    "connect6": 11,
}

# What a map is made with; maps that have the same of all of it can stand for each other.
SHAPE = ("type", "key_size", "value_size", "max_entries", "map_flags")
# Maps that are of one layout alone, and those that only make sense together.
NOT_SHARED = frozenset({"about", "adopting", "captures"})
OF_CONNECTIONS = frozenset({"accepted", "dialled", "handshakes"})

P = ctypes.c_void_p
_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "bpf_object__open_mem": (P, [ctypes.c_char_p, ctypes.c_size_t, P]),
    "bpf_object__load": (ctypes.c_int, [P]),
    "bpf_object__close": (None, [P]),
    "bpf_object__next_program": (P, [P, P]),
    "bpf_object__next_map": (P, [P, P]),
    "bpf_program__name": (ctypes.c_char_p, [P]),
    "bpf_program__fd": (ctypes.c_int, [P]),
    "bpf_program__attach_iter": (P, [P, P]),
    "bpf_map__name": (ctypes.c_char_p, [P]),
    "bpf_map__set_pin_path": (ctypes.c_int, [P, ctypes.c_char_p]),
    **{f"bpf_map__{part}": (ctypes.c_uint32, [P]) for part in SHAPE},
    "bpf_map_update_elem": (ctypes.c_int, [ctypes.c_int, P, P, ctypes.c_uint64]),
    "bpf_link__fd": (ctypes.c_int, [P]),
    "bpf_link_create": (ctypes.c_int, [ctypes.c_int, ctypes.c_int, ctypes.c_int, P]),
    "bpf_link_update": (ctypes.c_int, [ctypes.c_int, ctypes.c_int, P]),
    "bpf_obj_get": (ctypes.c_int, [ctypes.c_char_p]),
    "bpf_obj_get_info_by_fd": (ctypes.c_int, [ctypes.c_int, P, P]),
    "bpf_obj_pin": (ctypes.c_int, [ctypes.c_int, ctypes.c_char_p]),
}


class LinkOptions(ctypes.Structure):
    """struct bpf_link_create_opts, as far as it is used."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("flags", ctypes.c_uint32),
        ("rest", ctypes.c_uint64 * 8),
    )


def library() -> ctypes.CDLL:
    found = ctypes.CDLL(LIBRARY, use_errno=True)
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(found, name)
        function.restype, function.argtypes = result, arguments
    return found


def checked(result: int | None, what: str) -> int:
    if result is None or result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


class Loader:
    """Holds the library and what the job said."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.bpf = library()
        self.pins = Path(job["pins"])
        self.objects = Path(job["objects"])
        self.job = job

    def probe(self) -> list[str]:
        """Load the programs and let go of them again: nothing is attached or pinned."""
        with self._loaded("redirect.bpf.o", pinned=False):
            return []

    def load(self) -> list[str]:
        """Do it all; return the maps that are shared with another set of programs.

        Two programs must not write to one map of connections: the second finds a connection
        turned and forgets it. So where these are shared, the new programs are pinned only, to be
        exchanged for the old.
        """
        for folder in ("maps", "links", "pods"):
            (self.pins / folder).mkdir(parents=True, exist_ok=True)
        shared = self._share() if self.job["beside"] else None
        with self._loaded("redirect.bpf.o", pinned=True) as programs, cgroup(self.job) as target:
            for name, kind in HOOKS.items():
                if shared is not None and set(shared) >= OF_CONNECTIONS:
                    self._keep(name, programs[name])
                else:
                    self._hook(name, programs[name], target, kind)
        # Without type information of the kernel this cannot be; a proxy that listens already when
        # its namespace is captured has then to listen again.
        with contextlib.suppress(OSError):
            self._adopter()
        about = struct.pack("=I20s", self.job["layout"], bytes.fromhex(self.job["build"]))
        fd = checked(self.bpf.bpf_obj_get(bytes(self.pins / "maps" / "about")), "about")
        value = ctypes.create_string_buffer(about, len(about))
        key = ctypes.c_uint32(0)
        done = self.bpf.bpf_map_update_elem(fd, ctypes.byref(key), value, 0)
        os.close(fd)
        checked(done, "about")
        return shared or []

    def _share(self) -> list[str]:
        """Pin here, too, which maps of the other set fit."""
        theirs = Path(self.job["beside"]) / "maps"
        with self._opened("redirect.bpf.o") as opened:
            fitting = {
                name
                for name, found in self._maps(opened)
                if name not in NOT_SHARED
                and self._shape(theirs / name)
                == tuple(getattr(self.bpf, f"bpf_map__{part}")(found) for part in SHAPE)
            }
        if not fitting >= OF_CONNECTIONS:
            fitting -= OF_CONNECTIONS
        for name in fitting:
            with contextlib.suppress(FileExistsError):
                fd = checked(self.bpf.bpf_obj_get(bytes(theirs / name)), name)
                try:
                    path = bytes(self.pins / "maps" / name)
                    checked(self.bpf.bpf_obj_pin(fd, path), f"pin {name}")
                finally:
                    os.close(fd)
        return sorted(fitting)

    def _shape(self, pin: Path) -> tuple[int, ...] | None:
        fd = self.bpf.bpf_obj_get(bytes(pin))
        if fd < 0:
            return None
        kind, _, *rest = struct.unpack_from("=IIIIII", self._info(fd))
        os.close(fd)
        return (kind, *rest)

    @contextlib.contextmanager
    def _opened(self, name: str) -> Iterator[int]:
        data = (self.objects / name).read_bytes()
        opened = self.bpf.bpf_object__open_mem(data, len(data), None)
        checked(opened, f"open {name}")
        try:
            yield opened
        finally:
            self.bpf.bpf_object__close(opened)

    @contextlib.contextmanager
    def _loaded(self, name: str, *, pinned: bool) -> Iterator[dict[str, int]]:
        with self._opened(name) as opened:
            for title, found in self._maps(opened) if pinned else ():
                path = bytes(self.pins / "maps" / title)
                checked(self.bpf.bpf_map__set_pin_path(found, path), f"pin {title}")
            checked(self.bpf.bpf_object__load(opened), f"load {name}")
            yield dict(self._programs(opened))

    def _maps(self, opened: int) -> Iterator[tuple[str, int]]:
        found = None
        while found := self.bpf.bpf_object__next_map(opened, found):
            yield self.bpf.bpf_map__name(found).decode(), found

    def _programs(self, opened: int) -> Iterator[tuple[str, int]]:
        found = None
        while found := self.bpf.bpf_object__next_program(opened, found):
            yield self.bpf.bpf_program__name(found).decode(), found

    def _hook(self, name: str, program: int, target: int, kind: int) -> None:
        """Exchange the program of the pinned link, or make the link where there is none in force.

        What was detached cannot be attached again: such a link goes.
        """
        fd = self.bpf.bpf_program__fd(program)
        path = bytes(self.pins / "links" / name)
        old = self.bpf.bpf_obj_get(path)
        if old >= 0:
            done = self._target(old) == self.job["cgroup_id"] and not self.bpf.bpf_link_update(
                old, fd, None
            )
            os.close(old)
            if done:
                return
            os.unlink(path)
        options = LinkOptions(size=16, flags=BPF_F_PREORDER)
        made = self.bpf.bpf_link_create(fd, target, kind, ctypes.byref(options))
        if made < 0:
            made = self.bpf.bpf_link_create(fd, target, kind, None)
        checked(made, f"attach {name}")
        checked(self.bpf.bpf_obj_pin(made, path), f"pin {name}")
        os.close(made)

    def _keep(self, name: str, program: int) -> None:
        """Pin a program where its link would be."""
        path = bytes(self.pins / "links" / name)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        checked(self.bpf.bpf_obj_pin(self.bpf.bpf_program__fd(program), path), f"pin {name}")

    def _target(self, link: int) -> int:
        """Return the id of the cgroup that a link is attached to, 0 for none."""
        kind, _, _, found = struct.unpack_from("=III4xQ", self._info(link))
        return int(found) if kind == LINK_TYPE_CGROUP else 0

    def _info(self, fd: int) -> bytes:
        info, size = ctypes.create_string_buffer(64), ctypes.c_uint32(64)
        checked(self.bpf.bpf_obj_get_info_by_fd(fd, info, ctypes.byref(size)), "look at a pin")
        return info.raw

    def _adopter(self) -> None:
        with self._loaded("adopt.bpf.o", pinned=True) as programs:
            link = self.bpf.bpf_program__attach_iter(programs["adopt"], None)
            checked(link, "attach adopt")
            path, draft = bytes(self.pins / "adopt"), bytes(self.pins / "adopt-new")
            with contextlib.suppress(FileNotFoundError):
                os.unlink(draft)
            checked(self.bpf.bpf_obj_pin(self.bpf.bpf_link__fd(link), draft), "pin adopt")
            os.rename(draft, path)


@contextlib.contextmanager
def cgroup(job: dict[str, Any]) -> Iterator[int]:
    """Open the root of cgroup2, mounted for this process alone where the node has it nowhere."""
    path = job["cgroup"]
    if path is None:
        libc = ctypes.CDLL(None, use_errno=True)
        path = tempfile.mkdtemp(prefix="intercept-cgroup-")
        try:
            checked(libc.unshare(CLONE_NEWNS), "unshare")
            checked(libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None), "mount")
            checked(libc.mount(b"none", path.encode(), b"cgroup2", 0, None), "mount cgroup2")
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            libc.umount2(path.encode(), 2)
        finally:
            os.rmdir(path)
    else:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    job["cgroup_id"] = os.fstat(fd).st_ino
    try:
        if job["cgroup_id"] != ROOT_CGROUP:
            raise OSError(
                errno.EPERM, "the root of cgroup2 cannot be reached here; mount the host's"
            )
        yield fd
    finally:
        os.close(fd)


def main() -> None:
    job = json.load(sys.stdin)
    try:
        loader = Loader(job)
        shared = loader.probe() if job["do"] == "probe" else loader.load()
    except OSError as error:
        said = error.strerror or str(error)
        code = errno.errorcode.get(error.errno or 0, "")
        print(json.dumps({"error": said, "errno": code}))
        return
    print(json.dumps({"shared": shared}))


if __name__ == "__main__":
    main()
