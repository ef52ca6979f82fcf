"""What libiptc writes through Python is, byte for byte, what the tool's own parser makes of it."""

import random
from collections.abc import Mapping

import pytest

from agent.backends.iptables_legacy import IptablesLegacy
from agent.backends.session import reading
from agent.formats.iptables_save import parse, render
from agent.kernel.netns import Netns
from agent.model.plan import plan
from agent.model.ruleset import Family, Ruleset
from agent.model.settings import parse as parse_settings
from tests.support.behaviour_settings import random_settings
from tests.support.netns import inside, namespace, path_of

RESTORE = {Family.IPV4: "iptables-legacy-restore", Family.IPV6: "ip6tables-legacy-restore"}

# Every kind of condition and target that a capture or a rollback may have to write.
ODDITIES = """*nat
:PREROUTING ACCEPT [0:0]
:INPUT ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
:POSTROUTING ACCEPT [0:0]
:OTHER - [0:0]
-A PREROUTING -i eth+ -p tcp -m tcp --dport 1:1024 -j OTHER
-A PREROUTING ! -i lo -p udp -m udp ! --sport 53 -j OTHER
-A OUTPUT ! -o net1 -m owner --uid-owner 1000-2000 -j OTHER
-A OUTPUT -m owner ! --gid-owner 7 -m owner ! --gid-owner 8 -g OTHER
-A OUTPUT -m comment --comment "said so" -j RETURN
-A OTHER -p tcp -m multiport --dports 80,443,8000:9000 -j REDIRECT --to-ports 15001
-A OTHER -m mark --mark 0x1/0xff -j RETURN
-A OTHER ! -p tcp -m conntrack --ctstate RELATED,ESTABLISHED -j RETURN
-A OTHER -p tcp -m tcp --tcp-flags FIN,SYN,RST,ACK SYN -m addrtype --dst-type LOCAL -j ACCEPT
COMMIT
"""


def blob_of_worker(rulesets: Mapping[Family, Ruleset]) -> bytes:
    with namespace("ours") as name, Netns.open(path_of(name)) as netns, reading(netns) as session:
        for step in IptablesLegacy().steps(session, {}, rulesets):
            step.run()
        return session.eye.digest()


def blob_of_tool(rulesets: Mapping[Family, Ruleset]) -> bytes:
    with namespace("theirs") as name, Netns.open(path_of(name)) as netns, reading(netns) as session:
        for family, ruleset in rulesets.items():
            inside(name, RESTORE[family], "--noflush", stdin=render(ruleset, builtin=False))
        return session.eye.digest()


@pytest.mark.parametrize("family", list(Family))
def test_every_kind_of_rule_is_compiled_as_the_tool_compiles_it(family: Family) -> None:
    rulesets = {family: parse(ODDITIES, family)}
    assert blob_of_worker(rulesets) == blob_of_tool(rulesets)


@pytest.mark.parametrize("seed", range(12))
def test_plans_are_compiled_as_the_tool_compiles_them(seed: int) -> None:
    rulesets = plan(parse_settings(random_settings(random.Random(seed)))).rulesets
    assert blob_of_worker(rulesets) == blob_of_tool(rulesets)
