"""YAML as a tree that knows where everything stands, whatever bytes come in.

It is read by the events of PyYAML's parser and never by its constructors, so that nothing in a
document costs more than its length: depth is bounded, an alias is the very node that it names, and
what aliases add up to is bounded, too. What plain scalars mean is left to the caller.

A file is cut at its `---` lines first, so that a mistake in one document hides no other.
"""

import bisect
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from agent.model.note import Place

MAX_DEPTH = 100
MAX_NODES = 1_000_000  # 4 MiB hold fewer; aliases count as what they stand for
MAX_DOCUMENTS = 10_000
MERGE = "<<"
CORE = "tag:yaml.org,2002:"
TEXT_TAGS = frozenset({"!", f"{CORE}str", f"{CORE}binary"})
TAGS = TEXT_TAGS | {CORE + name for name in ("bool", "float", "int", "map", "null", "seq")}


class YamlError(ValueError):
    """The text is not YAML, or is more than is read; `line` counts from 1."""

    def __init__(self, message: str, line: int) -> None:
        super().__init__(message)
        self.line = line


@dataclass(slots=True, eq=False)
class Node:
    """A part of a document and the line on which it begins, counted from 1."""

    line: int
    weight: int = 1
    depth: int = 1


@dataclass(slots=True, eq=False)
class Scalar(Node):
    """`plain` text has no quotes and no tag, so it may mean a number or something else."""

    text: str = ""
    plain: bool = False


@dataclass(slots=True, eq=False)
class Sequence(Node):
    """A list; `named`, once it is asked for, has the last item of each `name`."""

    items: list[Node] = field(default_factory=list)
    named: dict[str, int] | None = None


@dataclass(slots=True, eq=False)
class Entry:
    """A value of a mapping and the line of its key; `merged` from elsewhere by `<<`."""

    line: int
    value: Node
    merged: bool = False


@dataclass(slots=True, eq=False)
class Table(Node):
    """A mapping; `repeated` has each key that stood there before, with both lines."""

    entries: dict[str, Entry] = field(default_factory=dict)
    repeated: list[tuple[str, int, int]] = field(default_factory=list)


# --- documents -----------------------------------------------------------------------------------


