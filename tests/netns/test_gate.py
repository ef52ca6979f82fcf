"""The gate: what passes before the proxy is there for the first time."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.kernel import bpf_pins
from agent.kernel.arrivals import Arrivals
from agent.kernel.netns import Netns
from agent.model.state import EBPF
from tests.support.agent import Agent, running, wait_for
from tests.support.capturing import (
    BACKENDS,
    SETTINGS,
    STATE_DIR,
    assert_in_sync,
    capture,
    command,
    release,
    report,
    state,
)
from tests.support.cgroup import cgroup, dial_from, place, remove
from tests.support.ebpf import built, own_pins
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
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    built()
    monkeypatch.setenv(STATE_DIR, str(tmp_path))
    monkeypatch.setenv("INTERCEPT_BPF_DIR", str(tmp_path / "bpf"))
    (tmp_path / "bpf").mkdir()
    with own_pins(tmp_path / "bpf"):
        yield


@pytest.fixture(scope="module")
def pod_without_proxy() -> Iterator[Lab]:
    with lab("gate", proxy=False) as made:
        # Its link-local address is on trial for a second, and new to eBPF when that is over.
        wait_for(lambda: "tentative" not in inside(made.pod, "ip", "addr"))
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


# --- by eBPF, which needs nobody to close it ------------------------------------------------------


def apply_open(name: str) -> None:
    everything = ("-i", "*", "-b", "*", "--enable-ipv6", "true")
    code, _, err = command(
        "apply", "--netns", name, "--backend", EBPF, "--gate", "open", *everything
    )
    assert code == 0, err


def test_programs_close_their_gate_themselves_and_for_good(pod: Lab) -> None:
    apply_open(pod.pod)
    assert set(pod.dial()) == DIRECT
    assert command("check", "--netns", pod.pod)[0] == 0
    with proxy(pod.pod):
        before = pod.direct()
        assert not DIRECT & set(pod.dial())
    assert not DIRECT & set(pod.dial())
    apply_open(pod.pod)
    assert not DIRECT & set(pod.dial())
    assert command("check", "--netns", pod.pod)[0] == 0
    assert pod.direct() == before
    release(pod.pod)
    assert set(pod.dial()) == DIRECT
    assert not bpf_pins.base().exists()


def test_gate_is_closed_where_a_proxy_listened_before_the_programs_came(pod: Lab) -> None:
    with proxy(pod.pod):
        apply_open(pod.pod)
        assert not DIRECT & set(pod.dial())
    assert not DIRECT & set(pod.dial())


def test_proxy_that_listens_while_no_agent_runs_closes_the_gate(pod: Lab, tmp_path: Path) -> None:
    with running(tmp_path, **config(pod, gate="open", backend=EBPF)) as agent:
        wait_for(lambda: "gate: open" in text(agent) and agent.state("shop") == "in-sync")
        assert set(pod.dial()) == DIRECT
        agent.stop(signal.SIGKILL)
        agent.start()
        wait_for(lambda: "gate: open" in text(agent) and agent.state("shop") == "in-sync")
        assert set(pod.dial()) == DIRECT
        agent.stop(signal.SIGKILL)
        with proxy(pod.pod):
            assert not DIRECT & set(pod.dial())
        agent.start()
        wait_for(lambda: agent.state("shop") == "in-sync" and "gate" not in text(agent))
        assert not DIRECT & set(pod.dial())
        assert agent.kinds() == []


# --- for some processes only ----------------------------------------------------------------------


def let_pass(pod: Lab, backend: str, *cgroups: str, **more: str) -> None:
    raw = {**SETTINGS["redirect"], "gate": "listener", "init_cgroups": list(cgroups), **more}
    capture(pod.pod, raw, backend)
    assert_in_sync(pod.pod, raw, backend)


@pytest.mark.parametrize(
    ("backend", "guard"),
    [(EBPF, "off"), *zip(BACKENDS, ("standing", "off", "standing"), strict=True)],
)
def test_processes_of_a_cgroup_pass_and_no_others(pod: Lab, backend: str, guard: str) -> None:
    with cgroup() as ours, cgroup() as others:
        let_pass(pod, backend, guard=guard)
        assert "service" not in dial_from(ours, pod.pod, 0)
        let_pass(pod, backend, ours, guard=guard)
        assert dial_from(ours, pod.pod, 0) == ["service", "service"]
        assert dial_from(f"{ours}/below", pod.pod, 1000) == ["service", "service"]
        assert "service" not in dial_from(others, pod.pod, 0)
        assert not DIRECT & set(pod.dial())
        let_pass(pod, backend, others, guard=guard)
        assert "service" not in dial_from(ours, pod.pod, 0)
        assert dial_from(others, pod.pod, 0) == ["service", "service"]
        let_pass(pod, backend, others, guard=guard, gate="closed")
        assert "service" not in dial_from(others, pod.pod, 0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rules_about_a_cgroup_that_is_gone_can_be_taken_out(netns: str, backend: str) -> None:
    raw = {**SETTINGS["redirect"], "guard": "standing", "gate": "listener"}
    before = state(netns)
    with cgroup() as ours:
        capture(netns, {**raw, "init_cgroups": [ours]}, backend)
    capture(netns, raw, backend)
    assert_in_sync(netns, raw, backend)
    with cgroup() as ours:
        capture(netns, {**raw, "init_cgroups": [ours]}, backend)
    release(netns)
    assert {k: v for k, v in state(netns).items() if "legacy" not in k} == {
        k: v for k, v in before.items() if "legacy" not in k
    }


def test_programs_let_no_cgroup_pass_once_the_proxy_listened(pod: Lab) -> None:
    with cgroup() as ours:
        let_pass(pod, EBPF, ours)
        with proxy(pod.pod):
            assert "service" not in dial_from(ours, pod.pod, 1000)
        assert "service" not in dial_from(ours, pod.pod, 0)
        let_pass(pod, EBPF, ours)
        assert "service" not in dial_from(ours, pod.pod, 0)


def test_cgroup_that_is_made_anew_is_another_one(pod: Lab) -> None:
    with cgroup() as ours:
        let_pass(pod, EBPF, ours)
        remove(ours)
        place(ours).mkdir()
        assert "service" not in dial_from(ours, pod.pod, 0)
        raw = {**SETTINGS["redirect"], "gate": "listener", "init_cgroups": [ours]}
        assert not report(pod.pod, raw, EBPF).in_sync
        let_pass(pod, EBPF, ours)
        assert dial_from(ours, pod.pod, 0) == ["service", "service"]


# --- the rest -------------------------------------------------------------------------------------


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
    code, _, err = command("apply", "--netns", netns, "--backend", EBPF, "--gate", "listener")
    assert (code, "init containers" in err) == (2, True)
    assert "intercept" not in inside(netns, "nft", "list", "tables")
