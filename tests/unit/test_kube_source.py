"""What the agent makes of an API server: good, slow, lying, silent and gone ones."""

import asyncio
import contextlib
import json
import os
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from agent.model.decision import decide
from agent.model.pod import Pod, Policy
from agent.node.kube.access import InCluster, Kubeconfig
from agent.node.kube.cache import Cache
from agent.node.kube.client import ApiClient
from tests.fakes import fake_api
from tests.fakes.fake_api import NODE, FakeApi, kubeconfig, namespace, pod, serving
from tests.support import real_api
from tests.support.hearing import PATIENCE_S, Heard, until
from tests.support.hearing import hearing as hearing_of

EXCLUDE = "traffic.sidecar.istio.io/excludeOutboundPorts"


def hearing(
    api: FakeApi, folder: Path, silence_s: float = 60.0
) -> contextlib.AbstractAsyncContextManager[Heard]:
    return hearing_of(Kubeconfig(kubeconfig(folder, api)), folder, silence_s)


def run(folder: Path, test: Callable[[FakeApi], Awaitable[None]]) -> None:
    """Run a test against a cluster with one namespace and two pods on this node."""
    with serving() as api:
        api.put("namespaces", namespace("shop", istio_injection="enabled"))
        api.put("pods", pod("one"))
        api.put("pods", pod("two"))
        api.put("pods", pod("elsewhere", node="another"))

        async def all_of_it() -> None:
            await test(api)

        asyncio.run(all_of_it())


def test_pods_of_this_node_and_namespaces_are_told_at_once_when_both_are_known(
    tmp_path: Path,
) -> None:
    async def test(api: FakeApi) -> None:
        async with hearing(api, tmp_path) as heard:
            await until(lambda: heard.source.connected)
            assert heard.names() == {"one", "two"}
            first = heard.updates[0]
            assert first.pods == {("shop", "one"), ("shop", "two")}
            assert first.namespaces == {"shop"}
            found = heard.known("one")
            assert found is not None
            assert found.proxy is not None
            assert heard.source.namespace("shop").labels == {"istio-injection": "enabled"}
            assert heard.source.pod("shop", "one", "another uid") is None

    run(tmp_path, test)


def test_changes_arrive_by_the_watch_and_not_by_lists(tmp_path: Path) -> None:
    async def test(api: FakeApi) -> None:
        async with hearing(api, tmp_path) as heard:
            await until(lambda: heard.source.connected)
            lists = api.count("GET")
            api.change("pods", "shop", "one", {"metadata": {"annotations": {EXCLUDE: "5432"}}})
            await until(lambda: (heard.known("one") or pod_).annotation(EXCLUDE) == "5432")
            api.put("pods", pod("three"))
            await until(lambda: "three" in heard.names())
            api.remove("pods", "shop", "two")
            await until(lambda: heard.names() == {"one", "three"})
            api.change("namespaces", "", "shop", {"metadata": {"labels": None}})
            await until(lambda: heard.source.namespace("shop").left)
            api.change(
                "namespaces", "", "shop", {"metadata": {"labels": {"istio-injection": "enabled"}}}
            )
            await until(lambda: not heard.source.namespace("shop").left)
            assert api.count("GET") == lists

    pod_ = Pod(namespace="", name="")
    run(tmp_path, test)


def test_namespace_that_was_never_in_the_mesh_has_not_left_it(tmp_path: Path) -> None:
    async def test(api: FakeApi) -> None:
        api.put("namespaces", namespace("plain"))
        async with hearing(api, tmp_path) as heard:
            await until(lambda: heard.source.connected)
            assert not heard.source.namespace("plain").left
            assert not heard.source.namespace("unheard-of").left

    run(tmp_path, test)


def test_watch_goes_on_where_it_ended_and_misses_nothing(tmp_path: Path) -> None:
    async def test(api: FakeApi) -> None:
        async with hearing(api, tmp_path) as heard:
            await until(lambda: heard.source.connected)
            lists = api.count("GET")
            for number in range(5):
                api.end_watches()
                api.put("pods", pod(f"more-{number}"))
                await until(partial(heard.source.pod, "shop", f"more-{number}", ""))
            api.faults.cut_every_watch = True
            api.put("pods", pod("cut"))
            await asyncio.sleep(0.3)
            api.faults.cut_every_watch = False
            await until(lambda: "cut" in heard.names())
            assert api.count("GET") == lists

    run(tmp_path, test)


