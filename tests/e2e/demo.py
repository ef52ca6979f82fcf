"""Show the agent at work: on one pod with a real Envoy, then as the daemon of a whole node.

Run as root: `python -m tests.e2e.demo`. It works on network namespaces and a container runtime of
its own, which it removes again, also when it is interrupted. It ends with 0 if everything went as
it should.
"""

import os
import shlex
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NoReturn

from agent.model import numbers
from tests.containerd import mesh
from tests.containerd.mesh import mesh_pod, run_app, run_proxy
from tests.containerd.node import SUBNETS_DUAL, containerd_node
from tests.support.agent import running, wait_for
from tests.support.calls import Answer
from tests.support.pod import (
    APP_PORT,
    APP_UID,
    OUTSIDE_PORT,
    PEER,
    POD,
    Pod,
    agent_command,
)

REQUESTS = 100
DELETE = ("delete", "table", "inet", "intercept-agent")

# Everything in both directions, except what the mesh keeps for itself.
CAPTURE = ("-b", "*", "-d", "15020,15021,15090", "-i", "*", "-o", "15020")

BOLD, DIM, GREEN, RED = "1", "2", "32", "31"
FAMILIES = {4: "IPv4", 6: "IPv6"}


class Unexpected(Exception):
    """Something did not go as it should; the message says what."""


def paint(text: str, code: str) -> str:
    if not sys.stdout.isatty() or "NO_COLOR" in os.environ:
        return text
    return f"\033[{code}m{text}\033[0m"


def heading(text: str) -> None:
    print(f"\n{paint(text, BOLD)}", flush=True)


def line(text: str) -> None:
    print(f"  {text}", flush=True)


def require(holds: bool, what: str) -> None:
    """Go on if `what` is so. Raises: Unexpected."""
    if not holds:
        raise Unexpected(what)


def agent(*arguments: str) -> str:
    """Run the agent as a user would, show what it printed, and return that.

    Raises: Unexpected if it fails.
    """
    line(paint(f"$ intercept-agent {shlex.join(arguments)}", DIM))
    done = agent_command(*arguments)
    said = f"{done.stdout}{done.stderr}".rstrip()
    for text in said.splitlines():
        line(text)
    require(done.returncode == 0, f"{arguments[0]} ended with exit code {done.returncode}")
    return said


def way(answer: Answer) -> str:
    """Return how a request got to its server, in words."""
    if not answer.name:
        return paint(answer.error, RED)
    through = f"through Envoy ({', '.join(answer.via)})" if answer.via else "directly"
    return f"answered by {answer.name} {through}; it saw {answer.peer}"


def send_both_ways(pod: Pod, count: int = 1) -> list[Answer]:
    """Send requests out of the pod and into it, over both families, and show the ways they took."""
    everything = []
    for direction, send in ways(pod).items():
        for version, family in FAMILIES.items():
            answers = send(version, count)
            everything += answers
            for text, times in Counter(way(answer) for answer in answers).items():
                number = f"{times:>4} " if count > 1 else ""
                line(f"{direction} {family} {number} {text}")
    return everything


def ways(pod: Pod) -> dict[str, Callable[[int, int], list[Answer]]]:
    return {
        "out": lambda version, count: pod.call(PEER[version], OUTSIDE_PORT, count=count),
        "in ": lambda version, count: pod.call_from_peer(POD[version], APP_PORT, count=count),
    }


