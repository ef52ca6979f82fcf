"""Captures written by hand and what every probe meets under them, said without the rules.

A case says for some probes who answers; all others meet whom they meet without a capture. Whoever
answers a captured connection must recover the address that the client dialled and see the client's
own address: a case cannot say otherwise.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from tests.support.behaviour import Outcome, Raw, Table
from tests.support.behaviour_cast import PROBES, Probe
from tests.support.behaviour_node import endpoint

# Senders whose outbound traffic is captured, and those of them that run as the proxy's user.
APPS = "(root|app|extra|java|ftp|second)"
PROXIES = "(proxy|uidonly)"

UNANSWERED = ("refused", "no-source")

Answers = tuple[tuple[str, str], ...]
"""Pairs of a listener and an expression for whole names of probes; the first match counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """`about` says in words what the settings are for."""

    about: str
    raw: Raw
    answers: Answers

    def expected(self, untouched: Table) -> Table:
        """Return the whole table, given the one of the pod without a capture."""
        return {probe.name: self._outcome(probe, untouched) for probe in PROBES}

    def _outcome(self, probe: Probe, untouched: Table) -> Outcome:
        who = next((who for who, names in self.answers if re.fullmatch(names, probe.name)), None)
        if who is None:
            return untouched[probe.name]
        if who in UNANSWERED:
            return Outcome(who)
        destination = endpoint(probe.host, probe.port) if probe.proto == "tcp" else None
        return Outcome(who, destination, probe.source or natural_source(probe, untouched))


def natural_source(probe: Probe, untouched: Table) -> str | None:
    """Return the address from which that sender reaches that host when nobody interferes."""
    sources = {
        untouched[other.name].source
        for other in PROBES
        if (other.sender, other.host, other.source) == (probe.sender, probe.host, probe.source)
    } - {None}
    if len(sources) != 1:
        raise AssertionError(f"{probe.name}: the client address is not one but {sources}")
    return sources.pop()


# Once IPv6 is captured, ::6 exists. It is exempt, as 127.0.0.6 always is.
PASSTHROUGH_V6 = (
    ("app:8080", r"\w+@pass6>own6:8080"),
    ("app:pod-only", r"\w+@pass6>own6:9091"),
)
# The proxy that calls its own pod meets its inbound side, whatever else is captured.
TO_SELF = ("proxy:15006", rf"{PROXIES}>(own[46]|lob4|resolver4):(?!15008)\d+")
TO_SELF_V4 = ("proxy:15006", rf"{PROXIES}>(own4|lob4|resolver4):(?!15008)\d+")
# With DNS captured, its DNS over TCP to its own pod is left alone.
TO_SELF_NOT_DNS = ("proxy:15006", rf"{PROXIES}>(own[46]|lob4):(?!15008)\d+")

EVERYTHING = {"inbound_ports_include": "*", "outbound_ip_ranges_include": "*", "enable_ipv6": True}
ALL_OUT = ("proxy:15001", rf"{APPS}>(in|out|vm|dns|odd)[46]:\d+")
ALL_IN = ("proxy:15006", r"(peer|vm)>\w+:(?!15008)\d+")
# Under TPROXY Istio's exemption of the tunnel port is in nat, where TPROXY does not look.
ALL_IN_TPROXY = ("proxy:15006", r"(peer|vm)>\w+:\d+")
# There the group of the proxy counts for calls to itself, and the tunnel port is no exception.
TO_SELF_TPROXY = ("proxy:15006", r"(proxy|uidonly|gidonly)>(own[46]|lob4|resolver4):\d+")


