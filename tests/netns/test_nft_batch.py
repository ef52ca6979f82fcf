"""A table made from the kernel's own copy is the table that the script made."""

import random
from dataclasses import replace

import pytest

from agent.backends.session import reading
from agent.formats.nft_text import render_table
from agent.kernel import nft_batch
from agent.kernel.netns import Netns
from agent.model.plan import plan
from agent.model.settings import parse
from tests.support.behaviour_settings import random_settings
from tests.support.netns import inside, namespace, path_of

TABLE = "copied"
EVERYTHING = {
    "inbound_ports_include": "*",
    "outbound_ip_ranges_include": "*",
    "inbound_interception_mode": "TPROXY",
    "redirect_dns": "true",
    "capture_all_dns": "true",
    "drop_invalid": "true",
    "enable_ipv6": "true",
}


def copied(script: str, *, traffic: bool = False) -> tuple[str, str]:
    """Return the listings of a table made by script and of one made from its copy."""
    with (
        namespace("first") as first,
        Netns.open(path_of(first)) as netns,
        reading(netns) as session,
    ):
        session.require_nft().run(script)
        if traffic:
            code = "import socket; socket.create_connection(('127.0.0.1', 9))"
            inside(first, "python3", "-c", code, check=False)
        batch = nft_batch.copy_table(session.eye.netfilter, TABLE)
        listing = inside(first, "nft", "-s", "list", "ruleset")
    assert batch is not None
    with (
        namespace("other") as other,
        Netns.open(path_of(other)) as netns,
        reading(netns) as session,
    ):
        nft_batch.load(session.eye.netfilter, batch)
        assert "packets 1" not in inside(other, "nft", "list", "ruleset")
        return listing, inside(other, "nft", "-s", "list", "ruleset")


@pytest.mark.parametrize("seed", range(10))
def test_copy_of_any_plan_lists_the_same(seed: int) -> None:
    rulesets = plan(parse(random_settings(random.Random(seed)))).rulesets
    theirs, ours = copied(render_table(TABLE, rulesets))
    assert ours == theirs


def test_copy_does_not_take_counts_along() -> None:
    theirs, ours = copied(render_table(TABLE, plan(parse(EVERYTHING)).rulesets), traffic=True)
    assert ours == theirs


def test_table_with_sets_is_not_copied(netns: str) -> None:
    script = f"add table inet {TABLE}\nadd set inet {TABLE} s {{ type inet_service; }}\n"
    with Netns.open(path_of(netns)) as opened, reading(opened) as session:
        session.require_nft().run(script)
        assert nft_batch.copy_table(session.eye.netfilter, TABLE) is None


def test_refused_copy_leaves_nothing_and_says_why(netns: str) -> None:
    script = render_table(TABLE, plan(parse(EVERYTHING)).rulesets)
    with Netns.open(path_of(netns)) as opened, reading(opened) as session:
        session.require_nft().run(script)
        batch = nft_batch.copy_table(session.eye.netfilter, TABLE)
        assert batch is not None
        before = inside(netns, "nft", "list", "ruleset")
        with pytest.raises(FileExistsError):
            nft_batch.load(session.eye.netfilter, batch)
        # The name of a chain that a rule jumps to is another one, which is not there.
        at = batch.data.rindex(b"ISTIO_REDIRECT")
        data = batch.data[:at] + b"ISTIO_NOWHERE!" + batch.data[at + len("ISTIO_REDIRECT") :]
        broken = replace(batch, data=data)
        session.require_nft().run(f"delete table inet {TABLE}")
        with pytest.raises(OSError, match=r".+"):
            nft_batch.load(session.eye.netfilter, broken)
        assert inside(netns, "nft", "list", "ruleset") == ""
    assert before
