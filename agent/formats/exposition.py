"""The text format of metrics: read as it comes in, each sample under the labels of its pod.

Format 0.0.4, and of OpenMetrics what a proxy may send although it was not asked for. A text with
one line that is neither is refused as a whole, as Prometheus does.
Source: prometheus.io/docs/instrumenting/exposition_formats and the OpenMetrics specification.
"""

import codecs
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

UNTYPED = "untyped"
# What may follow a family's name in the names of its samples.
SUFFIXES: Mapping[str, tuple[str, ...]] = {
    "counter": ("",),
    "gauge": ("",),
    UNTYPED: ("",),
    "summary": ("", "_sum", "_count"),
    "histogram": ("_bucket", "_sum", "_count"),
}
PLAIN = frozenset(kind for kind, suffixes in SUFFIXES.items() if suffixes == ("",))

# Possessive throughout: what a proxy sends must not be able to make the match slow.
GAP = r"[ \t]*+"
NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*+"
LABEL_NAME = r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*+"  # those with two in front are Prometheus' own
LABEL_VALUE = r'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
LABEL = rf"{GAP}{LABEL_NAME}{GAP}={GAP}{LABEL_VALUE}{GAP}"
VALUE = r"[+-]?(?:(?:[0-9]++(?:\.[0-9]*+)?|\.[0-9]++)(?:[eE][+-]?[0-9]++)?|(?i:infinity|inf|nan))"
SAMPLE = re.compile(
    rf"({NAME})(?:{GAP}\{{((?:{LABEL}(?:,{LABEL})*+,?+)?+){GAP}\}}{GAP}|[ \t]++)({VALUE})"
    r"(?:[ \t]++(-?[0-9]++(?:\.[0-9]*+)?+))?(?:[ \t]++#.*+)?"
)
ONE_LABEL = re.compile(rf"({LABEL_NAME}){GAP}={GAP}({LABEL_VALUE})")
COMMENT = re.compile(rf"#{GAP}(HELP|TYPE)[ \t]++({NAME})(?:[ \t]++(.*+))?")
EOF = re.compile(rf"#{GAP}EOF")

MAX_NAMES = 10_000  # of one proxy; Envoy has some hundred
MAX_NAME = 256
MAX_TEXT = 1000  # of a help or of labels, to be kept in memory
MAX_LINE = 1 << 18
BLOCK = 64 * 1024
SHOWN = 60
MAX_REMEMBERED = 500


class BadExposition(ValueError):
    """The text is no exposition of metrics."""


@dataclass(frozen=True, slots=True)
class Block:
    """Consecutive samples of one family; more of the same family may follow in other blocks."""

    family: str
    kind: str
    help: str
    text: str
    samples: int


