"""What a capture costs the traffic, by eBPF and by iptables, in CPU time on one processor.

The receiver is dialled without a capture, and through each of the two; what is more is what the
capture adds. Client and receiver are one thread, so there is nobody to wait for, and its CPU time
is the cost, whatever else the machine does. The eBPF programs are attached for their own turns
only: they are asked about every process of the node, and what that costs has rows of its own.
"""

import contextlib
import os
import socket
import statistics
import struct
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from agent.capture.apply import apply, remove
from agent.kernel.netns import Netns
from agent.kernel.sockets import Owner, acting_as
from agent.model import numbers
from agent.model.settings import parse
from agent.model.state import EBPF
from tests.support.netns import inside, namespace, path_of

ROUNDS = 15
CONNECTIONS = 200
REQUESTS = 1500
CALLS = 2000
APP_PORT = 9080
MESSAGE = bytes(64)
FAMILIES = {4: socket.AF_INET, 6: socket.AF_INET6}
ANY = {4: "0.0.0.0", 6: "::"}
LOOPBACK = {4: "127.0.0.1", 6: "::1"}
ORIGINAL = {4: (socket.IPPROTO_IP, 80, 16), 6: (socket.IPPROTO_IPV6, 80, 28)}
NOTHING = (socket.IPPROTO_TCP, socket.TCP_NODELAY, 4)
RESET_ON_CLOSE = struct.pack("ii", 1, 0)
IPTABLES, DIRECT = "iptables-nft", "direct"
SETTINGS = parse(
    {
        "inbound_ports_include": "*",
        "inbound_ports_exclude": "15020,15021,15090",
        "outbound_ip_ranges_include": "*",
        "enable_ipv6": "true",
    }
)

T = TypeVar("T")
Costs = defaultdict[str, dict[str, list[float]]]
"""What each round cost, by what was done and by mode."""


@dataclass(frozen=True, slots=True)
class Pod:
    """A namespace with a link to the peer, and who listens in it as the proxy."""

    name: str
    peer_name: str
    number: int
    mode: str
    listeners: dict[tuple[int, int], socket.socket] = field(default_factory=dict)

    def address(self, version: int, host: int = 2) -> str:
        """Return an address of the link; the peer has host 1."""
        return f"10.88.{self.number}.{host}" if version == 4 else f"fd00:88:{self.number}::{host}"

    def run(self, work: Callable[[], T]) -> T:
        return on_one_processor(self.name, work)

    def capture(self) -> None:
        if self.mode != DIRECT:
            with Netns.open(path_of(self.name)) as opened:
                apply(opened, SETTINGS, backend=self.mode)

    def release(self) -> None:
        with Netns.open(path_of(self.name)) as opened:
            remove(opened)

    def listen(self) -> None:
        """Open the proxy's ports, as only the proxy may."""
        with acting_as(Owner(numbers.PROXY_ID, numbers.PROXY_ID)):
            for version in FAMILIES:
                for port in (numbers.PROXY_PORT, numbers.INBOUND_CAPTURE_PORT):
                    self.listeners[version, port] = listener(version, port)


def on_one_processor(name: str, work: Callable[[], T]) -> T:
    """Run it in a namespace, always on the same processor."""

    def pinned() -> T:
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
        return work()

    with Netns.open(path_of(name)) as opened:
        return opened.run(pinned, timeout_s=120)


def listener(version: int, port: int) -> socket.socket:
    made = socket.socket(FAMILIES[version])
    if version == 6:
        made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.bind((ANY[version], port))
    made.listen(512)
    return made


def fresh(version: int) -> socket.socket:
    """Make a client's socket; it belongs to the namespace of the thread that makes it."""
    made = socket.socket(FAMILIES[version])
    made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
    return made


@contextlib.contextmanager
def pods() -> Iterator[list[Pod]]:
    """Yield one pod a mode, each linked to one peer."""
    with contextlib.ExitStack() as stack:
        peer = stack.enter_context(namespace("bench-peer"))
        made = []
        for number, mode in enumerate((DIRECT, IPTABLES, EBPF)):
            pod = Pod(stack.enter_context(namespace("bench")), peer, number, mode)
            link(pod)
            made.append(pod)
        yield made


def link(pod: Pod) -> None:
    there = ("peer", "name", f"pod{pod.number}", "netns", pod.peer_name)
    inside(pod.name, "ip", "link", "add", "eth0", "type", "veth", *there)
    for name, device, host in ((pod.name, "eth0", 2), (pod.peer_name, f"pod{pod.number}", 1)):
        inside(name, "ip", "addr", "add", f"{pod.address(4, host)}/24", "dev", device)
        inside(name, "ip", "addr", "add", f"{pod.address(6, host)}/64", "dev", device, "nodad")
        inside(name, "ip", "link", "set", device, "up")


# --- what is measured -----------------------------------------------------------------------------


def connections(
    clients: list[socket.socket], target: tuple[str, int], taking: socket.socket, version: int
) -> float:
    """Return the CPU time of a connection, accepted and asked for its destination, in us."""
    turned = target[1] == APP_PORT
    option = ORIGINAL[version] if turned else NOTHING
    started = time.thread_time_ns()
    for client in clients:
        client.connect(target)
        taken, _ = taking.accept()
        taken.getsockopt(*option)
        client.close()
        taken.close()
    return (time.thread_time_ns() - started) / len(clients) / 1000


