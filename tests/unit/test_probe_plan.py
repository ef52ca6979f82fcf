"""What a probe attempts, and what it concludes. The packet walk is the judge of the choice."""

import errno
import ipaddress
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.capture.probing.attempt import (
    Attempt,
    Facts,
    Observation,
    Outcome,
    ProbePlan,
    Way,
)
from agent.capture.probing.plan import MAX_RANGES, choose
from agent.capture.probing.space import common, minus, pick, size
from agent.capture.probing.verdict import Judge
from agent.explain.walk import Layer, walk
from agent.kernel.probe_net import Road, Surroundings
from agent.kernel.sockets import KernelSocket, Owner
from agent.model.host import Host, Interface, Route
from agent.model.packet import Packet
from agent.model.plan import plan
from agent.model.ruleset import Family
from agent.model.settings import Settings, parse
from agent.model.values import Span
from tests.support.walks import said

POD_ADDRESSES = tuple(
    ipaddress.ip_interface(text)
    for text in ("127.0.0.1/8", "10.1.0.2/24", "::1/128", "fe80::2/64", "fd01::2/64", "::6/128")
)
FACTS = Facts(
    surroundings=Surroundings(
        addresses=POD_ADDRESSES,
        networks=tuple(address.network for address in POD_ADDRESSES),
        interfaces=frozenset({"lo", "eth0"}),
    )
)
ANYWHERE = ipaddress.ip_address("0.0.0.0")
ANYWHERE_V6 = ipaddress.ip_address("::")
NOBODY = (ANYWHERE, 0)

EVERYTHING: dict[str, Any] = {
    "inbound_ports_include": "*",
    "inbound_ports_exclude": "15020,15021",
    "outbound_ip_ranges_include": "*",
    "outbound_ports_exclude": "15020",
    "enable_ipv6": True,
}


def chosen(facts: Facts = FACTS, *, seed: int = 1, **raw: Any) -> ProbePlan:
    return choose(parse(raw), facts, random.Random(seed))


def attempt_of(found: ProbePlan, name: str) -> Attempt:
    return next(a for a in found.attempts if a.name == name)


def names(found: ProbePlan) -> set[str]:
    return {attempt.name for attempt in found.attempts}


def why_not(found: ProbePlan) -> dict[str, str]:
    return {result.name: result.detail for result in found.skipped}


def listener(port: int, address: str = "0.0.0.0", **fields: Any) -> KernelSocket:
    values = {"protocol": "tcp", "remote": NOBODY, "uid": 1337, "inode": 1, **fields}
    return KernelSocket(local=(ipaddress.ip_address(address), port), **values)


def listening(*sockets: KernelSocket) -> Facts:
    return replace(FACTS, listeners=sockets)


# --- the settings leave no doubt about an attempt -------------------------------------------------


def host_of(found: ProbePlan) -> Host:
    links = tuple(ipaddress.ip_interface(f"{x.pod}/{x.prefix}") for x in found.links)
    interfaces = (Interface("eth0", POD_ADDRESSES[1:5:3]), Interface(found.name, links))
    routes = [Route(ipaddress.ip_network(text), "eth0") for text in ("0.0.0.0/0", "::/0")]
    routes += [Route(address.network, found.name) for address in links]
    routes += [Route(ipaddress.ip_network(r.address), found.name) for r in found.roads()]
    return Host(interfaces=interfaces, routes=tuple(routes))


def walked(settings: Settings, found: ProbePlan, attempt: Attempt) -> str:
    """Return the verdict of the planned rules on an attempt."""
    link = found.link(attempt.family)
    inbound = attempt.way is Way.IN
    source = link.far if inbound else link.pod
    packet = Packet(
        protocol=attempt.protocol,
        destination=attempt.destination,
        dport=attempt.port,
        source=None if attempt.local else source,
        sport=40000,
        uid=attempt.owner.uid if attempt.owner else None,
        gid=attempt.owner.gid if attempt.owner else None,
        in_interface=found.name if inbound else "",
    )
    layer = Layer("iptables-nft", plan(settings).rulesets[attempt.family])
    return said(walk([layer], packet, host_of(found), inbound=inbound))


def assert_agrees(settings: Settings, found: ProbePlan) -> None:
    for attempt in found.attempts:
        if attempt.way is Way.BACK:
            continue
        wanted = "pass" if attempt.lands is None else f"redirect:{attempt.lands}"
        assert walked(settings, found, attempt) == wanted, attempt


