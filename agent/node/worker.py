"""The privileged half of the daemon: enters namespaces and does a handful of typed jobs in them.

It is given namespace file descriptors over a socketpair and answers in JSON. It opens no path that
the other side names, talks to no network and to no API, and ends when the other side is gone.
"""

import array
import contextlib
import json
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

from agent.backends import ebpf, registry
from agent.backends.session import reading
from agent.capture import gate, record
from agent.capture.apply import apply, remove
from agent.capture.check import check
from agent.capture.inputs import Target, settings_for
from agent.capture.observe import observe
from agent.capture.probing.probe import passed, probe
from agent.kernel import namespaces, open_files
from agent.kernel.arrivals import Arrivals
from agent.kernel.changes import Changes
from agent.kernel.namespaces import Place, Process
from agent.kernel.netns import Netns, refuse_node
from agent.kernel.xtables_worker import HEADER, receive_exactly
from agent.leftovers.cni import Folders
from agent.leftovers.node import Node, PodFact, owners_among
from agent.leftovers.scan import Memory, Subject, on_node
from agent.model.errors import AgentError, InvalidSettings
from agent.model.settings import dump
from agent.model.wanted import captures
from agent.proxy import ports

# Enough that one pod with a slow tool does not hold up the others; the machine has few cores.
THREADS = 4
PROCESSES_FRESH_S = 10.0
PATIENCE_S = 60.0
MAX_FDS = 2  # the namespace, and a pipe or a socket for the jobs that need one

ARRIVALS = Arrivals()
CHANGES = Changes()

Job = Callable[[Netns, Mapping[str, Any]], dict[str, object]]


def _apply(netns: Netns, request: Mapping[str, Any]) -> dict[str, object]:
    settings = settings_for(request["settings"], Target(netns, netns.path))
    done = apply(
        netns,
        settings,
        backend=request.get("backend", "auto"),
        careful=request.get("careful", False),
        kept=True,
    )
    return {**asdict(done), "settings": dump(settings)}


def _check(netns: Netns, request: Mapping[str, Any]) -> dict[str, object]:
    raw = record.as_applied(netns, request["settings"])
    settings = settings_for(raw, Target(netns, netns.path))
    report = check(netns, settings, backend=request.get("backend", "auto"), kept=True)
    return {
        "backend": report.backend,
        "in_sync": report.in_sync,
        "guarded": report.guarded,
        "bare": report.bare,
        "passing": report.passing,
        "differences": [difference.line() for difference in report.differences],
        "foreign": list(report.foreign),
        "warnings": list(report.warnings),
    }


def _remove(netns: Netns, _: Mapping[str, Any]) -> dict[str, object]:
    return asdict(remove(netns))


def _look(netns: Netns, _: Mapping[str, Any]) -> dict[str, object]:
    """Tell what is loaded, by backend, and what is on record."""
    with reading(netns) as session:
        have = observe(session)
    found = captures(have)
    counts = {
        name: sum(r.rule_count() for r in found.get(name, {}).values())
        for name in registry.in_use(have)
    }
    known = record.load(netns)
    return {"captures": counts, "settings": dict(known.settings) if known else None}


def _probe(netns: Netns, request: Mapping[str, Any]) -> dict[str, object]:
    settings = settings_for(request["settings"], Target(netns, netns.path))
    results = probe(netns, settings)
    return {"passed": passed(results), "results": [asdict(result) for result in results]}


def _watch(netns: Netns, request: Mapping[str, Any]) -> dict[str, object]:
    """Tell a pipe of every change that follows, until nobody reads it."""
    CHANGES.watch(netns, request["pipe"])
    return {}


def _gate(netns: Netns, request: Mapping[str, Any]) -> dict[str, object]:
    """Tell how the gate stands, and tell the pipe when the proxy listens for the first time.

    `closed` is for good, also when the proxy dies. `armed`: there is to be a capture, which lets
    some or all pass until then. `open`: of rules, there is to be none until then.
    """
    settings = settings_for(request["settings"], Target(netns, netns.path))
    with reading(netns) as session:
        have = observe(session)
        backend = registry.choose(request.get("backend", "auto"), have, settings).name
    found = record.load(netns)
    ahead = {settings.proxy_port, settings.inbound_capture_port}
    stands = gate.stands(have, found)
    if stands == gate.CLOSED:
        return {"gate": gate.CLOSED}
    ARRIVALS.expect(netns, ahead, request["pipe"])
    if ports.listening(netns, ahead):
        return {"gate": gate.CLOSED}
    if gate.settled(settings, have, found, backend, listening=False).gate != gate.CLOSED:
        return {"gate": "armed"}
    return {"gate": gate.CLOSED if stands else "open"}


def _listening(netns: Netns, request: Mapping[str, Any]) -> dict[str, object]:
    return {"ports": ports.listening(netns, request["ports"])}


