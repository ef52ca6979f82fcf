"""Many proxies' metrics as one text: each family once, all its samples together.

What the proxies say is kept in a file and only an index of it in memory: with a hundred pods it is
tens of megabytes. A proxy counts when its text was read to the end; until then nothing of it does.
"""

import tempfile
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from agent.formats import exposition
from agent.formats.exposition import PLAIN, SUFFIXES, UNTYPED, Block

MAX_FAMILIES = 20_000  # of all proxies together
IN_MEMORY = 1 << 20
PIECE = 64 * 1024
STRIDE = 4  # offset, length, number of the proxy, samples


@dataclass(slots=True)
class _Family:
    help: str = ""
    votes: Counter[str] = field(default_factory=Counter)
    blocks: dict[str, "array[int]"] = field(default_factory=dict)

    def kind(self) -> str:
        """Return the type that most proxies declare; one that declares none has no say."""
        declared = [kind for kind in self.votes if kind != UNTYPED]
        return max(declared, key=self.votes.__getitem__, default=UNTYPED)


class Merge:
    """Collects the texts of proxies and gives them out as one. Close it."""

    def __init__(self) -> None:
        # In memory while it is small, so that a small node needs no disk.
        self._file = tempfile.SpooledTemporaryFile(max_size=IN_MEMORY)  # noqa: SIM115
        self._end = 0
        self._families: dict[str, _Family] = {}
        self._proxies = 0

    @property
    def size(self) -> int:
        """Return how many bytes were put aside."""
        return self._end

    def keep(self, text: str) -> tuple[int, int]:
        """Put text aside and return where it is."""
        data = text.encode()
        start = self._end
        self._file.seek(start)
        self._file.write(data)
        self._end += len(data)
        return start, len(data)

    def add(self, part: "Part") -> int:
        """Let a proxy count whose text was read to its end, and return its number.

        Raises: BadExposition if there would be too many families.
        """
        if len({name for name, _ in part.found} | self._families.keys()) > MAX_FAMILIES:
            raise exposition.BadExposition(f"all proxies have more than {MAX_FAMILIES} families")
        number, self._proxies = self._proxies, self._proxies + 1
        for (name, kind), (help_, places) in part.found.items():
            family = self._families.setdefault(name, _Family())
            family.help = family.help or help_
            family.votes[kind] += 1
            blocks = family.blocks.setdefault(kind, array("Q"))
            for start, size, samples in zip(*[iter(places)] * 3, strict=True):
                blocks.extend((start, size, number, samples))
        return number

    def settle(self) -> Counter[int]:
        """Give each sample name one family, and return how many samples that costs which proxy.

        Where proxies differ about a type, that of most of them holds. Samples of the others are
        kept if a family of that type can have them.
        """
        lost: Counter[int] = Counter()
        kinds = {name: family.kind() for name, family in self._families.items()}
        for name, family in self._families.items():
            kind = kinds[name]
            for other in [k for k in family.blocks if k != kind]:
                blocks = family.blocks.pop(other)
                if {kind, other} <= PLAIN:
                    family.blocks.setdefault(kind, array("Q")).extend(blocks)
                    continue
                for at in range(0, len(blocks), STRIDE):
                    lost[blocks[at + 2]] += blocks[at + 3]
        for name in [n for n, kind in kinds.items() if kind in PLAIN]:
            base, _, suffix = name.rpartition("_")
            kind = kinds.get(base, UNTYPED)
            if kind not in PLAIN and f"_{suffix}" in SUFFIXES[kind]:
                there = self._families[base].blocks.setdefault(kind, array("Q"))
                for blocks in self._families.pop(name).blocks.values():
                    there.extend(blocks)
        return lost

    def __iter__(self) -> Iterator[bytes]:
        """Yield the text, in pieces of some size; after `settle`."""
        piece = bytearray()
        for name, family in sorted(self._families.items()):
            kind = family.kind()
            blocks = family.blocks.get(kind, array("Q"))
            if blocks:
                piece += exposition.header(name, kind, family.help).encode()
            for at in range(0, len(blocks), STRIDE):
                self._file.seek(blocks[at])
                piece += self._file.read(blocks[at + 1])
                if len(piece) >= PIECE:
                    yield bytes(piece)
                    piece.clear()
        yield bytes(piece)

    def close(self) -> None:
        self._file.close()


class Part:
    """What was read of one proxy so far."""

    def __init__(self, merge: Merge) -> None:
        self._merge = merge
        self.found: dict[tuple[str, str], tuple[str, array[int]]] = {}

    def take(self, block: Block) -> None:
        key = (block.family, block.kind)
        _, places = self.found.setdefault(key, (block.help, array("Q")))
        if len(self.found) > exposition.MAX_NAMES:
            raise exposition.BadExposition(f"it has more than {exposition.MAX_NAMES} families")
        places.extend((*self._merge.keep(block.text), block.samples))
