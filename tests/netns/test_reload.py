"""SIGHUP while the agent works: what changed is applied in place, and nobody is sent away."""

import contextlib
import signal
import socket
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from agent.cli.agent_client import AgentClient
from tests.support.agent import Agent, free_port, running, wait_for
from tests.support.netns import inside

EVERYTHING = {"inbound_ports_include": "*", "outbound_ip_ranges_include": "*"}


def static(name: str, netns: str) -> dict[str, object]:
    return {"name": name, "netns": f"/run/netns/{netns}", "settings": EVERYTHING}


def reload(agent: Agent, **config: object) -> None:
    agent.configure(**config)
    agent.tell(signal.SIGHUP)


def is_in(agent: Agent, mode: str) -> bool:
    return bool(agent.status()["mode"] == mode)


def rules(netns: str) -> str:
    return inside(netns, "nft", "-a", "list", "ruleset")


@contextlib.contextmanager
def asking(agent: Agent) -> Iterator[list[str]]:
    """Have a client connect and ask again and again; the value is what went wrong for it."""
    failures: list[str] = []
    asked = [0]
    ended = threading.Event()

    def ask() -> None:
        while not ended.is_set():
            try:
                agent.ask("status")
                agent.get("health", "/healthz/live")
                asked[0] += 1
            except Exception as error:  # whatever it is, the client failed
                failures.append(repr(error))

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        wait_for(lambda: asked[0])
        yield failures
        before = asked[0]
        wait_for(lambda: asked[0] > before or failures)
    finally:
        ended.set()
        thread.join()


def test_no_client_fails_while_everything_is_changed_again_and_again(
    tmp_path: Path, netns: str
) -> None:
    one = static("one", netns)
    with running(tmp_path, static=[one]) as agent:
        wait_for(lambda: agent.state("one") == "in-sync")
        worker, before = agent.status()["worker_pid"], rules(netns)
        with asking(agent) as failures:
            for number in range(15):
                mode = ("alert", "repair")[number % 2]
                excluded = ["kube-system", str(number)]
                pods = [one, static("two", "it-none")][: 1 + number % 2]
                ports = {"status": {"port": free_port()}}
                changed = {"mode": mode, "exclude_namespaces": excluded, "static": pods, **ports}
                reload(agent, guard="standing", **changed)
                if number % 3:
                    wait_for(partial(is_in, agent, mode))
        wait_for(lambda: agent.status()["mode"] == "alert")
        assert failures == []
        assert agent.status()["worker_pid"] == worker
        assert agent.kinds() == ["captured"]
        assert rules(netns) == before