def decoded(data: bytes) -> str:
    """Return the text of a file: UTF-8, or UTF-16 with a byte order mark, with Unix line ends.

    Raises: YamlError.
    """
    wide = data[:2] in (b"\xff\xfe", b"\xfe\xff")
    try:
        text = data.decode("utf-16" if wide else "utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise YamlError(f"not YAML: not text in {'UTF-16' if wide else 'UTF-8'}", line) from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


_CUT = re.compile(r"^---(?=[ \t\n]|\Z)", re.MULTILINE)
_NOTHING = re.compile(r"(?:---[ \t]*(?:#.*)?\n?)?(?:[ \t]*(?:#.*)?\n|%.*\n)*[ \t]*(?:#.*)?")


def pieces(text: str) -> Iterator[tuple[str, int]]:
    """Yield the text of each document that is not empty, and the number of lines before it.

    Raises: YamlError for more than MAX_DOCUMENTS.
    """
    starts = [found.start() for found in _CUT.finditer(text)]
    if starts and _NOTHING.fullmatch(text, 0, starts[0]):
        starts[0] = 0  # comments and directives in front of the first `---` belong to it
    line = found = 0
    for begin, end in pairwise(sorted({0, *starts, len(text)})):
        if not _NOTHING.fullmatch(text, begin, end):
            found += 1
            if found > MAX_DOCUMENTS:
                raise YamlError(f"more than {MAX_DOCUMENTS} documents", line + 1)
            before = line
            for one in _objects(text[begin:end]):
                yield one, before
                before += one.count("\n")
        line += text.count("\n", begin, end)


def _objects(text: str) -> Iterator[str]:
    """Yield the JSON objects of a text in which nothing but blanks stands between them.

    So do tools write several; to YAML it is one document that is broken. Other text stays whole.
    """
    found, start = [], 0
    while text[start:].lstrip().startswith("{"):
        blanks = len(text) - start - len(text[start:].lstrip())
        try:
            end = json.JSONDecoder().raw_decode(text, start + blanks)[1]
        except (ValueError, RecursionError):
            break
        found.append(text[start:end])
        start = end
    if found and not text[start:].strip():
        yield from found
    else:
        yield text


def read(text: str, lines_before: int = 0, *, tags: bool = True) -> Node | None:
    """Return the tree of one document, None if there is nothing in it.

    Tags that are not YAML's own mean nothing; without `tags` they are refused.

    Raises: YamlError.
    """
    import yaml  # 20 ms that most commands need not pay

    newlines = [found.start() for found in re.finditer("\n", text)]

    def line_at(index: int) -> int:
        # The parser takes other characters, too, for ends of lines; no editor does.
        return lines_before + bisect.bisect_left(newlines, index) + 1

    composer = _Composer(line_at, tags=tags)
    try:
        for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
            composer.take(event)
    except yaml.reader.ReaderError as error:
        raise YamlError(f"not YAML: {error.reason}", line_at(error.position)) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = line_at(mark.index) if mark else lines_before + 1
        raise YamlError(f"not YAML: {_said(error)}", line) from None
    return composer.root


def _said(error: Exception) -> str:
    problem = str(getattr(error, "problem", None) or str(error).partition("\n")[0])
    if "tab character" in problem or "cannot start any token" in problem:
        return f"{problem}; YAML is indented with blanks, not with tabs"
    return problem


class _Composer:
    """Makes the tree of one document out of the parser's events."""

    def __init__(self, line_at: Callable[[int], int], *, tags: bool) -> None:
        self.root: Node | None = None
        self._line_at = line_at
        self._tags = tags
        self._open: list[tuple[Table | Sequence, str]] = []  # and its anchor, once it is complete
        self._keys: list[tuple[str, int, bool] | None] = []  # in each open mapping, the waiting key
        self._anchors: dict[str, Node] = {}

    def take(self, event: Any) -> None:
        kind = type(event).__name__
        if kind.startswith(("Stream", "Document")):
            return
        line = self._line_at(event.start_mark.index)
        tag = getattr(event, "tag", None)
        if tag and not self._tags and tag not in TAGS:
            raise YamlError(f"not YAML: the tag {tag!r} has no meaning here", line)
        if kind == "AliasEvent":
            if event.anchor not in self._anchors:
                raise YamlError(f"*{event.anchor} names nothing that is complete here", line)
            self._put(self._anchors[event.anchor], line)
        elif kind == "ScalarEvent":
            plain = bool(event.implicit[0]) and tag not in TEXT_TAGS
            self._end(Scalar(line, text=event.value, plain=plain), event.anchor, line)
        elif kind in ("MappingEndEvent", "SequenceEndEvent"):
            node, anchor = self._open.pop()
            self._keys.pop()
            self._end(node, anchor, node.line)
        else:
            node = Table(line) if kind == "MappingStartEvent" else Sequence(line)
            self._open.append((node, event.anchor))
            self._keys.append(None)
            if len(self._open) > MAX_DEPTH:
                raise YamlError(f"nested more than {MAX_DEPTH} levels deep", line)

    def _end(self, node: Node, anchor: str | None, line: int) -> None:
        if anchor:
            self._anchors[anchor] = node
        self._put(node, line)

    def _put(self, node: Node, line: int) -> None:
        """Put a node where it belongs; `line` is that of an alias, if it is one."""
        if not self._open:
            if self.root is not None:
                raise YamlError("another document begins here without a line `---`", line)
            self.root = node
            return
        parent, key = self._open[-1][0], self._keys[-1]
        if isinstance(parent, Table) and key is None:
            if not isinstance(node, Scalar):
                raise YamlError("a mapping or list cannot be a key", line)
            self._keys[-1] = node.text, line, node.plain
            return
        if isinstance(parent, Sequence):
            parent.items.append(node)
        elif key is not None:
            self._keys[-1] = None
            _enter(parent, key, node)
        parent.weight += node.weight
        parent.depth = max(parent.depth, node.depth + 1)
        if parent.weight > MAX_NODES:
            raise YamlError(f"more than {MAX_NODES} values, aliases counted as what they are", line)
        if parent.depth > MAX_DEPTH:
            raise YamlError(f"nested more than {MAX_DEPTH} levels deep by aliases", line)


def _enter(parent: Table, key: tuple[str, int, bool], value: Node) -> None:
    name, line, plain_key = key
    if name == MERGE and plain_key:
        for source in value.items if isinstance(value, Sequence) else [value]:
            for inner, entry in source.entries.items() if isinstance(source, Table) else ():
                parent.entries.setdefault(inner, Entry(entry.line, entry.value, merged=True))
        return
    known = parent.entries.get(name)
    if known is not None and not known.merged:
        parent.repeated.append((name, line, known.line))
    parent.entries[name] = Entry(line, value)


# --- contents ------------------------------------------------------------------------------------


def plain(node: Node | None, meaning: Callable[[str], object]) -> Any:
    """Return the tree as plain values; `meaning` says what unquoted text stands for.

    Nodes that aliases share stay shared, so never print the whole of it.
    """
    made: dict[int, Any] = {}

    def value(found: Node) -> Any:
        if isinstance(found, Scalar):
            return meaning(found.text) if found.plain else found.text
        if id(found) not in made:
            if isinstance(found, Table):
                made[id(found)] = {k: value(entry.value) for k, entry in found.entries.items()}
            elif isinstance(found, Sequence):
                made[id(found)] = [value(item) for item in found.items]
        return made[id(found)]

    return None if node is None else value(node)


def tables(node: Node | None) -> Iterator[tuple[Place, Table]]:
    """Yield every mapping once, with its place."""
    seen: set[int] = set()
    todo: list[tuple[Place, Node]] = [] if node is None else [((), node)]
    while todo:
        place, found = todo.pop()
        if id(found) in seen:
            continue
        seen.add(id(found))
        if isinstance(found, Table):
            yield place, found
            todo += [((*place, key), entry.value) for key, entry in found.entries.items()]
        elif isinstance(found, Sequence):
            todo += [((*place, index), item) for index, item in enumerate(found.items)]


def located(root: Node, place: Place, *, key: bool = False) -> tuple[Place, int]:
    """Return a place as far as it is there, and its line.

    A word asked of a list means the last entry of that `name`. The line is that of a scalar's value
    and else that of the key; with `key` it is always the key's.
    """
    node, line = root, root.line
    found: list[str | int] = []
    for step in place:
        if isinstance(node, Table) and step in node.entries:
            line, node = node.entries[str(step)].line, node.entries[str(step)].value
        elif isinstance(node, Sequence) and (at := _index(node, step)) is not None:
            node, step = node.items[at], at
            line = node.line
        else:
            break
        found.append(step)
    whole = len(found) == len(place)
    return tuple(found), node.line if isinstance(node, Scalar) and whole and not key else line


def _index(node: Sequence, step: str | int) -> int | None:
    if isinstance(step, int):
        return step if step < len(node.items) else None
    if node.named is None:
        node.named = {}
        for at, item in enumerate(node.items):
            entry = item.entries.get("name") if isinstance(item, Table) else None
            if entry is not None and isinstance(entry.value, Scalar):
                node.named[entry.value.text] = at
    return node.named.get(step)