def show(pod: Pod) -> None:
    """Walk through the life of a capture. Raises: Unexpected where the agent fails to deliver."""
    name = pod.namespace
    heading("A pod and the world outside")
    line(f"{name}: {POD[4]}, {POD[6]}; app on port {APP_PORT} as user {APP_UID}, Envoy as 1337")
    line(f"{pod.peer}: {PEER[4]}, {PEER[6]}; a server on port {OUTSIDE_PORT}")
    before = pod.snapshot()

    heading("1. Before: requests go past Envoy")
    answers = send_both_ways(pod)
    require(all(a.name and not a.via for a in answers), "a request did not go the direct way")

    heading("2. Capture the pod")
    agent("apply", "--netns", name, *CAPTURE)

    heading("3. The same requests now pass Envoy, and none is lost")
    start = pod.counters()
    answers = send_both_ways(pod, REQUESTS)
    moved = pod.counters() - start
    line(
        f"Envoy counted {moved.outbound_connections} outbound connections, "
        f"{moved.inbound_connections} inbound"
    )
    require(all(len(a.via) == 1 for a in answers), "a request did not pass Envoy exactly once")
    expected = {2 * REQUESTS}
    require(
        {moved.outbound_connections, moved.inbound_connections} == expected,
        f"Envoy's counters should both have moved by {2 * REQUESTS}",
    )

    heading("4. Why? One packet, walked through the rules that are loaded")
    to = f"{PEER[4]}:{OUTSIDE_PORT}"
    said = agent("trace", "--netns", name, "--uid", str(APP_UID), "--to", to)
    require(str(numbers.PROXY_PORT) in said, "trace does not say what the traffic just did")

    heading("5. Is everything as it should be?")
    agent("check", "--netns", name, *CAPTURE)

    heading("6. Envoy stops: captured traffic is refused, it does not slip past")
    pod.stop_proxy()
    answers = send_both_ways(pod)
    require(not any(a.name for a in answers), "a request passed without Envoy")

    heading("7. Take the capture out again")
    agent("remove", "--netns", name)
    answers = send_both_ways(pod)
    require(all(a.name and not a.via for a in answers), "a request did not go the direct way")
    require(pod.snapshot() == before, "the namespace is not as it was before")
    line("rules, routes and addresses are byte for byte what they were before")


def show_node(folder: Path) -> None:
    """Let a real containerd start pods on a node with the agent. Raises: Unexpected."""
    heading(
        "8. A node: containerd, its CNI plugins, and the agent, which chains its own behind them"
    )
    with (
        containerd_node(subnets=SUBNETS_DUAL) as node,
        running(folder, **mesh.configuration(node)) as daemon,
    ):
        os.environ["INTERCEPT_SOCKET"] = str(daemon.socket)
        web, cart = (run_proxy(run_app(node, mesh_pod(node, name))) for name in ("web", "cart"))
        plain = run_app(node, node.run_pod("plain", "default"))
        line("three pods started: web and cart with Envoy as their sidecar, plain without")
        wait_for(lambda: daemon.state("plain") == "ignored")
        wait_for(lambda: daemon.state("web") == daemon.state("cart") == "in-sync")
        agent("status")
        agent("pods")

        heading("9. Requests between the pods")
        for source, target in ((web, cart), (plain, cart), (web, plain), (plain, plain)):
            for version, family in FAMILIES.items():
                (answer,) = source.call(target.address[version], APP_PORT)
                names = f"{source.pod.name} to {target.pod.name}"
                line(f"{names:<14} {family}  {way(answer)}")
                proxies = [app for app in (source, target) if app is not plain]
                require(len(answer.via) == len(proxies), f"{names} passed {answer.via}")

        heading("10. Somebody deletes the rules of a pod; the agent puts them back")
        node.run("nsenter", f"--net={web.netns}", "nft", *DELETE)
        wait_for(lambda: "drift-repaired" in daemon.kinds())
        agent("events")
        agent("check", "--netns", "pod:shop/web")

        heading("11. The agent is killed; its captures stay")
        daemon.stop(signal.SIGKILL)
        agent("check", "--netns", f"pid:{web.pod.pid}")


def main() -> int:
    """Run the demo; return its exit code. Everything it made is gone when this returns."""
    if os.geteuid() != 0:
        print("The demo makes network namespaces, which needs root: sudo make run", file=sys.stderr)
        return 3
    signal.signal(signal.SIGTERM, _interrupted)
    try:
        with tempfile.TemporaryDirectory(prefix="it-") as folder:
            state = Path(folder, "state")
            os.environ["INTERCEPT_STATE_DIR"] = str(state)  # interrupted, it leaves no record
            with Pod() as pod:
                show(pod)
            show_node(Path(folder))
    except BrokenPipeError:  # nobody reads on (`make run | head`); what was made is gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        print("\nInterrupted. Everything that the demo made is gone again.", file=sys.stderr)
        return 130
    except (Unexpected, AssertionError, ImportError, OSError) as failure:
        print(f"\n{paint('Failed:', RED)} {failure}", file=sys.stderr)
        return 1
    heading(paint("Done.", GREEN) + " Everything that the demo made is gone.")
    return 0


def _interrupted(_number: int, _frame: FrameType | None) -> NoReturn:
    """Treat a request to end like Ctrl-C, so that what was made is taken away."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