def requests(client: socket.socket, target: tuple[str, int], taking: socket.socket) -> float:
    """Return the CPU time of a request and its answer on one connection, in us."""
    client.connect(target)
    taken, _ = taking.accept()
    with client, taken:
        started = time.thread_time_ns()
        for _ in range(REQUESTS):
            client.send(MESSAGE)
            taken.recv(256)
            taken.send(MESSAGE)
            client.recv(256)
        return (time.thread_time_ns() - started) / REQUESTS / 1000


def measure(pod: Pod, costs: Costs) -> None:
    """Measure every kind of traffic once."""
    for version in FAMILIES:
        for what, cost in traffic(pod, version):
            costs[f"{what}, IPv{version}"].setdefault(pod.mode, []).append(cost)


def traffic(pod: Pod, version: int) -> Iterator[tuple[str, float]]:
    """Yield what was done and what it cost; without a capture the proxy itself is dialled."""
    outward, inward = (pod.address(version, 1), APP_PORT), (pod.address(version), APP_PORT)
    if pod.mode == DIRECT:
        outward = (LOOPBACK[version], numbers.PROXY_PORT)
        inward = (pod.address(version), numbers.INBOUND_CAPTURE_PORT)
    out = pod.listeners[version, numbers.PROXY_PORT]
    into = pod.listeners[version, numbers.INBOUND_CAPTURE_PORT]

    def many() -> list[socket.socket]:
        return [fresh(version) for _ in range(CONNECTIONS)]

    here, away = pod.run(many), on_one_processor(pod.peer_name, many)
    yield "a connection out", pod.run(lambda: connections(here, outward, out, version))
    yield "a connection in", pod.run(lambda: connections(away, inward, into, version))
    yield "a request out", pod.run(lambda: requests(fresh(version), outward, out))


def show() -> None:
    """Measure and print, beside the aims."""
    costs: Costs = defaultdict(dict)
    calls: Costs = defaultdict(dict)
    with pods() as made:
        direct, ruled, turned = made
        for pod in made:
            pod.run(pod.listen)
        ruled.capture()

        def without_programs() -> None:
            measure(direct, costs)
            measure(ruled, costs)
            count_calls(direct, "without", calls)

        def with_programs() -> None:
            turned.capture()
            measure(turned, costs)
            count_calls(direct, "with", calls)
            turned.release()

        for number in range(ROUNDS + 1):
            if number == 1:  # the first round warms the caches
                costs.clear()
                calls.clear()
            turns = (without_programs, with_programs)
            for turn in turns if number % 2 else reversed(turns):
                turn()
    print_costs(costs)
    print_calls(calls)


def print_costs(costs: Costs) -> None:
    print(
        f"\nAdded CPU time, medians of {ROUNDS} rounds; +-: half of them lie within\n\n"
        f"{'us for':<26}{'direct':>9}{'iptables':>16}{'ebpf':>16}{'ratio':>8}{'aim':>8}"
    )
    for what, modes in costs.items():
        base = statistics.median(modes[DIRECT])
        theirs, ours = (
            [one - bare for one, bare in zip(modes[mode], modes[DIRECT], strict=True)]
            for mode in (IPTABLES, EBPF)
        )
        aim = 0.0 if what.startswith("a request") else 0.5
        ratio = statistics.median(ours) / statistics.median(theirs)
        print(f"{what:<26}{base:>9.2f}{spread(theirs)}{spread(ours)}{ratio:>8.2f}{aim:>8.2f}")


def spread(values: list[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:>9.2f} +-{(high - low) / 2:<4.2f}"


# --- processes that are not enrolled --------------------------------------------------------------


def count_calls(pod: Pod, mode: str, costs: Costs) -> None:
    def measured() -> dict[str, float]:
        return {what: each_ns(work) for what, work in calls(stack)}

    with contextlib.ExitStack() as stack:
        for what, cost in pod.run(measured).items():
            costs[what].setdefault(mode, []).append(cost)


def each_ns(work: Callable[[], object]) -> float:
    started = time.thread_time_ns()
    for _ in range(CALLS):
        work()
    return (time.thread_time_ns() - started) / CALLS


def calls(stack: contextlib.ExitStack) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the system calls at which the programs are asked."""
    udp, server = (stack.enter_context(socket.socket(type=socket.SOCK_DGRAM)) for _ in range(2))
    server.bind((LOOPBACK[4], 0))
    there = server.getsockname()
    taking = stack.enter_context(listener(4, 0))
    port = taking.getsockname()

    def connection() -> None:
        with fresh(4) as client:
            client.connect((LOOPBACK[4], port[1]))
            taking.accept()[0].close()

    def bind() -> None:
        with socket.socket() as made:
            made.bind((LOOPBACK[4], 0))

    def datagram() -> None:
        server.sendto(MESSAGE, there)
        server.recvfrom(256)

    yield "UDP sendto and recvfrom", datagram
    yield "UDP connect", lambda: udp.connect(there)
    yield "getsockopt", lambda: udp.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE)
    yield "getpeername", udp.getpeername
    yield "socket, bind, close", bind
    yield "TCP connection, 5 calls", connection


def print_calls(costs: Costs) -> None:
    print(
        f"\n{'ns, where not enrolled':<26}{'without':>9}{'with':>9}{'more':>16}"
        "    with and without the programs at the root of cgroup2"
    )
    for what, modes in costs.items():
        without, loaded = (statistics.median(modes[mode]) for mode in ("without", "with"))
        more = [one - bare for one, bare in zip(modes["with"], modes["without"], strict=True)]
        print(f"{what:<26}{without:>9.0f}{loaded:>9.0f}{spread(more)}")