def test_agent_told_to_reload_an_unchanged_configuration_restarts_nothing(
    tmp_path: Path, netns: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with running(tmp_path, static=[static("one", netns)]) as agent:
        wait_for(lambda: agent.state("one") == "in-sync")
        before = agent.status()
        with AgentClient(agent.socket) as client:
            client.ask("pods")
            agent.tell(signal.SIGHUP)
            wait_for(lambda: "changed=nothing" in capfd.readouterr().err)
            client.ask("pods")  # over the connection that was there before
        assert agent.status() == before


def test_configuration_that_cannot_be_had_leaves_the_old_one_whole(
    tmp_path: Path, netns: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with running(tmp_path, static=[static("one", netns)]) as agent, socket.socket() as busy:
        wait_for(lambda: agent.state("one") == "in-sync")
        before = agent.status()
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        # The door ahead of the one that cannot be had can be opened.
        moved = {"health": {"port": free_port()}, "status": {"port": busy.getsockname()[1]}}
        reload(agent, mode="alert", static=[], **moved)
        wait_for(lambda: "the old one stays" in capfd.readouterr().err)
        assert agent.status() == before
        assert agent.get("health", "/healthz/ready")[0] == 200
        assert agent.get("status", "/debug/pods")[0] == 200
        assert agent.state("one") == "in-sync"
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.1", moved["health"]["port"]))


def test_ports_move_in_place_even_onto_each_other(tmp_path: Path) -> None:
    with running(tmp_path) as agent:
        health, status = agent.ports["health"], agent.ports["status"]
        agent.ports = {"health": status, "status": health}
        reload(agent)
        wait_for(lambda: agent.get("status", "/metrics")[0] == 200)
        wait_for(lambda: agent.get("health", "/healthz/live")[0] == 200)
        reload(agent, health={"address": "0.0.0.0", "port": status}, status={"port": 0})
        wait_for(lambda: agent.status()["health"] == f"http://0.0.0.0:{status}")
        # Who connects in the very moment in which the old listener closes has to ask again.
        wait_for(lambda: agent.get("health", "/healthz/live")[0] == 200)
        assert agent.status()["status"] is None
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.1", health))


def test_socket_that_moves_lets_those_inside_finish(tmp_path: Path) -> None:
    with running(tmp_path) as agent, AgentClient(agent.socket) as inside_before:
        inside_before.ask("pods")
        answers: list[object] = []
        waiting = threading.Thread(
            target=lambda: answers.append(inside_before.ask("events", since=0, wait_s=2))
        )
        waiting.start()
        time.sleep(0.2)
        old, agent.socket = agent.socket, tmp_path / "new.sock"
        agent.configure(state_dir=str(tmp_path / "state"))
        agent.tell(signal.SIGHUP)
        wait_for(agent.status)
        wait_for(lambda: not old.exists())
        waiting.join()
        assert answers == [[]]


def test_excluded_namespace_is_obeyed_in_place_and_the_capture_stays(
    tmp_path: Path, netns: str
) -> None:
    with running(tmp_path) as agent:
        assert agent.cni("ADD", netns)[0] == 0
        wait_for(lambda: agent.state("web") == "in-sync")
        reload(agent, exclude_namespaces=["shop"])
        wait_for(lambda: agent.state("web") == "ignored")
        pod = agent.pod("web")
        assert pod is not None
        assert pod["reason"] == "excluded-namespace"
        assert "table inet intercept-agent" in rules(netns)
        reload(agent)
        wait_for(lambda: agent.state("web") == "in-sync")
        assert agent.kinds() == ["captured"]


def test_backend_is_exchanged_in_place_and_is_no_drift(tmp_path: Path, netns: str) -> None:
    with running(tmp_path, static=[static("one", netns)], backend="nftables") as agent:
        wait_for(lambda: agent.state("one") == "in-sync")
        reload(agent, static=[static("one", netns)], backend="iptables-nft")
        wait_for(lambda: "ISTIO_OUTPUT" in inside(netns, "iptables-nft-save"))
        wait_for(lambda: agent.state("one") == "in-sync")
        assert agent.kinds() == ["captured", "captured"]


def test_what_the_agent_remembers_moves_with_its_folder(
    tmp_path: Path, netns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("INTERCEPT_STATE_DIR")  # it would outdo the file
    with running(tmp_path) as agent:
        assert agent.cni("ADD", netns)[0] == 0
        wait_for(lambda: agent.state("web") == "in-sync")
        moved, worker = tmp_path / "moved", agent.status()["worker_pid"]
        reload(agent, state_dir=str(moved))
        wait_for(lambda: agent.status()["worker_pid"] != worker)
        wait_for(lambda: list(moved.glob("pod-*.json")))
        assert not list((tmp_path / "state").glob("pod-*.json"))
        inside(netns, "nft", "delete", "table", "inet", "intercept-agent")
        wait_for(lambda: list(moved.glob("netns-*.json")))
        wait_for(lambda: agent.state("web") == "in-sync")


def test_agent_is_ready_again_after_its_sources_were_exchanged(tmp_path: Path) -> None:
    nobody = {"endpoint": f"unix://{tmp_path}/nobody.sock"}
    with running(tmp_path) as agent:
        for number in range(3):
            reload(agent, static=[static("one", f"it-{number}")], cri=nobody)
            wait_for(lambda: agent.get("health", "/healthz/ready")[0] == 503)
            reload(agent, static=[static("two", f"it-{number}")])
            wait_for(lambda: agent.get("health", "/healthz/ready")[0] == 200)


def test_named_namespaces_come_and_go_with_the_configuration(tmp_path: Path, netns: str) -> None:
    with running(tmp_path) as agent:
        reload(agent, static=[static("one", netns)])
        wait_for(lambda: agent.state("one") == "in-sync")
        reload(agent)
        wait_for(lambda: agent.pod("one") is None)
        assert "table inet intercept-agent" in rules(netns)
        assert agent.status()["sources"] == []
        assert 'source="static"' not in agent.get("status", "/metrics")[1]
