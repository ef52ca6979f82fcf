"""Namespaces named in the configuration: they come, go and come back as others."""

import asyncio
import secrets
import subprocess
import time
from pathlib import Path

from agent.node.config import StaticPod
from agent.node.source import Gone, Snapshot
from agent.node.static_source import StaticSource, identity_of
from tests.support.netns import PREFIX, namespace, path_of, run
from tests.support.pods_seen import seen_by


def entry(netns: str, **settings: object) -> StaticPod:
    return StaticPod(name="box", netns=netns, settings=settings)


def test_namespace_is_a_pod_with_the_settings_of_its_entry(netns: str) -> None:
    async def main() -> None:
        source = StaticSource([entry(netns, redirect_dns=True)], interval_s=0.05)
        async with seen_by(source) as seen:
            await seen.until(lambda: seen.names() == {"box"})
            pod = seen.named("box")
            assert (pod.namespace, pod.uid, pod.netns) == ("static", "", str(path_of(netns)))
            assert pod.settings == {"redirect_dns": True}
            assert pod.ready
            await asyncio.sleep(0.3)
            assert len(seen.updates) == 1
            assert source.connected
            assert source.detail == "1 of 1 namespaces are there"

    asyncio.run(main())


def test_path_that_appears_later_is_seen_and_one_that_goes_is_gone() -> None:
    name = f"{PREFIX}late-{secrets.token_hex(3)}"

    async def main() -> None:
        source = StaticSource([entry(f"/run/netns/{name}")], interval_s=0.05)
        async with seen_by(source) as seen:
            await seen.until(lambda: seen.snapshots == 1)
            assert seen.updates == [Snapshot(source="static", pods=())]
            await asyncio.sleep(0)
            assert "there is no network namespace at" in source.detail
            run("ip", "netns", "add", name)
            await seen.until(lambda: seen.names() == {"box"})
            run("ip", "netns", "del", name)
            await seen.until(lambda: seen.names() == set())
            assert isinstance(seen.updates[-1], Gone)

    try:
        asyncio.run(main())
    finally:
        run("ip", "netns", "del", name, check=False)


def test_namespace_that_is_made_anew_is_another_one(netns: str) -> None:
    """Even where the kernel gives it the inode number of the one before, as it mostly does."""
    path = path_of(netns)
    seen = set()
    for _ in range(10):
        seen.add(identity_of(str(path)))
        run("ip", "netns", "del", netns)
        time.sleep(0.05)  # the number is free again only when the namespace was taken apart
        run("ip", "netns", "add", netns)
    assert len(seen) == 10


def test_identity_stays_while_nothing_happens(netns: str) -> None:
    """Under /proc the inode is made anew at each look while nobody holds it."""
    assert len({identity_of(str(path_of(netns))) for _ in range(20)}) == 1
    with subprocess.Popen(["unshare", "--net", "sleep", "60"]) as process:
        try:
            time.sleep(0.3)
            identities = set()
            for _ in range(4):
                identities.add(identity_of(f"/proc/{process.pid}/ns/net"))
                time.sleep(0.05)
            assert len(identities) == 1
        finally:
            process.kill()


def test_what_is_no_network_namespace_is_not_there(tmp_path: Path) -> None:
    plain = tmp_path / "file"
    plain.touch()
    with namespace() as name:
        assert identity_of(str(path_of(name)))
    assert not any(map(identity_of, (str(plain), "/proc/self/ns/mnt", str(path_of(name)))))
