"""A capture takes the place of another: nothing escapes meanwhile, nothing of the old is left.

INTERCEPT_REPLACEMENTS   how often each backend changes settings under load (12)
"""

import itertools
import os
import re
import time
from collections.abc import Iterator
from difflib import unified_diff
from pathlib import Path

import pytest

from tests.support.capturing import (
    BACKENDS,
    EVERYTHING,
    RICH,
    SETTINGS,
    STATE_DIR,
    Raw,
    assert_in_sync,
    capture,
    release,
    report,
    state,
)
from tests.support.escape import DIRECT, PROXY_PORTS, Lab, lab
from tests.support.foreign import (
    FLAVOURS,
    ISTIO_INIT,
    ISTIO_NFT,
    OLDER,
    TOOLS,
    IstioInit,
    add_foreign,
    counters,
    istio_init_cases,
)
from tests.support.netns import inside, namespace

pytestmark = pytest.mark.netns

REPLACEMENTS = int(os.environ.get("INTERCEPT_REPLACEMENTS", "12"))
ENOUGH = 300
BETWEEN_S = 0.15
PROXIES = frozenset(f"proxy-{port}" for port in PROXY_PORTS)
REFUSALS = frozenset({"timeout", "ConnectionRefusedError", "ConnectionResetError", "closed"})

PAIRS = tuple(itertools.permutations(BACKENDS, 2))
OTHER = SETTINGS["other-mark-and-table"]


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STATE_DIR, str(tmp_path))


@pytest.fixture(scope="module")
def pod_and_peer() -> Iterator[Lab]:
    with lab() as made:
        yield made


@pytest.fixture
def pod(pod_and_peer: Lab) -> Iterator[Lab]:
    """A pod that is uncaptured before and after."""
    try:
        yield pod_and_peer
    finally:
        release(pod_and_peer.pod)


def fresh(raw: Raw, backend: str, tables: str) -> dict[str, str]:
    """Return what a namespace that never held anything else looks like with this capture.

    `tables` makes the legacy tables that the other namespace has: they can never be dropped.
    """
    with namespace() as name:
        for version, tool in TOOLS.items():
            for table in tables.split():
                if table.startswith(f"{version}:"):
                    inside(name, f"{tool}-legacy", "-t", table[2:], "-S")
        capture(name, raw, backend)
        return state(name)


def legacy_tables(name: str) -> str:
    found = []
    for version, tool in TOOLS.items():
        text = inside(name, f"{tool}-legacy-save")
        found += [f"{version}:{line[1:]}" for line in text.splitlines() if line[:1] == "*"]
    return " ".join(found)


def assert_only(name: str, raw: Raw, backend: str) -> None:
    """Assert that the namespace looks as if nothing but this capture had ever been there."""
    assert_in_sync(name, raw, backend)
    found, expected = state(name), fresh(raw, backend, legacy_tables(name))
    for kind, text in expected.items():
        assert not list(unified_diff(normal(text), normal(found[kind]), lineterm="", n=0)), kind


def normal(text: str) -> list[str]:
    """Return the tables in an order that does not depend on which was made first.

    Nor do the numbers of policy rules count, since the new one is made before the old one goes, nor
    whether ::6 was on trial first, which the address that istio-init made shows for good.
    """
    blocks: list[list[str]] = []
    for line in re.sub(r"(?m)^\d+:\t| nodad", "", text).splitlines():
        if not blocks or line.startswith(("*", "table", "\tchain")) or not text.startswith("*"):
            blocks.append([])
        blocks[-1].append(line)
    return sorted("\n".join(block) for block in blocks)


# --- nothing escapes -----------------------------------------------------------------------------


