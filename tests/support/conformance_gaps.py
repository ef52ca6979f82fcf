"""Settings that no golden covers, each with what Istio's documentation of its rules says of it.

`chains` has whole chains, written by hand as iptables-save prints them; the key is the IP version,
the table and the chain. An empty list says that there is no such chain.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """One case: settings that differ from the defaults, and chains that must be exactly so."""

    name: str
    config: Mapping[str, object]
    chains: Mapping[str, list[str]] = field(default_factory=dict)
    table: str = "133"
    routing: Mapping[str, list[str]] = field(default_factory=dict)


def owner_rules(loopback: str, *, dns: bool = False) -> list[str]:
    """Return the six rules of the proxy's user and group."""
    to_self = f"! -d {loopback} -o lo -p tcp"
    not_dns = "-p tcp -m tcp ! --dport 53 " if dns else ""
    ports = "-m multiport ! --dports 53,15008" if dns else "-m tcp ! --dport 15008"
    return [
        f"{to_self} {ports} -m owner --uid-owner 1337 -j ISTIO_IN_REDIRECT",
        f"-o lo {not_dns}-m owner ! --uid-owner 1337 -j RETURN",
        "-m owner --uid-owner 1337 -j RETURN",
        f"{to_self} -m tcp ! --dport 15008 -m owner --gid-owner 1337 -j ISTIO_IN_REDIRECT",
        f"-o lo {not_dns}-m owner ! --gid-owner 1337 -j RETURN",
        "-m owner --gid-owner 1337 -j RETURN",
    ]


OWNERS_4, OWNERS_6 = owner_rules("127.0.0.1/32"), owner_rules("::1/128")
START_4, START_6 = "-s 127.0.0.6/32 -o lo -j RETURN", "-s ::6/128 -o lo -j RETURN"
LOOPBACK_4, LOOPBACK_6 = "-d 127.0.0.1/32 -j RETURN", "-d ::1/128 -j RETURN"
TUNNEL = "-p tcp -m tcp --dport 15008 -j RETURN"
ZONES = [
    "-p udp -m udp --dport 53 -m owner --uid-owner 1337 -j CT --zone 1",
    "-p udp -m udp --sport 15053 -m owner --uid-owner 1337 -j CT --zone 2",
    "-p udp -m udp --dport 53 -m owner --gid-owner 1337 -j CT --zone 1",
    "-p udp -m udp --sport 15053 -m owner --gid-owner 1337 -j CT --zone 2",
]
TPROXY: Mapping[str, object] = {
    "inbound_interception_mode": "TPROXY",
    "inbound_ports_include": "*",
}
DIVERT_STARTS = [
    "-p tcp -m mark --mark 0x539 -j RETURN",
    "-s 127.0.0.6/32 -i lo -p tcp -j RETURN",
    "-i lo -p tcp -m mark ! --mark 0x53a -j RETURN",
]
ESTABLISHED = "-m conntrack --ctstate RELATED,ESTABLISHED -j ISTIO_DIVERT"
SAVE = "-j CONNMARK --save-mark --nfmask 0xffffffff --ctmask 0xffffffff"
RESTORE = "-j CONNMARK --restore-mark --nfmask 0xffffffff --ctmask 0xffffffff"

