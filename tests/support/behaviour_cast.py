"""The cast of the behaviour tests: addresses, users, listeners, and the probes between them.

The name of a probe is `SENDER[@SOURCE]>HOST:PORT[/udp]`. A host or source is one of `HOSTS`; a
sender is one of `CREDENTIALS` in the pod, or `peer`, or `vm`.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

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

# How Istio runs Envoy under TPROXY: it dials as its clients, which takes root, so that only its
# group tells it apart. Not among the senders of the table.
TPROXY_PROXY = Credential(0, 1337)

PROXY_PORTS = (15001, 15006, 15008, 15020, 15021, 15090, 16001, 16006, 16008)
CAPTURE_PORTS = (15006, 16006)
DNS_PROXY_PORT = 15053
SERVICE_PORTS = (80, 443, 3306)
SOURCE_PORTS = tuple(range(first, first + 3500) for first in range(20000, 65000, 3500))


def _listener(who: str, host: str, port: int, proto: str = "tcp") -> dict[str, Any]:
    return {"who": who, "proto": proto, "host": HOSTS.get(host, host), "port": port}


def _everywhere(who: str, port: int) -> Iterator[dict[str, Any]]:
    for host in ("0.0.0.0", "::"):
        yield _listener(who, host, port)


def proxy_listeners() -> Iterator[dict[str, Any]]:
    for port in PROXY_PORTS:
        yield from _everywhere(f"proxy:{port}", port)
    for host in ("lo4", "lo6"):
        for proto in ("tcp", "udp"):
            yield _listener(f"proxy:{DNS_PROXY_PORT}", host, DNS_PROXY_PORT, proto)


def app_listeners() -> Iterator[dict[str, Any]]:
    for port in (8080, 9090):
        yield from _everywhere(f"app:{port}", port)
    for version in "46":
        yield _listener("app:pod-only", f"own{version}", 9091)
        yield _listener("app:loopback-only", f"lo{version}", 9092)
    for proto in ("tcp", "udp"):
        yield _listener("resolver", "resolver4", 53, proto)


def peer_listeners() -> Iterator[dict[str, Any]]:
    for version in "46":
        for host in (f"in{version}", f"out{version}"):
            yield from (_listener("service", host, port) for port in SERVICE_PORTS)
        for host in (f"dns{version}", f"odd{version}"):
            for proto in ("tcp", "udp"):
                yield _listener("dns", host, 53, proto)


def vm_listeners() -> Iterator[dict[str, Any]]:
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
    source_port: int | None = None
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
