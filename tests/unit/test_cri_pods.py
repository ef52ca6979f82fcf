"""CriSource: what is said of pods when runtimes differ, stumble, restart and leave things out."""

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from agent.node.cri import pods, source
from agent.node.cri.client import CriClient
from agent.node.cri.details import Sandbox
from agent.node.cri.source import CriSource
from agent.node.source import Changed, Gone, PodKey, Snapshot
from tests.fakes.fake_cri import FakeCri, FakeSandbox, changed, serving
from tests.support.pods_seen import seen_by

LIVE = "/proc/self/ns/net"  # any path that is a namespace
WEB = FakeSandbox(id="s1", netns=LIVE)
KEY = PodKey("shop", "web", "u1")


@pytest.fixture
def path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="it-cri-") as folder:
        yield Path(folder, "cri.sock")


def made(path: Path, *, timeout_s: float = 5.0, interval_s: float = 0.3) -> CriSource:
    return CriSource(CriClient(str(path), timeout_s=timeout_s), interval_s=interval_s)


# --- choosing -------------------------------------------------------------------------------------


def sandbox(identity: str, **fields: object) -> Sandbox:
    about: dict[str, object] = {
        "id": identity,
        "namespace": "shop",
        "name": "web",
        "uid": "u1",
        "attempt": 0,
        "ready": True,
        "created_at_ns": 1,
        "netns_path": f"/run/netns/{identity}",
        "detailed": True,
    }
    return Sandbox(**{**about, **fields})  # type: ignore[arg-type]


def chosen(*sandboxes: Sandbox, alive: bool = True) -> str | None:
    found = pods.view(sandboxes, lambda path: alive).pods
    return found[KEY].sandbox_id if found else None


def test_newest_ready_sandbox_of_a_pod_wins() -> None:
    old, new = sandbox("old", created_at_ns=1), sandbox("new", attempt=1, created_at_ns=2)
    assert chosen(new, old) == chosen(old, new) == "new"
    newer = sandbox("newer", attempt=2, created_at_ns=3, ready=False)
    assert chosen(old, newer, new) == "new"


def test_sandbox_that_is_not_ready_counts_while_its_namespace_lives() -> None:
    ended = sandbox("ended", ready=False)
    assert chosen(ended) == "ended"
    assert chosen(ended, alive=False) is None
    assert chosen(sandbox("closed", ready=False, netns_path=None)) is None


def test_pod_whose_newest_sandbox_was_not_read_is_unknown() -> None:
    found = pods.view([sandbox("old"), sandbox("new", attempt=1, detailed=False)], lambda _: True)
    assert (found.pods, found.unknown) == ({}, frozenset({KEY}))


def test_pods_of_one_name_and_two_uids_are_two() -> None:
    found = pods.view([sandbox("a"), sandbox("b", uid="u2")], lambda _: True)
    assert len(found.pods) == 2


# --- the source -----------------------------------------------------------------------------------


def test_snapshot_comes_first_then_only_what_changes(path: Path) -> None:
    cri = FakeCri()
    cri.add(WEB)

    async def main() -> None:
        reader = made(path)
        async with serving(cri, path), seen_by(reader) as seen:
            await seen.until(lambda: seen.names() == {"web"})
            assert reader.connected
            assert "containerd 1.6.20" in reader.detail
            cri.add(changed(WEB, id="s2", name="other", uid="u2"))
            await seen.until(lambda: seen.names() == {"web", "other"})
            cri.sandboxes.pop("s1")
            await seen.until(lambda: seen.names() == {"other"})
            kinds = [type(update) for update in seen.updates]
            assert kinds == [Snapshot, Changed, Gone]
        assert not reader.connected

    asyncio.run(main())


def test_nothing_is_said_when_nothing_changes(path: Path) -> None:
    cri = FakeCri()
    cri.add(WEB, changed(WEB, id="s2", name="host", uid="u2", host_network=True))

    async def main() -> None:
        async with serving(cri, path), seen_by(made(path)) as seen:
            await seen.until(lambda: len(seen.pods) == 2)
            await asyncio.sleep(1)
            assert cri.calls["ListPodSandbox"] > 3
            assert len(seen.updates) == 1

    asyncio.run(main())


def test_socket_that_is_missing_at_first_is_waited_for(path: Path) -> None:
    cri = FakeCri()
    cri.add(WEB)

    async def main() -> None:
        reader = made(path)
        async with seen_by(reader) as seen:
            await asyncio.sleep(0.2)
            assert not reader.connected
            assert "there is no such socket" in reader.detail
            async with serving(cri, path):
                await seen.until(lambda: seen.names() == {"web"}, timeout_s=1.5)

    asyncio.run(main())


def test_lost_runtime_takes_no_pod_away_and_its_return_brings_a_snapshot(path: Path) -> None:
    cri = FakeCri()
    cri.add(WEB)

    async def main() -> None:
        reader = made(path)
        async with seen_by(reader) as seen:
            async with serving(cri, path):
                await seen.until(lambda: seen.names() == {"web"})
            await asyncio.sleep(0.5)
            assert not reader.connected
            assert seen.names() == {"web"}
            cri.sandboxes = {"s2": changed(WEB, id="s2", name="new", uid="u2")}
            async with serving(cri, path):
                # The namespace of the old one is still there, so a second list has to confirm.
                await seen.until(lambda: seen.names() == {"new"}, timeout_s=3)
            assert seen.snapshots == 2

    asyncio.run(main())


