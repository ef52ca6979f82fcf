"""The name servers that a pod uses: those of the resolv.conf that its processes see."""

import contextlib
import ipaddress
from pathlib import Path

from agent.kernel import files
from agent.kernel.netns import NetnsId, id_at
from agent.model.errors import EnvironmentLacks

RESOLV_CONF = Path("/etc/resolv.conf")
BELOW_ROOT = RESOLV_CONF.relative_to("/")
MAX_BYTES = 1 << 20


def servers(target: str, netns: NetnsId) -> tuple[str, ...]:
    """Return the name servers of the namespace that a user named as `target`.

    They are on the `nameserver` lines of the file that ip-netns(8) keeps for a named namespace;
    else of that of a process in it, whatever it has there; else of ours, which is the pod's own
    where the command runs inside the pod. Entries that are no addresses are skipped.

    Raises: EnvironmentLacks if the file cannot be read.
    """
    if target == "self":
        return own_servers()
    named = Path("/etc/netns") / Path(target).name / "resolv.conf"
    if named.exists():
        return _of_file(named)
    for entry in Path("/proc").glob("[0-9]*"):
        if id_at(entry / "ns/net") == netns:
            with contextlib.suppress(OSError):
                return _addresses(files.read(BELOW_ROOT, MAX_BYTES, root=entry / "root"))
    return own_servers()


def own_servers() -> tuple[str, ...]:
    """Return the name servers of this process. Raises: EnvironmentLacks."""
    return _of_file(RESOLV_CONF)


def _of_file(path: Path) -> tuple[str, ...]:
    try:
        return _addresses(files.read(path, MAX_BYTES))
    except OSError as error:
        raise EnvironmentLacks(
            f"cannot read name servers from {path}: {error.strerror}; give them by --dns-servers"
        ) from error


def _addresses(data: bytes) -> tuple[str, ...]:
    found = []
    for line in data.decode(errors="replace").splitlines():
        words = line.split()
        if len(words) > 1 and words[0] == "nameserver":
            with contextlib.suppress(ValueError):
                if "%" not in words[1]:
                    found.append(str(ipaddress.ip_address(words[1])))
    return tuple(found)