GAPS = (
    Gap(
        name="other-ports",
        config={
            "proxy_port": "16001",
            "inbound_capture_port": "16006",
            "inbound_tunnel_port": "16008",
            "inbound_ports_include": "*",
            "outbound_ip_ranges_include": "*",
        },
        chains={
            "4 nat ISTIO_REDIRECT": ["-p tcp -j REDIRECT --to-ports 16001"],
            "4 nat ISTIO_IN_REDIRECT": ["-p tcp -j REDIRECT --to-ports 16006"],
            "4 nat ISTIO_INBOUND": [
                "-p tcp -m tcp --dport 16008 -j RETURN",
                "-p tcp -j ISTIO_IN_REDIRECT",
            ],
            "4 nat ISTIO_OUTPUT": [
                START_4,
                *(rule.replace("15008", "16008") for rule in OWNERS_4),
                LOOPBACK_4,
                "-j ISTIO_REDIRECT",
            ],
        },
    ),
    Gap(
        name="other-mark-and-table",
        config={
            **TPROXY,
            "inbound_tproxy_mark": "4242",
            "inbound_tproxy_route_table": "200",
            "inbound_capture_port": "16006",
            "enable_ipv6": True,
        },
        chains={
            "4 mangle ISTIO_DIVERT": ["-j MARK --set-xmark 0x1092/0xffffffff", "-j ACCEPT"],
            "6 mangle ISTIO_TPROXY": [
                "! -d ::1/128 -p tcp -j TPROXY --on-port 16006 --on-ip :: "
                "--tproxy-mark 0x1092/0xffffffff"
            ],
            "4 mangle PREROUTING": [
                "-p tcp -j ISTIO_INBOUND",
                f"-p tcp -m mark --mark 0x1092 {SAVE}",
            ],
        },
        table="200",
        routing={
            "route4_200": ["local default dev lo scope host"],
            "route6_200": ["local default dev lo metric 1024 pref medium"],
        },
    ),
    Gap(
        name="several-networks-of-both-families",
        config={
            "outbound_ip_ranges_include": "10.1.0.0/16,fd00:1::/32,10.2.0.0/16,2001:db8::/32",
            "outbound_ip_ranges_exclude": "10.1.9.0/24,fd00:1:9::/48,10.1.8.8/32",
            "enable_ipv6": True,
        },
        chains={
            "4 nat ISTIO_OUTPUT": [
                START_4,
                *OWNERS_4,
                LOOPBACK_4,
                "-d 10.1.9.0/24 -j RETURN",
                "-d 10.1.8.8/32 -j RETURN",
                "-d 10.1.0.0/16 -j ISTIO_REDIRECT",
                "-d 10.2.0.0/16 -j ISTIO_REDIRECT",
            ],
            "6 nat ISTIO_OUTPUT": [
                START_6,
                *OWNERS_6,
                LOOPBACK_6,
                "-d fd00:1:9::/48 -j RETURN",
                "-d fd00:1::/32 -j ISTIO_REDIRECT",
                "-d 2001:db8::/32 -j ISTIO_REDIRECT",
            ],
        },
    ),
    Gap(
        name="everything-with-ipv6",
        config={"outbound_ip_ranges_include": "*", "enable_ipv6": True},
        chains={"6 nat ISTIO_OUTPUT": [START_6, *OWNERS_6, LOOPBACK_6, "-j ISTIO_REDIRECT"]},
    ),
    Gap(
        name="excluded-ports-with-ipv6",
        config={
            "outbound_ports_exclude": "25,15020",
            "inbound_ports_include": "*",
            "inbound_ports_exclude": "22,15020",
            "enable_ipv6": True,
        },
        chains={
            "6 nat ISTIO_INBOUND": [
                TUNNEL,
                "-p tcp -m tcp --dport 22 -j RETURN",
                "-p tcp -m tcp --dport 15020 -j RETURN",
                "-p tcp -j ISTIO_IN_REDIRECT",
            ],
            "6 nat ISTIO_OUTPUT": [
                "-p tcp -m tcp --dport 25 -j RETURN",
                "-p udp -m udp --dport 25 -j RETURN",
                "-p tcp -m tcp --dport 15020 -j RETURN",
                "-p udp -m udp --dport 15020 -j RETURN",
                START_6,
                *OWNERS_6,
                LOOPBACK_6,
            ],
        },
    ),
    Gap(
        name="all-dns-with-ipv6",
        config={"redirect_dns": True, "capture_all_dns": True, "enable_ipv6": True},
        chains={
            "6 nat ISTIO_OUTPUT_DNS": [
                "-p tcp -m tcp --dport 53 -j REDIRECT --to-ports 15053",
                "-p udp -m udp --dport 53 -j REDIRECT --to-ports 15053",
            ],
            "6 nat ISTIO_OUTPUT": [
                START_6,
                *owner_rules("::1/128", dns=True),
                "-j ISTIO_OUTPUT_DNS",
                LOOPBACK_6,
            ],
            "6 raw ISTIO_OUTPUT_DNS": [*ZONES, "-p udp -m udp --dport 53 -j CT --zone 2"],
            "6 raw ISTIO_INBOUND": ["-p udp -m udp --sport 53 -j CT --zone 1"],
            "6 raw PREROUTING": ["-j ISTIO_INBOUND"],
        },
    ),
    Gap(
        name="ipv6-resolvers-only",
        config={"redirect_dns": True, "dns_servers_v6": ["fd00::53"], "enable_ipv6": True},
        chains={
            "4 nat ISTIO_OUTPUT": [START_4, *owner_rules("127.0.0.1/32", dns=True), LOOPBACK_4],
            "4 nat ISTIO_OUTPUT_DNS": [],
            "4 raw ISTIO_OUTPUT_DNS": ZONES,
            "4 raw PREROUTING": [],
            "4 raw ISTIO_INBOUND": [],
            "6 nat ISTIO_OUTPUT_DNS": [
                "-d fd00::53/128 -p tcp -m tcp --dport 53 -j REDIRECT --to-ports 15053",
                "-d fd00::53/128 -p udp -m udp --dport 53 -j REDIRECT --to-ports 15053",
            ],
            "6 raw ISTIO_INBOUND": ["-s fd00::53/128 -p udp -m udp --sport 53 -j CT --zone 1"],
        },
    ),
    Gap(
        name="ipv6-resolvers-only-without-ipv6",
        config={"redirect_dns": True, "dns_servers_v6": ["fd00::53"]},
        chains={
            "4 nat ISTIO_OUTPUT": [START_4, *owner_rules("127.0.0.1/32", dns=True), LOOPBACK_4],
            "4 raw OUTPUT": ["-j ISTIO_OUTPUT_DNS"],
            "4 raw ISTIO_OUTPUT_DNS": ZONES,
        },
    ),
    Gap(
        name="no-resolver-known",
        config={"redirect_dns": True},
        chains={"4 nat ISTIO_OUTPUT": [START_4, *OWNERS_4, LOOPBACK_4], "4 raw OUTPUT": []},
    ),
    Gap(
        name="tproxy-with-several-ids",
        config={**TPROXY, "proxy_uid": "3,4", "proxy_gid": "1,2"},
        chains={
            "4 mangle OUTPUT": [
                "-o lo -p tcp -m mark --mark 0x539 -j RETURN",
                *(
                    f"! -d 127.0.0.1/32 -o lo -p tcp -m owner --{kind}-owner {number} "
                    "-j MARK --set-xmark 0x53a/0xffffffff"
                    for kind, number in (("uid", 3), ("uid", 4), ("gid", 1), ("gid", 2))
                ),
                f"-p tcp -m connmark --mark 0x539 {RESTORE}",
            ],
        },
    ),
    Gap(
        name="tproxy-of-listed-ports",
        config={**TPROXY, "inbound_ports_include": "80,443", "inbound_ports_exclude": "443"},
        chains={
            "4 mangle ISTIO_INBOUND": [
                *DIVERT_STARTS,
                f"-p tcp -m tcp --dport 80 {ESTABLISHED}",
                "-p tcp -m tcp --dport 80 -j ISTIO_TPROXY",
                f"-p tcp -m tcp --dport 443 {ESTABLISHED}",
                "-p tcp -m tcp --dport 443 -j ISTIO_TPROXY",
            ],
            "4 nat ISTIO_INBOUND": [TUNNEL],
            "4 nat PREROUTING": [],
        },
    ),
    Gap(
        name="tproxy-without-inbound-ports",
        config={**TPROXY, "inbound_ports_include": ""},
        chains={
            "4 mangle ISTIO_INBOUND": DIVERT_STARTS,
            "4 mangle PREROUTING": [f"-p tcp -m mark --mark 0x539 {SAVE}"],
            "4 mangle ISTIO_DIVERT": [],
            "4 mangle ISTIO_TPROXY": [],
        },
    ),
    Gap(
        name="drop-invalid-with-tproxy",
        config={**TPROXY, "drop_invalid": True, "exclude_interfaces": "net1,net2"},
        chains={
            "4 mangle PREROUTING": [
                "-i net1 -j RETURN",
                "-i net2 -j RETURN",
                "-m conntrack --ctstate INVALID -j ISTIO_DROP",
                "-p tcp -j ISTIO_INBOUND",
                f"-p tcp -m mark --mark 0x539 {SAVE}",
            ],
            "4 mangle ISTIO_DROP": ["-j DROP"],
            "4 nat PREROUTING": ["-i net1 -j RETURN", "-i net2 -j RETURN"],
        },
    ),
    Gap(
        name="no-owner-group-included",
        config={"owner_groups_include": "", "outbound_ip_ranges_include": "*"},
        chains={
            "4 nat ISTIO_OUTPUT": [
                START_4,
                *OWNERS_4,
                "-j RETURN",
                LOOPBACK_4,
                "-j ISTIO_REDIRECT",
            ]
        },
    ),
    Gap(
        name="owner-groups-included",
        config={"owner_groups_include": "2001,2002", "owner_groups_exclude": "7"},
        chains={
            "4 nat ISTIO_OUTPUT": [
                START_4,
                *OWNERS_4,
                "-m owner ! --gid-owner 2001 -m owner ! --gid-owner 2002 -j RETURN",
                LOOPBACK_4,
            ]
        },
    ),
    Gap(
        name="excluded-interfaces",
        config={"exclude_interfaces": "net1,net2", "enable_ipv6": True},
        chains={
            "6 nat PREROUTING": ["-i net1 -j RETURN", "-i net2 -j RETURN"],
            "6 nat OUTPUT": ["-o net1 -j RETURN", "-o net2 -j RETURN", "-j ISTIO_OUTPUT"],
            "4 mangle PREROUTING": [],
        },
    ),
    Gap(
        name="rerouted-and-excluded-interfaces",
        config={
            "exclude_interfaces": "net1",
            "reroute_virtual_interfaces": "tap0,tap1",
            "outbound_ip_ranges_include": "10.0.0.0/8,fd00::/8",
            "enable_ipv6": True,
        },
        chains={
            "4 nat PREROUTING": [
                "-d 10.0.0.0/8 -i tap1 -j ISTIO_REDIRECT",
                "-d 10.0.0.0/8 -i tap0 -j ISTIO_REDIRECT",
                "-i tap1 -j RETURN",
                "-i tap0 -j RETURN",
                "-i net1 -j RETURN",
            ]
        },
    ),
    Gap(
        name="port-ranges",
        config={
            "inbound_ports_include": "8000:9000,80",
            "outbound_ports_include": "1000:2000",
            "outbound_ports_exclude": "0:1023",
        },
        chains={
            "4 nat ISTIO_INBOUND": [
                TUNNEL,
                "-p tcp -m tcp --dport 8000:9000 -j ISTIO_IN_REDIRECT",
                "-p tcp -m tcp --dport 80 -j ISTIO_IN_REDIRECT",
            ],
            "4 nat ISTIO_OUTPUT": [
                "-p tcp -m tcp --dport 0:1023 -j RETURN",
                "-p udp -m udp --dport 0:1023 -j RETURN",
                START_4,
                *OWNERS_4,
                LOOPBACK_4,
                "-p tcp -m tcp --dport 1000:2000 -j ISTIO_REDIRECT",
            ],
        },
    ),
    Gap(
        name="all-addresses-as-networks",
        config={
            "outbound_ip_ranges_include": "0.0.0.0/0,::/0",
            "reroute_virtual_interfaces": "tap0",
            "enable_ipv6": True,
        },
        chains={
            "4 nat ISTIO_OUTPUT": [START_4, *OWNERS_4, LOOPBACK_4, "-j ISTIO_REDIRECT"],
            "6 nat ISTIO_OUTPUT": [START_6, *OWNERS_6, LOOPBACK_6, "-j ISTIO_REDIRECT"],
        },
    ),
    Gap(
        name="loopback-range-included",
        config={"outbound_ip_ranges_include": "127.9.0.0/16", "enable_ipv6": True},
        chains={
            "6 nat ISTIO_OUTPUT": [
                START_6,
                *(rule for rule in OWNERS_6 if not rule.startswith("-o lo")),
                LOOPBACK_6,
            ],
        },
    ),
    Gap(
        name="other-loopback-range",
        config={**TPROXY, "host_ipv4_loopback_cidr": "127.0.0.0/8", "enable_ipv6": True},
        chains={
            "4 nat ISTIO_OUTPUT": [
                START_4,
                *owner_rules("127.0.0.0/8"),
                "-d 127.0.0.0/8 -j RETURN",
            ],
            "6 nat ISTIO_OUTPUT": [START_6, *OWNERS_6, LOOPBACK_6],
        },
    ),
    Gap(
        name="twenty-ports",
        config={
            "inbound_ports_include": ",".join(map(str, range(3000, 3020))),
            "outbound_ports_exclude": ",".join(map(str, range(4000, 4020))),
        },
    ),
    Gap(
        name="forty-nine-owner-groups",
        config={"owner_groups_include": ",".join(map(str, range(2000, 2049)))},
    ),
    Gap(
        name="many-excluded-owner-groups",
        config={"owner_groups_exclude": ",".join(map(str, range(2000, 2100)))},
    ),
)
