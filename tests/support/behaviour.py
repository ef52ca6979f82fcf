"""Who really answers: a pod, its peers and real sockets, and the table of what each connection met.

A `World` is three namespaces. `pod` has eth0 towards `peer` (the cluster: services, name servers)
and net1 towards `vm` (a virtual machine behind the pod). In the pod, one process per credential
sends, a fake proxy (1337) listens on the mesh's ports and an app (1000) on its own. Everything is
dual-stack and made once; only the capture changes:

    with world("pod", program) as pod:
        pod.capture({"inbound_ports_include": "*"})
        pod.table()["peer>own4:8080"]  # Outcome("proxy:15006", "10.77.0.2:8080", "10.77.0.1")

`program` is any `Program`: whatever can capture a namespace by name and let it go again. A table of
all probes takes about 40 ms, and `QUIET_S` more when something is dropped. Who is who, and the
probes, are in `behaviour_cast`.
"""

import contextlib
import json
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from tests.support import behaviour_node
from tests.support.behaviour_cast import (
    CAPTURE_PORTS,
    CREDENTIALS,
    HOSTS,
    PROBES,
    SOURCE_PORTS,
    TPROXY_PROXY,
    Credential,
    Probe,
    app_listeners,
    peer_listeners,
    probe,
    proxy_listeners,
    vm_listeners,
)
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
        with contextlib.suppress(OSError):  # it may be gone already, with a command unread
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
        listeners = {"proxy": proxy_listeners(), "app": app_listeners()}
        cast = [(name, pod, owner, listeners.get(name, ())) for name, owner in CREDENTIALS.items()]
        cast.append(("envoy", pod, TPROXY_PROXY, ()))
        cast.append(("peer", peer, CREDENTIALS["root"], peer_listeners()))
        cast.append(("vm", vm, CREDENTIALS["root"], vm_listeners()))
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
