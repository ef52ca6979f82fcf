"""The stops of a connection's way, as they are drawn, from rules that are loaded."""

from datetime import UTC, datetime

from agent.explain.pod.facts import Facts
from agent.explain.pod.ways import Way, ways
from agent.model.ruleset import Family
from agent.model.state import GUARD, NamespaceState
from tests.support.walks import POD, layer

CAPTURE = """
nat OUTPUT -j ISTIO_OUTPUT
nat ISTIO_OUTPUT -m owner --uid-owner 1337 -j RETURN
nat ISTIO_OUTPUT -p tcp -j OTHERS
nat ISTIO_OUTPUT -p tcp -j REDIRECT --to-ports 15001
nat OTHERS -p udp -j ACCEPT
"""
GUARDS = "filter OUTPUT -p tcp -j ACCEPT\nfilter INPUT -p tcp -j ACCEPT"


def every_way(rules: str, guard: str = "") -> list[Way]:
    """Return the ways of connections of IPv4 through these rules."""
    loaded = {"iptables-nft": {Family.IPV4: layer(rules).ruleset}}
    if guard:
        loaded[GUARD] = {Family.IPV4: layer(guard, backend=GUARD).ruleset}
    facts = Facts(
        target="x",
        state=NamespaceState(loaded=loaded),
        host=POD,
        listeners=(),
        now=datetime(2026, 12, 1, tzinfo=UTC),
    )
    return [one for one in ways(facts) if one.family == "ipv4"]


def way(rules: str, guard: str = "", *, direction: str = "out") -> Way:
    return next(one for one in every_way(rules, guard) if one.direction == direction)


def places(found: Way) -> list[str]:
    return [f"{stop.at} {stop.number or ''}".rstrip() for stop in found.stops]


def test_rules_that_had_a_say_are_stops_and_the_others_are_counted() -> None:
    found = way(CAPTURE)
    assert places(found) == [
        "OUTPUT 1",
        "ISTIO_OUTPUT 2",
        "ISTIO_OUTPUT 3",
        "the kernel",
        "the kernel",
    ]
    assert [stop.missed for stop in found.stops] == [0, 1, 0, 0, 0]
    assert found.stops[1].why == "jumps to OTHERS, where no rule matches"
    assert found.stops[2].why == "redirected to 127.0.0.1:15001"
    assert (found.fate, found.end) == ("refused", "Nobody takes it on port 15001")


def test_proxys_own_way_is_drawn_where_a_rule_lets_it_out() -> None:
    found = way(CAPTURE, direction="proxy")
    assert places(found) == ["OUTPUT 1", "ISTIO_OUTPUT 1"]
    assert (found.start, found.end) == ("The proxy, UID 1337", "Out, as it is")


def test_nothing_loaded_is_a_way_without_stops() -> None:
    out, into = every_way("nat OUTPUT")  # there is no proxy to speak of
    assert (out.direction, into.direction) == ("out", "in")
    assert (places(out), out.fate, out.end) == ([], "direct", "Out, as it is")


def test_guard_is_one_stop_a_hook_unless_it_decides() -> None:
    passed = [stop.where for stop in way(CAPTURE, GUARDS).stops if stop.kind == "guard"]
    assert passed == ["OUTPUT filter", "INPUT filter"]
    dropped = way(CAPTURE, "filter OUTPUT -p tcp -j DROP")
    last = dropped.stops[-1]
    assert (last.kind, last.at, last.number, dropped.end) == ("rule", "OUTPUT", 1, "Dropped")


def test_policy_that_drops_is_the_last_stop() -> None:
    rules = layer("filter OUTPUT -p udp -j ACCEPT", policy="filter OUTPUT").ruleset
    state = NamespaceState(loaded={"iptables-nft": {Family.IPV4: rules}})
    now = datetime(2026, 12, 1, tzinfo=UTC)
    found = ways(Facts(target="x", state=state, host=POD, listeners=(), now=now))[0]
    assert (places(found), found.stops[-1].why, found.end) == (["OUTPUT"], "dropped", "Dropped")


def test_way_ends_where_nobody_can_foresee_it() -> None:
    chance = "nat ISTIO_OUTPUT -p tcp -m statistic --mode random --probability 0.5 -j RETURN"
    found = way(CAPTURE.replace("nat ISTIO_OUTPUT -m", f"{chance}\nnat ISTIO_OUTPUT -m"))
    assert places(found) == ["OUTPUT 1", "ISTIO_OUTPUT 1"]
    assert (found.stops[-1].sure, found.end) == (False, "Nobody can foresee it")
    assert "may go several ways" in found.summary


def test_ways_that_part_and_end_alike_are_one_way() -> None:
    chance = "nat OTHERS -p tcp -m statistic --mode random --probability 0.5 -j RETURN"
    found = way(CAPTURE + chance)
    assert found.end == "Nobody takes it on port 15001"
    assert "ISTIO_OUTPUT 3" in places(found)