def _cases() -> Iterator[Case]:
    yield Case(
        about="nothing is included: only the proxy's calls to itself are touched",
        raw={"enable_ipv6": True},
        answers=(TO_SELF, *PASSTHROUGH_V6),
    )
    yield Case(
        about="everything is captured: all TCP but the proxy's, the tunnel port and loopback",
        raw=EVERYTHING,
        answers=(TO_SELF, ALL_OUT, ALL_IN, *PASSTHROUGH_V6),
    )
    yield Case(
        about="IPv6 off: IPv4 is captured and IPv6 left alone",
        raw=EVERYTHING | {"enable_ipv6": False},
        answers=(
            TO_SELF_V4,
            ("proxy:15001", rf"{APPS}>(in|out|vm|dns|odd)4:\d+"),
            ("proxy:15006", r"(peer|vm)>\w+4:(?!15008)\d+"),
        ),
    )
    yield Case(
        about="two inbound ports, one network of each family, and one port to anywhere",
        raw={
            "enable_ipv6": True,
            "inbound_ports_include": "8080,7777",
            "outbound_ip_ranges_include": "10.96.0.0/16,fd96::/16",
            "outbound_ports_include": "3306",
        },
        answers=(
            TO_SELF,
            ("proxy:15006", r"(peer|vm)>(own|second)[46]:(8080|7777)"),
            ("proxy:15001", rf"{APPS}>(in|dns|odd)[46]:\d+"),
            ("proxy:15001", rf"{APPS}>out[46]:3306"),
            *PASSTHROUGH_V6,
        ),
    )
    yield Case(
        about="everything but a few ports each way and one network",
        raw=EVERYTHING
        | {
            "inbound_ports_exclude": "8080,15021,15090-15099",
            "outbound_ports_exclude": "443,53",
            "outbound_ip_ranges_exclude": "10.97.0.0/16,fd97::/16",
        },
        answers=(
            TO_SELF_NOT_DNS,
            ("proxy:15006", r"(peer|vm)>\w+:(?!8080|15021|15090|15008)\d+"),
            ("proxy:15001", rf"{APPS}>(in|vm)[46]:80"),
            *PASSTHROUGH_V6,
        ),
    )
    yield from _dns_cases()
    yield from _tproxy_cases()
    yield from _owner_cases()
    yield from _loopback_cases()
    yield from _interface_cases()


def _dns_cases() -> Iterator[Case]:
    listed = {"redirect_dns": True, "dns_servers_v4": "10.96.0.10", "dns_servers_v6": "fd96::10"}
    yield Case(
        about="DNS to the listed servers goes to the proxy, UDP and TCP; to others it does not",
        raw=listed | {"enable_ipv6": True},
        answers=(
            TO_SELF_NOT_DNS,
            ("proxy:15053", rf"{APPS}>dns[46]:53(/udp)?"),
            *PASSTHROUGH_V6,
        ),
    )
    yield Case(
        about="all DNS goes to the proxy, also that to a resolver in the pod",
        raw={"redirect_dns": True, "capture_all_dns": True, "enable_ipv6": True},
        answers=(
            TO_SELF_NOT_DNS,
            ("proxy:15053", rf"{APPS}>\w+:53(/udp)?"),
            *PASSTHROUGH_V6,
        ),
    )
    yield Case(
        about="DNS servers of IPv4 only: DNS over IPv6 is TCP like any other, and UDP is free",
        raw=EVERYTHING | {"redirect_dns": True, "dns_servers_v4": "10.96.0.10"},
        answers=(
            TO_SELF_NOT_DNS,
            ("proxy:15053", rf"{APPS}>dns4:53(/udp)?"),
            # Loopback is returned but for port 53, which goes on to "everything".
            ("proxy:15001", rf"{APPS}>resolver4:53"),
            ALL_OUT,
            ALL_IN,
            *PASSTHROUGH_V6,
        ),
    )
    yield Case(
        about="DNS capture without a known server is no DNS capture",
        raw=EVERYTHING | {"redirect_dns": True},
        answers=(TO_SELF, ALL_OUT, ALL_IN, *PASSTHROUGH_V6),
    )


def _tproxy_cases() -> Iterator[Case]:
    tproxy = {"inbound_interception_mode": "TPROXY"}
    yield Case(
        about="TPROXY: all inbound TCP, with the addresses as they came",
        raw=EVERYTHING | tproxy,
        answers=(TO_SELF_TPROXY, ALL_OUT, ALL_IN_TPROXY, *PASSTHROUGH_V6),
    )
    yield Case(
        about="TPROXY of one port with another mark, table and listener",
        raw=tproxy
        | {
            "enable_ipv6": True,
            "inbound_ports_include": "8080",
            "inbound_capture_port": 16006,
            "inbound_tproxy_mark": 4096,
            "inbound_tproxy_route_table": 200,
        },
        answers=(
            ("proxy:16006", r"(peer|vm)>(own|second)[46]:8080"),
            ("proxy:16006", rf"{PROXIES}>(own[46]|lob4|resolver4):(?!15008)\d+"),
            ("proxy:16006", r"gidonly>(own[46]|lob4):8080"),
            *PASSTHROUGH_V6,
        ),
    )


