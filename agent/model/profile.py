"""What an ambient capture is, in the words of the settings.

The proxy of an ambient pod is its node's (ztunnel), which has its sockets in the pod's namespace.
All TCP goes there, in both directions, and what it sends itself is known by its mark and not by its
user; ports, marks and the loopback network are fixed. So most settings of a sidecar's capture have
the one value here that says so, and few are left to choose.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from agent.model import values

# What differs from the defaults of a sidecar's capture.
AMBIENT: Mapping[str, object] = MappingProxyType(
    {
        "mode": values.AMBIENT,
        "inbound_ports_include": values.EVERYTHING,
        "outbound_ip_ranges_include": values.Networks(everything=True),
        "capture_all_dns": True,
    }
)
ONLY_AMBIENT = ("host_probe_snat_ip", "host_probe_snat_ipv6")
CHOICES = (
    *("mode", "enable_ipv6", "redirect_dns", "inbound_ports_include"),
    *("reroute_virtual_interfaces", *ONLY_AMBIENT, "dual_stack", "guard", "gate", "init_cgroups"),
)


def mode(value: object) -> str:
    if value in values.MODES:
        return str(value)
    raise values.BadValue(f"{values.shown(value)} is no mode; write {' or '.join(values.MODES)}")


def address(version: int) -> Callable[[object], values.Address]:
    several = values.addresses(version)

    def parse_value(value: object) -> values.Address:
        found = several(value)
        if len(found) != 1:
            raise values.BadValue(f"{values.shown(value)} is not one IPv{version} address")
        return found[0]

    return parse_value


def _dns_proxy(value: object) -> bool | None:
    """Return what a pod says of DNS, None where it says nothing."""
    words = {"enabled": True, "disabled": False, "unset": None, "": None}
    if not isinstance(value, str) or value not in words:
        known = ", ".join(word for word in words if word)
        raise values.BadValue(f"{values.shown(value)} is none of {known}")
    return words[value]


def _nothing(value: object) -> None:
    if value != "":
        raise values.BadValue("it is of the rule in the node's own namespace, which is not made")


# What Istio's node agent calls what a pod's annotations override, and what it says of the node.
OVERRIDES: Mapping[str, Callable[[object], object]] = MappingProxyType(
    {
        "ingress_mode": values.boolean,
        "dns_proxy": _dns_proxy,
        "virtual_interfaces": values.interfaces,
        "kubelet_uid": _nothing,
    }
)


def folded(parsed: Mapping[str, object]) -> dict[str, object]:
    """Return parsed values with the overrides turned into the settings that they override."""
    found = {key: value for key, value in parsed.items() if key not in OVERRIDES}
    if parsed.get("ingress_mode"):
        found["inbound_ports_include"] = values.NOTHING
    if parsed.get("dns_proxy") is not None:
        found["redirect_dns"] = parsed["dns_proxy"]
    if "virtual_interfaces" in parsed:
        found["reroute_virtual_interfaces"] = parsed["virtual_interfaces"]
    return found
