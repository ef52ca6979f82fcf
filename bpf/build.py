"""Compiles the programs into the package: `python3 bpf/build.py`. Takes clang and nothing else.

They are the same for every machine of one byte order, so they are built once, with the wheel, and
not on the node. Without clang the package has none, and the other backends work all the same.
"""

import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
OBJECTS = HERE.parent / "agent" / "kernel" / "objects"
FLAGS = (
    *("-O2", "-g", "-target", "bpf", "-mcpu=v2", "-fdebug-compilation-dir=."),
    *("-Wall", "-Wextra", "-Werror", "-Wno-unused-variable", "-Wno-sign-compare"),
)


def compiler() -> str | None:
    """Return clang, also where Debian installs only a versioned one."""
    names = ("clang", *(f"clang-{version}" for version in range(30, 10, -1)))
    return next((found for name in names if (found := shutil.which(name))), None)


def build() -> tuple[Path, ...]:
    """Compile what is older than its sources; return the objects.

    Raises: FileNotFoundError without clang, subprocess.CalledProcessError if it complains.
    """
    headers = [path.stat().st_mtime for path in (*HERE.glob("*.h"), Path(__file__))]
    objects = []
    for source in sorted(HERE.glob("*.bpf.c")):
        target = OBJECTS / f"{source.stem}.o"
        objects.append(target)
        newest = max(source.stat().st_mtime, *headers)
        if target.exists() and target.stat().st_mtime > newest:
            continue
        clang = compiler()
        if clang is None:
            raise FileNotFoundError("clang is not installed")
        OBJECTS.mkdir(exist_ok=True)
        subprocess.run((clang, *FLAGS, "-c", source.name, "-o", str(target)), check=True, cwd=HERE)
    return tuple(objects)


if __name__ == "__main__":
    try:
        print(*build(), sep="\n")
    except FileNotFoundError as error:
        sys.exit(f"{error}; install it (Debian: apt-get install clang)")
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)
