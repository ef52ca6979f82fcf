"""CNI configuration files: read as a runtime reads them, and edited as text.

Goals, and how each is met:
 1. *A file without our entry comes back byte for byte.* Our entry is put in and cut out of the
    text; nothing else is written anew. So order of keys, blanks, numbers and even bytes that are
    not UTF-8 stay.
 2. *The whole entry counts.* `differences` compares body, place and number, because an entry of
    the right type with a broken body captures nothing (field report 4).
 3. *A list always has a plugin that makes the network.* Nothing here returns one without.
 4. *cniVersion is never raised*: other plugins of the list may not speak a newer one. A list of
    a version that intercept-cni does not speak is refused, for then no pod could start.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from agent.model.errors import InvalidSettings

TYPE = "intercept-cni"
EXTENSIONS = (".conf", ".conflist", ".json")
LIST_EXTENSION = ".conflist"
ANNOTATIONS = "io.kubernetes.cri.pod-annotations"
POLICIES = ("closed", "open")
DEFAULT_SOCKET = "/run/intercept-agent/agent.sock"
MAX_SOCKET_BYTES = 107  # sun_path, less the zero at its end
MAX_BYTES = 2 * 1024 * 1024  # containerd reads no larger file

# Far below Python's own limit, so that nothing done with a document later can reach that.
MAX_DEPTH = 100

# What the plugin speaks; a test holds the two together. The lists of Azure's CNI, of Weave Net and
# of kube-router are of 0.3.0, whose results differ in nothing from those of 0.3.1.
VERSIONS = ("0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0")

# Plugins that only change what an earlier one made: a list of nothing else makes no network.
CHAINED_ONLY = frozenset(
    {
        *("bandwidth", "firewall", "portmap", "sbr", "tuning", "vrf"),
        *("consul-cni", "istio-cni", "kuma-cni", "linkerd-cni"),
    }
)

_BLANK = re.compile(r"[ \t\n\r]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Our entry as it should be.

    Raises: InvalidSettings for values with which no pod could start.
    """

    socket: str = DEFAULT_SOCKET
    failure_policy: str = "closed"

    def __post_init__(self) -> None:
        problems = []
        if not self.socket.startswith("/") or len(self.socket.encode()) > MAX_SOCKET_BYTES:
            problems.append(
                f"socket {self.socket!r} is not an absolute path of at most "
                f"{MAX_SOCKET_BYTES} bytes"
            )
        if self.failure_policy not in POLICIES:
            problems.append(f"failurePolicy {self.failure_policy!r} is neither closed nor open")
        if problems:
            raise InvalidSettings(tuple(problems))

    def body(self) -> dict[str, object]:
        return {
            "type": TYPE,
            "socket": self.socket,
            "failurePolicy": self.failure_policy,
            "capabilities": {ANNOTATIONS: True},
        }


@dataclass(frozen=True, slots=True)
class Configuration:
    """One valid file. `plugins` of a `.conf` is the file's one plugin, which is the document."""

    name: str
    text: str
    document: Mapping[str, Any]

    @property
    def is_list(self) -> bool:
        return self.name.endswith(LIST_EXTENSION)

    @property
    def plugins(self) -> tuple[Mapping[str, Any], ...]:
        return tuple(self.document["plugins"]) if self.is_list else (self.document,)

    @property
    def others(self) -> tuple[Mapping[str, Any], ...]:
        return tuple(plugin for plugin in self.plugins if plugin["type"] != TYPE)

    @property
    def has_ours(self) -> bool:
        return len(self.others) < len(self.plugins)

    @property
    def main_type(self) -> str | None:
        """The type of the plugin that makes the network, if there is one."""
        found = (p["type"] for p in self.others if p["type"] not in CHAINED_ONLY)
        return next(found, None)


def is_configuration(name: str) -> bool:
    """Tell whether a runtime looks into a file of this name; hidden files count too."""
    return name.endswith(EXTENSIONS)


def parse(name: str, data: bytes) -> Configuration:
    """Read one file; its extension says whether it is a list, as it does for runtimes.

    Raises: InvalidSettings, with one sentence that names the file.
    """
    if len(data) > MAX_BYTES:
        raise _bad(name, f"is larger than {MAX_BYTES} bytes")
    if not data.strip():
        raise _bad(name, "is empty")
    text = data.decode("utf-8", "surrogateescape")
    try:
        document = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        said = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise _bad(name, f"is not JSON: {said}") from error
    if not isinstance(document, dict):
        raise _bad(name, "is not a JSON object")
    if _deeper_than(document, MAX_DEPTH):
        raise _bad(name, "is not JSON: nested too deeply")
    found = Configuration(name, text, document)
    _require_plugins(found)
    return found


