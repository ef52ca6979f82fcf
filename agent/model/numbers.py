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

# Ambient: the node's proxy marks what it sends, by which rules know it. Connections that it makes
# to the pod are marked too, so that the answers are routed to it (istio cni/pkg/iptables).
AMBIENT_MARK, AMBIENT_CONNMARK, AMBIENT_MASK = 0x539, 0x111, 0xFFF
AMBIENT_POLICY = (AMBIENT_CONNMARK, AMBIENT_MASK, 100)  # mark, mask and route table
AMBIENT_PREFERENCE = 32764
# What the node's probes of a pod come from (HOST_PROBE_SNAT_IP, HOST_PROBE_SNAT_IPV6).
PROBE_SOURCE_V4 = "169.254.7.127"
PROBE_SOURCE_V6 = "fd16:9254:7127:1337:ffff:ffff:ffff:ffff"

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