PORT = st.sampled_from(["53", "80", "443", "8080", "20000-32000", "15006", "1-65535", "15008"])
PORTS = st.lists(PORT, max_size=3).map(",".join)
NETWORK = st.sampled_from(
    [
        *("10.0.0.0/8", "10.1.0.0/24", "10.1.0.2/32", "192.0.2.0/24", "198.51.100.0/24"),
        *("203.0.113.0/24", "0.0.0.0/1", "127.0.0.0/8", "169.254.0.0/16", "10.96.0.10/32"),
    ]
)
NETWORK_V6 = st.sampled_from(
    ["2001:db8::/32", "fd00::/8", "fd01::/64", "fd01::2/128", "::/1", "fe80::/10", "::1/128"]
)
NETWORKS = st.lists(NETWORK | NETWORK_V6, max_size=4).map(",".join)
GROUPS = st.lists(st.sampled_from(["0", "1000", "1337", "2000-3000"]), max_size=3).map(",".join)
RAW = st.fixed_dictionaries(
    {"enable_ipv6": st.just(True)},
    optional={
        "inbound_interception_mode": st.sampled_from(["REDIRECT", "TPROXY"]),
        "inbound_ports_include": st.just("*") | PORTS,
        "inbound_ports_exclude": PORTS,
        "outbound_ip_ranges_include": st.just("*") | NETWORKS,
        "outbound_ip_ranges_exclude": NETWORKS,
        "outbound_ports_include": PORTS,
        "outbound_ports_exclude": PORTS,
        "owner_groups_include": st.just("*") | GROUPS,
        "owner_groups_exclude": GROUPS,
        "proxy_uid": st.sampled_from(["1337", "0-1500", "0", "1000,1337"]),
        "proxy_gid": st.sampled_from(["1337", "0-1500", "1000"]),
        "exclude_interfaces": st.sampled_from(["", "eth1", "icpt-probe", "icpt-probe,icpt-probe1"]),
        "redirect_dns": st.booleans(),
        "capture_all_dns": st.booleans(),
        "dns_servers_v4": st.sampled_from(["", "10.96.0.10", "127.0.0.53", "10.1.0.2,10.96.0.10"]),
        "dns_servers_v6": st.sampled_from(["", "fd96::10", "fe80::1"]),
        "drop_invalid": st.booleans(),
        "host_ipv4_loopback_cidr": st.sampled_from(["127.0.0.1/32", "127.0.0.0/8"]),
    },
)


@given(raw=RAW, seed=st.integers(0, 1000))
def test_the_planned_rules_do_to_every_attempt_what_it_expects(
    raw: dict[str, Any], seed: int
) -> None:
    settings = parse(raw)
    found = choose(settings, FACTS, random.Random(seed))
    assert_agrees(settings, found)
    every = [*names(found), *why_not(found)]
    assert len(every) == len(set(every)) == len(found.attempts) + len(found.skipped)


@given(raw=RAW, seed=st.integers(0, 1000))
def test_no_attempt_goes_where_the_probe_would_leave_the_node_or_meet_the_pod_itself(
    raw: dict[str, Any], seed: int
) -> None:
    found = choose(parse(raw), FACTS, random.Random(seed))
    own = {address.ip for address in POD_ADDRESSES}
    roads = {road.address for road in found.roads()}
    for attempt in found.attempts:
        if attempt.way is Way.OUT:
            assert (attempt.destination in roads) != attempt.local
            assert attempt.local or attempt.destination not in own
            assert not attempt.destination.is_multicast
        assert 1 <= attempt.port <= 65535
    for link in found.links:
        ends = ipaddress.ip_network(f"{link.pod}/{link.prefix}", strict=False)
        assert link.far in ends
        assert not any(ends.overlaps(address.network) for address in POD_ADDRESSES[:2])


# --- what is chosen -------------------------------------------------------------------------------


def test_a_whole_capture_is_proved_in_both_families_and_directions() -> None:
    found = chosen(**EVERYTHING, redirect_dns=True, capture_all_dns=True)
    for family in Family:
        assert names(found) >= {
            *(f"outbound {family}", f"exempt {family} proxy uid", f"exempt {family} proxy gid"),
            *(f"exempt {family} port", f"inbound {family}", f"exempt {family} inbound port"),
            *(f"dns {family} udp", f"dns {family} tcp", f"exempt {family} dns"),
        }
    assert not found.skipped


def test_without_ipv6_nothing_of_it_is_attempted() -> None:
    found = chosen(**{**EVERYTHING, "enable_ipv6": False})
    assert {attempt.family for attempt in found.attempts} == {Family.IPV4}
    assert [link.family for link in found.links] == [Family.IPV4]


