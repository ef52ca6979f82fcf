"""The packet walk: every kernel fact that it must know, one test each."""

import ipaddress
from dataclasses import replace
from typing import Any

import pytest

from agent.explain.render import summary, to_json, to_text
from agent.explain.walk import MAX_BRANCHES, walk
from agent.model.host import LocalMark
from agent.model.packet import Connection, Hit, Packet
from agent.model.ruleset import Family
from tests.support.walks import POD, layer, packet, said, verdict

REDIRECT = "nat OUTPUT -p tcp -j REDIRECT --to-ports 15001"


# --- verdicts ------------------------------------------------------------------------------------


def test_no_rules_let_a_packet_pass() -> None:
    assert said(walk([], packet(), POD)) == "pass"


def test_redirect_names_the_port() -> None:
    assert verdict(REDIRECT) == "redirect:15001"


def test_redirect_without_a_port_keeps_the_port() -> None:
    assert verdict("nat OUTPUT -p tcp -j REDIRECT") == "redirect:80"


@pytest.mark.parametrize(
    ("ports", "port"), [("15001-15010", 15001), ("70-90", 80), ("80", 80), ("70000", None)]
)
def test_a_port_range_keeps_a_port_inside_and_else_takes_the_first(
    ports: str, port: int | None
) -> None:
    expected = "maybe" if port is None else f"redirect:{port}"
    assert verdict(f"nat OUTPUT -p tcp -j REDIRECT --to-ports {ports}") == expected


def test_accept_in_nat_exempts_and_return_passes() -> None:
    assert verdict(f"nat OUTPUT -j ACCEPT\n{REDIRECT}") == "accept"
    assert verdict(f"nat OUTPUT -j RETURN\n{REDIRECT}") == "pass"
    assert verdict("filter OUTPUT -j ACCEPT") == "pass"


@pytest.mark.parametrize(
    ("cgroup", "expected"),
    [
        (None, "maybe"),
        ("/", "redirect:15001"),
        ("/kubepods/pod1", "redirect:15001"),
        ("/kubepods/pod1/abc", "redirect:15001"),
        ("/kubepods/pod1/ab", "pass"),
        ("kubepods/pod1/ab/below", "pass"),
    ],
)
def test_a_cgroup_is_known_only_to_whoever_says_it(cgroup: str | None, expected: str) -> None:
    rules = f"nat OUTPUT -m cgroup --path /kubepods/pod1/ab -j RETURN\n{REDIRECT}"
    assert said(walk([layer(rules)], replace(packet(), cgroup=cgroup), POD)) == expected


@pytest.mark.parametrize("target", ["DROP", "REJECT --reject-with icmp-port-unreachable"])
def test_drop_and_reject_drop(target: str) -> None:
    assert verdict(f"filter OUTPUT -j {target}") == "drop"


def test_dnat_to_another_host_is_a_redirect_with_its_port() -> None:
    rule = "nat OUTPUT -p tcp -j DNAT --to-destination 10.5.5.5:8080"
    trace = walk([layer(rule)], packet(), POD)
    assert said(trace) == "redirect:8080"
    assert not trace.outcomes[0].local
    assert "redirected to 10.5.5.5:8080" in summary(trace)


def test_dnat_of_ipv6_reads_the_brackets() -> None:
    rule = 'nat OUTPUT -p tcp -j DNAT --to-destination "[fd05::5]:8080"'
    assert verdict(rule, packet("fd09::1")) == "redirect:8080"
    rule = "nat OUTPUT -p tcp -j DNAT --to-destination fd05::5"
    assert verdict(rule, packet("fd09::1")) == "redirect:80"


def test_dnat_to_several_addresses_cannot_be_foreseen() -> None:
    rule = "nat OUTPUT -p tcp -j DNAT --to-destination 10.5.5.5-10.5.5.9"
    assert verdict(rule) == "maybe"


def test_a_packet_without_a_route_is_dropped_before_any_rule() -> None:
    trace = walk([layer(REDIRECT)], packet(), replace(POD, routes=()))
    assert said(trace) == "drop"
    assert [step.number for step in trace.steps] == [None]


