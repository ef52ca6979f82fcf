"""What the agent writes to the API server: Events, labels, deletions, the node's taint."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from agent.node.config import Kubernetes
from agent.node.events import Events
from agent.node.feed import Feed
from agent.node.kube.access import Kubeconfig
from agent.node.kube.announcer import BURST, Announcer, Subject
from agent.node.kube.cache import Cache
from agent.node.kube.client import ApiClient
from agent.node.kube.repair import LABEL, Repair
from agent.node.kube.taint import TaintKeeper
from agent.node.pod import Wish
from tests.fakes.fake_api import NODE, FakeApi, kubeconfig, pod, serving

PATIENCE_S = 20.0
TAINT = "intercept-agent/not-ready"
OTHER = {"key": "other", "effect": "NoExecute"}


async def until(condition: Callable[[], object], patience_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, "not within the time"
        await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def at_work(*jobs: Coroutine[Any, Any, None]) -> Any:
    tasks = [asyncio.create_task(job) for job in jobs]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        for found in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(found, asyncio.CancelledError), found


def against(folder: Path, test: Callable[[FakeApi, ApiClient], Coroutine[Any, Any, None]]) -> None:
    with serving() as api:
        client = ApiClient(Kubeconfig(kubeconfig(folder, api)))
        asyncio.run(test(api, client))


# --- Events ---------------------------------------------------------------------------------------


class Told:
    """The agent's events and who announces them."""

    def __init__(self, client: ApiClient) -> None:
        self.feed = feed = Feed()
        self.now = 1000.0
        self.connected = True
        self.events = Events(time.time, feed.publish)
        self.announcer = Announcer(
            client, feed, NODE, self._subject, lambda: self.connected, clock=lambda: self.now
        )

    def _subject(self, label: str) -> Subject | None:
        namespace, _, name = label.partition("/")
        if name == "unknown":
            return None
        return Subject(kind="Pod", namespace=namespace, name=name, uid=f"uid-{name}")


def test_event_says_what_happened_to_whom(tmp_path: Path) -> None:
    async def test(api: FakeApi, client: ApiClient) -> None:
        told = Told(client)
        async with at_work(told.announcer.run()):
            await until(lambda: told.feed.watchers)
            told.events.add("captured", "shop/web", "nobody needs to know")
            told.events.add("failed", "shop/unknown", "nobody knows it")
            told.events.add("failed", "shop/web", "x" * 5000)
            await until(lambda: api.all("events"))
            (event,) = api.all("events")
            about = {"apiVersion": "v1", "kind": "Pod", "name": "web", "namespace": "shop"}
            assert event["involvedObject"] == {**about, "uid": "uid-web"}
            assert (event["type"], event["reason"]) == ("Warning", "CaptureFailed")
            assert event["message"] == "x" * 1024
            assert event["firstTimestamp"] == event["lastTimestamp"]
            assert event["reportingInstance"] == NODE

    against(tmp_path, test)


def test_what_is_said_again_is_counted_in_the_event_that_is_there(tmp_path: Path) -> None:
    """Numbers in it do not make it another one; it is counted ten seconds later at the earliest."""

    async def test(api: FakeApi, client: ApiClient) -> None:
        told = Told(client)
        async with at_work(told.announcer.run()):
            await until(lambda: told.feed.watchers)
            for seconds in range(5):
                told.events.add("drift-repaired", "shop/web", f"open for 0.{seconds} s")
                await until(lambda: api.all("events"))
            await asyncio.sleep(0.2)
            assert api.count("PATCH") == 0
            told.now += 11
            told.events.add("drift-repaired", "shop/web", "open for 9 s")
            await until(lambda: api.all("events")[0]["count"] == 6)
            assert api.all("events")[0]["message"] == "open for 9 s"
            assert api.count("POST") == 1
            assert api.count("PATCH") == 1
            api.remove("events", "shop", api.all("events")[0]["metadata"]["name"])
            told.now += 11
            told.events.add("drift-repaired", "shop/web", "open for 1 s")
            await until(lambda: api.count("POST") == 2)  # the server had forgotten it

    against(tmp_path, test)


