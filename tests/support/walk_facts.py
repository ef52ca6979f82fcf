"""A small fixed set of rules for each fact of the kernel that a packet walk must know.

Random rules seldom meet these. Every set matches a range of source ports of its own, so all can be
loaded at once, and every packet is of UDP, which needs no answer to be seen.
"""

from dataclasses import dataclass

from agent.model.ruleset import BUILTIN_CHAINS, Family
from tests.support.wire_rules import OWN_SOURCES

PORTS_OF_A_FACT = 10

# Destinations by name: this host, an address beyond it, and the pod's side of the client's link.
PLACES = {
    Family.IPV4: {"loop": "127.0.0.1", "own": OWN_SOURCES[Family.IPV4][0], "far": "8.8.8.8"}
    | {"link": "10.79.0.2"},
    Family.IPV6: {"loop": "::1", "own": OWN_SOURCES[Family.IPV6][0], "far": "2001:db8::8"}
    | {"link": "fd79::2"},
}
BOTH = tuple(Family)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """One packet and who must receive it: `pod:PORT`, `peer:PORT`, or nobody (empty)."""

    by: str = ""
    to: str = "far"
    port: int = 80
    uid: int | None = 1000  # None: from the client
    mark: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """`rules` are lines `TABLE CHAIN RULE`; `{p}` stands for the fact's own source ports, `{c}` for
    a chain of its own, and the names of PLACES for addresses."""

    number: int
    name: str
    rules: str
    sent: tuple[Sent, ...]
    families: tuple[Family, ...] = BOTH

    def lines(self, index: int, family: Family, first_port: int) -> list[tuple[str, str, str]]:
        """Return table, chain and rule of each line; `first_port` is the first of the fact's."""
        ports = f"-p udp -m udp --sport {first_port}:{first_port + PORTS_OF_A_FACT - 1}"
        words = {"p": ports, "c": f"FACT{index}", **PLACES[family]}
        found = []
        for line in self.rules.strip().splitlines():
            table, chain, rule = line.format(**words).split(maxsplit=2)
            found.append((table, chain, rule))
        return found


REDIRECT = "nat OUTPUT {p} -j REDIRECT --to-ports 15001\n"
LOCAL, DROPPED = Sent(by="pod:15001"), Sent()
AWAY = Sent(by="peer:80")


def _hop(chain: str) -> Fact:
    rules = (
        REDIRECT + f"{chain} {{p}} --dport 15001 {'-i' if 'POST' not in chain else '-o'} lo -j DROP"
    )
    return Fact(number=2, name=f"{chain} of the loopback hop drops", rules=rules, sent=(DROPPED,))


