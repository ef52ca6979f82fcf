"""The native nftables form as text and back from JSON, without a kernel."""

import copy
import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.formats.iptables_save import parse_rule, render_rule
from agent.formats.nft_json import NftJsonError, base_chains, parse_table
from agent.formats.nft_shape import without_socket
from agent.formats.nft_text import NoNftForm, render_delete, render_table
from agent.model.plan import plan
from agent.model.ruleset import Chain, Family, Rule, Ruleset, Rulesets, Table, ruleset_of
from agent.model.settings import parse

V4 = Family.IPV4


def rules_of(*lines: str, table: str = "nat") -> Rulesets:
    """Return the IPv4 ruleset of `-A CHAIN ...` lines."""
    chains: dict[str, list[Rule]] = {}
    for line in lines:
        name, rule = parse_rule(line)
        chains.setdefault(name, []).append(rule)
        if rule.target is not None and rule.target.name.startswith("ISTIO"):
            chains.setdefault(rule.target.name, [])
    return {V4: ruleset_of(V4, {table: chains})}


def body(script: str, chain: str) -> list[str]:
    """Return the lines of one chain."""
    block = script.split(f"\tchain {chain} {{\n", 1)[1].split("\t}\n", 1)[0]
    return [line.strip() for line in block.splitlines()]


def rendered(line: str, table: str = "nat") -> str:
    """Return the nft rule of one iptables rule."""
    chain = line.split()[1]
    return body(render_table("t", rules_of(line, table=table)), f"v4-{table}-{chain}")[0]


# --- text ----------------------------------------------------------------------------------------

DEFAULT_TABLE = """\
add table inet mesh
delete table inet mesh
table inet mesh {
	chain nat-OUTPUT {
		type nat hook output priority -101; policy accept;
		meta nfproto ipv4 jump v4-nat-OUTPUT
	}
	chain v4-nat-OUTPUT {
		counter jump v4-nat-ISTIO_OUTPUT
	}
	chain v4-nat-ISTIO_INBOUND {
		meta l4proto tcp tcp dport 15008 counter return
	}
	chain v4-nat-ISTIO_IN_REDIRECT {
		meta l4proto tcp counter redirect to :15006
	}
	chain v4-nat-ISTIO_OUTPUT {
		ip saddr 127.0.0.6 oifname "lo" counter return
		ip daddr != 127.0.0.1 oifname "lo" meta l4proto tcp tcp dport != 15008 meta skuid 1337 \
counter jump v4-nat-ISTIO_IN_REDIRECT
		meta skuid 0-4294967294 goto v4-nat-ISTIO_OUTPUT/socket
		oifname "lo" counter return
		oifname "lo" counter return
		goto v4-nat-ISTIO_OUTPUT/rest
	}
	chain v4-nat-ISTIO_OUTPUT/socket {
		oifname "lo" meta skuid != 1337 counter return
		meta skuid 1337 counter return
		ip daddr != 127.0.0.1 oifname "lo" meta l4proto tcp tcp dport != 15008 meta skgid 1337 \
counter jump v4-nat-ISTIO_IN_REDIRECT
		oifname "lo" meta skgid != 1337 counter return
		goto v4-nat-ISTIO_OUTPUT/rest
	}
	chain v4-nat-ISTIO_OUTPUT/rest {
		meta skgid 1337 counter return
		ip daddr 127.0.0.1 counter return
	}
	chain v4-nat-ISTIO_REDIRECT {
		meta l4proto tcp counter redirect to :15001
	}
}
"""


def test_default_settings_give_this_table() -> None:
    assert render_table("mesh", plan(parse({})).rulesets) == DEFAULT_TABLE


def test_without_replace_an_existing_table_makes_the_script_fail() -> None:
    script = render_table("mesh", plan(parse({})).rulesets, replace=False)
    assert script.startswith("create table inet mesh\ntable inet mesh {\n")
    assert "delete" not in script


def test_ipv4_alone_says_nothing_about_ipv6() -> None:
    raw = {"outbound_ip_ranges_include": "*", "inbound_ports_include": "*"}
    script = render_table("t", plan(parse(raw)).rulesets)
    assert not any(word in script for word in ("ipv6", "ip6", "v6-"))


def test_delete_is_add_then_delete() -> None:
    assert render_delete("mesh") == "add table inet mesh\ndelete table inet mesh\n"


