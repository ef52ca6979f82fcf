"""A directory that others write to as well: read whole, and changed all or nothing.

Every new file is written under a temporary name *in the same directory*, synced, and renamed:
containerd notices a rename inside the directory, and does not notice a file moved in from another
one, a hard link or a touch. The temporary name has none of the extensions that runtimes look for.
Names are resolved from a descriptor of the directory, so one that is replaced meanwhile by another
gets no half of a change.
"""

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Callable, Iterator
from types import TracebackType

from agent.cni.edits import KEPT_SUFFIX, Edit, Keep, Rename, Snapshot, Write
from agent.formats import cni_config
from agent.model.errors import AgentError, EnvironmentLacks

TEMPORARY = ".intercept-agent-"  # then the process id, then `.tmp`
Undo = Callable[[], None]


class Busy(AgentError):
    """Another run of ours is changing the directory; nothing was touched, try again soon."""


class Changed(AgentError):
    """Somebody changed a file since it was read; nothing was touched, look again and retry."""


@contextlib.contextmanager
def explained(what: str, outcome: str = "nothing was changed") -> Iterator[None]:
    """Turn what the kernel says into one sentence: what, why, and how things stand now.

    Raises: EnvironmentLacks.
    """
    try:
        yield
    except OSError as error:
        hint = ""
        if error.errno in (errno.EACCES, errno.EPERM) and os.geteuid() != 0:
            hint = "; run this as root"
        elif error.errno == errno.EROFS:
            hint = "; mount it writable into the agent's container"
        said = error.strerror or str(error)
        raise EnvironmentLacks(f"{what}: {said}{hint}; {outcome}") from error


