"""Settings: what is taken, what is refused and how, and that nothing else can happen."""

import ipaddress
import json
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.model.errors import InvalidSettings
from agent.model.settings import KEYS, Settings, dump, parse
from tests.support.bad_values import BAD_VALUES, PORT_LISTS
from tests.support.conformance import cases_dir, defaults

VALIDATION = json.loads((cases_dir() / "decisions.json").read_text())["validation"]["cases"]
PARSED = [case for case in VALIDATION if case["field"] != "force_iptables_binary"]


def problems(raw: Mapping[str, object]) -> tuple[str, ...]:
    with pytest.raises(InvalidSettings) as caught:
        parse(raw)
    return caught.value.problems


@pytest.mark.parametrize(("key", "value", "named", "allowed"), BAD_VALUES)
def test_bad_value_is_refused_by_one_sentence_with_setting_value_and_what_is_allowed(
    key: str, value: str, named: str, allowed: str
) -> None:
    (sentence,) = problems({key: value})
    assert sentence.startswith(f"{key}: ")
    assert named in sentence
    assert allowed in sentence
    assert "\n" not in sentence


def test_all_mistakes_are_reported_at_once() -> None:
    said = problems({"proxy_port": "0", "inbound_ports_include": "x,80,70000", "exclude": "y"})
    assert [sentence.split(":")[0] for sentence in said] == [
        "proxy_port",
        "inbound_ports_include",
        "exclude",
    ]
    assert "'x'" in said[1]
    assert "70000" in said[1]


def test_defaults_are_those_of_istio_iptables() -> None:
    assert parse(defaults()) == parse({}) == Settings()


@pytest.mark.parametrize("key", PORT_LISTS)
@pytest.mark.parametrize(
    ("text", "spans"),
    [
        ("80,443", ["80", "443"]),
        ("8000-9000", ["8000-9000"]),
        ("8000:9000", ["8000-9000"]),
        ("0-65535", ["0-65535"]),
        ("1:65535,22", ["1-65535", "22"]),
        ("5-5", ["5"]),
        ("15090,15021,", ["15090", "15021"]),
        (",,80", ["80"]),
        ("", []),
        (",", []),
    ],
)
def test_port_list_is_taken_in_order(key: str, text: str, spans: list[str]) -> None:
    assert dump(parse({key: text}))[key] == spans
    assert parse({key: text.split(",")}) == parse({key: text})


@pytest.mark.parametrize("value", [80, [80], "80", ["80"]])
def test_number_is_as_good_as_its_text(value: object) -> None:
    assert dump(parse({"inbound_ports_include": value}))["inbound_ports_include"] == ["80"]


def test_all_none_and_some_inbound_ports_are_three_different_things() -> None:
    kept = [
        parse({"inbound_ports_include": text}).inbound_ports_include for text in ("*", "", "80")
    ]
    assert [(one.everything, len(one.items), bool(one)) for one in kept] == [
        (True, 0, True),
        (False, 0, False),
        (False, 1, True),
    ]


@pytest.mark.parametrize(
    "networks",
    [
        ["0.0.0.0/0", "::/0"],
        ["10.0.0.0/8", "10.0.0.0/8"],
        ["fd00::/8", "10.1.2.3/32", "::ffff:10.0.0.0/104"],
        [f"10.{n // 250}.{n % 250}.0/24" for n in range(5000)],
    ],
    ids=["all", "twice", "both-families", "five-thousand"],
)
def test_networks_of_both_families_keep_their_order(networks: list[str]) -> None:
    raw = {"outbound_ip_ranges_include": ",".join(networks), "enable_ipv6": True}
    kept = parse(raw).outbound_ip_ranges_include
    assert kept.items == tuple(ipaddress.ip_network(network) for network in networks)


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("10.0.0.1", "10.0.0.1/32"),
        ("10.0.0.5/8", "10.0.0.0/8"),
        ("FD00::1/8", "fd00::/8"),
        ("1.2.3.4/0", "0.0.0.0/0"),
    ],
)
def test_network_is_what_the_kernel_would_make_of_it(text: str, meant: str) -> None:
    raw = {"outbound_ip_ranges_include": text, "enable_ipv6": True}
    assert dump(parse(raw))["outbound_ip_ranges_include"] == [meant]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("dns_servers_v4", "fd00::53"),
        ("dns_servers_v6", "10.0.0.53"),
        ("dns_servers_v6", "fe80::1%a"),
    ],
)
def test_resolver_of_the_other_family_is_refused(key: str, value: str) -> None:
    (sentence,) = problems({key: value})
    assert key in sentence
    assert repr(value) in sentence