@pytest.mark.parametrize("name", ["", "a b", "a;b", "x\n", "1a", "{"])
def test_names_that_nft_could_misread_are_refused(name: str) -> None:
    with pytest.raises(NoNftForm):
        render_delete(name)


def test_a_policy_of_drop_is_a_rule_for_its_family_alone() -> None:
    chain = Chain("INPUT", "DROP")
    script = render_table("t", {V4: Ruleset(V4, (Table("filter", (chain,)),))})
    assert body(script, "filter-INPUT") == [
        "type filter hook input priority 0; policy accept;",
        "meta nfproto ipv4 jump v4-filter-INPUT",
        "meta nfproto ipv4 drop",
    ]


@pytest.mark.parametrize(
    ("table", "line", "nft"),
    [
        ("nat", "-A OUTPUT -o eth+ -j RETURN", 'oifname "eth*" counter return'),
        ("nat", "-A OUTPUT ! -o lo -j RETURN", 'oifname != "lo" counter return'),
        ("nat", "-A OUTPUT ! -d 10.0.0.0/8 -j ACCEPT", "ip daddr != 10.0.0.0/8 counter accept"),
        ("nat", "-A OUTPUT -p sctp", "meta l4proto 132 counter"),
        ("nat", "-A OUTPUT -g ISTIO_X", "counter goto v4-nat-ISTIO_X"),
        (
            "nat",
            "-A OUTPUT -p tcp -m multiport ! --dports 53,22 -j RETURN",
            "meta l4proto tcp tcp dport != 53 tcp dport != 22 counter return",
        ),
        (
            "nat",
            "-A OUTPUT -p udp -m multiport --dports 53,80:90 -j RETURN",
            "meta l4proto udp udp dport { 53, 80-90 } counter return",
        ),
        (
            "filter",
            "-A OUTPUT -m owner --uid-owner 5-9 ! --gid-owner 7 -j DROP",
            "meta skuid 5-9 meta skgid != 7 counter drop",
        ),
        (
            "mangle",
            "-A OUTPUT -m mark ! --mark 0x1/0xff -j MARK --set-xmark 0x10/0xf0",
            "meta mark and 0xff != 0x1 counter meta mark set meta mark and 0xffffff0f xor 0x10",
        ),
        (
            "mangle",
            "-A OUTPUT -m conntrack ! --ctstate NEW,ESTABLISHED -j DROP",
            "ct state != { new,established } counter drop",
        ),
        ("raw", "-A OUTPUT -p udp -j CT --zone 2", "meta l4proto udp counter ct zone set 2"),
    ],
)
def test_one_rule(table: str, line: str, nft: str) -> None:
    assert rendered(line, table) == nft


def test_tproxy_is_followed_by_a_drop_of_the_same_packets() -> None:
    line = (
        "-A PREROUTING -p tcp -j TPROXY --on-port 15006 --on-ip 0.0.0.0 "
        "--tproxy-mark 0x539/0xffffffff"
    )
    assert body(render_table("t", rules_of(line, table="mangle")), "v4-mangle-PREROUTING") == [
        "meta l4proto tcp counter tproxy ip to :15006 meta mark set 0x539 accept",
        "meta l4proto tcp counter drop",
    ]


@pytest.mark.parametrize(
    "line",
    [
        "-A OUTPUT -f -j DROP",
        "-A OUTPUT -s 10.0.0.0/255.0.255.0 -j DROP",
        "-A OUTPUT -s fd00::/8 -j DROP",
        "-A OUTPUT -j REDIRECT --to-ports 15001",
        "-A OUTPUT -p icmp -j REDIRECT --to-ports 15001",
        "-A OUTPUT -p tcp -j REDIRECT --to-ports 15001 --random",
        "-A OUTPUT -p tcp -m tcp --dport 70000 -j DROP",
        "-A OUTPUT -p tcp -m tcp --dport http -j DROP",
        "-A OUTPUT -p tcp -m tcp --tcp-flags SYN,ACK SYN -j DROP",
        "-A OUTPUT -p tcp -m multiport --dports 80 -j DROP",
        "-A OUTPUT -p tcp -m multiport --dports 90,80 -j DROP",
        "-A OUTPUT -p tcp -m multiport --ports 80,90 -j DROP",
        "-A OUTPUT -m owner --socket-exists -j DROP",
        "-A OUTPUT -m owner --uid-owner root -j DROP",
        "-A OUTPUT -m conntrack --ctstate DNAT -j DROP",
        "-A OUTPUT -m comment --comment x -j DROP",
        '-A OUTPUT -o "a\\";drop" -j DROP',
        "-A OUTPUT -j NOWHERE",
        "-A OUTPUT -j LOG --log-prefix x",
        "-A OUTPUT -j CONNMARK --save-mark --nfmask 0xffffffff --ctmask 0xff",
        "-A OUTPUT -j CT --zone-orig 1",
        "-A OUTPUT -p tcp -j TPROXY --on-port 1 --on-ip ::1 --tproxy-mark 0x1/0x1",
    ],
)
def test_what_has_no_form_is_refused_by_name(line: str) -> None:
    chain, rule = parse_rule(line)
    with pytest.raises(NoNftForm) as caught:
        render_table("t", rules_of(line))
    assert render_rule(chain, rule) in str(caught.value)