def test_no_pod_gets_many_events(tmp_path: Path) -> None:
    async def test(api: FakeApi, client: ApiClient) -> None:
        told = Told(client)
        async with at_work(told.announcer.run()):
            await until(lambda: told.feed.watchers)
            for letter in "abcdefghijklmnopqrstuvwxyz":
                told.events.add("failed", "shop/loud", letter)
            told.events.add("failed", "shop/quiet", "a")
            await until(lambda: len(api.all("events")) == 11)
            told.now += 61
            told.events.add("failed", "shop/loud", "later")
            await until(lambda: len(api.all("events")) == 12)
            assert {e["message"] for e in api.all("events")} == {*"abcdefghij", "later"}

    against(tmp_path, test)


def test_full_node_has_an_event_of_every_pod_though_not_all_at_once(tmp_path: Path) -> None:
    async def test(api: FakeApi, client: ApiClient) -> None:
        told = Told(client)
        async with at_work(told.announcer.run()):
            await until(lambda: told.feed.watchers)
            for number in range(BURST + 20):
                told.events.add("leftover", f"shop/pod-{number}", "blackhole: nobody listens")
                await asyncio.sleep(0)
            await until(lambda: len(api.all("events")) == BURST, 60)
            await asyncio.sleep(0.3)
            assert len(api.all("events")) == BURST
            told.now += 2
            await until(lambda: len(api.all("events")) == BURST + 20)

    against(tmp_path, test)


def test_events_wait_for_the_server_and_are_not_lost(tmp_path: Path) -> None:
    async def test(api: FakeApi, client: ApiClient) -> None:
        told = Told(client)
        told.connected = False
        async with at_work(told.announcer.run()):
            await until(lambda: told.feed.watchers)
            for name in ("one", "two"):
                told.events.add("failed", f"shop/{name}", "meanwhile")
            await asyncio.sleep(0.2)
            assert api.requests == []
            told.connected = True
            await until(lambda: len(api.all("events")) == 2)
            api.stop()
            told.events.add("failed", "shop/three", "at the wrong moment")
            await asyncio.sleep(0.5)
            api.start()
            await until(lambda: len(api.all("events")) == 3)

    against(tmp_path, test)


def test_event_that_is_refused_holds_up_no_other(tmp_path: Path) -> None:
    async def test(api: FakeApi, client: ApiClient) -> None:
        told = Told(client)
        api.rights = frozenset()
        async with at_work(told.announcer.run()):
            await until(lambda: told.feed.watchers)
            told.events.add("failed", "shop/one", "refused")
            await until(lambda: "cannot create events" in told.announcer.problem)
            api.rights = None
            told.events.add("failed", "shop/two", "taken")
            await until(lambda: len(api.all("events")) == 1)
            await until(lambda: told.announcer.problem == "")

    against(tmp_path, test)


# --- repair ---------------------------------------------------------------------------------------


class Late:
    """One pod that came late, and who decides about it."""

    def __init__(self, api: FakeApi, client: ApiClient, **policy: str) -> None:
        self.events = Events(time.time)
        self.cache = Cache(NODE, lambda _: None)
        for document in api.all("pods"):
            self.cache.pods.put(document)
        self.uncaptured = True
        self.repair = Repair(
            client,
            Kubernetes(**policy),  # type: ignore[arg-type]
            self.cache,
            self.events,
            lambda _: self.uncaptured,
            started=time.time(),
            own_namespace="mesh-system",
            delete_every_s=0.5,
        )

    def late(
        self, name: str, danger: str = "", namespace: str = "shop", source: str = "cri"
    ) -> str:
        wish = Wish(
            key=f"pod/{namespace}/{name}",
            namespace=namespace,
            name=name,
            uid=f"uid-{name}",
            sandbox_id="s",
            netns=None,
            settings={},
            reason="injected",
            text="",
            source=source,
        )
        return self.repair.late(wish, danger)

    def kinds(self) -> list[object]:
        return [event["kind"] for event in self.events.since(0)]


def labels(api: FakeApi) -> dict[str, str]:
    found: dict[str, str] = api.get("pods", "shop", "web")["metadata"].get("labels", {})
    return found


