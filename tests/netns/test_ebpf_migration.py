"""From an agent whose maps are laid out in another way to this one, under live connections."""

import itertools
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from agent.backends import ebpf_migration
from agent.capture.apply import apply, remove
from agent.kernel import bpf, bpf_pins
from agent.kernel.bpf_loader import OF_CONNECTIONS
from agent.kernel.netns import Netns
from agent.model.enrolment import LAYOUT
from agent.model.errors import RolledBack
from agent.model.settings import parse
from agent.model.state import EBPF
from tests.support.capturing import EVERYTHING
from tests.support.ebpf import (
    capture,
    found_wrong,
    own_node,
    pinned,
    release,
    run_killed,
)
from tests.support.ebpf_older import build_older, older_agent
from tests.support.ebpf_pod import PYTHON, SETTINGS, free_pod
from tests.support.escape import Lab, lab
from tests.support.netns import namespace, path_of

pytestmark = pytest.mark.netns

KILLS = int(os.environ.get("INTERCEPT_EBPF_KILLS", "4"))
RAW = {**EVERYTHING, "inbound_ports_exclude": "22,15020:15021", "outbound_ports_exclude": "443"}
PROXIED = ("proxy-15001", "proxy-15001", "proxy-15006", "proxy-15006")


@pytest.fixture(autouse=True)
def node(tmp_path: Path) -> Iterator[None]:
    with own_node(tmp_path):
        yield


@pytest.fixture(scope="module")
def pod_and_peer() -> Iterator[Lab]:
    with lab("older") as made:
        yield made


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_older(tmp_path_factory.mktemp("older") / "x", connections_alike=False)