def test_gap_is_closed_by_a_new_list_and_a_comparison(tmp_path: Path) -> None:
    async def test(api: FakeApi) -> None:
        async with hearing(api, tmp_path) as heard:
            await until(lambda: heard.source.connected)
            api.stop()
            await until(lambda: not heard.source.connected)
            assert heard.names() == {"one", "two"}
            api.remove("pods", "shop", "one")
            api.put("pods", pod("three"))
            api.change("pods", "shop", "two", {"metadata": {"annotations": {EXCLUDE: "1"}}})
            api.compact()
            api.start()
            await until(lambda: heard.names() == {"two", "three"})
            await until(lambda: heard.source.connected)
            told = heard.updates[-1]
            assert told.pods == {("shop", "two"), ("shop", "three")}

    run(tmp_path, test)


def test_server_that_comes_back_as_another_one_is_listed_anew(tmp_path: Path) -> None:
    """It takes a watch from a version that it has yet to come to, and tells nothing."""

    async def test(api: FakeApi) -> None:
        for number in range(20):
            api.put("pods", pod(f"more-{number}"))
        async with hearing(api, tmp_path) as heard:
            await until(lambda: heard.source.connected)
            api.stop()
            await until(lambda: not heard.source.connected)
            api.begin_anew()
            api.start()
            await until(lambda: heard.source.connected)
            api.put("pods", pod("new"))
            await until(lambda: heard.names() == {"new"})

    run(tmp_path, test)


def test_bookmarks_keep_the_version_fresh(tmp_path: Path) -> None:
    async def test(api: FakeApi) -> None:
        async with hearing(api, tmp_path) as heard:
            await until(lambda: heard.source.connected)
            lists = api.count("GET")
            api.bookmark()
            await asyncio.sleep(0.5)
            api._oldest = api._version  # whoever goes on from what was there before is too late
            api.end_watches()
            api.put("pods", pod("three"))
            await until(lambda: "three" in heard.names())
            assert api.count("GET") == lists

    run(tmp_path, test)


@pytest.mark.parametrize("expire", [False, True], ids=["whole", "too slow"])
def test_list_comes_in_pieces(tmp_path: Path, expire: bool) -> None:
    """A piece that is asked for too late is refused, and everything is asked for at once."""

    async def test(api: FakeApi) -> None:
        api.faults.page, api.faults.expire_pieces = 3, expire
        for number in range(10):
            api.put("pods", pod(f"more-{number}"))
        async with hearing(api, tmp_path) as heard:
            await until(lambda: len(heard.names()) == 12)
            assert api.count("GET /api/v1/pods") == (3 if expire else 4)

    run(tmp_path, test)


def test_answers_that_are_cut_anywhere_are_put_together(tmp_path: Path) -> None:
    async def test(api: FakeApi) -> None:
        api.faults.chop = 7
        async with hearing(api, tmp_path) as heard:
            await until(lambda: heard.source.connected)
            api.put("pods", pod("ümläut", annotations={"note": "ß" * 50}))
            await until(lambda: len(heard.names()) == 2)  # no name of Kubernetes'
            api.put("pods", pod("three", annotations={"note": "ß" * 50}))
            await until(lambda: "three" in heard.names())

    run(tmp_path, test)


def test_changes_that_come_together_are_taken_apart(tmp_path: Path) -> None:
    async def test(api: FakeApi) -> None:
        lines = []
        for number in range(3):
            made = {**pod(f"more-{number}"), "kind": "Pod"}
            made["metadata"]["resourceVersion"] = str(200 + number)
            lines.append(json.dumps({"type": "ADDED", "object": made}).encode() + b"\n")
        whole = b"".join(lines)
        api.faults.garbage = [whole[:-9], whole[-9:]]
        async with hearing(api, tmp_path) as heard:
            await until(lambda: {f"more-{n}" for n in range(3)} <= heard.names())

    run(tmp_path, test)


