"""Which ids the user namespace of a network namespace has, and which they are on the node."""

import fcntl
import os
import subprocess

from agent.kernel import tools
from agent.model.enrolment import NODE_IDS, IdRange
from agent.model.errors import EnvironmentLacks

NS_GET_USERNS = 0xB701  # linux/nsfs.h
TIMEOUT_S = 10.0


def owned_by_others(netns_fd: int) -> bool:
    """Tell whether a network namespace belongs to another user namespace than this process is in.

    That is the node's, but for an init container of a pod that has one, and nodes that are in one.

    Raises: EnvironmentLacks if that cannot be told.
    """
    fd = _user_namespace(netns_fd)
    try:
        return _is_others(fd)
    finally:
        os.close(fd)


def user_ids(netns_fd: int) -> tuple[IdRange, IdRange]:
    """Return the ranges of users and groups; those of the node itself where it has no other.

    A process has to enter the user namespace to see its map, which takes about 10 ms.

    Raises: EnvironmentLacks if that cannot be, or the map is not of one piece.
    """
    fd = _user_namespace(netns_fd)
    try:
        if not _is_others(fd):
            return NODE_IDS, NODE_IDS
        users, groups = _maps(fd)
    finally:
        os.close(fd)
    return _range(users), _range(groups)


def _user_namespace(netns_fd: int) -> int:
    try:
        return fcntl.ioctl(netns_fd, NS_GET_USERNS)
    except OSError as error:
        raise EnvironmentLacks(
            f"cannot tell whose user namespace it is: {error.strerror}; run this as root"
        ) from error


def _is_others(fd: int) -> bool:
    return not os.path.samestat(os.fstat(fd), os.stat("/proc/self/ns/user"))


def _maps(fd: int) -> tuple[str, str]:
    nsenter = tools.require("nsenter", "util-linux")
    command = (nsenter, f"--user=/proc/self/fd/{fd}", "--preserve-credentials", "--", "cat")
    found = []
    for name in ("uid_map", "gid_map"):
        done = subprocess.run(
            (*command, f"/proc/self/{name}"),
            pass_fds=(fd,),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        if done.returncode:
            raise EnvironmentLacks(f"cannot see the ids of its user namespace: {done.stderr}")
        found.append(done.stdout)
    return found[0], found[1]


def _range(text: str) -> IdRange:
    lines = text.splitlines()
    if len(lines) != 1:
        raise EnvironmentLacks(
            f"its user namespace maps ids in {len(lines)} pieces; the eBPF programs know one"
        )
    inside, outside, count = map(int, lines[0].split())
    return IdRange(inside, outside, count)
