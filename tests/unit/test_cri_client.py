"""The CRI client against runtimes that differ, that are slow, that lie and that go away."""

import asyncio
import json
import os
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from ipaddress import ip_address
from pathlib import Path

import grpc
import pytest

from agent.model.errors import InvalidSettings
from agent.node.cri import endpoint
from agent.node.cri.client import CriClient, Runtime
from agent.node.cri.details import verbose
from agent.node.cri.errors import CriBroken, CriRefused, CriUnsupported, RuntimeAbsent
from tests.fakes.fake_cri import FakeContainer, FakeCri, FakeSandbox, changed, serving

WEB = FakeSandbox(
    id="s1", labels={"app": "web"}, annotations={"on": "yes"}, netns="/run/netns/cni-1"
)


@pytest.fixture
def path() -> Iterator[Path]:
    """A place for a socket: a path under pytest's own folder may be too long for one."""
    with tempfile.TemporaryDirectory(prefix="it-cri-") as folder:
        yield Path(folder, "cri.sock")


def asked(
    cri: FakeCri, path: Path, body: Callable[[CriClient], Awaitable[None]], *, timeout_s: float = 5
) -> None:
    """Run `body` with a client of `cri`."""

    async def main() -> None:
        async with serving(cri, path), CriClient(str(path), timeout_s=timeout_s) as client:
            await body(client)

    asyncio.run(main())


# --- what is read ---------------------------------------------------------------------------------


def test_sandbox_is_read_with_its_details(path: Path) -> None:
    cri = FakeCri()
    cri.add(changed(WEB, ips=("10.0.0.5", "fd00::5"), runtime_handler="crun"))

    async def body(client: CriClient) -> None:
        [found] = await client.sandboxes()
        assert (found.namespace, found.name, found.uid) == ("shop", "web", "u1")
        assert (found.ready, found.detailed, found.complete) == (True, True, True)
        assert (found.netns_path, found.pid, found.host_network) == (
            "/run/netns/cni-1",
            4321,
            False,
        )
        assert found.ips == (ip_address("10.0.0.5"), ip_address("fd00::5"))
        assert (found.labels, found.annotations) == ({"app": "web"}, {"on": "yes"})
        assert found.runtime_handler == "crun"

    asked(cri, path, body)


def test_details_are_read_once(path: Path) -> None:
    cri = FakeCri()
    cri.add(*(changed(WEB, id=f"s{n}", uid=f"u{n}") for n in range(110)))

    async def body(client: CriClient) -> None:
        for _ in range(3):
            assert len(await client.sandboxes()) == 110
        assert cri.calls["PodSandboxStatus"] == 110
        cri.add(changed(WEB, id="new"))
        assert len(await client.sandboxes()) == 111
        assert cri.calls["PodSandboxStatus"] == 111

    asked(cri, path, body)


def test_details_are_read_again_when_the_state_changes(path: Path) -> None:
    cri = FakeCri()
    cri.add(WEB)

    async def body(client: CriClient) -> None:
        await client.sandboxes()
        cri.add(changed(WEB, ready=False, closed=True))
        [found] = await client.sandboxes()
        assert (found.ready, found.pid, found.netns_path) == (False, None, None)
        assert cri.calls["PodSandboxStatus"] == 2

    asked(cri, path, body)


def test_details_that_were_not_complete_are_asked_for_ever_more_rarely(path: Path) -> None:
    cri = FakeCri()
    cri.add(changed(WEB, ips=()))
    now = [100.0]

    async def main() -> None:
        async with (
            serving(cri, path),
            CriClient(str(path), clock=lambda: now[0]) as client,
        ):
            counts = []
            for _ in range(40):
                await client.sandboxes()
                counts.append(cri.calls["PodSandboxStatus"])
                now[0] += 1.0
            assert counts[0] == 1
            assert 4 <= counts[-1] <= 9
            cri.add(WEB)
            now[0] += 60
            [found] = await client.sandboxes()
            assert found.complete

    asyncio.run(main())


