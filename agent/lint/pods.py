"""What in a pod's own manifest works against its capture, beyond labels and annotations."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from agent.lint.metadata import native_sidecar
from agent.model import annotations as names
from agent.model import values
from agent.model.note import Note
from agent.model.numbers import PROXY_PORTS
from agent.model.pod import MESH_CONTAINERS, PROXY, Container, Pod
from agent.model.settings import Settings
from agent.model.values import FALSE_WORDS, MAX_PORT, shown

REWRITE = f"{names.SIDECAR}rewriteAppHTTPProbers"
RANGE, RESERVED = "net.ipv4.ip_local_port_range", "net.ipv4.ip_local_reserved_ports"

# Words of a command line that speak of the network; no more than a good guess.
_NETWORK = re.compile(
    r"https?://|\b(?:curl|wget|nc|ncat|telnet|ssh|scp|rsync|git|dig|nslookup|ping|psql|pg_isready"
    r"|mysql|mysqladmin|mongo|mongosh|redis-cli|kubectl|helm|aws|gsutil|az|pip3?|npm|yarn|apk"
    r"|apt-get|yum|dnf|flyway|liquibase|migrate)\b"
)
_MAX_COMMAND = 10_000
_NET_CAPABILITIES = frozenset({"ALL", "NET_ADMIN", "NET_RAW", "SYS_ADMIN"})

Entries = list[tuple[Container, Mapping[str, Any]]]


def apps(pod: Pod, spec: Mapping[str, Any]) -> Entries:
    """Return the containers that are not the mesh's, each with its part of the manifest."""
    found: Entries = []
    for init, key in ((True, "initContainers"), (False, "containers")):
        known = [one for one in pod.containers or () if one.init is init]
        found += [
            (container, entry)
            for container, entry in zip(known, _mappings(spec, key), strict=False)
            if container.name not in MESH_CONTAINERS
        ]
    return found