def test_layers_of_the_other_family_are_left_alone() -> None:
    trace = walk([layer(REDIRECT)], packet("fd09::1"), POD)
    assert said(trace) == "pass"


# --- fact 1: nat OUTPUT comes before filter OUTPUT -----------------------------------------------


def test_filter_output_sees_the_translated_destination_and_port() -> None:
    assert verdict(
        f"{REDIRECT}\nfilter OUTPUT -d 127.0.0.1 -p tcp -m tcp --dport 15001 -j DROP"
    ) == ("drop")


def test_filter_output_sees_a_local_destination_after_redirect() -> None:
    assert verdict(f"{REDIRECT}\nfilter OUTPUT -m addrtype --dst-type LOCAL -j DROP") == "drop"


def test_the_out_interface_stays_the_old_one_until_postrouting() -> None:
    assert verdict(f"{REDIRECT}\nfilter OUTPUT -o lo -j DROP") == "redirect:15001"
    assert verdict(f"{REDIRECT}\nfilter OUTPUT -o eth0 -j DROP") == "drop"
    assert verdict(f"{REDIRECT}\nmangle POSTROUTING -o lo -j DROP") == "drop"
    assert verdict(f"{REDIRECT}\nmangle POSTROUTING -o eth0 -j DROP") == "redirect:15001"


# --- fact 2: the loopback hop --------------------------------------------------------------------


@pytest.mark.parametrize(
    "chain",
    ["raw PREROUTING", "mangle PREROUTING", "mangle INPUT", "filter INPUT", "security INPUT"],
)
def test_every_table_of_the_loopback_hop_can_drop(chain: str) -> None:
    drop = f"{chain} -s 10.1.0.2 -i lo -j DROP"
    assert verdict(f"{REDIRECT}\n{drop}") == "drop"
    assert verdict(drop, packet("10.1.0.2")) == "drop"
    assert verdict(drop) == "pass"


def test_nat_prerouting_and_input_are_not_walked_on_the_loopback_hop() -> None:
    again = "nat PREROUTING -p tcp -j REDIRECT --to-ports 9\nnat INPUT -j SNAT --to-source 10.1.0.9"
    assert verdict(f"{REDIRECT}\n{again}") == "redirect:15001"
    assert verdict(again, packet("10.1.0.2")) == "pass"


def test_own_address_leaves_by_lo() -> None:
    trace = walk([], packet("10.1.0.2"), POD)
    assert (trace.packet.out_interface, str(trace.packet.source)) == ("lo", "10.1.0.2")


def test_tproxy_on_the_loopback_hop_redirects() -> None:
    rule = "mangle PREROUTING -i lo -p tcp -j TPROXY --on-port 15006 --tproxy-mark 0x539/0xffffffff"
    assert verdict(rule, packet("10.1.0.2")) == "redirect:15006"


# --- fact 3: marks, state, owner -----------------------------------------------------------------


def test_marks_and_state_survive_the_loopback_hop() -> None:
    rules = """
        nat OUTPUT -j MARK --set-xmark 0x7/0xffffffff
        nat OUTPUT -j CONNMARK --set-xmark 0x9/0xffffffff
        nat OUTPUT -p tcp -j REDIRECT --to-ports 15001
        filter INPUT -m mark --mark 0x7 -m connmark --mark 0x9 -m conntrack --ctstate NEW -j DROP
    """
    assert verdict(rules) == "drop"


def test_owner_matches_in_postrouting_and_not_behind_the_loopback_hop() -> None:
    assert verdict("mangle POSTROUTING -m owner --uid-owner 1000 -j DROP") == "drop"
    owner = "filter INPUT -m owner --uid-owner 1000 -j DROP"
    assert verdict(f"{REDIRECT}\n{owner}") == "redirect:15001"
    # Without a socket a negated condition holds, and only that.
    owner = "filter INPUT -m owner ! --uid-owner 1000 -j DROP"
    assert verdict(f"{REDIRECT}\n{owner}") == "drop"


def test_accept_ends_only_its_own_table() -> None:
    assert verdict("mangle OUTPUT -j ACCEPT\nfilter OUTPUT -j DROP") == "drop"
    assert verdict("filter OUTPUT -j ACCEPT\nfilter OUTPUT -j DROP") == "pass"


