"""What the loaded capture leaves alone, read from its rules and not from what was asked for. Pure.

`setting_of` tells which setting a rule comes from; the values stand in the rule's conditions.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from agent.explain.origin import setting_of
from agent.model import owned
from agent.model.ruleset import BUILTIN_CHAINS, Chain, Rule, Table
from agent.model.state import BACKENDS, EBPF, NamespaceState

# setting: what it means, and the options whose values it has
EXEMPT: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "inbound_ports_exclude": ("inbound ports", ("--dport", "--dports")),
    "inbound_tunnel_port": ("the tunnel port", ("--dport",)),
    "outbound_ports_exclude": ("outbound ports", ("--dport", "--dports")),
    "outbound_ip_ranges_exclude": ("outbound networks", ("-d",)),
    "exclude_interfaces": ("interfaces", ("-i", "-o")),
    "host_probe_snat_ip": ("the node's probes from", ("-s", "-d")),
    "host_probe_snat_ipv6": ("the node's probes from", ("-s", "-d")),
    "proxy_uid": ("users", ("--uid-owner",)),
    "proxy_gid": ("groups", ("--gid-owner",)),
    "owner_groups_exclude": ("groups outbound", ("--gid-owner",)),
    "init_cgroups": ("until the proxy listens, processes of", ("--path",)),
    "owner_groups_include": ("all groups outbound but", ("--gid-owner",)),
}
# Settings that capture only what they list, where it is not everything.
NARROW: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "inbound_ports_include": ("all inbound ports but", ("--dport", "--dports")),
    "outbound_ip_ranges_include": ("all outbound networks but", ("-d",)),
    "outbound_ports_include": ("outbound, unless another rule takes it, but ports", ("--dport",)),
}
MEANINGS = {**EXEMPT, **NARROW}
CAPTURING = frozenset({"ISTIO_REDIRECT", "ISTIO_IN_REDIRECT", "ISTIO_TPROXY"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Exemption:
    """What is left alone by one setting, and the first rule that says so."""

    setting: str
    what: str
    values: tuple[str, ...]
    rule: str

    def __str__(self) -> str:
        return f"{self.what} {', '.join(self.values)}"


def exemptions(state: NamespaceState) -> tuple[Exemption, ...]:
    """Return what the loaded captures leave alone, each setting once."""
    values: dict[str, dict[str, None]] = {}
    rules: dict[str, str] = {}
    wide: set[str] = set()  # what captures everything somewhere
    for setting, rule, where in _rules(state):
        found = list(_values(rule, MEANINGS[setting][1])) if setting in MEANINGS else []
        if found:
            values.setdefault(setting, {}).update(dict.fromkeys(found))
            rules.setdefault(setting, where)
        elif setting in NARROW and rule.target is not None and rule.target.name in CAPTURING:
            wide.add(setting)
    if "outbound_ip_ranges_include" in wide:
        wide.add("outbound_ports_include")
    return tuple(
        Exemption(setting=key, what=what, values=tuple(values[key]), rule=rules[key])
        for key, (what, _) in MEANINGS.items()
        if key in values and key not in wide
    )


def captures_dns(state: NamespaceState) -> bool:
    return any(setting == "redirect_dns" for setting, _, _ in _rules(state))


def _values(rule: Rule, names: tuple[str, ...]) -> Iterator[str]:
    """Yield the values of the options of these names; `--dports` has several in one."""
    for match in rule.matches:
        for option in match.options:
            for value in option.values if option.name in names else ():
                yield from value.split(",")


def _rules(state: NamespaceState) -> Iterator[tuple[str, Rule, str]]:
    """Yield every rule of a loaded capture with the setting it comes from and where it stands."""
    for backend in (EBPF, *BACKENDS):
        for family, ruleset in state.of(backend).items():
            for table in ruleset.tables:
                if not any(owned.is_capture_chain(chain.name) for chain in table.chains):
                    continue
                for chain, number, rule in _of_capture(table):
                    setting = setting_of(table, chain.name, number)
                    if setting is not None:
                        where = f"{backend} {family} {table.name} {chain.name} rule {number}"
                        yield setting, rule, where


def _of_capture(table: Table) -> Iterator[tuple[Chain, int, Rule]]:
    for chain in table.chains:
        ours = owned.is_capture_chain(chain.name)
        if ours or chain.name in BUILTIN_CHAINS.get(table.name, ()):
            for number, rule in enumerate(chain.rules, start=1):
                yield chain, number, rule