def assert_nothing_escaped(pod: Lab, before: int) -> None:
    counts = pod.stop()
    assert not counts.keys() & DIRECT, counts
    assert counts.keys() <= PROXIES | REFUSALS, counts
    assert pod.direct() == before, "the app or the service accepted a connection"
    through = sum(counts[name] for name in PROXIES)
    assert through > ENOUGH, counts


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_connection_escapes_while_settings_change(pod: Lab, backend: str) -> None:
    capture(pod.pod, EVERYTHING, backend)
    before = pod.direct()
    pod.flood()
    order = itertools.cycle((*list(SETTINGS.values())[1:], EVERYTHING))
    for raw in itertools.islice(order, REPLACEMENTS):
        capture(pod.pod, raw, backend)
        time.sleep(BETWEEN_S)
    assert_nothing_escaped(pod, before)


def test_no_connection_escapes_while_backends_change(pod: Lab) -> None:
    capture(pod.pod, EVERYTHING, "iptables-nft")
    before = pod.direct()
    pod.flood()
    different = itertools.cycle(SETTINGS.values())
    for old, new in PAIRS:
        capture(pod.pod, next(different), old)
        time.sleep(BETWEEN_S)
        capture(pod.pod, next(different), new)
        time.sleep(BETWEEN_S)
    assert_nothing_escaped(pod, before)


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_no_connection_escapes_while_istio_init_is_replaced(pod: Lab, flavour: str) -> None:
    for backend in BACKENDS:
        release(pod.pod)
        ISTIO_INIT["inbound-ports-wildcard-tproxy"].load(pod.pod, flavour)
        outbound = "*nat\n-A ISTIO_OUTPUT -p tcp -j ISTIO_REDIRECT\nCOMMIT\n"
        inside(pod.pod, f"iptables-{flavour}-restore", "--noflush", stdin=outbound)
        assert {pod.dial()[0], pod.dial()[2]} <= PROXIES  # IPv4; istio-init was told of no other
        before = pod.direct()
        pod.flood(versions=(4,))
        time.sleep(BETWEEN_S)
        capture(pod.pod, OTHER, backend)
        time.sleep(BETWEEN_S)
        counts = pod.stop()
        assert counts.keys() <= PROXIES | REFUSALS, (backend, counts)
        assert pod.direct() == before, backend


@pytest.mark.parametrize("backend", BACKENDS)
def test_counters_of_others_that_run_do_not_keep_a_capture_from_being_read(
    pod: Lab, backend: str
) -> None:
    """Whole tables restored with counters: then built-in chains count in nf_tables too."""
    chains = ":INPUT ACCEPT [5:300]\n:FORWARD DROP [0:0]\n:OUTPUT ACCEPT [7:420]\n"
    text = f"*filter\n{chains}-A INPUT -p tcp -j ACCEPT\nCOMMIT\n"
    for flavour in FLAVOURS:
        inside(pod.pod, f"iptables-{flavour}-restore", "--counters", stdin=text)
    inside(pod.pod, "nft", "add", "table", "inet", "theirs")
    chain = "{ type filter hook input priority 5; policy accept; counter; quota over 1 mbytes; }"
    inside(pod.pod, "nft", "add", "chain", "inet", "theirs", "in", chain)
    try:
        capture(pod.pod, EVERYTHING, backend)
        pod.flood()
        for raw in (RICH, OTHER, EVERYTHING):
            capture(pod.pod, raw, backend)
            for _ in range(3):
                assert not report(pod.pod, raw, backend).differences
                assert not capture(pod.pod, raw, backend).changed
        assert not pod.stop().keys() & DIRECT
    finally:
        pod.stop()
        inside(pod.pod, "nft", "delete", "table", "inet", "theirs")
        inside(pod.pod, "iptables-nft", "-F")
        inside(pod.pod, "iptables-legacy", "-F")