@pytest.mark.parametrize(
    ("target", "old", "new"),
    [
        ("MARK --set-xmark 0x1/0xf", 0x35, 0x31),
        ("MARK --set-xmark 0x4/0x0", 0x35, 0x31),
        ("MARK --set-mark 0x40/0xf", 0x35, 0x70),
        ("MARK --and-mark 0x5", 0x35, 0x5),
        ("MARK --or-mark 0x40", 0x35, 0x75),
        ("MARK --xor-mark 0x1", 0x35, 0x34),
    ],
)
def test_mark_sets_bits_under_its_mask(target: str, old: int, new: int) -> None:
    rules = f"mangle OUTPUT -j {target}\nfilter OUTPUT -m mark --mark {new:#x} -j DROP"
    assert verdict(rules, packet(mark=old)) == "drop"


def test_connmark_saves_and_restores_under_masks() -> None:
    rules = """
        mangle OUTPUT -j CONNMARK --save-mark --nfmask 0xff --ctmask 0xffffffff
        mangle OUTPUT -j MARK --set-xmark 0x0/0xffffffff
        mangle OUTPUT -j CONNMARK --restore-mark --nfmask 0xffffffff --ctmask 0xf
        filter OUTPUT -m mark --mark 0x9 -m connmark --mark 0x39 -j DROP
    """
    assert verdict(rules, packet(mark=0x539)) == "drop"


def test_connmark_before_conntrack_neither_matches_nor_marks() -> None:
    assert verdict("raw OUTPUT -m connmark ! --mark 0x1 -j DROP") == "pass"
    rules = "raw OUTPUT -j CONNMARK --set-xmark 0x1/0xffffffff"
    assert verdict(f"{rules}\nfilter OUTPUT -m connmark --mark 0x1 -j DROP") == "pass"


# --- fact 4: ctstate DNAT ------------------------------------------------------------------------


def test_ctstate_dnat_only_if_the_translation_changed_something() -> None:
    drop = "filter INPUT -m conntrack --ctstate DNAT -j DROP"
    assert verdict(f"{REDIRECT}\n{drop}") == "drop"
    assert verdict(f"{REDIRECT}\n{drop}", packet("127.0.0.1", 15001)) == "redirect:15001"


def test_ctstate_snat_after_a_changed_source() -> None:
    rules = (
        "nat POSTROUTING -j SNAT --to-source {}\nfilter INPUT -m conntrack --ctstate SNAT -j DROP"
    )
    assert verdict(rules.format("10.1.0.9"), packet("10.1.0.2")) == "drop"
    assert verdict(rules.format("10.1.0.2"), packet("10.1.0.2")) == "pass"


def test_state_before_conntrack_is_invalid_and_without_it_untracked() -> None:
    assert verdict("raw OUTPUT -m conntrack --ctstate INVALID -j DROP") == "drop"
    assert verdict("filter OUTPUT -m state --state NEW -j DROP") == "drop"
    untracked = "filter OUTPUT -m conntrack --ctstate UNTRACKED -j DROP"
    assert verdict(f"raw OUTPUT -j CT --notrack\n{untracked}") == "drop"


def test_an_untracked_packet_meets_no_nat_rule() -> None:
    assert verdict(f"raw OUTPUT -j NOTRACK\n{REDIRECT}") == "pass"
    assert verdict(f"raw OUTPUT -j CT --zone 2\n{REDIRECT}") == "redirect:15001"


def test_the_first_ct_rule_decides() -> None:
    assert verdict(f"raw OUTPUT -j CT --zone 1\nraw OUTPUT -j CT --notrack\n{REDIRECT}") == (
        "redirect:15001"
    )


def test_nat_is_for_new_connections() -> None:
    known = packet(connection=Connection(state="ESTABLISHED"))
    assert verdict(REDIRECT, known) == "pass"


