"""Short forms for tests of the packet walk: rules as text, packets by keyword."""

import ipaddress
from typing import Any

from agent.explain.walk import Layer, walk
from agent.formats.iptables_save import parse
from agent.model.host import Host, Interface, Route
from agent.model.packet import Packet, Trace
from agent.model.ruleset import BUILTIN_CHAINS, Family

POD = Host(
    interfaces=(
        Interface(
            "eth0",
            (ipaddress.ip_interface("10.1.0.2/24"), ipaddress.ip_interface("fd01::2/64")),
        ),
    ),
    routes=(
        Route(ipaddress.ip_network("0.0.0.0/0"), "eth0"),
        Route(ipaddress.ip_network("::/0"), "eth0"),
    ),
)


def layer(
    text: str, *, family: Family = Family.IPV4, backend: str = "iptables-nft", policy: str = ""
) -> Layer:
    """Load lines `TABLE CHAIN RULE`; `policy` is `TABLE CHAIN` of a policy DROP."""
    rules = [line.split(maxsplit=2) for line in text.strip().splitlines()]
    names = dict.fromkeys((*(rule[0] for rule in rules), *policy.split()[:1]))
    lines = []
    for table in names:
        here = [(chain, "".join(spec)) for name, chain, *spec in rules if name == table]
        builtin = BUILTIN_CHAINS[table]
        lines.append(f"*{table}")
        lines += [
            f":{chain} {'DROP' if policy == f'{table} {chain}' else 'ACCEPT'}" for chain in builtin
        ]
        lines += [f":{chain} -" for chain in dict(here) if chain not in builtin]
        lines += [f"-A {chain} {spec}" for chain, spec in here if spec]
        lines.append("COMMIT")
    return Layer(backend, parse("\n".join(lines), family))


def packet(to: str = "10.96.0.1", port: int = 80, **fields: Any) -> Packet:
    """Return a TCP packet of user 1000; `source` may be text."""
    if isinstance(source := fields.get("source"), str):
        fields["source"] = ipaddress.ip_address(source)
    values = {"protocol": "tcp", "uid": 1000, **fields}
    return Packet(destination=ipaddress.ip_address(to), dport=port, **values)


def verdict(
    text: str,
    sent: Packet | None = None,
    *,
    host: Host = POD,
    inbound: bool = False,
    policy: str = "",
) -> str:
    """Return the verdict of a walk as `kind` or `kind:port`."""
    sent = sent or packet()
    loaded = layer(text, family=sent.family, policy=policy)
    return said(walk([loaded], sent, host, inbound=inbound))


def said(trace: Trace) -> str:
    kind, port = trace.verdict.kind.value, trace.verdict.port
    return kind if port is None else f"{kind}:{port}"