def test_more_conditions_than_a_rule_holds_are_refused() -> None:
    groups = " ".join(f"-m owner ! --gid-owner {n}-{n + 5}" for n in range(0, 1000, 10))
    with pytest.raises(NoNftForm, match="128"):
        render_table("t", rules_of(f"-A OUTPUT {groups} -j RETURN"))


def test_a_packet_without_a_socket_meets_negated_owners_and_no_others() -> None:
    lines = (
        "-A X -m owner --uid-owner 1 -j DROP",
        "-A X -o lo -m owner ! --uid-owner 1 -m owner ! --gid-owner 2 -j RETURN",
        "-A X -m owner --uid-owner 1 ! --gid-owner 2 -j DROP",
        "-A X -p tcp -j ACCEPT",
    )
    left = without_socket(parse_rule(line)[1] for line in lines)
    assert [render_rule("X", rule) for rule in left] == [
        "-A X -o lo -j RETURN",
        "-A X -p tcp -j ACCEPT",
    ]


# --- JSON ----------------------------------------------------------------------------------------


def meta(key: str) -> dict[str, Any]:
    return {"meta": {"key": key}}


def ct(key: str) -> dict[str, Any]:
    return {"ct": {"key": key}}


def payload(protocol: str, name: str) -> dict[str, Any]:
    return {"payload": {"protocol": protocol, "field": name}}


def holds(left: object, right: object, op: str = "==") -> dict[str, Any]:
    return {"match": {"op": op, "left": left, "right": right}}


def listing(*expressions: object, chain: str = "v4-nat-ISTIO_OUTPUT") -> dict[str, Any]:
    """Return a listing of the table `t` in which one chain has one rule."""
    place = {"family": "inet", "table": "t"}
    return {
        "nftables": [
            {"metainfo": {"version": "1.0.6", "json_schema_version": 1}},
            {"table": {"family": "inet", "name": "t", "handle": 1}},
            {"chain": {**place, "name": chain, "handle": 2}},
            {"rule": {**place, "chain": chain, "handle": 3, "expr": list(expressions)}},
        ]
    }


def read(*expressions: object) -> str:
    """Return the one rule that these expressions make, as iptables-save would write it."""
    found = parse_table(listing(*expressions), "t")
    assert found is not None
    chain = found[V4].chain("nat", "ISTIO_OUTPUT")
    assert chain is not None
    (rule,) = chain.rules
    return render_rule("X", rule).removeprefix("-A X ")


DROP = {"drop": None}


