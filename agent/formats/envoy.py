"""What Envoy's admin port says, as values: listeners, clusters and certificates.

The documents are protobuf messages as JSON (envoy/admin/v3), in which empty fields are left out.
Source of the cluster names: Istio's BuildSubsetKey and BuildDNSSrvSubsetKey.
"""

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TypeVar

import msgspec

from agent.model import numbers
from agent.model.values import MAX_PORT

T = TypeVar("T")

STATES = ("LIVE", "DRAINING", "PRE_INITIALIZING", "INITIALIZING")

PURPOSES = {
    numbers.PROXY_PORT: "outbound capture",
    numbers.INBOUND_CAPTURE_PORT: "inbound capture",
    numbers.INBOUND_TUNNEL_PORT: "tunnel (HBONE)",
    numbers.HEALTH_PORT: "health",
    numbers.DNS_PROXY_PORT: "DNS capture",
    numbers.ENVOY_METRICS_PORT: "metrics",
}
CLUSTER = re.compile(
    r"(?P<direction>(?:in|out)bound(?:-[a-z]+)*)"
    r"(?:\|(?P<port>[0-9]{1,5})\|(?P<subset>[^|]*)\|(?P<fqdn>[^|]*)"
    r"|_\.(?P<srv_port>[0-9]{1,5})_\.(?P<srv_subset>[^|]*?)_\.(?P<srv_fqdn>[^|]+))"
)
# The name that Istio gives to a listener for one service: the address and port it stands for.
SERVICE_LISTENER = re.compile(
    r"(?P<address>[0-9a-fA-F:.]+|\[[0-9a-fA-F:.]+\])_(?P<port>[0-9]{1,5})"
)
REACHABLE = ("", "UNKNOWN", "HEALTHY", "DEGRADED")


class NotEnvoy(ValueError):
    """The document is not what Envoy answers."""


# --- the documents --------------------------------------------------------------------------------


class _Socket(msgspec.Struct):
    address: str = ""
    port_value: int = 0
    protocol: str = "TCP"


class _Pipe(msgspec.Struct):
    path: str = ""


class _Internal(msgspec.Struct):
    server_listener_name: str = ""


class _Address(msgspec.Struct):
    socket_address: _Socket | None = None
    pipe: _Pipe | None = None
    envoy_internal_address: _Internal | None = None


class _Listener(msgspec.Struct):
    name: str = ""
    local_address: _Address | None = None
    additional_local_addresses: tuple[_Address, ...] = ()


class _Listeners(msgspec.Struct):
    listener_statuses: tuple[_Listener, ...] | msgspec.UnsetType = msgspec.UNSET


class _Host(msgspec.Struct):
    health_status: dict[str, str | bool] = {}


class _Cluster(msgspec.Struct):
    name: str = ""
    host_statuses: tuple[_Host, ...] = ()


class _Clusters(msgspec.Struct):
    cluster_statuses: tuple[_Cluster, ...] | msgspec.UnsetType = msgspec.UNSET


class _AlternativeName(msgspec.Struct):
    dns: str = ""
    uri: str = ""
    ip_address: str = ""


class _Certificate(msgspec.Struct):
    path: str = ""
    serial_number: str = ""
    subject_alt_names: tuple[_AlternativeName, ...] = ()
    valid_from: datetime | None = None
    expiration_time: datetime | None = None


class _Pair(msgspec.Struct):
    ca_cert: tuple[_Certificate, ...] = ()
    cert_chain: tuple[_Certificate, ...] = ()


class _Certificates(msgspec.Struct):
    certificates: tuple[_Pair, ...] | msgspec.UnsetType = msgspec.UNSET


# --- the values -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Listener:
    """One address of a listener. `port` is None for what is no port (a pipe, an internal one)."""

    name: str
    address: str
    port: int | None
    protocol: str
    purpose: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """An upstream. What Istio says in a name is None where the name is not of that form."""

    name: str
    direction: str | None
    port: int | None
    subset: str | None
    fqdn: str | None
    endpoints: int
    healthy: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """One certificate. `kind` is `chain` for what the proxy shows, `ca` for whom it trusts."""

    kind: str
    serial: str
    names: tuple[str, ...]
    path: str
    valid_from: datetime | None
    expires: datetime

    def seconds_left(self, now: datetime) -> float:
        return (self.expires - now).total_seconds()


def listeners(body: bytes, is_envoy: bool) -> tuple[Listener, ...]:
    """Return what `/listeners?format=json` says, in Envoy's order.

    `is_envoy` tells whether an empty document may be believed. Raises: NotEnvoy.
    """
    statuses = _known(_decode(body, _Listeners).listener_statuses, is_envoy)
    return tuple(
        _listener(status.name, address)
        for status in statuses
        for address in (status.local_address, *status.additional_local_addresses)
        if address is not None
    )


