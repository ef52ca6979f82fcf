"""The agent's source and a real API server that is killed, compacted, emptied, full, or says no."""

import asyncio
import base64
import contextlib
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent.node.config import Kubernetes
from agent.node.kube import reflector
from agent.node.kube.access import HOST, PORT, InCluster, Kubeconfig
from agent.node.kube.cluster import rights
from agent.node.kube.errors import ApiRefused
from tests.fakes import fake_api
from tests.support import real_api
from tests.support.agent import free_port
from tests.support.hearing import Heard, hearing, until
from tests.support.real_api import RealApi, ask

PODS = "/api/v1/namespaces/shop/pods"
EXCLUDE = "traffic.sidecar.istio.io/excludeOutboundPorts"
LONG_S = 90.0


def make(admin: Path, *names: str, **fields: Any) -> None:
    """Make pods, many at a time."""

    def one(name: str) -> None:
        ask(admin, "POST", PODS, fake_api.pod(name, kind="Pod", apiVersion="v1", **fields))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one, names))


def access(api: RealApi) -> Kubeconfig:
    return Kubeconfig(api.kubeconfig("agent", api.token()))


def lists(api: RealApi) -> list[str]:
    """Return what was asked for in lists so far, but for those that tell how far the server is."""
    asked = [event for event in api.requests() if event["verb"] == "list"]
    told = [event["requestURI"] for event in asked if event["stage"] == "ResponseComplete"]
    return [uri for uri in told if "limit=1" not in re.split("[?&]", uri)]


def annotation(heard: Heard, name: str) -> str | None:
    pod = heard.source.pod("shop", name, "")
    return pod.annotation(EXCLUDE) if pod else None


def test_changes_arrive_by_the_watch_and_not_by_lists(api: RealApi, tmp_path: Path) -> None:
    async def test() -> None:
        make(api.admin, "one", "two")
        make(api.admin, "elsewhere", node="another")
        async with hearing(access(api), tmp_path) as heard:
            await until(lambda: heard.source.connected)
            assert heard.names() == {"one", "two"}
            before = lists(api)
            patch = {"metadata": {"annotations": {EXCLUDE: "5432"}}}
            ask(api.admin, "PATCH", f"{PODS}/one", patch)
            await until(lambda: annotation(heard, "one") == "5432")
            make(api.admin, "three")
            await until(lambda: "three" in heard.names())
            api.end_pod("two")
            await until(lambda: heard.names() == {"one", "three"})
            api.label_shop(None)
            await until(lambda: heard.source.namespace("shop").left)
            api.label_shop("enabled")
            await until(lambda: not heard.source.namespace("shop").left)
            assert lists(api) == before

    asyncio.run(test())


def test_large_lists_come_in_pieces(api: RealApi, tmp_path: Path) -> None:
    async def test() -> None:
        names = {f"pod-{number}" for number in range(2 * reflector.PAGE + 1)}
        make(api.admin, *names)
        before = len(lists(api))
        async with hearing(access(api), tmp_path) as heard:
            await until(lambda: heard.source.connected, patience_s=LONG_S)
            assert heard.names() == names
        asked = [uri for uri in lists(api)[before:] if uri.startswith("/api/v1/pods")]
        assert ["continue=" in uri for uri in asked] == [False, True, True]

    asyncio.run(test())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_server_that_ends_and_comes_back_is_followed_from_where_it_was(
    api: RealApi, tmp_path: Path, number: signal.Signals
) -> None:
    async def test() -> None:
        make(api.admin, "one", "two")
        async with hearing(access(api), tmp_path) as heard:
            await until(lambda: heard.source.connected)
            await asyncio.to_thread(api.stop, number=number)
            await until(lambda: not heard.source.connected, patience_s=LONG_S)
            assert "decisions go on from what is known" in heard.source.detail
            assert heard.names() == {"one", "two"}
            await asyncio.to_thread(api.start)
            await until(lambda: heard.source.connected, patience_s=LONG_S)
            make(api.admin, "three")
            await until(lambda: heard.names() == {"one", "two", "three"})

    asyncio.run(test())


def test_what_etcd_has_forgotten_meanwhile_is_found_by_a_new_list(
    api: RealApi, tmp_path: Path
) -> None:
    """The server is back at a port that the agent does not know before it is where it was."""

    async def test() -> None:
        make(api.admin, "one", "two")
        async with hearing(access(api), tmp_path) as heard:
            await until(lambda: heard.source.connected)
            api.stop()
            await until(lambda: not heard.source.connected, patience_s=LONG_S)
            hidden = await asyncio.to_thread(api.start, free_port())
            api.end_pod("one", hidden)
            make(hidden, "three")
            api.forget_history(hidden)
            api.stop()
            await asyncio.to_thread(api.start)
            await until(lambda: heard.names() == {"two", "three"}, patience_s=LONG_S)
            await until(lambda: heard.source.connected)
            assert heard.updates[-1].pods == {("shop", "three")}

    asyncio.run(test())


