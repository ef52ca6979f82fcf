"""What sources say becomes wishes; what is decided about a pod can be explained."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from agent.model.annotations import EXCLUDE_INBOUND, STATUS
from agent.model.pod import Container, Pod, Policy
from agent.node.config import Config
from agent.node.events import Events
from agent.node.explanation import explain
from agent.node.memory import Memory
from agent.node.reconciler import Reconciler
from agent.node.roster import PLUGIN, Roster
from agent.node.source import Changed, Gone, NoFacts, PodRecord, Snapshot
from tests.unit.test_reconciler import FakeJobs, FakeMeter

WEB = PodRecord(
    namespace="shop",
    name="web",
    uid="u1",
    sandbox_id="s1",
    netns="/proc/self/ns/net",
    annotations={STATUS: "{}", EXCLUDE_INBOUND: "9000"},
)
PLAIN = replace(WEB, name="plain", uid="u2", sandbox_id="s9", annotations={})
STATIC = replace(WEB, namespace="static", name="one", uid="", settings={"redirect_dns": "true"})
POLICY = Policy(exclude_namespaces=(), defaults={"drop_invalid": "true"})


class Scene:
    def __init__(self, folder: Path) -> None:
        self.jobs = FakeJobs()
        self.reconciler = Reconciler(
            self.jobs, Events(lambda: 0.0), FakeMeter(), mode="repair", backend="auto", guard="off"
        )
        self.memory = Memory(folder)
        self.told: list[tuple[str, str, str]] = []
        self.roster = Roster(
            self.reconciler, self.memory, POLICY, tell=lambda *one: self.told.append(one)
        )

    def captured(self) -> dict[str, bool]:
        pods = self.reconciler.pods.values()
        return {pod.wish.name: pod.wish.settings is not None for pod in pods}

    async def explain(self, key: str) -> Any:
        return await explain(self.reconciler.pods[key], self.roster, self.reconciler, Config())


def play(folder: Path, part: Callable[[Scene], Awaitable[None]]) -> None:
    async def run() -> None:
        scene = Scene(folder)
        try:
            await part(scene)
        finally:
            await scene.reconciler.close()

    asyncio.run(run())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event of its own
            await asyncio.sleep(0.001)


def test_pods_follow_what_their_own_source_says(tmp_path: Path) -> None:
    async def part(scene: Scene) -> None:
        scene.roster.hear("cri", Snapshot(source="cri", pods=(WEB, PLAIN)))
        scene.roster.hear("static", Changed(source="static", pod=STATIC))
        assert scene.captured() == {"web": True, "plain": False, "one": True}
        scene.roster.hear("static", Gone(source="static", key=WEB.key))  # not its pod
        scene.roster.hear("cri", Snapshot(source="cri", pods=(), unknown=frozenset({PLAIN.key})))
        await until(lambda: scene.captured() == {"plain": False, "one": True})
        assert set(scene.roster.entries) == {"pod/shop/plain/u2", "static/static/one/"}

    play(tmp_path, part)


def test_sandbox_that_ends_is_not_kept_again_while_the_runtime_lists_it(tmp_path: Path) -> None:
    """It is listed as ready until its last process has ended; its namespace goes before that."""

    async def part(scene: Scene) -> None:
        listed = Snapshot(source="cri", pods=(WEB, PLAIN))
        scene.roster.hear("cri", listed)
        scene.roster.end("s1")
        await scene.roster.forget("pod/shop/web/u1")
        scene.roster.hear("cri", listed)
        scene.roster.hear("cri", Changed(source="cri", pod=WEB))
        assert scene.captured() == {"plain": False}
        scene.roster.hear("cri", Changed(source="cri", pod=replace(WEB, sandbox_id="s2")))
        assert scene.captured() == {"web": True, "plain": False}
        await scene.roster.forget("pod/shop/web/u1")
        scene.roster.begin("s1")
        scene.roster.hear("cri", listed)
        assert scene.captured() == {"web": True, "plain": False}

    play(tmp_path, part)


def test_pod_of_a_call_without_a_uid_is_the_one_that_the_runtime_tells_of(tmp_path: Path) -> None:
    """As with Docker, whose runtime does not tell where the namespace is either."""

    async def part(scene: Scene) -> None:
        kept = scene.roster.describe(PLUGIN, replace(WEB, uid=""))
        await scene.reconciler.enrol(kept)
        scene.memory.keep(kept.wish)
        scene.roster.hear("cri", Changed(source="cri", pod=replace(WEB, netns=None)))
        assert list(scene.reconciler.pods) == ["pod/shop/web/u1"]
        assert scene.reconciler.pods["pod/shop/web/u1"] is kept
        await until(lambda: kept.state == "in-sync" and kept.wish.source == "cri")
        assert kept.wish.netns == WEB.netns
        assert scene.jobs.done.count("apply") == 1
        assert scene.memory.load() == []
        other = replace(WEB, uid="u9", sandbox_id="s9")
        scene.roster.hear("cri", Changed(source="cri", pod=other))
        assert len(scene.reconciler.pods) == 2

    play(tmp_path, part)


def test_pod_that_only_the_plugin_told_of_ends_with_its_namespace(tmp_path: Path) -> None:
    space = tmp_path / "space"
    space.symlink_to("/proc/self/ns/net")

    async def part(scene: Scene) -> None:
        told = scene.roster.describe(PLUGIN, replace(WEB, netns=str(space)))
        listed = replace(WEB, name="listed", netns=str(tmp_path / "never"))
        scene.roster.hear("cri", Changed(source="cri", pod=listed))
        await until(lambda: told.state == "in-sync")
        await scene.roster.let_go()
        assert scene.captured() == {"web": True, "listed": True}
        space.unlink()
        told.wake.set()
        await until(lambda: told.state == "failed")
        await scene.roster.let_go()
        assert scene.captured() == {"listed": True}

    play(tmp_path / "state", part)


def test_sandbox_that_no_rule_reaches_is_known_by_the_word_of_the_runtime(tmp_path: Path) -> None:
    """Nobody may know its class: without an API server nobody does."""

    async def part(scene: Scene) -> None:
        web = scene.roster.describe("cri", replace(WEB, runtime_handler="runsc"))
        assert (web.wish.settings, web.wish.reason) == (None, "runtime-class")
        assert scene.told == [("refused", "shop/web", web.wish.text)]
        assert "the runtime's handler is 'runsc'" in web.wish.text
        scene.roster.describe("cri", replace(WEB, name="api", uid="u3", runtime_handler="runc"))
        assert scene.captured() == {"web": False, "api": True}
        scene.roster.facts = Says()
        named = scene.roster.describe("cri", replace(WEB, runtime_handler="kata-qemu"))
        assert named.wish.settings is None

    play(tmp_path, part)


def test_another_policy_counts_for_the_pods_that_are_there(tmp_path: Path) -> None:
    async def part(scene: Scene) -> None:
        scene.roster.describe(PLUGIN, WEB)
        scene.roster.describe("static", STATIC)
        scene.roster.decide_again(Policy(exclude_namespaces=("shop", "static")))
        assert scene.captured() == {"web": False, "one": True}
        scene.roster.decide_again(POLICY)
        assert scene.captured() == {"web": True, "one": True}

    play(tmp_path, part)


def test_pods_of_a_source_that_is_given_up_are_kept_if_the_plugin_told_of_them(
    tmp_path: Path,
) -> None:
    async def part(scene: Scene) -> None:
        scene.memory.keep(scene.roster.describe(PLUGIN, WEB).wish)
        scene.roster.hear("cri", Snapshot(source="cri", pods=(WEB, PLAIN)))
        assert {pod.wish.source for pod in scene.reconciler.pods.values()} == {"cri"}
        await scene.roster.leave("cri")
        await until(lambda: scene.captured() == {"web": True})
        assert {pod.wish.source for pod in scene.reconciler.pods.values()} == {PLUGIN}

    play(tmp_path, part)


class Says(NoFacts):
    """An API server that knows one pod."""

    def pod(self, namespace: str, name: str, uid: str) -> Pod | None:
        names = {"migrate": True, "istio-proxy": False, "app": False}
        containers = tuple(Container(name=one, init=init) for one, init in names.items())
        return Pod(
            namespace=namespace,
            name=name,
            uid=uid,
            annotations={STATUS: "{}"},
            containers=containers,
        )


def test_init_containers_are_those_that_the_api_server_tells_and_are_remembered(
    tmp_path: Path,
) -> None:
    async def part(scene: Scene) -> None:
        assert scene.roster.describe("cri", WEB).wish.init_names == ()
        scene.roster.facts = Says()
        wish = scene.roster.describe(PLUGIN, WEB).wish
        assert wish.init_names == ("migrate",)
        scene.memory.keep(wish)
        assert scene.memory.load() == [wish]

    play(tmp_path, part)


def test_explanation_says_what_decided_each_setting(tmp_path: Path) -> None:
    async def part(scene: Scene) -> None:
        scene.roster.describe("cri", WEB)
        found = await scene.explain("pod/shop/web/u1")
        settings = {one["name"]: (one["value"], one["by"]) for one in found["settings"]}
        said = {name: settings[name] for name in ("inbound_ports_exclude", "drop_invalid")}
        assert said == {
            "inbound_ports_exclude": (
                "9000,15020,15021,15090",
                f"annotation {EXCLUDE_INBOUND}",
            ),
            "drop_invalid": ("true", "the agent's configuration"),
        }
        assert settings["outbound_ip_ranges_include"] == ("*", "Istio's default for a sidecar")
        assert settings["proxy_port"] == ("15001", "default")
        assert settings["enable_ipv6"] == ("auto", "found out in its namespace")
        assert settings["guard"] == ("off", "the agent's configuration")
        assert settings["gate"] == ("closed", "the agent's configuration")
        assert found["decision"]["captured"] is True
        assert STATUS in found["decision"]["text"]
        assert found["findings"]["differences"] == ("+ nat: -A OUTPUT -j ISTIO_OUTPUT",)
        assert "apply" not in scene.jobs.done

    play(tmp_path, part)


def test_explanation_of_a_named_namespace_points_to_the_configuration(tmp_path: Path) -> None:
    async def part(scene: Scene) -> None:
        scene.roster.describe("static", STATIC)
        found = await scene.explain("static/static/one/")
        settings = {one["name"]: (one["value"], one["by"]) for one in found["settings"]}
        assert settings["redirect_dns"] == ("true", "static in the agent's configuration")
        assert settings["dns_servers_v4"] == ("auto", "found out in its namespace")
        assert found["decision"]["reason"] == "static"

    play(tmp_path, part)


def test_explanation_of_a_pod_that_is_left_alone_says_why_and_looks_at_nothing(
    tmp_path: Path,
) -> None:
    async def part(scene: Scene) -> None:
        scene.roster.describe("cri", PLAIN)
        wrong = {**WEB.annotations, EXCLUDE_INBOUND: "70000"}
        scene.roster.describe("cri", replace(WEB, annotations=wrong))
        plain = await scene.explain("pod/shop/plain/u2")
        assert plain["decision"]["reason"] == "not-injected"
        assert not {"settings", "findings"} & set(plain)
        refused = await scene.explain("pod/shop/web/u1")
        assert refused["decision"]["reason"] == "invalid-annotations"
        [problem] = refused["decision"]["problems"]
        assert problem.startswith(f"annotation {EXCLUDE_INBOUND}: ")
        assert scene.jobs.done == []

    play(tmp_path, part)


def test_explanation_says_why_a_namespace_cannot_be_looked_at(tmp_path: Path) -> None:
    async def part(scene: Scene) -> None:
        scene.roster.describe("cri", replace(WEB, netns="/run/netns/it-never"))
        found = await scene.explain("pod/shop/web/u1")
        assert "/run/netns/it-never cannot be opened" in found["findings"]["error"]

    play(tmp_path, part)
