"""A pod as a mesh makes it: an application, a real Envoy beside it, and the world outside.

    peer namespace                      pod namespace
    10.77.0.1, fd00:77::1  <- veth ->   10.77.0.2, fd00:77::2
    10.78.0.1, fd00:78::1 (on lo)
    server "outside" :8000              application "app" :8080 as user 1000
                                        Envoy as user 1337: 15001, 15006, 15021, admin 15000

Nothing here captures anything: that is what is under test. Everything is gone when the block ends.
"""

import contextlib
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, Self

from agent.model import numbers
from tests.support import calls, envoy, netns
from tests.support.calls import Answer, Client, target

ROOT = Path(__file__).parents[2]

APP_UID = 1000
APP_PORT = 8080
OUTSIDE_PORT = 8000

POD = {4: "10.77.0.2", 6: "fd00:77::2"}
PEER = {4: "10.77.0.1", 6: "fd00:77::1"}
PREFIX = {4: 24, 6: 64}
# Further addresses of the peer, for whoever needs a client that has never called before.
STRANGER = {4: "10.78.0.1", 6: "fd00:78::1"}

START_TIMEOUT_S = 20.0
COMMAND_TIMEOUT_S = 60.0
POLL_S = 0.01
MAX_LOG_BYTES = 1 << 20
# Hot restart is off, so no two Envoys share anything.
ALONE = ("--concurrency", "1", "--disable-hot-restart")


def wait_for(condition: Callable[[], bool], what: str, *, timeout_s: float = 10.0) -> None:
    """Return as soon as `condition` holds.

    Raises: AssertionError naming `what` if it does not hold within `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {timeout_s} s")
        time.sleep(POLL_S)


def capture_arguments(mode: str = "REDIRECT") -> tuple[str, ...]:
    """Return the capture that the mesh's CNI plugin asks for when a pod has no annotations."""
    return (
        *("--istio-inbound-interception-mode", mode),
        *("--istio-inbound-ports", "*", "--istio-local-exclude-ports", "15020,15021,15090"),
        *("--istio-service-cidr", "*", "--istio-local-outbound-ports-exclude", "15020"),
    )


def agent_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `intercept-agent` from this checkout; the caller judges the exit code."""
    command = (sys.executable, "-m", "agent.cli.main", *arguments)
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=COMMAND_TIMEOUT_S
    )


class Pod:
    """A pod with its outside, for use in a `with` block. Envoy runs from the start.

    Args:
        mode: `TPROXY` gives Envoy a transparent inbound listener and the capability it needs.
        keep_source: Envoy shows the application the client's own address (TPROXY only).
        proxy_uid, proxy_gid: who Envoy is.
    """

    def __init__(
        self,
        *,
        mode: str = "REDIRECT",
        keep_source: bool = False,
        proxy_uid: int = numbers.PROXY_ID,
        proxy_gid: int = numbers.PROXY_ID,
    ) -> None:
        self.mode = mode
        self.namespace = ""
        self.peer = ""
        self._spec = envoy.ProxySpec(
            transparent=mode == "TPROXY",
            keep_source=keep_source,
            self_v4=(POD[4], APP_PORT),
            self_v6=(POD[6], APP_PORT),
        )
        self._proxy_ids = (proxy_uid, proxy_gid)
        self._stack = contextlib.ExitStack()
        self._clients = contextlib.ExitStack()
        self._client_by_identity: dict[tuple[str, int, int], Client] = {}
        self._proxy = contextlib.ExitStack()
        self._log: IO[str] | None = None

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            self._log = stack.enter_context(tempfile.TemporaryFile("w+"))
            self.namespace = stack.enter_context(netns.namespace("pod"))
            self.peer = stack.enter_context(netns.namespace("peer"))
            _join(self.namespace, self.peer)
            stack.enter_context(calls.server(self.namespace, "app", APP_PORT, uid=APP_UID))
            stack.enter_context(calls.server(self.peer, "outside", OUTSIDE_PORT, uid=APP_UID))
            stack.callback(self._clients.close)
            stack.callback(self.stop_proxy)
            self.start_proxy()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def target(self) -> str:
        """Return the namespace as the agent's `--netns` wants it."""
        return str(netns.path_of(self.namespace))

    def start_proxy(self) -> None:
        """Start Envoy and return when it serves.

        Raises: AssertionError with its log if it ends or does not serve in time.
        """
        with contextlib.ExitStack() as stack:
            process = stack.enter_context(self.run_proxy())
            deadline = time.monotonic() + START_TIMEOUT_S
            while not self.proxy_serves():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise AssertionError(f"Envoy did not start:\n{self.proxy_log()}")
            self._proxy = stack.pop_all()

    def run_proxy(self, *options: str) -> AbstractContextManager[subprocess.Popen[str]]:
        """Run an Envoy for as long as the block lasts, which is not waited for."""
        assert self._log is not None, "only inside the `with` block"
        uid, gid = self._proxy_ids
        return run_envoy(
            self.namespace,
            envoy.config(self._spec),
            *options,
            uid=uid,
            gid=gid,
            capabilities=("net_admin",) if self._spec.transparent else (),
            log=self._log,
        )

    def proxy_serves(self) -> bool:
        """Tell whether Envoy answers. Waits a second at most."""
        call = target("127.0.0.1", numbers.HEALTH_PORT, path=envoy.HEALTH_PATH, timeout_s=1.0)
        client = self._client(self.namespace, uid=0, gid=0)
        (answer,) = client.call(call | {"until_ok": True})
        return answer.status == 200

    def stop_proxy(self) -> None:
        """Stop Envoy and return when it is gone; harmless if it is not running."""
        self._proxy.close()

    def proxy_log(self) -> str:
        """Return what Envoy has logged so far."""
        assert self._log is not None, "only inside the `with` block"
        return os.pread(self._log.fileno(), MAX_LOG_BYTES, 0).decode(errors="replace")

    def counters(self) -> envoy.Counters:
        """Return Envoy's counters, read from its admin port inside the pod."""
        call = target("127.0.0.1", envoy.ADMIN_PORT, path=envoy.COUNTERS_PATH)
        (outcome,) = self._client(self.namespace, uid=0, gid=0).outcomes(call)
        return envoy.counters_in(outcome["body"])

    def capture(self, backend: str, *more: str) -> None:
        """Have the agent capture this pod; `more` are further options of `apply`.

        Raises: AssertionError with what the agent said if it fails.
        """
        options = ("--backend", backend, *capture_arguments(self.mode), *more)
        _successful(agent_command("apply", "--netns", self.target, *options))

    def release(self) -> None:
        """Have the agent take the capture out. Raises: AssertionError as `capture` does."""
        _successful(agent_command("remove", "--netns", self.target))

    def call(
        self,
        address: str,
        port: int,
        *,
        uid: int = APP_UID,
        gid: int | None = None,
        host: str = "",
        path: str = "/",
        count: int = 1,
        timeout_s: float = 10.0,
    ) -> list[Answer]:
        """Send requests from inside the pod, each on its own connection, many at a time.

        `host` is the Host header; by default the address. `gid` is that of `uid` by default.
        """
        call = target(address, port, host=host, path=path, timeout_s=timeout_s)
        client = self._client(self.namespace, uid=uid, gid=uid if gid is None else gid)
        return client.call(call, count=count)

    def call_from_peer(
        self,
        address: str,
        port: int,
        *,
        source: tuple[str, int] | None = None,
        path: str = "/",
        count: int = 1,
        timeout_s: float = 10.0,
    ) -> list[Answer]:
        """Send requests from outside the pod, as `call` does from inside.

        `source` is an address of the peer and a port, 0 for any.
        """
        call = target(address, port, path=path, timeout_s=timeout_s) | {"source": source}
        return self._client(self.peer, uid=APP_UID, gid=APP_UID).call(call, count=count)

    def _client(self, namespace: str, *, uid: int, gid: int) -> Client:
        """Return the client process of that namespace and identity."""
        identity = (namespace, uid, gid)
        if identity not in self._client_by_identity:
            started = self._clients.enter_context(calls.client(namespace, uid=uid, gid=gid))
            self._client_by_identity[identity] = started
        return self._client_by_identity[identity]

    def snapshot(self) -> dict[str, str]:
        """Return everything that a capture could change in the pod's namespace."""
        return netns.snapshot(self.namespace)


