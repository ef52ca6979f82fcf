"""eBPF in the tests: the programs built from this checkout, and pins of their own."""

import contextlib
import functools
import runpy
import subprocess
from collections.abc import Iterator
from pathlib import Path

BUILD = Path(__file__).parents[2] / "bpf" / "build.py"


@functools.cache
def built() -> None:
    """Compile the programs if they are older than their sources. Takes clang."""
    runpy.run_path(str(BUILD))["build"]()


@contextlib.contextmanager
def own_pins(folder: Path) -> Iterator[Path]:
    """Yield a folder for pins; a bpffs that was mounted there goes, with all that is pinned."""
    try:
        yield folder
    finally:
        while folder.is_mount():
            subprocess.run(("umount", str(folder)), check=True)