FACTS = (
    Fact(
        number=1,
        name="filter OUTPUT sees the translated destination and port",
        rules=REDIRECT + "filter OUTPUT -d {loop} {p} --dport 15001 -j DROP",
        sent=(DROPPED,),
    ),
    Fact(
        number=1,
        name="filter OUTPUT does not see the old destination",
        rules=REDIRECT + "filter OUTPUT -d {far} {p} -j DROP",
        sent=(LOCAL,),
    ),
    Fact(
        number=1,
        name="filter OUTPUT sees a local address",
        rules=REDIRECT + "filter OUTPUT {p} -m addrtype --dst-type LOCAL -j DROP",
        sent=(DROPPED,),
    ),
    Fact(
        number=1,
        name="filter OUTPUT still sees the old interface",
        rules=REDIRECT + "filter OUTPUT -o lo {p} -j DROP",
        sent=(LOCAL,),
    ),
    Fact(
        number=1,
        name="only POSTROUTING sees the new interface",
        rules=REDIRECT + "mangle POSTROUTING -o eth0 {p} -j DROP",
        sent=(LOCAL,),
    ),
    *map(
        _hop,
        (
            *("mangle POSTROUTING", "raw PREROUTING", "mangle PREROUTING", "mangle INPUT"),
            *("filter INPUT", "security INPUT"),
        ),
    ),
    Fact(
        number=2,
        name="nat PREROUTING is not walked on the loopback hop",
        rules=REDIRECT + "nat PREROUTING {p} -j REDIRECT --to-ports 15006",
        sent=(LOCAL, Sent(by="pod:15001", to="own"), Sent(by="pod:15006", to="own", uid=None)),
    ),
    Fact(
        number=3,
        name="marks and state survive the loopback hop",
        rules="""
            nat OUTPUT {p} -j MARK --set-xmark 0x7/0xffffffff
            nat OUTPUT {p} -j CONNMARK --set-xmark 0x9/0xffffffff
            nat OUTPUT {p} -j REDIRECT --to-ports 15001
            filter INPUT {p} -m mark --mark 0x7 -m connmark --mark 0x9 -j {c}
            filter {c} -m conntrack --ctstate NEW -j DROP
        """,
        sent=(DROPPED,),
    ),
    Fact(
        number=3,
        name="the owner is known in POSTROUTING",
        rules="mangle POSTROUTING {p} -m owner --uid-owner 1000 -j DROP",
        sent=(DROPPED, Sent(by="peer:80", uid=2000)),
    ),
    Fact(
        number=3,
        name="behind the loopback hop there is no owner",
        rules=REDIRECT + "mangle INPUT {p} -m mark ! --mark 0x0 -j DROP",
        sent=(LOCAL, Sent(uid=0, mark=1)),
    ),
    Fact(
        number=3,
        name="MARK works in filter, too",
        rules="""
            filter OUTPUT {p} -j MARK --set-xmark 0x5/0xffffffff
            mangle POSTROUTING {p} -m mark --mark 0x5 -j DROP
        """,
        sent=(DROPPED,),
    ),
    Fact(
        number=3,
        name="ACCEPT ends its own table only",
        rules="""
            mangle OUTPUT {p} -j ACCEPT
            mangle OUTPUT {p} -j DROP
            filter OUTPUT {p} --dport 53 -j DROP
        """,
        sent=(AWAY, Sent(port=53)),
    ),
    Fact(
        number=4,
        name="a translation that changes nothing sets no state DNAT",
        rules="""
            nat OUTPUT -d {loop} {p} --dport 80 -j REDIRECT --to-ports 80
            nat OUTPUT -d {loop} {p} --dport 443 -j REDIRECT --to-ports 80
            nat OUTPUT {p} --dport 8080 -j DNAT --to-destination {own}
            filter INPUT {p} -m conntrack --ctstate DNAT -j DROP
        """,
        sent=(
            Sent(by="pod:80", to="loop"),
            Sent(to="loop", port=443),
            Sent(by="pod:8080", to="own", port=8080),
            Sent(port=8080),
        ),
    ),
    Fact(
        number=5,
        name="addrtype UNICAST leaves local addresses of IPv4 alone",
        rules="filter OUTPUT {p} -m addrtype --dst-type UNICAST -j DROP",
        sent=(Sent(by="pod:80", to="loop"), Sent(by="pod:80", to="own"), DROPPED),
        families=(Family.IPV4,),
    ),
    Fact(
        number=5,
        name="addrtype UNICAST matches local addresses of IPv6",
        rules="filter OUTPUT {p} -m addrtype --dst-type UNICAST -j DROP",
        sent=(Sent(to="loop"), Sent(to="own"), DROPPED),
        families=(Family.IPV6,),
    ),
    Fact(
        number=6,
        name="a missing -i is an empty name in OUTPUT",
        rules="""
            mangle OUTPUT {p} -j {c}
            mangle PREROUTING {p} -j {c}
            mangle {c} ! -i cli0 -j DROP
        """,
        sent=(DROPPED, Sent(by="pod:80", to="own", uid=None)),
    ),
    Fact(
        number=6,
        name="a missing -o is an empty name in PREROUTING",
        rules="""
            mangle OUTPUT {p} -j {c}
            mangle PREROUTING {p} -j {c}
            mangle {c} ! -o eth0 -j DROP
        """,
        sent=(AWAY, Sent(to="own", uid=None)),
    ),
    *(
        Fact(
            number=7,
            name=f"{table} INPUT sees the mark of TPROXY",
            rules="mangle PREROUTING {p} -j TPROXY --on-port 15006 --tproxy-mark 0x539/0xffffffff\n"
            + f"{table} INPUT {{p}} --dport 443 -m mark --mark 0x539 -j DROP",
            sent=(Sent(by="pod:15006", to="own", uid=None), Sent(to="own", port=443, uid=None)),
        )
        for table in ("mangle", "filter")
    ),
    Fact(
        number=7,
        name="goto returns to the caller of the last jump",
        rules="""
            filter OUTPUT {p} -j {c}
            filter OUTPUT {p} -j DROP
            filter {c} -g {c}B
            filter {c} -j ACCEPT
            filter {c}B -p udp -m udp --dport 53 -j ACCEPT
        """,
        sent=(DROPPED, Sent(by="peer:53", port=53)),
    ),
    Fact(
        number=7,
        name="goto from a builtin chain ends at the policy",
        rules="""
            filter OUTPUT {p} -g {c}
            filter OUTPUT {p} -j DROP
            filter {c} -p udp -m udp --dport 53 -j DROP
        """,
        sent=(AWAY, Sent(port=53)),
    ),
    Fact(
        number=7,
        name="RETURN in a builtin chain ends at the policy",
        rules="filter OUTPUT {p} -j RETURN\nfilter OUTPUT {p} -j DROP",
        sent=(AWAY,),
    ),
    Fact(
        number=8,
        name="zones keep the client's query and the proxy's apart",
        rules="""
            raw OUTPUT {p} --dport 53 -m owner --uid-owner 1337 -j CT --zone 1
            raw OUTPUT {p} --dport 53 -m owner ! --uid-owner 1337 -j CT --zone 2
            nat OUTPUT {p} --dport 53 -m owner --uid-owner 1337 -j RETURN
            nat OUTPUT {p} --dport 53 -j REDIRECT --to-ports 15053
        """,
        sent=(Sent(by="pod:15053", port=53), Sent(by="peer:53", port=53, uid=1337)),
    ),
    Fact(
        number=9,
        name="REDIRECT takes the address of the interface on arrival",
        rules="""
            nat PREROUTING {p} -j REDIRECT --to-ports 15006
            filter INPUT -d {own} {p} -j DROP
            filter INPUT -d {link} {p} -m conntrack --ctstate DNAT -m mark --mark 0x0 -j ACCEPT
            filter INPUT -i cli0 {p} -j DROP
        """,
        sent=(Sent(by="pod:15006", to="own", uid=None),),
    ),
    Fact(
        number=9,
        name="REDIRECT takes loopback on output",
        rules=REDIRECT + "filter INPUT ! -d {loop} {p} -j DROP",
        sent=(LOCAL, Sent(by="pod:15001", to="own")),
    ),
    Fact(
        number=14,
        name="port 70000 of UDP is stored as 4464",
        rules="nat OUTPUT {p} --dport 70000 -j REDIRECT --to-ports 15001",
        sent=(Sent(by="pod:15001", port=4464), AWAY),
    ),
)


def text_of(rules: list[tuple[str, str, str]], policy: tuple[str, str] | None = None) -> str:
    """Return all tables as iptables-restore takes them; `policy` is a chain with policy DROP."""
    lines = []
    for table, builtin in BUILTIN_CHAINS.items():
        here = [(chain, rule) for name, chain, rule in rules if name == table]
        lines.append(f"*{table}")
        lines += (
            f":{chain} {'DROP' if (table, chain) == policy else 'ACCEPT'} [0:0]"
            for chain in builtin
        )
        names = (word for chain, rule in here for word in (chain, *rule.split()[-1:]))
        own = dict.fromkeys(name for name in names if name.startswith("FACT"))
        lines += [f":{name} - [0:0]" for name in own]
        lines += [f"-A {chain} {rule}" for chain, rule in here]
        lines.append("COMMIT")
    return "\n".join([*lines, ""])
