"""A pod, a peer that owns every other address, and a client: to see where real packets go."""

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

from agent.model.host import Host, Interface, Route
from agent.model.ruleset import Family
from tests.support.netns import inside, namespace, path_of, run
from tests.support.wire import PORTS, Shot

WIRE = Path(__file__).with_name("wire.py")
USERS = ((0, 0), (1000, 1000), (1337, 1337), (1000, 1337), (1337, 3000), (2000, 3000))

# Each link of the pod: who is at the other end, and the addresses of both ends.
LINKS = {
    "eth0": (
        "peer",
        ("10.77.0.2/24", "10.77.0.3/24", "fd77::2/64", "fd77::3/64"),
        "10.77.0.1/24 fd77::1/64",
    ),
    "net1": ("peer", ("10.78.0.2/24", "fd78::2/64"), "10.78.0.1/24 fd78::1/64"),
    "cli0": ("client", ("10.79.0.2/24", "fd79::2/64"), "10.79.0.1/24 fd79::1/64"),
}
ROUTES = (
    ("0.0.0.0/0", "10.77.0.1", "eth0"),
    ("192.168.0.0/16", "10.78.0.1", "net1"),
    ("::/0", "fd77::1", "eth0"),
    ("fd99::/16", "fd78::1", "net1"),
)
CLIENT = {Family.IPV4: "10.79.0.1", Family.IPV6: "fd79::1"}


def _interface(name: str) -> Interface:
    addresses = [ipaddress.ip_interface(text) for text in LINKS[name][1]]
    # The kernel lists the newest IPv6 address first, and takes that as source.
    old = [address for address in addresses if address.version == 4]
    new = [address for address in reversed(addresses) if address.version == 6]
    return Interface(name, (*old, *new))


HOST = Host(
    interfaces=tuple(_interface(name) for name in LINKS),
    routes=tuple(Route(ipaddress.ip_network(net), link) for net, _, link in ROUTES),
    forwarding=True,
)

Received = dict[str, tuple[str, int]]


@dataclass(slots=True)
class Lab:
    """Pod and peer with listeners in both, and senders in the pod and in a client of it."""

    pod: str
    peer: str
    client: str
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
        self._senders[None] = self._launch(self.client, "send", "0", "0")

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
        """Send from the pod as a user; None: from the client."""
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
    with namespace("pod") as pod, namespace("peer") as peer, namespace("client") as client:
        spaces = {"pod": pod, "peer": peer, "client": client}
        _settings(spaces)
        for link, (there, own, other) in LINKS.items():
            _link(link, pod, own, spaces[there], tuple(other.split()))
        _routes(spaces)
        found = Lab(pod, peer, client)
        try:
            found.start()
            yield found
        finally:
            found.stop()


def _settings(spaces: dict[str, str]) -> None:
    lenient = ["net.ipv4.conf.all.rp_filter=0", "net.ipv4.conf.default.rp_filter=0"]
    for space in spaces.values():
        inside(space, "sysctl", "-qw", *lenient)
    forwarding = ["net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1"]
    inside(spaces["pod"], "sysctl", "-qw", *forwarding)


def _link(name: str, pod: str, own: tuple[str, ...], there: str, other: tuple[str, ...]) -> None:
    run("ip", "link", "add", name, "netns", pod, "type", "veth", "peer", name, "netns", there)
    for space, addresses in ((pod, own), (there, other)):
        run("ip", "-n", space, "link", "set", name, "up")
        for address in addresses:
            nodad = ("nodad",) if ":" in address else ()
            run("ip", "-n", space, "addr", "add", address, "dev", name, *nodad)
    # Fixed neighbours: IPv6 discovery passes the rules, and a DROP would look like a verdict.
    for space, far, addresses in ((pod, there, other), (there, pod, own)):
        shown = json.loads(run("ip", "-j", "-n", far, "link", "show", name))
        place = ("lladdr", shown[0]["address"], "dev", name, "nud", "permanent")
        for address in addresses:
            run("ip", "-n", space, "neigh", "replace", address.split("/")[0], *place)


def _routes(spaces: dict[str, str]) -> None:
    for network, gateway, link in ROUTES:
        run("ip", "-n", spaces["pod"], "route", "add", network, "via", gateway, "dev", link)
    for everything, client, pod in (
        ("0.0.0.0/0", "10.79.0.0/24", "10.77.0.2"),
        ("::/0", "fd79::/64", "fd77::2"),
    ):
        version = "-6" if ":" in everything else "-4"
        peer = ("ip", "-n", spaces["peer"], version)
        # The peer answers for every address that nobody has.
        run(*peer, "route", "add", "local", everything, "dev", "lo", "table", "253")
        run(*peer, "rule", "add", "pref", "32767", "lookup", "253", check=False)
        run(*peer, "route", "add", client, "via", pod)
        gateway = LINKS["cli0"][1][version == "-6"].split("/")[0]
        run("ip", "-n", spaces["client"], version, "route", "add", "default", "via", gateway)


__all__ = ["CLIENT", "HOST", "PORTS", "USERS", "Lab", "Received", "Shot", "lab"]
