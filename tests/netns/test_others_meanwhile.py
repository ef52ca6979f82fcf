"""What others have, do or hide around a capture: it is told apart, kept, and never passed over."""

import json
import os
from pathlib import Path

import pytest

from agent.backends.session import Session
from agent.capture import observe, record
from agent.kernel import filters
from agent.kernel.netns import Netns
from agent.model.errors import RolledBack
from tests.support.capturing import (
    BACKENDS,
    EVERYTHING,
    SETTINGS,
    STATE_DIR,
    TPROXY,
    assert_in_sync,
    capture,
    command,
    release,
    report,
    state,
    words,
)
from tests.support.netns import inside, path_of, run

pytestmark = pytest.mark.netns


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return where the agent remembers the captures of this test."""
    monkeypatch.setenv(STATE_DIR, str(tmp_path / "state"))
    return tmp_path / "state"


def rules(name: str) -> list[str]:
    return [line for line in run("ip", "-n", name, "rule").splitlines() if "0x539" in line]


# --- policy rules that select by more than the mark -----------------------------------------------


@pytest.mark.parametrize(
    "selector",
    [
        ("fwmark", "1337", "uidrange", "5-6"),
        ("fwmark", "1337", "ipproto", "tcp", "dport", "80"),
        ("fwmark", "1337", "tos", "0x10"),
        ("not", "fwmark", "1337"),
    ],
    ids=" ".join,
)
def test_a_policy_rule_with_another_selector_is_not_a_captures(
    netns: str, selector: tuple[str, ...]
) -> None:
    run("ip", "-n", netns, "rule", "add", *selector, "lookup", "133", "pref", "500")
    before = state(netns)
    capture(netns, TPROXY, "nftables")
    assert len(rules(netns)) == 2, "the capture's own rule is there besides the foreign one"
    assert_in_sync(netns, TPROXY, "nftables")
    release(netns)
    assert state(netns) == before


def test_a_policy_rule_that_suppresses_routes_is_not_a_captures(netns: str) -> None:
    rule = ("fwmark", "1337", "lookup", "133", "suppress_prefixlength", "0")
    run("ip", "-n", netns, "rule", "add", *rule, "pref", "500")
    before = state(netns)
    assert not release(netns).changed
    assert state(netns) == before


# --- rules that were flushed by somebody ----------------------------------------------------------


@pytest.mark.parametrize("again", [False, True], ids=["removed", "applied again and removed"])
@pytest.mark.parametrize("kind", ["tproxy", "other-mark-and-table"])
def test_routes_of_a_flushed_capture_do_not_stay(netns: str, kind: str, again: bool) -> None:
    before = state(netns)
    capture(netns, SETTINGS[kind], "nftables")
    inside(netns, "nft", "flush", "ruleset")
    if again:
        capture(netns, SETTINGS[kind], "nftables")
    release(netns)
    assert state(netns) == before


# --- captures that the tools here cannot show -----------------------------------------------------


def test_a_capture_that_cannot_be_read_is_not_called_removed(netns: str) -> None:
    capture(netns, EVERYTHING, "iptables-nft")
    native = "add rule ip nat OUTPUT tcp dport { 80, 443 } meta skuid != 1337 counter\n"
    inside(netns, "nft", "-f", "-", stdin=native)
    before = inside(netns, "nft", "-s", "list", "ruleset")
    for verb in ("remove", "apply"):
        code, _, err = command(verb, "--netns", netns)
        assert code == 3
        assert "a capture is loaded in iptables-nft, which cannot be read here" in err
    assert command("check", "--netns", netns)[0] == 1
    assert inside(netns, "nft", "-s", "list", "ruleset") == before


def test_a_legacy_capture_without_its_tool_is_not_called_removed(
    netns: str, tmp_path: Path
) -> None:
    capture(netns, EVERYTHING, "iptables-legacy")
    for tool in ("iptables-legacy-save", "ip6tables-legacy-save"):
        broken = tmp_path / "bin" / tool
        broken.parent.mkdir(exist_ok=True)
        broken.write_text("#!/bin/sh\nexit 1\n")
        broken.chmod(0o755)
    code, _, err = command("remove", "--netns", netns, path=str(tmp_path / "bin"))
    assert (code, "a capture is loaded in iptables-legacy" in err) == (3, True)


def test_a_process_without_files_left_does_not_see_an_empty_namespace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_more(*_: object) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "open", no_more)
    with pytest.raises(OSError, match="Too many"):
        filters.FilterEye()


# --- what takes traffic past a capture ------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "chain", "rule"),
    [
        ("nftables", "type nat hook output priority -101;", "tcp dport 80 redirect to :9"),
        ("iptables-nft", "type nat hook output priority -100;", "tcp dport 80 redirect to :9"),
        ("iptables-legacy", "type nat hook output priority -100;", "tcp dport 80 redirect to :9"),
        *((b, "type filter hook output priority -300;", "tcp dport 80 notrack") for b in BACKENDS),
    ],
)
@pytest.mark.parametrize("table", ["inet theirs", "ip intercept-agent"])
def test_native_rules_that_go_before_a_capture_are_reported(
    netns: str, backend: str, chain: str, rule: str, table: str
) -> None:
    capture(netns, EVERYTHING, backend)
    script = f"table {table} {{\n chain o {{\n {chain}\n {rule}\n }}\n}}\n"
    inside(netns, "nft", "-f", "-", stdin=script)
    (sentence,) = report(netns, EVERYTHING, backend).foreign
    assert f"table {table.split()[1]}, chain o" in sentence


@pytest.mark.parametrize("flavour", ["nft", "legacy"])
def test_untracked_packets_are_reported(netns: str, flavour: str) -> None:
    capture(netns, EVERYTHING, "nftables")
    tool = (f"iptables-{flavour}", "-t", "raw", "-A", "OUTPUT")
    inside(netns, *tool, "-p", "udp", "--dport", "4789", "-j", "CT", "--notrack")
    assert_in_sync(netns, EVERYTHING, "nftables")
    inside(netns, *tool, "-p", "tcp", "--dport", "80", "-j", "CT", "--notrack")
    (sentence,) = report(netns, EVERYTHING, "nftables").foreign
    assert "takes packets past the capture" in sentence


def test_a_trace_walks_the_tables_of_others_and_says_what_it_did_not_walk(netns: str) -> None:
    script = """
        table inet theirs {
            chain i { type filter hook input priority 9; policy drop; }
        }
        table netdev others {
            chain arriving { type filter hook ingress device "lo" priority 0; policy drop; }
        }
    """
    inside(netns, "nft", "-f", "-", stdin=script)
    code, out, err = command("trace", "--netns", netns, "--uid", "1", "--to", "127.0.0.1:80")
    assert code == 0
    assert "is dropped by the policy DROP of inet theirs i" in out
    assert "table others, chain arriving (ingress, priority 0, policy drop) was not walked" in err
    assert "theirs" not in err


@pytest.mark.parametrize(
    ("dialled", "meant"),
    [
        ("0.0.0.0:80", "127.0.0.1:80"),
        ("[::]:80", "[::1]:80"),
        ("[::ffff:127.0.0.2]:80", "127.0.0.2:80"),
    ],
)
def test_a_trace_goes_where_the_kernel_sends_it(netns: str, dialled: str, meant: str) -> None:
    capture(netns, EVERYTHING, "nftables")
    trace = ("trace", "--netns", netns, "--uid", "0", "--output", "json", "--to")
    assert command(*trace, dialled) == command(*trace, meant)


# --- what others do while a change fails ----------------------------------------------------------


@pytest.mark.parametrize("flavour", ["nft", "legacy"])
def test_what_others_deleted_meanwhile_does_not_come_back(netns: str, flavour: str) -> None:
    table = (f"iptables-{flavour}", "-t", "nat")
    stays, goes = (("OUTPUT", "-d", address, "-j", "ACCEPT") for address in ("1.2.3.5", "1.2.3.4"))
    for rule in (stays, goes):
        inside(netns, *table, "-A", *rule)
    inside(netns, *table, "-A", *goes)  # two copies, of which one goes

    def deletes(_: object) -> None:
        inside(netns, *table, "-D", *goes)
        raise RuntimeError("fault")

    with pytest.raises(RolledBack):
        capture(netns, EVERYTHING, f"iptables-{flavour}", before_step=deletes)
    left = inside(netns, *table, "-S", "OUTPUT").splitlines()
    assert left[1:] == [f"-A OUTPUT -d {a}/32 -j ACCEPT" for a in ("1.2.3.5", "1.2.3.4")]


def test_another_tool_that_writes_while_its_rules_are_read_is_waited_for(
    netns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, times = observe._read, iter(range(5))

    def interrupted(session: Session) -> observe._Filters:
        found = read(session)
        if next(times, None) is not None:
            inside(netns, "iptables-nft", "-A", "FORWARD", "-j", "ACCEPT")
        return found

    monkeypatch.setattr(observe, "_read", interrupted)
    capture(netns, EVERYTHING, "iptables-nft")
    assert_in_sync(netns, EVERYTHING, "iptables-nft")


@pytest.mark.timeout(30)  # it took minutes
@pytest.mark.parametrize("backend", ["iptables-nft", "iptables-legacy"])
def test_thousands_of_equal_foreign_rules_are_no_hindrance(netns: str, backend: str) -> None:
    lines = "-A OUTPUT -d 1.2.3.4/32 -j ACCEPT\n" * 20_000
    inside(netns, f"{backend}-restore", stdin=f"*nat\n{lines}COMMIT\n")
    capture(netns, EVERYTHING, backend)
    assert_in_sync(netns, EVERYTHING, backend)


# --- records that are damaged ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "routes",
    ["[[]]", '[["rule", "ipv4", 99999999999, 1]]', '[["address", "ipv6", "zz"]]', "[" * 100_000],
    ids=["short", "large", "no address", "deep"],
)
def test_a_damaged_record_is_none(netns: str, memory: Path, routes: str) -> None:
    capture(netns, EVERYTHING, "nftables")
    (path,) = memory.glob("netns-*.json")
    before = f'{{"shells": [], "routes": {routes}}}'
    cookie = json.loads(path.read_text()).get("cookie")
    head = f'{{"version": {record.VERSION}, "cookie": {cookie}, "settings": {{}}, "pending": null, '
    head += '"before": '
    path.write_text(f"{head}{before}}}")
    with Netns.open(path_of(netns)) as opened:
        assert record.load(opened) is None
    assert command("check", "--netns", netns, *words(EVERYTHING))[0] == 0
    assert command("remove", "--netns", netns)[0] == 0


def test_record_from_before_a_reboot_is_of_another_namespace(netns: str, memory: Path) -> None:
    """Both its inode's number and its cookie may come again, where the folder outlives the boot."""
    capture(netns, EVERYTHING, "nftables")
    (path,) = memory.glob("netns-*.json")
    document = json.loads(path.read_text())
    with Netns.open(path_of(netns)) as opened:
        assert record.load(opened) is not None
        path.write_text(json.dumps({**document, "boot": "an earlier one"}))
        assert record.load(opened) is None
        del document["boot"]  # as versions wrote it that did not know better
        path.write_text(json.dumps(document))
        assert record.load(opened) is not None


def test_settings_of_another_version_are_not_the_users_mistake(netns: str, memory: Path) -> None:
    capture(netns, EVERYTHING, "nftables")
    (path,) = memory.glob("netns-*.json")
    path.write_text(path.read_text().replace('"proxy_port"', '"proxy_gate"'))
    assert command("check", "--netns", netns)[0] == 1


def test_empty_tables_of_a_capture_that_was_flushed_do_not_stay(netns: str) -> None:
    before = state(netns)
    capture(netns, EVERYTHING, "iptables-nft")
    for tool in ("iptables-nft", "ip6tables-nft"):
        chains = [x.split()[1] for x in inside(netns, tool, "-t", "nat", "-S").splitlines()]
        inside(netns, tool, "-t", "nat", "-F")
        for chain in sorted({chain for chain in chains if chain.startswith("ISTIO_")}):
            inside(netns, tool, "-t", "nat", "-X", chain)
    release(netns)
    assert state(netns) == before