@pytest.mark.parametrize(
    "line",
    [
        b"}{ no json\n",
        b"\xff\xfe\n",
        b"[]\n",
        b"{}\n",
        b'{"type": "ADDED", "object": null}\n',
        b'{"type": "MODIFIED", "object": {"metadata": {"name": "one"}}}\n',
        b'{"type": "ERROR", "object": {"code": 500}}\n',
        b"[" * 20_000 + b"\n",
        b"x" * (9 * 1024 * 1024),
    ],
    ids=["text", "bytes", "list", "empty", "null", "bare", "error", "deep", "endless"],
)
def test_nonsense_in_a_watch_costs_a_list_and_nothing_else(tmp_path: Path, line: bytes) -> None:
    async def test(api: FakeApi) -> None:
        api.faults.garbage = [line] * 4
        async with hearing(api, tmp_path) as heard:
            await until(lambda: not api.faults.garbage)
            api.put("pods", pod("three"))
            await until(lambda: heard.names() == {"one", "two", "three"})
            assert heard.source.connected

    run(tmp_path, test)


def test_objects_that_are_no_pods_of_this_node_are_not_believed(tmp_path: Path) -> None:
    async def test(api: FakeApi) -> None:
        nameless = pod("x")
        del nameless["metadata"]["name"]
        odd = [
            pod("foreign", node="another"),
            nameless,
            {"metadata": {"name": 7}, "spec": {"nodeName": NODE}},
            {"metadata": None, "spec": {"nodeName": NODE}},
            {"spec": []},
            pod("../../etc/passwd"),
        ]
        api.faults.lie = [*odd, "no object"]  # type: ignore[list-item]
        async with hearing(api, tmp_path) as heard:
            await until(lambda: heard.source.connected)
            assert heard.names() == {"one", "two"}

    run(tmp_path, test)


@pytest.mark.parametrize("fault", ["silent", "deaf"])
def test_silent_server_is_noticed_and_asked_again(tmp_path: Path, fault: str) -> None:
    async def test(api: FakeApi) -> None:
        async with hearing(api, tmp_path, silence_s=0.5) as heard:
            await until(lambda: heard.source.connected)
            api.faults.deaf_watches = True
            api.faults.silent = fault == "silent"
            api.end_watches()
            await asyncio.sleep(0.3)
            watches = api.count("WATCH")
            api.put("pods", pod("three"))
            if fault == "deaf":
                await until(lambda: api.count("WATCH") > watches + 2)
            api.faults.deaf_watches = api.faults.silent = False
            await until(lambda: "three" in heard.names())

    run(tmp_path, test)


def test_server_that_asks_for_patience_gets_it(tmp_path: Path) -> None:
    async def test(api: FakeApi) -> None:
        api.faults.status, api.faults.retry_after_s = 429, 30
        async with hearing(api, tmp_path) as heard:
            await until(lambda: "429" in heard.source.detail)
            await until(lambda: api.count("GET") == 2)
            await asyncio.sleep(2.0)
            assert api.count("GET") == 2

    run(tmp_path, test)


@pytest.mark.parametrize("status", [401, 403, 404, 429, 500, 503])
def test_refusal_is_said_in_a_sentence_and_waited_out(tmp_path: Path, status: int) -> None:
    async def test(api: FakeApi) -> None:
        api.faults.status = status
        async with hearing(api, tmp_path) as heard:
            await until(lambda: str(status) in heard.source.detail)
            assert not heard.source.connected
            words = {401: "token, written", 403: "RBAC"}
            assert words.get(status, "") in heard.source.detail
            api.faults.status = 0
            await until(lambda: heard.source.connected)
            assert heard.names() == {"one", "two"}

    run(tmp_path, test)


def test_server_that_is_gone_is_not_asked_too_often(tmp_path: Path) -> None:
    async def test(api: FakeApi) -> None:
        api.faults.status = 500
        async with hearing(api, tmp_path):
            await asyncio.sleep(2.0)
            assert api.count("GET") <= 2 * 6

    run(tmp_path, test)