def _connect(netns: Netns, request: Mapping[str, Any]) -> dict[str, object]:
    """Hand a connection to one of the proxy's ports over the pipe, which is a socket here."""
    ports.hand_over(netns, request["port"], request["pipe"])
    return {}


def _ways(netns: Netns, request: Mapping[str, Any]) -> dict[str, object]:
    """Tell the ways that connections take through what is loaded; for who looks at one pod."""
    from agent.node.ways import look  # the whole of `explain`, which most workers never need

    return look(netns, request["settings"])


class Surroundings:
    """The owners of rules among the processes of the node, looked for anew after a while."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: tuple[Process, ...] = ()
        self._until = 0.0

    def processes(self) -> tuple[Process, ...]:
        with self._lock:
            if time.monotonic() > self._until:
                self._known = owners_among(namespaces.processes())
                self._until = time.monotonic() + PROCESSES_FRESH_S
            return self._known


SURROUNDINGS = Surroundings()
MEMORY = Memory()


def _scan(netns: Netns, request: Mapping[str, Any]) -> dict[str, object]:
    """Tell what is left over here; with `cni`, the folders of its files, on the node too."""
    pod = request.get("pod")
    node = Node(
        processes=SURROUNDINGS.processes(),
        all_visible=namespaces.all_visible(),
        pods={netns.id: PodFact(**pod)} if pod else {},
    )
    subject = Subject(place=Place(netns.id, netns.path, request["name"]), host=request["host"])
    found = MEMORY.inspect(netns, subject, node)
    if request.get("cni") is not None:
        found = (*on_node(Folders.of(**request["cni"]), node), *found)
    return {"findings": [finding.document() for finding in found]}


def _sweep(_: Netns, __: Mapping[str, Any]) -> dict[str, object]:
    """Take out what namespaces that are gone left on the node, whichever namespace this is."""
    return asdict(ebpf.sweep())


# Jobs that write nothing into a namespace may be given the node's own, too.
HARMLESS = frozenset({"scan", "sweep"})

JOBS: Mapping[str, Job] = {
    "apply": _apply,
    "check": _check,
    "remove": _remove,
    "look": _look,
    "probe": _probe,
    "watch": _watch,
    "gate": _gate,
    "listening": _listening,
    "connect": _connect,
    "scan": _scan,
    "ways": _ways,
    "sweep": _sweep,
}


class Worker:
    """Reads requests from a socket and answers them, several at a time."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._writing = threading.Lock()
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="job")

    def serve(self) -> None:
        """Do jobs until the other side is gone."""
        while True:
            size_of_fds = socket.CMSG_LEN(MAX_FDS * array.array("i").itemsize)
            header, ancillary, _, _ = self._socket.recvmsg(HEADER.size, size_of_fds)
            if not header:
                return
            fds = array.array("i")
            for _, _, data in ancillary:
                fds.frombytes(data)
            request = json.loads(receive_exactly(self._socket, HEADER.unpack(header)[0]))
            self._pool.submit(self._answer, request, list(fds))

    def _answer(self, request: Mapping[str, Any], fds: list[int]) -> None:
        netns_fd, pipe = (*fds, -1, -1)[:MAX_FDS]
        try:
            reply = {"id": request["id"], **_do({**request, "pipe": pipe}, netns_fd)}
        finally:
            if pipe >= 0:
                os.close(pipe)
        payload = json.dumps(reply).encode()
        with self._writing, contextlib.suppress(OSError):
            self._socket.sendall(struct.pack("!I", len(payload)) + payload)


def _do(request: Mapping[str, Any], fd: int) -> dict[str, object]:
    """Do one job and return its result, or its error in words."""
    try:
        with Netns.of(fd, str(request.get("name", "a pod"))) as n:
            if request["job"] not in HARMLESS:
                refuse_node(n, is_self=False)
            return {"result": JOBS[request["job"]](n, request)}
    except InvalidSettings as error:
        return _failure(error, problems=list(error.problems))
    except AgentError as error:
        return _failure(error)
    except Exception as error:  # a bug in one job must not end the others
        return {"error": {"kind": "bug", "message": repr(error), "exit_code": 4}}


def _failure(error: AgentError, **more: object) -> dict[str, object]:
    kind = type(error).__name__
    return {"error": {"kind": kind, "message": str(error), "exit_code": error.exit_code, **more}}


def main() -> None:
    open_files.allow_many()
    sock = socket.socket(fileno=int(sys.argv[1]))
    sock.setblocking(True)
    with contextlib.suppress(EOFError, ConnectionResetError, KeyboardInterrupt):
        Worker(sock).serve()
    # What is being done is done to its end; a job that hangs does not keep this process for ever.
    ending = threading.Timer(PATIENCE_S, os._exit, (1,))
    ending.daemon = True
    ending.start()


if __name__ == "__main__":
    main()