def to_bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def differences(found: Configuration, entry: Entry) -> tuple[str, ...]:
    """Return in words what keeps a file from holding our entry once, last and whole."""
    plugins = found.plugins
    places = [at for at, plugin in enumerate(plugins) if plugin["type"] == TYPE]
    if not found.is_list or not places:
        return ("entry is missing",)
    words = []
    if len(places) > 1:
        words.append(f"entry is there {'twice' if len(places) == 2 else f'{len(places)} times'}")
    behind = [plugin["type"] for plugin in plugins[places[-1] + 1 :]]
    if behind:
        base = " the base plugin" if places[-1] == 0 else ""
        words.append(f"entry stands before{base} {', '.join(behind)}")
    words += _body_differences(plugins[places[-1]], entry.body())
    return tuple(words)


def insert(found: Configuration, entry: Entry) -> str:
    """Return the text of the list in which our entry stands once, last and whole.

    A `.conf` becomes a list of the same name and version with its text inside, unchanged: the
    name must stay, because address leases and results are kept under it.

    Raises: InvalidSettings if nothing else in it makes a network, or if intercept-cni does not
    speak its version.
    """
    if found.main_type is None:
        others = ", ".join(p["type"] for p in found.others) or f"only {TYPE}"
        raise _bad(found.name, f"has no plugin that makes the network: {others}")
    _require_version(found)
    if not found.is_list:
        return _list_of(found, entry)
    if not differences(found, entry):
        return found.text
    return _append(without(found), entry)


def without(found: Configuration) -> str:
    """Return the text of a list without our entry: what was there before it was inserted.

    Raises: InvalidSettings if nothing would be left of the list.
    """
    if not found.others or not found.is_list:
        raise _bad(found.name, f"has no plugin but {TYPE}")
    text = found.text
    spans = _plugin_spans(text)
    ours = [at for at, plugin in enumerate(found.plugins) if plugin["type"] == TYPE]
    for at in reversed(ours):
        # Back to the end of the one before, or on to the next where there is none before.
        start = spans[at - 1][1] if at else spans[0][0]
        end = spans[at][1] if at else spans[1][0]
        text = text[:start] + text[end:]
        spans = _plugin_spans(text)
    return text


def is_list_of(found: Configuration, single: Configuration) -> bool:
    """Tell whether a list holds, but for our entry, what a `.conf` holds and nothing else."""
    return (
        found.is_list
        and _canonical(list(found.others)) == _canonical([single.document])
        and all(found.document.get(k) == single.document.get(k) for k in ("name", "cniVersion"))
    )


def is_text_of(found: Configuration, single: Configuration) -> bool:
    """Tell whether a list is, to the letter, what `insert` makes of a `.conf` with some entry."""
    if not found.has_ours or not is_list_of(found, single):
        return False
    made = Configuration(found.name, _list_of(single, Entry()), found.document)
    return without(made) == without(found)


def mentions_us(data: bytes) -> bool:
    """Tell whether a file names the plugin anywhere, be it in a form that cannot be edited."""
    return f'"{TYPE}"'.encode() in data


# --- reading -------------------------------------------------------------------------------------


def _bad(name: str, what: str) -> InvalidSettings:
    return InvalidSettings((f"{name} {what}",))


def _refuse_constant(word: str) -> object:
    raise ValueError(f"{word} is not a JSON value")


def _deeper_than(value: object, depth: int) -> bool:
    level = [value]
    for _ in range(depth):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
    return bool(level)


def _require_plugins(found: Configuration) -> None:
    document = found.document
    if not isinstance(document.get("name"), str) or not document["name"]:
        raise _bad(found.name, "has no name")
    plugins: object = document.get("plugins") if found.is_list else [document]
    if not isinstance(plugins, list) or not plugins:
        raise _bad(found.name, "has no plugins")
    for plugin in plugins:
        if not isinstance(plugin, dict) or not isinstance(plugin.get("type"), str):
            hint = "; it looks like a .conflist" if "plugins" in document else ""
            raise _bad(found.name, f"has a plugin without a type{'' if found.is_list else hint}")
        if not plugin["type"]:
            raise _bad(found.name, "has a plugin with an empty type")