def test_token_is_read_again(tmp_path: Path) -> None:
    async def test(api: FakeApi) -> None:
        async with hearing(api, tmp_path) as heard:
            await until(lambda: heard.source.connected)
            api.token = "second"
            api.end_watches()
            await until(lambda: not heard.source.connected)
            (tmp_path / "token").write_text("second\n")
            api.put("pods", pod("three"))
            await until(lambda: "three" in heard.names())

    run(tmp_path, test)


def test_what_was_known_is_known_after_a_restart_without_the_server(tmp_path: Path) -> None:
    async def test(api: FakeApi) -> None:
        async with hearing(api, tmp_path) as heard:
            await until(lambda: heard.source.connected)
            api.change("namespaces", "", "shop", {"metadata": {"labels": None}})
            file = tmp_path / "state" / "kubernetes.json"
            await until(lambda: file.exists() and '"labels":{}' in file.read_text())
            assert file.stat().st_mode & 0o777 == 0o600
        api.stop()
        async with hearing(api, tmp_path) as heard:
            await heard.source.spoke(PATIENCE_S)
            assert not heard.source.connected
            assert not heard.source.synced
            assert heard.updates == []
            found = heard.known("one")
            assert found is not None
            assert found.proxy is not None
            assert heard.source.namespace("shop").left
            api.start()
            await until(lambda: heard.updates)

    run(tmp_path, test)


@pytest.mark.parametrize("damage", [b"", b"{", b'{"pods": 3}', b"\xff", b"[" * 10_000])
def test_damaged_file_is_as_good_as_none(tmp_path: Path, damage: bytes) -> None:
    async def test(api: FakeApi) -> None:
        (tmp_path / "state").mkdir()
        (tmp_path / "state" / "kubernetes.json").write_bytes(damage)
        async with hearing(api, tmp_path) as heard:
            await until(lambda: heard.names() == {"one", "two"})

    run(tmp_path, test)


def test_secrets_of_containers_are_neither_kept_nor_written(tmp_path: Path) -> None:
    async def test(api: FakeApi) -> None:
        secret = {"name": "PASSWORD", "value": "hunter2"}
        known = {"name": "ISTIO_META_DNS_CAPTURE", "value": "true"}
        containers = [
            {"name": "app", "args": ["--password=hunter2"], "env": [secret]},
            {"name": "istio-proxy", "env": [secret, known]},
        ]
        last = {"kubectl.kubernetes.io/last-applied-configuration": "hunter2"}
        api.put("pods", pod("three", containers=containers, annotations=last))
        async with hearing(api, tmp_path) as heard:
            await until(lambda: heard.source.connected)
            found = heard.known("three")
            assert found is not None
            assert "hunter2" not in str(found)
            assert found.proxy is not None
            assert found.proxy.env == {"ISTIO_META_DNS_CAPTURE": "true"}
            file = tmp_path / "state" / "kubernetes.json"
            await until(lambda: file.exists() and "three" in file.read_text())
            assert "hunter2" not in file.read_text()

    run(tmp_path, test)


def test_static_pod_is_known_by_the_uid_that_the_runtime_has(tmp_path: Path) -> None:
    async def test(api: FakeApi) -> None:
        api.put("pods", pod("mirror", annotations={"kubernetes.io/config.hash": "abc"}))
        async with hearing(api, tmp_path) as heard:
            await until(lambda: heard.source.connected)
            assert heard.source.pod("shop", "mirror", "abc") is not None

    run(tmp_path, test)


def test_pod_that_nobody_told_of_is_asked_for_once_and_not_for_long(tmp_path: Path) -> None:
    async def test(api: FakeApi) -> None:
        async with hearing(api, tmp_path) as heard:
            await until(lambda: heard.source.connected)
            api.faults.deaf_watches = True
            api.end_watches()
            await asyncio.sleep(0.3)
            api.put("pods", pod("new"))
            gets = api.count("GET")
            assert await heard.source.look_up("shop", "one", "uid-one") is not None
            assert api.count("GET") == gets
            assert await heard.source.look_up("shop", "new", "uid-new") is not None
            assert await heard.source.look_up("shop", "new", "another") is None
            assert await heard.source.look_up("shop", "none", "uid") is None
            assert api.count("GET") == gets + 3
            api.faults.delay_s = 30.0
            started = time.monotonic()
            assert await heard.source.look_up("shop", "slow", "uid") is None
            assert time.monotonic() - started < PATIENCE_S
            api.faults.delay_s, api.faults.deaf_watches = 0.0, False
            api.stop()
            await until(lambda: not heard.source.connected)
            gets = api.count("GET")
            assert await heard.source.look_up("shop", "new-2", "uid") is None
            assert api.count("GET") == gets

    run(tmp_path, test)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
