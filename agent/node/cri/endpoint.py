"""Where the runtime's socket is, and whether somebody listens on it."""

import errno
import os
import socket
import struct
from pathlib import Path

from agent.model.errors import InvalidSettings

# Those that only a Kubernetes node has come first: a plain containerd may be there for docker or
# for builds only. Kubernetes distributions put their own containerd elsewhere.
USUAL = (
    "/run/crio/crio.sock",
    "/run/k3s/containerd/containerd.sock",
    "/run/k0s/containerd.sock",
    "/var/snap/microk8s/common/run/containerd.sock",
    "/run/cri-dockerd.sock",
    "/run/containerd/containerd.sock",
)
PEER = struct.Struct("3i")  # struct ucred: process, user, group
MAX_PATH_BYTES = 107  # sun_path of struct sockaddr_un, with its final NUL


def candidates(configured: str | None) -> tuple[str, ...]:
    """Return the socket paths to try, in order: the configured one, or the usual ones.

    Where /var/run is not a link to /run, as in a container that mounts only one of them, the usual
    ones are looked for in both.

    Raises: InvalidSettings if the configured one is not the path of a Unix socket.
    """
    if configured is not None:
        return (parse(configured),)
    if Path("/var/run").resolve() == Path("/run").resolve():
        return USUAL
    twice = ((path, f"/var{path}") if path.startswith("/run/") else (path,) for path in USUAL)
    return tuple(path for paths in twice for path in paths)


def parse(text: str) -> str:
    """Return the path in `unix:///path`, `unix:/path` or `/path`.

    Raises: InvalidSettings.
    """
    path = text.removeprefix("unix://") if text.startswith("unix://") else text
    path = path.removeprefix("unix:")
    if not path.startswith("/") or "\0" in path:
        problem = f"cri.endpoint: {text!r} is not unix:// and the absolute path of a socket"
        raise InvalidSettings((problem,))
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        problem = f"cri.endpoint: {path} is longer than the {MAX_PATH_BYTES} bytes of a socket path"
        raise InvalidSettings((problem,))
    return path


def listener(path: str) -> int:
    """Return the process that listens at a socket; 0 if it cannot be seen from here, or is none."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(path)
            peer = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size)
        except OSError:
            return 0
    pid, _, _ = PEER.unpack(peer)
    return int(pid)


def unreachable(path: str) -> str | None:
    """Return why nobody can be reached at a socket, or None if somebody listens.

    A look costs microseconds where gRPC's first try at a socket that is not there yet backs off
    for a second. Connecting to a Unix socket never waits when it is not to.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(path)
        except BlockingIOError:
            return None  # somebody listens and is too busy to accept
        except OSError as error:
            known = {
                errno.ENOENT: "there is no such socket",
                errno.ECONNREFUSED: "nobody listens there",
            }
            return known.get(error.errno or 0, os.strerror(error.errno or 0))
    return None
