"""Which setting of a capture a loaded rule comes from.

Rules carry no label, so this reads shape and place: `plan` and Istio write the rules of each
setting in one form and in a fixed order. Only chains of the capture are read so, and built-in
chains of a table that has such chains.
"""

from agent.model.owned import AMBIENT_CHAIN
from agent.model.ruleset import BASIC, BUILTIN_CHAINS, Option, Rule, Table

CAPTURE_PREFIX = "ISTIO_"
GUARD_PREFIX = "ISTIO_GUARD"
DNS = ("tcp", "udp")
UID, GID = "--uid-owner", "--gid-owner"


def setting_of(table: Table, chain: str, number: int) -> str | None:
    """Return the key of `Settings` that rule `number` (from 1) of a chain comes from.

    None: the rule is not of a capture, or of none that this module knows.
    """
    found = table.chain(chain)
    if found is None or not 1 <= number <= len(found.rules):
        return None
    rules = found.rules
    if chain.startswith(GUARD_PREFIX) or _target(rules[number - 1]).startswith(GUARD_PREFIX):
        return "guard"
    if table.chain(AMBIENT_CHAIN):
        return _ambient(table, chain, rules[number - 1])
    if chain in BUILTIN_CHAINS.get(table.name, ()):
        return _builtin(table, chain, rules[number - 1])
    if chain in ("ISTIO_OUTPUT", "ISTIO_OUTPUT_GROUPS") and table.name == "nat":
        return _nat_output(rules, number - 1)
    if chain == "ISTIO_INBOUND":
        return _inbound(table.name, rules, number - 1)
    if chain == "ISTIO_OUTPUT_DNS":
        return _dns(rules[number - 1])
    if chain == "ISTIO_TPROXY" or (chain == "ISTIO_IN_REDIRECT" and table.name == "nat"):
        return "inbound_capture_port"
    return {
        "ISTIO_REDIRECT": "proxy_port",
        "ISTIO_DIVERT": "inbound_tproxy_mark",
        "ISTIO_DROP": "drop_invalid",
    }.get(chain)


def _ambient(table: Table, chain: str, rule: Rule) -> str | None:
    """Most rules of an ambient capture come from no choice but the mode itself."""
    if chain in BUILTIN_CHAINS.get(table.name, ()):
        return "mode" if _target(rule).startswith(CAPTURE_PREFIX) else None
    if not chain.startswith(CAPTURE_PREFIX):
        return None
    if table.name == "raw" or any(o.values == ("53",) for p in DNS for o in rule.options(p)):
        return "redirect_dns"
    if _modules(rule) == {"cgroup"}:
        return "init_cgroups"
    if rule.option(BASIC, "-i"):
        return "reroute_virtual_interfaces"
    ends = rule.option(BASIC, "-s") or rule.option(BASIC, "-d")
    if ends and not ends.negated:
        return "host_probe_snat_ipv6" if ":" in ends.values[0] else "host_probe_snat_ip"
    captures = _target(rule) == "REDIRECT" and chain == AMBIENT_CHAIN
    return "inbound_ports_include" if captures else "mode"


def _target(rule: Rule) -> str:
    return rule.target.name if rule.target else ""


def _modules(rule: Rule) -> frozenset[str]:
    return frozenset(match.module for match in rule.matches) - {BASIC, "comment"}


def _owner(rule: Rule) -> Option | None:
    return next(rule.options("owner"), None)


def _builtin(table: Table, chain: str, rule: Rule) -> str | None:
    if not any(found.name.startswith(CAPTURE_PREFIX) for found in table.chains):
        return None
    to_chain = {
        ("nat", "OUTPUT", "ISTIO_OUTPUT"): "outbound_ip_ranges_include",
        ("nat", "PREROUTING", "ISTIO_INBOUND"): "inbound_ports_include",
        ("nat", "PREROUTING", "ISTIO_REDIRECT"): "reroute_virtual_interfaces",
        ("mangle", "PREROUTING", "ISTIO_INBOUND"): "inbound_ports_include",
        ("mangle", "PREROUTING", "ISTIO_DROP"): "drop_invalid",
        ("raw", "PREROUTING", "ISTIO_INBOUND"): "redirect_dns",
        ("raw", "OUTPUT", "ISTIO_OUTPUT_DNS"): "redirect_dns",
    }
    if known := to_chain.get((table.name, chain, _target(rule))):
        return known
    if table.name == "mangle" and table.chain("ISTIO_DIVERT") and _modules(rule):
        return _tproxy(rule)
    side = {"PREROUTING": "-i", "OUTPUT": "-o"}.get(chain, "")
    basic = tuple(rule.options(BASIC))
    if _target(rule) != "RETURN" or _modules(rule) or [o.name for o in basic] != [side]:
        return None
    if basic[0].negated:
        return None
    return "reroute_virtual_interfaces" if _reroutes(table, basic[0]) else "exclude_interfaces"