def test_where_a_new_interface_cannot_have_ipv6_that_is_said() -> None:
    facts = replace(FACTS, surroundings=replace(FACTS.surroundings, ipv6=False))
    found = chosen(facts, **EVERYTHING)
    assert {attempt.family for attempt in found.attempts} == {Family.IPV4}
    assert "no IPv6" in why_not(found)["ipv6"]


def test_settings_that_capture_nothing_are_said_to_and_nothing_is_attempted() -> None:
    found = chosen()
    assert not found.attempts
    assert set(why_not(found)) == {"outbound ipv4", "inbound ipv4"}


def test_without_any_captured_group_nothing_goes_out() -> None:
    found = chosen(**{**EVERYTHING, "owner_groups_include": ""})
    assert "owner_groups_include" in why_not(found)["outbound ipv4"]
    assert "inbound ipv4" in names(found)


def test_each_included_range_is_probed_up_to_a_bound() -> None:
    ranges = ",".join(f"10.{n}.0.0/16" for n in range(2, 22))
    found = chosen(outbound_ip_ranges_include=ranges)
    outbound = [a for a in found.attempts if a.name.startswith("outbound")]
    assert len(outbound) == MAX_RANGES
    for attempt in outbound:
        assert attempt.destination in ipaddress.ip_network(attempt.name.split()[-1])


def test_what_an_exclusion_covers_whole_is_not_attempted() -> None:
    found = chosen(
        outbound_ip_ranges_include="10.2.0.0/16,10.3.0.0/16",
        outbound_ip_ranges_exclude="10.2.0.0/15",
    )
    assert "outbound ipv4 10.2.0.0/16" in why_not(found)
    assert not found.attempts


def test_loopback_ranges_are_not_attempted() -> None:
    found = chosen(outbound_ip_ranges_include="127.5.0.0/16")
    assert "outside" in why_not(found)["outbound ipv4 127.5.0.0/16"]


def test_an_included_port_is_proved_at_an_address_outside_the_included_ranges() -> None:
    found = chosen(outbound_ip_ranges_include="192.0.2.0/24", outbound_ports_include="9090")
    attempt = attempt_of(found, "outbound ipv4 by port")
    assert attempt.port == 9090
    assert attempt.destination not in ipaddress.ip_network("192.0.2.0/24")


@pytest.mark.parametrize(
    ("network", "everyone"), [("10.2.0.0/16", True), ("10.2.0.0/28", False), ("10.2.0.1/32", False)]
)
def test_only_an_address_of_many_is_led_outside_for_everyone(network: str, everyone: bool) -> None:
    found = chosen(outbound_ip_ranges_include=network)
    destination = attempt_of(found, f"outbound ipv4 {network}").destination
    assert found.roads() == (Road(destination, everyone),)


def test_a_live_proxy_is_not_made_to_call_an_address_that_may_be_somebodys() -> None:
    found = chosen(listening(listener(15001)), outbound_ip_ranges_include="10.2.0.1/32,10.3.0.0/16")
    assert "10.2.0.1" in why_not(found)["outbound ipv4 10.2.0.1/32"]
    assert attempt_of(found, "outbound ipv4 10.3.0.0/16").live


@pytest.mark.parametrize(
    ("found", "live"),
    [
        (listener(15001), {Family.IPV4}),
        (listener(15001, "127.0.0.1"), {Family.IPV4}),
        (listener(15001, "10.1.0.2"), set()),
        (listener(15001, "::"), {Family.IPV6}),
        (listener(15001, "::", dual=True), {Family.IPV4, Family.IPV6}),
        (listener(15001, "::1"), {Family.IPV6}),
        (listener(15001, protocol="udp"), set()),
        (listener(15006), set()),
    ],
)
def test_who_listens_is_looked_at_by_family_and_address(
    found: KernelSocket, live: set[Family]
) -> None:
    attempts = chosen(listening(found), **EVERYTHING).attempts
    outbound = {a.family for a in attempts if a.name.startswith("outbound") and a.live}
    assert outbound == live


def test_inbound_takes_a_port_on_which_nobody_listens() -> None:
    facts = listening(listener(8080))
    free = chosen(facts, inbound_ports_include="8080,9090")
    assert attempt_of(free, "inbound ipv4").port == 9090
    only = chosen(facts, inbound_ports_include="8080")
    assert attempt_of(only, "inbound ipv4").port == 8080


def test_inbound_goes_to_the_pods_own_address_if_it_has_one() -> None:
    found = chosen(**EVERYTHING)
    assert str(attempt_of(found, "inbound ipv4").destination) == "10.1.0.2"
    assert str(attempt_of(found, "inbound ipv6").destination) == "fd01::2"
    bare = chosen(Facts(), **EVERYTHING)
    assert attempt_of(bare, "inbound ipv4").destination == bare.link(Family.IPV4).pod


