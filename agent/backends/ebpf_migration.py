"""From the programs of an older version, whose maps are laid out in another way, to this one's.

The new programs and maps are made beside the old, and the entries are carried over. If what
connections are remembered by is as before, one program after the other is exchanged. Else both sets
are in force for a moment: whichever sees a connection first turns it, and the other leaves alone
what goes to the proxy already. Then the old programs go, those last that know where connections
were meant to go which are being made at that moment. A run that is killed on the way leaves every
pod captured, and the next one goes on.
"""

import contextlib
import os
import time
from collections.abc import Iterable, Iterator

from agent.backends import ebpf_inbound
from agent.formats import bpf_capture
from agent.kernel import bpf, bpf_loader, bpf_pins

# What ends the beginning of a connection: it is accepted, and the proxy asks where it was to go.
LAST = ("handshake", "original_dst")
BEGINNING_S = 1.0


def migrate(layout: int) -> None:
    """Put this version in the place of one of that layout, which is `READABLE`. Hold the lock.

    Raises: KernelRejected, EnvironmentLacks, OSError.
    """
    shared = bpf_pins.load_beside()
    _carry_over(layout)
    if shared >= bpf_loader.OF_CONNECTIONS:
        _exchange(bpf_loader.HOOKS)
    else:
        _replace(hook for hook in bpf_loader.HOOKS if hook not in LAST)
        time.sleep(BEGINNING_S)
        _replace(LAST)
    if (bpf_pins.upcoming() / "adopt").exists():
        os.rename(bpf_pins.upcoming() / "adopt", bpf_pins.adopter())
    bpf_pins.swap_maps()
    bpf_pins.clear(bpf_pins.upcoming())
    if "listeners" in shared:  # else a namespace's own turn comes first, which finds who listens
        ebpf_inbound.renew_all()


def _carry_over(layout: int) -> None:
    """Write every entry anew; one that nobody can read stays behind, and is found missing."""
    maps = bpf_pins.upcoming() / "maps"
    with (
        bpf_pins.open_map("captures") as old,
        bpf.Map.at(maps / "captures") as new,
        bpf.Map.at(maps / "own_addresses") as own,
    ):
        kept = dict(_readable(old, layout))
        for key, (entry, addresses) in kept.items():
            for address in addresses:
                own.update(address, bpf_capture.PRESENT)
            new.update(key, entry)
        for key in [key for key in new.keys() if key not in kept]:  # noqa: SIM118
            new.delete(key)  # of an attempt that was killed


def _readable(old: bpf.Map, layout: int) -> Iterator[tuple[bytes, tuple[bytes, frozenset[bytes]]]]:
    """Yield key, new entry, and keys of own addresses of every namespace."""
    for key in list(old.keys()):
        with contextlib.suppress(ValueError):
            settings, site = bpf_capture.decode(old.lookup(key) or b"", layout)
            (cookie,) = bpf_capture.COOKIE.unpack(key)
            own = bpf_capture.own_keys(cookie, site)
            yield key, (bpf_capture.encode(settings, site), own)


def _replace(hooks: Iterable[str]) -> None:
    """Let the new programs' pins take the place of the old ones, which end with that."""
    for hook in hooks:
        os.rename(bpf_pins.upcoming() / "links" / hook, bpf_pins.links() / hook)


def _exchange(hooks: Iterable[str]) -> None:
    """Put the new programs into the old links; those that are not in force are mended later."""
    for hook in hooks:
        with (
            bpf.opened(bpf.get(bpf_pins.upcoming() / "links" / hook)) as program,
            contextlib.suppress(OSError),
            bpf.opened(bpf.get(bpf_pins.links() / hook)) as link,
        ):
            bpf.exchange(link, program)
