"""Random settings for the behaviour tests: every key, chosen so that the probes can tell.

Values are about the addresses, ports and ids that `behaviour` uses; a port nobody dials would
make a rule that no test can see. The same random numbers give the same settings.
"""

from collections.abc import Sequence
from random import Random

from tests.support.behaviour_cast import HOSTS

PORTS = ("80", "443", "3306", "53", "7777", "8080", "9090", "9091", "15008", "15021", "15006")
RANGES = ("80-443", "8000:9090", "1-65535", "0-65535", "0-79", "15000-15099", "9091-9091")
NETWORKS_4 = (
    *("10.96.0.0/16", "10.97.0.0/16", "10.96.1.1/32", "10.96.0.10/32", "10.0.0.0/8", "0.0.0.0/0"),
    *("10.77.0.0/24", "10.77.0.2/32", "10.78.0.0/24", "128.0.0.0/1", "10.96.0.0/15"),
)
NETWORKS_6 = (
    *("fd96::/16", "fd97::/16", "fd96:1::1/128", "fd96::10/128", "fc00::/7", "::/0"),
    *("fd77::/64", "fd77::2/128", "fd78::/64", "8000::/1", "fd96::/15"),
)
LOOPBACKS_4 = ("127.1.2.3/32", "127.0.0.0/8", "127.0.0.1/32", "127.0.0.53/32")
LOOPBACKS_6 = ("::1/128",)
IDS = ("1337", "1000", "2000", "0", "5001", "1337-1340", "1000-2000", "0-1000", "4294967294")
GROUPS = ("5001", "5002", "1000", "1337", "2000", "0", "5000-5001", "1-4999", "0-4294967294")
LOOPBACK_RANGES = ("127.0.0.1/32", "127.0.0.1/8", "127.0.0.0/8", "127.1.2.3/32", "127.0.0.53/24")


def random_settings(numbers: Random) -> dict[str, object]:
    """Return valid settings; a key that is left out has its default."""
    ipv6 = numbers.random() < 0.7
    raw: dict[str, object] = {
        "enable_ipv6": ipv6,
        "inbound_ports_include": numbers.choice(("*", "*", _ports(numbers), "")),
        "outbound_ip_ranges_include": _include(numbers, ipv6),
        "outbound_ip_ranges_exclude": _sometimes(numbers, _networks(numbers, ipv6=True)),
    }
    for key in ("inbound_ports_exclude", "outbound_ports_include", "outbound_ports_exclude"):
        raw[key] = _sometimes(numbers, _ports(numbers))
    raw.update(_owners(numbers))
    raw.update(_dns(numbers))
    raw.update(_interfaces(numbers))
    raw.update(_mode(numbers))
    return raw


def _some(numbers: Random, pool: Sequence[str], most: int) -> str:
    return ",".join(numbers.sample(pool, numbers.randint(1, min(most, len(pool)))))


def _sometimes(numbers: Random, value: str, chance: float = 0.35) -> str:
    return value if numbers.random() < chance else ""


def _ports(numbers: Random) -> str:
    pool = PORTS if numbers.random() < 0.8 else (*PORTS, *RANGES)
    return _some(numbers, pool, 4)


def _networks(numbers: Random, *, ipv6: bool) -> str:
    pool = [*NETWORKS_4, *(NETWORKS_6 if ipv6 else ())]
    if numbers.random() < 0.25:
        pool += (*LOOPBACKS_4, *(LOOPBACKS_6 if ipv6 else ()))
    return _some(numbers, pool, 5)


def _include(numbers: Random, ipv6: bool) -> str:
    kind = numbers.random()
    if kind < 0.35:
        return "*"
    return "" if kind < 0.5 else _networks(numbers, ipv6=ipv6)


def _owners(numbers: Random) -> dict[str, object]:
    found: dict[str, object] = {}
    if numbers.random() < 0.4:
        found["proxy_uid"] = _some(numbers, IDS, 3)
    if numbers.random() < 0.4:
        found["proxy_gid"] = _some(numbers, IDS, 3)
    kind = numbers.random()
    if kind < 0.15:
        found["owner_groups_include"] = _some(numbers, GROUPS, 4)
    elif kind < 0.25:  # more than fit into one rule
        crowd = [str(30000 + n) for n in range(numbers.randint(46, 60))]
        found["owner_groups_include"] = ",".join((*crowd, *numbers.sample(GROUPS[:6], 3)))
    elif kind < 0.3:
        found["owner_groups_include"] = ""
    if numbers.random() < 0.25:
        found["owner_groups_exclude"] = _some(numbers, GROUPS, 3)
    return found


def _dns(numbers: Random) -> dict[str, object]:
    if numbers.random() < 0.5:
        return {"capture_all_dns": numbers.random() < 0.2}
    return {
        "redirect_dns": True,
        "capture_all_dns": numbers.random() < 0.35,
        "dns_servers_v4": numbers.choice(("", HOSTS["dns4"], f"{HOSTS['dns4']},127.0.0.53")),
        "dns_servers_v6": numbers.choice(("", HOSTS["dns6"], f"{HOSTS['dns6']},::1")),
    }


def _interfaces(numbers: Random) -> dict[str, object]:
    found: dict[str, object] = {}
    if numbers.random() < 0.25:
        found["exclude_interfaces"] = numbers.choice(("net1", "net1", "eth0", "net1,eth9", "lo"))
    if numbers.random() < 0.25:
        found["reroute_virtual_interfaces"] = numbers.choice(("net1", "net1", "net1,tap0", "eth0"))
    return found


def _mode(numbers: Random) -> dict[str, object]:
    found: dict[str, object] = {
        "drop_invalid": numbers.random() < 0.3,
        "dual_stack": numbers.random() < 0.5,
    }
    if numbers.random() < 0.4:
        found["inbound_interception_mode"] = "TPROXY"
    if numbers.random() < 0.3:
        found["inbound_tproxy_mark"] = numbers.choice((1, 4096, 2**31 + 5, 2**32 - 1))
        found["inbound_tproxy_route_table"] = numbers.choice((1, 200, 5000))
    if numbers.random() < 0.3:
        found["proxy_port"] = 16001
        found["inbound_capture_port"] = numbers.choice((16006, 15006))
        found["inbound_tunnel_port"] = numbers.choice((16008, 15008))
    if numbers.random() < 0.25:
        found["host_ipv4_loopback_cidr"] = numbers.choice(LOOPBACK_RANGES)
    return found
