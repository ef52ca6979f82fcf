"""Which setting each rule of a capture comes from, and what captures do to packets."""

import pytest

from agent.explain.origin import setting_of
from agent.explain.render import summary
from agent.explain.walk import Layer, walk
from agent.formats.iptables_save import parse as parse_rules
from agent.formats.iptables_save import render
from agent.model.plan import plan
from agent.model.ruleset import Family, Ruleset
from agent.model.settings import KEYS, parse
from tests.support.walks import POD, packet, said

EVERYTHING: dict[str, object] = {
    "inbound_ports_include": "*",
    "inbound_ports_exclude": "15020,15021",
    "outbound_ip_ranges_include": "*",
    "outbound_ip_ranges_exclude": "10.9.0.0/16,fd99::/16",
    "outbound_ports_include": "9000",
    "outbound_ports_exclude": "15020,3306",
    "owner_groups_exclude": "2000,3000",
    "exclude_interfaces": "net1",
    "reroute_virtual_interfaces": "virt0",
    "redirect_dns": True,
    "dns_servers_v4": "10.96.0.10",
    "dns_servers_v6": "fd96::10",
    "drop_invalid": True,
    "enable_ipv6": True,
}


def loaded(values: dict[str, object], family: Family = Family.IPV4) -> Ruleset:
    """Return the rules as they are read back from the kernel."""
    return parse_rules(render(plan(parse(values)).rulesets[family]), family)


def settings_in(ruleset: Ruleset) -> set[str | None]:
    return {
        setting_of(table, chain.name, number)
        for table in ruleset.tables
        for chain in table.chains
        for number in range(1, len(chain.rules) + 1)
    }


@pytest.mark.parametrize("family", list(Family))
@pytest.mark.parametrize("mode", ["REDIRECT", "TPROXY"])
@pytest.mark.parametrize("groups", ["*", "", "2000", ",".join(map(str, range(2000, 2060)))])
@pytest.mark.parametrize("everything", [True, False])
def test_every_rule_of_a_capture_has_a_setting(
    family: Family, mode: str, groups: str, everything: bool
) -> None:
    values = {**EVERYTHING, "inbound_interception_mode": mode, "owner_groups_include": groups}
    values["capture_all_dns"] = everything
    if not everything:
        values["inbound_ports_include"] = "8080"
        values["outbound_ip_ranges_include"] = "10.96.0.0/12,fd96::/16"
    found = settings_in(loaded(values, family))
    assert None not in found
    assert found <= set(KEYS)


def test_each_setting_is_found_in_the_rules_that_it_makes() -> None:
    for key in EVERYTHING.keys() - {"enable_ipv6", "dns_servers_v6", "inbound_ports_exclude"}:
        assert key in settings_in(loaded(EVERYTHING)), key
    assert "dns_servers_v6" in settings_in(loaded(EVERYTHING, Family.IPV6))


def test_foreign_rules_have_no_setting() -> None:
    text = """*nat
:OUTPUT ACCEPT
:ISTIO_OUTPUT -
:KUBE-SERVICES -
-A OUTPUT -j KUBE-SERVICES
-A OUTPUT -m owner --uid-owner 7 -j RETURN
-A KUBE-SERVICES -d 10.96.0.1/32 -j RETURN
COMMIT
"""
    assert settings_in(parse_rules(text, Family.IPV4)) == {None}


def ask(to: str, port: int = 80, **fields: object) -> tuple[str, str]:
    layers = [Layer("iptables-legacy", loaded(EVERYTHING, f)) for f in Family]
    trace = walk(layers, packet(to, port, **fields), POD)
    return said(trace), summary(trace)


@pytest.mark.parametrize(
    ("to", "port", "fields", "found", "setting"),
    [
        ("10.96.0.1", 80, {}, "redirect:15001", "outbound_ip_ranges_include"),
        ("fd96::1", 80, {}, "redirect:15001", "outbound_ip_ranges_include"),
        ("10.96.0.1", 9000, {}, "redirect:15001", "outbound_ports_include"),
        ("10.9.1.1", 80, {}, "pass", "outbound_ip_ranges_exclude"),
        ("10.96.0.1", 3306, {}, "pass", "outbound_ports_exclude"),
        ("127.0.0.1", 80, {"uid": 1337}, "pass", "proxy_uid"),
        ("10.96.0.1", 80, {"uid": 1337}, "pass", "proxy_uid"),
        ("10.1.0.2", 80, {"uid": 1337}, "redirect:15006", "proxy_uid"),
        ("10.96.0.1", 80, {"gid": 1337}, "pass", "proxy_gid"),
        ("10.96.0.1", 80, {"gid": 3000}, "pass", "owner_groups_exclude"),
        ("10.96.0.10", 53, {}, "redirect:15053", "dns_servers_v4"),
        ("10.96.0.10", 53, {"protocol": "udp"}, "redirect:15053", "dns_servers_v4"),
    ],
)
def test_the_sentence_names_the_setting(
    to: str, port: int, fields: dict[str, object], found: str, setting: str
) -> None:
    verdict, sentence = ask(to, port, **fields)
    assert verdict == found
    assert f"({setting})" in sentence


@pytest.mark.parametrize(
    ("port", "found", "setting"),
    [
        (8080, "redirect:15006", "inbound_ports_include"),
        (15021, "pass", "inbound_ports_exclude"),
        (15008, "pass", "inbound_tunnel_port"),
    ],
)
def test_inbound_sentences_name_the_setting(port: int, found: str, setting: str) -> None:
    layers = [Layer("iptables-legacy", loaded(EVERYTHING))]
    trace = walk(layers, packet("10.1.0.2", port, source="10.1.0.7"), POD, inbound=True)
    assert said(trace) == found
    assert f"({setting})" in summary(trace)


def test_tproxy_captures_inbound_and_what_the_proxy_sends_to_itself() -> None:
    layers = [Layer("iptables-nft", loaded({**EVERYTHING, "inbound_interception_mode": "TPROXY"}))]
    inbound = walk(layers, packet("10.1.0.2", source="10.1.0.7"), POD, inbound=True)
    assert said(inbound) == "redirect:15006"
    assert said(walk(layers, packet("10.1.0.2"), POD)) == "pass"


def test_tproxy_exemption_is_named_though_it_stands_outside_nat() -> None:
    layers = [Layer("iptables-nft", loaded({**EVERYTHING, "inbound_interception_mode": "TPROXY"}))]
    trace = walk(layers, packet("10.1.0.2", 15021, source="10.1.0.7"), POD, inbound=True)
    assert said(trace) == "pass"
    assert "(inbound_ports_exclude)" in summary(trace)
