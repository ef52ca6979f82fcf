"""Hears when something comes to or goes from folders, by inotify. For one event loop."""

import asyncio
import ctypes
import os
import struct
from collections.abc import Callable

# sys/inotify.h
IN_NONBLOCK, IN_CLOEXEC = os.O_NONBLOCK, os.O_CLOEXEC
IN_MOVED, IN_CREATE, IN_DELETE, IN_ONLYDIR = 0xC0, 0x100, 0x200, 0x01000000
CHANGES = IN_MOVED | IN_CREATE | IN_DELETE | IN_ONLYDIR
EVENT = struct.Struct("=iIII")  # which, what, cookie, bytes of a name that follow
READ_BYTES = 65536

_libc = ctypes.CDLL(None, use_errno=True)


class FolderWatch:
    """All folders that are watched. Nothing is opened before the first."""

    def __init__(self) -> None:
        self._fd = -1
        self._heard: dict[int, list[Callable[[], None]]] = {}

    def add(self, path: str, heard: Callable[[], None]) -> None:
        """Call `heard` whenever the folder changes, until `remove`.

        Raises: OSError if it is none, or there may be no more of these.
        """
        if self._fd < 0:
            self._fd = _checked(_libc.inotify_init1(IN_NONBLOCK | IN_CLOEXEC), "inotify")
            asyncio.get_running_loop().add_reader(self._fd, self._read)
        which = _checked(_libc.inotify_add_watch(self._fd, os.fsencode(path), CHANGES), path)
        self._heard.setdefault(which, []).append(heard)

    def remove(self, heard: Callable[[], None]) -> None:
        """Call it no more."""
        for which, those in list(self._heard.items()):
            left = [one for one in those if one != heard]
            self._heard[which] = left
            if not left:
                del self._heard[which]
                _libc.inotify_rm_watch(self._fd, which)  # fails where the folder is gone

    def close(self) -> None:
        if self._fd >= 0:
            asyncio.get_running_loop().remove_reader(self._fd)
            os.close(self._fd)
        self._fd, self._heard = -1, {}

    def _read(self) -> None:
        data = os.read(self._fd, READ_BYTES)
        at, changed = 0, set()
        while at < len(data):
            which, _, _, size = EVENT.unpack_from(data, at)
            at += EVENT.size + size
            changed.add(which)
        lost = -1 in changed  # the queue was full
        for which, those in list(self._heard.items()):
            for heard in those if lost or which in changed else ():
                heard()


def _checked(result: int, what: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), what)
    return result