def clusters(body: bytes, is_envoy: bool) -> tuple[Cluster, ...]:
    """Return what `/clusters?format=json` says, Istio's by direction and FQDN, then the others.

    Raises: NotEnvoy.
    """
    statuses = _known(_decode(body, _Clusters).cluster_statuses, is_envoy)
    return tuple(sorted((_cluster(status) for status in statuses), key=_place))


def _place(cluster: Cluster) -> tuple[object, ...]:
    named = (cluster.direction, cluster.fqdn, cluster.port, cluster.subset)
    return (cluster.direction is None, *(named if cluster.direction else ()), cluster.name)


def certificates(body: bytes, is_envoy: bool) -> tuple[Certificate, ...]:
    """Return what `/certs` says, each certificate once, the first to expire first.

    Raises: NotEnvoy.
    """
    pairs = _known(_decode(body, _Certificates).certificates, is_envoy)
    found = {
        _certificate(kind, one): None
        for pair in pairs
        for kind, several in (("chain", pair.cert_chain), ("ca", pair.ca_cert))
        for one in several
        if one.expiration_time is not None
    }
    return tuple(sorted(found, key=lambda one: (one.expires, one.kind != "chain", one.serial)))


def state(text: str) -> str:
    """Return what `/ready` says. Raises: NotEnvoy."""
    word = text.strip()
    if word not in STATES:
        raise NotEnvoy(repr(text[:40]))
    return word


def parse_cluster(name: str) -> tuple[str, int, str, str] | None:
    """Return direction, port, subset and FQDN, or None for a name of another form."""
    found = CLUSTER.fullmatch(name)
    if found is None:
        return None
    port = found["port"] or found["srv_port"]
    if int(port) > MAX_PORT:
        return None
    if found["port"]:
        return found["direction"], int(port), found["subset"], found["fqdn"]
    return found["direction"], int(port), found["srv_subset"], found["srv_fqdn"]


def _decode(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise NotEnvoy(str(error)) from error


def _known(found: tuple[T, ...] | msgspec.UnsetType, is_envoy: bool) -> tuple[T, ...]:
    if not isinstance(found, msgspec.UnsetType):
        return found
    if not is_envoy:
        raise NotEnvoy("it lacks what Envoy says there")
    return ()


def _listener(name: str, address: _Address) -> Listener:
    if address.socket_address is not None:
        place = address.socket_address
        return Listener(
            name=name,
            address=place.address,
            port=place.port_value,
            protocol=place.protocol.lower(),
            purpose=_purpose(name, place.port_value),
        )
    if address.pipe is not None:
        where, purpose = address.pipe.path, "a Unix socket"
    else:
        inside = address.envoy_internal_address
        where, purpose = inside.server_listener_name if inside else "", "inside Envoy only"
    return Listener(name=name, address=where, port=None, protocol="-", purpose=purpose)


def _purpose(name: str, port: int) -> str:
    service = SERVICE_LISTENER.fullmatch(name)
    if port in PURPOSES:
        return PURPOSES[port]
    if service is None:
        return "-"
    any_address = service["address"].strip("[]") in ("0.0.0.0", "::")
    return f"outbound to {'any' if any_address else service['address']}, port {service['port']}"


def _cluster(status: _Cluster) -> Cluster:
    direction, port, subset, fqdn = parse_cluster(status.name) or (None, None, None, None)
    return Cluster(
        name=status.name,
        direction=direction,
        port=port,
        subset=subset,
        fqdn=fqdn,
        endpoints=len(status.host_statuses),
        healthy=sum(_healthy(host.health_status) for host in status.host_statuses),
    )


def _healthy(status: dict[str, str | bool]) -> bool:
    """Tell whether no check has failed; each that has is a field that is true."""
    failed = any(value is True for value in status.values())
    return not failed and status.get("eds_health_status", "") in REACHABLE


def _certificate(kind: str, one: _Certificate) -> Certificate:
    assert one.expiration_time is not None
    names = (n.uri or n.dns or n.ip_address for n in one.subject_alt_names)
    return Certificate(
        kind=kind,
        serial=one.serial_number,
        names=tuple(name for name in names if name),
        path=one.path,
        valid_from=_aware(one.valid_from) if one.valid_from else None,
        expires=_aware(one.expiration_time),
    )


def _aware(time: datetime) -> datetime:
    return time if time.tzinfo else time.replace(tzinfo=UTC)