def test_forgotten_sandboxes_take_no_memory(path: Path) -> None:
    cri = FakeCri()

    async def body(client: CriClient) -> None:
        for turn in range(20):
            cri.sandboxes = {f"{turn}-{n}": changed(WEB, id=f"{turn}-{n}") for n in range(5)}
            assert len(await client.sandboxes()) == 5
            assert len(client._kept) == 5

    asked(cri, path, body)


def test_host_network_is_told_by_the_mode_or_by_the_specification(path: Path) -> None:
    cri = FakeCri()
    spec = json.dumps({"pid": 7, "runtimeSpec": {"linux": {"namespaces": [{"type": "pid"}]}}})
    cri.add(
        changed(WEB, id="mode", host_network=True, info="{}"), changed(WEB, id="spec", info=spec)
    )

    async def body(client: CriClient) -> None:
        for found in await client.sandboxes():
            assert (found.host_network, found.netns_path, found.ips) == (True, None, ())

    asked(cri, path, body)


def test_containers_come_with_their_processes(path: Path) -> None:
    cri = FakeCri()
    cri.add(WEB)
    for container in (
        FakeContainer(id="c1", sandbox_id="s1"),
        FakeContainer(id="c2", sandbox_id="s1", name="init", running=False),
        FakeContainer(id="c3", sandbox_id="other"),
    ):
        cri.containers[container.id] = container
    cri.ignores_filters = True

    async def body(client: CriClient) -> None:
        found = await client.containers("s1")
        assert [(one.name, one.running, one.pid) for one in found] == [
            ("app", True, 5432),
            ("init", False, None),
        ]

    asked(cri, path, body)


def test_conditions_name_what_is_lacking(path: Path) -> None:
    async def body(client: CriClient) -> None:
        assert await client.conditions() == {"NetworkReady": "cni plugin not initialized"}

    asked(FakeCri(), path, body)


# --- runtimes that differ -------------------------------------------------------------------------


@pytest.mark.parametrize("info", ["{}", "", "[]", '{"pid": "x"}', "{", None])
def test_namespace_is_found_through_a_container_where_the_sandbox_does_not_tell(
    path: Path, info: str | None
) -> None:
    """CRI-O without a pause process says `{}` before 1.24."""
    cri = FakeCri("cri-o", "1.22.0")
    cri.add(changed(WEB, info=info, netns=None))
    cri.containers["c1"] = FakeContainer(id="c1", sandbox_id="s1", netns="/var/run/netns/x")

    async def body(client: CriClient) -> None:
        [found] = await client.sandboxes()
        assert found.netns_path == "/var/run/netns/x"

    asked(cri, path, body)


def test_process_shows_the_namespace_where_nothing_else_does(path: Path) -> None:
    cri = FakeCri()
    cri.add(changed(WEB, info='{"pid": 42}'))

    async def body(client: CriClient) -> None:
        [found] = await client.sandboxes()
        assert found.netns_path == "/proc/42/ns/net"

    asked(cri, path, body)


@pytest.mark.parametrize(
    ("name", "version", "safe"),
    [
        ("containerd", "1.6.20~ds1", False),
        ("containerd", "1.7.24~ds1", False),
        ("containerd", "v1.7.27", False),
        ("containerd", "2.0.5", False),
        ("containerd", "2.1.9~ds1", True),
        ("containerd", "v2.1.0-rc.1", True),
        ("containerd", "2.10.0", True),
        ("containerd", "unknown", False),
        ("cri-o", "1.30.4", True),
        ("docker", "27.0.0", False),
    ],
)
def test_events_are_read_only_where_the_kubelet_loses_none(
    name: str, version: str, safe: bool
) -> None:
    assert Runtime(name=name, version=version, path="/x").events_are_safe is safe


def test_events_of_one_that_has_none(path: Path) -> None:
    async def body(client: CriClient) -> None:
        with pytest.raises(CriUnsupported, match="GetContainerEvents"):
            await anext(client.events())

    asked(FakeCri(), path, body)