def _require_version(found: Configuration) -> None:
    """Refuse a list whose calls intercept-cni would answer with "incompatible version"."""
    listed = found.document.get("cniVersions")
    versions = [found.document.get("cniVersion", "0.1.0")]
    versions += listed if isinstance(listed, list) else []
    # A runtime that knows `cniVersions` takes the newest of them that it speaks itself.
    used = max(versions, key=_version_key)
    if used not in VERSIONS:
        raise _bad(
            found.name,
            f"has cniVersion {used}, and {TYPE} speaks {VERSIONS[0]} to {VERSIONS[-1]}; its entry "
            "would keep every pod from starting",
        )


def _version_key(version: object) -> tuple[int, ...]:
    parts = str(version).split(".")
    return tuple(int(p) if p.isascii() and p.isdigit() else 0 for p in parts[:3])


def _body_differences(have: Mapping[str, Any], want: Mapping[str, object]) -> Iterator[str]:
    for key in dict.fromkeys((*want, *have)):
        if key not in have:
            yield f"body differs: {key} is missing"
        elif key not in want:
            yield f"body differs: {key} does not belong there"
        elif _canonical(have[key]) != _canonical(want[key]):
            yield f"body differs: {key} {_canonical(have[key])} instead of {_canonical(want[key])}"


def _canonical(value: object) -> str:
    """One text for equal JSON values: in Python 1 == True == 1.0, in JSON they differ."""
    return json.dumps(value, sort_keys=True)


# --- editing -------------------------------------------------------------------------------------


def _plugin_spans(text: str) -> list[tuple[int, int]]:
    """Return where each element of `plugins` begins and ends in the text of a valid list."""
    decoder = json.JSONDecoder()
    # Of a key that stands there twice the last one counts, for runtimes as for `json`.
    array = [start for key, start in _members(text, decoder) if key == "plugins"][-1]
    spans = []
    at = _skip(text, array + 1)
    while text[at] != "]":
        end = decoder.raw_decode(text, at)[1]
        spans.append((at, end))
        at = _skip(text, end)
        if text[at] == ",":
            at = _skip(text, at + 1)
    return spans


def _members(text: str, decoder: json.JSONDecoder) -> Iterator[tuple[str, int]]:
    """Yield each key of the outermost object and where its value begins."""
    at = _skip(text, _skip(text, 0) + 1)
    while text[at] != "}":
        key, at = decoder.raw_decode(text, at)
        at = _skip(text, _skip(text, at) + 1)
        yield key, at
        at = _skip(text, decoder.raw_decode(text, at)[1])
        if text[at] == ",":
            at = _skip(text, at + 1)


def _skip(text: str, at: int) -> int:
    found = _BLANK.match(text, at)
    return found.end() if found else at


def _append(text: str, entry: Entry) -> str:
    """Put our entry behind the last plugin, in the layout of the list."""
    spans = _plugin_spans(text)
    first, end = spans[0][0], spans[-1][1]
    lead = re.search(r"[ \t\n\r]*\Z", text[:first])
    blank = lead.group() if lead else ""
    if "\n" not in blank:
        return f"{text[:end]}, {json.dumps(entry.body())}{text[end:]}"
    indent = blank[blank.rindex("\n") + 1 :]
    # A plugin stands two levels deep in the layout of every tool that we know.
    unit = indent[: len(indent) // 2] or "  "
    body = json.dumps(entry.body(), indent=unit).split("\n")
    newline = "\r\n" if "\r\n" in blank else "\n"
    return f"{text[:end]},{blank}{(newline + indent).join(body)}{text[end:]}"


def _list_of(found: Configuration, entry: Entry) -> str:
    """Wrap a `.conf`. Raw newlines never stand inside a JSON string, so lines can be moved in."""
    inner = found.text.strip(" \t\r\n").replace("\n", "\n    ")
    ours = json.dumps(entry.body(), indent=2).replace("\n", "\n    ")
    head = "".join(
        f"  {json.dumps(key)}: {json.dumps(found.document[key])},\n"
        for key in ("cniVersion", "name", "cniVersions")
        if key in found.document
    )
    return f'{{\n{head}  "plugins": [\n    {inner},\n    {ours}\n  ]\n}}\n'
