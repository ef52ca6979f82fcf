"""Numbers that the mesh fixes. Each is Istio's (reference: its capture code and documentation)."""

from collections.abc import Mapping
from types import MappingProxyType

PROXY_PORT = 15001
INBOUND_CAPTURE_PORT = 15006
INBOUND_TUNNEL_PORT = 15008
STATUS_PORT = 15020
HEALTH_PORT = 15021
DNS_PORT = 53
DNS_PROXY_PORT = 15053
ENVOY_METRICS_PORT = 15090
ENVOY_ADMIN_PORT = 15000

# Ports of a pod that its proxy listens on.
PROXY_PORTS: Mapping[int, str] = MappingProxyType(
    {
        15000: "administration",
        PROXY_PORT: "outbound capture",
        15004: "debugging",
        INBOUND_CAPTURE_PORT: "inbound capture",
        INBOUND_TUNNEL_PORT: "tunnel",
        STATUS_PORT: "status",
        HEALTH_PORT: "health",
        DNS_PROXY_PORT: "DNS",
        ENVOY_METRICS_PORT: "metrics",
    }
)

PROXY_ID = 1337

TPROXY_MARK = 1337
# The proxy's calls to its own pod carry this mark on the loopback hop under TPROXY. Fixed by Istio.
TPROXY_SELF_MARK = 1338
TPROXY_ROUTE_TABLE = 133
# What `ip route` calls local, main, default and unspec: a TPROXY route there would break the pod.
RESERVED_ROUTE_TABLES = (0, 253, 254, 255)

# conntrack zones that keep the client's DNS query apart from the proxy's own (field report 70).
ZONE_PROXY_TO_UPSTREAM = 1
ZONE_CLIENT_TO_PROXY = 2

# Envoy binds to these when it passes inbound traffic on; they are never captured again.
PASSTHROUGH_V4 = "127.0.0.6/32"
PASSTHROUGH_V6 = "::6/128"
LOOPBACK_V4 = "127.0.0.1/32"
LOOPBACK_V6 = "::1/128"

# iptables-restore 1.8.9 takes at most 49 matches of one kind in one rule before its parser gives
# up.
MAX_MATCHES_PER_RULE = 49
# nf_tables takes 128 expressions in a rule (NFT_RULE_MAXEXPRS); a range of ids needs three.
MAX_RANGES_PER_RULE = 32
