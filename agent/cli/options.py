"""The options that describe a capture, under the names that istio-iptables has for them."""

import argparse
import os
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agent.formats import documents, pod
from agent.model.errors import InvalidSettings
from agent.model.profile import OVERRIDES
from agent.model.settings import KEYS
from agent.model.state import EBPF
from agent.model.values import AMBIENT, GATES, GUARDS, MODES, SIDECAR


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting: its key, its flags and the environment names, the last of which wins."""

    key: str
    flags: tuple[str, ...]
    environment: tuple[str, ...]
    help: str
    switch: bool = False
    of_ambient: tuple[str, ...] = ()

    def variables(self, mode: str) -> tuple[str, ...]:
        """Return the environment names, of which Istio's node agent has others for ambient pods."""
        return self.environment if mode == SIDECAR else self.of_ambient


SETTINGS: tuple[Setting, ...] = (
    Setting("proxy_port", ("-p", "--envoy-port"), (), "port that outbound TCP is sent to (15001)"),
    Setting(
        "inbound_capture_port",
        ("-z", "--inbound-capture-port"),
        ("INBOUND_CAPTURE_PORT",),
        "port that inbound TCP is sent to (15006)",
    ),
    Setting(
        "inbound_tunnel_port",
        ("-e", "--inbound-tunnel-port"),
        ("INBOUND_TUNNEL_PORT",),
        "port of inbound tunnels, never captured (15008)",
    ),
    Setting(
        "proxy_uid",
        ("-u", "--proxy-uid"),
        ("PROXY_UID",),
        "users whose traffic is not captured (istio-proxy, else 1337)",
    ),
    Setting(
        "proxy_gid",
        ("-g", "--proxy-gid"),
        ("PROXY_GID",),
        "groups whose traffic is not captured (as --proxy-uid)",
    ),
    Setting(
        "inbound_interception_mode",
        ("-m", "--istio-inbound-interception-mode"),
        ("ISTIO_INBOUND_INTERCEPTION_MODE",),
        "REDIRECT or TPROXY (REDIRECT)",
    ),
    Setting(
        "inbound_ports_include",
        ("-b", "--istio-inbound-ports"),
        ("ISTIO_INBOUND_PORTS",),
        "inbound ports to capture: a list, ranges too, or '*' (none)",
    ),
    Setting(
        "inbound_ports_exclude",
        ("-d", "--istio-local-exclude-ports"),
        ("ISTIO_LOCAL_EXCLUDE_PORTS",),
        "inbound ports left alone when -b is '*' (none)",
    ),
    Setting(
        "outbound_ip_ranges_include",
        ("-i", "--istio-service-cidr"),
        ("ISTIO_SERVICE_CIDR",),
        "outbound networks to capture: a list or '*' (none)",
    ),
    Setting(
        "outbound_ip_ranges_exclude",
        ("-x", "--istio-service-exclude-cidr"),
        ("ISTIO_SERVICE_EXCLUDE_CIDR",),
        "outbound networks left alone (none)",
    ),
    Setting(
        "outbound_ports_include",
        ("-q", "--istio-outbound-ports"),
        ("ISTIO_OUTBOUND_PORTS",),
        "outbound ports to capture whatever the address (none)",
    ),
    Setting(
        "outbound_ports_exclude",
        ("-o", "--istio-local-outbound-ports-exclude"),
        ("ISTIO_LOCAL_OUTBOUND_PORTS_EXCLUDE",),
        "outbound ports left alone (none)",
    ),
    Setting(
        "exclude_interfaces",
        ("-c", "--istio-exclude-interfaces"),
        ("ISTIO_EXCLUDE_INTERFACES",),
        "interfaces left alone (none)",
    ),
    Setting(
        "reroute_virtual_interfaces",
        ("-k", "--kube-virt-interfaces"),
        ("KUBE_VIRT_INTERFACES",),
        "interfaces whose inbound traffic is handled as outbound (none)",
    ),
    Setting(
        "inbound_tproxy_mark",
        ("-t", "--istio-inbound-tproxy-mark"),
        ("ISTIO_INBOUND_TPROXY_MARK",),
        "packet mark of TPROXY (1337)",
    ),
    Setting(
        "inbound_tproxy_route_table",
        ("-r", "--istio-inbound-tproxy-route-table"),
        ("ISTIO_INBOUND_TPROXY_ROUTE_TABLE",),
        "route table of TPROXY (133)",
    ),
    Setting(
        "redirect_dns",
        ("--redirect-dns",),
        ("REDIRECT_DNS", "ISTIO_META_DNS_CAPTURE"),
        "send DNS queries to port 15053 (false)",
        switch=True,
        of_ambient=("AMBIENT_DNS_CAPTURE",),
    ),
    Setting(
        "capture_all_dns",
        ("--capture-all-dns",),
        ("CAPTURE_ALL_DNS",),
        "with --redirect-dns: queries to any server, not only the pod's own (false)",
        switch=True,
    ),
    Setting(
        "drop_invalid",
        ("--drop-invalid",),
        ("DROP_INVALID", "INVALID_DROP"),
        "drop packets that conntrack calls invalid (false)",
        switch=True,
    ),
    Setting(
        "dual_stack",
        ("--dual-stack",),
        ("DUAL_STACK", "ISTIO_DUAL_STACK"),
        "accepted; IPv6 is found out by --enable-ipv6 auto",
        switch=True,
    ),
    Setting(
        "owner_groups_include",
        ("--owner-groups-include",),
        ("ISTIO_OUTBOUND_OWNER_GROUPS",),
        "groups whose outbound traffic is captured: a list or '*' (*)",
    ),
    Setting(
        "owner_groups_exclude",
        ("--owner-groups-exclude",),
        ("ISTIO_OUTBOUND_OWNER_GROUPS_EXCLUDE",),
        "groups whose outbound traffic is left alone (none)",
    ),
    Setting(
        "host_ipv4_loopback_cidr",
        ("--host-ipv4-loopback-cidr",),
        ("ISTIO_OUTBOUND_IPV4_LOOPBACK_CIDR",),
        "IPv4 loopback network that is never captured (127.0.0.1/32)",
    ),
    Setting(
        "enable_ipv6",
        ("--enable-ipv6",),
        (),
        "auto, true or false (auto: wherever the namespace has IPv6 or may get it)",
        of_ambient=("AMBIENT_IPV6",),
    ),
    Setting(
        "dns_servers",
        ("--dns-servers",),
        (),
        "name servers to capture, comma separated (those of the pod's resolv.conf)",
    ),
    Setting(
        "host_probe_snat_ip",
        ("--host-probe-snat-ip",),
        (),
        "ambient: where the node's probes come from, never captured (169.254.7.127)",
        of_ambient=("HOST_PROBE_SNAT_IP",),
    ),
    Setting(
        "host_probe_snat_ipv6",
        ("--host-probe-snat-ipv6",),
        (),
        "the same for IPv6 (fd16:9254:7127:1337:ffff:ffff:ffff:ffff)",
        of_ambient=("HOST_PROBE_SNAT_IPV6",),
    ),
)

