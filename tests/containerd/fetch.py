"""Fetches another version's containerd from Debian's later suites and prints where it is.

    python -m tests.containerd.fetch 1.7 build/containerd

apt verifies what it fetches by the archive's signature, so no checksum is kept here. The machine's
own packages and lists of packages stay as they are: only a folder is written. What was fetched once
is not fetched again.
"""

import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

SUITES = ("trixie", "testing", "unstable")
BINARY = Path("usr/bin/containerd")


class Absent(Exception):
    """There is no such version where we look; the message says what there is."""


def fetch(version: str, folder: Path) -> Path:
    """Return the binary of a version such as `1.7`, with its shims beside it. Raises: Absent."""
    there = folder / version
    if (there / BINARY).exists():
        return there / BINARY
    offered = _offered(folder)
    exact = next((one for one in offered if re.match(rf"{re.escape(version)}[.~+]", one)), None)
    if exact is None:
        raise Absent(
            f"Debian has containerd {', '.join(offered) or 'nowhere'}, but no {version}; name the "
            "binary of any other in IT_CONTAINERD and run pytest on tests/containerd"
        )
    for left in (*folder.glob("containerd_*.deb"), folder / "unpacked"):  # by an interrupted one
        shutil.rmtree(left) if left.is_dir() else left.unlink(missing_ok=True)
    _apt(folder, "apt-get", "download", f"containerd={exact}")
    (package,) = folder.glob("containerd_*.deb")
    # Another name until it is whole, so that what was interrupted is not taken for it.
    subprocess.run(("dpkg", "-x", package, folder / "unpacked"), check=True)
    package.unlink()
    (folder / "unpacked").rename(there)
    return there / BINARY


def _offered(folder: Path) -> list[str]:
    """Return the versions that the suites have, for this machine's kind of processor."""
    (folder / "lists/partial").mkdir(parents=True, exist_ok=True)
    mirror = _mirror()
    text = "".join(f"deb {mirror} {suite} main\n" for suite in SUITES)
    (folder / "sources.list").write_text(text)
    _apt(folder, "apt-get", "update")
    rows = _apt(folder, "apt-cache", "madison", "containerd").splitlines()
    found = [row.split("|")[1].strip() for row in rows if row.rstrip().endswith("Packages")]
    return list(dict.fromkeys(found))


def _mirror() -> str:
    """Return the mirror of Debian that this machine uses already."""
    listed = subprocess.run(
        ("apt-get", "indextargets", "--format", "$(REPO_URI)"),
        capture_output=True,
        text=True,
        check=True,
    )
    uris = [line for line in listed.stdout.splitlines() if line.endswith("/debian/")]
    if not uris:
        raise Absent(f"this machine's apt names no mirror of Debian ({platform.platform()})")
    return uris[0]


def _apt(folder: Path, *command: str) -> str:
    here = folder.resolve()
    options = {
        "Dir::Etc::sourcelist": here / "sources.list",
        "Dir::Etc::sourceparts": "-",
        "Dir::State::lists": here / "lists",
        "Dir::Cache::pkgcache": "",
        "Dir::Cache::srcpkgcache": "",
        "APT::Sandbox::User": "root",
    }
    words = [word for key, value in options.items() for word in ("-o", f"{key}={value}")]
    name, *rest = command
    done = subprocess.run(
        (name, "-qq", *words, *rest), cwd=here, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise Absent(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


if __name__ == "__main__":
    try:
        print(fetch(sys.argv[1], Path(sys.argv[2])))
    except Absent as error:
        sys.exit(f"error: {error}")
