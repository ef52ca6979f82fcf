"""Tables that others wrote for nf_tables itself: the walk against the kernel.

Each is loaded by nft, read as the agent reads it, and met by packets: what is written here, where
the kernel brings each packet, and what the walk says must agree.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from agent.formats.nft_native import native_hooks
from agent.model.packet import Kind
from agent.model.ruleset import Family
from tests.netns.test_walk_facts import Runner, assert_agreed
from tests.support.netns import inside
from tests.support.walk_facts import PLACES, Sent
from tests.support.wire_lab import lab

V4, V6 = Family.IPV4, Family.IPV6
WORDS = {
    "out": "type filter hook output priority 0; policy accept;",
    "nat": "type nat hook output priority -100;",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A table, and packets through it; `{far}` and the like are the addresses of PLACES."""

    name: str
    table: str
    sent: tuple[Sent, ...]
    family: Family = V4


CASES = (
    Case(
        name="ports and addresses in sets, named and not",
        table="""table inet fw {
            set blocked { type ipv4_addr; flags interval; elements = { {far}, 172.16.0.0/12 } }
            set ports { type inet_service; flags interval; elements = { 443, 8000-8100 } }
            chain out { {out}
                ip daddr @blocked udp dport { 53, 9090 } drop
                udp dport @ports drop
                ip daddr != @blocked udp dport 15008 drop
            }
        }""",
        sent=(
            Sent(port=53),
            Sent(port=9090),
            Sent(by="pod:53", to="own", port=53),
            Sent(port=443),
            Sent(port=8080),
            Sent(by="peer:15008", port=15008),
            Sent(to="own", port=15008),
            Sent(by="peer:80"),
        ),
    ),
    Case(
        name="verdict maps, jumps and goto",
        table="""table ip fw {
            chain out { {out}
                udp dport vmap { 80 : jump web, 443 : drop, 53 : goto dns, 8080 : accept }
                udp dport { 80, 8080 } drop
            }
            chain web { meta skuid 1000 accept; }
            chain dns { ip daddr {far} drop; }
        }""",
        sent=(
            Sent(by="peer:80"),
            Sent(uid=2000),
            Sent(port=443),
            Sent(port=53),
            Sent(by="pod:53", to="own", port=53),
            Sent(by="peer:8080", port=8080),
        ),
    ),
    Case(
        name="redirect and dnat, and who is exempt",
        table="""table inet mesh {
            chain out { {nat}
                meta skuid { 1337, 2000 } return
                meta nfproto ipv6 return
                udp dport 443 dnat ip to {own}:8080
                udp dport 80 redirect to :15001
            }
            chain in { type nat hook prerouting priority -100;
                iifname "cli0" udp dport 80 redirect to :15006
            }
        }""",
        sent=(
            Sent(by="pod:15001"),
            Sent(by="pod:8080", port=443),
            Sent(by="peer:80", uid=1337),
            Sent(by="peer:80", uid=2000),
            Sent(by="pod:15006", to="own", uid=None),
        ),
    ),
    Case(
        name="what is for the other family",
        table="""table inet fw {
            chain out { {out}
                ip daddr 0.0.0.0/0 drop
                meta nfproto != ipv6 drop
                icmp type echo-request drop
                ip6 daddr {far} udp dport 80 drop
            }
        }""",
        sent=(Sent(), Sent(by="peer:53", port=53), Sent(by="pod:80", to="own")),
        family=V6,
    ),
    Case(
        name="Services as kube-proxy writes them",
        table="""table ip kube-proxy {
            set affinity { type ipv4_addr; flags dynamic,timeout; timeout 3h; }
            set none { type ipv4_addr; elements = { {far} }; }
            map service-ips { type ipv4_addr . inet_proto . inet_service : verdict
                elements = { 10.96.0.1 . udp . 80 : goto service, {far} . udp . 53 : goto service,
                             {far} . tcp . 80 : drop } }
            chain services { ip daddr . meta l4proto . th dport vmap @service-ips; }
            chain output { {nat} jump services; }
            chain service { numgen random mod 1 vmap { 0 : goto endpoint }; }
            chain endpoint {
                ip saddr 10.77.0.1 jump masq
                update @affinity { ip saddr }
                meta l4proto udp dnat to 10.77.0.1:8080 random
            }
            chain masq { meta mark set mark or 0x4000; }
            chain post { type nat hook postrouting priority 100;
                meta mark & 0x4000 == 0 return
                meta mark set mark xor 0x4000
                masquerade fully-random
            }
            chain check { type filter hook output priority 10; jump out; }
            chain out { ip daddr @none th dport 9090 reject; }
        }""",
        sent=(
            Sent(by="peer:80"),
            Sent(by="peer:443", port=443),
            Sent(by="peer:8080", port=53),
            Sent(by="peer:8080", port=53, uid=0, mark=0x4000),
            Sent(port=9090),
        ),
    ),
    Case(
        name="marks that one chain sets and another one reads",
        table="""table inet marks {
            chain first { type route hook output priority -150;
                udp dport 80 counter meta mark set 0x5 accept
                udp dport 443 meta mark set meta mark or 0x10 ct mark set 0x7
                udp dport 80 drop
            }
            chain last { type filter hook postrouting priority 10;
                meta mark 0x5 drop
                ct mark & 0xf == 0x7 drop
            }
        }""",
        sent=(Sent(), Sent(port=443), Sent(by="peer:53", port=53)),
    ),
    Case(
        name="states, local addresses and both protocols' ports on the way in",
        table="""table inet fw {
            chain pre { type nat hook prerouting priority -90;
                udp dport 443 redirect to :8080
            }
            chain in { type filter hook input priority 0; policy drop;
                ct state vmap { established : accept, related : accept, new : jump new }
            }
            chain new {
                iif "lo" drop
                tcp flags & (fin | syn) == syn drop
                ip protocol tcp drop
                ip dscp set cs1 counter
                ct status dnat accept
                th dport { 53, 80 } fib daddr type local accept
            }
        }""",
        sent=(
            Sent(by="pod:8080", to="own", port=443, uid=None),
            Sent(by="pod:80", to="own", uid=None),
            Sent(to="own", port=9090, uid=None),
            Sent(by="pod:53", to="link", port=53, uid=None),
        ),
    ),
    Case(
        name="a table that is dormant",
        table="""table ip fw {
            flags dormant;
            chain out { {out} drop; }
        }""",
        sent=(Sent(by="peer:80"),),
    ),
    Case(
        name="an owner that is not there",
        table="""table inet fw {
            chain in { type filter hook input priority 0;
                meta skuid != 5 drop
                udp dport 80 reject
            }
            chain out { {out} meta skuid != 1000 drop; }
        }""",
        sent=(
            Sent(by="pod:53", to="own", port=53, uid=None),
            Sent(to="own", uid=None),
            Sent(by="peer:80"),
            Sent(uid=2000),
        ),
    ),
)


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    with lab() as found:
        yield Runner(found)