# --- fact 5: address types -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("to", "kind", "expected"),
    [
        ("10.1.0.2", "LOCAL", "drop"),
        ("127.0.0.9", "LOCAL", "drop"),
        ("10.1.0.2", "UNICAST", "pass"),
        ("10.9.9.9", "UNICAST", "drop"),
        ("10.1.0.255", "BROADCAST", "drop"),
        ("224.0.0.1", "MULTICAST", "drop"),
        ("fd01::2", "UNICAST", "drop"),
        ("::1", "UNICAST", "drop"),
        ("fd01::2", "LOCAL", "drop"),
        ("fd09::1", "LOCAL", "pass"),
        ("fd09::1", "LOCAL,UNICAST", "pass"),  # IPv6 wants all of them
        ("10.9.9.9", "LOCAL,UNICAST", "drop"),  # IPv4 any
    ],
)
def test_address_type(to: str, kind: str, expected: str) -> None:
    assert verdict(f"filter OUTPUT -m addrtype --dst-type {kind} -j DROP", packet(to)) == expected


# --- fact 6: the missing interface is an empty name ----------------------------------------------


@pytest.mark.parametrize(
    ("rule", "inbound", "expected"),
    [
        ("! -i eth0", False, "drop"),
        ("-i eth0", False, "pass"),
        ("! -o lo", True, "drop"),
        ("-o lo", True, "pass"),
        ("-i eth+", True, "drop"),
        ("-i e+", False, "pass"),
    ],
)
def test_missing_interface_is_an_empty_name(rule: str, inbound: bool, expected: str) -> None:
    rules = f"mangle PREROUTING -j X\nmangle OUTPUT -j X\nmangle X {rule} -j DROP"
    sent = packet("10.1.0.2", source="10.1.0.7") if inbound else packet()
    assert verdict(rules, sent, inbound=inbound) == expected


# --- fact 7: TPROXY, goto, policies --------------------------------------------------------------

TPROXY = "mangle PREROUTING -p tcp -j TPROXY --on-port 15006 --tproxy-mark 0x539/0xffffffff"


def arriving(**fields: Any) -> Packet:
    return packet("10.1.0.2", source="10.1.0.7", uid=None, **fields)


def test_tproxy_redirects_and_its_mark_is_seen_at_input() -> None:
    assert verdict(TPROXY, arriving(), inbound=True) == "redirect:15006"
    marked = "filter INPUT -m mark --mark 0x539 -j DROP"
    assert verdict(f"{TPROXY}\n{marked}", arriving(), inbound=True) == "drop"


def test_tproxy_of_a_foreign_address_needs_a_local_route() -> None:
    sent = packet("10.9.9.9", source="10.1.0.7", in_interface="eth0")
    forwarding = replace(POD, forwarding=True)
    assert verdict(TPROXY, sent, inbound=True, host=forwarding) == "drop"
    routed = replace(POD, local_marks=(LocalMark(0x539),))
    assert verdict(TPROXY, sent, inbound=True, host=routed) == "redirect:15006"


def test_goto_returns_to_the_caller_of_the_last_jump() -> None:
    rules = """
        filter OUTPUT -j A
        filter OUTPUT -j DROP
        filter A -g B
        filter A -j ACCEPT
        filter B -j RETURN
    """
    assert verdict(rules) == "drop"


def test_goto_from_a_builtin_chain_returns_to_the_policy() -> None:
    rules = "filter OUTPUT -g B\nfilter OUTPUT -j DROP\nfilter B -p udp -j DROP"
    assert verdict(rules) == "pass"
    assert verdict(rules, policy="filter OUTPUT") == "drop"


def test_return_in_a_builtin_chain_means_the_policy() -> None:
    rules = "filter OUTPUT -j RETURN\nfilter OUTPUT -j ACCEPT"
    assert verdict(rules, policy="filter OUTPUT") == "drop"


def test_a_policy_of_drop_counts_without_rules() -> None:
    assert verdict("", policy="filter OUTPUT") == "drop"
    assert verdict(REDIRECT, policy="filter INPUT") == "drop"


def test_a_chain_that_ends_goes_on_behind_the_jump() -> None:
    rules = "filter OUTPUT -j A\nfilter OUTPUT -j DROP\nfilter A -p udp -j ACCEPT"
    assert verdict(rules) == "drop"


# --- fact 9: REDIRECT on arrival -----------------------------------------------------------------


