"""The rules of Istio's node agent in an ambient pod a second time, from the reference alone.

What no golden covers is measured by it, so it must not import the agent. It takes the configuration
and the overrides of a case and returns restore text, in the order in which Istio appends.
"""

from collections.abc import Mapping

LOOPBACK = {4: "127.0.0.1/32", 6: "::1/128"}
PROBE = {4: "host_probe_snat_ip", 6: "host_probe_snat_ipv6"}
PROXY = "-m mark --mark 0x539/0xfff"
OTHERS = "-m mark ! --mark 0x539/0xfff"
TO_DNS = "-j REDIRECT --to-ports 15053"
RESTORE = "-j CONNMARK --restore-mark --nfmask 0xffffffff --ctmask 0xffffffff"


def captures_dns(config: Mapping[str, object], overrides: Mapping[str, object]) -> bool:
    said = overrides["dns_proxy"]
    return bool(config["redirect_dns"]) if said == "unset" else said == "enabled"


def restore_text(
    config: Mapping[str, object], overrides: Mapping[str, object], version: int
) -> str:
    """Return what the agent hands to iptables-restore (or ip6tables-restore)."""
    lo, probe = LOOPBACK[version], config[PROBE[version]]
    interfaces, bypassed = overrides["virtual_interfaces"], overrides["ingress_mode"]
    assert isinstance(interfaces, list)
    arriving, leaving = [], [f"-d {probe} -p tcp -m tcp -j ACCEPT"]
    for name in interfaces:
        arriving.append(f"-i {name} -p tcp -j REDIRECT --to-ports 15001")
        arriving.append(f"-i {name} -p tcp -j RETURN")
    if not bypassed:
        arriving.append(f"-s {probe} -p tcp -m tcp -j ACCEPT")
        arriving.append(f"! -d {lo} -p tcp ! --dport 15008 {OTHERS} -j REDIRECT --to-ports 15006")
    raw = {}
    if captures_dns(config, overrides):
        leaving.append(f"! -o lo -p udp {OTHERS} -m udp --dport 53 {TO_DNS}")
        leaving.append(f"! -d {lo} -p tcp --dport 53 {OTHERS} {TO_DNS}")
        raw = {
            "ISTIO_OUTPUT": [f"-p udp {PROXY} -m udp --dport 53 -j CT --zone 1"],
            "ISTIO_PRERT": [f"-p udp {OTHERS} -m udp --sport 53 -j CT --zone 1"],
        }
    leaving += [
        "-p tcp -m mark --mark 0x111/0xfff -j ACCEPT",
        f"! -d {lo} -o lo -j ACCEPT",
        f"! -d {lo} -p tcp {OTHERS} -j REDIRECT --to-ports 15001",
    ]
    mangle = {
        "ISTIO_PRERT": [f"{PROXY} -j CONNMARK --set-xmark 0x111/0xfff"],
        "ISTIO_OUTPUT": [f"-m connmark --mark 0x111/0xfff {RESTORE}"],
    }
    nat = {"ISTIO_PRERT": arriving, "ISTIO_OUTPUT": leaving}
    tables = {"mangle": mangle, "nat": nat, **({"raw": raw} if raw else {})}
    return "".join(_table(name, chains) for name, chains in tables.items())


def _table(name: str, chains: Mapping[str, list[str]]) -> str:
    lines = [f"*{name}", *(f"-N {chain}" for chain in chains)]
    lines += ["-A PREROUTING -j ISTIO_PRERT", "-A OUTPUT -j ISTIO_OUTPUT"]
    lines += [f"-A {chain} {rule}" for chain, rules in chains.items() for rule in rules]
    return "".join(f"{line}\n" for line in (*lines, "COMMIT"))


def ip_commands(config: Mapping[str, object]) -> list[str]:
    """Return what is run besides, in order."""
    whole = {4: "0.0.0.0/0", 6: "::/0"}
    versions = [4, 6] if config["enable_ipv6"] else [4]
    routes = [f"ip -{v} route replace local {whole[v]} dev lo table 100" for v in versions]
    mark = "fwmark 0x111/0xfff pref 32764 lookup 100"
    return [*routes, *(f"ip -{v} rule add {mark}" for v in versions)]