@pytest.mark.parametrize(
    ("spellings", "rule"),
    [
        (
            [
                [holds(meta("l4proto"), "tcp"), holds(payload("tcp", "dport"), 80)],
                [holds(meta("l4proto"), 6), holds(payload("tcp", "dport"), "80")],
                [holds(payload("tcp", "dport"), 80)],
            ],
            "-p tcp -m tcp --dport 80 -j DROP",
        ),
        (
            [
                [holds(ct("state"), ["established", "related"], "in")],
                [holds(ct("state"), ["related", "established"], "in")],
                [holds(ct("state"), {"|": ["established", "related"]}, "in")],
                [holds(ct("state"), {"|": [{"|": ["established"]}, "related"]}, "in")],
                [holds(ct("state"), 6, "in")],
                [holds(ct("state"), [2, 4], "in")],
                [holds(ct("state"), {"set": ["established", "related"]}, "==")],
            ],
            "-m conntrack --ctstate RELATED,ESTABLISHED -j DROP",
        ),
        (
            [
                [holds(payload("ip", "daddr"), {"prefix": {"addr": "10.0.0.0", "len": 8}})],
                [
                    holds(meta("nfproto"), "ipv4"),
                    holds(payload("ip", "daddr"), {"prefix": {"addr": "10.0.0.0", "len": 8}}),
                ],
                [
                    holds(meta("nfproto"), 2),
                    holds(payload("ip", "daddr"), {"prefix": {"addr": "10.0.0.0", "len": 8}}),
                ],
            ],
            "-d 10.0.0.0/8 -j DROP",
        ),
        (
            [
                [
                    holds(payload("tcp", "dport"), 53, "!="),
                    holds(payload("tcp", "dport"), 22, "!="),
                ],
                [holds(payload("tcp", "dport"), {"set": [53, 22]}, "!=")],
            ],
            "-p tcp -m multiport ! --dports 53,22 -j DROP",
        ),
        ([[holds(meta("skuid"), {"range": [5, 9]})]], "-m owner --uid-owner 5-9 -j DROP"),
        ([[holds(meta("iifname"), "eth*")]], "-i eth+ -j DROP"),
        ([[holds({"&": [meta("mark"), 255]}, 1)]], "-m mark --mark 0x1/0xff -j DROP"),
        ([[holds(ct("mark"), 1337, "!=")]], "-m connmark ! --mark 0x539 -j DROP"),
    ],
)
def test_every_spelling_of_a_condition_is_read(spellings: list[list[object]], rule: str) -> None:
    assert {read(*expressions, DROP) for expressions in spellings} == {rule}


@pytest.mark.parametrize(
    "value",
    [
        {"|": [{"&": [meta("mark"), 0xFFFFFF39]}, 0x39]},
        {"^": [{"&": [meta("mark"), 0xFFFFFF00]}, 0x39]},
        {"|": [{"&": [meta("mark"), 0xFFFFFF00, 0xFFFFFFFF]}, 0x30, 0x09]},
    ],
)
def test_setting_a_mark_is_read_by_what_it_does(value: object) -> None:
    mangle = {"mangle": {"key": meta("mark"), "value": value}}
    assert read(mangle) == "-j MARK --set-xmark 0x39/0xff"


@pytest.mark.parametrize(
    "expression",
    [
        holds(meta("iif"), "lo"),
        holds(meta("iifname"), "a\\*"),
        holds(meta("iifname"), "eth+"),
        holds(meta("skuid"), "root"),
        holds(meta("mark"), 1, "<"),
        holds(meta("nfproto"), "ipv6"),
        holds(meta("l4proto"), {"set": ["tcp", "udp"]}),
        holds(payload("ip6", "daddr"), "::1"),
        holds(payload("ip", "daddr"), "@set"),
        holds(payload("tcp", "dport"), "@set"),
        holds(payload("tcp", "flags"), "syn", "in"),
        holds(ct("state"), ["new", "established"]),
        holds(ct("state"), "new", "!"),
        holds({"ct": {"key": "mark", "dir": "original"}}, 1),
        {"match": {"op": "==", "left": meta("mark"), "right": 1, "more": 0}},
        {"limit": {"rate": 1}},
        {"counter": "named"},
        {"queue": None},
        {"jump": {"target": "v6-nat-ISTIO_OUTPUT"}},
        {"jump": {"target": "v4-mangle-X"}},
        {"jump": {"target": "elsewhere"}},
        {"redirect": {"port": 1, "flags": "random"}},
        {"mangle": {"key": meta("priority"), "value": 1}},
        {"mangle": {"key": ct("mark"), "value": {"|": [meta("mark"), ct("mark")]}}},
        {"tproxy": {"family": "ip", "port": 1}},
        {"accept": None, "drop": None},
        None,
        17,
    ],
)
def test_what_is_not_ours_is_kept_word_for_word(expression: object) -> None:
    text = json.dumps(expression, sort_keys=True, separators=(",", ":"))
    found = parse_table(listing(expression), "t")
    assert found is not None
    chain = found[V4].chain("nat", "ISTIO_OUTPUT")
    assert chain is not None
    assert [option.values[0] for option in chain.rules[0].options("nft")] == [text]


def test_a_condition_behind_an_action_is_not_taken_for_one_ahead_of_it() -> None:
    mangle = {"mangle": {"key": meta("mark"), "value": 1}}
    late = read(mangle, holds(payload("ip", "daddr"), "10.0.0.1"))
    assert "MARK" not in late
    assert "-d" not in late


def test_a_comment_shows() -> None:
    document = listing(DROP)
    document["nftables"][3]["rule"]["comment"] = "mine"
    found = parse_table(document, "t")
    assert found is not None
    chain = found[V4].chain("nat", "ISTIO_OUTPUT")
    assert chain is not None
    assert render_rule("X", chain.rules[0]) == "-A X -m comment --comment mine -j DROP"


