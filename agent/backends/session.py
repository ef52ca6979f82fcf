"""One namespace while it is being worked on: its handle, its doors into the kernel, its lock."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from agent.kernel import locks, reaper
from agent.kernel.filters import FilterEye
from agent.kernel.netlink import NETLINK_ROUTE, NetlinkSocket
from agent.kernel.netns import Netns
from agent.kernel.nft import NftDoor, open_nft
from agent.kernel.sockets import SocketTable
from agent.model.errors import EnvironmentLacks


@dataclass
class Session:
    """Everything that is shared while one namespace is worked on.

    The sockets belong to the namespace that they were opened in, so entering it once is enough.
    """

    netns: Netns
    eye: FilterEye
    rtnl: NetlinkSocket
    sockets: SocketTable
    lock_fd: int | None = None
    _objects: list[dict[str, Any]] | None = None

    @classmethod
    def open(cls, netns: Netns, lock_fd: int | None = None) -> "Session":
        reaper.start()

        def open_all() -> tuple[FilterEye, NetlinkSocket, SocketTable]:
            netns.learn_cookie()
            return FilterEye(), NetlinkSocket(NETLINK_ROUTE), SocketTable()

        try:
            eye, rtnl, sockets = netns.run(open_all)
        except OSError as error:
            raise EnvironmentLacks(f"cannot look into {netns.path}: {error.strerror}") from error
        return cls(netns, eye, rtnl, sockets, lock_fd)

    @cached_property
    def nft(self) -> NftDoor | None:
        """The door to nf_tables, or None where the node has neither libnftables nor nft."""
        return open_nft(self.netns)

    def require_nft(self) -> NftDoor:
        if self.nft is None:
            raise EnvironmentLacks(
                "neither libnftables.so.1 nor nft is installed; install the package nftables"
            )
        return self.nft

    def nft_ruleset(self) -> list[dict[str, Any]]:
        """Return every object that nf_tables holds here, as libnftables' JSON has them.

        The answer is kept until `forget` is called.
        """
        if self._objects is None:
            self._objects = self.nft.list_ruleset() if self.nft else []
        return self._objects

    def forget(self) -> None:
        """Say that something was written, so that the next look is a fresh one."""
        self._objects = None
        if not self.eye.legacy.complete:  # the first write may have loaded the kernel's module
            self.netns.run(self.eye.legacy.find)

    def close(self) -> None:
        if "nft" in self.__dict__ and self.nft is not None:
            reaper.close_later(self.nft)
        self.sockets.close()
        reaper.close_later(self.eye)
        self.rtnl.close()


@contextlib.contextmanager
def reading(netns: Netns) -> Iterator[Session]:
    """Work in a namespace without changing it."""
    session = Session.open(netns)
    try:
        yield session
    finally:
        session.close()


@contextlib.contextmanager
def writing(netns: Netns) -> Iterator[Session]:
    """Work in a namespace under its lock.

    Raises: EnvironmentLacks if another run holds the lock for too long.
    """
    with locks.namespace_lock(netns) as lock_fd:
        session = Session.open(netns, lock_fd)
        try:
            yield session
        finally:
            session.close()