def filled(table: str, family: Family) -> str:
    for name, word in (WORDS | PLACES[family]).items():
        table = table.replace(f"{{{name}}}", word)
    return table


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_foreign_table_is_walked_as_the_kernel_does(case: Case, runner: Runner) -> None:
    first = runner.ports()
    inside(runner.lab.pod, "nft", "-f", "-", stdin=filled(case.table, case.family))
    try:
        document = json.loads(inside(runner.lab.pod, "nft", "-j", "-n", "list", "ruleset"))
        native = native_hooks(document, frozenset())
        results = [
            runner.send([], case.family, sent, first + at, native=native)
            for at, sent in enumerate(case.sent)
        ]
        runner.shoot(results)
    finally:
        inside(runner.lab.pod, "nft", "flush", "ruleset")
    runner.seen(results)
    for result in results:
        assert_agreed(runner, result)


@pytest.mark.parametrize(
    "rule",
    [
        "udp dport 80 limit rate 1/second drop",
        "udp dport 80 numgen random mod 2 == 0 drop",
        "udp dport 80 numgen random mod 2 vmap { 0 : accept, 1 : drop }",
        "udp dport 80 ip dscp cs1 drop",
        "udp dport 80 add @seen { ip daddr } drop",
        "ip daddr @seen udp dport 80 drop",
    ],
)
def test_what_nobody_can_foresee_is_maybe_and_everything_else_is_not(
    rule: str, runner: Runner
) -> None:
    table = f"""table ip fw {{
        set seen {{ type ipv4_addr; flags dynamic; }}
        chain out {{ {WORDS["out"]} {rule}; }}
        chain learn {{ add @seen {{ ip daddr }}; }}
    }}"""
    first = runner.ports()
    inside(runner.lab.pod, "nft", "-f", "-", stdin=table)
    try:
        document = json.loads(inside(runner.lab.pod, "nft", "-j", "-n", "list", "ruleset"))
        native = native_hooks(document, frozenset())
        unsure = runner.send([], V4, Sent(by="peer:80"), first, native=native)
        sure = runner.send([], V4, Sent(by="peer:53", port=53), first + 1, native=native)
        runner.shoot([unsure, sure])
    finally:
        inside(runner.lab.pod, "nft", "flush", "ruleset")
    runner.seen([sure])
    assert unsure.case.trace.verdict.kind is Kind.MAYBE
    assert runner.lab.received.get(unsure.case.shot.nonce) in unsure.case.expected()
    assert_agreed(runner, sure)
