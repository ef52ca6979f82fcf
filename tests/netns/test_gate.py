"""The gate of a running agent: what passes before the proxy is there for the first time."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.kernel.arrivals import Arrivals
from agent.kernel.netns import Netns
from tests.support.agent import Agent, running, wait_for
from tests.support.capturing import BACKENDS, SETTINGS, STATE_DIR, command, release
from tests.support.escape import DIRECT, Lab, lab
from tests.support.netns import inside, namespace, path_of, run

pytestmark = pytest.mark.netns

PROXY = """
import os, socket, sys
os.setgroups([]); os.setgid(1337); os.setuid(1337)
for family, host in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
    for port in (15001, 15006):
        made = socket.socket(family)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((host, port))
        made.listen(64)
        globals()[f"kept_{host}_{port}"] = made
print("listens", flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STATE_DIR, str(tmp_path))


@pytest.fixture(scope="module")
def pod_without_proxy() -> Iterator[Lab]:
    with lab("gate", proxy=False) as made:
        yield made


@pytest.fixture
def pod(pod_without_proxy: Lab) -> Iterator[Lab]:
    try:
        yield pod_without_proxy
    finally:
        pod_without_proxy.stop()
        release(pod_without_proxy.pod)


@contextlib.contextmanager
def proxy(name: str) -> Iterator[None]:
    """A proxy that listens and lets everybody wait."""
    process = subprocess.Popen(
        ("nsenter", f"--net=/run/netns/{name}", "--", sys.executable, "-I", "-S", "-c", PROXY),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "listens\n"
        yield
    finally:
        process.kill()
        process.communicate()


def config(pod: Lab, **more: object) -> dict[str, object]:
    static = [
        {"name": "shop", "netns": f"/run/netns/{pod.pod}", "settings": dict(SETTINGS["redirect"])}
    ]
    return {"static": static, **more}


def text(agent: Agent) -> str:
    pod = agent.pod("shop")
    return str(pod["text"]) if pod else ""


@pytest.mark.parametrize("backend", BACKENDS)
def test_open_gate_lets_pass_until_the_proxy_listened_once(
    pod: Lab, tmp_path: Path, backend: str
) -> None:
    with running(tmp_path, **config(pod, gate="open", backend=backend)) as agent:
        wait_for(lambda: "gate: open" in text(agent))
        assert set(pod.dial()) == DIRECT
        agent.stop(signal.SIGKILL)
        agent.start()
        wait_for(lambda: "gate: open" in text(agent))
        assert set(pod.dial()) == DIRECT
        with proxy(pod.pod):
            wait_for(lambda: agent.state("shop") == "in-sync")
            assert agent.kinds()[-1] == "captured"
            before = pod.direct()
            assert not DIRECT & set(pod.dial())
        # The proxy is dead, and then the rules are gone, too: once closed is closed for good.
        assert not DIRECT & set(pod.dial())
        agent.stop()
        inside(pod.pod, "nft", "flush", "ruleset")
        inside(pod.pod, "iptables-legacy", "-t", "nat", "-F")
        inside(pod.pod, "ip6tables-legacy", "-t", "nat", "-F")
        agent.start()
        wait_for(lambda: agent.state("shop") == "in-sync")
        assert not DIRECT & set(pod.dial())
        assert pod.direct() == before


def test_that_a_proxy_listened_is_told_before_the_pipe_ends(netns: str) -> None:
    reading, writing = os.pipe()
    with Netns.open(path_of(netns)) as opened:
        Arrivals().expect(opened, {15001, 15006}, writing)
    os.close(writing)
    with proxy(netns), open(reading, "rb") as said:
        assert said.read() == b"!"


@pytest.mark.parametrize("gate", ["closed", "listener"])
def test_other_gates_are_closed_from_the_first_packet(pod: Lab, tmp_path: Path, gate: str) -> None:
    """`listener` opens for init containers that the agent knows, and of a name it knows none."""
    with running(tmp_path, **config(pod, gate=gate)) as agent:
        wait_for(lambda: agent.state("shop") == "in-sync")
        assert not DIRECT & set(pod.dial())


def test_proxy_that_listens_already_finds_the_gate_closed(pod: Lab, tmp_path: Path) -> None:
    with proxy(pod.pod), running(tmp_path, **config(pod, gate="open")) as agent:
        wait_for(lambda: agent.state("shop") == "in-sync")
        assert "gate-open" not in agent.kinds()


def test_what_waits_for_the_proxy_does_not_keep_the_namespace(netns: str, tmp_path: Path) -> None:
    with namespace("gone") as name:
        inside(netns, "ip", "link", "add", "here", "type", "veth", "peer", "there", "netns", name)
        settings = dict(SETTINGS["redirect"])
        static = [{"name": "shop", "netns": f"/run/netns/{name}", "settings": settings}]
        with running(tmp_path, static=static, gate="open") as agent:
            wait_for(lambda: "gate: open" in text(agent))
            run("ip", "netns", "del", name)
            # The kernel takes the pair away when it destroys the namespace of one of them.
            wait_for(lambda: "here" not in inside(netns, "ip", "-br", "link"))


def test_command_line_opens_no_gate_that_nobody_would_close(netns: str) -> None:
    code, _, err = command("apply", "--netns", netns, "--gate", "open")
    assert code == 2
    assert "needs a running agent" in err
    assert "intercept" not in inside(netns, "nft", "list", "tables")
