"""An installed agent as it is in /opt/intercept-agent of a host or an image, made of this checkout.

The folders of this environment may be hidden there, so it is an environment of its own, to which
what it needs is mounted.
"""

import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

WHERE = Path("/opt/intercept-agent")
CHECKOUT, PACKAGES, PYTHON = "/opt/checkout", "/opt/packages", "/opt/python"
# A Python that was built here may find its library by a path that is hidden there.
LIBRARIES = f"LD_LIBRARY_PATH={PYTHON}/lib"
VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
OWN = sys.base_prefix != "/usr"  # or that of the distribution, which is there

MOUNTS: Mapping[str, Path] = {
    CHECKOUT: Path(__file__).parents[2],
    PACKAGES: Path(sysconfig.get_path("purelib")),
    **({PYTHON: Path(sys.base_prefix)} if OWN else {}),
}


def write(root: Path) -> None:
    """Write the environment to where it is installed below `root`."""
    where = root / WHERE.relative_to("/")
    python = Path(PYTHON) / "bin" if OWN else Path("/usr/bin")
    packages = where / "lib" / f"python{VERSION}" / "site-packages"
    packages.mkdir(parents=True)
    (packages / "it.pth").write_text(f"{CHECKOUT}\n{PACKAGES}\n")
    (where / "pyvenv.cfg").write_text(f"home = {python}\n")
    (where / "bin").mkdir()
    (where / "bin" / "python").symlink_to(python / "python3")
    command = where / "bin" / "intercept-agent"
    command.write_text(f'#!/bin/sh\nexec {WHERE}/bin/python -P -m agent.cli.main "$@"\n')
    command.chmod(0o755)
