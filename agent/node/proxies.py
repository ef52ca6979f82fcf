"""The way from the front to the proxies of pods, whose namespaces only the worker can enter.

The worker opens a connection to one of the proxy's ports, the front speaks HTTP on it. It comes
through a socketpair that the front makes for it and of which it sends one end along.
"""

import contextlib
import os
import socket
from collections.abc import AsyncIterator, Collection

from agent.model.errors import AgentError
from agent.node.reconciler import Jobs


class Proxies:
    """What can be asked of a pod's proxy, by the path of the pod's namespace."""

    def __init__(self, jobs: Jobs) -> None:
        self._jobs = jobs

    async def listening(self, path: str, ports: Collection[int]) -> frozenset[int]:
        """Return those of the ports that somebody in the namespace listens on.

        Raises: AgentError if the namespace is gone or the worker cannot tell.
        """
        async with opened(path) as fd:
            done = await self._jobs.job("listening", fd, name=path, ports=list(ports))
        found = done["ports"]
        return frozenset(found if isinstance(found, (list, tuple)) else ())

    async def connect(self, path: str, port: int) -> socket.socket:
        """Return a non-blocking socket that is being connected to a port of the proxy.

        Raises: AgentError if nobody listens there, the namespace is gone or the worker cannot.
        """
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:
            raise AgentError(f"no connection can be had: {error.strerror}") from error
        with ours, theirs:
            async with opened(path) as fd:
                await self._jobs.job("connect", fd, theirs.fileno(), name=path, port=port)
            flags = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
            _, fds, _, _ = socket.recv_fds(ours, 1, 1, flags)
        if not fds:
            raise AgentError("this process can hold no more files open")
        made = socket.socket(fileno=fds[0])
        made.setblocking(False)
        return made


@contextlib.asynccontextmanager
async def opened(path: str) -> AsyncIterator[int]:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise AgentError(f"the namespace {path} cannot be opened: {error.strerror}") from error
    try:
        yield fd
    finally:
        os.close(fd)
