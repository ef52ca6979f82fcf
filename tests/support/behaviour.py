"""Who really answers: a pod, its peers and real sockets, and the table of what each connection met.

A `World` is three namespaces. `pod` has eth0 towards `peer` (the cluster: services, name servers)
and net1 towards `vm` (a virtual machine behind the pod). In the pod, one process per credential
sends, a fake proxy (1337) listens on the mesh's ports and an app (1000) on its own. Everything is
dual-stack and made once; only the capture changes:

    with world("pod", program) as pod:
        pod.capture({"inbound_ports_include": "*"})
        pod.table()["peer>own4:8080"]  # Outcome("proxy:15006", "10.77.0.2:8080", "10.77.0.1")

`program` is any `Program`: whatever can capture a namespace by name and let it go again. A table
takes about a quarter of a second. The name of a probe is `SENDER[@SOURCE]>HOST:PORT[/udp]`, with
hosts and sources by the names in `HOSTS`.
"""

import contextlib
import json
import re
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from tests.support import behaviour_node
from tests.support.netns import inside, namespace

QUIET_S = 0.4
PATIENT_S = 2.0

Raw = Mapping[str, object]
"""Settings as `agent.model.settings.parse` takes them."""


class Program(Protocol):
    """One way to program a capture, such as one backend of one command."""

    def apply(self, namespace: str, raw: Raw) -> None:
        """Capture the namespace so, whatever capture this program put there before."""

    def clear(self, namespace: str) -> None:
        """Take the capture away again; nothing there is fine."""


class Outcome(NamedTuple):
    """What one probe met.

    `who` is the listener that answered (`proxy:15001`, `app:8080`, `service`, `dns`, ...) or
    `refused`, `reset`, `closed`, `timeout`, `no-source` (the address to send from does not exist)
    or `error ERRNO`. `destination` is what that listener recovered as the address the client
    meant, None for UDP and without an answer; `source` is the client address that it saw.
    """

    who: str
    destination: str | None = None
    source: str | None = None


Table = dict[str, Outcome]

# --- the cast ------------------------------------------------------------------------------------

HOSTS = {
    "own4": "10.77.0.2",
    "own6": "fd77::2",
    "second4": "10.78.0.2",  # the pod's address on net1
    "second6": "fd78::2",
    "peer4": "10.77.0.1",
    "peer6": "fd77::1",
    "vm4": "10.78.0.1",
    "vm6": "fd78::1",
    "in4": "10.96.1.1",  # services: two networks, so that one can be in a range and one not
    "in6": "fd96:1::1",
    "out4": "10.97.1.1",
    "out6": "fd97:1::1",
    "dns4": "10.96.0.10",  # the name server that settings list, and one that they do not
    "dns6": "fd96::10",
    "odd4": "10.96.0.11",
    "odd6": "fd96::11",
    "lo4": "127.0.0.1",
    "lo6": "::1",
    "lob4": "127.1.2.3",
    "resolver4": "127.0.0.53",
    "pass4": "127.0.0.6",  # what Envoy sends from when it passes inbound traffic on
    "pass6": "::6",
}


class Credential(NamedTuple):
    uid: int
    gid: int
    groups: tuple[int, ...] = ()


CREDENTIALS = {
    "root": Credential(0, 0),
    "app": Credential(1000, 1000),
    "proxy": Credential(1337, 1337),
    "uidonly": Credential(1337, 1000),
    "gidonly": Credential(1000, 1337),
    "extra": Credential(1000, 1000, (1337,)),  # in the proxy's group, but only besides its own
    "java": Credential(1001, 5001),
    "ftp": Credential(1002, 5002),
    "second": Credential(2000, 2000),  # a second proxy id, where settings name it
}

PROXY_PORTS = (15001, 15006, 15008, 15020, 15021, 15090, 16001, 16006, 16008)
CAPTURE_PORTS = (15006, 16006)
DNS_PROXY_PORT = 15053
SERVICE_PORTS = (80, 443, 3306)
SOURCE_PORTS = tuple(range(first, first + 4000) for first in range(20000, 64000, 4000))


def _listener(who: str, host: str, port: int, proto: str = "tcp") -> dict[str, Any]:
    return {"who": who, "proto": proto, "host": HOSTS.get(host, host), "port": port}


def _everywhere(who: str, port: int) -> Iterator[dict[str, Any]]:
    for host in ("0.0.0.0", "::"):
        yield _listener(who, host, port)


def _proxy_listeners() -> Iterator[dict[str, Any]]:
    for port in PROXY_PORTS:
        yield from _everywhere(f"proxy:{port}", port)
    for host in ("lo4", "lo6"):
        for proto in ("tcp", "udp"):
            yield _listener(f"proxy:{DNS_PROXY_PORT}", host, DNS_PROXY_PORT, proto)


def _app_listeners() -> Iterator[dict[str, Any]]:
    for port in (8080, 9090):
        yield from _everywhere(f"app:{port}", port)
    for version in "46":
        yield _listener("app:pod-only", f"own{version}", 9091)
        yield _listener("app:loopback-only", f"lo{version}", 9092)
    for proto in ("tcp", "udp"):
        yield _listener("resolver", "resolver4", 53, proto)


