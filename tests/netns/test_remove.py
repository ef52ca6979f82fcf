"""A removal takes out whatever a capture can have put there, and leaves all else as it was."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.capturing import (
    BACKENDS,
    EVERYTHING,
    RICH,
    SETTINGS,
    STATE_DIR,
    Raw,
    capture,
    command,
    generation,
    heard,
    release,
    routing_monitor,
    state,
    words,
)
from tests.support.foreign import (
    FLAVOURS,
    ISTIO_NFT,
    OLDER,
    TOOLS,
    IstioInit,
    add_foreign,
    counters,
    handles,
    istio_init_cases,
)
from tests.support.netns import inside

pytestmark = pytest.mark.netns

INTERFACES: Raw = {
    **EVERYTHING,
    "exclude_interfaces": "eth7,eth8",
    "reroute_virtual_interfaces": "eth5,eth6",
}
WITHOUT_IPV6: Raw = {**RICH, "enable_ipv6": False, "dns_servers_v6": ""}
SERIES = (*SETTINGS.values(), INTERFACES, WITHOUT_IPV6, RICH, WITHOUT_IPV6)


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return where the agent remembers the captures of this test."""
    monkeypatch.setenv(STATE_DIR, str(tmp_path / "state"))
    return tmp_path / "state"


def legacy_made(name: str) -> None:
    for tool in TOOLS.values():
        for table in ("nat", "mangle", "raw"):
            inside(name, f"{tool}-legacy", "-t", table, "-S")


def everything(name: str) -> dict[str, object]:
    return {"state": state(name), "counters": counters(name), "handles": handles(name)}


# --- what others have stays ----------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("raw", [RICH, INTERFACES], ids=["rich", "interfaces"])
def test_every_foreign_rule_stays_byte_for_byte(netns: str, backend: str, raw: Raw) -> None:
    add_foreign(netns)
    before = everything(netns)
    capture(netns, raw, backend)
    assert state(netns) != before["state"]
    assert release(netns).changed
    assert everything(netns) == before


@pytest.mark.parametrize("backend", BACKENDS)
def test_many_captures_one_after_another_leave_nothing(netns: str, backend: str) -> None:
    add_foreign(netns)
    before = everything(netns)
    for raw in SERIES:
        capture(netns, raw, backend)
    release(netns)
    assert everything(netns) == before


def test_captures_by_changing_backends_leave_nothing(netns: str) -> None:
    add_foreign(netns)
    before = everything(netns)
    for index, raw in enumerate(SERIES):
        capture(netns, raw, BACKENDS[index % len(BACKENDS)])
    release(netns)
    assert everything(netns) == before


Forget = Callable[[Path, pytest.MonkeyPatch], None]


def deleted(memory: Path, _patch: pytest.MonkeyPatch) -> None:
    shutil.rmtree(memory)