def _successful(done: subprocess.CompletedProcess[str]) -> None:
    if done.returncode:
        said = f"{done.stdout}{done.stderr}".strip()
        raise AssertionError(f"{' '.join(done.args)}: exit {done.returncode}: {said}")


def _join(pod: str, peer: str) -> None:
    """Connect both namespaces; each has the other as its default route."""
    netns.run(
        *("ip", "link", "add", "eth0", "netns", pod, "type", "veth"),
        *("peer", "name", "eth0", "netns", peer),
    )
    for name in (pod, peer):
        # Without link-local addresses and their detection of duplicates, what `ip addr` says is
        # final from the start, so that two snapshots can be compared.
        netns.run("ip", "-n", name, "link", "set", "eth0", "addrgenmode", "none", "up")
    for name in (pod, peer):
        wait_for(functools.partial(_is_up, name), f"eth0 of {name} is up")
    for name, own, other in ((pod, POD, PEER), (peer, PEER, POD)):
        for version in (4, 6):
            nodad = ("nodad",) if version == 6 else ()
            address = f"{own[version]}/{PREFIX[version]}"
            netns.run("ip", "-n", name, "addr", "add", address, "dev", "eth0", *nodad)
            netns.run("ip", "-n", name, "route", "add", "default", "via", other[version])
    for stranger in STRANGER.values():
        netns.run("ip", "-n", peer, "addr", "add", stranger, "dev", "lo")


def _is_up(namespace: str) -> bool:
    links = json.loads(netns.run("ip", "-n", namespace, "-j", "link", "show", "eth0"))
    return bool(links[0]["operstate"] == "UP")


@contextlib.contextmanager
def run_envoy(
    namespace: str,
    config: str,
    *options: str,
    uid: int,
    gid: int,
    capabilities: tuple[str, ...],
    log: IO[str],
) -> Iterator[subprocess.Popen[str]]:
    """Run Envoy as that user, with those capabilities kept.

    The binary is opened here and executed by descriptor: the proxy's user may not be able to reach
    the directory that it lies in. Without `options` it is `ALONE`.
    """
    kept = ",".join(f"+{name}" for name in capabilities)
    keep = ("--inh-caps", kept, "--ambient-caps", kept) if kept else ()
    program = os.open(envoy.binary(), os.O_RDONLY | os.O_CLOEXEC)
    try:
        command = (
            *calls.nsenter(namespace),
            *("setpriv", "--reuid", str(uid), "--regid", str(gid), "--clear-groups"),
            *keep,
            *("--pdeathsig", "KILL", "--"),
            *(f"/proc/self/fd/{program}", "--config-yaml", config, "--log-level", "warning"),
            *(options or ALONE),
        )
        with calls.running(command, stdout=log, pass_fds=(program,)) as process:
            yield process
    finally:
        os.close(program)
