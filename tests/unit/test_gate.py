"""The gate's decisions: how it stands, who is let pass, and which containers those are."""

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from agent.capture.gate import as_applied, settled, stands
from agent.capture.record import Record
from agent.formats.iptables_save import parse as parse_rules
from agent.kernel import cgroups
from agent.kernel.folders import FolderWatch
from agent.model.annotations import STATUS, init_names
from agent.model.enrolment import Enrolment
from agent.model.pod import Container as Spec
from agent.model.pod import Pod
from agent.model.ruleset import Family
from agent.model.settings import parse
from agent.model.state import EBPF, NFTABLES, NamespaceState
from agent.model.wanted import Before
from agent.node.cri.details import Container, cgroup_of
from agent.node.gate import CLOSED, LISTENER, OPEN, Gate
from agent.node.init_watch import passing

A, B = "/kubepods/pod1/a", "/kubepods/pod1/b"
EMPTY = NamespaceState()
RULES = parse_rules("*nat\n:OUTPUT ACCEPT [0:0]\n-A OUTPUT -j ISTIO_OUTPUT\nCOMMIT\n", Family.IPV4)
CAPTURED = NamespaceState(loaded={NFTABLES: {Family.IPV4: RULES}})


def on_record(**settings: object) -> Record:
    return Record(settings, Before())


def enrolled(gate: str, *, listened: bool = False, cgroups: tuple[str, ...] = ()) -> NamespaceState:
    settings = parse({"gate": gate, "init_cgroups": list(cgroups)})
    return NamespaceState(enrolment=Enrolment(settings, listened=listened))


# --- how it stands --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("have", "found", "expected"),
    [
        (EMPTY, None, None),
        (CAPTURED, None, "closed"),
        (CAPTURED, on_record(gate="listener"), "listener"),
        (CAPTURED, on_record(gate="closed"), "closed"),
        (CAPTURED, on_record(), "closed"),
        (EMPTY, on_record(gate="closed"), "closed"),
        (enrolled("open"), None, "open"),
        (enrolled("open", listened=True), None, "closed"),
        (enrolled("listener"), on_record(gate="closed"), "listener"),
        (enrolled("listener", listened=True, cgroups=(A,)), None, "closed"),
        # Nobody passed yet: it may have been the container that tries the capture.
        (enrolled("listener", listened=True), None, "listener"),
    ],
)
def test_gate_stands_as_it_was_left(
    have: NamespaceState, found: Record | None, expected: str | None
) -> None:
    assert stands(have, found) == expected


@pytest.mark.parametrize(
    ("wished", "backend", "have", "found", "listening", "expected"),
    [
        ("listener", NFTABLES, EMPTY, None, False, ("listener", (A,))),
        ("listener", NFTABLES, EMPTY, None, True, ("closed", ())),
        ("listener", NFTABLES, CAPTURED, on_record(gate="closed"), False, ("closed", ())),
        ("listener", NFTABLES, CAPTURED, None, False, ("closed", ())),
        ("open", NFTABLES, EMPTY, None, False, ("closed", ())),
        ("open", EBPF, EMPTY, None, False, ("open", (A,))),
        ("open", EBPF, EMPTY, None, True, ("open", ())),
        ("open", EBPF, enrolled("open", listened=True), None, False, ("open", ())),
        ("open", EBPF, enrolled("closed"), None, False, ("closed", ())),
        ("open", EBPF, CAPTURED, on_record(gate="closed"), False, ("closed", ())),
        ("closed", EBPF, enrolled("open"), None, False, ("closed", (A,))),
    ],
)
def test_once_closed_is_closed_for_good(
    wished: str,
    backend: str,
    have: NamespaceState,
    found: Record | None,
    listening: bool,
    expected: tuple[str, tuple[str, ...]],
) -> None:
    settings = parse({"gate": wished, "init_cgroups": A})
    now = settled(settings, have, found, backend, listening=listening)
    assert (now.gate, now.init_cgroups) == expected
    again = settled(now, have, found, backend, listening=listening)
    assert again.gate in (now.gate, "closed")


