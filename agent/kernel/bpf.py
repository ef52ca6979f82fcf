"""The bpf(2) system call, as far as maps, links and pins go, each raising OSError with its errno.

Whatever needs an object file linked is done by libbpf in `agent.kernel.bpf_loader`; this needs no
library and costs a few microseconds a call.
"""

import contextlib
import ctypes
import errno
import os
import platform
import struct
from collections.abc import Iterator
from dataclasses import dataclass

SYSCALL = {"x86_64": 321, "aarch64": 280, "riscv64": 280, "ppc64le": 361, "s390x": 351}

# linux/bpf.h, enum bpf_cmd
MAP_LOOKUP_ELEM, MAP_UPDATE_ELEM, MAP_DELETE_ELEM, MAP_GET_NEXT_KEY = 1, 2, 3, 4
PROG_LOAD, OBJ_PIN, OBJ_GET = 5, 6, 7
PROG_GET_FD_BY_ID, MAP_GET_FD_BY_ID, OBJ_GET_INFO_BY_FD, PROG_QUERY = 13, 14, 15, 16
LINK_CREATE, LINK_UPDATE = 28, 29

PROG_TYPE_SK_LOOKUP = 30
ATTACH_SK_LOOKUP = 36
LICENSE = b"Dual BSD/GPL\0"
MOST_PROGRAMS = MOST_MAPS = 64
QUERY_EFFECTIVE = 1

_number = SYSCALL.get(platform.machine())
_libc = ctypes.CDLL(None, use_errno=True)


def call(command: int, attributes: bytes) -> tuple[int, bytes]:
    """Return what the call returned, and the attributes as the kernel left them.

    Raises: OSError.
    """
    if _number is None:
        raise OSError(errno.ENOSYS, f"bpf(2) has no known number on {platform.machine()}")
    buffer = ctypes.create_string_buffer(attributes, max(len(attributes), 128))
    result = int(_libc.syscall(_number, command, buffer, len(buffer)))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result, buffer.raw


def _at(buffer: ctypes.Array[ctypes.c_char]) -> int:
    return ctypes.addressof(buffer)


# --- pins -----------------------------------------------------------------------------------------


def get(path: str | os.PathLike[str]) -> int:
    """Open what is pinned at a path."""
    name = ctypes.create_string_buffer(os.fsencode(path))
    return call(OBJ_GET, struct.pack("=QII", _at(name), 0, 0))[0]


def pin(fd: int, path: str | os.PathLike[str]) -> None:
    name = ctypes.create_string_buffer(os.fsencode(path))
    call(OBJ_PIN, struct.pack("=QII", _at(name), fd, 0))


@contextlib.contextmanager
def opened(fd: int) -> Iterator[int]:
    """Close a descriptor at the end of the block."""
    try:
        yield fd
    finally:
        os.close(fd)


# --- maps -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Map:
    """An open map; keys and values are bytes as the programs see them."""

    fd: int
    key_bytes: int
    value_bytes: int

    @classmethod
    def at(cls, path: str | os.PathLike[str]) -> "Map":
        """Open a pinned map."""
        return cls.of(get(path))

    @classmethod
    def of(cls, fd: int) -> "Map":
        """Take over a descriptor."""
        try:
            _, _, key_bytes, value_bytes = struct.unpack_from("=IIII", info(fd, 16))
        except BaseException:
            os.close(fd)
            raise
        return cls(fd, key_bytes, value_bytes)

    def close(self) -> None:
        os.close(self.fd)

    def __enter__(self) -> "Map":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def lookup(self, key: bytes) -> bytes | None:
        """Return the value of a key, None if it is not there."""
        value = ctypes.create_string_buffer(self.value_bytes)
        try:
            self._element(MAP_LOOKUP_ELEM, key, _at(value))
        except FileNotFoundError:
            return None
        return value.raw

    def update(self, key: bytes, value: bytes) -> None:
        """Set the value of a key, at once for every program that looks. Raises: OSError."""
        if len(value) != self.value_bytes:
            raise OSError(errno.EINVAL, f"a value of {len(value)} bytes, not {self.value_bytes}")
        held = ctypes.create_string_buffer(value, len(value))
        try:
            self._element(MAP_UPDATE_ELEM, key, _at(held))
        except OSError as error:
            if error.errno == errno.E2BIG:
                raise OSError(errno.E2BIG, "one of the programs' maps is full") from error
            raise

    def delete(self, key: bytes) -> None:
        """Take a key out; one that is not there is fine."""
        try:
            self._element(MAP_DELETE_ELEM, key, 0)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.EINVAL):
                raise

    def keys(self) -> Iterator[bytes]:
        """Yield the keys. While others change the map, one may come twice or be left out."""
        key: bytes | None = None
        while True:
            held = ctypes.create_string_buffer(key or b"", self.key_bytes)
            following = ctypes.create_string_buffer(self.key_bytes)
            start = 0 if key is None else _at(held)
            attributes = struct.pack("=I4xQQQ", self.fd, start, _at(following), 0)
            try:
                call(MAP_GET_NEXT_KEY, attributes)
            except FileNotFoundError:
                return
            key = following.raw
            yield key

    def _element(self, command: int, key: bytes, value: int) -> None:
        held = ctypes.create_string_buffer(key, self.key_bytes)
        call(command, struct.pack("=I4xQQQ", self.fd, _at(held), value, 0))