# --- nothing is left -----------------------------------------------------------------------------


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("case", istio_init_cases(), ids=lambda case: case.name)
def test_what_istio_init_made_is_replaced_and_nothing_of_it_is_left(
    netns: str, case: IstioInit, flavour: str
) -> None:
    case.load(netns, flavour)
    backend = BACKENDS[sum(map(ord, case.name)) % len(BACKENDS)]
    capture(netns, OTHER, backend)
    assert_only(netns, OTHER, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_istios_own_nftables_mode_is_replaced(netns: str, backend: str) -> None:
    inside(netns, "nft", "-f", "-", stdin=ISTIO_NFT)
    capture(netns, OTHER, backend)
    assert_only(netns, OTHER, backend)
    inside(netns, "nft", "-f", "-", stdin=ISTIO_NFT)
    found = [one.line() for one in report(netns, OTHER, backend).differences]
    assert "- nftables: table inet istio-proxy-nat    (Istio's)" in found
    capture(netns, OTHER, backend)
    assert_only(netns, OTHER, backend)


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_dns_rules_of_older_versions_in_built_in_chains_are_replaced(
    netns: str, backend: str, flavour: str
) -> None:
    OLDER.load(netns, flavour)
    OLDER.load(netns, flavour)  # the jumps and the DNS rules are there twice then
    capture(netns, RICH, backend)
    assert_only(netns, RICH, backend)


@pytest.mark.parametrize(("old", "new"), PAIRS)
def test_the_capture_of_another_backend_is_replaced(netns: str, old: str, new: str) -> None:
    capture(netns, RICH, old)
    capture(netns, OTHER, new)
    assert_only(netns, OTHER, new)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_namespace_that_went_through_many_settings_shows_only_the_last(
    netns: str, backend: str
) -> None:
    without_ipv6 = {**RICH, "enable_ipv6": False, "dns_servers_v6": ""}
    interfaces = {**EVERYTHING, "exclude_interfaces": "eth7", "reroute_virtual_interfaces": "eth8"}
    for raw in (*SETTINGS.values(), without_ipv6, interfaces, RICH, without_ipv6, EVERYTHING):
        capture(netns, raw, backend)
        assert_in_sync(netns, raw, backend)
    assert_only(netns, EVERYTHING, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rules_that_are_half_deleted_are_replaced(netns: str, backend: str) -> None:
    capture(netns, RICH, backend)
    if backend == "nftables":
        inside(netns, "nft", "flush", "chain", "inet", "intercept-agent", "v4-nat-ISTIO_OUTPUT")
    else:
        flavour = backend.removeprefix("iptables-")
        inside(netns, f"iptables-{flavour}", "-t", "nat", "-F", "OUTPUT")
        inside(netns, f"iptables-{flavour}", "-t", "nat", "-F", "ISTIO_OUTPUT")
        inside(netns, f"ip6tables-{flavour}", "-t", "mangle", "-F")
        inside(netns, f"ip6tables-{flavour}", "-t", "mangle", "-X")
    inside(netns, "ip", "-6", "rule", "del", "fwmark", "1337")
    inside(netns, "ip", "route", "flush", "table", "133")
    for new in (backend, *(b for b in BACKENDS if b != backend)):
        capture(netns, OTHER, new)
        assert_only(netns, OTHER, new)


@pytest.mark.parametrize("backend", BACKENDS)
def test_copies_of_a_policy_rule_are_taken_away(netns: str, backend: str) -> None:
    """Every run of istio-init with TPROXY adds one more copy (kernel fact 13)."""
    case = ISTIO_INIT["inbound-ports-wildcard-tproxy"]
    case.load(netns, "nft")
    for _ in range(3):
        inside(netns, "ip", "rule", "add", "fwmark", "1337", "lookup", "133")
    capture(netns, RICH, backend)
    assert_only(netns, RICH, backend)
    inside(netns, "ip", "rule", "add", "fwmark", "1337", "lookup", "133")
    assert not report(netns, RICH, backend).in_sync
    capture(netns, OTHER, backend)
    assert_only(netns, OTHER, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_foreign_rules_and_their_counters_survive_every_replacement(
    netns: str, backend: str
) -> None:
    add_foreign(netns)
    before = counters(netns)
    for raw in (RICH, EVERYTHING, OTHER):
        for chosen in (backend, *(b for b in BACKENDS if b != backend)):
            capture(netns, raw, chosen)
            after = counters(netns)
            for kind, text in before.items():
                missing = set(text.splitlines()) - set(after[kind].splitlines())
                assert not missing, (chosen, kind, missing)
