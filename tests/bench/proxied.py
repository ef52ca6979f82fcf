"""How much a real Envoy gets through, captured by eBPF and by iptables.

Client, Envoy (one worker) and service take turns on one processor, and what the three of them use
of it is counted; so the rate is what they would do if they had it for themselves.
"""

import contextlib
import json
import os
import socket
import statistics
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

from agent.model import numbers
from agent.model.state import EBPF
from tests.bench.traffic import (
    ANY,
    APP_PORT,
    IPTABLES,
    MESSAGE,
    Costs,
    Pod,
    fresh,
    listener,
    on_one_processor,
    pods,
)
from tests.support.pod import START_TIMEOUT_S, run_envoy, wait_for

ROUNDS = 11
REQUESTS = 1500
CONNECTIONS = 200
AIM = 1.05
PACKAGE = "envoy.extensions.filters"


def show() -> None:
    """Measure and print, beside the aim."""
    rates: Costs = defaultdict(dict)
    with contextlib.ExitStack() as stack:
        made = {pod.mode: pod for pod in stack.enter_context(pods())}
        service = on_one_processor(made[EBPF].peer_name, lambda: listener(4, APP_PORT))
        stack.enter_context(service)
        proxies = {mode: stack.enter_context(proxy(made[mode])) for mode in (IPTABLES, EBPF)}
        made[IPTABLES].capture()
        for number in range(ROUNDS + 1):
            if number == 1:  # the first round warms the caches
                rates.clear()
            for mode in (IPTABLES, EBPF) if number % 2 else (EBPF, IPTABLES):
                pod, running = made[mode], proxies[mode]
                pod.capture()
                for what, work in WORK.items():
                    rates[what].setdefault(mode, []).append(rate(pod, service, running, work))
                if mode == EBPF:
                    pod.release()
    print(f"\n{'through Envoy':<26}{'iptables':>12}{'ebpf':>10}{'ratio':>8}{'aim':>8}")
    for what, modes in rates.items():
        theirs, ours = (statistics.median(modes[mode]) for mode in (IPTABLES, EBPF))
        ratio = ours / theirs
        print(f"{what + ' a CPU second':<26}{theirs:>12.0f}{ours:>10.0f}{ratio:>8.2f}{AIM:>8.2f}")


def rate(
    pod: Pod,
    service: socket.socket,
    running: subprocess.Popen[str],
    work: Callable[[Pod, socket.socket], int],
) -> float:
    """Return how much of it is done in a second of everybody's CPU time."""

    def measured() -> float:
        before = time.thread_time_ns() + cpu_ns(running.pid)
        count = work(pod, service)
        return count * 1e9 / (time.thread_time_ns() + cpu_ns(running.pid) - before)

    return pod.run(measured)


def cpu_ns(pid: int) -> int:
    """Return the CPU time that the threads of a process have used."""
    stats = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(path.read_text().split()[0]) for path in stats)


def requests(pod: Pod, service: socket.socket) -> int:
    with fresh(4) as client:
        client.connect((pod.address(4, 1), APP_PORT))
        client.send(MESSAGE)
        taken, _ = service.accept()
        with taken:
            taken.recv(256)
            for _ in range(REQUESTS):
                taken.send(MESSAGE)
                client.recv(256)
                client.send(MESSAGE)
                taken.recv(256)
    return REQUESTS


def connections(pod: Pod, service: socket.socket) -> int:
    for _ in range(CONNECTIONS):
        with fresh(4) as client:
            client.connect((pod.address(4, 1), APP_PORT))
            taken, _ = service.accept()
            taken.close()
    return CONNECTIONS


WORK = {"requests": requests, "connections": connections}


@contextlib.contextmanager
def proxy(pod: Pod) -> Iterator[subprocess.Popen[str]]:
    """Run an Envoy that passes every connection on to where it was going."""
    with tempfile.TemporaryFile("w+") as log:
        ids = {"uid": numbers.PROXY_ID, "gid": numbers.PROXY_ID}
        with run_envoy(pod.name, CONFIG, **ids, capabilities=(), log=log) as running:
            wait_for(lambda: pod.run(is_up), "Envoy is ready", timeout_s=START_TIMEOUT_S)
            for task in os.listdir(f"/proc/{running.pid}/task"):
                os.sched_setaffinity(int(task), {max(os.sched_getaffinity(0))})
            yield running


def is_up() -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", numbers.PROXY_PORT)) == 0


CONFIG = json.dumps(
    {
        "static_resources": {
            "listeners": [
                {
                    "name": "outbound",
                    "address": {
                        "socket_address": {"address": ANY[4], "port_value": numbers.PROXY_PORT}
                    },
                    "listener_filters": [
                        {
                            "name": "envoy.filters.listener.original_dst",
                            "typed_config": {
                                "@type": f"type.googleapis.com/{PACKAGE}.listener"
                                ".original_dst.v3.OriginalDst"
                            },
                        }
                    ],
                    "filter_chains": [
                        {
                            "filters": [
                                {
                                    "name": "envoy.filters.network.tcp_proxy",
                                    "typed_config": {
                                        "@type": f"type.googleapis.com/{PACKAGE}.network"
                                        ".tcp_proxy.v3.TcpProxy",
                                        "stat_prefix": "out",
                                        "cluster": "original",
                                    },
                                }
                            ]
                        }
                    ],
                }
            ],
            "clusters": [
                {"name": "original", "type": "ORIGINAL_DST", "lb_policy": "CLUSTER_PROVIDED"}
            ],
        }
    }
)