# --- programs and links ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LinkInfo:
    """What a link holds. `target` is the id of a cgroup or the inode of a network namespace: 0 for
    a link that was detached, or whose target is gone."""

    program: int
    target: int


def load_sk_lookup(instructions: bytes, name: str) -> int:
    """Load a program of that kind; raises with the verifier's last words."""
    code = ctypes.create_string_buffer(instructions, len(instructions))
    license_text = ctypes.create_string_buffer(LICENSE)

    def attempt(log: ctypes.Array[ctypes.c_char] | None) -> int:
        head = struct.pack(
            *("=IIQQ", PROG_TYPE_SK_LOOKUP, len(instructions) // 8, _at(code), _at(license_text))
        )
        said = (0, 0, 0) if log is None else (1, len(log), _at(log))
        tail = struct.pack("=IIQII16sII", *said, 0, 0, name.encode(), 0, ATTACH_SK_LOOKUP)
        return call(PROG_LOAD, head + tail)[0]

    try:
        return attempt(None)
    except OSError as error:
        log = ctypes.create_string_buffer(1 << 20)
        try:
            return attempt(log)
        except OSError:
            lines = log.value.decode(errors="replace").strip().splitlines()
            words = "; ".join(lines[-2:]) or os.strerror(error.errno or 0)
            raise OSError(error.errno, words) from error


def link(program: int, target: int, kind: int, flags: int = 0) -> int:
    """Attach a program; it stays until the link is neither open nor pinned."""
    return call(LINK_CREATE, struct.pack("=IIII", program, target, kind, flags))[0]


def exchange(linked: int, program: int) -> None:
    """Put another program in the place of the one that a link holds, at once."""
    call(LINK_UPDATE, struct.pack("=IIII", linked, program, 0, 0))


def link_info(fd: int) -> LinkInfo:
    raw = info(fd, 32)
    # Both kinds begin with their target: the id of a cgroup has 64 bits, an inode here 32.
    kind, _, program = struct.unpack_from("=III", raw)
    form = "=Q" if kind == LINK_TYPE_CGROUP else "=I"
    return LinkInfo(program, struct.unpack_from(form, raw, 16)[0])


LINK_TYPE_CGROUP = 3


def link_at(path: str | os.PathLike[str]) -> LinkInfo | None:
    """Return what the link that is pinned at a path holds, None where there is no pin."""
    try:
        fd = get(path)
    except FileNotFoundError:
        return None
    try:
        return link_info(fd)
    finally:
        os.close(fd)


def program_name(identity: int) -> str:
    """Return the name that a loaded program was given; none if it is gone."""
    try:
        fd = call(PROG_GET_FD_BY_ID, struct.pack("=II", identity, 0))[0]
    except FileNotFoundError:
        return ""
    with opened(fd):
        return info(fd, 80)[64:80].rstrip(b"\0").decode(errors="replace")


def maps_of(program: int) -> Iterator[tuple[str, int]]:
    """Yield the names of the maps that a loaded program holds, each with a descriptor meanwhile."""
    ids = (ctypes.c_uint32 * MOST_MAPS)()
    asked = struct.pack("=52xIQ", MOST_MAPS, ctypes.addressof(ids))  # struct bpf_prog_info
    with opened(call(PROG_GET_FD_BY_ID, struct.pack("=II", program, 0))[0]) as fd:
        (count,) = struct.unpack_from("=I", info(fd, len(asked), asked), 52)
    for identity in ids[: min(count, MOST_MAPS)]:
        with opened(call(MAP_GET_FD_BY_ID, struct.pack("=II", identity, 0))[0]) as fd:
            yield info(fd, 40)[24:40].rstrip(b"\0").decode(errors="replace"), fd


def attached(target: int, kind: int) -> tuple[int, ...]:
    """Return the ids of the programs that processes of a cgroup, or connections to a network
    namespace, meet, in that order."""
    ids = (ctypes.c_uint32 * MOST_PROGRAMS)()
    flags = 0 if kind == ATTACH_SK_LOOKUP else QUERY_EFFECTIVE
    attributes = struct.pack(
        "=IIIIQI4x", target, kind, flags, 0, ctypes.addressof(ids), MOST_PROGRAMS
    )
    _, answer = call(PROG_QUERY, attributes)
    (count,) = struct.unpack_from("=I", answer, 24)
    return tuple(ids[: min(count, MOST_PROGRAMS)])


def info(fd: int, size: int, asked: bytes = b"") -> bytes:
    """Return the first bytes of what the kernel tells of an object. Raises: OSError.

    `asked` is for what it takes of them as a question.
    """
    told = ctypes.create_string_buffer(asked, size)
    call(OBJ_GET_INFO_BY_FD, struct.pack("=IIQ", fd, size, _at(told)))
    return told.raw