def _owner_cases() -> Iterator[Case]:
    java = ("proxy:15001", r"java>(in|out|vm|dns|odd)[46]:\d+")
    crowd = ",".join(str(group) for group in (*range(30000, 30059), 5001))
    for about, groups in (("one owner group", "5001"), ("60 owner groups", crowd)):
        yield Case(
            about=f"{about}: only whoever is in it is captured",
            raw=EVERYTHING | {"owner_groups_include": groups},
            answers=(TO_SELF, java, ALL_IN, *PASSTHROUGH_V6),
        )
    yield Case(
        about="an empty list of owner groups: nothing outbound is captured",
        raw=EVERYTHING | {"owner_groups_include": ""},
        answers=(TO_SELF, ALL_IN, *PASSTHROUGH_V6),
    )
    yield Case(
        about="two owner groups are left out",
        raw=EVERYTHING | {"owner_groups_exclude": "5001-5002,0"},
        answers=(
            TO_SELF,
            ("proxy:15001", r"(app|extra|second)>(in|out|vm|dns|odd)[46]:\d+"),
            ALL_IN,
            *PASSTHROUGH_V6,
        ),
    )
    yield Case(
        about="two proxy users: both are free outbound, the first alone is bounced at home",
        raw=EVERYTHING | {"proxy_uid": "1337,2000"},
        answers=(
            TO_SELF,
            ("proxy:15001", r"(root|app|extra|java|ftp)>(in|out|vm|dns|odd)[46]:\d+"),
            ALL_IN,
            *PASSTHROUGH_V6,
        ),
    )
    yield Case(
        about="other ports of the proxy",
        raw=EVERYTHING
        | {"proxy_port": 16001, "inbound_capture_port": 16006, "inbound_tunnel_port": 16008},
        answers=(
            ("proxy:16006", rf"{PROXIES}>(own[46]|lob4|resolver4):\d+"),
            ("proxy:16001", ALL_OUT[1]),
            ("proxy:16006", r"(peer|vm)>\w+:(?!16008)\d+"),
            *PASSTHROUGH_V6,
        ),
    )


def _loopback_cases() -> Iterator[Case]:
    yield Case(
        about="a loopback address is in the range: it is captured, other loopback is not",
        raw={"enable_ipv6": True, "outbound_ip_ranges_include": "127.1.2.3/32"},
        answers=(
            ("proxy:15001", rf"{APPS}>lob4:8080"),
            # Loopback traffic of others is no longer returned early, so the proxy's group counts.
            ("proxy:15006", r"(proxy|uidonly|gidonly)>(own[46]|lob4|resolver4):(?!15008)\d+"),
            *PASSTHROUGH_V6,
        ),
    )
    yield Case(
        about="the pod's loopback is all of 127.0.0.0/8: the proxy may use any of it",
        raw=EVERYTHING | {"host_ipv4_loopback_cidr": "127.0.0.0/8"},
        answers=(
            ("proxy:15006", rf"{PROXIES}>own[46]:(?!15008)\d+"),
            ALL_OUT,
            ALL_IN,
            *PASSTHROUGH_V6,
        ),
    )


def _interface_cases() -> Iterator[Case]:
    yield Case(
        about="net1 is excluded, both ways",
        raw=EVERYTHING | {"exclude_interfaces": "net1"},
        answers=(
            TO_SELF,
            ("proxy:15001", rf"{APPS}>(in|out|dns|odd)[46]:\d+"),
            ("proxy:15006", r"peer>\w+:(?!15008)\d+"),
            *PASSTHROUGH_V6,
        ),
    )
    yield Case(
        about="whatever a virtual machine on net1 sends counts as outbound",
        raw=EVERYTHING | {"reroute_virtual_interfaces": "net1"},
        answers=(
            TO_SELF,
            ALL_OUT,
            ("proxy:15001", r"vm>\w+:\d+"),
            ("proxy:15006", r"peer>\w+:(?!15008)\d+"),
            *PASSTHROUGH_V6,
        ),
    )
    yield Case(
        about="of a virtual machine's traffic only the included networks are captured",
        raw=EVERYTHING
        | {
            "reroute_virtual_interfaces": "net1",
            "outbound_ip_ranges_include": "10.96.0.0/16,fd97::/16",
        },
        answers=(
            TO_SELF,
            ("proxy:15001", r"vm>(in4|out6):\d+"),
            ("proxy:15001", rf"{APPS}>((in|dns|odd)4|out6):\d+"),
            ("proxy:15006", r"peer>\w+:(?!15008)\d+"),
            *PASSTHROUGH_V6,
        ),
    )


CASES = tuple(_cases())