def test_server_that_comes_back_with_another_etcd_is_listed_anew(tmp_path: Path) -> None:
    """Its versions are those of another history, and may be smaller than what was known."""

    async def test(api: RealApi) -> None:
        api.make_shop()
        make(api.admin, *(f"pod-{number}" for number in range(300)))
        path = api.kubeconfig("agent", api.token())
        async with hearing(Kubeconfig(path), tmp_path) as heard:
            await until(lambda: len(heard.names()) == 300)
            api.wipe()
            await until(lambda: not heard.source.connected, patience_s=LONG_S)
            await asyncio.to_thread(api.start)
            api.allow(rights(Kubernetes()))
            api.make_shop()
            api.kubeconfig("agent", api.token())
            make(api.admin, "new")
            await until(lambda: heard.names() == {"new"}, patience_s=LONG_S)
            await until(lambda: heard.source.connected)

    with real_api.running(tmp_path) as api:
        api.allow(rights(Kubernetes()))
        asyncio.run(test(api))


@pytest.fixture
def mounted(api: RealApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A pod's own account, as the kubelet mounts it."""
    monkeypatch.setenv(HOST, "127.0.0.1")
    monkeypatch.setenv(PORT, str(api.port))
    folder = tmp_path / "serviceaccount"
    folder.mkdir()
    (folder / "ca.crt").write_bytes((api.folder / "ca.crt").read_bytes())
    return folder


def test_token_that_has_ended_is_said_and_the_next_one_taken(
    api: RealApi, mounted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reflector, "WATCH_S", 2.0)  # a watch that has begun goes on

    async def test() -> None:
        (mounted / "token").write_text(api.short_token(5))
        async with hearing(InCluster(mounted), tmp_path) as heard:
            await until(lambda: heard.source.connected)
            await until(lambda: not heard.source.connected, patience_s=LONG_S)
            assert "401" in heard.source.detail
            assert "credentials of the agent are refused" in heard.source.detail
            assert str(mounted / "token") in heard.source.detail
            make(api.admin, "one")
            (mounted / "new").write_text(api.token())
            (mounted / "new").replace(mounted / "token")
            await until(lambda: heard.source.connected, patience_s=LONG_S)
            await until(lambda: heard.names() == {"one"})

    asyncio.run(test())


def test_certificate_of_a_client_is_enough(api: RealApi, tmp_path: Path) -> None:
    """As in the kubeconfig that an administrator has: everything is in the file itself."""
    authority = api.folder / "ca.crt"
    for command in (
        "openssl req -newkey rsa:2048 -nodes -keyout own.key -out own.csr"
        " -subj /O=system:masters/CN=it",
        f"openssl x509 -req -in own.csr -CA {authority} -CAkey {api.folder}/ca.key -out own.crt",
    ):
        subprocess.run(command.split(), cwd=tmp_path, capture_output=True, check=True)

    def encoded(path: Path) -> str:
        return base64.b64encode(path.read_bytes()).decode()

    written = yaml.safe_load(api.admin.read_text())
    (cluster,), (user,) = written["clusters"], written["users"]
    del cluster["cluster"]["certificate-authority"]
    cluster["cluster"]["certificate-authority-data"] = encoded(authority)
    user["user"] = {
        "client-certificate-data": encoded(tmp_path / "own.crt"),
        "client-key-data": encoded(tmp_path / "own.key"),
    }
    path = tmp_path / "kubeconfig"
    path.write_text(yaml.safe_dump(written))

    async def test() -> None:
        make(api.admin, "one")
        async with hearing(Kubeconfig(path), tmp_path) as heard:
            await until(lambda: heard.source.connected)
            assert heard.names() == {"one"}

    asyncio.run(test())


@pytest.fixture
def without_seats(api: RealApi) -> Iterator[Callable[[], None]]:
    """A server that takes none of the agent's requests until the value is called."""
    group = "flowcontrol.apiserver.k8s.io/v1"
    rule = {"verbs": ["*"], "apiGroups": ["*"], "resources": ["*"]}
    account = {"namespace": real_api.ACCOUNT, "name": real_api.ACCOUNT}
    level = {"nominalConcurrencyShares": 0, "limitResponse": {"type": "Reject"}}
    flow = {
        "priorityLevelConfiguration": {"name": "it-agent"},
        "matchingPrecedence": 2,
        "rules": [
            {
                "subjects": [{"kind": "ServiceAccount", "serviceAccount": account}],
                "resourceRules": [{**rule, "clusterScope": True, "namespaces": ["*"]}],
            }
        ],
    }
    specs = {
        "prioritylevelconfigurations": {"type": "Limited", "limited": level},
        "flowschemas": flow,
    }

    def give_back() -> None:
        for kind in specs:
            with contextlib.suppress(ApiRefused):
                ask(api.admin, "DELETE", f"/apis/{group}/{kind}/it-agent", {})

    for kind, spec in specs.items():
        document = {"metadata": {"name": "it-agent"}, "spec": spec}
        ask(api.admin, "POST", f"/apis/{group}/{kind}", document)
    yield give_back
    give_back()


def test_server_with_too_much_to_do_is_left_alone_for_as_long_as_it_asks(
    api: RealApi, tmp_path: Path, without_seats: Callable[[], None]
) -> None:
    async def test() -> None:
        async with hearing(access(api), tmp_path) as heard:
            await until(lambda: "429" in heard.source.detail, patience_s=LONG_S)
            assert not heard.source.connected
            without_seats()
            await until(lambda: heard.source.connected, patience_s=LONG_S)

    asyncio.run(test())
