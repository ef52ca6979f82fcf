"""Whether traffic gets past a proxy: a pod, a peer, and clients that dial as fast as they can.

    peer namespace                       pod namespace
    10.79.0.1, fd00:79::1   <- veth ->   10.79.0.2, fd00:79::2
    listener `service` :8000             listener `app` :8080 as user 1000
    clients that dial the app            clients as user 1000 that dial the service
                                         listeners `proxy` on 15001, 15006, 15101, 15106 as 1337

While a capture stands, nobody who dials may ever be answered by `service` or by `app`.
"""

import contextlib
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from tests.support import escape_node
from tests.support.netns import inside, namespace, run

POD = {4: "10.79.0.2", 6: "fd00:79::2"}
PEER = {4: "10.79.0.1", 6: "fd00:79::1"}
ANY = {4: "0.0.0.0", 6: "::"}
APP_PORT, SERVICE_PORT = 8080, 8000
OUTBOUND = tuple((host, SERVICE_PORT) for host in PEER.values())
INBOUND = tuple((host, APP_PORT) for host in POD.values())
PROXY_PORTS = (15001, 15006, 15101, 15106)
DIRECT = frozenset({"app", "service"})

FLOOD_TIMEOUT_S = 0.15
THREADS = 2
PROBE_TIMEOUT_S = 0.4
PING_TIMEOUT_S = 5.0


class Node:
    """A running process of `escape_node` in a namespace."""

    def __init__(self, space: str, uid: int, listeners: Mapping[int, str]) -> None:
        everywhere = [(h, port, name) for port, name in listeners.items() for h in ANY.values()]
        spec = json.dumps({"uid": uid, "listeners": everywhere})
        program = (sys.executable, "-I", "-S", str(Path(escape_node.__file__)), spec)
        self._process = subprocess.Popen(
            ("nsenter", f"--net=/run/netns/{space}", "--", *program),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    def __enter__(self) -> Self:
        if self._line() != "ready\n":
            raise AssertionError("a node of the escape tests did not start")
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def ask(self, op: str, **arguments: object) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"op": op, **arguments}) + "\n")
        return json.loads(self._line())

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()


@dataclass(frozen=True, slots=True)
class Lab:
    """The two namespaces and everybody in them."""

    pod: str
    outside: str
    proxy: Node
    client: Node
    peer: Node

    def wait_until_direct(self) -> None:
        """Return when the link carries both families: its own addresses are on trial at first."""
        for _ in range(20):
            if self.dial() == ("service", "service", "app", "app"):
                return
        raise AssertionError(f"the namespaces of the escape tests do not reach: {self.dial()}")

    def flood(self, versions: tuple[int, ...] = (4, 6)) -> None:
        """Start dialling in both directions, each target in several threads."""
        for node, hosts, port in ((self.client, PEER, SERVICE_PORT), (self.peer, POD, APP_PORT)):
            targets = [(hosts[version], port) for version in versions] * THREADS
            node.ask("flood", targets=targets, timeout_s=FLOOD_TIMEOUT_S)

    def stop(self) -> Counter[str]:
        """Stop dialling; return who answered how often."""
        return Counter(self.client.ask("stop")) + Counter(self.peer.ask("stop"))

    def direct(self) -> int:
        """Return how many connections the app and the service have seen so far."""
        seen = Counter(self.client.ask("seen")) + Counter(self.peer.ask("seen"))
        return sum(seen[name] for name in DIRECT)

    def dial(self) -> tuple[str, ...]:
        """Dial once each way and family; return who answered: out 4, out 6, in 4, in 6."""
        out = self.client.ask("dial", targets=OUTBOUND, timeout_s=PROBE_TIMEOUT_S)
        return (*out, *self.peer.ask("dial", targets=INBOUND, timeout_s=PROBE_TIMEOUT_S))

    def hold(self) -> tuple[str, ...]:
        """Open connections that stay; return who answered, as `dial`."""
        out = self.client.ask("hold", targets=OUTBOUND, timeout_s=PING_TIMEOUT_S)
        return (*out, *self.peer.ask("hold", targets=INBOUND, timeout_s=PING_TIMEOUT_S))

    def ping(self) -> tuple[str, ...]:
        """Use the held connections; return what became of each, in no certain order."""
        pings = (node.ask("ping", timeout_s=PING_TIMEOUT_S) for node in (self.client, self.peer))
        return tuple(state for found in pings for state in found)

    def release(self) -> None:
        for node in (self.client, self.peer):
            node.ask("release")


@contextlib.contextmanager
def lab(label: str = "esc", *, proxy: bool = True) -> Iterator[Lab]:
    """Make the namespaces and start everybody; nothing is captured yet."""
    with contextlib.ExitStack() as stack:
        pod = stack.enter_context(namespace(label))
        peer = stack.enter_context(namespace(f"{label}p"))
        run(
            *("ip", "link", "add", "eth0", "netns", pod, "type", "veth"),
            *("peer", "name", "eth0", "netns", peer),
        )
        for space, hosts in ((pod, POD), (peer, PEER)):
            for version, length in ((4, 24), (6, 64)):
                address = f"{hosts[version]}/{length}"
                inside(space, "ip", "addr", "add", address, "dev", "eth0", *_no_trial(version))
            inside(space, "ip", "link", "set", "eth0", "up")
        proxies = {port: f"proxy-{port}" for port in PROXY_PORTS} if proxy else {}
        made = Lab(
            pod,
            peer,
            stack.enter_context(Node(pod, 1337, proxies)),
            stack.enter_context(Node(pod, 1000, {APP_PORT: "app"})),
            stack.enter_context(Node(peer, 1000, {SERVICE_PORT: "service"})),
        )
        made.wait_until_direct()
        yield made


def _no_trial(version: int) -> tuple[str, ...]:
    return ("nodad",) if version == 6 else ()
