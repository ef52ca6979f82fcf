"""What to do with a directory of CNI configurations: pure decisions about a snapshot of it.

`plan` says how our entry gets into the file that the runtime reads, `plan_removal` how every trace
of us gets out. Both are level-triggered: from whatever a killed run or another program left they
lead to the same end, and from that end they lead nowhere.

A `.conf` cannot hold two plugins, so `10-x.conf` becomes `10-x.conflist`. The new file is written
first, while the `.conf` still comes before it by name; then the `.conf` is renamed to a name that
no runtime reads. There is no moment without a configuration, and the original is kept as it is.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from agent.formats import cni_config
from agent.formats.cni_config import Configuration, Entry
from agent.model.errors import InvalidSettings

KEPT_SUFFIX = ".intercept-agent-original"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The configurations of a directory and the originals that we keep there, by name.

    `unreadable` has a sentence for each that cannot be read. `exists` is false if there is no
    such directory.
    """

    files: Mapping[str, bytes] = field(default_factory=dict)
    links: frozenset[str] = frozenset()
    unreadable: Mapping[str, str] = field(default_factory=dict)
    exists: bool = True


@dataclass(frozen=True, slots=True)
class Write:
    """Replace or create a file at once; mode and owner are those of `like`."""

    name: str
    data: bytes
    like: str


@dataclass(frozen=True, slots=True)
class Keep:
    """Give a file, or a symbolic link itself, a second name."""

    name: str
    to: str


@dataclass(frozen=True, slots=True)
class Rename:
    name: str
    to: str


@dataclass(frozen=True, slots=True)
class Remove:
    name: str


