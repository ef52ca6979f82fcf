"""The native nftables form on a real kernel: what is loaded reads back as what was meant.

The effect of rules is compared with iptables-legacy by real packets where the two differ by nature.
"""

import contextlib
import json
import random
import re
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agent.formats import iptables_save
from agent.formats.nft_json import base_chains, parse_table
from agent.formats.nft_text import NoNftForm, render_delete, render_table
from agent.kernel import libnftables, reaper
from agent.kernel.libnftables import Nft, NoSuchObject
from agent.kernel.netns import Netns
from agent.model.errors import EnvironmentLacks, KernelRejected
from agent.model.plan import plan
from agent.model.ruleset import Family, Rule, Ruleset, Rulesets, ruleset_of
from agent.model.settings import Settings, parse
from agent.model.values import NoNames
from tests.support.netns import inside, path_of

pytestmark = pytest.mark.netns

TABLE = "it-mesh"
CASES = Path(__file__).parents[1] / "cases"
RANDOM_SETTINGS = 120
SILENCE_S = 0.7  # longer than an answer on lo takes, shorter than the second SYN


@pytest.fixture
def place(netns: str) -> Iterator[Netns]:
    with Netns.open(path_of(netns)) as opened:
        yield opened


@pytest.fixture
def nft(place: Netns) -> Iterator[Nft]:
    with place.run(Nft) as made:
        yield made


def loaded(nft: Nft, table: str = TABLE) -> Rulesets | None:
    return parse_table(json.loads(nft.run("list ruleset", json=True)), table)


# --- every plan reads back -----------------------------------------------------------------------


def written_settings() -> dict[str, Settings]:
    """Return settings that use every rule there is, for where no case does."""
    everything = {
        "inbound_ports_include": "*",
        "outbound_ip_ranges_include": "*",
        "redirect_dns": True,
        "capture_all_dns": True,
        "drop_invalid": True,
        "enable_ipv6": True,
    }
    raws: dict[str, dict[str, object]] = {
        "defaults": {},
        "everything": everything,
        "tproxy": {**everything, "inbound_interception_mode": "TPROXY"},
        "groups": {**everything, "owner_groups_include": "5,7-9"},
        "many groups": {"owner_groups_include": ",".join(str(n) for n in range(500, 560))},
    }
    return {name: parse(raw) for name, raw in raws.items()}


class GroupNames(NoNames):
    """The groups that the cases name."""

    def gid(self, name: str) -> int | None:
        return {"java": 5001, "ftp": 5002}.get(name)


def cases() -> list[dict[str, Any]]:
    """Return the conformance cases."""
    return list(json.loads((CASES / "sidecar.json").read_text()))


