"""Where the redirects of a ruleset lead, and which of its chains are asked at all. Pure."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from agent.model import numbers
from agent.model.ruleset import BASIC, BUILTIN_CHAINS, Rule, Ruleset, Table
from agent.model.settings import Settings


@dataclass(frozen=True, slots=True, order=True)
class Goal:
    """A local port to which packets are sent; TPROXY needs a transparent listener there."""

    protocol: str
    port: int
    transparent: bool = False

    def __str__(self) -> str:
        return f"{self.protocol.upper()} port {self.port}"


def goals(ruleset: Ruleset) -> Counter[Goal]:
    """Return the ports to which traffic is sent that is not the proxy's, and by how many rules."""
    found: Counter[Goal] = Counter()
    for table in ruleset.tables:
        for chain in BUILTIN_CHAINS.get(table.name, ()):
            found.update(set(_from(table, chain, "", frozenset())))
    return found


def turned(settings: Settings) -> Iterator[Goal]:
    """Yield the ports to which eBPF turns connections, none before a gate has closed."""
    if settings.gate != "closed":
        return
    networks = settings.outbound_ip_ranges_include
    if networks.everything or networks.items or settings.outbound_ports_include:
        yield Goal("tcp", settings.proxy_port)
    ports = settings.inbound_ports_include
    if ports.everything or ports.items:
        yield Goal("tcp", settings.inbound_capture_port)
    if settings.dns_active:
        yield from (Goal(protocol, numbers.DNS_PROXY_PORT) for protocol in ("tcp", "udp"))


def reached(table: Table) -> frozenset[str]:
    """Return the chains that a packet can get to from the kernel's hooks."""
    todo = [name for name in BUILTIN_CHAINS.get(table.name, ()) if table.chain(name)]
    found: set[str] = set()
    chains = {chain.name: chain for chain in table.chains}
    while todo:
        name = todo.pop()
        if name in found or name not in chains:
            continue
        found.add(name)
        todo += [rule.target.name for rule in chains[name].rules if rule.target]
    return frozenset(found)


def sends(rule: Rule) -> bool:
    """Tell whether a rule itself sends packets to a port of this namespace."""
    return rule.target is not None and rule.target.name in ("REDIRECT", "TPROXY")


def leads(table: Table, chain: str, seen: frozenset[str] = frozenset()) -> bool:
    """Tell whether a chain, or one that it leads to, sends packets to a port."""
    found = table.chain(chain)
    if found is None or chain in seen:
        return False
    return any(
        sends(rule) or (rule.target is not None and leads(table, rule.target.name, seen | {chain}))
        for rule in found.rules
    )


def _from(table: Table, chain: str, protocol: str, seen: frozenset[str]) -> Iterator[Goal]:
    found = table.chain(chain)
    if found is None or chain in seen:
        return
    for rule in found.rules:
        if rule.target is None or _of_the_proxy(rule):
            continue
        here = _protocol(rule) or protocol
        if sends(rule):
            yield from _goals(rule, here)
        else:
            yield from _from(table, rule.target.name, here, seen | {chain})


def _goals(rule: Rule, protocol: str) -> Iterator[Goal]:
    assert rule.target is not None
    for option in rule.target.options:
        if option.name in ("--to-ports", "--to-port", "--on-port") and option.values:
            port = option.values[0].split("-")[0]
            if port.isdigit():
                yield Goal(protocol or "tcp", int(port), rule.target.name == "TPROXY")


def _of_the_proxy(rule: Rule) -> bool:
    """A rule for one user alone is the proxy's own: its calls to itself go to the inbound port."""
    return any(not option.negated for option in rule.options("owner"))


def _protocol(rule: Rule) -> str:
    option = rule.option(BASIC, "-p")
    return option.values[0] if option and option.values and not option.negated else ""