def test_what_is_compared_is_the_gate_as_it_was_applied() -> None:
    wished = parse({"gate": "listener", "init_cgroups": [A]})
    there = as_applied(wished, CAPTURED, on_record(gate="listener", init_cgroups=[B]))
    assert (there.gate, there.init_cgroups) == ("listener", (B,))
    assert as_applied(wished, CAPTURED, None).gate == "closed"
    assert as_applied(parse({}), CAPTURED, on_record(gate="listener")).gate == "closed"


@pytest.mark.parametrize("path", ["", "a//b", "/a/../b", ".", '/a"b', "/a b", "/" + "x" * 600])
def test_what_is_no_path_of_a_cgroup_is_no_setting(path: str) -> None:
    with pytest.raises(Exception, match="no path of a cgroup"):
        parse({"init_cgroups": [path or "/"]})


# --- as the reconciler keeps it -------------------------------------------------------------------


class Scene:
    """A gate, and the end of the pipe by which to tell it that the proxy listens."""

    def __init__(self) -> None:
        self.woken = 0
        self.heard = asyncio.Event()
        self.gate = Gate(self._wake).of("s1")
        self.pipe = -1

    def _wake(self) -> None:
        self.woken += 1
        self.heard.set()

    async def follow(self, stands: str) -> None:
        async def ask(pipe: int) -> Mapping[str, object]:
            self.pipe = os.dup(pipe)
            return {"gate": stands}

        await self.gate.follow(ask)

    async def listen(self) -> None:
        self.heard.clear()
        os.write(self.pipe, b"!")
        os.close(self.pipe)
        await self.heard.wait()


def test_whom_it_lets_pass_is_due_until_it_is_loaded() -> None:
    gate = Scene().gate
    assert not gate.due(LISTENER)
    gate.let_pass((A,))
    assert gate.due(LISTENER)
    assert not gate.due(CLOSED)
    assert not gate.due(OPEN)
    assert gate.settings(LISTENER) == {"gate": LISTENER, "init_cgroups": (A,)}
    gate.loaded()
    assert not gate.due(LISTENER)
    assert gate.settings(CLOSED)["init_cgroups"] == ()
    gate.let_pass(())
    assert gate.due(LISTENER)


def test_nothing_is_done_about_those_who_pass_already() -> None:
    """The next to be told of would wait for it: a pod is looked at by one at a time."""
    scene = Scene()
    scene.gate.settings(LISTENER)
    scene.gate.loaded()
    scene.gate.let_pass(())
    assert scene.woken == 0
    scene.gate.let_pass((A,))
    assert scene.woken == 1
    scene.gate.settings(LISTENER)  # which is being loaded when there is nobody any more
    scene.gate.let_pass(())
    assert scene.woken == 2


def test_nobody_is_let_pass_again_once_the_proxy_listened() -> None:
    async def part() -> None:
        scene = Scene()
        gate = scene.gate
        gate.let_pass((A,))
        await scene.follow("armed")
        assert "init containers" in gate.text(LISTENER)
        await scene.listen()
        assert gate.settings(LISTENER) == {"gate": CLOSED, "init_cgroups": ()}
        gate.loaded()
        gate.let_pass((B,))
        assert not gate.due(LISTENER)
        assert gate.text(LISTENER) == ""
        assert gate.settings(LISTENER) == {"gate": CLOSED, "init_cgroups": ()}
        # Another sandbox is another namespace.
        assert gate.of("s2").settings(LISTENER) == {"gate": LISTENER, "init_cgroups": ()}
        gate.close()

    asyncio.run(part())


def test_those_of_whom_it_cannot_be_loaded_wait_until_there_are_others() -> None:
    scene = Scene()
    scene.gate.let_pass((A,))
    scene.gate.settings(LISTENER)
    assert scene.gate.refuse() == (A,)
    assert scene.gate.settings(LISTENER)["init_cgroups"] == ()
    assert scene.gate.refuse() == ()
    woken = scene.woken
    scene.gate.let_pass((A,))
    assert scene.woken == woken
    assert scene.gate.settings(LISTENER)["init_cgroups"] == ()
    scene.gate.let_pass((A, B))
    assert scene.gate.settings(LISTENER)["init_cgroups"] == (A, B)
    scene.gate.let_pass((B,))  # while that could not be loaded
    assert scene.gate.refuse() == (A, B)
    assert scene.gate.settings(LISTENER)["init_cgroups"] == (B,)