def test_tproxys_way_back_is_attempted_under_tproxy_only() -> None:
    assert "tproxy return ipv4" not in names(chosen(**EVERYTHING))
    found = chosen(**EVERYTHING, inbound_interception_mode="TPROXY")
    assert names(found) >= {"tproxy return ipv4", "tproxy return ipv6"}


def test_a_dns_server_of_the_pod_itself_needs_no_road() -> None:
    found = chosen(redirect_dns=True, dns_servers_v4="127.0.0.53,10.96.0.10")
    assert attempt_of(found, "dns ipv4 127.0.0.53 udp").local
    assert found.roads() == (Road(ipaddress.ip_address("10.96.0.10"), False),)
    assert str(attempt_of(found, "exempt ipv4 dns").destination) == "10.96.0.10"


def test_dns_is_not_attempted_where_port_53_is_excluded() -> None:
    found = chosen(redirect_dns=True, capture_all_dns=True, outbound_ports_exclude="53")
    assert "53" in why_not(found)["dns ipv4"]


def test_the_link_has_a_name_and_addresses_that_nothing_else_is_about() -> None:
    assert chosen(**EVERYTHING).name == "icpt-probe"
    assert chosen(**EVERYTHING, exclude_interfaces="icpt-probe").name == "icpt-probe1"
    crowded = Surroundings(networks=(ipaddress.ip_network("169.254.0.0/16"),))
    (link, _) = chosen(Facts(surroundings=crowded), **EVERYTHING).links
    assert link.pod in ipaddress.ip_network("198.18.0.0/15")


# --- spans ----------------------------------------------------------------------------------------

SPANS = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 8)).map(lambda t: Span(t[0], t[0] + t[1])),
    max_size=4,
)


def numbers(spans: Sequence[Span]) -> set[int]:
    return {n for span in spans for n in range(span.first, span.last + 1)}


@given(SPANS, SPANS)
def test_spans_are_sets(some: list[Span], others: list[Span]) -> None:
    assert numbers(minus(some, others)) == numbers(some) - numbers(others)
    assert numbers(common(some, others)) == numbers(some) & numbers(others)


def test_pick_takes_the_first_choice_that_has_anything() -> None:
    rng = random.Random(1)
    assert pick(rng, (), (Span(5, 5),), (Span(6, 6),)) == 5
    assert pick(rng, (), ()) is None
    assert size((Span(1, 3), Span(7, 7))) == 4


# --- what is concluded ----------------------------------------------------------------------------

GOAL = (ipaddress.ip_address("192.0.2.7"), 23456)
LOCAL = (ipaddress.ip_address("127.0.0.1"), 15001)
OUTBOUND = Attempt(
    name="outbound ipv4",
    family=Family.IPV4,
    protocol="tcp",
    way=Way.OUT,
    destination=GOAL[0],
    port=GOAL[1],
    lands=15001,
    owner=Owner(1000, 1000),
)
QUERY = replace(OUTBOUND, protocol="udp", port=53, lands=15053)
LIVE = replace(OUTBOUND, live=True)
INBOUND = replace(OUTBOUND, way=Way.IN, owner=None, lands=15006)


def verdict(
    attempt: Attempt, seen: Observation, facts: Facts = FACTS, **raw: Any
) -> tuple[Outcome, str]:
    result = Judge(parse(raw), facts, "/run/netns/web").result(attempt, seen)
    return result.outcome, result.detail


def accepted(address: str, port: int, *, uid: int = 1337, inode: int = 9) -> Observation:
    found = listener(port, address, uid=uid, inode=inode)
    return Observation(connected=True, accepted=found)