SECTIONS = ("metadata", "spec", "status")
INSIDE = ("name", "uid", "labels", "annotations", "ownerReferences", "creationTimestamp")


@given(
    st.sampled_from(SECTIONS), st.sampled_from((*INSIDE, "containers", "securityContext")), ANYTHING
)
def test_nothing_that_a_pod_may_hold_upsets_the_cache(
    tmp_path_factory: pytest.TempPathFactory, section: str, key: str, value: object
) -> None:
    folder = tmp_path_factory.getbasetemp()
    cache = Cache(NODE, lambda _: None)
    odd = pod("one")
    odd[section][key] = value
    for thing in (odd, {**pod("two"), section: value}):
        cache.pods.replace([thing])
        cache.pods.put(thing)
        cache.namespaces.put(thing)
        for known in cache.known_pods.values():
            decide(known.pod, cache.namespace("shop"), Policy())
        cache.save(folder)
        again = Cache(NODE, lambda _: None)
        again.load(folder)
        assert again.known_pods == cache.known_pods
        cache.pods.drop(thing)
        cache.namespaces.drop(thing)


# --- who the agent is -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    real_api.certificates(folder)
    return folder


def test_service_account_of_a_pod_is_used_and_proxies_are_not(
    tmp_path: Path, certificates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving((certificates / "tls.crt", certificates / "tls.key")) as api:
        (tmp_path / "token").write_text(api.token)
        (tmp_path / "ca.crt").write_bytes((certificates / "ca.crt").read_bytes())
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(api.port))
        monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")
        api.put("namespaces", namespace("shop"))
        client = ApiClient(InCluster(tmp_path))
        assert asyncio.run(client.get("/api/v1/namespaces"))["items"]


def test_server_that_cannot_prove_who_it_is_is_not_talked_to(
    tmp_path: Path, certificates: Path
) -> None:
    with serving((certificates / "tls.crt", certificates / "tls.key")) as api:
        trusted = {"certificate-authority": str(certificates / "ca.crt")}
        for options, message in (
            (trusted, ""),
            ({"certificate-authority": str(certificates / "tls.crt")}, "certificate verify failed"),
            ({**trusted, "tls-server-name": "another"}, "certificate verify failed"),
        ):
            client = ApiClient(Kubeconfig(fake_api.kubeconfig(tmp_path, api, **options)))
            if message:
                with pytest.raises(Exception, match=message):
                    asyncio.run(client.get("/api/v1/namespaces"))
            else:
                assert asyncio.run(client.get("/api/v1/namespaces"))["kind"] == "NamespaceList"
        seen = [request for request in api.requests if "namespaces" in request]
        assert len(seen) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"current-context": "no"}, "it has no context named no"),
        ({"current-context": ""}, "it has no current-context"),
        ({"clusters": 3}, "it has no cluster named it"),
        ({"clusters": [{"name": "it", "cluster": {"server": "127.0.0.1:1"}}]}, "no http or https"),
        ({"users": [{"name": "it", "user": {"exec": {"command": "x"}}}]}, "exec"),
        ({"users": [{"name": "it", "user": {"tokenFile": "none"}}]}, "none cannot be read"),
        ({"users": []}, "it has no user named it"),
    ],
)
def test_kubeconfig_that_says_nothing_useful_is_refused_in_words(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    path = kubeconfig(tmp_path, FakeApi())
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), **change}))
    client = ApiClient(Kubeconfig(path))
    with pytest.raises(Exception, match=message):
        asyncio.run(client.get("/api/v1/namespaces"))
    assert os.path.exists(path)