# --- which containers -----------------------------------------------------------------------------


def pod(**fields: object) -> Pod:
    return Pod(namespace="shop", name="web", **fields)  # type: ignore[arg-type]


def test_init_containers_are_those_of_the_pod_but_for_the_meshs_own() -> None:
    specs = (
        Spec(name="istio-validation", init=True),
        Spec(name="istio-proxy", init=True, restart_policy="Always"),
        Spec(name="migrate", init=True),
        Spec(name="fetch", init=True, restart_policy="Always"),
        Spec(name="app"),
    )
    lying = {STATUS: '{"initContainers": ["app"]}'}
    assert init_names(pod(containers=specs, annotations=lying)) == ("fetch", "migrate")


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        ('{"initContainers": ["istio-validation", "vault"], "containers": ["x"]}', ("vault",)),
        ('{"initContainers": ["vault", "both"], "containers": ["both"]}', ("vault",)),
        ('{"initContainers": ["istio-proxy"], "containers": null}', ()),
        ('{"initContainers": "vault"}', ()),
        ('{"initContainers": [1, null]}', ()),
        ("[]", ()),
        ("not JSON", ()),
    ],
)
def test_of_an_unknown_pod_those_that_the_injector_added(
    status: str, expected: tuple[str, ...]
) -> None:
    assert init_names(pod(annotations={STATUS: status})) == expected


def test_of_a_pod_of_which_nothing_is_known_there_are_none() -> None:
    assert init_names(pod()) == ()


def container(name: str, cgroup: str | None = A) -> Container:
    return Container(
        id=name,
        sandbox_id="s1",
        name=name,
        attempt=0,
        running=True,
        created_at_ns=1,
        cgroup=cgroup,
    )


def test_init_containers_with_a_cgroup_pass_until_the_proxys_container_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cgroups, "identity", {A: 1, "/other": 2}.get)
    names = frozenset({"fetch", "migrate"})
    there = [container("fetch"), container("migrate", B), container("app", "/other")]
    assert passing(there, names) == (A,)
    assert passing([*there, container("migrate", None)], names) == (A,)
    assert passing([*there, container("istio-proxy", None)], names) is None


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("/kubepods/pod1/abc", "/kubepods/pod1/abc"),
        (
            "kubepods-burstable-pod1.slice:cri-containerd:abc",
            "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod1.slice/"
            "cri-containerd-abc.scope",
        ),
        ("system.slice:crio:abc", "/system.slice/crio-abc.scope"),
        ("", None),
        ("/a/../b", None),
        ("a b", None),
    ],
)
def test_cgroup_is_where_the_runtime_puts_it(text: str, path: str | None) -> None:
    assert cgroup_of(text) == path


# --- folders --------------------------------------------------------------------------------------


def test_folder_is_heard_of_until_it_is_left(tmp_path: Path) -> None:
    async def part() -> None:
        heard: list[str] = []
        events = {name: asyncio.Event() for name in ("one", "two")}
        watch = FolderWatch()
        for name, event in events.items():
            (tmp_path / name).mkdir()
            watch.add(str(tmp_path / name), event.set)
        (tmp_path / "one" / "new").mkdir()
        async with asyncio.timeout(10):
            await events["one"].wait()
        assert not events["two"].is_set()
        watch.remove(events["one"].set)
        events["one"].clear()
        (tmp_path / "one" / "newer").mkdir()
        (tmp_path / "two" / "new").mkdir()
        async with asyncio.timeout(10):
            await events["two"].wait()
        assert not events["one"].is_set()
        with pytest.raises(OSError, match="No such file"):
            watch.add(str(tmp_path / "never"), lambda: heard.append("never"))
        watch.close()

    asyncio.run(part())
