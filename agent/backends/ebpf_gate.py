"""The gate of a namespace as the eBPF programs keep it: who may pass before the proxy listens.

The programs themselves see the proxy begin to listen, so nobody has to be there to close the gate,
and nobody but a removal opens it again. A listener that was there before the programs is seen here.
"""

import struct
from collections.abc import Iterable

from agent.formats.bpf_capture import COOKIE
from agent.kernel import bpf, bpf_pins, cgroups
from agent.kernel.sockets import KernelSocket
from agent.model.errors import KernelRejected
from agent.model.settings import Settings

_GROUP = struct.Struct("=QQ")  # cookie, id of a cgroup
_YES = struct.pack("=I", 1)


def has_listened(cookie: int) -> bool:
    """Whether the proxy of a namespace has listened, so that its gate is closed for good."""
    with bpf_pins.open_map("listened") as listened:
        return listened.lookup(COOKIE.pack(cookie)) is not None


def passing(cookie: int) -> tuple[str, ...]:
    """Return the cgroups whose processes pass; one of another id than was enrolled has a `?`."""
    found = []
    with bpf_pins.open_map("passing") as groups:
        for key in _keys(groups, cookie):
            path = (groups.lookup(key) or b"").rstrip(b"\0").decode(errors="replace")
            same = cgroups.identity(path) == _GROUP.unpack(key)[1]
            found.append(path if same else f"{path}?")
    return tuple(sorted(found))


def close_if_listening(cookie: int, settings: Settings, there: Iterable[KernelSocket]) -> None:
    """Close the gate if the proxy is among those who listen."""
    ports = {settings.proxy_port, settings.inbound_capture_port}
    if any(found.local[1] in ports for found in there):
        with bpf_pins.open_map("listened") as listened:
            listened.update(COOKIE.pack(cookie), _YES)


def open_anew(cookie: int) -> None:
    """Forget who listened while nobody passed: whoever asks for this knows that it was no proxy."""
    with bpf_pins.open_map("listened") as listened:
        listened.delete(COOKIE.pack(cookie))


def let_pass(cookie: int, paths: tuple[str, ...]) -> None:
    """Let the processes of exactly these cgroups pass.

    Raises: KernelRejected if one is not there.
    """
    wanted = {}
    for path in paths:
        found = cgroups.identity(path)
        if found is None:
            raise KernelRejected(f"eBPF: the cgroup {path} is not there")
        wanted[_GROUP.pack(cookie, found)] = path.encode()
    with bpf_pins.open_map("passing") as groups:
        for key in _keys(groups, cookie):
            if key not in wanted:
                groups.delete(key)
        for key, value in wanted.items():
            groups.update(key, value.ljust(groups.value_bytes, b"\0"))


def _keys(groups: bpf.Map, cookie: int) -> list[bytes]:
    return [key for key in list(groups.keys()) if _GROUP.unpack(key)[0] == cookie]
