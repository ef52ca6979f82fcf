"""The door to nf_tables: libnftables in this process, or the nft tool where it is missing."""

import json
from typing import Any, Protocol

from agent.kernel import libnftables, tools
from agent.kernel.netns import Netns
from agent.model.errors import EnvironmentLacks, KernelRejected, StateUnreadable


class NftDoor(Protocol):
    """Runs scripts, each as one transaction, in one namespace."""

    def run(self, script: str) -> None:
        """Run a script. Raises: KernelRejected; then nothing of it was applied."""

    def list_ruleset(self) -> list[dict[str, Any]]:
        """Return all objects. Raises: StateUnreadable."""

    def list_table(self, family: str, name: str) -> str:
        """Return a table as a script that makes it. Raises: StateUnreadable."""

    def close(self) -> None: ...


class LibraryDoor:
    """libnftables in this process; its context belongs to the namespace that it was made in."""

    def __init__(self, netns: Netns) -> None:
        self._nft = netns.run(libnftables.Nft)

    def run(self, script: str) -> None:
        self._nft.run(script)

    def list_ruleset(self) -> list[dict[str, Any]]:
        try:
            return _objects(self._nft.run("list ruleset", json=True))
        except KernelRejected as error:
            raise StateUnreadable(f"cannot list nf_tables: {error}") from error

    def list_table(self, family: str, name: str) -> str:
        try:
            return self._nft.run(f"list table {family} {name}")
        except KernelRejected as error:
            raise StateUnreadable(f"cannot list table {family} {name}: {error}") from error

    def close(self) -> None:
        self._nft.close()


class ToolDoor:
    """The nft tool, one process a call."""

    def __init__(self, netns: Netns, tool: str) -> None:
        self._netns = netns
        self._tool = tool

    def run(self, script: str) -> None:
        (done,) = tools.run(self._netns, [tools.Call((self._tool, "-f", "-"), script)])
        if done.status:
            raise KernelRejected(done.failure(), script=script)

    def list_ruleset(self) -> list[dict[str, Any]]:
        call = tools.Call((self._tool, "-j", "-n", "list", "ruleset"))
        (done,) = tools.run(self._netns, [call])
        if done.status:
            raise StateUnreadable(f"cannot list nf_tables: {done.failure()}")
        return _objects(done.stdout)

    def list_table(self, family: str, name: str) -> str:
        (done,) = tools.run(
            self._netns, [tools.Call((self._tool, "-n", "list", "table", family, name))]
        )
        if done.status:
            raise StateUnreadable(f"cannot list table {family} {name}: {done.failure()}")
        return done.stdout

    def close(self) -> None:
        return


def missing() -> str | None:
    """Return why this node has no door to nf_tables, or None if it has one."""
    try:
        libnftables.load()
    except EnvironmentLacks as error:
        return (
            None if tools.find("nft") else f"{error}, and nft is not installed (package nftables)"
        )
    return None


def open_nft(netns: Netns) -> NftDoor | None:
    """Return the best door that this node has, or None."""
    try:
        return LibraryDoor(netns)
    except EnvironmentLacks:
        tool = tools.find("nft")
        return ToolDoor(netns, tool) if tool else None


def _objects(text: str) -> list[dict[str, Any]]:
    try:
        document = json.loads(text) if text.strip() else {"nftables": []}
        return list(document["nftables"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise StateUnreadable(f"nft printed no JSON: {text[:200]!r}") from error
