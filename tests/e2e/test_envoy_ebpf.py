"""Real Envoy under eBPF while everything else changes: programs, and the agent itself.

INTERCEPT_ENVOY_CONNECTIONS=600   how many each way: out, in, and DNS queries
"""

import concurrent.futures
import contextlib
import ipaddress
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import pytest

from agent.capture.apply import apply
from agent.kernel import bpf_pins
from agent.kernel.netns import Netns
from agent.model.settings import parse
from agent.model.state import EBPF
from tests.support import envoy
from tests.support.agent import running, wait_for
from tests.support.calls import Answer, nsenter, target
from tests.support.ebpf import own_node
from tests.support.envoy import INBOUND, OUTBOUND
from tests.support.netns import inside
from tests.support.pod import APP_PORT, APP_UID, OUTSIDE_PORT, POD, Pod

pytestmark = pytest.mark.netns

CONNECTIONS = int(os.environ.get("INTERCEPT_ENVOY_CONNECTIONS", "600"))
UPGRADES = 20
KILLS = 2
BATCH = 20
SETTINGS = {
    "inbound_ports_include": "*",
    "outbound_ip_ranges_include": "*",
    "enable_ipv6": True,
    "redirect_dns": True,
    "capture_all_dns": True,
}
# All of them are the peer's: whom the server was called as says where a connection ended.
DESTINATIONS = tuple(f"10.78.1.{n}" for n in range(1, 17)) + tuple(
    f"fd00:78::1:{n:x}" for n in range(1, 17)
)
SERVERS = ("198.51.100.53", "198.51.100.54", "2001:db8::53", "2001:db8::54")
PASSED_ON = {4: envoy.PASSTHROUGH_V4, 6: envoy.PASSTHROUGH_V6}


@pytest.mark.timeout(3600)
def test_nothing_is_lost_or_misled_while_programs_are_upgraded_and_the_agent_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An upgrade puts another build of every program into the place of what is attached."""
    with own_node(tmp_path), Pod() as pod, Netns.open(pod.target) as opened:
        lead_to_peer(pod)
        static = [{"name": "web", "netns": pod.target, "settings": SETTINGS}]
        with running(tmp_path, backend=EBPF, static=static) as agent:
            wait_for(lambda: agent.state("web") == "in-sync", timeout_s=120)
            before, asked_before = pod.counters(), dns_queries(pod)
            with Traffic(pod) as traffic:
                for number in range(UPGRADES):
                    traffic.wait_for_share(number / UPGRADES)
                    monkeypatch.setattr(bpf_pins, "build", lambda n=number: bytes([n]) * 20)
                    assert apply(opened, parse(SETTINGS), backend=EBPF).changed
                    if number % (UPGRADES // KILLS) == 1:
                        agent.stop(signal.SIGKILL)
                        agent.start()  # and finds programs that are not its own
                        wait_for(lambda: agent.state("web") == "in-sync", timeout_s=120)
                traffic.wait_for_share(1)
            counters, asked = pod.counters() - before, dns_queries(pod) - asked_before
            assert "failed" not in agent.kinds()
    assert wrong(traffic.outbound, OUTBOUND, "outside") == Counter()
    assert wrong(traffic.inbound, INBOUND, "app") == Counter()
    assert traffic.names == {"asked": traffic.names["asked"], "wrong": []}
    assert len(traffic.outbound) == counters.outbound_connections == counters.outbound_requests
    assert len(traffic.inbound) == counters.inbound_connections == counters.inbound_requests
    assert traffic.names["asked"] == asked
    assert min(len(traffic.outbound), len(traffic.inbound), asked) >= CONNECTIONS


def test_nothing_is_lost_while_one_envoy_takes_over_from_another(tmp_path: Path) -> None:
    """Both listen for a while, with a socket a thread each; then the old one ends."""
    generation = str(random.randrange(1000, 1 << 30))
    with own_node(tmp_path), Pod() as pod, contextlib.ExitStack() as stack:

        def number(epoch: int) -> subprocess.Popen[str]:
            which = ("--base-id", generation, "--restart-epoch", str(epoch))
            return stack.enter_context(pod.run_proxy(*which, *TAKING_OVER))

        lead_to_peer(pod)
        pod.stop_proxy()
        pod.capture(EBPF, "--redirect-dns", "--capture-all-dns")
        old = number(0)
        wait_for(pod.proxy_serves, timeout_s=60)
        with Traffic(pod) as traffic:
            for epoch in (1, 2):
                new = number(epoch)
                assert old.wait(120) == 0
                assert new.poll() is None, pod.proxy_log()
                old = new
                traffic.wait_for_share(epoch / 2)
    assert wrong(traffic.outbound, OUTBOUND, "outside") == Counter()
    assert wrong(traffic.inbound, INBOUND, "app") == Counter()


TAKING_OVER = (
    *("--concurrency", "3", "--drain-time-s", "1", "--parent-shutdown-time-s", "2"),
    *("--drain-strategy", "immediate"),
)


def lead_to_peer(pod: Pod) -> None:
    for address in DESTINATIONS:
        inside(pod.peer, "ip", "addr", "add", address, "dev", "lo")


def wrong(found: list[tuple[str, Answer]], way: str, name: str) -> Counter[str]:
    """Count what did not pass Envoy once, or did not end where it was to go."""
    peers = POD if way == OUTBOUND else PASSED_ON
    return Counter(
        f"{dialled}: {answer}"
        for dialled, answer in found
        if (answer.name, answer.local, answer.peer, answer.via)
        != (name, dialled, peers[ipaddress.ip_address(dialled).version], (way,))
    )


def dns_queries(pod: Pod) -> int:
    """Return how many queries Envoy's DNS filters have seen."""
    call = target("127.0.0.1", envoy.ADMIN_PORT, path="/stats?filter=dns_filter.*rx_queries$")
    (outcome,) = pod._client(pod.namespace, uid=0, gid=0).outcomes(call)
    return sum(int(line.rpartition(":")[2]) for line in outcome["body"].splitlines())