SETTINGS = {
    **written_settings(),
    **{case["name"]: parse(case["config"], GroupNames()) for case in cases()},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_plan_reads_back_and_loads_again(nft: Nft, name: str) -> None:
    wanted = plan(SETTINGS[name]).rulesets
    script = render_table(TABLE, wanted)
    nft.run(script)
    assert loaded(nft) == wanted
    nft.run(script)
    assert loaded(nft) == wanted


def golden_rulesets() -> dict[str, Rulesets]:
    """Return what the kernel held for each case, as iptables-save printed it."""
    found: dict[str, Rulesets] = {"everything": plan(SETTINGS["everything"]).rulesets}
    for case in cases():
        texts = {f: case[f"canonical_v{f.version}"] for f in Family}
        found[case["name"]] = {f: iptables_save.parse(t, f) for f, t in texts.items() if t}
    return found


@pytest.mark.parametrize(("name", "wanted"), golden_rulesets().items())
def test_what_iptables_printed_reads_back(nft: Nft, name: str, wanted: Rulesets) -> None:
    nft.run(render_table(TABLE, wanted))
    held = loaded(nft) or {}
    for family, ruleset in wanted.items():
        # A table without chains leaves no trace in nftables.
        tables = tuple(table for table in ruleset.tables if table.chains)
        assert held.get(family, Ruleset(family)) == Ruleset(family, tables)


def random_raw(rng: random.Random) -> dict[str, object]:
    def some(make: Callable[[], str], most: int) -> str:
        return ",".join(make() for _ in range(rng.randint(0, most)))

    def span(limit: int, low: int = 1) -> str:
        first = rng.randint(low, limit)
        return str(first) if rng.random() < 0.6 else f"{first}-{rng.randint(first, limit)}"

    def network() -> str:
        if rng.random() < 0.5:
            length = rng.randint(1, 32)
            number = rng.getrandbits(32) >> (32 - length) << (32 - length)
            return f"{socket.inet_ntoa(number.to_bytes(4, 'big'))}/{length}"
        length = rng.randint(1, 128)
        number = rng.getrandbits(128) >> (128 - length) << (128 - length)
        return f"{socket.inet_ntop(socket.AF_INET6, number.to_bytes(16, 'big'))}/{length}"

    def ports() -> str:
        return span(65535)

    def ids() -> str:
        return span(2**32 - 2, 0)

    def interface() -> str:
        return rng.choice("abz") + "".join(rng.choices("az09_.-", k=rng.randint(0, 14)))

    def flag() -> bool:
        return rng.random() < 0.5

    mode = rng.choice(["REDIRECT", "TPROXY"])
    return {
        "proxy_port": rng.randint(1, 65535),
        "inbound_capture_port": rng.randint(1, 65535),
        "inbound_tunnel_port": rng.choice([15008, 53, 22, rng.randint(1, 65535)]),
        "proxy_uid": some(ids, 4),
        "proxy_gid": some(ids, 4),
        "inbound_interception_mode": mode,
        "inbound_tproxy_mark": rng.randint(1, 2**32 - 1),
        "inbound_ports_include": "*" if flag() else some(ports, 6),
        "inbound_ports_exclude": some(ports, 4),
        "outbound_ip_ranges_include": "*" if flag() else some(network, 6),
        "outbound_ip_ranges_exclude": some(network, 6),
        "outbound_ports_include": some(ports, 4),
        "outbound_ports_exclude": some(ports, 4),
        "owner_groups_include": "*" if flag() else some(ids, 20),
        "owner_groups_exclude": some(ids, 4),
        "exclude_interfaces": some(interface, 3),
        "reroute_virtual_interfaces": some(interface, 3),
        "redirect_dns": flag(),
        "capture_all_dns": flag(),
        "dns_servers_v4": some(lambda: socket.inet_ntoa(rng.randbytes(4)), 3),
        "dns_servers_v6": some(lambda: socket.inet_ntop(socket.AF_INET6, rng.randbytes(16)), 3),
        "drop_invalid": flag(),
        "enable_ipv6": True,
        "host_ipv4_loopback_cidr": rng.choice(["127.0.0.1/32", "127.0.0.0/8"]),
    }


def test_random_plans_read_back(nft: Nft) -> None:
    rng = random.Random(20260822)
    for number in range(RANDOM_SETTINGS):
        raw = random_raw(rng)
        if rng.random() < 0.3:
            raw["enable_ipv6"] = False
            raw["outbound_ip_ranges_include"] = "*"
        wanted = plan(parse(raw)).rulesets
        nft.run(render_table(TABLE, wanted))
        assert loaded(nft) == wanted, f"settings {number}: {raw}"


MANY_KINDS = """
*mangle
:PREROUTING ACCEPT [0:0]
:INPUT DROP [0:0]
:FORWARD ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
:POSTROUTING ACCEPT [0:0]
:X.1-y_Z - [0:0]
-A PREROUTING ! -s 10.0.0.0/9 ! -d 10.0.0.1/32 ! -i eth+ ! -p udp
-A PREROUTING -m mark --mark 0x1/0xff -m connmark ! --mark 0x10/0xf0 -j X.1-y_Z
-A PREROUTING -m mark --mark 0x0/0x1 -g X.1-y_Z
-A PREROUTING -m mark ! --mark 0x0 -j MARK --set-xmark 0x0/0xffffffff
-A PREROUTING -j MARK --set-xmark 0x39/0xff
-A PREROUTING -j MARK --set-xmark 0x100/0xff
-A PREROUTING -j MARK --set-xmark 0xf0/0x0
-A PREROUTING -j MARK --set-xmark 0x0/0xf0
-A PREROUTING -j CONNMARK --set-xmark 0x100/0xffff
-A PREROUTING -j CONNMARK --set-xmark 0x7/0xffffffff
-A PREROUTING -j CONNMARK --save-mark --nfmask 0xff --ctmask 0xffffffff
-A PREROUTING -j CONNMARK --restore-mark --nfmask 0xffffffff --ctmask 0xff00
-A PREROUTING -m conntrack --ctstate INVALID,NEW,RELATED,ESTABLISHED,UNTRACKED -j DROP
-A PREROUTING -m conntrack ! --ctstate NEW,ESTABLISHED -j DROP
-A PREROUTING -m conntrack ! --ctstate INVALID -j DROP
-A PREROUTING -p tcp -j TPROXY --on-port 9 --on-ip 127.0.0.7 --tproxy-mark 0x1/0xff
-A PREROUTING -p tcp -j DROP
-A OUTPUT -p tcp -m tcp --sport 0:80 --dport 90:65535 -j ACCEPT
-A OUTPUT -p tcp -m tcp ! --sport 80 -m multiport ! --dports 53,22,53
-A OUTPUT -p tcp -m tcp --sport 80 ! --dport 53
-A OUTPUT -p udp -m multiport --dports 53,80:90,1000
-A OUTPUT -p udp -m multiport ! --sports 80:90,53,1000
-A OUTPUT -p ipv6-icmp -m owner --uid-owner 0-99 --gid-owner 7
-A OUTPUT -p 200 -m owner --uid-owner 1 ! --gid-owner 7-9
-A OUTPUT -p sctp -m owner ! --uid-owner 0-4294967294 ! --gid-owner 7-9 -j ACCEPT
-A OUTPUT -p icmp -m owner ! --uid-owner 1 -g X.1-y_Z
COMMIT
*nat
:PREROUTING ACCEPT [0:0]
:INPUT ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
:POSTROUTING ACCEPT [0:0]
-A PREROUTING -j REDIRECT
-A OUTPUT -p udp -j REDIRECT --to-ports 15001-15010
COMMIT
*raw
:PREROUTING DROP [0:0]
:OUTPUT ACCEPT [0:0]
-A PREROUTING -j CT --notrack
-A OUTPUT -j CT --zone 65535
COMMIT
"""


def test_every_kind_of_rule_reads_back(nft: Nft) -> None:
    wanted = {Family.IPV4: iptables_save.parse(MANY_KINDS, Family.IPV4)}
    nft.run(render_table(TABLE, wanted))
    assert loaded(nft) == wanted


def test_the_largest_rule_that_has_a_form_loads(nft: Nft) -> None:
    """The limit of the kernel is met with a clear error, not with EINVAL."""
    start = "-A OUTPUT ! -d 10.1.0.0/17 -o lo -p tcp -m tcp --dport 1:5 -m mark --mark 0x1/0x3"
    loads = []
    for count in range(20, 61):
        ranges = " ".join(f"-m owner ! --gid-owner {n}-{n + 5}" for n in range(0, count * 10, 10))
        line = f"{start} {ranges} -m owner --uid-owner 5-6 -j ACCEPT"
        try:
            script = render_table(TABLE, rulesets_of("filter", line))
        except NoNftForm:
            continue
        nft.run(script)
        loads.append(count)
    assert loads == list(range(20, loads[-1] + 1))
    assert loads[-1] >= 30


# --- whatever is changed shows -------------------------------------------------------------------

TAMPERINGS = {
    "a rule is added": "add rule {t} v4-nat-ISTIO_OUTPUT accept",
    "a rule is put first": "insert rule {t} v6-nat-ISTIO_OUTPUT accept",
    "a rule is put behind the fork": "add rule {t} v4-nat-ISTIO_OUTPUT/socket accept",
    "the way without a socket differs": "insert rule {t} v4-nat-ISTIO_OUTPUT/rest accept",
    "a chain is emptied": "flush chain {t} v4-nat-ISTIO_REDIRECT",
    "the rest of a chain is emptied": "flush chain {t} v4-nat-ISTIO_OUTPUT/rest",
    "the way with a socket is emptied": "flush chain {t} v4-nat-ISTIO_OUTPUT/socket",
    "the drop behind tproxy is gone": (
        "flush chain {t} v4-mangle-ISTIO_TPROXY\nadd rule {t} v4-mangle-ISTIO_TPROXY "
        "ip daddr != 127.0.0.1 meta l4proto tcp tproxy ip to :15006 meta mark set 1337 accept"
    ),
    "a chain is added": "add chain {t} more",
    "a base chain is added": "add chain {t} more {{ type filter hook input priority 0; }}",
    "a set is added": "add set {t} more {{ type ipv4_addr; }}",
    "the policy is drop": "add chain {t} mangle-OUTPUT {{ policy drop; }}",
    "the dispatch is gone": "flush chain {t} nat-OUTPUT",
    "the dispatch is doubled": "add rule {t} nat-OUTPUT meta nfproto ipv4 jump v4-nat-OUTPUT",
    "a rule precedes the dispatch": "insert rule {t} nat-OUTPUT accept",
    "the dispatch is reordered": (
        "flush chain {t} nat-OUTPUT\nadd rule {t} nat-OUTPUT meta nfproto ipv6 jump v6-nat-OUTPUT\n"
        "add rule {t} nat-OUTPUT meta nfproto ipv4 jump v4-nat-OUTPUT"
    ),
    "a family is dropped": "add rule {t} raw-OUTPUT meta nfproto ipv4 drop",
    "the priority is another": (
        "delete chain {t} raw-OUTPUT\n"
        "add chain {t} raw-OUTPUT {{ type filter hook output priority -299; }}\n"
        "add rule {t} raw-OUTPUT meta nfproto ipv4 jump v4-raw-OUTPUT\n"
        "add rule {t} raw-OUTPUT meta nfproto ipv6 jump v6-raw-OUTPUT"
    ),
    "the type is another": (
        "delete chain {t} mangle-OUTPUT\n"
        "add chain {t} mangle-OUTPUT {{ type filter hook output priority -150; }}\n"
        "add rule {t} mangle-OUTPUT meta nfproto ipv4 jump v4-mangle-OUTPUT\n"
        "add rule {t} mangle-OUTPUT meta nfproto ipv6 jump v6-mangle-OUTPUT"
    ),
    "a base chain is gone": "delete chain {t} raw-OUTPUT",
    "the table sleeps": "add table {t} {{ flags dormant; }}",
    "a rule is commented": (
        "flush chain {t} v4-nat-ISTIO_REDIRECT\n"
        'add rule {t} v4-nat-ISTIO_REDIRECT meta l4proto tcp redirect to :15001 comment "mine"'
    ),
}


@pytest.mark.parametrize("what", TAMPERINGS)
def test_tampering_shows_and_a_reload_mends_it(nft: Nft, what: str) -> None:
    wanted = plan(SETTINGS["tproxy"]).rulesets
    script = render_table(TABLE, wanted)
    nft.run(script)
    nft.run(TAMPERINGS[what].format(t=f"inet {TABLE}"))
    held = loaded(nft)
    assert held is not None
    assert held != wanted
    nft.run(script)
    assert loaded(nft) == wanted


def rule_handles(nft: Nft) -> list[tuple[str, int]]:
    listing = json.loads(nft.run(f"list table inet {TABLE}", json=True))["nftables"]
    return [(e["rule"]["chain"], e["rule"]["handle"]) for e in listing if "rule" in e]


def test_no_rule_can_go_missing_unseen(nft: Nft) -> None:
    wanted = plan(SETTINGS["tproxy"]).rulesets
    script = render_table(TABLE, wanted)
    nft.run(script)
    count = len(rule_handles(nft))
    for index in range(count):
        nft.run(script)
        chain, handle = rule_handles(nft)[index]
        nft.run(f"delete rule inet {TABLE} {chain} handle {handle}")
        assert loaded(nft) != wanted, f"rule {index} of {chain}"


def test_counters_are_no_tampering(nft: Nft, place: Netns) -> None:
    wanted = plan(SETTINGS["defaults"]).rulesets
    nft.run(render_table(TABLE, wanted))
    with contextlib.suppress(OSError):
        place.run(lambda: socket.create_connection(("127.0.0.1", 9), SILENCE_S).close())
    assert re.search(r"packets [1-9]", nft.run(f"list table inet {TABLE}"))
    assert loaded(nft) == wanted


# --- the table as a whole ------------------------------------------------------------------------


def test_delete_leaves_nothing_and_may_be_repeated(nft: Nft, netns: str) -> None:
    nft.run(render_table(TABLE, plan(SETTINGS["tproxy"]).rulesets))
    nft.run(render_delete(TABLE))
    nft.run(render_delete(TABLE))
    assert inside(netns, "nft", "list", "ruleset") == ""
    assert loaded(nft) is None


def test_create_fails_where_a_table_is(nft: Nft) -> None:
    rulesets = plan(SETTINGS["defaults"]).rulesets
    nft.run(render_table(TABLE, rulesets, replace=False))
    with pytest.raises(KernelRejected, match="File exists"):
        nft.run(render_table(TABLE, rulesets, replace=False))
    assert loaded(nft) == rulesets


def test_foreign_tables_are_untouched_and_listed(nft: Nft) -> None:
    nft.run("table ip theirs {\nchain c {\ntype nat hook output priority -110;\naccept\n}\n}")
    theirs = nft.run("list table ip theirs")
    nft.run(render_table(TABLE, plan(SETTINGS["everything"]).rulesets))
    output = [
        (chain.family, chain.table, chain.priority, chain.rules)
        for chain in base_chains(json.loads(nft.run("list ruleset", json=True)))
        if (chain.hook, chain.type) == ("output", "nat")
    ]
    assert output == [("ip", "theirs", -110, 1), ("inet", TABLE, -101, 2)]
    nft.run(render_delete(TABLE))
    assert nft.run("list ruleset") == theirs


def test_the_nft_tool_takes_and_gives_the_same(netns: str) -> None:
    wanted = plan(SETTINGS["tproxy"]).rulesets
    inside(netns, "nft", "-f", "-", stdin=render_table(TABLE, wanted))
    for flags in ("-j", "-jn", "-jnn", "-js"):
        text = inside(netns, "nft", flags, "list", "table", "inet", TABLE)
        assert parse_table(json.loads(text), TABLE) == wanted, flags


# --- real packets --------------------------------------------------------------------------------

BACKENDS = ("nftables", "iptables-legacy")


def load(backend: str, netns: str, rulesets: Rulesets) -> None:
    if backend == "nftables":
        inside(netns, "nft", "-f", "-", stdin=render_table(TABLE, rulesets))
        return
    for family, ruleset in rulesets.items():
        tool = f"{'ip' if family is Family.IPV4 else 'ip6'}tables-legacy-restore"
        inside(netns, tool, stdin=iptables_save.render(ruleset))


def rulesets_of(table: str, *lines: str) -> Rulesets:
    chains: dict[str, list[Rule]] = {}
    for line in lines:
        name, rule = iptables_save.parse_rule(line)
        chains.setdefault(name, []).append(rule)
    return {Family.IPV4: ruleset_of(Family.IPV4, {table: chains})}


def listen(
    place: Netns, address: str, port: int, option: tuple[int, int] | None = None
) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET

    def make() -> socket.socket:
        made = socket.socket(family)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if option:
            made.setsockopt(*option, 1)
        made.bind((address, port))
        made.listen()
        made.settimeout(SILENCE_S)
        return made

    return place.run(make)


def connect(place: Netns, address: str, port: int) -> socket.socket | str:
    """Return the connection, or "refused" or "silent"."""
    try:
        return place.run(lambda: socket.create_connection((address, port), SILENCE_S))
    except ConnectionRefusedError:
        return "refused"
    except TimeoutError:
        return "silent"


TPROXY_RULE = (
    "-A PREROUTING -i lo -p tcp -m tcp --dport 8080 -j TPROXY --on-port 15006 --on-ip 0.0.0.0 "
    "--tproxy-mark 0x539/0xffffffff"
)


@pytest.mark.parametrize("backend", BACKENDS)
def test_tproxy_lets_nothing_past_while_nobody_listens(
    netns: str, place: Netns, backend: str
) -> None:
    load(backend, netns, rulesets_of("mangle", TPROXY_RULE))
    with listen(place, "127.0.0.1", 8080):
        assert connect(place, "127.0.0.1", 8080) == "silent"


@pytest.mark.parametrize("backend", BACKENDS)
def test_tproxy_hands_packets_to_a_transparent_listener_with_the_mark(
    netns: str, place: Netns, backend: str
) -> None:
    load(backend, netns, rulesets_of("mangle", TPROXY_RULE))
    # What has another mark when it is delivered is dropped here.
    inside(netns, "nft", "-f", "-", stdin=MARK_CHECK)
    transparent = (socket.SOL_IP, socket.IP_TRANSPARENT)
    with listen(place, "127.0.0.1", 15006, transparent) as proxy, listen(place, "127.0.0.1", 8080):
        client = connect(place, "127.0.0.1", 8080)
        assert isinstance(client, socket.socket)
        accepted, _ = proxy.accept()
        assert accepted.getsockname() == ("127.0.0.1", 8080)
        accepted.close()
        client.close()


MARK_CHECK = (
    "table ip check {\nchain in {\ntype filter hook input priority 10;\n"
    "tcp dport 8080 meta mark != 0x539 drop\n}\n}\n"
)

# The RST that answers a SYN to a closed port is the kernel's own and has no socket.
DROP_OTHERS = ("-A OUTPUT -o lo -p tcp -m owner ! --uid-owner 0 -j DROP",)
PASS_OTHERS = (
    "-A OUTPUT -j ISTIO_OUTPUT",
    "-A ISTIO_OUTPUT -o lo -m owner ! --uid-owner 0 -m owner ! --gid-owner 0-5 -j RETURN",
    "-A ISTIO_OUTPUT -m owner --uid-owner 0 -j RETURN",
    "-A ISTIO_OUTPUT -p tcp -j DROP",
)
PASS_OURS_ONLY = ("-A OUTPUT -m owner --uid-owner 0 -j ACCEPT", "-A OUTPUT -p tcp -j DROP")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("lines", "seen"),
    [(DROP_OTHERS, "silent"), (PASS_OTHERS, "refused"), (PASS_OURS_ONLY, "silent")],
)
def test_a_packet_without_a_socket_meets_owner_rules_as_in_iptables(
    netns: str, place: Netns, backend: str, lines: tuple[str, ...], seen: str
) -> None:
    load(backend, netns, rulesets_of("filter", *lines))
    assert connect(place, "127.0.0.1", 9) == seen