def test_server_without_cri_is_unsupported(path: Path) -> None:
    async def main() -> None:
        async with serving(FakeCri(), path, service="runtime.v1alpha2.RuntimeService"):
            with pytest.raises(CriUnsupported, match="Version"):
                await CriClient(str(path)).connect()

    asyncio.run(main())


# --- slow, lying, absent --------------------------------------------------------------------------


def test_hanging_list_ends_with_its_deadline_and_the_next_one_works(path: Path) -> None:
    cri = FakeCri()
    cri.add(WEB)
    cri.hanging.add("ListPodSandbox")

    async def body(client: CriClient) -> None:
        started = time.monotonic()
        with pytest.raises(CriBroken, match="DEADLINE_EXCEEDED"):
            await client.sandboxes()
        assert time.monotonic() - started < 3
        cri.hanging.clear()
        assert len(await client.sandboxes()) == 1

    asked(cri, path, body, timeout_s=0.3)


@pytest.mark.parametrize("fault", ["hanging", "garbage", "refused"])
def test_one_bad_sandbox_does_not_hide_the_others(path: Path, fault: str) -> None:
    cri = FakeCri()
    cri.add(WEB, changed(WEB, id="bad", uid="u2"))
    if fault == "refused":
        cri.refused["PodSandboxStatus bad"] = grpc.StatusCode.UNKNOWN
    else:
        getattr(cri, fault).add("PodSandboxStatus bad")

    async def body(client: CriClient) -> None:
        found = {one.id: one for one in await client.sandboxes()}
        assert (found["s1"].detailed, found["bad"].detailed) == (True, False)
        assert len(await client.sandboxes()) == 2
        assert cri.calls["Version"] == 1  # the connection was kept

    asked(cri, path, body, timeout_s=0.5)


def test_sandbox_that_goes_between_list_and_details_is_left_out(path: Path) -> None:
    cri = FakeCri()
    cri.add(WEB, changed(WEB, id="gone"))
    cri.refused["PodSandboxStatus gone"] = grpc.StatusCode.NOT_FOUND

    async def body(client: CriClient) -> None:
        assert [one.id for one in await client.sandboxes()] == ["s1"]

    asked(cri, path, body)


def test_garbage_instead_of_a_list_is_an_error_and_no_empty_list(path: Path) -> None:
    cri = FakeCri()
    cri.garbage.add("ListPodSandbox")

    async def body(client: CriClient) -> None:
        with pytest.raises(CriBroken, match="no CRI answer"):
            await client.sandboxes()

    asked(cri, path, body)


def test_answer_of_the_runtime_is_quoted(path: Path) -> None:
    cri = FakeCri()
    cri.refused["ListPodSandbox"] = grpc.StatusCode.UNKNOWN

    async def body(client: CriClient) -> None:
        with pytest.raises(CriRefused, match="UNKNOWN: told to"):
            await client.sandboxes()

    asked(cri, path, body)


def test_bad_addresses_and_paths_are_dropped(path: Path) -> None:
    cri = FakeCri()
    spaces = [{"type": "network", "path": "relative"}]
    info = json.dumps({"runtimeSpec": {"linux": {"namespaces": spaces}}})
    cri.add(changed(WEB, ips=("nonsense", "10.0.0.6"), info=info))

    async def body(client: CriClient) -> None:
        [found] = await client.sandboxes()
        assert (found.netns_path, found.ips) == (None, (ip_address("10.0.0.6"),))

    asked(cri, path, body)


def test_runtime_that_comes_back_is_used_again_without_a_second_of_back_off(path: Path) -> None:
    cri = FakeCri()
    cri.add(WEB)

    async def main() -> None:
        async with CriClient(str(path)) as client:
            async with serving(cri, path):
                assert len(await client.sandboxes()) == 1
            with pytest.raises(RuntimeAbsent):
                await client.sandboxes()
            async with serving(cri, path):
                started = time.monotonic()
                assert await client.wait_for_socket() is False
                assert len(await client.sandboxes()) == 1
                assert time.monotonic() - started < 0.8

    asyncio.run(main())