def _mappings(parent: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    found = parent.get(key)
    return [one for one in found if isinstance(one, Mapping)] if isinstance(found, list) else []


def _words(parent: Mapping[str, Any], key: str) -> list[str]:
    found = parent.get(key)
    return [one for one in found if isinstance(one, str)] if isinstance(found, list) else []


def ports(pod: Pod, spec: Mapping[str, Any]) -> Iterator[Note]:
    """Yield the ports of applications that their proxy listens on, too."""
    for container, entry in apps(pod, spec):
        for index, port in enumerate(_mappings(entry, "ports")):
            number = port.get("containerPort")
            if not isinstance(number, int) or number not in PROXY_PORTS:
                continue
            yield Note(
                message=f"container {container.name} listens on port {number}, which is the "
                f"proxy's ({PROXY_PORTS[number]}): one of the two cannot start",
                hint="give the application another port",
                at=(*container.at, "ports", index, "containerPort"),
            )


def warnings(pod: Pod, spec: Mapping[str, Any], settings: Settings) -> Iterator[Note]:
    """Yield what will not work as it is meant once the pod is captured by `settings`."""
    containers = apps(pod, spec)
    yield from _init_containers(pod, containers, settings)
    if pod.annotation(REWRITE) in FALSE_WORDS:
        for container, entry in containers:
            yield from _probes(container, entry, settings)
    if spec.get("hostUsers") is False:
        yield Note(
            message="hostUsers is false: the pod's network belongs to a user namespace, into which "
            "the iptables backends cannot write rules about users",
            hint="use the nftables backend for it",
            at=("spec", "hostUsers"),
        )
    yield from _sysctls(spec)


def _sysctls(spec: Mapping[str, Any]) -> Iterator[Note]:
    """Yield a range of source ports that holds the proxy's: whoever dials may have one by then."""
    context = spec.get("securityContext")
    given = _mappings(context, "sysctls") if isinstance(context, Mapping) else []
    found = {str(one.get("name")).replace("/", "."): str(one.get("value")) for one in given}
    bounds = found.get(RANGE, "").split()
    if len(bounds) != 2 or not all(bound.isdecimal() for bound in bounds):
        return
    try:
        reserved = values.ports(found.get(RESERVED, ""))
    except values.BadValue:
        reserved = ()
    taken = [
        port
        for port in sorted(PROXY_PORTS)
        if int(bounds[0]) <= port <= int(bounds[1]) and not any(port in span for span in reserved)
    ]
    if taken:
        index = next(at for at, one in enumerate(given) if str(one.get("value")) == found[RANGE])
        yield Note(
            message=f"sysctl {RANGE} is {shown(found[RANGE])}: a connection may be given port "
            f"{taken[0]}, and a proxy that starts then cannot listen there",
            hint=f'set {RESERVED} to "{min(PROXY_PORTS)}-{max(PROXY_PORTS)}" as well, or begin the '
            f"range above {max(PROXY_PORTS)}",
            at=("spec", "securityContext", "sysctls", index, "value"),
        )


# --- containers that run before the proxy (field report 99) --------------------------------------


def _init_containers(pod: Pod, containers: Entries, settings: Settings) -> Iterator[Note]:
    outbound = settings.outbound_ip_ranges_include or settings.outbound_ports_include
    if native_sidecar(pod) or not outbound:
        return
    before = {one.name for one in _before_the_proxy(pod)}
    for container, entry in containers:
        exempt = any(pod.user_of(container) in span for span in settings.proxy_uid)
        if (
            not container.init
            or container.name not in before
            or exempt
            or not _NETWORK.search(_command(entry))
        ):
            continue
        kind = "native sidecar" if container.native_sidecar else "init container"
        yield Note(
            message=f"{kind} {container.name} seems to use the network, and runs before the proxy "
            "does: with the gate closed its connections are refused",
            hint=f'make the proxy a native sidecar (annotation {names.SIDECAR}nativeSidecar: "true"'
            ", ahead of it), or run the agent with gate: listener",
            at=container.at,
        )


def _before_the_proxy(pod: Pod) -> list[Container]:
    """Return the init containers that start before the proxy listens."""
    found = [one for one in pod.containers or () if one.init]
    native = [at for at, one in enumerate(found) if one.name == PROXY and one.native_sidecar]
    return found[: native[0]] if native else found


def _command(entry: Mapping[str, Any]) -> str:
    return " ".join([*_words(entry, "command"), *_words(entry, "args")])[:_MAX_COMMAND]


# --- probes (field report 95) --------------------------------------------------------------------


def _probes(container: Container, entry: Mapping[str, Any], settings: Settings) -> Iterator[Note]:
    for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
        probe = entry.get(kind)
        for how in ("httpGet", "tcpSocket", "grpc"):
            action = probe.get(how) if isinstance(probe, Mapping) else None
            port = _number(action.get("port"), entry) if isinstance(action, Mapping) else None
            if port is None or not _captured(port, settings):
                continue
            sure = (
                "succeeds whether the application runs or not"
                if how == "tcpSocket"
                else ("fails where only mutual TLS is accepted")
            )
            yield Note(
                message=f"{kind} of container {container.name} meets the proxy, for port {port} is "
                f"captured and {REWRITE} is off: it {sure}",
                hint=f"take {REWRITE} out, or exclude the port from the capture",
                at=(*container.at, kind, how, "port"),
            )


def _number(port: object, entry: Mapping[str, Any]) -> int | None:
    """Return a port that is given as a number or by the name that `ports` gives it."""
    if isinstance(port, str):
        named = [one for one in _mappings(entry, "ports") if one.get("name") == port]
        port = named[0].get("containerPort") if named else None
    return port if isinstance(port, int) and 0 < port <= MAX_PORT else None


def _captured(port: int, settings: Settings) -> bool:
    include = settings.inbound_ports_include
    if include.everything:
        return not any(port in span for span in settings.inbound_ports_exclude)
    return any(port in span for span in include.items)


# --- what is worth knowing -----------------------------------------------------------------------


def remarks(pod: Pod, spec: Mapping[str, Any]) -> Iterator[Note]:
    """Yield who may undo the capture from inside (field report 100)."""
    for container, entry in apps(pod, spec):
        context = entry.get("securityContext")
        if not isinstance(context, Mapping):
            continue
        added = context.get("capabilities")
        words = _words(added, "add") if isinstance(added, Mapping) else []
        strong = sorted(word for word in words if word.removeprefix("CAP_") in _NET_CAPABILITIES)
        place = (*container.at, "securityContext")
        if context.get("privileged") is True:
            why, place = "is privileged", (*place, "privileged")
        elif strong:
            why, place = f"has {shown(', '.join(strong))}", (*place, "capabilities", "add")
        else:
            continue
        message = f"container {container.name} {why}: it can undo the capture or go around it"
        yield Note(message=message, at=place)