_SWITCHED = frozenset({"enable_ipv6", *(one.key for one in SETTINGS if one.switch)})

WITHOUT = (
    "Without any of these the whole pod is captured: inbound TCP but ports 15020, 15021 and 15090, "
    "and outbound TCP but port 15020."
)
RULES = (
    "With any of them, from wherever, the defaults are those in (), which are istio-iptables', and "
    "only what -b, -i or -q (or --redirect-dns) name is captured. A flag wins over --settings, "
    "that over --pod-manifest, that over the environment. Names in capitals are those of the "
    "settings, in small letters in messages and in --settings."
)


def add_capture_options(parser: argparse.ArgumentParser, *, without: str) -> None:
    """Add everything that describes a capture; `without` says what holds where nothing does."""
    text = "\n".join(textwrap.wrap(f"{without} {RULES}", 76))
    group = parser.add_argument_group("capture", text)
    for setting in SETTINGS:
        extra: dict[str, Any] = {"dest": setting.key, "default": None}
        if setting.switch:
            extra |= {"nargs": "?", "const": "true", "metavar": "BOOL"}
        else:
            extra["metavar"] = setting.key.upper()
        group.add_argument(*setting.flags, help=_help(setting), **extra)
    group.add_argument("--settings", metavar="FILE", help="YAML file with settings by name")
    group.add_argument(
        "--pod-manifest", metavar="FILE", help="settings from a pod's annotations (-: stdin)"
    )
    parser.add_argument(
        "--mode",
        choices=MODES,
        help="ambient: the node's proxy (ztunnel) has its sockets in the pod and takes all TCP, "
        "both ways; --redirect-dns, --istio-inbound-ports '' (outbound only), -k and "
        "--host-probe-snat-ip are what can be chosen (sidecar)",
    )
    parser.add_argument(
        "--gate",
        choices=GATES,
        help="open: nothing is captured before the proxy listens for the first time, which takes "
        "--backend ebpf or a running agent; listener: the same for init containers alone, which "
        "takes a running agent (closed)",
    )
    parser.add_argument(
        "--guard",
        choices=GUARDS,
        help="standing: a table of its own that drops what must be redirected and was not, so that "
        "a flushed nat table closes the pod (off)",
    )


