"""An agent of layout 1: its programs, made from today's sources, and how it wrote its entries."""

import contextlib
import runpy
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agent.backends import ebpf_node
from agent.formats import bpf_capture
from agent.kernel import bpf_pins
from agent.model import enrolment
from agent.model.enrolment import MAX_SPANS, Site
from agent.model.settings import Settings
from tests.support.ebpf import BUILD

LAYOUT = 1
HEAD_BYTES = 12 + 2 * 12  # flags and ports, and two ranges of ids
SPANS = struct.Struct(f"={1 + 2 * MAX_SPANS}I")
PORTS_BYTES = 65536 // 8
OWN_BYTES = 4 + 32 * 16

OWN = "\t__u32 own_count;\n\tstruct address own[32];\n"

# In which file what stood where something else stands now.
CHANGES = (
    ("capture.h", "\tstruct ports inbound_ports;\n", ""),
    ("capture.h", "spans outbound_ports_exclude", "spans inbound_ports, outbound_ports_exclude"),
    ("capture.h", "struct place places[MAX_PLACES];\n", f"struct place places[MAX_PLACES];\n{OWN}"),
    ("capture.h", "_Static_assert(", "_Static_assert(1 || "),
    ("inbound.bpf.c", "is_listed(&c->inbound_ports, port)", "any_span(&c->inbound_ports, port)"),
    ("inbound.bpf.c", "inline_always int is_listed", "__attribute__((unused)) int is_listed"),
)
CONNECTIONS = ("capture.h", "\t__u32 turned_to;", "\t__u32 turned_to, unused;")


def build_older(folder: Path, *, connections_alike: bool) -> Path:
    """Build its programs and return where they are.

    What they remember connections by has today's shape, or another, so that it cannot be shared.
    """
    shutil.copytree(BUILD.parent, folder / "bpf")
    objects = folder / "agent" / "kernel" / "objects"
    objects.mkdir(parents=True)
    for name, now, then in CHANGES if connections_alike else (*CHANGES, CONNECTIONS):
        path = folder / "bpf" / name
        text = path.read_text()
        assert now in text, f"{name} does not say {now!r} any more"
        path.write_text(text.replace(now, then))
    runpy.run_path(str(folder / "bpf" / BUILD.name))["build"]()
    return objects


def _encoder(encode: Callable[[Settings, Site], bytes]) -> Callable[[Settings, Site], bytes]:
    def then(settings: Settings, site: Site) -> bytes:
        entry = encode(settings, site)
        inbound = settings.inbound_ports_include
        spans = settings.inbound_ports_exclude if inbound.everything else inbound.items
        words = [word for span in spans for word in (span.first, span.last)]
        packed = SPANS.pack(len(spans), *words, *([0] * (2 * MAX_SPANS - len(words))))
        start = HEAD_BYTES + 3 * SPANS.size
        end = start + 2 * SPANS.size
        rest = entry[end + PORTS_BYTES :]
        return entry[:start] + packed + entry[start:end] + rest + bytes(OWN_BYTES)

    return then


@contextlib.contextmanager
def older_agent(objects: Path) -> Iterator[None]:
    """Let this process be such an agent, with these programs."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (enrolment, ebpf_node, bpf_pins):
            patch.setattr(module, "LAYOUT", LAYOUT)
        patch.setattr(bpf_pins, "OBJECTS", objects)
        patch.setattr(bpf_pins, "build", lambda: b"older" * 4)
        patch.setattr(bpf_capture, "encode", _encoder(bpf_capture.encode))
        yield