def test_redirect_on_arrival_takes_the_address_of_the_interface() -> None:
    rules = "nat PREROUTING -p tcp -j REDIRECT --to-ports 15006"
    local = "filter INPUT -d 10.1.0.2 -p tcp -m tcp --dport 15006 -j DROP"
    assert verdict(rules, arriving(), inbound=True) == "redirect:15006"
    assert verdict(f"{rules}\n{local}", arriving(), inbound=True) == "drop"


def test_redirect_on_an_interface_without_an_address_drops() -> None:
    rules = "nat PREROUTING -p tcp -j REDIRECT --to-ports 15006"
    assert verdict(rules, arriving(in_interface="net7"), inbound=True) == "drop"


def test_arriving_packets_have_no_owner() -> None:
    rules = "nat PREROUTING -m owner --uid-owner 1000 -j REDIRECT"
    sent = packet("10.1.0.2", source="10.1.0.7", uid=1000)
    assert verdict(rules, sent, inbound=True) == "pass"


# --- fact 11: several flavours at once -----------------------------------------------------------


def test_the_first_nat_table_that_translates_wins() -> None:
    first = layer("nat OUTPUT -p tcp -m tcp --dport 80 -j REDIRECT --to-ports 1")
    second = layer("nat OUTPUT -p tcp -j REDIRECT --to-ports 2", backend="iptables-legacy")
    assert said(walk([first, second], packet(), POD)) == "redirect:1"
    assert said(walk([second, first], packet(), POD)) == "redirect:2"
    assert said(walk([first, second], packet(port=81), POD)) == "redirect:2"


def test_accept_in_one_nat_table_does_not_exempt_from_another() -> None:
    first = layer("nat OUTPUT -j ACCEPT")
    second = layer(REDIRECT, backend="iptables-legacy")
    assert said(walk([first, second], packet(), POD)) == "redirect:15001"


def test_a_drop_in_any_layer_drops() -> None:
    drop = layer("filter OUTPUT -j DROP", backend="iptables-legacy")
    assert said(walk([layer("filter OUTPUT -j ACCEPT"), drop], packet(), POD)) == "drop"


def test_our_nftables_table_is_asked_first_for_nat() -> None:
    ours = layer("nat OUTPUT -p tcp -j REDIRECT --to-ports 1", backend="nftables")
    assert said(walk([layer(REDIRECT), ours], packet(), POD)) == "redirect:1"


def test_iptables_nft_has_its_security_table_behind_that_of_legacy() -> None:
    nft = layer("security OUTPUT -m mark --mark 0x1 -j DROP")
    legacy = layer("security OUTPUT -j MARK --set-xmark 0x1/0x1", backend="iptables-legacy")
    assert said(walk([nft, legacy], packet(), POD)) == "drop"


# --- routing -------------------------------------------------------------------------------------


def test_loopback_may_not_leave_the_host() -> None:
    rules = "nat OUTPUT -p tcp -j DNAT --to-destination 10.5.5.5"
    assert verdict(rules, packet("127.0.0.1")) == "drop"
    permitted = replace(POD, route_localnet=True)
    assert verdict(rules, packet("127.0.0.1"), host=permitted) == "drop"  # by whoever receives it
    rules = f"{rules}\nnat POSTROUTING -j MASQUERADE"
    assert verdict(rules, packet("127.0.0.1")) == "drop"
    assert verdict(rules, packet("127.0.0.1"), host=permitted) == "redirect:80"
    rules = "nat OUTPUT -p tcp -j DNAT --to-destination fd05::5"
    assert verdict(rules, packet("::1")) == "drop"
    rules = f"{rules}\nnat POSTROUTING -j MASQUERADE"
    assert verdict(rules, packet("::1")) == "redirect:80"


@pytest.mark.parametrize(("family", "to"), [("10.1.0.2", "127.0.0.1"), ("fd01::2", "::1")])
def test_loopback_cannot_be_reached_from_outside(family: str, to: str) -> None:
    source = "10.1.0.7" if "." in to else "fd01::7"
    rules = f"nat PREROUTING -p tcp -j DNAT --to-destination {to}"
    assert verdict(rules, packet(family, source=source), inbound=True) == "drop"


