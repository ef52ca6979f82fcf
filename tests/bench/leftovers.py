"""Speed and size of a scan: a node with the rules of 1,000 Services, and 110 pods on it."""

import contextlib
import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator

from tests.bench.node import PODS, row
from tests.support import leftovers as left
from tests.support.netns import inside, namespace

SERVICES, ENDPOINTS = 1000, 3
AIM_S, AIM_MIB = 3.0, 150.0
RUNS = 5


def show() -> None:
    """Measure and print, beside the aims."""
    print(f"\n{'scan':<26}{'at most':>12}{'ours':>10}{'ratio':>8}{'aim':>8}")
    with contextlib.ExitStack() as stack:
        host = stack.enter_context(namespace("bench"))
        inside(host, "iptables-nft-restore", "--noflush", stdin="\n".join(_services()) + "\n")
        pods = [stack.enter_context(namespace("bench")) for _ in range(PODS)]
        for pod in pods[::2]:
            left.load(pod, left.SIDECAR)
        runs = [_scan(host, pods) for _ in range(RUNS)]
    seconds, mib = min(s for s, _ in runs), max(m for _, m in runs)
    row("10,000 rules, 111 netns, s", f"{AIM_S:.0f}", f"{seconds:.2f}", seconds / AIM_S, 1)
    row("peak memory, MiB", f"{AIM_MIB:.0f}", f"{mib:.0f}", mib / AIM_MIB, 1)


def _scan(host: str, pods: list[str]) -> tuple[float, float]:
    """Return how many seconds and MiB a scan takes, from the start of the process to its end."""
    scan = (sys.executable, "-m", "agent.cli.main", "scan", "--host", "-o", "json")
    line = ("nsenter", f"--net=/run/netns/{host}", *scan, "--netns", *pods)
    started = time.perf_counter()
    with subprocess.Popen(line, stdout=subprocess.DEVNULL) as process:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 1
    return time.perf_counter() - started, usage.ru_maxrss / 1024


def _services() -> Iterator[str]:
    """Yield what kube-proxy writes for Services of three endpoints each."""
    yield from ("*nat", ":KUBE-SERVICES - [0:0]", ":KUBE-MARK-MASQ - [0:0]")
    names = [_name("SVC", number) for number in range(SERVICES)]
    for number, name in enumerate(names):
        yield f":{name} - [0:0]"
        for endpoint in range(ENDPOINTS):
            yield f":{_name('SEP', number, endpoint)} - [0:0]"
    yield '-A PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES'
    yield "-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000"
    for number, name in enumerate(names):
        address = f"10.96.{number // 250}.{number % 250 + 1}/32"
        about = f'-p tcp -m comment --comment "shop/web-{number}:http" -m tcp'
        yield f"-A KUBE-SERVICES -d {address} {about} --dport 80 -j {name}"
        yield f"-A {name} ! -s 10.244.0.0/16 -d {address} {about} --dport 80 -j KUBE-MARK-MASQ"
        for endpoint in range(ENDPOINTS):
            chance = "-m statistic --mode random --probability 0.33333333349 "
            chain, last = _name("SEP", number, endpoint), endpoint == ENDPOINTS - 1
            target = f"10.244.{number // 80}.{number % 80 * ENDPOINTS + endpoint + 1}"
            yield f"-A {name} {'' if last else chance}-j {chain}"
            yield f"-A {chain} -s {target}/32 -j KUBE-MARK-MASQ"
            yield f"-A {chain} {about} -j DNAT --to-destination {target}:8080"
    yield "COMMIT"


def _name(kind: str, *numbers: int) -> str:
    digest = hashlib.sha256(repr((kind, *numbers)).encode()).hexdigest()
    return f"KUBE-{kind}-{digest[:16].upper()}"
