"""What only nftables has is said in words, never in JSON."""

import json

import pytest

from agent.formats.nft_rule_json import foreign
from agent.formats.nft_words import rule_in_words, spec_in_words
from agent.model.ruleset import Rule, Target, match

DSCP = {"match": {"left": {"payload": {"field": "dscp", "protocol": "ip"}}, "op": "==", "right": 5}}
BASE = {"hook": "output", "policy": "drop", "prio": -101, "type": "nat"}


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--expr", DSCP, "[nft: ip dscp 5]"),
        ("--expr", {"synproxy": None}, "[nft: synproxy]"),
        ("--base", BASE, "hook output policy drop prio -101 type nat"),
        ("--base", [BASE, [[DSCP, {"jump": {"target": "x"}}]]], "ip dscp 5, jump x"),
        ("--flags", "dormant", "our table has flags: dormant"),
    ],
)
def test_what_only_nftables_has_is_said_in_words(option: str, value: object, said: str) -> None:
    rule = Rule((match("tcp", "--dport", "99"), foreign(option, value)), Target("DROP"))
    for text in (rule_in_words("OUTPUT", rule), spec_in_words(rule)):
        assert said in text
        assert '"' not in text


def test_a_rule_that_iptables_knows_stays_as_iptables_save_has_it() -> None:
    rule = Rule((match("comment", "--comment", json.dumps({"a": 1})),), Target("DROP"))
    assert rule_in_words("OUTPUT", rule).startswith("-A OUTPUT -m comment --comment ")