class Traffic:
    """Connections out and in and DNS queries, without a pause, until there were enough."""

    def __init__(self, pod: Pod) -> None:
        self.outbound: list[tuple[str, Answer]] = []
        self.inbound: list[tuple[str, Answer]] = []
        self.names: dict[str, object] = {}
        self._pod = pod
        self._enough = threading.Event()
        self._threads = concurrent.futures.ThreadPoolExecutor(max_workers=2)

    def __enter__(self) -> Self:
        self._asker = subprocess.Popen(
            (*nsenter(self._pod.namespace), sys.executable, "-I", "-S", "-c", ASKER),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._senders = [self._threads.submit(self._send_out), self._threads.submit(self._send_in)]
        return self

    def __exit__(self, *_: object) -> None:
        self._enough.set()
        self._threads.shutdown()
        with self._asker:
            self.names = json.loads(self._asker.communicate("enough\n")[0])
        for sender in self._senders:
            sender.result()

    def wait_for_share(self, share: float) -> None:
        """Return when so much of all has been sent both ways."""
        least = share * CONNECTIONS
        wait_for(lambda: min(len(self.outbound), len(self.inbound)) >= least, timeout_s=1800)

    def _send_out(self) -> None:
        for address in self._until_enough(DESTINATIONS):
            answers = self._pod.call(address, OUTSIDE_PORT, count=BATCH, timeout_s=60)
            self.outbound += ((address, answer) for answer in answers)

    def _send_in(self) -> None:
        for address in self._until_enough(tuple(POD.values())):
            answers = self._pod.call_from_peer(address, APP_PORT, count=BATCH, timeout_s=60)
            self.inbound += ((address, answer) for answer in answers)

    def _until_enough(self, addresses: tuple[str, ...]) -> Iterator[str]:
        return itertools.takewhile(lambda _: not self._enough.is_set(), itertools.cycle(addresses))


# Asks by connected sockets and by one that is not; an answer must come from whom it was asked of.
ASKER = f"""
import itertools, json, os, selectors, socket, struct, sys
os.setgid({APP_UID}); os.setuid({APP_UID})
question = b"".join(bytes([len(part)]) + part.encode() for part in {envoy.DNS_NAME.split(".")!r})
question += b"\\0" + struct.pack("!HH", 1, 1)
told = selectors.DefaultSelector()
told.register(sys.stdin, selectors.EVENT_READ)
unconnected = {{family: socket.socket(family, socket.SOCK_DGRAM)
               for family in (socket.AF_INET, socket.AF_INET6)}}
asked, wrong = 0, []
while asked < {CONNECTIONS} or not told.select(0):
    server = {SERVERS!r}[asked % 4]
    family = socket.AF_INET6 if ":" in server else socket.AF_INET
    query = struct.pack("!HHHHHH", asked & 0xffff, 0x100, 1, 0, 0, 0) + question
    asking = unconnected[family]
    if connected := asked // 4 % 2:
        asking = socket.socket(family, socket.SOCK_DGRAM)
        asking.connect((server, 53))
    asking.settimeout(60)
    asked += 1
    try:
        asking.send(query) if connected else asking.sendto(query, (server, 53))
        answer, source = asking.recvfrom(2048)
        if (source[:2], answer[:2]) != ((server, 53), query[:2]) or len(answer) <= len(query):
            wrong.append([server, source, answer.hex()])
    except OSError as error:
        wrong.append([server, str(error)])
    if connected:
        asking.close()
print(json.dumps({{"asked": asked, "wrong": wrong[:10]}}))
"""
