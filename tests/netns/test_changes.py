"""News of changes in a namespace: what the kernel tells of, and that listening keeps nothing."""

import os
import select
from collections.abc import Iterator

import pytest

from agent.kernel.changes import Changes
from agent.kernel.netns import Netns
from tests.support.netns import inside, namespace, run


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ours, theirs = os.pipe2(os.O_NONBLOCK)
    yield ours, theirs
    for end in (ours, theirs):
        os.close(end)


def told(end: int, wait_s: float = 10.0) -> bool:
    """Wait for news and take what there is of it."""
    if not select.select([end], [], [], wait_s)[0]:
        return False
    os.read(end, 4096)
    return True


@pytest.mark.parametrize(
    "command",
    [
        ("nft", "add", "table", "inet", "t"),
        ("iptables-nft", "-t", "nat", "-A", "OUTPUT", "-j", "ACCEPT"),
        ("ip6tables-nft", "-t", "mangle", "-N", "X"),
        ("iptables-legacy", "-t", "nat", "-A", "OUTPUT", "-j", "ACCEPT"),
        ("ip6tables-legacy", "-t", "mangle", "-N", "X"),
        ("ip", "rule", "add", "fwmark", "7", "table", "9"),
        ("ip", "-6", "rule", "add", "fwmark", "7", "table", "9"),
        ("ip", "route", "add", "local", "default", "dev", "lo", "table", "9"),
        ("ip", "-6", "route", "add", "local", "default", "dev", "lo", "table", "9"),
    ],
    ids=" ".join,
)
def test_change_is_told(netns: str, pipe: tuple[int, int], command: tuple[str, ...]) -> None:
    ours, theirs = pipe
    with Netns.open(f"/run/netns/{netns}") as target:
        Changes().watch(target, theirs)
    inside(netns, *command)
    assert told(ours)


def test_looking_and_changes_elsewhere_are_no_news(netns: str, pipe: tuple[int, int]) -> None:
    ours, theirs = pipe
    with namespace() as other, Netns.open(f"/run/netns/{netns}") as target:
        Changes().watch(target, theirs)
        inside(netns, "nft", "list", "ruleset")
        inside(netns, "iptables-legacy-save")
        inside(other, "nft", "add", "table", "inet", "t")
        assert not told(ours, 0.3)


def test_listener_that_ends_lets_the_namespace_go(netns: str) -> None:
    ours, theirs = os.pipe2(os.O_NONBLOCK)
    with namespace("gone") as name:
        inside(netns, "ip", "link", "add", "here", "type", "veth", "peer", "there", "netns", name)
        with Netns.open(f"/run/netns/{name}") as target:
            Changes().watch(target, theirs)
        os.close(theirs)
        run("ip", "netns", "del", name)
        assert "here" in inside(netns, "ip", "-br", "link")  # a watch keeps its namespace
        os.close(ours)
        # The kernel takes the pair away when it destroys the namespace of one of them.
        for _ in range(100):
            if "here" not in inside(netns, "ip", "-br", "link"):
                return
            select.select([], [], [], 0.1)
    pytest.fail("the namespace is still there")