def test_the_plain_translation_of_a_negated_owner_would_differ(netns: str, place: Netns) -> None:
    """The reason for the fork; if this ever fails, the fork can go."""
    script = (
        "table inet plain {\nchain out {\ntype filter hook output priority 0;\n"
        'oifname "lo" meta l4proto tcp meta skuid != 0 drop\n}\n}\n'
    )
    inside(netns, "nft", "-f", "-", stdin=script)
    assert connect(place, "127.0.0.1", 9) == "refused"


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_return_or_goto_in_a_builtin_chain_leads_to_the_policy(
    netns: str, place: Netns, backend: str
) -> None:
    text = (
        "*filter\n:INPUT DROP [0:0]\n:X - [0:0]\n:Y - [0:0]\n"
        "-A INPUT -p tcp -m tcp --dport 81 -g X\n"
        "-A INPUT -p tcp -m tcp --dport 82 -j X\n"
        "-A INPUT -p tcp -m tcp --dport 83 -j RETURN\n"
        "-A INPUT -j ACCEPT\n"
        "-A X -g Y\n-A Y -p tcp -m tcp --dport 9 -j DROP\nCOMMIT\n"
    )
    load(backend, netns, {Family.IPV4: iptables_save.parse(text, Family.IPV4)})
    seen = [connect(place, "127.0.0.1", port) for port in (81, 82, 83, 84)]
    assert seen == ["silent", "refused", "silent", "refused"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_ipv6_is_left_alone_by_an_ipv4_ruleset(netns: str, place: Netns, backend: str) -> None:
    raw = {"outbound_ip_ranges_include": "*", "host_ipv4_loopback_cidr": "127.0.0.1/32"}
    load(backend, netns, plan(parse({**raw, "proxy_uid": "7", "proxy_gid": "7"})).rulesets)
    assert parse(raw).families == (Family.IPV4,)
    with listen(place, "::1", 8080) as server, listen(place, "::1", 15001):
        client = connect(place, "::1", 8080)
        assert isinstance(client, socket.socket)
        server.accept()[0].close()
        client.close()


def test_a_redirected_connection_survives_a_reload(nft: Nft, place: Netns) -> None:
    redirect = "-A OUTPUT -p tcp -m tcp --dport 8080 -j REDIRECT --to-ports 15001"
    script = render_table(TABLE, rulesets_of("nat", redirect))
    nft.run(script)
    with listen(place, "127.0.0.1", 15001) as proxy:
        client = connect(place, "127.0.0.1", 8080)
        assert isinstance(client, socket.socket)
        accepted, _ = proxy.accept()
        for _ in range(3):
            nft.run(script)
            client.sendall(b"still here")
            assert accepted.recv(99) == b"still here"
        accepted.close()
        client.close()


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("flavour", ["nft", "legacy"])
def test_ours_translates_before_any_iptables(
    netns: str, place: Netns, flavour: str, first: bool
) -> None:
    line = "-A OUTPUT -p tcp -m tcp --dport 8080 -j REDIRECT --to-ports"
    theirs = iptables_save.render(rulesets_of("nat", f"{line} 16001")[Family.IPV4])
    if first:
        load("nftables", netns, rulesets_of("nat", f"{line} 15001"))
    inside(netns, f"iptables-{flavour}-restore", stdin=theirs)
    if not first:
        load("nftables", netns, rulesets_of("nat", f"{line} 15001"))
    with listen(place, "127.0.0.1", 15001) as ours, listen(place, "127.0.0.1", 16001):
        client = connect(place, "127.0.0.1", 8080)
        assert isinstance(client, socket.socket)
        ours.accept()[0].close()
        client.close()


def test_of_two_zones_the_first_counts_as_in_iptables(netns: str, place: Netns) -> None:
    lines = [f"-A OUTPUT -p udp -m udp --dport 5353 -j CT --zone {zone}" for zone in (5, 6)]
    zones = {}
    for backend in reversed(BACKENDS):
        held = rulesets_of("raw", *lines)
        # Something has to make the kernel track connections at all.
        tracked = rulesets_of("filter", "-A OUTPUT -m conntrack --ctstate NEW -j ACCEPT")
        both = Ruleset(Family.IPV4, (*tracked[Family.IPV4].tables, *held[Family.IPV4].tables))
        load(backend, netns, {Family.IPV4: both})
        with place.run(lambda: socket.socket(type=socket.SOCK_DGRAM)) as sender:
            sender.sendto(b"?", ("127.0.0.1", 5353))
        listed = inside(netns, "conntrack", "-L", "-p", "udp")
        zones[backend] = re.findall(r"zone=(\d+)", listed)
        for chain in ("raw", "filter"):
            inside(netns, "iptables-legacy", "-t", chain, "-F")
        inside(netns, "conntrack", "-F")
    assert set(zones["nftables"]) == set(zones["iptables-legacy"]) == {"5"}


# --- libnftables ---------------------------------------------------------------------------------


def test_a_context_stays_in_its_namespace_whoever_runs_it(nft: Nft, netns: str) -> None:
    nft.run("add table inet it-here")
    others = threading.Thread(target=lambda: nft.run("add table inet it-there"))
    others.start()
    others.join()
    tables = inside(netns, "nft", "list", "tables")
    assert tables.split("\n")[:2] == ["table inet it-here", "table inet it-there"]
    own = subprocess.run(["nft", "list", "tables"], capture_output=True, text=True, check=True)
    assert "it-" not in own.stdout


def test_a_context_opens_its_socket_when_it_is_made(place: Netns) -> None:
    before = _netfilter_sockets()
    made = place.run(Nft)
    assert _netfilter_sockets() == before + 1
    made.close()
    assert _netfilter_sockets() == before


def _netfilter_sockets() -> int:
    return sum(
        1
        for entry in Path("/proc/self/fd").iterdir()
        if entry.is_symlink() and str(entry.readlink()).startswith("socket:")
    )


def test_errors_carry_the_script_and_tell_what_is_missing(nft: Nft) -> None:
    with pytest.raises(NoSuchObject) as missing:
        nft.run("list table inet it-none")
    assert missing.value.script == "list table inet it-none"
    with pytest.raises(KernelRejected, match="syntax error") as wrong:
        nft.run("nonsense")
    assert not isinstance(wrong.value, NoSuchObject)


def test_a_rejected_script_changes_nothing(nft: Nft, netns: str) -> None:
    script = render_table(TABLE, plan(SETTINGS["everything"]).rulesets)
    with pytest.raises(NoSuchObject):
        nft.run(f"{script}add rule inet {TABLE} nowhere accept\n")
    assert inside(netns, "nft", "list", "ruleset") == ""


def test_one_context_serves_many_threads(nft: Nft) -> None:
    script = render_table(TABLE, plan(SETTINGS["defaults"]).rulesets)
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(10):
                nft.run(script)
                assert loaded(nft) is not None
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_a_closed_context_says_so(nft: Nft) -> None:
    nft.close()
    nft.close()
    with pytest.raises(ValueError, match="closed"):
        nft.run("list tables")


def test_closing_later_closes_in_another_thread(place: Netns) -> None:
    reaper.start()
    context: Any = place.run(Nft)
    context.run(render_table(TABLE, plan(SETTINGS["everything"]).rulesets))
    context.run(render_delete(TABLE))
    reaper.close_later(context)
    deadline = time.monotonic() + 5
    while context._context is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert context._context is None


def test_a_missing_library_is_an_environment_that_lacks_it() -> None:
    with pytest.raises(EnvironmentLacks, match="libnone"):
        libnftables.load("libnone.so.1")
