"""The rules of `istio-iptables` a second time, from the settings reference and from nothing else.

It is what the agent's plan is measured by where no golden covers a setting, so it must not import
the agent. It takes the text that a user of Istio would write and returns restore text, in the order
in which Istio appends and inserts; the goldens show that it is right, byte for byte.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

Config = Mapping[str, object]

PASSTHROUGH = {4: "127.0.0.6/32", 6: "::6/128"}
HOST_BITS = {4: 32, 6: 128}


@dataclass
class _Tables:
    """Restore lines by table, and the chains in the order in which they were first needed."""

    lines: dict[str, list[str]] = field(default_factory=dict)
    filled: dict[str, list[str]] = field(default_factory=dict)
    jumped: dict[str, list[str]] = field(default_factory=dict)

    def append(self, table: str, chain: str, rule: str) -> None:
        self._write(table, chain, f"-A {chain} {rule}")

    def insert(self, table: str, chain: str, at: int, rule: str) -> None:
        self._write(table, chain, f"-I {chain} {at} {rule}")

    def _write(self, table: str, chain: str, line: str) -> None:
        self.lines.setdefault(table, []).append(line)
        self.filled.setdefault(table, []).append(chain)
        self.jumped.setdefault(table, []).append(line.partition(" -j ")[2].split()[0])

    def text(self) -> str:
        parts = []
        for table in sorted(self.lines):
            chains = dict.fromkeys((*self.filled[table], *self.jumped[table]))
            own = [f"-N {chain}" for chain in chains if chain.startswith("ISTIO_")]
            parts += [f"*{table}", *own, *self.lines[table], "COMMIT"]
        return "".join(f"{part}\n" for part in parts)


def items(config: Config, key: str) -> list[str]:
    """Return a list setting as Istio splits it: at commas, empty items dropped, never trimmed."""
    value = config[key]
    if isinstance(value, list):
        return [str(item) for item in value]
    return [item for item in str(value).split(",") if item]


def restore_text(config: Config, version: int) -> str:
    """Return what `istio-iptables` hands to iptables-restore (or ip6tables-restore)."""
    return _Rules(config, version).written().text()


def ip_commands(config: Config) -> list[str]:
    """Return what a run does besides rules, in order."""
    versions = [4, 6] if config["enable_ipv6"] else [4]
    commands = ["ip -6 addr add ::6/128 dev lo"] if config["enable_ipv6"] else []
    if config["inbound_interception_mode"] == "TPROXY" and items(config, "inbound_ports_include"):
        mark, table = config["inbound_tproxy_mark"], config["inbound_tproxy_route_table"]
        whole = {4: "0.0.0.0/0", 6: "::/0"}
        commands += [f"ip -{v} rule add fwmark {mark} lookup {table}" for v in versions]
        commands += [f"ip -{v} route add local {whole[v]} dev lo table {table}" for v in versions]
    return commands


class _Rules:
    def __init__(self, config: Config, version: int) -> None:
        self.config = config
        self.version = version
        self.tables = _Tables()
        self.loopback = str(config["host_ipv4_loopback_cidr"]) if version == 4 else "::1/128"
        self.tproxy = config["inbound_interception_mode"] == "TPROXY"
        self.tunnel = config["inbound_tunnel_port"]
        self.owners = [
            *(("--uid-owner", uid) for uid in items(config, "proxy_uid")),
            *(("--gid-owner", gid) for gid in items(config, "proxy_gid")),
        ]
        self.servers = items(config, f"dns_servers_v{version}")
        known = [*items(config, "dns_servers_v4"), *items(config, "dns_servers_v6")]
        everyone = bool(config["capture_all_dns"])
        self.dns = bool(config["redirect_dns"]) and (everyone or bool(known))
        self.dns_here = self.dns and (everyone or bool(self.servers))

    def written(self) -> _Tables:
        self._interfaces()
        self._drop_invalid()
        self._bodies()
        self._inbound()
        self._output()
        self._dns_zones()
        self._tproxy_marks()
        return self.tables

    def _interfaces(self) -> None:
        for name in items(self.config, "exclude_interfaces"):
            for table in ("nat", "mangle") if self.tproxy else ("nat",):
                self.tables.append(table, "PREROUTING", f"-i {name} -j RETURN")
                self.tables.append(table, "OUTPUT", f"-o {name} -j RETURN")
        for name in items(self.config, "reroute_virtual_interfaces"):
            self.tables.insert("nat", "PREROUTING", 1, f"-i {name} -j RETURN")

    def _drop_invalid(self) -> None:
        if self.config["drop_invalid"]:
            rule = "-m conntrack --ctstate INVALID -j ISTIO_DROP"
            self.tables.append("mangle", "PREROUTING", rule)
            self.tables.append("mangle", "ISTIO_DROP", "-j DROP")

    def _bodies(self) -> None:
        self.tables.append("nat", "ISTIO_INBOUND", f"-p tcp --dport {self.tunnel} -j RETURN")
        for chain, key in (
            ("ISTIO_REDIRECT", "proxy_port"),
            ("ISTIO_IN_REDIRECT", "inbound_capture_port"),
        ):
            to_port = f"-p tcp -j REDIRECT --to-ports {self.config[key]}"
            self.tables.append("nat", chain, to_port)

    def _inbound(self) -> None:
        ports = items(self.config, "inbound_ports_include")
        if not ports:
            return
        table = "nat"
        if self.tproxy:
            table, mark = "mangle", self.config["inbound_tproxy_mark"]
            self.tables.append(table, "ISTIO_DIVERT", f"-j MARK --set-mark {mark}")
            self.tables.append(table, "ISTIO_DIVERT", "-j ACCEPT")
            capture = f"--tproxy-mark {mark}/0xffffffff --on-port "
            capture += str(self.config["inbound_capture_port"])
            rule = f"! -d {self.loopback} -p tcp -j TPROXY {capture}"
            self.tables.append(table, "ISTIO_TPROXY", rule)
        self.tables.append(table, "PREROUTING", "-p tcp -j ISTIO_INBOUND")
        conditions = [f"-p tcp --dport {port}" for port in ports]
        if self.config["inbound_ports_include"] == "*":
            conditions = ["-p tcp"]
            for port in items(self.config, "inbound_ports_exclude"):
                self.tables.append(table, "ISTIO_INBOUND", f"-p tcp --dport {port} -j RETURN")
        for condition in conditions:
            if self.tproxy:
                known = f"{condition} -m conntrack --ctstate RELATED,ESTABLISHED -j ISTIO_DIVERT"
                self.tables.append(table, "ISTIO_INBOUND", known)
                self.tables.append(table, "ISTIO_INBOUND", f"{condition} -j ISTIO_TPROXY")
            else:
                self.tables.append(table, "ISTIO_INBOUND", f"{condition} -j ISTIO_IN_REDIRECT")

    def _output(self) -> None:
        self.tables.append("nat", "OUTPUT", "-j ISTIO_OUTPUT")
        for port in items(self.config, "outbound_ports_exclude"):
            for protocol in ("tcp", "udp"):
                self._out(f"-p {protocol} --dport {port} -j RETURN")
        self._out(f"-o lo -s {PASSTHROUGH[self.version]} -j RETURN")
        for kind, owner in self.owners:
            self._owner(kind, owner)
        self._owner_groups()
        self._dns_redirect()
        self._out(f"-d {self.loopback} -j RETURN")
        for network in self._networks("outbound_ip_ranges_exclude"):
            self._out(f"-d {network} -j RETURN")
        for port in items(self.config, "outbound_ports_include"):
            self._out(f"-p tcp --dport {port} -j ISTIO_REDIRECT")
        rerouted = items(self.config, "reroute_virtual_interfaces")
        if self.config["outbound_ip_ranges_include"] == "*":
            self._out("-j ISTIO_REDIRECT")
            for name in rerouted:
                self.tables.insert("nat", "PREROUTING", 1, f"-i {name} -j ISTIO_REDIRECT")
            return
        for network in self._networks("outbound_ip_ranges_include"):
            for name in rerouted:
                rule = f"-i {name} -d {network} -j ISTIO_REDIRECT"
                self.tables.insert("nat", "PREROUTING", 1, rule)
            self._out(f"-d {network} -j ISTIO_REDIRECT")

    def _out(self, rule: str) -> None:
        self.tables.append("nat", "ISTIO_OUTPUT", rule)

    def _networks(self, key: str) -> list[str]:
        return [n for n in items(self.config, key) if (":" in n) == (self.version == 6)]

    def _owner(self, kind: str, owner: str) -> None:
        """Write the three rules of an id: to itself by lo, others on lo, and all of its own."""
        ports = f"! --dport {self.tunnel}"
        if self.dns and kind == "--uid-owner":
            ports = f"-m multiport ! --dports 53,{self.tunnel}"
        ours, others = f"-m owner {kind} {owner}", f"-m owner ! {kind} {owner}"
        self._out(f"-o lo ! -d {self.loopback} -p tcp {ports} {ours} -j ISTIO_IN_REDIRECT")
        included = items(self.config, "outbound_ip_ranges_include")
        if not any(network.startswith(("127.", "::1/")) for network in included):
            query = "-p tcp ! --dport 53 " if self.dns else ""
            self._out(f"-o lo {query}{others} -j RETURN")
        self._out(f"{ours} -j RETURN")

    def _owner_groups(self) -> None:
        if self.config["owner_groups_include"] == "*":
            for group in items(self.config, "owner_groups_exclude"):
                self._out(f"-m owner --gid-owner {group} -j RETURN")
            return
        groups = items(self.config, "owner_groups_include")
        outside = "".join(f"-m owner ! --gid-owner {group} " for group in groups)
        self._out(f"{outside}-j RETURN")

    def _dns_redirect(self) -> None:
        if not self.dns_here:
            return
        self._out("-j ISTIO_OUTPUT_DNS")
        for protocol, option in (("tcp", "--to-ports"), ("udp", "--to-port")):
            for server in self._server_conditions("-d"):
                rule = f"-p {protocol} --dport 53{server} -j REDIRECT {option} 15053"
                self.tables.append("nat", "ISTIO_OUTPUT_DNS", rule)

    def _server_conditions(self, option: str) -> list[str]:
        if self.config["capture_all_dns"]:
            return [""]
        return [f" {option} {server}/{HOST_BITS[self.version]}" for server in self.servers]

    def _dns_zones(self) -> None:
        if not self.dns:
            return
        chain = "ISTIO_OUTPUT_DNS"
        self.tables.append("raw", "OUTPUT", f"-j {chain}")
        for kind, owner in self.owners:
            ours = f"-m owner {kind} {owner}"
            self.tables.append("raw", chain, f"-p udp --dport 53 {ours} -j CT --zone 1")
            self.tables.append("raw", chain, f"-p udp --sport 15053 {ours} -j CT --zone 2")
        if not self.dns_here:
            return
        self.tables.append("raw", "PREROUTING", "-j ISTIO_INBOUND")
        for to, origin in zip(
            self._server_conditions("-d"), self._server_conditions("-s"), strict=True
        ):
            self.tables.append("raw", chain, f"-p udp --dport 53{to} -j CT --zone 2")
            self.tables.append("raw", "ISTIO_INBOUND", f"-p udp --sport 53{origin} -j CT --zone 1")

    def _tproxy_marks(self) -> None:
        if not self.tproxy:
            return
        mark = self.config["inbound_tproxy_mark"]
        save = f"-p tcp -m mark --mark {mark} -j CONNMARK --save-mark"
        self.tables.append("mangle", "PREROUTING", save)
        self.tables.append("mangle", "OUTPUT", f"-p tcp -o lo -m mark --mark {mark} -j RETURN")
        for kind, owner in self.owners:
            to_self = f"! -d {self.loopback} -p tcp -o lo -m owner {kind} {owner}"
            self.tables.append("mangle", "OUTPUT", f"{to_self} -j MARK --set-mark 1338")
        restore = f"-p tcp -m connmark --mark {mark} -j CONNMARK --restore-mark"
        self.tables.append("mangle", "OUTPUT", restore)
        for at, rule in enumerate(
            (
                f"-p tcp -m mark --mark {mark} -j RETURN",
                f"-p tcp -s {PASSTHROUGH[self.version]} -i lo -j RETURN",
                "-p tcp -i lo -m mark ! --mark 1338 -j RETURN",
            ),
            start=1,
        ):
            self.tables.insert("mangle", "ISTIO_INBOUND", at, rule)