def test_policy_says_what_becomes_of_a_late_pod(tmp_path: Path) -> None:
    async def test(api: FakeApi, client: ApiClient) -> None:
        api.put("pods", pod("web"))
        assert Late(api, client).late("web") == ""
        risky = Late(api, client).late("web", "its connections would be cut")
        assert risky.startswith("it runs without its capture, and its connections would be cut")
        assert Late(api, client, unsafe="program").late("web", "danger") == ""
        told = Late(api, client, repair="event")
        assert told.late("web") == told.late("web") == "it runs without its capture; it is left so"
        assert told.kinds() == ["uncaptured"]  # once
        for name, document, why in (
            ("kube", pod("kube", namespace="kube-system"), "namespace kube-system is left alone"),
            ("own", pod("own", namespace="mesh-system"), "namespace mesh-system is left alone"),
            ("none", None, "the API server has told nothing of it"),
            ("lonely", pod("lonely", owned=False), "nobody would make another one"),
            ("young", pod("young", created="2999-01-01T00:00:00Z"), "it started after the agent"),
            ("odd", pod("odd", created="yesterday"), "it is deleted"),
        ):
            if document is not None:
                api.put("pods", document)
            late = Late(api, client, repair="delete")
            place = document["metadata"]["namespace"] if document else "shop"
            assert why in late.late(name, namespace=place)

    against(tmp_path, test)


def test_namespace_that_the_configuration_names_is_programmed_by_every_policy(
    tmp_path: Path,
) -> None:
    async def test(api: FakeApi, client: ApiClient) -> None:
        for policy in ("event", "label", "delete"):
            assert Late(api, client, repair=policy).late("one", source="static") == ""

    against(tmp_path, test)


def test_mark_is_taken_away_though_the_watch_has_not_told_of_it(tmp_path: Path) -> None:
    async def test(api: FakeApi, client: ApiClient) -> None:
        api.put("pods", pod("web"))
        late = Late(api, client, repair="label")
        async with at_work(late.repair.run()):
            late.late("web")
            await until(lambda: LABEL in labels(api))
            late.repair.captured("shop/web")
            await until(lambda: LABEL not in labels(api))

    against(tmp_path, test)


def test_pod_that_was_made_anew_is_neither_labelled_nor_deleted(tmp_path: Path) -> None:
    async def test(api: FakeApi, client: ApiClient) -> None:
        for policy in ("label", "delete"):
            api.put("pods", pod("web"))
            late = Late(api, client, repair=policy)
            api.put("pods", pod("web", uid="another"))
            late.late("web")
            async with at_work(late.repair.run()):
                await until(lambda: any("409" in r or "web" in r for r in api.requests))
                await asyncio.sleep(0.2)
            assert late.repair.problem == ""
            found = api.get("pods", "shop", "web")["metadata"]
            assert found["uid"] == "another"
            assert LABEL not in labels(api)
            assert "deletionTimestamp" not in found
            api.requests.clear()

    against(tmp_path, test)


def test_pod_that_is_captured_by_then_is_left_alone(tmp_path: Path) -> None:
    async def test(api: FakeApi, client: ApiClient) -> None:
        api.put("pods", pod("web"))
        late = Late(api, client, repair="delete")
        late.late("web")
        late.uncaptured = False
        async with at_work(late.repair.run()):
            await asyncio.sleep(0.2)
        assert api.requests == []

    against(tmp_path, test)


def test_pod_that_is_deleted_is_left_to_end(tmp_path: Path) -> None:
    """It does so in its own time, and nothing more is to be said of it."""

    async def test(api: FakeApi, client: ApiClient) -> None:
        api.put("pods", pod("web"))
        late = Late(api, client, repair="delete")
        async with at_work(late.repair.run()):
            assert "it is deleted" in late.late("web")
            await until(lambda: "deletionTimestamp" in api.get("pods", "shop", "web")["metadata"])
            told = late.kinds()
            late.cache.pods.put(api.get("pods", "shop", "web"))
            assert "it ends already" in late.late("web")
            await asyncio.sleep(0.2)
            assert late.kinds() == told == ["uncaptured", "deleted"]
            assert api.count("DELETE") == 1

    against(tmp_path, test)


def test_right_to_repair_that_is_missing_is_named_until_it_is_there(tmp_path: Path) -> None:
    async def test(api: FakeApi, client: ApiClient) -> None:
        api.put("pods", pod("web"))
        late = Late(api, client, repair="label")
        api.rights = frozenset()
        async with at_work(late.repair.run()):
            late.late("web")
            await until(lambda: "cannot patch pods" in late.repair.problem)
            api.rights = None
            late.late("web")
            await until(lambda: LABEL in labels(api))
            await until(lambda: late.repair.problem == "")

    against(tmp_path, test)


