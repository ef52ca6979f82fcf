"""Servers and clients that run as processes of their own, as some user, in some namespace.

A namespace is given as a name under /run/netns or as a path.
"""

import contextlib
import ipaddress
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tests.support import netns, web

STOP_TIMEOUT_S = 5.0
CONCURRENCY = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What became of one request. Without an answer `status` is 0 and `error` says why.

    `name` is the server that answered, `peer` and `local` the addresses that its connection had,
    `via` the Envoy listeners that the request went through, in order.
    """

    status: int = 0
    error: str = ""
    name: str = ""
    peer: str = ""
    local: str = ""
    path: str = ""
    via: tuple[str, ...] = ()

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> "Answer":
        """Read what a client says of one request."""
        if "error" in raw:
            return cls(error=raw["error"])
        status = int(raw["status"])
        try:
            seen = json.loads(raw["body"])
        except ValueError:  # Envoy's own answers are plain text
            return cls(status=status, error=raw["body"])
        return cls(status=status, **(seen | {"via": tuple(seen["via"])}))


class Client:
    """A process that sends requests, each on its own connection, many at a time."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def call(self, call: Mapping[str, object], *, count: int = 1) -> list[Answer]:
        """Send the request that `target` describes so many times."""
        return [Answer.of(outcome) for outcome in self.outcomes(call, count=count)]

    def outcomes(self, call: Mapping[str, object], *, count: int = 1) -> list[dict[str, Any]]:
        """Do the same and return what the client itself says of each."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(job(call, count=count) + "\n")
            process.stdin.flush()
        line = process.stdout.readline()
        if not line:
            raise AssertionError(f"a client ended, see stderr: {process.args!r}")
        outcomes: list[dict[str, Any]] = json.loads(line)
        return outcomes


def target(
    address: str, port: int, *, host: str = "", path: str = "/", timeout_s: float = 10.0
) -> dict[str, object]:
    """Return the request that asks for `path` there. `host` is by default the address."""
    name = f"[{address}]" if ipaddress.ip_address(address).version == 6 else address
    return {
        "address": address,
        "port": port,
        "host": host or f"{name}:{port}",
        "path": path,
        "timeout_s": timeout_s,
        "until_ok": False,
        "source": None,
    }


def job(call: Mapping[str, object], *, count: int = 1) -> str:
    """Return the line that `web.py call` takes."""
    return json.dumps({"call": call, "count": count, "concurrency": CONCURRENCY})


@contextlib.contextmanager
def client(namespace: str | Path, *, uid: int, gid: int) -> Iterator[Client]:
    """Run a client for as long as the block lasts."""
    command = _web(namespace, "call", "--uid", str(uid), "--gid", str(gid))
    with running(command, stdout=subprocess.PIPE) as process:
        yield Client(process)


@dataclass(frozen=True, slots=True, kw_only=True)
class Followed:
    """How a connection fared that was to last. `error` is empty if it was open to the end."""

    ticks: int
    error: str
    status: int = 0


class Follower:
    """Some connections on which something arrives all the time."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def stop(self) -> list[Followed]:
        """Stop and say how each connection fared, in the order of the calls."""
        said, _ = self._process.communicate("enough\n")
        return [Followed(**one) for one in json.loads(said)]


@contextlib.contextmanager
def follower(namespace: str | Path, *targets: Mapping[str, object], uid: int) -> Iterator[Follower]:
    """Hold a connection to each target; all have been answered when the block starts."""
    command = _web(namespace, "follow", "--uid", str(uid), "--gid", str(uid))
    with running(command, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(targets) + "\n")
        process.stdin.flush()
        if process.stdout.readline() != f"{web.READY}\n":
            raise AssertionError("the connections were not made, see stderr")
        yield Follower(process)


@contextlib.contextmanager
def server(namespace: str | Path, name: str, port: int, *, uid: int) -> Iterator[None]:
    """Run a server that answers on both families before the block starts."""
    user = ("--uid", str(uid), "--gid", str(uid))
    command = _web(namespace, "serve", *user, "--name", name, "--port", str(port))
    with running(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        if process.stdout.readline() != f"{web.READY}\n":
            raise AssertionError(f"server {name} did not start on port {port}")
        yield


def _web(namespace: str | Path, *arguments: str) -> tuple[str, ...]:
    return (*nsenter(namespace), sys.executable, "-I", "-S", str(web.__file__), *arguments)


def nsenter(namespace: str | Path) -> tuple[str, ...]:
    """Return what goes before a command that is to run in a namespace."""
    return ("nsenter", f"--net={netns.path_of(str(namespace))}", "--")


@contextlib.contextmanager
def running(
    command: tuple[str, ...], *, stdout: int | IO[str], pass_fds: tuple[int, ...] = ()
) -> Iterator[subprocess.Popen[str]]:
    """Run a process in a session of its own (so Ctrl-C reaches only us) and end it at the end."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=stdout,
        stderr=None if stdout == subprocess.PIPE else subprocess.STDOUT,
        text=True,
        start_new_session=True,
        pass_fds=pass_fds,
    )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
