"""The doors of a running agent: who may come in, and what bad guests do to the others."""

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.cni.server import MAX_CLIENTS
from agent.kernel import capabilities
from agent.observe import http
from tests.fakes.fake_agent import HEADER
from tests.support.agent import RESULT, Agent, running, wait_for

NOBODY = 65534
SLACK = 40  # what the agent opens for its own ends meanwhile


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    with running(tmp_path) as found:
        yield found


def front(agent: Agent) -> Path:
    assert agent.process is not None
    return Path(f"/proc/{agent.process.pid}")


ASK = """
import os, socket, struct, sys
os.setgroups([])
os.setgid(int(sys.argv[2]))
os.setuid(int(sys.argv[2]))
client = socket.socket(socket.AF_UNIX)
client.settimeout(20)
try:
    client.connect(sys.argv[1])
    payload = b'{"do": "pods"}'
    client.sendall(struct.pack("!IB", len(payload), 1) + payload)
    print(client.recv(100))
except OSError as error:
    print(type(error).__name__)
"""


def as_nobody(path: Path) -> str:
    """Ask the agent for its pods from a process of another user and return what that one sees."""
    done = subprocess.run(
        [sys.executable, "-ISE", "-c", ASK, str(path), str(NOBODY)],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def test_other_users_are_refused_by_the_file_and_by_the_agent(agent: Agent) -> None:
    for folder in agent.socket.parents:  # as open as /run
        if folder == Path(tempfile.gettempdir()):
            break
        folder.chmod(0o755)
    assert as_nobody(agent.socket) == "PermissionError"
    agent.socket.chmod(0o666)
    assert as_nobody(agent.socket) in ("b''", "ConnectionResetError", "BrokenPipeError")
    assert agent.ask("pods") == []


def test_no_thread_of_the_front_holds_a_right_that_it_gave_up(agent: Agent) -> None:
    for status in front(agent).glob("task/*/status"):
        found = dict(line.split(":", 1) for line in status.read_text().splitlines())
        for kind in ("CapEff", "CapPrm", "CapInh", "CapAmb"):
            bits = int(found[kind], 16)
            held = [name for name, bit in capabilities.NUMBERS.items() if bits >> bit & 1]
            assert not held, f"{status}: {kind}"


def unix(agent: Agent) -> socket.socket:
    client = socket.socket(socket.AF_UNIX)
    client.connect(str(agent.socket))
    return client


def test_guests_that_hold_on_or_talk_nonsense_keep_nobody_out(agent: Agent, netns: str) -> None:
    before = len(os.listdir(front(agent) / "fd"))
    with contextlib.ExitStack() as stack:
        nonsense = (b"", b"x", HEADER.pack(1000, 1) + b"{", HEADER.pack(2**32 - 1, 1), b"\xff" * 99)
        for number in range(2 * MAX_CLIENTS):
            client = stack.enter_context(unix(agent))
            client.sendall(nonsense[number % len(nonsense)])
        for name in ("health", "status"):
            for number in range(4 * http.MAX_CLIENTS):
                address = ("127.0.0.1", agent.ports[name])
                client = stack.enter_context(socket.create_connection(address))
                client.sendall((b"", b"GET / HT", b"\x16", b"\r\n")[number % 4])
        assert agent.get("health", "/healthz/ready")[0] == 200
        assert agent.get("status", "/metrics")[0] == 200
        assert agent.cni("ADD", netns) == (0, RESULT)
        assert agent.state("web") == "in-sync"
        held = len(os.listdir(front(agent) / "fd")) - before
        assert held <= MAX_CLIENTS + 2 * http.MAX_CLIENTS + SLACK
    wait_for(lambda: len(os.listdir(front(agent) / "fd")) <= before + SLACK)


def test_client_that_sends_without_end_is_cut_off(agent: Agent) -> None:
    with unix(agent) as client:
        client.settimeout(20)
        client.sendall(HEADER.pack(2**31, 1))
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            client.sendall(bytes(500_000_000))
    assert agent.ask("pods") == []


def test_descriptors_that_a_client_passes_are_not_kept(agent: Agent) -> None:
    before = len(os.listdir(front(agent) / "fd"))
    with unix(agent) as client:
        client.sendall(HEADER.pack(1000, 1))
        for _ in range(50):
            socket.send_fds(client, [b"\0"], [0] * 50)
        assert len(os.listdir(front(agent) / "fd")) <= before + SLACK
