"""Speed and size of the daemon: an ADD through the plugin, and a node of 110 pods."""

import contextlib
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import grpc
import psutil

from agent.api.agent_pb2 import ListReply
from tests.support.agent import INJECTED, Agent, running, wait_for
from tests.support.netns import inside, namespace

ADDS = 25
PODS = 110
QUIET_S, IDLE_S = 70.0, 20.0
CAPTURE = {"inbound_ports_include": "*", "outbound_ip_ranges_include": "*"}


def row(what: str, baseline: str, ours: str, ratio: float, aim: float) -> None:
    print(f"{what:<26}{baseline:>12}{ours:>10}{ratio:>8.2f}{aim:>8.2f}", flush=True)


def show() -> None:
    """Measure and print; the baseline of an ADD is a Python that does nothing, plus the apply."""
    print(f"\n{'the daemon':<26}{'baseline':>12}{'ours':>10}{'ratio':>8}{'aim':>8}")
    with tempfile.TemporaryDirectory(prefix="it-") as folder:
        _adds(Path(folder))
    with tempfile.TemporaryDirectory(prefix="it-") as folder, contextlib.ExitStack() as stack:
        names = [stack.enter_context(namespace("bench")) for _ in range(PODS)]
        _node(Path(folder), names)


def _timed(*command: str) -> float:
    started = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return (time.perf_counter() - started) * 1000


def _adds(folder: Path) -> None:
    base, ours = [], []
    with running(folder) as agent:
        for number in range(ADDS + 3):
            with namespace("bench") as name:
                idle = _timed(sys.executable, "-I", "-S", "-E", "-c", "pass")
                started = time.perf_counter()
                code, _ = agent.cni("ADD", name, annotations=INJECTED)
                took = (time.perf_counter() - started) * 1000
                assert code == 0
                agent.cni("DEL", name)
            if number >= 3:
                base.append(idle)
                ours.append(took)
        metrics = agent.get("status", "/metrics")[1]
    seconds, count = (_metric(metrics, f"intercept_apply_seconds_{x}") for x in ("sum", "count"))
    apply_ms = seconds / count * 1000
    idle_ms, took_ms = statistics.median(base), statistics.median(ours)
    ratio = (took_ms - apply_ms) / idle_ms
    row("cni ADD less apply, ms", f"{idle_ms:.1f}", f"{took_ms - apply_ms:.1f}", ratio, 3)


def _metric(text: str, name: str) -> float:
    return next(float(x.split()[1]) for x in text.splitlines() if x.startswith(f"{name} "))


def _node(folder: Path, names: list[str]) -> None:
    static = [{"name": n, "netns": f"/run/netns/{n}", "settings": CAPTURE} for n in names]
    with running(folder, static=static) as agent:
        wait_for(lambda: agent.status()["pods"] == {"in-sync": PODS}, 120)
        before = [inside(name, "nft", "-a", "list", "ruleset") for name in names]
        agent.stop(signal.SIGTERM)
        started = time.perf_counter()
        agent.start()
        wait_for(lambda: agent.status()["pods"] == {"in-sync": PODS}, 120)
        restart_s = time.perf_counter() - started
        assert [inside(name, "nft", "-a", "list", "ruleset") for name in names] == before
        row("restart, 0 writes, s", "2", f"{restart_s:.2f}", restart_s / 2, 1)
        _memory("memory (PSS), MiB", agent)
        _ask_over_grpc(agent)
        _memory("the same with gRPC, MiB", agent)
        time.sleep(QUIET_S)  # until it looks more rarely, though not yet as rarely as later
        used = _cpu(agent)
        time.sleep(IDLE_S)
        share = (_cpu(agent) - used) / IDLE_S * 100
        row(f"after {QUIET_S:.0f} s, % of a core", "0.5", f"{share:.2f}", share / 0.5, 1)


def _memory(what: str, agent: Agent) -> None:
    used = sum(process.memory_full_info().pss for process in _processes(agent)) / 2**20
    row(what, "80", f"{used:.0f}", used / 80, 1)


def _ask_over_grpc(agent: Agent) -> None:
    """Have the agent load all that it needs for a gRPC client, and answer one."""
    with grpc.insecure_channel(f"unix:{agent.socket}") as channel:
        listed = channel.unary_unary("/intercept.v1.Agent/List")(b"", timeout=30)
    assert len(ListReply.FromString(listed).pods) == PODS


def _processes(agent: Agent) -> list[psutil.Process]:
    assert agent.process is not None
    front = psutil.Process(agent.process.pid)
    return [front, *front.children(recursive=True)]


def _cpu(agent: Agent) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in _processes(agent))