def test_repair_waits_for_the_server(tmp_path: Path) -> None:
    async def test(api: FakeApi, client: ApiClient) -> None:
        api.put("pods", pod("web"))
        late = Late(api, client, repair="label")
        api.stop()
        late.late("web")
        async with at_work(late.repair.run()):
            await asyncio.sleep(0.3)
            api.start()
            await until(lambda: LABEL in labels(api))

    against(tmp_path, test)


# --- taint ----------------------------------------------------------------------------------------


def taints(api: FakeApi) -> object:
    return api.get("nodes", "", NODE)["spec"].get("taints")


def test_taint_follows_the_agent_and_no_other_is_touched(tmp_path: Path) -> None:
    async def test(api: FakeApi, client: ApiClient) -> None:
        ours = {"key": TAINT, "effect": "NoSchedule"}
        born = [OTHER, {**ours, "value": "x"}, {"key": TAINT, "effect": "NoExecute"}]
        api.put("nodes", {"metadata": {"name": NODE}, "spec": {"taints": born}})
        ready = [False]
        keeper = TaintKeeper(client, NODE, TAINT, lambda: ready[0], patience_s=1.5)
        async with at_work(keeper.run()):
            await asyncio.sleep(0.3)
            assert taints(api) == born
            ready[0] = True
            await until(lambda: taints(api) == [OTHER])
            ready[0] = False
            await asyncio.sleep(0.6)
            assert taints(api) == [OTHER]  # it may be ready again in a moment
            await until(lambda: taints(api) == [OTHER, ours])
            ready[0] = True
            await until(lambda: taints(api) == [OTHER])

    against(tmp_path, test)


def test_node_that_is_not_ready_at_the_start_is_tainted_at_once(tmp_path: Path) -> None:
    async def test(api: FakeApi, client: ApiClient) -> None:
        api.put("nodes", {"metadata": {"name": NODE}, "spec": {}})
        keeper = TaintKeeper(client, NODE, TAINT, lambda: False, patience_s=3600)
        async with at_work(keeper.run()):
            await until(lambda: taints(api) == [{"key": TAINT, "effect": "NoSchedule"}])

    against(tmp_path, test)


def test_what_others_write_to_the_node_meanwhile_is_kept(tmp_path: Path) -> None:
    """The write is of a version, is refused if there is a newer one, and made anew."""

    async def test(api: FakeApi, client: ApiClient) -> None:
        born = [{"key": TAINT, "effect": "NoSchedule"}]
        api.put("nodes", {"metadata": {"name": NODE}, "spec": {"taints": born}})
        patched = api.patch

        def after_another(resource: str, key: tuple[str, str], body: dict[str, Any]) -> Any:
            if "meddled" not in api.get("nodes", "", NODE)["metadata"]:
                patch = {"metadata": {"meddled": True}, "spec": {"taints": [*born, OTHER]}}
                api.change("nodes", "", NODE, patch)
            return patched(resource, key, body)

        api.patch = after_another  # type: ignore[method-assign]
        keeper = TaintKeeper(client, NODE, TAINT, lambda: True)
        async with at_work(keeper.run()):
            await until(lambda: taints(api) == [OTHER])

    against(tmp_path, test)


@pytest.mark.parametrize("missing", ["right", "node"])
def test_node_that_cannot_be_written_is_tried_again(tmp_path: Path, missing: str) -> None:
    async def test(api: FakeApi, client: ApiClient) -> None:
        born = {"metadata": {"name": NODE}, "spec": {"taints": [{"key": TAINT}]}}
        if missing == "right":
            api.rights = frozenset()
            api.put("nodes", born)
        keeper = TaintKeeper(client, NODE, TAINT, lambda: True)
        async with at_work(keeper.run()):
            await until(lambda: api.count("GET") >= 2)
            assert ("cannot get nodes" if missing == "right" else "404") in keeper.problem
            api.rights = None
            api.put("nodes", born)
            await until(lambda: not taints(api))
            await until(lambda: keeper.problem == "")

    against(tmp_path, test)