Edit = Write | Keep | Rename | Remove


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a snapshot asks for.

    `present`: our entry is as it should be in `file`, the one that the runtime reads. If not,
    `reason` says why, and `edits`, if there are any, put it right. `skipped` are invalid files
    that come before `file`; `main_type` is the plugin that makes the network.
    """

    present: bool = False
    reason: str = ""
    file: str | None = None
    edits: tuple[Edit, ...] = ()
    skipped: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    main_type: str | None = None


def plan(snapshot: Snapshot, entry: Entry, *, pinned: str | None = None) -> Plan:
    """Return how our entry gets into the active file, or into the pinned one or its twin."""
    if not snapshot.exists:
        return Plan(reason="the directory does not exist")
    found, skipped = _target(snapshot, pinned)
    if found is None:
        return Plan(reason=_why_none(skipped, pinned), skipped=skipped)
    warnings = tuple(_warnings(snapshot, found, skipped))
    words = cni_config.differences(found, entry)
    if not words:
        return Plan(
            present=True,
            file=found.name,
            skipped=skipped,
            warnings=warnings,
            main_type=found.main_type,
        )
    try:
        edits = _edits_for(snapshot, found, entry)
    except InvalidSettings as error:
        return Plan(reason=str(error), file=found.name, skipped=skipped, warnings=warnings)
    return Plan(
        reason=f"{found.name}: {'; '.join(words)}",
        file=list_name(found.name),
        edits=edits,
        skipped=skipped,
        warnings=warnings,
        main_type=found.main_type,
    )


def plan_removal(snapshot: Snapshot) -> Plan:
    """Return how our entry gets out of every file, and kept originals back to their places."""
    edits: list[Edit] = []
    warnings: list[str] = []
    for found in _valid(snapshot):
        if found.has_ours:
            edits += _taken_out(snapshot, found)
    touched = {name for edit in edits for name in _names(edit)}
    for kept in sorted(name for name in snapshot.files if name.endswith(KEPT_SUFFIX)):
        if kept in touched:
            continue
        original = kept.removesuffix(KEPT_SUFFIX)
        if snapshot.files.get(original) == snapshot.files[kept]:
            edits.append(Remove(kept))
        else:
            warnings.append(
                f"{original} was changed by others after it was replaced; its original stays in "
                f"{kept}"
            )
    return Plan(present=not edits, edits=tuple(edits), warnings=tuple(warnings))


def outcome(snapshot: Snapshot, edits: tuple[Edit, ...]) -> Snapshot:
    """Return what a directory holds once the edits are made."""
    files, links = dict(snapshot.files), set(snapshot.links)
    for edit in edits:
        if isinstance(edit, Write):
            files[edit.name] = edit.data
            links.discard(edit.name)
        elif isinstance(edit, Remove):
            files.pop(edit.name, None)
            links.discard(edit.name)
        else:
            files[edit.to] = files[edit.name]
            links = links - {edit.to} | ({edit.to} if edit.name in links else set())
            if isinstance(edit, Rename):
                del files[edit.name]
                links.discard(edit.name)
    return replace(snapshot, files=files, links=frozenset(links))


def list_name(name: str) -> str:
    """Return the name of the list that a file is or becomes."""
    for extension in cni_config.EXTENSIONS:
        if name.endswith(extension):
            return name.removesuffix(extension) + cni_config.LIST_EXTENSION
    return name


# --- which file ----------------------------------------------------------------------------------


def _target(snapshot: Snapshot, pinned: str | None) -> tuple[Configuration | None, tuple[str, ...]]:
    """Return the file to edit, and a sentence for every invalid one that comes before it."""
    skipped: list[str] = []
    for name in sorted({*snapshot.files, *snapshot.unreadable}):
        if not cni_config.is_configuration(name) or not _meant(name, pinned):
            continue
        try:
            return _origin(snapshot, _parse(snapshot, name)), tuple(skipped)
        except InvalidSettings as error:
            skipped.append(str(error))
    return None, tuple(skipped)


def _origin(snapshot: Snapshot, found: Configuration) -> Configuration:
    """Return the `.json` that a list was made of, if it is there (again), else the list.

    Unlike a `.conf` it comes after its list by name, so what is written there anew would be
    hidden for ever.
    """
    name = _single_behind(snapshot, found)
    single = _parsed(snapshot, name) if name and name.endswith(".json") else None
    return single or found


def _meant(name: str, pinned: str | None) -> bool:
    # `.conf` comes before `.conflist`, so the twin that is still to be turned is found first.
    return pinned is None or list_name(name) == list_name(pinned)


def _parse(snapshot: Snapshot, name: str) -> Configuration:
    if name in snapshot.unreadable:
        raise InvalidSettings((f"{name} cannot be read: {snapshot.unreadable[name]}",))
    return cni_config.parse(name, snapshot.files[name])


def _valid(snapshot: Snapshot) -> Iterator[Configuration]:
    for name in sorted(snapshot.files):
        if cni_config.is_configuration(name):
            found = _parsed(snapshot, name)
            if found is not None:
                yield found


def _parsed(snapshot: Snapshot, name: str) -> Configuration | None:
    """Return a file, or a kept original under its own name, if it is there and valid."""
    if name not in snapshot.files:
        return None
    try:
        return cni_config.parse(name.removesuffix(KEPT_SUFFIX), snapshot.files[name])
    except InvalidSettings:
        return None


def _why_none(skipped: tuple[str, ...], pinned: str | None) -> str:
    if skipped:
        return "no valid CNI configuration: " + "; ".join(skipped)
    if pinned is not None:
        return f"there is no {pinned} yet"
    return "there is no CNI configuration yet; the base CNI has to write one first"


def _warnings(snapshot: Snapshot, found: Configuration, skipped: tuple[str, ...]) -> Iterator[str]:
    for sentence in skipped:
        yield f"{sentence}; containerd reads nothing behind it, so no pod may start"
    first = next(iter(_valid(snapshot)), found)
    if list_name(first.name) != list_name(found.name):
        yield f"the runtime reads {first.name} before {found.name}, so pods bypass our entry"


# --- putting in ----------------------------------------------------------------------------------


def _edits_for(snapshot: Snapshot, found: Configuration, entry: Entry) -> tuple[Edit, ...]:
    data = cni_config.to_bytes(cni_config.insert(found, entry))
    target = list_name(found.name)
    if found.is_list:
        edits: list[Edit] = [Write(target, data, found.name)]
        if found.name in snapshot.links:
            # An edit behind a link is not noticed by containerd, so the link itself is replaced.
            edits.insert(0, Keep(target, target + KEPT_SUFFIX))
        return tuple(edits)
    edits = [*_foreign_list_kept(snapshot, found, target)]
    if snapshot.files.get(target) != data:
        edits.append(Write(target, data, found.name))
    edits.append(Rename(found.name, found.name + KEPT_SUFFIX))
    return tuple(edits)


def _foreign_list_kept(snapshot: Snapshot, single: Configuration, target: str) -> Iterator[Edit]:
    """Keep a list of others that stands where the list of a `.conf` has to go."""
    there = _parsed(snapshot, target)
    if target not in snapshot.files or (there and _made_by_us(snapshot, there, single)):
        return
    data = snapshot.files[target]
    if there and there.has_ours and there.others:
        data = cni_config.to_bytes(cni_config.without(there))
    kept = target + KEPT_SUFFIX
    if snapshot.files.get(kept) != data:
        yield Write(kept, data, target)


def _made_by_us(snapshot: Snapshot, there: Configuration, single: Configuration) -> bool:
    if not there.has_ours:
        return False
    # With a kept original the list is surely ours, however others laid it out since. Without one
    # only our own layout tells it from a list of others that says the same.
    kept = _parsed(snapshot, single.name + KEPT_SUFFIX)
    return cni_config.is_text_of(there, single) or (
        kept is not None and cni_config.is_list_of(there, kept)
    )


# --- taking out ----------------------------------------------------------------------------------


def _taken_out(snapshot: Snapshot, found: Configuration) -> Iterator[Edit]:
    if not found.others:
        yield Remove(found.name)  # it made no network before, and its binary is about to go
        return
    if not found.is_list:
        return
    kept_list = found.name + KEPT_SUFFIX
    single = _single_behind(snapshot, found)
    if single is None:
        data = cni_config.to_bytes(cni_config.without(found))
        if snapshot.files.get(kept_list) == data:
            yield Rename(kept_list, found.name)
        else:
            yield Write(found.name, data, found.name)
        return
    if single not in snapshot.files:
        yield Rename(single + KEPT_SUFFIX, single)
    elif single + KEPT_SUFFIX in snapshot.files:
        yield Remove(single + KEPT_SUFFIX)
    yield Rename(kept_list, found.name) if kept_list in snapshot.files else Remove(found.name)


def _single_behind(snapshot: Snapshot, found: Configuration) -> str | None:
    """Return the name of the `.conf` that a list was made of and that is still what it holds.

    Of two that say the same it is the one that a runtime reads first, as when it was made.
    """
    if not found.is_list:
        return None
    stem = found.name.removesuffix(cni_config.LIST_EXTENSION)
    for extension in cni_config.EXTENSIONS:
        name = stem + extension
        here, kept = _parsed(snapshot, name), _parsed(snapshot, name + KEPT_SUFFIX)
        if name == found.name:
            continue
        if here and cni_config.is_text_of(found, here):
            return name
        if kept and cni_config.is_list_of(found, kept):
            return name
    return None


def _names(edit: Edit) -> tuple[str, ...]:
    return (edit.name, edit.to) if isinstance(edit, Keep | Rename) else (edit.name,)
