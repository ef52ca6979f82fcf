"""What must never reach the kernel, with the words that the complaint has to have in it.

From field reports 51 to 60 and from the traps of the settings reference: values that Istio lets
through and that the kernel tools then refuse, bend or take for something else.
"""

from collections.abc import Iterator

PORT_LISTS = (
    "inbound_ports_include",
    "inbound_ports_exclude",
    "outbound_ports_include",
    "outbound_ports_exclude",
)
PORTS = ("proxy_port", "inbound_capture_port", "inbound_tunnel_port")
NETWORK_LISTS = ("outbound_ip_ranges_include", "outbound_ip_ranges_exclude")
INTERFACE_LISTS = ("exclude_interfaces", "reroute_virtual_interfaces")
SWITCHES = ("redirect_dns", "capture_all_dns", "drop_invalid", "dual_stack")

# value: (what the complaint must repeat, what it must say of the allowed)
BAD_PORTS = {
    " 8080": ("' 8080'", "from 1 to 65535"),
    "70000": ("70000", "from 1 to 65535"),
    "65536": ("65536", "from 1 to 65535"),
    "0": ("0", "from 1 to 65535"),
    "0x50": ("'0x50'", "decimal"),
    "080": ("'080'", "80"),
    "http": ("'http'", "from 1 to 65535"),
    "\u0668\u0660": ("\u0668\u0660", "decimal"),  # 80 in Arabic-Indic digits
    "8\u00b2": ("8\u00b2", "decimal"),
    "1_000": ("'1_000'", "decimal"),
    "8e1": ("'8e1'", "decimal"),
    "+80": ("'+80'", "decimal"),
    "99999999999999999999": ("99999999999999999999", "from 1 to 65535"),
}
BAD_PORT_ITEMS = {
    **BAD_PORTS,
    "80,*": ("'*'", "mixed"),
    "*,80": ("'*'", "mixed"),
    "80 ,443": ("'80 '", "from 1 to 65535"),
    "-1": ("'-1'", "65535"),
    "9000:8000": ("'9000:8000'", "8000-9000"),
    "5000-1000": ("'5000-1000'", "1000-5000"),
    "80,1000-70000": ("70000", "65535"),
    "1:2:3": ("'1:2:3'", "FIRST-LAST"),
    "80:": ("'80:'", "65535"),
}
BAD_NETWORKS = {
    "10.0.0.0/08": ("'10.0.0.0/08'", "ADDRESS/PREFIX"),
    "10.0.0.0/255.0.0.0": ("'10.0.0.0/255.0.0.0'", "ADDRESS/PREFIX"),
    "fe80::%eth0/64": ("'fe80::%eth0/64'", "ADDRESS/PREFIX"),
    "10.0.0.0/33": ("'10.0.0.0/33'", "ADDRESS/PREFIX"),
    "fd00::/129": ("'fd00::/129'", "ADDRESS/PREFIX"),
    "api.example.invalid": ("'api.example.invalid'", "ADDRESS/PREFIX"),
    "10.0.0.0/8,*": ("'*'", "mixed"),
    "10.0.0.0/8, 10.1.0.0/16": ("' 10.1.0.0/16'", "10.1.0.0/16"),
    "010.0.0.0/8": ("'010.0.0.0/8'", "ADDRESS/PREFIX"),
    "10.0/8": ("'10.0/8'", "ADDRESS/PREFIX"),
    "-j": ("'-j'", "ADDRESS/PREFIX"),
}
BAD_INTERFACES = {
    "eth 0": ("'eth 0'", "1 to 15 characters"),
    " eth0": ("' eth0'", "1 to 15 characters"),
    "-eth0": ("'-eth0'", "a letter first"),
    "-j": ("'-j'", "a letter first"),
    ".eth0": ("'.eth0'", "a letter first"),
    "0eth": ("'0eth'", "a letter first"),
    "sixteen-letters-": ("'sixteen-letters-'", "1 to 15 characters"),
    "eth0,eth/1": ("'eth/1'", "letters, digits"),
    "eth+": ("'eth+'", "letters, digits"),
    "\u00e9th0": ("\u00e9th0", "letters"),
}
BAD_IDS = {
    "no-such-name": ("'no-such-name'", "4294967294"),
    "4294967295": ("4294967295", "4294967294"),
    "1337,*": ("'*'", "mixed"),
    "-1": ("'-1'", "4294967294"),
    "9-8": ("'9-8'", "8-9"),
    "0x539": ("'0x539'", "4294967294"),
    " 1337": ("' 1337'", "4294967294"),
}
OTHERS = {
    "inbound_interception_mode": {
        "NONE": ("'NONE'", "REDIRECT"),
        "tproxy": ("'tproxy'", "TPROXY"),
        " TPROXY": ("' TPROXY'", "TPROXY"),
    },
    "inbound_tproxy_mark": {
        "0": ("0", "from 1 to 4294967295"),
        "1338": ("1338", "another"),
        "4294967296": ("4294967296", "4294967295"),
        "0x539": ("'0x539'", "decimal"),
        "mark": ("'mark'", "decimal"),
    },
    "inbound_tproxy_route_table": {
        "254": ("254", "another"),
        "255": ("255", "another"),
        "main": ("'main'", "decimal"),
        "4294967296": ("4294967296", "4294967295"),
    },
    "owner_groups_include": {
        **BAD_IDS,
        ",".join(map(str, range(65))): ("65", "64"),
    },
    "host_ipv4_loopback_cidr": {
        "192.168.1.1/24": ("'192.168.1.1/24'", "127.0.0.1/32"),
        "10.0.0.1/7": ("'10.0.0.1/7'", "from 8 to 32"),
        "127.0.0.1/7": ("'127.0.0.1/7'", "from 8 to 32"),
        "127.0.0.1/33": ("'127.0.0.1/33'", "from 8 to 32"),
        "127.0.0.1": ("'127.0.0.1'", "prefix"),
        "::1/128": ("'::1/128'", "IPv4"),
        "localhost": ("'localhost'", "IPv4"),
        "": ("''", "IPv4"),
    },
    "enable_ipv6": {"maybe": ("'maybe'", "true")},
}


def _all() -> Iterator[tuple[str, str, str, str]]:
    """Yield setting, value, how the complaint names the value, and what it says is allowed."""
    for keys, values in (
        (
            PORTS,
            {**BAD_PORTS, "": ("''", "from 1 to 65535"), "8000:9000": ("'8000:9000'", "65535")},
        ),
        (PORT_LISTS, BAD_PORT_ITEMS),
        (NETWORK_LISTS, BAD_NETWORKS),
        (INTERFACE_LISTS, BAD_INTERFACES),
        (("proxy_uid", "proxy_gid", "owner_groups_exclude"), BAD_IDS),
        (SWITCHES, {"maybe": ("'maybe'", "true"), "yes": ("'yes'", "true"), "": ("''", "true")}),
        *(((key,), values) for key, values in OTHERS.items()),
    ):
        for key in keys:
            for value, (named, allowed) in values.items():
                yield key, value, named, allowed
    for key in ("inbound_ports_exclude", "outbound_ports_include", "outbound_ports_exclude"):
        yield key, "*", "'*'", "list"
    yield "outbound_ip_ranges_exclude", "*", "'*'", "list"
    yield "owner_groups_exclude", "*", "'*'", "list"


BAD_VALUES = tuple(_all())