def test_errors_take_no_pod_away(path: Path) -> None:
    cri = FakeCri()
    cri.add(WEB)

    async def main() -> None:
        async with serving(cri, path), seen_by(made(path, timeout_s=0.2)) as seen:
            await seen.until(lambda: seen.names() == {"web"})
            for fault in ("hanging", "garbage"):
                getattr(cri, fault).add("ListPodSandbox")
                await asyncio.sleep(0.6)
                getattr(cri, fault).clear()
            cri.refused["ListPodSandbox"] = grpc.StatusCode.UNKNOWN
            await asyncio.sleep(0.6)
            cri.refused.clear()
            before = seen.snapshots
            await seen.until(lambda: seen.snapshots > before)
            assert not [update for update in seen.updates if isinstance(update, Gone)]

    asyncio.run(main())


def test_pod_that_cannot_be_read_is_unknown_and_comes_later(path: Path) -> None:
    cri = FakeCri()
    cri.add(WEB)
    cri.refused["PodSandboxStatus s1"] = grpc.StatusCode.UNKNOWN

    async def main() -> None:
        async with serving(cri, path), seen_by(made(path)) as seen:
            await seen.until(lambda: seen.snapshots == 1)
            assert seen.updates == [
                Snapshot(source="cri", pods=(), unknown=frozenset({KEY})),
            ]
            cri.refused.clear()
            await seen.until(lambda: seen.names() == {"web"})

    asyncio.run(main())


def test_pod_missing_from_one_list_is_not_gone_while_its_namespace_lives(path: Path) -> None:
    before = pods.view([sandbox("a")], lambda _: True).pods
    nothing = pods.View()
    once, doubted = pods.with_doubts(nothing, before, frozenset(), lambda _: True)
    assert (once.unknown, pods.changes("cri", before, once)) == (frozenset({KEY}), ())
    assert pods.known(before, once) == before
    twice, _ = pods.with_doubts(nothing, before, doubted, lambda _: True)
    assert pods.changes("cri", before, twice) == (Gone(source="cri", key=KEY),)
    dead, _ = pods.with_doubts(nothing, before, frozenset(), lambda _: False)
    assert pods.changes("cri", before, dead) == (Gone(source="cri", key=KEY),)


def test_addresses_that_are_filled_in_later_are_reported_later(path: Path) -> None:
    cri = FakeCri()
    cri.add(changed(WEB, ips=()))

    async def main() -> None:
        async with serving(cri, path), seen_by(made(path)) as seen:
            await seen.until(lambda: seen.names() == {"web"})
            assert seen.named("web").ips == ()
            cri.add(WEB)
            await seen.until(lambda: seen.named("web").ips != ())

    asyncio.run(main())


@pytest.mark.parametrize(("name", "version"), [("containerd", "2.1.9"), ("cri-o", "1.30.4")])
def test_event_is_a_hint_to_look_at_once(path: Path, name: str, version: str) -> None:
    cri = FakeCri(name, version)

    async def main() -> None:
        async with serving(cri, path), seen_by(made(path, interval_s=60)) as seen:
            await seen.until(lambda: seen.snapshots == 1)
            # Quick looks right after the start become rare ones.
            await asyncio.sleep(2.5)
            cri.add(WEB)
            cri.tell("s1")
            await seen.until(lambda: seen.names() == {"web"}, timeout_s=0.5)
            for _ in range(5000):
                cri.tell("s1")
            before = cri.calls["ListPodSandbox"]
            await asyncio.sleep(1)
            assert cri.calls["ListPodSandbox"] - before <= 12

    asyncio.run(main())


def test_queue_that_the_kubelet_reads_too_is_left_alone(path: Path) -> None:
    cri = FakeCri("containerd", "1.7.24~ds1")
    cri.tell("s1")

    async def main() -> None:
        async with serving(cri, path), seen_by(made(path)) as seen:
            await seen.until(lambda: seen.snapshots == 1)
            await asyncio.sleep(0.5)
            assert (cri.queued(), cri.calls["GetContainerEvents"]) == (1, 0)

    asyncio.run(main())


def test_events_that_are_off_cost_nothing(path: Path) -> None:
    cri = FakeCri("cri-o", "1.30.4")
    cri.events_on = False

    async def main() -> None:
        async with serving(cri, path), seen_by(made(path)) as seen:
            await seen.until(lambda: seen.snapshots == 1)
            await asyncio.sleep(2.5)
            assert cri.calls["GetContainerEvents"] <= 3
            assert seen.snapshots == 1

    asyncio.run(main())


def test_runtime_that_always_refuses_is_asked_ever_more_rarely(path: Path) -> None:
    cri = FakeCri()
    cri.refused["Version"] = grpc.StatusCode.UNKNOWN

    async def main() -> None:
        async with serving(cri, path), seen_by(made(path)):
            await asyncio.sleep(2)
            assert 2 <= cri.calls["Version"] <= 6

    asyncio.run(main())


def test_what_the_sink_raises_ends_the_source(path: Path) -> None:
    def broken(update: object) -> None:
        raise ZeroDivisionError

    async def main() -> None:
        async with serving(FakeCri(), path):
            with pytest.raises(ZeroDivisionError):
                await made(path).run(broken)

    asyncio.run(main())


def test_alive_is_a_namespace_and_nothing_else(tmp_path: Path) -> None:
    left = tmp_path / "left"
    left.touch()
    assert source.alive(LIVE)
    assert not any(map(source.alive, (str(left), str(tmp_path / "no"), "/a\0b")))