def test_what_is_not_for_this_host_is_forwarded_or_dropped() -> None:
    sent = packet("10.9.9.9", source="10.1.0.7")
    assert verdict("", sent, inbound=True) == "drop"
    forwarding = replace(POD, forwarding=True)
    assert verdict("", sent, inbound=True, host=forwarding) == "pass"
    assert verdict("filter FORWARD -j DROP", sent, inbound=True, host=forwarding) == "drop"
    assert verdict("filter INPUT -j DROP", sent, inbound=True, host=forwarding) == "pass"


def test_a_mark_set_in_mangle_output_reroutes() -> None:
    rules = "mangle OUTPUT -j MARK --set-xmark 0x539/0xffffffff\nfilter INPUT -i lo -j DROP"
    assert verdict(rules) == "pass"
    assert verdict(rules, host=replace(POD, local_marks=(LocalMark(0x539),))) == "drop"


# --- conditions ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        ("-d 10.96.0.0/12", True),
        ("! -d 10.96.0.0/12", False),
        ("-d 10.0.0.1/255.0.0.255", True),
        ("-s 10.1.0.2", True),
        ("-p udp", False),
        ("! -p udp", True),
        ("-p 6", True),
        ("-p tcp -m tcp --dport 80", True),
        ("-p tcp -m tcp --dport 70:90", True),
        ("-p tcp -m tcp --dport 81:", False),
        ("-p tcp -m tcp ! --dport 80", False),
        ("-p tcp -m tcp --sport 53", False),
        ("-p tcp -m tcp --sport 1024:65535", True),
        ("-p tcp -m tcp --tcp-flags FIN,SYN,RST,ACK SYN", True),
        ("-p tcp -m tcp --tcp-flags SYN,ACK ACK", False),
        ("-p tcp -m multiport --dports 22,70:90", True),
        ("-p tcp -m multiport ! --dports 22,80", False),
        ("-p tcp -m multiport --sports 80", False),
        ("-p tcp -m multiport --ports 80", True),
        ("-m owner --uid-owner 1000", True),
        ("-m owner --uid-owner 900-1000", True),
        ("-m owner ! --uid-owner 1000", False),
        ("-m owner --gid-owner 3000", True),
        ("-m owner ! --gid-owner 1 ! --gid-owner 3000", False),
        ("-m owner --socket-exists", True),
        ("-m mark --mark 0x1/0x1", True),
        ("-m mark --mark 0x5", True),
        ("-m mark ! --mark 0x4/0x4", False),
        ("-m comment --comment anything", True),
        ("-m iprange --dst-range 10.96.0.0-10.96.0.9", True),
        ("-m statistic --mode random --probability 1.0", True),
        ("-f", False),
    ],
)
def test_condition(condition: str, expected: bool) -> None:
    sent = packet(gid=3000, mark=5)
    found = verdict(f"filter OUTPUT {condition} -j DROP", sent)
    assert found == ("drop" if expected else "pass")


def test_a_source_port_that_may_be_either_cannot_be_foreseen() -> None:
    rule = "filter OUTPUT -p tcp -m tcp --sport 40000:50000 -j DROP"
    assert verdict(rule) == "maybe"
    assert verdict(rule, packet(sport=40001)) == "drop"


def test_an_unknown_source_is_one_that_no_rule_names() -> None:
    sent = packet("10.1.0.2", uid=None)
    assert verdict("filter INPUT -s 10.1.0.7 -j DROP", sent, inbound=True) == "pass"
    assert verdict("filter INPUT ! -s 10.1.0.7 -j DROP", sent, inbound=True) == "drop"


# --- what nobody can foresee ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "match",
    [
        "-m statistic --mode random --probability 0.5",
        "-m limit --limit 1/sec",
        "-m mac --mac-source 00:11:22:33:44:55",
        "-m set --match-set x dst",
        "-m rpfilter",
        "-m tcp --tcp-option 5",
        "-m novel --frobnicate yes",
    ],
)
def test_an_unforeseeable_match_gives_maybe(match: str) -> None:
    assert verdict(f"filter OUTPUT -p tcp {match} -j DROP") == "maybe"


