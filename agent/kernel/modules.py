"""Whether the kernel can answer a question without loading a module for it."""

import os
from functools import lru_cache
from pathlib import Path

LOADED = Path("/proc/modules")
SYSFS = Path("/sys/module")
BUILTIN = Path("/lib/modules")


def present(name: str) -> bool:
    """Tell whether asking for what the module does would load nothing.

    It is loaded or built in, or the kernel cannot load modules at all. Where that is not known it
    counts as absent: a module that is not loaded holds no state worth reading.
    """
    if not LOADED.exists():
        return True
    return (SYSFS / name).is_dir() or name in _builtin() or name in _loaded()


def _loaded() -> frozenset[str]:
    return frozenset(line.split(" ", 1)[0] for line in LOADED.read_text().splitlines())


@lru_cache(maxsize=1)
def _builtin() -> frozenset[str]:
    """Return what modules.builtin lists; /sys/module has built-in modules with parameters only."""
    try:
        listed = (BUILTIN / os.uname().release / "modules.builtin").read_text()
    except OSError:
        return frozenset()
    return frozenset(Path(line).stem.replace("-", "_") for line in listed.splitlines())
