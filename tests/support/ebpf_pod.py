"""A pod that eBPF captured, a proxy in it that says what it recovered, and the world next to it.

    world namespace                      pod namespace
    10.81.0.1, fd81::1   <- veth ->      10.81.0.2, fd81::2
    whatever is sent to any other        the proxy of `ebpf_proxy` as user 1337
    address also arrives here, at the    applications as any other user
    servers of `ebpf_world`

Nobody but the world ever says `world`, so who hears that has got past the proxy.
"""

import contextlib
import json
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from agent.capture.apply import apply, remove
from agent.kernel.netns import Netns
from agent.model.settings import parse
from agent.model.state import EBPF
from tests.support import ebpf_proxy, ebpf_world
from tests.support.ebpf import own_node
from tests.support.netns import inside, namespace, path_of

SETTINGS: Mapping[str, object] = {
    "inbound_ports_include": "*",
    "outbound_ip_ranges_include": "*",
    "enable_ipv6": True,
    "redirect_dns": True,
    "capture_all_dns": True,
}
POD, POD6, PEER, PEER6 = "10.81.0.2", "fd81::2", "10.81.0.1", "fd81::1"
PYTHON = (sys.executable, "-I", "-S")
PREAMBLE = """
import ctypes, json, os, socket, struct, sys
socket.setdefaulttimeout(20)
"""


class Pod:
    """A captured pod with a proxy in it, and the world next to it."""

    def __init__(self, name: str, world: str, proxy: subprocess.Popen[str]) -> None:
        self.name = name
        self.world = world
        self._proxy = proxy

    @property
    def proxy_pid(self) -> int:
        return self._proxy.pid

    def tell(self, command: str) -> None:
        """Tell the proxy something and wait until it is done."""
        assert self._proxy.stdin is not None
        assert self._proxy.stdout is not None
        self._proxy.stdin.write(f"{command}\n")
        self._proxy.stdin.flush()
        assert self._proxy.stdout.readline() == "done\n"

    def app(self, code: str, *, uid: int = 1000, under: tuple[str, ...] = ()) -> Any:
        """Run a piece of Python as an application; return what it prints as JSON.

        `under` is a command that starts it.
        """
        start = f"{PREAMBLE}os.setgid({uid}); os.setuid({uid})\n"
        return json.loads(inside(self.name, *under, *PYTHON, "-c", start + textwrap.dedent(code)))

    def arrive(self, count: int) -> Counter[str]:
        """Connect from outside so often; return which listener answered, or what happened."""
        code = f"""
            found = []
            for _ in range({count}):
                try:
                    with socket.create_connection(("{POD}", 8080), 5) as made:
                        found.append(json.loads(made.recv(200))[2])
                except OSError as error:
                    found.append(type(error).__name__)
            print(json.dumps(found))
        """
        found = inside(self.world, *PYTHON, "-c", PREAMBLE + textwrap.dedent(code))
        return Counter(json.loads(found))


@contextlib.contextmanager
def serving(name: str, program: str) -> Iterator[subprocess.Popen[str]]:
    """Run a plain file in a namespace until the block ends; it says when it is ready."""
    pipe = subprocess.PIPE
    command = ("nsenter", f"--net={path_of(name)}", "--", *PYTHON, program)
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


@contextlib.contextmanager
def free_pod(label: str) -> Iterator[Pod]:
    """Make both namespaces and start everybody; nothing is captured yet."""
    with contextlib.ExitStack() as stack:
        name = stack.enter_context(namespace(label))
        world = stack.enter_context(namespace(f"{label}w"))
        _join(name, world)
        stack.enter_context(serving(world, ebpf_world.__file__))
        yield Pod(name, world, stack.enter_context(serving(name, ebpf_proxy.__file__)))


@contextlib.contextmanager
def captured_pod(label: str, folder: Path) -> Iterator[Pod]:
    with own_node(folder), free_pod(label) as pod, Netns.open(path_of(pod.name)) as opened:
        apply(opened, parse(SETTINGS), backend=EBPF)
        yield pod
        remove(opened)


def _join(name: str, world: str) -> None:
    inside(
        name,
        *("ip", "-batch", "-"),
        stdin=f"""
link add eth0 type veth peer name eth0 netns {world}
addr add {POD}/24 dev eth0
addr add {POD6}/64 dev eth0 nodad
link set eth0 up
""",
    )
    inside(
        world,
        *("ip", "-batch", "-"),
        stdin=f"""
addr add {PEER}/24 dev eth0
addr add {PEER6}/64 dev eth0 nodad
link set eth0 up
route add local 10.96.0.0/16 dev lo
route add local fd96::/16 dev lo
""",
    )
    routes = f"route add default via {PEER}\nroute add default via {PEER6}\n"
    inside(name, "ip", "-batch", "-", stdin=routes)