def elsewhere(memory: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setenv(STATE_DIR, str(memory / "elsewhere"))


def damaged(memory: Path, _patch: pytest.MonkeyPatch) -> None:
    for path in memory.glob("netns-*.json"):
        path.write_text('{"version": 1, "before":')


@pytest.mark.parametrize("forget", [deleted, elsewhere, damaged])
@pytest.mark.parametrize("backend", BACKENDS)
def test_without_a_record_everything_is_known_by_its_shape(
    netns: str, backend: str, forget: Forget, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Built-in chains of nf_tables that were there and empty cannot be told, so none are here."""
    add_foreign(netns)
    before = everything(netns)
    for raw in (INTERFACES, SETTINGS["other-mark-and-table"], RICH):
        capture(netns, raw, backend)
        forget(memory, monkeypatch)
    release(netns)
    assert everything(netns) == before


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", [*SETTINGS, "interfaces"])
def test_each_capture_is_known_by_its_shape_alone(
    netns: str, backend: str, name: str, memory: Path
) -> None:
    legacy_made(netns)
    before = state(netns)
    capture(netns, {**SETTINGS, "interfaces": INTERFACES}[name], backend)
    shutil.rmtree(memory)
    release(netns)
    assert state(netns) == before


@pytest.mark.parametrize("backend", BACKENDS)
def test_empty_chains_of_others_stay(netns: str, backend: str) -> None:
    """Somebody listed a table with iptables-nft, which makes its chains, or set a policy."""
    legacy_made(netns)
    for tool in TOOLS.values():
        inside(netns, f"{tool}-nft", "-t", "nat", "-A", "OUTPUT", "-j", "ACCEPT")
        inside(netns, f"{tool}-nft", "-t", "nat", "-D", "OUTPUT", "-j", "ACCEPT")
        inside(netns, f"{tool}-nft", "-P", "FORWARD", "DROP")
        inside(netns, f"{tool}-nft", "-t", "nat", "-N", "THEIRS")
    before = state(netns)
    for raw in (RICH, EVERYTHING):
        capture(netns, raw, backend)
    release(netns)
    assert state(netns) == before


@pytest.mark.parametrize("backend", ["iptables-nft", "iptables-legacy"])
@pytest.mark.parametrize("verb", ["-A", "-I"])
def test_an_exemption_of_an_interface_that_others_made_stays(
    netns: str, backend: str, verb: str
) -> None:
    """It looks like one of ours, but it is known which interfaces the capture left alone."""
    legacy_made(netns)
    flavour = backend.removeprefix("iptables-")
    for raw in (EVERYTHING, INTERFACES):
        capture(netns, raw, backend)
        for tool in TOOLS.values():
            rule = ("PREROUTING", "-i", "eth9", "-j", "RETURN")
            inside(netns, f"{tool}-{flavour}", "-t", "nat", verb, *rule)
        release(netns)
        for key in (f"{flavour}4", f"{flavour}6"):
            assert "-A PREROUTING -i eth9 -j RETURN" in state(netns)[key], raw
        for tool in TOOLS.values():
            inside(netns, f"{tool}-{flavour}", "-t", "nat", "-F", "PREROUTING")


@pytest.mark.parametrize("prefix", [128, 64])
def test_an_address_that_was_there_before_stays(netns: str, prefix: int) -> None:
    inside(netns, "ip", "-6", "addr", "add", f"::6/{prefix}", "dev", "lo", "nodad")
    before = state(netns)
    capture(netns, RICH, "nftables")
    capture(netns, EVERYTHING, "nftables")
    release(netns)
    assert state(netns) == before


# --- what cannot be undone, and what is not done --------------------------------------------------


def test_the_legacy_tables_that_a_capture_needed_stay_for_good(netns: str) -> None:
    """The kernel has no way to drop one (kernel fact 11); they are empty and let all pass."""
    before = state(netns)
    capture(netns, RICH, "iptables-legacy")
    release(netns)
    after = state(netns)
    for key in ("legacy4", "legacy6"):
        assert before.pop(key) == ""
        lines = after.pop(key).splitlines()
        assert sorted(line for line in lines if line[0] == "*") == ["*mangle", "*nat", "*raw"]
        assert all(line[0] == "*" or line.endswith((" ACCEPT", "COMMIT")) for line in lines)
    assert after == before


@pytest.mark.parametrize("backend", BACKENDS)
def test_removing_again_writes_nothing(netns: str, backend: str) -> None:
    capture(netns, RICH, backend)
    assert release(netns).changed
    before = (generation(netns), state(netns))
    with routing_monitor(netns) as monitor:
        assert not release(netns).changed
        assert heard(monitor) == 0
    assert (generation(netns), state(netns)) == before


def test_removing_from_a_namespace_that_never_was_captured_writes_nothing(netns: str) -> None:
    add_foreign(netns)
    before = (generation(netns), everything(netns))
    assert not release(netns).changed
    code, out, _ = command("remove", "--netns", netns, "--output", "json")
    assert code == 0
    assert json.loads(out)["changed"] is False
    assert (generation(netns), everything(netns)) == before


# --- what istio-init left ------------------------------------------------------------------------


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("case", [*istio_init_cases(), OLDER], ids=lambda case: case.name)
def test_what_istio_init_made_is_taken_out(netns: str, case: IstioInit, flavour: str) -> None:
    legacy_made(netns)
    if flavour == "nft":
        add_foreign(netns)
    before = everything(netns) if flavour == "nft" else state(netns)
    case.load(netns, flavour)
    release(netns)
    assert (everything(netns) if flavour == "nft" else state(netns)) == before


def test_tables_of_istios_own_nftables_mode_are_taken_out_and_others_stay(netns: str) -> None:
    add_foreign(netns)
    inside(netns, "nft", "add", "table", "inet", "istio-proxy-natural")
    before = everything(netns)
    inside(netns, "nft", "-f", "-", stdin=ISTIO_NFT)
    for line in ("-4 rule add fwmark 1337 lookup 133", "-6 addr add ::6/128 dev lo"):
        inside(netns, "ip", *line.split())
    code, out, _ = command("remove", "--netns", netns, "--output", "json")
    assert (code, json.loads(out)["changed"]) == (0, True)
    assert everything(netns) == before


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_guard_rails_of_a_killed_istio_init_are_taken_out_with_its_rules(
    netns: str, flavour: str
) -> None:
    tool = f"iptables-{flavour}"
    for table in ("nat", "filter"):
        inside(netns, tool, "-t", table, "-S")
    inside(netns, tool, "-A", "INPUT", "-p", "tcp", "--dport", "9", "-j", "DROP")
    before = inside(netns, tool, "-S")
    inside(netns, tool, "-t", "nat", "-N", "ISTIO_OUTPUT")
    for chain in ("INPUT", "FORWARD", "OUTPUT"):
        for protocol in ("tcp", "udp"):
            inside(netns, tool, "-I", chain, "1", "-p", protocol, "-j", "DROP")
    assert "drop all TCP and UDP" in command("scan", "--netns", netns)[1]
    release(netns)
    assert inside(netns, tool, "-S") == before


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_part_of_the_guard_rails_is_taken_out_where_the_other_family_has_all(
    netns: str, flavour: str
) -> None:
    legacy_made(netns)
    for tool in ("iptables", "ip6tables"):
        inside(netns, f"{tool}-legacy", "-t", "filter", "-S")
    before = state(netns)
    for tool, chains in (("iptables", ("INPUT", "FORWARD", "OUTPUT")), ("ip6tables", ("INPUT",))):
        inside(netns, f"{tool}-{flavour}", "-t", "nat", "-N", "ISTIO_OUTPUT")
        for chain in chains:
            for protocol in ("tcp", "udp")[: len(chains)]:
                inside(netns, f"{tool}-{flavour}", "-I", chain, "-p", protocol, "-j", "DROP")
    release(netns)
    assert state(netns) == before


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_redirect_of_dns_by_another_mesh_stays(netns: str, flavour: str) -> None:
    tool = f"iptables-{flavour}"
    comment = ("-m", "comment", "--comment", "kuma/mesh/transparent/proxy/dns")
    port = ("-p", "udp", "--dport", "53", "-j", "REDIRECT", "--to-ports", "15053")
    inside(netns, tool, "-t", "nat", "-A", "OUTPUT", *comment, *port)
    before = inside(netns, tool, "-t", "nat", "-S", "OUTPUT")
    release(netns)
    assert inside(netns, tool, "-t", "nat", "-S", "OUTPUT") == before


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_copies_that_istio_init_piled_up_are_taken_out(netns: str, flavour: str) -> None:
    legacy_made(netns)
    before = state(netns)
    OLDER.load(netns, flavour)
    OLDER.load(netns, flavour)
    for version in (4, 6):
        for _ in range(3):
            line = f"ip -{version} rule add fwmark 1337 lookup 133"
            inside(netns, *line.split())
        everything_ = {4: "0.0.0.0/0", 6: "::/0"}[version]
        line = f"ip -{version} route add local {everything_} dev lo table 133"
        inside(netns, *line.split())
    release(netns)
    assert state(netns) == before


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_command_line_says_what_it_did(netns: str, backend: str) -> None:
    code, _, err = command("apply", "--netns", netns, "--backend", backend, *words(RICH))
    assert code == 0, err
    code, out, err = command("remove", "--netns", netns, "--output", "json")
    assert code == 0, err
    done = json.loads(out)
    assert (done["changed"], done["backend"]) == (True, backend)
    assert done["rules"] > 0