def test_tproxy_without_its_drop_shows() -> None:
    mark = {"mangle": {"key": meta("mark"), "value": 1}}
    proxy = {"tproxy": {"family": "ip", "port": 15006}}
    assert "nft" in read(proxy, mark, {"accept": None})


def test_no_such_table_is_none() -> None:
    assert parse_table(listing(DROP), "other") is None
    assert parse_table({"nftables": []}, "t") is None


def test_a_table_of_another_family_is_not_ours() -> None:
    document = listing(DROP)
    for entry in document["nftables"]:
        for item in entry.values():
            item["family"] = "ip"
    assert parse_table(document, "t") is None


def test_an_empty_table_holds_no_family() -> None:
    assert parse_table({"nftables": listing(DROP)["nftables"][:2]}, "t") == {}


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"table": {"family": "inet", "name": "t", "flags": "inet"}}, "table"),
        ({"set": {"family": "inet", "table": "t", "name": "s", "type": "mark"}}, "objects"),
        ({"chain": {"family": "inet", "table": "t", "name": "theirs"}}, "theirs"),
        ({"rule": {"family": "inet", "table": "t", "chain": "lost", "expr": [DROP]}}, "lost"),
    ],
)
def test_what_lies_beside_our_chains_shows(change: dict[str, Any], where: str) -> None:
    document = listing(DROP)
    document["nftables"].append(change)
    found = parse_table(document, "t")
    assert found is not None
    assert found[V4].chain("nft", where) is not None


@pytest.mark.parametrize("document", [None, 1, "x", [], {}, {"nftables": 1}, {"nftables": [1]}])
def test_garbage_is_refused(document: object) -> None:
    with pytest.raises(NftJsonError):
        parse_table(document, "t")
    with pytest.raises(NftJsonError):
        base_chains(document)


WORDS = st.sampled_from(
    re.findall(
        r"\S+",
        """match op left right meta key mark ct state payload protocol field tcp dport set range
        addr prefix len & | ^ == != in mangle value accept drop jump target goto redirect port
        tproxy family ip counter expr comment skuid l4proto nfproto daddr 1.2.3.4 1 99999999999 ²
        name""",
    )
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | WORDS | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=12,
)


@given(st.lists(VALUES, max_size=4))
def test_no_rule_breaks_the_reader_or_is_lost(expressions: list[Any]) -> None:
    found = parse_table(listing(*expressions), "t")
    assert found is not None
    assert found[V4].rule_count() == 1


@given(VALUES, VALUES, st.sampled_from(["==", "!=", "in", 1, None]))
def test_no_condition_breaks_the_reader(left: object, right: object, op: object) -> None:
    known = [meta("mark"), meta("iifname"), ct("state"), payload("ip", "saddr"), left]
    for side in known:
        body = {"match": {"op": op, "left": side, "right": right}}
        assert parse_table(listing(body, DROP), "t") is not None


@given(st.dictionaries(WORDS, VALUES, max_size=4))
def test_no_odd_chain_breaks_the_reader(more: dict[str, Any]) -> None:
    document = copy.deepcopy(listing(DROP, chain="nat-OUTPUT"))
    document["nftables"][2]["chain"].update(more)
    document["nftables"][3]["rule"].update(more)
    parse_table(document, "t")
    base_chains(document)


def test_base_chains_come_in_the_order_in_which_packets_meet_them() -> None:
    def chain(name: str, priority: int, **more: object) -> dict[str, Any]:
        hook = {"type": "nat", "hook": "output", "prio": priority, "policy": "accept"}
        return {"chain": {"family": "ip", "table": "nat", "name": name, **hook, **more}}

    rule = {"rule": {"family": "ip", "table": "nat", "chain": "late", "expr": []}}
    regular = {"chain": {"family": "ip", "table": "nat", "name": "regular"}}
    document = {"nftables": [chain("late", -100), regular, rule, rule, chain("early", -110)]}
    assert [(c.name, c.priority, c.rules) for c in base_chains(document)] == [
        ("early", -110, 0),
        ("late", -100, 2),
    ]


def test_a_counter_changes_nothing() -> None:
    counter = {"counter": {"packets": 7, "bytes": 9}}
    assert read(counter, DROP) == read(DROP, counter) == read(DROP) == "-j DROP"