class Folder:
    """An open directory. Changes are undone on the way out unless `commit` was called.

    With `lock` only one process at a time is inside. Raises: EnvironmentLacks if it cannot be
    opened, Busy.
    """

    def __init__(self, path: str, *, lock: bool = False) -> None:
        self.path = path
        self._undo: list[Undo] = []
        self._spares: list[str] = []
        with explained(f"cannot open {path}"):
            self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        if lock:
            self._lock()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._fd)
            raise Busy(f"another run of intercept-agent is changing {self.path}") from error
        except OSError:
            return  # without locks in the file system the look before each write has to do

    def __enter__(self) -> "Folder":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        for step in reversed(self._undo):
            with contextlib.suppress(OSError):
                step()
        self._drop_spares()
        os.close(self._fd)

    # --- reading ---------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """Return every configuration and every kept original that is there now."""
        files, unreadable, links = {}, {}, set()
        with explained(f"cannot read {self.path}"):
            names = os.listdir(self._fd)
        for name in names:
            if not cni_config.is_configuration(name.removesuffix(KEPT_SUFFIX)):
                continue
            try:
                if stat.S_ISLNK(os.lstat(name, dir_fd=self._fd).st_mode):
                    links.add(name)
                data = self.read(name)
            except IsADirectoryError:
                continue
            except OSError as error:
                if error.errno != errno.ENOENT or name in links:
                    unreadable[name] = error.strerror or str(error)
                continue
            files[name] = data
        return Snapshot(files, frozenset(links), unreadable)

    def read(self, name: str) -> bytes:
        """Return what a file holds, at most one byte more than a configuration may have."""
        # Without O_NONBLOCK a fifo of such a name would stop us for ever.
        fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=self._fd)
        with open(fd, "rb") as file:
            kind = os.fstat(fd).st_mode
            if stat.S_ISDIR(kind):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), name)
            if not stat.S_ISREG(kind):
                raise OSError(errno.EINVAL, "not a regular file", name)
            return file.read(cni_config.MAX_BYTES + 1)

    def has(self, name: str) -> bool:
        return os.access(name, os.F_OK, dir_fd=self._fd)

    def runs(self, name: str) -> bool:
        return os.access(name, os.X_OK, dir_fd=self._fd)

    # --- changing --------------------------------------------------------------------------------

    def apply(self, edits: tuple[Edit, ...], seen: Snapshot) -> None:
        """Make the edits that were planned for a snapshot.

        Raises: Changed if a file is no longer as it was seen, EnvironmentLacks if one cannot be
        written. In both cases leaving the folder undoes what was done.
        """
        for edit in edits:
            self._require_unchanged(edit, seen)
        for edit in edits:
            with explained(f"cannot write {self.path}/{edit.name}"):
                self._one(edit)

    def write(
        self, name: str, data: bytes, mode: int, owner: tuple[int, int] | None = None
    ) -> None:
        """Create or replace a file at once, even one that is being run.

        Raises: OSError.
        """
        self.install(self.draft(name, data, mode, owner), name)

    def install(self, draft: str, name: str) -> None:
        """Give a draft its name, in place of whatever had it. Raises: OSError."""
        spare = self._spare(name)
        os.rename(draft, name, src_dir_fd=self._fd, dst_dir_fd=self._fd)
        self._spares.remove(draft)
        self._undo.append(lambda: self._put_back(spare, name))

    def draft(self, name: str, data: bytes, mode: int, owner: tuple[int, int] | None = None) -> str:
        """Write a temporary file and return its name; leaving the folder removes it."""
        draft = _temporary(name, "new")
        self._spares.append(draft)
        self._unlink(draft)
        self._fill(draft, data, mode, owner)
        return draft

    def _fill(self, name: str, data: bytes, mode: int, owner: tuple[int, int] | None) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with open(os.open(name, flags, 0o600, dir_fd=self._fd), "wb") as file:
            file.write(data)
            file.flush()
            if owner is not None and owner != (os.geteuid(), os.getegid()):
                os.fchown(file.fileno(), *owner)
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())

    def remove(self, name: str) -> None:
        spare = self._spare(name)
        os.unlink(name, dir_fd=self._fd)
        self._undo.append(lambda: self._put_back(spare, name))

    def commit(self) -> None:
        """Make what was done last: nothing is undone any more."""
        self.sync()
        self._undo.clear()
        self._drop_spares()

    def sync(self) -> None:
        """Have the names that were given survive a power cut, where the file system can do that."""
        with contextlib.suppress(OSError):
            os.fsync(self._fd)

    def sweep(self) -> None:
        """Remove what killed runs left under temporary names. Call it under the lock only."""
        with contextlib.suppress(OSError):
            for name in os.listdir(self._fd):
                if TEMPORARY in name and name.endswith(".tmp") and name not in self._spares:
                    self._unlink(name)

    def _one(self, edit: Edit) -> None:
        if isinstance(edit, Write):
            like = os.stat(edit.like, dir_fd=self._fd)
            owner = (like.st_uid, like.st_gid)
            self.write(edit.name, edit.data, stat.S_IMODE(like.st_mode), owner)
        elif isinstance(edit, Keep):
            self._keep(edit.name, edit.to)
        elif isinstance(edit, Rename):
            self._rename(edit.name, edit.to)
        else:
            self.remove(edit.name)

    def _keep(self, name: str, to: str) -> None:
        spare = self._spare(to)
        second = self._spare(name)
        if second is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
        os.rename(second, to, src_dir_fd=self._fd, dst_dir_fd=self._fd)
        self._undo.append(lambda: self._put_back(spare, to))

    def _rename(self, name: str, to: str) -> None:
        spare = self._spare(to)
        os.rename(name, to, src_dir_fd=self._fd, dst_dir_fd=self._fd)

        def back() -> None:
            os.rename(to, name, src_dir_fd=self._fd, dst_dir_fd=self._fd)
            if spare is not None:
                os.rename(spare, to, src_dir_fd=self._fd, dst_dir_fd=self._fd)

        self._undo.append(back)

    def _require_unchanged(self, edit: Edit, seen: Snapshot) -> None:
        """Look once more at what is about to be replaced: others write without asking."""
        names = [edit.name, *([edit.to] if isinstance(edit, Keep | Rename) else [])]
        for name in names:
            try:
                now = self.read(name)
            except OSError:
                now = None
            if now != seen.files.get(name):
                raise Changed(f"{self.path}/{name} was changed by somebody else meanwhile")

    def _spare(self, name: str) -> str | None:
        """Give what has a name now a second one, from which it can be put back."""
        spare = _temporary(name, f"old{len(self._spares)}")
        self._unlink(spare)
        self._spares.append(spare)
        try:
            os.link(name, spare, src_dir_fd=self._fd, dst_dir_fd=self._fd, follow_symlinks=False)
        except FileNotFoundError:
            return None
        except OSError:  # a file system without hard links; a copy does as well
            now = os.stat(name, dir_fd=self._fd)
            owner = (now.st_uid, now.st_gid)
            self._fill(spare, self.read(name), stat.S_IMODE(now.st_mode), owner)
        return spare

    def _put_back(self, spare: str | None, name: str) -> None:
        if spare is None:
            self._unlink(name)
        else:
            os.rename(spare, name, src_dir_fd=self._fd, dst_dir_fd=self._fd)

    def _drop_spares(self) -> None:
        for name in self._spares:
            self._unlink(name)
        self._spares.clear()

    def _unlink(self, name: str) -> None:
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=self._fd)


def _temporary(name: str, purpose: str) -> str:
    return f".{name}.{purpose}{TEMPORARY}{os.getpid()}.tmp"
