"""The eBPF program for what arrives: each captured namespace has one of its own."""

import contextlib
import os
from collections.abc import Iterator, Mapping

from agent.formats import bpf_object
from agent.kernel import bpf, bpf_pins
from agent.kernel.netns import Netns

ASKED = ("captures", "listeners", "own_addresses", "listened")

Maps = Mapping[str, bpf.Map]


@contextlib.contextmanager
def opened_maps() -> Iterator[Maps]:
    """Yield the maps that such a program asks, by name."""
    with contextlib.ExitStack() as stack:
        yield {name: stack.enter_context(bpf_pins.open_map(name)) for name in ASKED}


def attach(netns: Netns, cookie: int, maps: Maps) -> None:
    """Attach the namespace's own program, or put this version's in its place. Hold the lock.

    Raises: OSError.
    """
    path = bpf_pins.pod_pin(cookie)
    with contextlib.suppress(FileNotFoundError), bpf.opened(bpf.get(path)) as fd:
        info = bpf.link_info(fd)
        if info.target == netns.id.ino:
            _renew(fd, info, cookie, maps)
            return
        path.unlink()
    with (
        _inbound_program(cookie, maps) as program,
        bpf.opened(bpf.link(program, netns.fd, bpf.ATTACH_SK_LOOKUP)) as fd,
    ):
        bpf.pin(fd, path)


def renew_all() -> None:
    """Put this version's program in the place of every other's. Hold the lock. Raises: OSError."""
    with opened_maps() as maps:
        for name in os.listdir(bpf_pins.pods()):
            with bpf.opened(bpf.get(bpf_pins.pods() / name)) as fd:
                _renew(fd, bpf.link_info(fd), int(name), maps)


def others(netns: Netns, cookie: int) -> Iterator[str]:
    """Say whose programs are asked about what arrives in the namespace, too."""
    ours = bpf.link_at(bpf_pins.pod_pin(cookie))
    for program in bpf.attached(netns.fd, bpf.ATTACH_SK_LOOKUP):
        if ours is None or program != ours.program:
            yield (
                f"sk_lookup: the program {bpf.program_name(program) or '?'} (id {program}) of "
                "somebody else is asked about what arrives, too; the last to choose a socket counts"
            )


def _renew(link: int, info: bpf.LinkInfo, cookie: int, maps: Maps) -> None:
    if info.target and bpf.program_name(info.program) != bpf_pins.inbound_name():
        with _inbound_program(cookie, maps) as program:
            bpf.exchange(link, program)


@contextlib.contextmanager
def _inbound_program(cookie: int, maps: Maps) -> Iterator[int]:
    symbols: dict[str, bpf_object.MapFd | bpf_object.Number] = {
        "netns_cookie": bpf_object.Number(cookie),
        **{name: bpf_object.MapFd(found.fd) for name, found in maps.items()},
    }
    code = bpf_object.link(bpf_pins.object_file("inbound.bpf.o"), "sk_lookup", symbols)
    with bpf.opened(bpf.load_sk_lookup(code, bpf_pins.inbound_name())) as fd:
        yield fd