def _reroutes(table: Table, interface: Option) -> bool:
    """Whether the table also redirects what comes in by this interface."""
    chain = table.chain("PREROUTING")
    return any(
        _target(rule) == "ISTIO_REDIRECT" and rule.option(BASIC, "-i") == interface
        for rule in (chain.rules if chain else ())
    )


def _tproxy(rule: Rule) -> str | None:
    if owner := _owner(rule):
        return {UID: "proxy_uid", GID: "proxy_gid"}.get(owner.name)
    if _target(rule) in ("RETURN", "CONNMARK") and _modules(rule) <= {"mark", "connmark"}:
        return "inbound_tproxy_mark"
    return None


def _inbound(table: str, rules: tuple[Rule, ...], index: int) -> str | None:
    rule = rules[index]
    if table == "raw":
        return "dns_servers_v4" if rule.option(BASIC, "-s") else "capture_all_dns"
    if _target(rule) != "RETURN":
        return "inbound_ports_include"
    if table == "nat" and index == 0:
        return "inbound_tunnel_port"  # always there, and always first
    if table == "mangle" and (_modules(rule) == {"mark"} or rule.option(BASIC, "-i")):
        return "inbound_tproxy_mark"
    return "inbound_ports_exclude"


def _nat_output(rules: tuple[Rule, ...], index: int) -> str | None:
    rule = rules[index]
    if _owner(rule):
        return _owned(rules, index)
    if _modules(rule) == {"cgroup"}:
        return "init_cgroups"
    target, names = _target(rule), [option.name for option in rule.options(BASIC)]
    ports = _modules(rule) & {"tcp", "udp", "multiport"}
    if target == "ISTIO_OUTPUT_DNS":
        return "redirect_dns"
    if target == "ISTIO_REDIRECT":
        return "outbound_ports_include" if ports else "outbound_ip_ranges_include"
    if target != "RETURN":
        return None
    if ports:
        return "outbound_ports_exclude"
    if names == ["-s", "-o"]:
        return "inbound_ports_include"  # what the proxy passes on of the inbound traffic
    if names == ["-d"]:
        first = next(at for at, other in enumerate(rules) if _returns_by_destination(other))
        return "host_ipv4_loopback_cidr" if index == first else "outbound_ip_ranges_exclude"
    # Owner groups: with an empty list, and after more groups than one rule holds, a bare RETURN.
    # An exclusion of every port is also without a port condition.
    return "outbound_ports_exclude" if names == ["-p"] else None if names else OWNER_GROUPS


OWNER_GROUPS = "owner_groups_include"


def _returns_by_destination(rule: Rule) -> bool:
    names = [option.name for option in rule.options(BASIC)]
    return _target(rule) == "RETURN" and names == ["-d"] and not _modules(rule)


def _owned(rules: tuple[Rule, ...], index: int) -> str | None:
    """Tell the rules of the proxy's ids from those of owner groups, which look alike."""
    rule = rules[index]
    owner = _owner(rule)
    if owner is None or owner.name == UID:
        return "proxy_uid"
    if rule.option(BASIC, "-o"):
        return "proxy_gid"
    if owner.negated or (rule.target and rule.target.goto):
        return OWNER_GROUPS
    # The plain RETURN of a proxy gid stands right behind the loopback rules of the same gid.
    before = _owner(rules[index - 1]) if index else None
    ours = before is not None and (before.name, before.values) == (owner.name, owner.values)
    return "proxy_gid" if ours else "owner_groups_exclude"


def _dns(rule: Rule) -> str:
    if owner := _owner(rule):
        return "proxy_uid" if owner.name == UID else "proxy_gid"
    server = rule.option(BASIC, "-d")
    if server is None:
        return "capture_all_dns"
    return "dns_servers_v6" if ":" in "".join(server.values) else "dns_servers_v4"
