"""One program out of an object file, linked by hand.

libbpf links whole objects, in a process of its own. The program that each namespace gets is one
section without calls, and all that is missing in it are the descriptors of maps and one number; to
put these in takes less time than to start that process, and no library.
"""

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_RELOCATION = struct.Struct("<QQ")
_INSTRUCTION = struct.Struct("<BBhi")
_IMMEDIATE = struct.Struct("<I")

SHT_REL = 9
R_BPF_64_64 = 1
LOAD_64 = 0x18  # BPF_LD | BPF_DW | BPF_IMM, which is two instructions long
PSEUDO_MAP_FD = 1


@dataclass(frozen=True, slots=True)
class MapFd:
    """A map that the program uses, by an open descriptor."""

    fd: int


@dataclass(frozen=True, slots=True)
class Number:
    """What takes the place of the address of a symbol."""

    value: int


@dataclass(frozen=True, slots=True)
class _Section:
    name: str
    kind: int
    data: bytes
    link: int
    info: int


def link(elf: bytes, section: str, symbols: Mapping[str, MapFd | Number]) -> bytes:
    """Return the instructions of a section with every symbol replaced by what it stands for.

    Raises: ValueError if the object is not what it should be, or uses another symbol.
    """
    instructions, uses = _unlinked(elf, section)
    code = bytearray(instructions)
    for at, name in uses:
        if name not in symbols:
            raise ValueError(f"section {section} uses {name or 'something'} unknown here")
        _put(code, at, symbols[name])
    return bytes(code)


@cache
def _unlinked(elf: bytes, section: str) -> tuple[bytes, tuple[tuple[int, str], ...]]:
    """Return the instructions of a section, and where in them which symbol is used."""
    sections = list(_sections(elf))
    index = next((i for i, found in enumerate(sections) if found.name == section), None)
    if index is None:
        raise ValueError(f"the object has no section {section}")
    uses = []
    for found in sections:
        if found.kind == SHT_REL and found.info == index:
            table = sections[found.link]
            names = sections[table.link].data
            for at, info in _RELOCATION.iter_unpack(found.data):
                start, *_ = _SYMBOL.unpack_from(table.data, (info >> 32) * _SYMBOL.size)
                known = info & 0xFFFFFFFF == R_BPF_64_64
                uses.append((at, _text(names, start) if known else ""))
    return sections[index].data, tuple(uses)


def _sections(elf: bytes) -> Iterator[_Section]:
    if elf[:6] != b"\x7fELF\x02\x01":
        raise ValueError("the object is not a little-endian ELF file of 64 bits")
    header = _HEADER.unpack_from(elf)
    start, size, count, names_index = header[6], header[11], header[12], header[13]
    raw = [_SECTION.unpack_from(elf, start + i * size) for i in range(count)]
    names = elf[raw[names_index][4] : raw[names_index][4] + raw[names_index][5]]
    for name, kind, _, _, offset, length, link_to, info, _, _ in raw:
        data = elf[offset : offset + length]
        yield _Section(_text(names, name), kind, data, link_to, info)


def _text(names: bytes, start: int) -> str:
    return names[start : names.index(b"\0", start)].decode()


def _put(code: bytearray, at: int, value: MapFd | Number) -> None:
    operation, registers, _, _ = _INSTRUCTION.unpack_from(code, at)
    if operation != LOAD_64:
        raise ValueError("a symbol is used other than by loading it")
    low, high = (value.fd, 0) if isinstance(value, MapFd) else divmod(value.value, 1 << 32)[::-1]
    if isinstance(value, MapFd):
        code[at + 1] = (registers & 0x0F) | PSEUDO_MAP_FD << 4
    _IMMEDIATE.pack_into(code, at + 4, low)
    _IMMEDIATE.pack_into(code, at + 12, high)
