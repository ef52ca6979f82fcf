"""Puts the plugin and its entry on a node, takes both away, and tells what differs.

The order keeps the node able to start and stop pods at every moment, whenever we are killed:
installing is binary, then configuration; removing is configuration, then binary. An entry without
its binary is worse than none: pods could not even be deleted. So if the binary is missing and
cannot be put there, the entry is taken out.

`uninstall` after `install` gives back every byte; `install` after `install` writes nothing.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from agent.cni import binary
from agent.cni.edits import Edit, Keep, Plan, Remove, Rename, Snapshot, Write, outcome, plan
from agent.cni.edits import plan_removal as _plan_removal
from agent.cni.folder import Folder, explained
from agent.formats import cni_config
from agent.formats.cni_config import TYPE, Entry
from agent.model.errors import AgentError, EnvironmentLacks

CONF_DIR = "/etc/cni/net.d"
BIN_DIR = "/opt/cni/bin"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A node's two directories and what belongs there.

    `pinned` is the file to chain into instead of the one that the runtime reads, `interpreter` the
    node's Python for the plugin instead of the first that runs it, `program` an executable that is
    the plugin instead, for nodes without Python.
    """

    conf_dir: str = CONF_DIR
    bin_dir: str = BIN_DIR
    entry: Entry = field(default_factory=Entry)
    pinned: str | None = None
    interpreter: str | None = None
    program: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What was found or done. `changes` has a sentence for every write, in their order."""

    file: str | None = None
    changes: tuple[str, ...] = ()
    differences: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def changed(self) -> bool:
        return bool(self.changes)

    @property
    def in_sync(self) -> bool:
        return not self.differences


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """A node as it is: what its configurations ask for, and what is wrong with the binary."""

    snapshot: Snapshot
    plan: Plan
    binary: tuple[str, ...]

    @property
    def differences(self) -> tuple[str, ...]:
        return (*(() if self.plan.present else (self.plan.reason,)), *self.binary)

    @property
    def repairable(self) -> bool:
        return bool(self.plan.edits or (self.plan.present and self.binary))


def look(place: Place) -> Look:
    """Read both directories; either may be missing. Raises: EnvironmentLacks if unreadable."""
    snapshot = _snapshot(place.conf_dir)
    try:
        with Folder(place.bin_dir) as bins:
            words = binary.differences(bins, place.interpreter, place.program)
    except EnvironmentLacks as error:
        words = (f"binary {TYPE} is missing: {error.__cause__ and error.__cause__.args[-1]}",)
    todo = plan(snapshot, place.entry, pinned=place.pinned)
    return Look(snapshot=snapshot, plan=todo, binary=words)


def check(place: Place) -> Report:
    """Tell what `install` would change. Writes nothing.

    Raises: EnvironmentLacks if there is no such configuration directory.
    """
    found = look(place)
    if not found.snapshot.exists:
        raise EnvironmentLacks(f"there is no directory {place.conf_dir}; name it with --conf-dir")
    return Report(file=found.plan.file, differences=found.differences, warnings=found.plan.warnings)


def install(place: Place) -> Report:
    """Make binary and entry be as they should, or leave everything as it was.

    Raises: EnvironmentLacks, Busy, Changed; nothing was changed, but for the one case that the
    message tells: an entry whose binary is missing and cannot be installed was taken out.
    """
    with contextlib.ExitStack() as stack:
        # Left in reverse: should this fail, the entry is undone before the binary is.
        try:
            bins = stack.enter_context(Folder(place.bin_dir))
        except EnvironmentLacks as error:
            raise _without_binary(place.conf_dir, error) from error
        conf = stack.enter_context(Folder(place.conf_dir, lock=True))
        conf.sweep()
        bins.sweep()
        seen = conf.snapshot()
        todo = plan(seen, place.entry, pinned=place.pinned)
        if not todo.present and not todo.edits:
            raise EnvironmentLacks(f"{place.conf_dir}: {todo.reason}; nothing was changed")
        try:
            put, warnings = binary.put(bins, place.interpreter, place.program)
        except EnvironmentLacks as error:
            raise _withdrawn(conf, bins, seen, error) from error
        conf.apply(todo.edits, seen)
        bins.commit()
        conf.commit()
        return Report(
            file=todo.file,
            changes=(*((f"installed {place.bin_dir}/{TYPE}",) if put else ()), *_said(todo.edits)),
            warnings=(*warnings, *todo.warnings, *_base_missing(todo, bins)),
        )


def uninstall(place: Place, *, keep_binary: bool = False) -> Report:
    """Take the entry out of every configuration, bring originals back, then remove the binary.

    With `keep_binary` it stays, for runtimes that remember the entry: Multus deletes its pods by
    a copy of the configuration that it made when they started.

    Raises: EnvironmentLacks, Busy, Changed: nothing was changed, or the message says what was.
    """
    changes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    with contextlib.ExitStack() as stack:
        bins = _opened(stack, place.bin_dir)
        conf = _opened(stack, place.conf_dir, lock=True)
        if conf is not None:
            conf.sweep()
            seen = conf.snapshot()
            todo = _plan_removal(seen)
            _require_gone(place.conf_dir, outcome(seen, todo.edits))
            conf.apply(todo.edits, seen)
            conf.commit()
            changes, warnings = tuple(_said(todo.edits)), todo.warnings
        if bins is not None:
            bins.sweep()
            if not keep_binary and bins.has(TYPE):
                stays = "the entry is gone, and a binary that nothing names does no harm"
                with explained(f"cannot remove {place.bin_dir}/{TYPE}", stays):
                    bins.remove(TYPE)
                bins.commit()
                changes = (*changes, f"removed {place.bin_dir}/{TYPE}")
    return Report(changes=changes, warnings=warnings)


# --- inside --------------------------------------------------------------------------------------


def _snapshot(conf_dir: str) -> Snapshot:
    try:
        with Folder(conf_dir) as conf:
            return conf.snapshot()
    except EnvironmentLacks as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return Snapshot(exists=False)
        raise


def _opened(stack: contextlib.ExitStack, path: str, *, lock: bool = False) -> Folder | None:
    try:
        return stack.enter_context(Folder(path, lock=lock))
    except EnvironmentLacks as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return None
        raise


def _require_gone(conf_dir: str, after: Snapshot) -> None:
    """Refuse to take the binary from under an entry that cannot be edited."""
    for name, data in sorted(after.files.items()):
        if cni_config.is_configuration(name) and cni_config.mentions_us(data):
            raise EnvironmentLacks(
                f"{conf_dir}/{name} names {TYPE} in a place that cannot be edited; take it out "
                "by hand and run this again; nothing was changed"
            )


def _without_binary(conf_dir: str, error: AgentError) -> AgentError:
    with contextlib.ExitStack() as stack:
        conf = _opened(stack, conf_dir, lock=True)
        if conf is not None:
            return _withdrawn(conf, None, conf.snapshot(), error)
    return error


def _withdrawn(conf: Folder, bins: Folder | None, seen: Snapshot, error: AgentError) -> AgentError:
    """Take the entry out if its binary is missing; return what is to be said then."""
    todo = _plan_removal(seen)
    if (bins is not None and bins.runs(TYPE)) or not todo.edits:
        return error
    conf.apply(todo.edits, seen)
    conf.commit()
    return EnvironmentLacks(
        f"{str(error).removesuffix('; nothing was changed')}; without it no pod could start or "
        f"stop, so the entry was taken out of {conf.path}"
    )


def _base_missing(todo: Plan, bins: Folder) -> Iterator[str]:
    if todo.main_type is not None and not bins.has(todo.main_type):
        yield (
            f"{todo.main_type}, which {todo.file} starts with, is not in {bins.path}: if the "
            "runtime looks for plugins elsewhere, name that directory with --bin-dir, or no pod "
            "can start"
        )


def _said(edits: tuple[Edit, ...]) -> Iterator[str]:
    for edit in edits:
        if isinstance(edit, Write):
            yield f"wrote {edit.name}"
        elif isinstance(edit, Keep):
            yield f"kept {edit.name} as {edit.to}"
        elif isinstance(edit, Rename):
            yield f"renamed {edit.name} to {edit.to}"
        elif isinstance(edit, Remove):
            yield f"removed {edit.name}"
