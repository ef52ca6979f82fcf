"""What `pods`, `status` and `events` say of a running agent, and of one that ends."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent.cli.main import main
from tests.support.agent import ROOT, Agent, running, wait_for
from tests.support.netns import inside


def shown(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert main([str(word) for word in words]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    return said.out


def test_commands_show_what_the_agent_knows(
    tmp_path: Path,
    netns: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with running(tmp_path, backend="nftables") as agent:
        at = ("--socket", agent.socket)
        assert json.loads(shown(capsys, "pods", *at, "-o", "json")) == {"pods": []}
        assert shown(capsys, "events", *at) == ""
        assert agent.cni("ADD", netns)[0] == 0
        wait_for(lambda: agent.state("web") == "in-sync")

        [pod] = json.loads(shown(capsys, "pods", *at, "-o", "json"))["pods"]
        assert pod.items() >= {
            ("namespace", "shop"),
            ("name", "web"),
            ("uid", "u1"),
            ("netns", f"/run/netns/{netns}"),
            ("captured", True),
            ("backend", "nftables"),
            ("reason", "injected"),
            ("state", "in-sync"),
        }
        head, line = shown(capsys, "pods", "--config", tmp_path / "agent.yaml").splitlines()
        assert head.split()[:3] == ["NAMESPACE", "NAME", "STATE"]
        assert line.split() == ["shop", "web", "in-sync", "yes", "nftables", "injected"]

        status = json.loads(shown(capsys, "status", *at, "-o", "json"))
        assert (status["ready"], status["pods"]) == (True, {"in-sync": 1})
        lines = shown(capsys, "status", *at).splitlines()
        assert lines[0] == "ready"
        assert f"status: http://127.0.0.1:{agent.ports['status']}" in lines

        monkeypatch.setenv("INTERCEPT_SOCKET", str(agent.socket))
        [event] = json.loads(shown(capsys, "events", "-o", "json"))["events"]
        assert (event["kind"], event["pod"]) == ("captured", "shop/web")
        assert "captured       shop/web: captured by nftables" in shown(capsys, "events")


def test_what_the_agent_waits_for_is_said_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    absent = {"cri": {"endpoint": f"unix://{tmp_path}/none.sock"}}
    agent = Agent(tmp_path, **absent)
    with contextlib.ExitStack() as ends:
        ends.callback(agent.kill)
        agent.start(ready=False)
        said = shown(capsys, "status", "--socket", str(agent.socket))
    assert said.startswith("not ready\n  cri: no container runtime answers (")
    assert said.count("there is no such socket") == 1
    assert "source cri: not connected\n" in said


def test_events_are_followed_until_the_agent_ends(tmp_path: Path, netns: str) -> None:
    with running(tmp_path, backend="nftables") as agent, following(agent) as command:
        assert command.stdout is not None
        assert command.stderr is not None
        assert agent.cni("ADD", netns)[0] == 0
        assert kind_of(command.stdout.readline()) == "captured"
        inside(netns, "nft", "delete", "table", "inet", "intercept-agent")
        assert kind_of(command.stdout.readline()) == "drift-repaired"
        agent.stop()
        assert command.wait(30) == 3
        said = command.stderr.read()
        assert said == f"error: the agent behind {agent.socket} ended: it closed the connection\n"


@contextlib.contextmanager
def following(agent: Agent) -> Iterator[subprocess.Popen[str]]:
    words = ("events", "--follow", "-o", "json", "--socket", str(agent.socket))
    with subprocess.Popen(
        (sys.executable, "-m", "agent.cli.main", *words),
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as command:
        try:
            yield command
        finally:
            command.kill()


def kind_of(line: str) -> Any:
    return json.loads(line)["kind"]