def test_equal_branches_are_one_verdict() -> None:
    rules = """
        nat OUTPUT -p tcp -m statistic --mode random --probability 0.5 -j A
        nat OUTPUT -p tcp -j DNAT --to-destination 10.5.5.6:80
        nat A -p tcp -j DNAT --to-destination 10.5.5.5:80
    """
    assert verdict(rules, packet(port=443)) == "redirect:80"


def test_a_condition_that_fails_outweighs_an_unknown_one() -> None:
    assert verdict("filter OUTPUT -m limit --limit 1/sec -p udp -j DROP") == "pass"


def test_an_unknown_match_with_a_harmless_target_decides_nothing() -> None:
    trace = walk([layer("filter OUTPUT -m limit --limit 1/sec -j LOG")], packet(), POD)
    assert said(trace) == "pass"
    assert trace.steps[0].hit is Hit.MAYBE
    assert {step.branch for step in trace.steps} == {1}


def test_an_unknown_target_gives_maybe() -> None:
    assert verdict("filter OUTPUT -j NFQUEUE --queue-num 1") == "maybe"
    assert verdict("filter OUTPUT -p udp -j NFQUEUE --queue-num 1") == "pass"


def test_branches_are_labelled_and_meet_again() -> None:
    rules = "mangle OUTPUT -m limit --limit 1/sec -j A\nmangle A -p udp -j DROP\n" + REDIRECT
    trace = walk([layer(rules)], packet(), POD)
    assert said(trace) == "redirect:15001"
    assert len(trace.outcomes) == 1
    assert {step.branch for step in trace.steps} == {1, 2}
    assert "earlier branch" in [s for s in trace.steps if s.branch == 2][-1].why


def test_accept_and_pass_are_both_no_redirection() -> None:
    assert verdict("nat OUTPUT -m limit --limit 1/sec -j ACCEPT") == "pass"


# --- bounds --------------------------------------------------------------------------------------


@pytest.mark.parametrize("jump", ["-j", "-g"])
def test_a_loop_ends_as_maybe(jump: str) -> None:
    assert verdict(f"filter OUTPUT -j A\nfilter A {jump} B\nfilter B {jump} A") == "maybe"


def test_chains_that_double_end_as_maybe() -> None:
    rules = ["filter OUTPUT -j C0"]
    for depth in range(40):
        rules += [f"filter C{depth} -j C{depth + 1}"] * 2
    assert verdict("\n".join([*rules, "filter C40 -p udp -j DROP"])) == "maybe"


def test_too_many_branches_end_as_maybe() -> None:
    rule = "mangle OUTPUT -m limit --limit 1/sec -j MARK --set-xmark {0:#x}/{0:#x}"
    rules = "\n".join(rule.format(1 << bit) for bit in range(10))
    trace = walk([layer(rules)], packet(), POD)
    assert said(trace) == "maybe"
    assert max(step.branch for step in trace.steps) <= MAX_BRANCHES


def test_ten_thousand_rules_are_walked_and_summed_up() -> None:
    rules = [
        f"nat OUTPUT -d 10.{n >> 8}.{n & 255}.0/24 -p tcp -m tcp --dport 443 -j RETURN"
        for n in range(10_000)
    ]
    loaded = layer("\n".join([*rules, REDIRECT]))
    trace = walk([loaded], packet(), POD)
    assert said(trace) == "redirect:15001"
    assert len(to_text(trace).splitlines()) < 60
    assert len(to_text(trace, all_rules=True).splitlines()) > 10_000


def test_a_hundred_endpoints_behind_one_service_are_one_verdict_or_maybe() -> None:
    rules = ["nat OUTPUT -d 10.96.0.1 -p tcp -m tcp --dport 80 -j SVC"]
    for n in range(20):
        chance = f"-m statistic --mode random --probability {1 / (20 - n):.11f}" if n < 19 else ""
        rules += [
            f"nat SVC {chance} -j SEP{n}",
            f"nat SEP{n} -p tcp -j DNAT --to-destination 10.2.0.{n + 1}:8080",
        ]
    assert verdict("\n".join(rules)) == "redirect:8080"


# --- for people and machines ---------------------------------------------------------------------