def test_where_no_runtime_is_the_sockets_are_named_and_the_key_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    monkeypatch.setattr("agent.node.cri.endpoint.USUAL", (a, b))
    with pytest.raises(RuntimeAbsent) as refused:
        asyncio.run(CriClient(None).connect())
    said = str(refused.value)
    assert f"({a}, {b}: there is no such socket)" in said
    assert "cri.endpoint" in said


def test_waiting_for_a_socket_that_is_not_there_yet(path: Path) -> None:
    async def main() -> None:
        client = CriClient(str(path))
        with pytest.raises(RuntimeAbsent, match="there is no such socket"):
            await client.connect()
        waiting = asyncio.create_task(client.wait_for_socket())
        await asyncio.sleep(0.2)
        async with serving(FakeCri(), path), asyncio.timeout(2):
            assert await waiting is True
            assert (await client.connect()).name == "containerd"
            await client.close()

    asyncio.run(main())


def test_closing_ends_what_is_under_way_without_cancelling_the_caller(path: Path) -> None:
    cri = FakeCri()
    cri.hanging.add("ListPodSandbox")

    async def body(client: CriClient) -> None:
        await client.connect()
        cri.called.clear()
        asking = asyncio.create_task(client.sandboxes())
        await cri.called.wait()
        await client.close()
        with pytest.raises(CriBroken, match="closed"):
            await asking

    asked(cri, path, body)


def test_cancelled_caller_is_cancelled(path: Path) -> None:
    cri = FakeCri()
    cri.hanging.add("ListPodSandbox")

    async def body(client: CriClient) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await client.sandboxes()
        cri.hanging.clear()
        assert await client.sandboxes() == ()

    asked(cri, path, body)


# --- where the runtime is -------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["unix:///run/x.sock", "unix:/run/x.sock", "/run/x.sock"])
def test_endpoint_is_a_unix_socket(text: str) -> None:
    assert endpoint.parse(text) == "/run/x.sock"


@pytest.mark.parametrize("text", ["tcp://127.0.0.1:1", "run/x.sock", "", "/a\0b", "/" + "x" * 200])
def test_any_other_endpoint_is_refused(text: str) -> None:
    with pytest.raises(InvalidSettings, match=r"cri\.endpoint"):
        CriClient(text)


def test_first_usual_socket_that_speaks_cri_is_taken(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stale, foreign = path.with_name("stale.sock"), path.with_name("docker.sock")
    monkeypatch.setattr(endpoint, "USUAL", tuple(map(str, (stale, foreign, path))))

    async def main() -> None:
        async with (
            serving(FakeCri(), foreign, service="containerd.services.Version"),
            serving(FakeCri("cri-o", "1.30.0"), path),
            CriClient() as client,
        ):
            assert (await client.connect()).path == str(path)

    asyncio.run(main())


def test_usual_sockets_are_those_of_kubernetes_first() -> None:
    paths = endpoint.candidates(None)
    # Where the kubelet uses docker, there is docker's own containerd besides.
    for path in ("/run/crio/crio.sock", "/run/cri-dockerd.sock"):
        assert paths.index(path) < paths.index("/run/containerd/containerd.sock")
    assert any("k3s" in path for path in paths)


def test_closed_namespace_has_no_path_although_the_specification_names_one() -> None:
    spaces = [{"type": "network", "path": "/run/netns/dead"}]
    said = {"netNamespaceClosed": True, "runtimeSpec": {"linux": {"namespaces": spaces}}}
    found = verbose({"info": json.dumps(said)})
    assert (found.closed, found.netns_path) == (True, "/run/netns/dead")


def test_channel_is_refused_in_a_thread_that_is_elsewhere(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC's threads would be born in the pod and pin its namespace."""
    real = os.stat
    here, elsewhere = "/proc/thread-self/ns/net", "/proc/self/ns/pid"
    monkeypatch.setattr(os, "stat", lambda path: real(elsewhere if path == here else path))

    async def body(client: CriClient) -> None:
        with pytest.raises(RuntimeError, match="setns"):
            await client.connect()

    asked(FakeCri(), path, body)