def _peer_listeners() -> Iterator[dict[str, Any]]:
    for version in "46":
        for host in (f"in{version}", f"out{version}"):
            yield from (_listener("service", host, port) for port in SERVICE_PORTS)
        for host in (f"dns{version}", f"odd{version}"):
            for proto in ("tcp", "udp"):
                yield _listener("dns", host, 53, proto)


def _vm_listeners() -> Iterator[dict[str, Any]]:
    return (_listener("vm", host, 80) for host in ("vm4", "vm6"))


# --- the probes ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One connection to try, or one datagram to send.

    `transparent` allows a source that is not the namespace's own; `mark` marks the packets.
    """

    name: str
    sender: str
    host: str
    port: int
    proto: str = "tcp"
    source: str | None = None
    transparent: bool = False
    mark: int = 0


def probe(name: str) -> Probe:
    """Return the probe of that name."""
    found = re.fullmatch(r"(\w+)(?:@(\w+))?>(\w+):(\d+)(/udp)?", name)
    if not found:
        raise ValueError(f"{name!r} is not the name of a probe")
    sender, source, host, port, udp = found.groups()
    return Probe(
        name=name,
        sender=sender,
        source=HOSTS[source] if source else None,
        host=HOSTS[host],
        port=int(port),
        proto="udp" if udp else "tcp",
    )


def _outbound() -> Iterator[str]:
    for sender in CREDENTIALS:
        for v in "46":
            for target in ("in{}:80", "in{}:443", "out{}:80", "out{}:3306", "vm{}:80"):
                yield f"{sender}>{target.format(v)}"
            for target in ("own{}:8080", "own{}:9091", "own{}:15008", "lo{}:8080", "lo{}:9092"):
                yield f"{sender}>{target.format(v)}"
            for server in (f"dns{v}", f"odd{v}"):
                yield from (f"{sender}>{server}:53", f"{sender}>{server}:53/udp")
        yield from (f"{sender}>{host}" for host in ("lob4:8080", "resolver4:53/udp"))
    for sender in ("app", "proxy"):
        yield f"{sender}>resolver4:53"
        for v in "46":
            yield from (f"{sender}@pass{v}>own{v}:{port}" for port in (8080, 9091))
            yield from (f"{sender}>own{v}:{port}" for port in (7777, 15021))


def _inbound() -> Iterator[str]:
    for v in "46":
        ports = (8080, 9090, 9091, 9092, 7777, DNS_PROXY_PORT, *PROXY_PORTS)
        yield from (f"peer>own{v}:{port}" for port in ports)
        yield from (f"vm>second{v}:{port}" for port in (8080, 9090, 15008, 15021, 7777))
        yield from (f"vm>{host}{v}:80" for host in ("in", "out"))
        yield f"vm>own{v}:8080"


PROBES = tuple(probe(name) for name in (*_outbound(), *_inbound()))


# --- the world -----------------------------------------------------------------------------------


class Node:
    """A running process of `behaviour_node` and the line to it."""

    def __init__(
        self, space: str, owner: Credential, ports: range, listeners: Iterable[dict[str, Any]]
    ) -> None:
        ours, theirs = socket.socketpair()
        spec = {
            **owner._asdict(),
            "listeners": tuple(listeners),
            "ports": (ports.start, ports.stop),
        }
        program = (sys.executable, "-I", "-S", str(Path(behaviour_node.__file__)))
        command = ("nsenter", f"--net=/run/netns/{space}", "--", *program)
        with theirs:
            self._process = subprocess.Popen(
                (*command, str(theirs.fileno()), json.dumps(spec)), pass_fds=(theirs.fileno(),)
            )
        ours.settimeout(30)
        self._socket = ours
        self._lines = ours.makefile("rwb")

    def wait_until_ready(self) -> None:
        """Return when every listener is open."""
        self._read()

    def send(self, op: str, **arguments: object) -> None:
        self._lines.write(json.dumps({"op": op, **arguments}).encode() + b"\n")
        self._lines.flush()

    def receive(self) -> Any:
        answer = self._read()
        if "error" in answer:
            raise AssertionError(f"a node of the test failed: {answer['error']}")
        return answer["result"]

    def ask(self, op: str, **arguments: object) -> Any:
        self.send(op, **arguments)
        return self.receive()

    def _read(self) -> Any:
        line = self._lines.readline()
        if not line:
            raise AssertionError(f"a node of the test ended, exit {self._process.wait(5)}")
        return json.loads(line)

    def end(self) -> None:
        """End the process; it ends by itself when the line is closed."""
        self._lines.close()
        self._socket.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@dataclass(frozen=True, slots=True)
class World:
    """A pod with its surroundings, and the program that captures it."""

    pod: str
    peer: str
    vm: str
    nodes: Mapping[str, Node]
    program: Program

    def capture(self, raw: Raw) -> None:
        """Program the pod with these settings and forget every connection of before.

        Under TPROXY the proxy's inbound listeners are transparent, else plain.
        """
        tproxy = raw.get("inbound_interception_mode") == "TPROXY"
        self.nodes["proxy"].ask("transparent", on=tproxy, ports=CAPTURE_PORTS)
        self.program.apply(self.pod, raw)
        self.nodes["root"].ask("flush")

    def release(self) -> None:
        """Take the capture away."""
        self.program.clear(self.pod)
        self.nodes["root"].ask("flush")

    def table(self, probes: Sequence[Probe] = PROBES, *, quiet_s: float = QUIET_S) -> Table:
        """Return the outcome of each probe; all are tried at once.

        A probe without an answer is "timeout" when nothing came for `quiet_s` seconds.
        """
        by_sender: dict[str, list[dict[str, Any]]] = {}
        for each in probes:
            by_sender.setdefault(each.sender, []).append(asdict(each))
        for sender, tries in by_sender.items():
            self.nodes[sender].send("probe", probes=tries, quiet_s=quiet_s)
        table: Table = {}
        for sender in by_sender:
            answers = self.nodes[sender].receive()
            table.update({name: Outcome(*answer) for name, answer in answers.items()})
        return {each.name: table[each.name] for each in probes}

    def meet(self, name: str, **changes: Any) -> Outcome:
        """Return the outcome of one probe by name, with other values for some of its fields."""
        return self.table([replace(probe(name), **changes)], quiet_s=PATIENT_S)[name]

    def hold(self, name: str) -> Outcome:
        """Open the connection of that probe and keep it."""
        return Outcome(*self._sender(name).ask("hold", probe=asdict(probe(name))))

    def use(self, name: str, *, timeout_s: float = PATIENT_S) -> Outcome:
        """Send on a kept connection; the listener answers with the same again."""
        return Outcome(*self._sender(name).ask("use", name=name, timeout_s=timeout_s))

    def drop(self, name: str) -> None:
        self._sender(name).ask("drop", name=name)

    def _sender(self, name: str) -> Node:
        return self.nodes[probe(name).sender]

    @contextlib.contextmanager
    def deaf(self, node: str, who: str) -> Iterator[None]:
        """Close a listener for a while."""
        self.nodes[node].ask("deaf", who=who)
        try:
            yield
        finally:
            self.nodes[node].ask("listen", who=who)

    def served(self) -> dict[str, int]:
        """Return how often each listener was reached since the last call."""
        total: dict[str, int] = {}
        for node in self.nodes.values():
            for who, count in node.ask("served").items():
                total[who] = total.get(who, 0) + count
        return total


@contextlib.contextmanager
def world(label: str, program: Program) -> Iterator[World]:
    """Make a world, yield it uncaptured, and remove every process and namespace of it."""
    with contextlib.ExitStack() as stack:
        pod, peer, vm = (stack.enter_context(namespace(f"{label}-{n}")) for n in ("p", "c", "v"))
        _connect(pod, peer, vm)
        nodes: dict[str, Node] = {}
        listeners = {"proxy": _proxy_listeners(), "app": _app_listeners()}
        cast = [(name, pod, owner, listeners.get(name, ())) for name, owner in CREDENTIALS.items()]
        cast.append(("peer", peer, CREDENTIALS["root"], _peer_listeners()))
        cast.append(("vm", vm, CREDENTIALS["root"], _vm_listeners()))
        for index, (name, space, owner, wanted) in enumerate(cast):
            nodes[name] = Node(space, owner, SOURCE_PORTS[index], wanted)
            stack.callback(nodes[name].end)
        for node in nodes.values():
            node.wait_until_ready()
        yield World(pod, peer, vm, nodes, program)


def _connect(pod: str, peer: str, vm: str) -> None:
    sysctl = ("sysctl", "-q", "-w", "net.ipv6.conf.all.forwarding=1", "net.ipv4.ip_forward=1")
    inside(pod, *sysctl, "net.ipv4.ip_unprivileged_port_start=0")
    inside(
        pod,
        *("ip", "-batch", "-"),
        stdin=f"""
link add eth0 type veth peer name eth0 netns {peer}
link add net1 type veth peer name eth0 netns {vm}
{_interface("eth0", "own")}
{_interface("net1", "second")}
route add default via {HOSTS["peer4"]}
route add default via {HOSTS["peer6"]}
""",
    )
    services = ("in4", "out4", "dns4", "odd4", "in6", "out6", "dns6", "odd6")
    own = "\n".join(f"addr add {HOSTS[name]} dev lo" for name in services)
    inside(
        peer,
        *("ip", "-batch", "-"),
        stdin=f"""
{_interface("eth0", "peer")}
{own}
route add 10.78.0.0/24 via {HOSTS["own4"]}
route add fd78::/64 via {HOSTS["own6"]}
""",
    )
    inside(
        vm,
        *("ip", "-batch", "-"),
        stdin=f"""
{_interface("eth0", "vm")}
route add default via {HOSTS["second4"]}
route add default via {HOSTS["second6"]}
""",
    )


def _interface(name: str, host: str) -> str:
    return f"""addr add {HOSTS[host + "4"]}/24 dev {name}
addr add {HOSTS[host + "6"]}/64 dev {name} nodad
link set {name} up"""