@pytest.fixture(scope="module")
def alike(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_older(tmp_path_factory.mktemp("alike") / "x", connections_alike=True)


@pytest.fixture
def pod(pod_and_peer: Lab, older: Path) -> Iterator[Lab]:
    """A pod that an older agent captured, with a proxy that listens."""
    with older_agent(older):
        capture(pod_and_peer.pod, RAW)
        assert found_wrong(pod_and_peer.pod, RAW) == []
    yield pod_and_peer
    release(pod_and_peer.pod)
    assert pinned() == set()


def layout() -> int:
    about = bpf_pins.about()
    assert about is not None
    return about.layout


def take_over(pod: Lab, objects: Path) -> None:
    """No connection is refused, none goes past the proxy, and open ones stay open."""
    with namespace("other") as other:
        with older_agent(objects):
            capture(other, RAW)
        assert pod.hold() == PROXIED
        before = pod.direct()
        pod.flood()
        assert found_wrong(pod.pod, RAW) == [
            "the programs are not those of this version of the agent"
        ]
        assert capture(pod.pod, RAW).changed
        seen = pod.stop()
        assert layout() == LAYOUT
        assert pod.direct() == before
        # The clients wait for 0.15 seconds, which is short where the machine is busy.
        assert set(seen) - {"timeout"} == {"proxy-15001", "proxy-15006"}, seen
        assert set(pod.ping()) == {"alive"}
        pod.release()
        assert found_wrong(pod.pod, RAW) == found_wrong(other, RAW) == []
        assert not bpf_pins.upcoming().exists()
        release(other)


def test_an_older_agents_captures_are_taken_over_under_connections(pod: Lab, older: Path) -> None:
    take_over(pod, older)


def test_maps_of_the_same_shape_are_kept(pod: Lab, alike: Path) -> None:
    release(pod.pod)
    with older_agent(alike):
        capture(pod.pod, RAW)
        maps = {name: identity(name) for name in (*OF_CONNECTIONS, "listeners", "captures")}
    take_over(pod, alike)
    assert {name for name in maps if identity(name) != maps[name]} == {"captures"}


DIALS = """
import encodings.idna, json, os, random, socket, sys, threading
os.setgid(1000); os.setuid(1000)
ended, counts = threading.Event(), []

def dial(number):
    chance, right, wrong = random.Random(number), 0, []
    while not ended.is_set():
        n, port = chance.randrange(1, 65000), chance.randrange(1024, 15000)
        host = f"10.96.{n >> 8}.{n & 255}" if number % 2 else f"fd96::{n:x}"
        try:
            with socket.create_connection((host, port), 20) as made:
                found = json.loads(made.recv(200))[0]
        except Exception as error:
            found = repr(error)
        if found == [host, port]:
            right += 1
        else:
            wrong.append([host, port, found])
    counts.append((right, wrong))

threads = [threading.Thread(target=dial, args=(number,)) for number in range(8)]
for thread in threads:
    thread.start()
print("ready", flush=True)
sys.stdin.read()
ended.set()
for thread in threads:
    thread.join()
print(json.dumps([sum(right for right, _ in counts), [w for _, wrong in counts for w in wrong]]))
"""


@pytest.mark.parametrize("kind", ["older", "alike"])
def test_the_proxy_learns_every_destination_throughout(
    kind: str, request: pytest.FixtureRequest
) -> None:
    older = request.getfixturevalue(kind)
    pipe = subprocess.PIPE
    with free_pod("olderd") as pod, Netns.open(path_of(pod.name)) as opened:
        settings = parse(SETTINGS)
        with older_agent(older):
            apply(opened, settings, backend=EBPF)
        command = ("nsenter", f"--net={opened.path}", "--", *PYTHON, "-c", DIALS)
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as dialling:
            assert dialling.stdout is not None
            assert dialling.stdout.readline() == "ready\n"
            assert apply(opened, settings, backend=EBPF).changed
            out, _ = dialling.communicate()
        right, wrong = json.loads(out)
        assert layout() == LAYOUT
        assert wrong == []
        assert right > 100
        remove(opened)


def identity(name: str) -> int:
    with bpf_pins.open_map(name) as found:
        return int.from_bytes(bpf.info(found.fd, 8)[4:], sys.byteorder)


def test_a_pod_can_be_let_go_of_by_the_newer_agent(pod: Lab) -> None:
    release(pod.pod)
    assert pinned() == set()
    assert pod.dial() == ("service", "service", "app", "app")


@pytest.mark.parametrize("at", [0, 1])
def test_a_migration_that_fails_half_way_is_finished_by_the_next_run(
    pod: Lab, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    whole, turns = ebpf_migration._replace, itertools.count()

    def stopped(hooks: Iterable[str]) -> None:
        if next(turns) == at:
            raise OSError("stopped")
        whole(hooks)

    with monkeypatch.context() as patch:
        patch.setattr(ebpf_migration, "_replace", stopped)
        with pytest.raises(RolledBack):
            capture(pod.pod, {**RAW, "proxy_port": 15101})
    assert pod.dial() == PROXIED
    capture(pod.pod, RAW)
    assert found_wrong(pod.pod, RAW) == []
    assert pod.dial() == PROXIED


def test_programs_that_were_loaded_half_are_loaded_whole(pod: Lab) -> None:
    capture(pod.pod, RAW)
    with bpf_pins.open_map("about") as about:
        about.update(bytes(4), bytes(24))
    (bpf_pins.links() / "connect6").unlink()
    assert "the programs are loaded half" in found_wrong(pod.pod, RAW)
    capture(pod.pod, RAW)
    assert found_wrong(pod.pod, RAW) == []
    assert pod.dial() == PROXIED


def test_a_killed_migration_leaves_every_connection_captured(pod: Lab, older: Path) -> None:
    chance = random.Random(2)
    for _ in range(KILLS):
        run_killed("apply", pod.pod, chance.uniform(0.3, 1.2))
        assert pod.dial() == PROXIED
        capture(pod.pod, RAW)
        assert found_wrong(pod.pod, RAW) == []
        assert pod.dial() == PROXIED
        release(pod.pod)
        with older_agent(older):
            capture(pod.pod, RAW)
