"""The daemon with eBPF: what it refuses, what it takes instead, and what it puts right."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import pytest

from agent.formats.bpf_capture import COOKIE
from agent.kernel import bpf_pins
from agent.model.state import EBPF
from tests.support.agent import INJECTED, RESULT, Agent, running, wait_for
from tests.support.capturing import command
from tests.support.ebpf import capture, cookie, detach, own_node, pinned
from tests.support.netns import inside, snapshot

pytestmark = pytest.mark.netns

TPROXY = {**INJECTED, "sidecar.istio.io/interceptionMode": "TPROXY"}
LONG = {
    **INJECTED,
    "traffic.sidecar.istio.io/excludeOutboundIPRanges": ",".join(
        f"10.{number}.0.0/16" for number in range(65)
    ),
}


@pytest.fixture(autouse=True)
def node(tmp_path: Path) -> Iterator[None]:
    with own_node(tmp_path):
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("agent")


@pytest.mark.parametrize(
    ("annotations", "said"),
    [(TPROXY, "inbound_interception_mode"), (LONG, "65 entries, and the programs hold 64")],
    ids=["tproxy", "a long list"],
)
def test_a_pod_that_ebpf_cannot_serve_is_refused_where_it_is_asked_for(
    folder: Path, netns: str, annotations: Mapping[str, str], said: str
) -> None:
    before = snapshot(netns)
    with running(folder, backend=EBPF) as agent:
        code, answer = agent.cni("ADD", netns, annotations=annotations)
        assert code == 1
        assert f"backend {EBPF}" in answer["msg"]
        assert said in answer["msg"]
        assert agent.state("web") in ("failed", "unknown")
    assert snapshot(netns) == before
    assert pinned() == set()


@pytest.mark.parametrize("annotations", [TPROXY, LONG], ids=["tproxy", "a long list"])
def test_auto_takes_another_backend_and_says_so(
    folder: Path, netns: str, annotations: Mapping[str, str]
) -> None:
    capture(netns)
    with running(folder) as agent:
        assert agent.cni("ADD", netns, annotations=annotations) == (0, RESULT)
        pod = agent.pod("web")
        assert pod is not None
        assert pod["backend"] == "nftables"
        (told,) = (e for e in agent.ask("events", since=0, wait_s=0) if e["kind"] == "captured")
        assert "; nftables takes the place of ebpf: " in told["message"]
    assert pinned() == set()


def forget_entry(name: str) -> None:
    with bpf_pins.open_map("captures") as captures:
        captures.delete(COOKIE.pack(cookie(name)))


DRIFT: Mapping[str, Callable[[str], object]] = {
    "connect4 was detached": lambda name: detach(bpf_pins.links() / "connect4"),
    "the pin of the map captures is gone": lambda _: (bpf_pins.base() / "maps/captures").unlink(),
    "original_dst is not attached": lambda name: (bpf_pins.links() / "original_dst").unlink(),
    "inbound connections was detached": lambda name: detach(bpf_pins.pod_pin(cookie(name))),
    "inbound connections is not attached": lambda name: bpf_pins.pod_pin(cookie(name)).unlink(),
}


def test_status_says_that_there_is_no_guard(folder: Path) -> None:
    for backend, said in ((EBPF, "guard: none, since eBPF"), ("nftables", "guard: standing\n")):
        with running(folder, backend=backend) as agent:
            _, out, _ = command("status", "--socket", str(agent.socket))
            assert said in out


def test_whatever_is_detached_or_removed_is_put_back(folder: Path, netns: str) -> None:
    with running(folder, backend=EBPF) as agent:
        assert agent.cni("ADD", netns) == (0, RESULT)
        wait_for(lambda: agent.state("web") == "in-sync")
        for number, (said, spoil) in enumerate(DRIFT.items(), start=1):
            spoil(netns)
            wait_for(partial(repaired, agent, number), timeout_s=60)
            assert said in repairs(agent)[-1]
            assert agent.cni("CHECK", netns) == (0, None)
        forget_entry(netns)
        inside(netns, "ip", "route", "add", "10.5.0.0/16", "dev", "lo")  # which has it looked at
        wait_for(partial(repaired, agent, len(DRIFT) + 1), timeout_s=60)
        assert agent.cni("CHECK", netns) == (0, None)


def repaired(agent: Agent, times: int) -> bool:
    return len(repairs(agent)) == times


def repairs(agent: Agent) -> list[str]:
    events = agent.ask("events", since=0, wait_s=0)
    return [str(event["message"]) for event in events if event["kind"] == "drift-repaired"]
