"""The name servers that a pod uses: those of the resolv.conf that its processes see."""

import contextlib
import ipaddress
from pathlib import Path

from agent.kernel.netns import NetnsId, id_at
from agent.model.errors import EnvironmentLacks

RESOLV_CONF = Path("/etc/resolv.conf")


def path_for(target: str, netns: NetnsId) -> Path:
    """Return the resolv.conf of the namespace that a user named as `target`.

    That of a process in it; else the one that ip-netns(8) keeps for a named namespace; else ours,
    which is the pod's own where the command runs inside the pod.
    """
    if target == "self":
        return RESOLV_CONF
    named = Path("/etc/netns") / Path(target).name / "resolv.conf"
    if named.exists():
        return named
    for entry in Path("/proc").glob("[0-9]*"):
        if id_at(entry / "ns/net") == netns:
            found = entry / "root/etc/resolv.conf"
            if found.exists():
                return found
    return RESOLV_CONF


def servers(path: Path) -> tuple[str, ...]:
    """Return the addresses on `nameserver` lines; entries that are none are skipped.

    Raises: EnvironmentLacks if the file cannot be read.
    """
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError as error:
        raise EnvironmentLacks(
            f"cannot read name servers from {path}: {error.strerror}; give them by --dns-servers"
        ) from error
    found = []
    for line in lines:
        words = line.split()
        if len(words) > 1 and words[0] == "nameserver":
            with contextlib.suppress(ValueError):
                if "%" not in words[1]:
                    found.append(str(ipaddress.ip_address(words[1])))
    return tuple(found)