class Reader:
    """Reads one text piece by piece and hands on blocks of samples that bear the given labels.

    A label of the same name that a sample has already is kept as `exported_...`, as Prometheus
    does. Samples of families whose name starts with `reserved` are left out and counted.
    """

    def __init__(
        self, labels: Mapping[str, str], take: Callable[[Block], None], *, reserved: str
    ) -> None:
        self._given = tuple(labels)
        self._prefix = ",".join(f'{name}="{escape(value)}"' for name, value in labels.items())
        self._take = take
        self._reserved = reserved
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._rest = ""
        self._ended = False
        self._kinds: dict[str, str] = {}
        self._helps: dict[str, str] = {}
        self._homes: dict[str, tuple[str, str]] = {}
        self._home = ("", UNTYPED)
        # Families have the same sets of labels over and over again.
        self._labelled: dict[str | None, str] = {}
        self._lines: list[str] = []
        self._size = 0
        self.dropped = 0

    def feed(self, data: bytes, *, last: bool = False) -> None:
        """Read a piece. Raises: BadExposition."""
        try:
            text = self._rest + self._decoder.decode(data, last)
        except UnicodeDecodeError as error:
            raise BadExposition("it is not UTF-8") from error
        *lines, self._rest = text.split("\n")
        if len(self._rest) > MAX_LINE:
            raise BadExposition("a line does not end")
        for line in lines:
            self._line(line)
        if last:
            self._line(self._rest)
            self._flush()

    def end(self) -> None:
        """Read what is left. Raises: BadExposition."""
        self.feed(b"", last=True)

    def _line(self, line: str) -> None:
        line = line.strip(" \t")
        if not line:
            return
        if self._ended:
            raise BadExposition("something follows its end")
        if line[0] == "#":
            self._comment(line)
            return
        found = SAMPLE.fullmatch(line)
        if found is None:
            raise BadExposition(f"this is no sample: {line[:SHOWN]!r}")
        name, labels, value, timestamp = found.groups()
        home = self._homes.get(name) or self._find_home(name)
        if home[0].startswith(self._reserved):
            self.dropped += 1
            return
        if home != self._home or self._size > BLOCK:
            self._flush()
            self._home = home
        # A fraction is OpenMetrics' seconds, which are milliseconds here; both are rarely there.
        when = f" {timestamp}" if timestamp and "." not in timestamp else ""
        ours = self._labelled.get(labels) or self._labels(labels)
        sample = f"{name}{{{ours}}} {value}{when}\n"
        self._lines.append(sample)
        self._size += len(sample)

    def _labels(self, text: str | None) -> str:
        """Return a sample's labels and ours. Raises: BadExposition if one is there twice."""
        ours = self._prefixed(text) if text else self._prefix
        if len(self._labelled) < MAX_REMEMBERED and len(ours) < MAX_TEXT:
            self._labelled[text] = ours
        return ours

    def _prefixed(self, text: str) -> str:
        pairs = ONE_LABEL.findall(text)
        names = {name for name, _ in pairs}
        if len(names) != len(pairs):
            raise BadExposition(f"a label is there twice: {text[:SHOWN]!r}")
        if not names.isdisjoint(self._given):
            pairs = [(self._exported(name, names), value) for name, value in pairs]
        return ",".join([self._prefix, *(f"{name}={value}" for name, value in pairs)])

    def _exported(self, name: str, taken: set[str]) -> str:
        if name not in self._given:
            return name
        while name in taken or name in self._given:
            name = f"exported_{name}"
        return name

    def _comment(self, line: str) -> None:
        if EOF.fullmatch(line):
            self._ended = True
        found = COMMENT.fullmatch(line)
        if found is None:
            return
        what, name, rest = found.groups()
        if what == "TYPE" and name not in self._kinds:
            kind = (rest or "").strip(" \t").lower()
            self._kinds[name] = kind if kind in SUFFIXES else UNTYPED
            self._homes.clear()
        elif what == "HELP" and rest and len(rest) < MAX_TEXT:
            self._helps.setdefault(name, rest)
        self._check(name)

    def _check(self, name: str) -> None:
        """Raises: BadExposition for what would take too much memory."""
        if len(name) > MAX_NAME:
            raise BadExposition(f"a name is longer than {MAX_NAME} characters")
        if max(len(self._kinds), len(self._helps), len(self._homes)) > MAX_NAMES:
            raise BadExposition(f"it has more than {MAX_NAMES} names")

    def _find_home(self, sample: str) -> tuple[str, str]:
        """Return the family that a sample belongs to and that family's type."""
        home = self._homes[sample] = self._declared(sample) or (sample, UNTYPED)
        self._check(sample)
        return home

    def _declared(self, sample: str) -> tuple[str, str] | None:
        kind = self._kinds.get(sample)
        if kind is not None and "" in SUFFIXES[kind]:
            return sample, kind
        base, _, suffix = sample.rpartition("_")
        kind = self._kinds.get(base, UNTYPED)
        if f"_{suffix}" in SUFFIXES[kind]:
            return base, kind
        if kind == "counter" and suffix == "total":  # OpenMetrics names the family without it
            self._helps.setdefault(sample, self._helps.get(base, ""))
            return sample, kind
        return None

    def _flush(self) -> None:
        if self._lines:
            family, kind = self._home
            text = "".join(self._lines)
            help_ = self._helps.get(family, "")
            self._take(Block(family, kind, help_, text, len(self._lines)))
        self._lines, self._size = [], 0


def escape(value: str) -> str:
    """Return a label value as it stands between its quotes."""
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def header(family: str, kind: str, help_: str) -> str:
    """Return the lines that stand once before a family's samples."""
    told = f"# HELP {family} {help_}\n" if help_ else ""
    return f"{told}# TYPE {family} {kind}\n"
