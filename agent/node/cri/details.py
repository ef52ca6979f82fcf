"""What the runtime says about sandboxes and containers, as values. No I/O.

Where a pod's network namespace is, CRI tells only in the verbose status, in JSON of the runtime's
own: containerd and CRI-O both put the OCI specification there. Versions differ, so everything in it
is optional, and what does not fit is as good as missing.
"""

import contextlib
import ipaddress
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import msgspec

from agent.model.values import Address, BadValue, cgroups
from agent.node.cri import api_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class Sandbox:
    """One sandbox: a pod, or one attempt at it. Times are nanoseconds since the epoch.

    `detailed` says that the runtime was asked about this one and answered; without it nothing is
    known of the host network, the namespace, the process and the addresses. `netns_path` is None
    for host-network pods and once the runtime has closed the namespace.
    """

    id: str
    namespace: str
    name: str
    uid: str
    attempt: int
    ready: bool
    created_at_ns: int
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    host_network: bool = False
    netns_path: str | None = None
    pid: int | None = None
    ips: tuple[Address, ...] = ()
    runtime_handler: str = ""
    detailed: bool = False

    @property
    def complete(self) -> bool:
        """Whether there is nothing left that the runtime could still fill in."""
        if not self.detailed or self.host_network or not self.ready:
            return self.detailed
        return self.netns_path is not None and bool(self.ips)


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """One container of a sandbox. `pid` is known only while it runs.

    `cgroup` is where its cgroup is or will be, from the root of cgroup2 on, until it has ended.
    """

    id: str
    sandbox_id: str
    name: str
    attempt: int
    running: bool
    created_at_ns: int
    labels: Mapping[str, str] = field(default_factory=dict)
    pid: int | None = None
    netns_path: str | None = None
    cgroup: str | None = None


# --- the runtime's own JSON -----------------------------------------------------------------------


class _Namespace(msgspec.Struct):
    type: str = ""
    path: str = ""


class _Linux(msgspec.Struct):
    namespaces: list[_Namespace] | None = None
    cgroup: str = msgspec.field(default="", name="cgroupsPath")


class _Spec(msgspec.Struct):
    linux: _Linux | None = None


class _Verbose(msgspec.Struct):
    pid: int = 0
    closed: bool = msgspec.field(default=False, name="netNamespaceClosed")
    spec: _Spec | None = msgspec.field(default=None, name="runtimeSpec")


@dataclass(frozen=True, slots=True)
class Verbose:
    """What the verbose part of a status says; `shares_host` is None where it does not say."""

    pid: int | None = None
    closed: bool = False
    netns_path: str | None = None
    shares_host: bool | None = None
    cgroup: str | None = None


def verbose(info: Mapping[str, str]) -> Verbose:
    """Return what can be understood of the `info` of a verbose status."""
    found = _Verbose()
    with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
        found = msgspec.json.decode(info.get("info", "{}"), type=_Verbose)
    pid = found.pid if found.pid > 0 else None
    linux = found.spec.linux if found.spec else None
    cgroup = cgroup_of(linux.cgroup) if linux else None
    # CRI-O says {} where it has no pause process, before 1.24.
    if not linux or not linux.namespaces:
        return Verbose(pid, found.closed, cgroup=cgroup)
    paths = [space.path for space in linux.namespaces if space.type == "network"]
    path = _usable(paths[0]) if paths else None
    return Verbose(pid, found.closed, path, not paths, cgroup)


def cgroup_of(text: str) -> str | None:
    """Return the path that a runtime makes of `cgroupsPath`; None if it is not one to be sure of.

    It is a path already, or, where systemd makes the cgroups, `SLICE:PREFIX:NAME`. A slice's name
    has those above it in it: a-b.slice is in a.slice.
    """
    above, colon, name = text.partition(":")
    if colon:
        words = above.removesuffix(".slice").split("-")
        slices = ["-".join(words[: count + 1]) + ".slice" for count in range(len(words))]
        text = "/" + "/".join((*slices, f"{name.replace(':', '-')}.scope"))
    try:
        (found,) = cgroups(text)
    except (BadValue, ValueError):
        return None
    return found


def _usable(path: str) -> str | None:
    return path if path.startswith("/") and "\0" not in path else None


class _CniConfig(msgspec.Struct):
    conf_dir: str = msgspec.field(default="", name="PluginConfDir")
    bin_dirs: list[str] | None = msgspec.field(default=None, name="PluginDirs")


@dataclass(frozen=True, slots=True)
class CniPlaces:
    """The node's directories in which a runtime looks for CNI configurations and for plugins."""

    conf_dir: str
    bin_dirs: tuple[str, ...]


def cni_places(info: Mapping[str, str]) -> CniPlaces | None:
    """Return what the `info` of a runtime's verbose status says of CNI, as containerd's does."""
    with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
        found = msgspec.json.decode(info.get("cniconfig", "{}"), type=_CniConfig)
        dirs = tuple(filter(_usable, found.bin_dirs or ()))
        if _usable(found.conf_dir) and dirs:
            return CniPlaces(found.conf_dir, dirs)
    return None


# --- answers --------------------------------------------------------------------------------------


def listed(item: api_pb2.PodSandbox) -> Sandbox:
    """Return what the list says of a sandbox."""
    about = item.metadata
    return Sandbox(
        id=item.id,
        namespace=about.namespace,
        name=about.name,
        uid=about.uid,
        attempt=about.attempt,
        ready=item.state == api_pb2.SANDBOX_READY,
        created_at_ns=item.created_at,
        labels=dict(item.labels),
        annotations=dict(item.annotations),
        runtime_handler=item.runtime_handler,
    )


def with_details(sandbox: Sandbox, answer: api_pb2.PodSandboxStatusResponse) -> Sandbox:
    """Return the sandbox with what its verbose status adds; unchanged if that is another's."""
    status, said = answer.status, verbose(answer.info)
    if status.id != sandbox.id:
        return sandbox
    mode = status.linux.namespaces.options.network
    host_network = mode == api_pb2.NODE or said.shares_host is True
    path = None if host_network or said.closed else said.netns_path
    if path is None and said.pid and sandbox.ready and not host_network:
        path = f"/proc/{said.pid}/ns/net"
    ips = (status.network.ip, *(entry.ip for entry in status.network.additional_ips))
    return replace(
        sandbox,
        host_network=host_network,
        netns_path=path,
        pid=said.pid,
        ips=() if host_network else addresses(ips),
        detailed=True,
    )


def addresses(texts: Iterable[str]) -> tuple[Address, ...]:
    """Return the addresses among these texts, in their order."""
    found = []
    for text in texts:
        with contextlib.suppress(ValueError):
            found.append(ipaddress.ip_address(text))
    return tuple(found)


def container(item: api_pb2.Container, answer: api_pb2.ContainerStatusResponse | None) -> Container:
    """Return one container; `answer` is its verbose status if it runs."""
    running = item.state == api_pb2.CONTAINER_RUNNING
    said = verbose(answer.info) if answer is not None else Verbose()
    pid = said.pid if running else None
    shown = f"/proc/{pid}/ns/net" if pid and not said.shares_host else None
    return Container(
        id=item.id,
        sandbox_id=item.pod_sandbox_id,
        name=item.metadata.name,
        attempt=item.metadata.attempt,
        running=running,
        created_at_ns=item.created_at,
        labels=dict(item.labels),
        pid=pid,
        netns_path=(said.netns_path or shown) if running else None,
        cgroup=said.cgroup,
    )