def test_json_has_verdict_port_and_steps() -> None:
    document = to_json(walk([layer(REDIRECT)], packet(), POD))
    assert (document["verdict"], document["port"]) == ("redirect", 15001)
    steps = document["steps"]
    assert isinstance(steps, list)
    assert steps[0] == {
        "hook": "OUTPUT",
        "family": "ipv4",
        "backend": "iptables-nft",
        "table": "nat",
        "chain": "OUTPUT",
        "rule": 1,
        "text": "-p tcp -j REDIRECT --to-ports 15001",
        "hit": "yes",
        "why": "redirected to 127.0.0.1:15001",
        "setting": None,
        "branch": 1,
    }


@pytest.mark.parametrize(
    ("rules", "sentence"),
    [
        (REDIRECT, "is redirected to port 15001 by nat OUTPUT rule 1."),
        ("nat OUTPUT -j RETURN", "is not redirected: nat OUTPUT rule 1 exempts it."),
        ("filter OUTPUT -d 10.0.0.0/8 -j DROP", "is dropped by filter OUTPUT rule 1."),
        (
            "filter OUTPUT -d 10.0.0.0/8 -j X\nfilter X -j DROP",
            "is dropped by filter OUTPUT rule 1.",
        ),
        ("filter OUTPUT -p udp -j DROP", "is not redirected: no rule applies to it."),
    ],
)
def test_the_verdict_is_a_sentence(rules: str, sentence: str) -> None:
    trace = walk([layer(rules)], packet(), POD)
    assert summary(trace) == f"TCP to 10.96.0.1:80 from uid 1000 {sentence}"


def test_what_else_is_known_of_the_sender_is_said() -> None:
    trace = walk(
        [layer("nat OUTPUT -m mark --mark 0x539 -j RETURN")], packet(gid=7, mark=1337), POD
    )
    said = "TCP to 10.96.0.1:80 from uid 1000 gid 7 with mark 0x539 is not redirected: "
    assert summary(trace) == said + "nat OUTPUT rule 1 exempts it."


def test_a_maybe_says_what_decides_and_between_what() -> None:
    rule = f"nat OUTPUT -m limit --limit 1/sec -j RETURN\n{REDIRECT}"
    assert summary(walk([layer(rule)], packet(), POD)) == (
        "TCP to 10.96.0.1:80 from uid 1000 may go several ways: nat OUTPUT rule 1 decides, and "
        "nobody can foresee how. It is redirected to port 15001 by nat OUTPUT rule 2, or is not "
        "redirected: nat OUTPUT rule 1 exempts it."
    )


def test_a_service_of_several_endpoints_is_told_with_each_of_them() -> None:
    chance = "nat OUTPUT -d 10.96.0.1/32 -m statistic --mode random --probability 0.5 -j X"
    first, second = (f"-p tcp -j DNAT --to-destination 10.0.0.{n}:8080" for n in (1, 2))
    trace = walk([layer(f"{chance}\nnat OUTPUT {second}\nnat X {first}")], packet(), POD)
    assert said(trace) == "redirect:8080"
    assert summary(trace) == (
        "TCP to 10.96.0.1:80 from uid 1000 may go several ways: nat OUTPUT rule 1 decides, and "
        "nobody can foresee how. It is redirected to 10.0.0.2:8080 by nat OUTPUT rule 2, or is "
        "redirected to 10.0.0.1:8080 by nat OUTPUT rule 1."
    )


@pytest.mark.parametrize(
    ("name", "expected"), [("localhost_nps_accepted_pkts", "drop"), ("mine", "maybe")]
)
def test_a_counter_matches_where_it_has_no_quota(name: str, expected: str) -> None:
    assert verdict(f"filter OUTPUT -m nfacct --nfacct-name {name} -j DROP") == expected


def test_a_packet_of_two_families_is_refused() -> None:
    with pytest.raises(ValueError, match="different families"):
        packet("10.0.0.1", source="fd00::1")


def test_ipv6_is_walked_like_ipv4() -> None:
    loaded = layer(REDIRECT, family=Family.IPV6)
    trace = walk([loaded], packet("fd09::1"), POD)
    assert said(trace) == "redirect:15001"
    assert trace.outcomes[0].packet.destination == ipaddress.ip_address("::1")