def test_ipv6_network_is_refused_where_ipv6_is_off_since_it_would_not_be_captured() -> None:
    (sentence,) = problems({"outbound_ip_ranges_include": "10.0.0.0/8,fd00::/8"})
    assert "outbound_ip_ranges_include" in sentence
    assert "fd00::/8" in sentence
    assert "--enable-ipv6 true" in sentence


@pytest.mark.parametrize("word", ["1", "t", "T", "TRUE", "true", "True", True])
def test_words_for_true_are_those_of_go(word: object) -> None:
    assert parse({"drop_invalid": word}).drop_invalid is True


@pytest.mark.parametrize("word", ["0", "f", "F", "FALSE", "false", "False", False])
def test_words_for_false_are_those_of_go(word: object) -> None:
    assert parse({"drop_invalid": word}).drop_invalid is False


@pytest.mark.parametrize("name", ["e", "eth0", "fifteen-letters", "a.b-c_d", "E0"])
def test_interface_name_of_the_kernel_is_taken(name: str) -> None:
    assert parse({"exclude_interfaces": name}).exclude_interfaces == (name,)


@pytest.mark.parametrize("case", PARSED, ids=lambda case: json.dumps(case)[1:70])
def test_validation_of_the_corpus_is_ours(case: Mapping[str, object]) -> None:
    raw: dict[str, object] = {}
    if case["field"] == "host_ipv4_loopback_cidr":
        raw["host_ipv4_loopback_cidr"] = case["value"]
    for side in ("include", "exclude"):
        if f"{side}_count" in case:
            raw[f"owner_groups_{side}"] = [str(n) for n in range(int(str(case[f"{side}_count"])))]
        elif side in case:
            raw[f"owner_groups_{side}"] = case[side]
    if case["ok"]:
        parse(raw)
    else:
        assert problems(raw)


def test_unknown_setting_names_those_that_there_are() -> None:
    (sentence,) = problems({"inbound_port_include": "80"})
    assert "inbound_port_include" in sentence
    assert "inbound_ports_include" in sentence


def test_very_long_number_is_refused_like_any_other() -> None:
    assert len(problems({"proxy_port": "0" * 5000, "inbound_ports_include": "9" * 5000})) == 2


def test_very_large_number_is_refused_like_any_other() -> None:
    assert len(problems({"proxy_port": 10**5000, "inbound_ports_include": 10**5000})) == 2


def test_bytes_are_no_list_of_ports() -> None:
    assert problems({"inbound_ports_include": b"abcd"})


TEXTS = st.one_of(
    st.text(max_size=20),
    st.text(alphabet="0123456789,:-*./ abcdef", max_size=20),
    st.sampled_from(
        ["*", "80", "10.0.0.0/8", "fd00::/8", "127.0.0.1/32", "eth0", "true", "TPROXY"]
    ),
)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), TEXTS, st.binary(max_size=4)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=5,
)


@given(st.dictionaries(st.one_of(st.sampled_from(KEYS), st.text(max_size=5)), VALUES, max_size=4))
def test_whatever_comes_in_is_taken_or_refused_by_sentences(raw: dict[str, object]) -> None:
    said: tuple[str, ...] = ()
    try:
        settings = parse(raw)
    except InvalidSettings as refused:
        said = refused.problems or ("no reason given\n",)
    else:
        assert parse(dump(settings)) == settings
    assert not any("\n" in sentence for sentence in said)


@pytest.mark.parametrize(
    ("include", "exclude", "said"),
    [
        ("80", "15090,15021,15020", False),
        ("", "15020", False),
        ("*", "22", False),
        ("80", "15020,22", True),
    ],
)
def test_exclusions_are_idle_beside_a_list_and_those_of_the_proxy_are_not_told(
    include: str, exclude: str, said: bool
) -> None:
    settings = parse({"inbound_ports_include": include, "inbound_ports_exclude": exclude})
    assert any("inbound_ports_exclude" in text for text in settings.warnings()) is said