@pytest.mark.parametrize(
    ("attempt", "seen", "outcome", "says"),
    [
        (OUTBOUND, Observation(answered_by=LOCAL, arrived=LOCAL, original=GOAL), "ok", "15001"),
        (OUTBOUND, Observation(answered_by=LOCAL, arrived=LOCAL, original=LOCAL), "failed", "told"),
        (OUTBOUND, Observation(arrived=LOCAL, original=GOAL), "failed", "did not come back"),
        (
            OUTBOUND,
            Observation(answered_by=GOAL, arrived=GOAL, outside=True),
            "failed",
            "past the proxy",
        ),
        (OUTBOUND, accepted("127.0.0.1", 16001, uid=5), "failed", "16001 (uid 5) instead"),
        (OUTBOUND, Observation(error=errno.ECONNREFUSED), "failed", "refused"),
        (OUTBOUND, Observation(error=errno.EPERM), "failed", "not permitted"),
        (OUTBOUND, Observation(), "failed", "a rule drops it"),
        (OUTBOUND, Observation(unbound=errno.EADDRINUSE), "skipped", "repeat"),
        (OUTBOUND, Observation(unbound=errno.EADDRNOTAVAIL), "failed", "127.0.0.1 is missing"),
        (LIVE, accepted("127.0.0.1", 15001), "ok", "the proxy (uid 1337)"),
        (LIVE, Observation(connected=True, translated=LOCAL), "ok", "conntrack"),
        (LIVE, Observation(connected=True, translated=GOAL), "failed", "past the proxy"),
        (LIVE, Observation(connected=True), "skipped", "not provable"),
        (
            LIVE,
            Observation(error=errno.ECONNREFUSED, translated=LOCAL),
            "failed",
            "127.0.0.1:15001, which refused",
        ),
        (QUERY, Observation(translated=(LOCAL[0], 15054)), "failed", "15054 instead of 15053"),
        (replace(QUERY, live=True), Observation(translated=(LOCAL[0], 15053)), "ok", "15053"),
        (replace(QUERY, live=True), Observation(), "skipped", "not provable"),
        (INBOUND, Observation(error=errno.ECONNREFUSED), "failed", "PREROUTING"),
        (INBOUND, accepted("192.0.2.7", 23456, uid=0), "failed", "application's own socket"),
    ],
)
def test_what_must_be_captured(
    attempt: Attempt, seen: Observation, outcome: str, says: str
) -> None:
    found, detail = verdict(attempt, seen)
    assert found == outcome
    assert says in detail


@pytest.mark.parametrize(
    ("attempt", "seen", "outcome", "says"),
    [
        (OUTBOUND, Observation(answered_by=GOAL, arrived=GOAL, outside=True), "ok", "its own way"),
        (OUTBOUND, Observation(arrived=GOAL, outside=True), "failed", "did not come back"),
        (OUTBOUND, Observation(answered_by=LOCAL, arrived=LOCAL), "failed", "captured to port 150"),
        (OUTBOUND, accepted("127.0.0.1", 15001), "failed", "captured to port 15001"),
        (OUTBOUND, Observation(), "failed", "no answer"),
        (INBOUND, Observation(error=errno.ECONNREFUSED), "ok", "nobody listens"),
        (INBOUND, accepted("192.0.2.7", 23456), "ok", "the socket that listens there"),
        (INBOUND, accepted("10.1.0.2", 15006), "failed", "captured to port 15006"),
        (INBOUND, Observation(), "skipped", "no matter of the capture"),
    ],
)
def test_what_must_not_be_captured(
    attempt: Attempt, seen: Observation, outcome: str, says: str
) -> None:
    found, detail = verdict(replace(attempt, lands=None), seen)
    assert found == outcome
    assert says in detail


def test_tproxy_is_told_from_the_application_by_who_listens_and_whose_socket_it_is() -> None:
    mode: dict[str, Any] = {"inbound_interception_mode": "TPROXY"}
    seen = accepted("192.0.2.7", 23456)
    busy = listening(listener(23456))
    live = replace(INBOUND, live=True)
    exempt = replace(INBOUND, lands=None)
    assert verdict(live, seen, **mode)[0] is Outcome.OK
    assert verdict(live, seen, busy, **mode)[0] is Outcome.OK
    assert verdict(live, accepted("192.0.2.7", 23456, uid=5), busy, **mode)[0] is Outcome.FAILED
    assert verdict(live, Observation(connected=True), **mode)[0] is Outcome.OK
    assert verdict(live, Observation(connected=True), busy, **mode)[0] is Outcome.SKIPPED
    assert verdict(exempt, seen, **mode)[0] is Outcome.FAILED
    assert verdict(exempt, accepted("192.0.2.7", 23456, uid=5), busy, **mode)[0] is Outcome.OK


def test_a_listener_that_tproxy_cannot_hand_anything_to_is_named() -> None:
    facts = listening(listener(15006))
    _, detail = verdict(INBOUND, Observation(), facts, inbound_interception_mode="TPROXY")
    assert "lacks IP_TRANSPARENT" in detail


def test_advice_is_a_command_that_can_be_run_as_it_is() -> None:
    _, detail = verdict(QUERY, Observation())
    assert (
        "`intercept-agent trace --netns /run/netns/web --uid 1000 --gid 1000 --to 192.0.2.7:53 "
        "--proto udp`"
    ) in detail
