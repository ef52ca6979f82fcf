"""A pod namespace and a peer that owns every other address, to see where real packets go."""

import contextlib
import ipaddress
import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from agent.explain.host import Host, Interface, Route
from tests.support.netns import inside, namespace, path_of, run
from tests.support.wire import PORTS, Shot

WIRE = Path(__file__).with_name("wire.py")
USERS = ((0, 0), (1000, 1000), (1337, 1337), (1000, 1337), (1337, 3000), (2000, 3000))

LINKS = {
    "eth0": (
        ("10.77.0.2/24", "10.77.0.3/24", "fd77::2/64", "fd77::3/64"),
        ("10.77.0.1/24", "fd77::1/64"),
    ),
    "net1": (("10.78.0.2/24", "fd78::2/64"), ("10.78.0.1/24", "fd78::1/64")),
}
ROUTES = (
    ("0.0.0.0/0", "10.77.0.1", "eth0"),
    ("192.168.0.0/16", "10.78.0.1", "net1"),
    ("::/0", "fd77::1", "eth0"),
    ("fd99::/16", "fd78::1", "net1"),
)


def reversed_v6(addresses: tuple[str, ...]) -> tuple[str, ...]:
    old = tuple(address for address in addresses if ":" not in address)
    return (*old, *(address for address in reversed(addresses) if ":" in address))


FORWARDED = ("192.168.9.9", "fd99::9")  # what the peer sends through the pod

HOST = Host(
    interfaces=tuple(
        # The kernel lists the newest IPv6 address first, and takes it as source.
        Interface(name, tuple(ipaddress.ip_interface(text) for text in reversed_v6(own)))
        for name, (own, _) in LINKS.items()
    ),
    routes=tuple(Route(ipaddress.ip_network(net), link) for net, _, link in ROUTES),
    forwarding=True,
)

Received = dict[str, tuple[str, int]]


@dataclass(slots=True)
class Lab:
    """Two namespaces with listeners in both, and senders in the pod (and one in the peer)."""

    pod: str
    peer: str
    received: Received = field(default_factory=dict)
    _processes: list[subprocess.Popen[str]] = field(default_factory=list)
    _senders: dict[tuple[int, int] | None, subprocess.Popen[str]] = field(default_factory=dict)
    _lines: "queue.Queue[str]" = field(default_factory=queue.Queue)

    def start(self) -> None:
        for name, space in (("pod", self.pod), ("peer", self.peer)):
            listener = self._launch(space, "listen", name)
            threading.Thread(target=self._collect, args=(listener,), daemon=True).start()
        for user in USERS:
            self._senders[user] = self._launch(self.pod, "send", *map(str, user))
        self._senders[None] = self._launch(self.peer, "send", "0", "0")

    def _launch(self, space: str, *arguments: str) -> subprocess.Popen[str]:
        command = ["nsenter", f"--net={path_of(space)}", "--", sys.executable, "-I", str(WIRE)]
        found = subprocess.Popen(
            [*command, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._processes.append(found)
        assert found.stdout is not None
        assert found.stdout.readline() == "ready\n"
        return found

    def _collect(self, listener: subprocess.Popen[str]) -> None:
        assert listener.stdout is not None
        for line in listener.stdout:
            self._lines.put(line)

    def shoot(self, user: tuple[int, int] | None, shot: Shot) -> None:
        """Send from the pod as a user; None: from the peer."""
        sender = self._senders[user].stdin
        assert sender is not None
        sender.write(shot.line())
        sender.flush()

    def gather(self, expected: set[str], *, timeout_s: float, grace_s: float) -> None:
        """Receive until all expected nonces are there, and `grace_s` longer."""
        deadline = time.monotonic() + timeout_s
        end = None
        while time.monotonic() < (end or deadline):
            if end is None and expected <= self.received.keys():
                end = time.monotonic() + grace_s
            with contextlib.suppress(queue.Empty):
                found = json.loads(self._lines.get(timeout=0.02))
                self.received[found["nonce"]] = (found["who"], found["port"])

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    stream.close()


@contextlib.contextmanager
def lab() -> Iterator[Lab]:
    """Make the namespaces, start the programs, and take everything away again."""
    with namespace("pod") as pod, namespace("peer") as peer:
        _wire(pod, peer)
        found = Lab(pod, peer)
        try:
            found.start()
            yield found
        finally:
            found.stop()


def _wire(pod: str, peer: str) -> None:
    settings = ["net.ipv4.conf.all.rp_filter=0", "net.ipv4.conf.default.rp_filter=0"]
    lenient = ["net.ipv4.conf.all.accept_local=1", "net.ipv4.conf.default.accept_local=1"]
    forwarding = ["net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1"]
    inside(pod, "sysctl", "-qw", *settings, *forwarding)
    inside(peer, "sysctl", "-qw", *settings, *lenient)
    for link, (own, other) in LINKS.items():
        run("ip", "link", "add", link, "netns", pod, "type", "veth", "peer", link, "netns", peer)
        for space, addresses in ((pod, own), (peer, other)):
            run("ip", "-n", space, "link", "set", link, "up")
            for address in addresses:
                nodad = ("nodad",) if ":" in address else ()
                run("ip", "-n", space, "addr", "add", address, "dev", link, *nodad)
        _neighbours(pod, peer, link)
    for network, gateway, link in ROUTES:
        run("ip", "-n", pod, "route", "add", network, "via", gateway, "dev", link)
    for version, everything in (("-4", "0.0.0.0/0"), ("-6", "::/0")):
        # The peer answers for every address that nobody has, and sends a few through the pod.
        local = ("local", everything, "dev", "lo", "table", "253")
        run("ip", "-n", peer, version, "route", "add", *local)
        run("ip", "-n", peer, version, "rule", "add", "pref", "32767", "lookup", "253", check=False)
        run("ip", "-n", peer, version, "rule", "add", "iif", "lo", "pref", "100", "lookup", "100")
    for address, gateway in zip(FORWARDED, ("10.77.0.2", "fd77::2"), strict=True):
        run("ip", "-n", peer, "route", "add", address, "via", gateway, "table", "100")


def _neighbours(pod: str, peer: str, link: str) -> None:
    """Fix the neighbours: IPv6 discovery passes the rules, and a DROP would look like a verdict."""
    own, other = LINKS[link]
    for space, there, addresses in ((pod, peer, other), (peer, pod, own)):
        shown = json.loads(run("ip", "-j", "-n", there, "link", "show", link))
        for address in addresses:
            place = ("lladdr", shown[0]["address"], "dev", link, "nud", "permanent")
            run("ip", "-n", space, "neigh", "replace", address.split("/")[0], *place)


__all__ = ["FORWARDED", "HOST", "PORTS", "USERS", "Lab", "Received", "Shot", "lab"]