def _help(setting: Setting) -> str:
    text = setting.help.replace("%", "%%")
    names = (*setting.environment, *setting.of_ambient)
    return f"{text} [env {', '.join(names)}]" if names else text


def raw_settings(
    arguments: argparse.Namespace, environment: Mapping[str, str] | None = None
) -> dict[str, object]:
    """Return the settings as given; whoever gives none gets a pod that is captured both ways.

    Raises: InvalidSettings for a file that cannot be used or a mode that this version lacks.
    """
    given = given_settings(arguments, environment)
    return guarded(whole(arguments.mode) if given is None else given, arguments)


def whole(mode: str | None) -> dict[str, object]:
    """Return the settings of a pod that is captured both ways and says nothing of itself."""
    return {"mode": AMBIENT} if mode == AMBIENT else dict(pod.DEFAULTS)


def guarded(given: dict[str, object], arguments: argparse.Namespace) -> dict[str, object]:
    """Return the settings with the guard and gate asked for; these alone ask for no capture."""
    asked = {"guard": arguments.guard, "gate": arguments.gate}
    return {**given, **{key: value for key, value in asked.items() if value is not None}}


def given_settings(
    arguments: argparse.Namespace, environment: Mapping[str, str] | None = None
) -> dict[str, object] | None:
    """Return the settings as given, or None where nothing was said at all.

    Environment comes first, then files, then flags, the later one winning.

    Raises: as `raw_settings`.
    """
    environment = os.environ if environment is None else environment
    given: dict[str, object] = {}
    file: Mapping[str, object] = {}
    if arguments.settings is not None:
        file = _known_keys(documents.load_mapping(arguments.settings), arguments.settings)
    mode = str(arguments.mode or file.get("mode") or SIDECAR)
    for setting in SETTINGS:
        for name in setting.variables(mode):
            if name in environment and _says_something(setting, environment[name]):
                given[setting.key] = environment[name]
    if arguments.pod_manifest:
        given |= documents.pod_settings(arguments.pod_manifest, mode)
    given |= file
    for setting in SETTINGS:
        value = getattr(arguments, setting.key)
        if value is not None:
            given[setting.key] = value
    _refuse_gate(arguments.gate or given.get("gate"), arguments.backend)
    said = bool(given) or arguments.settings is not None
    if mode != SIDECAR or "mode" in given:
        given["mode"] = mode
    if "ENVOY_USER" in environment:
        given["envoy_user"] = environment["ENVOY_USER"]
    return given if said else None


def _says_something(setting: Setting, text: str) -> bool:
    """Whether a variable counts: templates leave switches empty, which must not stop a pod."""
    return bool(text) or setting.key not in _SWITCHED


def _refuse_gate(gate: object, backend: str) -> None:
    """Refuse a gate that nobody would close."""
    if gate == "listener":
        problem = "gate: 'listener' needs a running agent, which knows the init containers"
    elif gate == "open" and backend != EBPF:
        problem = (
            "gate: 'open' needs a running agent, which sees when the proxy listens, or --backend "
            "ebpf, whose programs see it themselves"
        )
    else:
        return
    raise InvalidSettings((problem,))


def _known_keys(found: Mapping[str, object], path: str) -> Mapping[str, object]:
    known = {*KEYS, *OVERRIDES, "dns_servers"}
    problems = [
        f"{path}: {key}: no such setting{documents.nearest(key, known)}"
        for key in found
        if key not in known
    ]
    if problems:
        raise InvalidSettings(tuple(problems))
    return found
