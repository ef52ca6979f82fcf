"""CNI calls to a running agent: what it remembers of attachments, and odd calls."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.agent import ARGS, INJECTED, RESULT, Agent, running, wait_for
from tests.support.cni_program import Program
from tests.support.netns import inside, namespace, run
from tests.support.runtime import Runtime

TABLE = "table inet intercept-agent"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def agent(folder: Path) -> Iterator[Agent]:
    with running(folder) as found:
        yield found


def named(name: str) -> str:
    return ARGS.replace("web", name).replace("u1", f"uid-{name}")


def known(agent: Agent) -> set[str]:
    return {pod["name"] for pod in agent.ask("pods")}


def attachments(*containers: str) -> list[dict[str, str]]:
    return [{"containerID": container, "ifname": "eth0"} for container in containers]


def collect(agent: Agent, conf: dict[str, object], name: str = "net") -> tuple[int, Any]:
    return agent.cni("GC", "", conf={"cniVersion": "1.1.0", "name": name, **conf})


def test_gc_forgets_what_is_gone_of_its_network_and_touches_no_capture(
    folder: Path, netns: str
) -> None:
    key, older = "cni.dev/valid-attachments", "cni.dev/attachments"  # libcni sends both
    with running(folder) as agent, namespace("second") as second, namespace("third") as third:
        for name, where, network in (("a", netns, "net"), ("b", second, "net"), ("c", third, "x")):
            done = agent.cni(
                "ADD", where, container=f"id-{name}", args=named(name), conf={"name": network}
            )
            assert done == (0, RESULT)
        before = inside(second, "nft", "-a", "list", "ruleset")
        assert collect(agent, {key: attachments("id-a")}) == (0, None)
        assert known(agent) == {"a", "c"}
        assert collect(agent, {older: attachments("id-c", "id-of-nobody")}, "x") == (0, None)
        assert known(agent) == {"a", "c"}
        assert inside(second, "nft", "-a", "list", "ruleset") == before
        agent.stop()
        agent.start()  # nor is it remembered over a restart
        assert known(agent) == {"a", "c"}
        assert collect(agent, {key: None}) == (0, None)  # the empty list of a runtime in Go
        assert known(agent) == {"c"}
        wait_for(lambda: agent.state("c") == "in-sync")


def test_gc_without_a_list_forgets_nothing(agent: Agent, netns: str) -> None:
    agent.cni("ADD", netns)
    assert collect(agent, {}) == (0, None)
    wrong: tuple[object, ...] = ("id", "", {}, ["id"])
    for odd in wrong:
        status, answer = collect(agent, {"cni.dev/valid-attachments": odd})
        assert (status, answer["code"]) == (1, 6)
    assert known(agent) == {"web"}


def test_static_program_is_served_as_the_python_one_is(
    folder: Path, netns: str, static_cni: Program
) -> None:
    newest = {"cniVersion": "1.1.0", "prevResult": {**RESULT, "cniVersion": "1.1.0"}}
    with running(folder, mode="alert") as agent:
        agent.plugin = static_cni.words
        assert agent.cni("STATUS", "", conf=newest) == (0, None)
        assert agent.cni("ADD", netns, conf=newest) == (0, newest["prevResult"])
        assert TABLE in inside(netns, "nft", "list", "ruleset")
        assert agent.cni("CHECK", netns) == (0, None)
        inside(netns, "nft", "delete", "table", "inet", "intercept-agent")
        status, answer = agent.cni("CHECK", netns)
        assert (status, answer["code"]) == (1, 102)
        assert "shop/web is not captured as it should be: " in answer["msg"]
        assert agent.cni("DEL", netns) == (0, None)
        assert known(agent) == set()
        status, answer = agent.cni("ADD", "/nowhere", container="\udcff")
        assert (status, answer["code"]) == (1, 11)
        assert "/nowhere" in answer["msg"]


def test_second_network_of_a_pod_does_not_end_it(folder: Path, netns: str) -> None:
    with running(folder) as agent:
        agent.cni("ADD", netns, conf={"name": "first"})
        agent.cni("ADD", netns, conf={"name": "second"})
        collect(agent, {"cni.dev/valid-attachments": []}, "second")
        assert known(agent) == {"web"}
        collect(agent, {"cni.dev/valid-attachments": []}, "first")
        assert known(agent) == set()


def test_late_del_of_an_older_sandbox_leaves_the_pods_new_one(folder: Path, netns: str) -> None:
    with running(folder) as agent, namespace("second") as second:
        assert agent.cni("ADD", netns, container="old")[0] == 0
        assert agent.cni("ADD", second, container="new")[0] == 0
        assert agent.cni("DEL", "", container="old") == (0, None)
        pod = agent.pod("web")
        assert pod is not None
        assert pod["netns"] == f"/run/netns/{second}"
        inside(second, "nft", "delete", "table", "inet", "intercept-agent")
        wait_for(lambda: TABLE in inside(second, "nft", "list", "ruleset"))
        assert agent.cni("DEL", "", container="new") == (0, None)
        assert known(agent) == set()


def test_calls_without_a_uid_are_about_the_pod_of_their_sandbox(folder: Path, netns: str) -> None:
    without = ARGS.replace("K8S_POD_UID=u1;", "")
    with (
        Runtime(folder / "runtime.sock") as runtime,
        running(folder, cri={"endpoint": str(runtime.socket)}) as agent,
    ):
        assert agent.cni("ADD", netns, args=without, container="web") == (0, RESULT)
        runtime.run("web", netns, annotations=INJECTED)
        wait_for(lambda: [pod["source"] for pod in agent.ask("pods")] == ["cri"])
        assert agent.cni("ADD", netns, args=without, container="web") == (0, RESULT)
        assert agent.cni("CHECK", netns, args=without, container="web") == (0, None)
        (pod,) = agent.ask("pods")
        assert (pod["uid"], pod["state"]) == ("web", "in-sync")
        runtime.cri.sandboxes.clear()
        assert agent.cni("DEL", netns, args=without, container="web") == (0, None)
        assert known(agent) == set()


def test_pods_without_names_of_kubernetes_are_told_apart(folder: Path, netns: str) -> None:
    with running(folder) as agent, namespace("second") as second:
        for where in (netns, second):
            assert agent.cni("ADD", where, container=where, args="") == (0, RESULT)
            assert TABLE in inside(where, "nft", "list", "ruleset")
        assert len(agent.ask("pods")) == 2
        assert agent.cni("DEL", "", container=netns, args="") == (0, None)
        assert [pod["netns"] for pod in agent.ask("pods")] == [f"/run/netns/{second}"]


ODD_ARGUMENTS = (
    "",
    ";;;",
    "K8S_POD_NAMESPACE",
    "=",
    "K8S_POD_NAME=../../etc/passwd;K8S_POD_NAMESPACE=shop",
    "K8S_POD_NAME=a b;K8S_POD_NAMESPACE=\n",
    "K8S_POD_NAME=" + "x" * 100_000,
    "K8S_POD_NAME=\udcff;K8S_POD_NAMESPACE=\udcff;K8S_POD_UID=\udcff",
    "K8S_POD_NAME=web;K8S_POD_NAME=db;K8S_POD_NAMESPACE=shop",
)


def test_odd_arguments_are_answered_in_words(agent: Agent, netns: str) -> None:
    for args in ODD_ARGUMENTS:
        status, answer = agent.cni("ADD", netns, args=args, annotations={})
        assert status == 0 or (answer["code"] == 11 and "CNI_ARGS" in answer["msg"])
        status, answer = agent.cni("ADD", netns, args=args)
        assert status == 0 or "CNI_ARGS" in answer["msg"]
        assert agent.cni("DEL", netns, args=args) == (0, None)
        assert known(agent) == set()


def test_namespace_that_is_none_is_refused_in_words(agent: Agent, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    run("mkfifo", str(tmp_path / "fifo"))
    paths = [str(tmp_path / name) for name in ("file", "fifo", "absent")]
    for path in (*paths, str(tmp_path), "/dev/null", "/proc/self/ns/mnt", "/proc/1/ns/net"):
        for verb in ("ADD", "CHECK"):
            status, answer = agent.cni(verb, path)
            assert status == 1, path
            assert "bug" not in answer["msg"]
            assert "log" not in answer["msg"]
            assert path in answer["msg"], answer
        assert agent.cni("DEL", path) == (0, None)


def test_lo_that_comes_up_beside_the_chain_is_waited_for(agent: Agent) -> None:
    tproxy = {**INJECTED, "sidecar.istio.io/interceptionMode": "TPROXY"}
    with namespace("late", lo_up=False) as late, ThreadPoolExecutor() as pool:
        call = pool.submit(agent.cni, "ADD", late, annotations=tproxy)
        run("ip", "-n", late, "link", "set", "lo", "up")
        assert call.result() == (0, RESULT)
    with namespace("down", lo_up=False) as down:
        status, answer = agent.cni("ADD", down, args=named("down"), annotations=tproxy)
        assert (status, "lo is down" in answer["msg"]) == (1, True)


def test_runtime_that_passes_an_empty_set_of_annotations_as_null(agent: Agent, netns: str) -> None:
    conf = {"runtimeConfig": {"io.kubernetes.cri.pod-annotations": None}}
    assert agent.cni("ADD", netns, annotations=None, conf=conf) == (0, RESULT)


def test_pod_whose_annotations_the_runtime_does_not_pass(agent: Agent, netns: str) -> None:
    status, answer = agent.cni("ADD", netns, annotations=None)
    assert status == 1
    assert "annotations of shop/web are not known" in answer["msg"]
    assert agent.cni("ADD", netns, annotations=None, conf={"failurePolicy": "open"}) == (0, RESULT)
    system = ARGS.replace("shop", "kube-system")
    assert agent.cni("ADD", netns, annotations=None, args=system) == (0, RESULT)


@pytest.mark.parametrize(
    ("tampering", "said"),
    [
        ("flush chain inet intercept-agent nat-PREROUTING", "nat: chain PREROUTING: "),
        ("insert rule inet intercept-agent nat-OUTPUT accept", "nat: chain OUTPUT: "),
        ("delete table inet intercept-agent", "+ nftables ipv4 nat: -A PREROUTING -p tcp -j"),
    ],
    ids=["flushed", "inserted", "deleted"],
)
def test_check_names_what_differs(folder: Path, netns: str, tampering: str, said: str) -> None:
    with running(folder, mode="alert") as agent:
        assert agent.cni("ADD", netns) == (0, RESULT)
        inside(netns, "nft", *tampering.split())
        status, answer = agent.cni("CHECK", netns)
        assert (status, answer["code"], answer["cniVersion"]) == (1, 102, "1.0.0")
        assert "shop/web is not captured as it should be: " in answer["msg"]
        assert said in answer["msg"]
        assert agent.cni("CHECK", netns, annotations={}) == (0, None)


def test_pod_that_is_deleted_is_not_looked_at_while_the_runtime_still_lists_it(
    folder: Path, netns: str
) -> None:
    """A runtime lists it as ready for a moment more, in which its namespace is gone already."""
    args = ARGS.replace("u1", "web")
    with Runtime(folder / "cri.sock") as runtime:
        endpoint = f"unix://{runtime.socket}"
        with namespace("gone") as gone, running(folder, cri={"endpoint": endpoint}) as agent:
            runtime.run("web", gone, annotations=INJECTED)
            wait_for(lambda: agent.state("web") == "in-sync")
            assert agent.cni("DEL", gone, container="web", args=args) == (0, None)
            run("ip", "netns", "del", gone)
            runtime.run("next", netns, annotations=INJECTED)
            wait_for(lambda: agent.state("next") == "in-sync")
            assert known(agent) == {"next"}
            assert "failed" not in agent.kinds()
