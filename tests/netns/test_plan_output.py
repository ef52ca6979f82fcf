"""What `plan` prints: the exact text, the same each time, and the difference to what is loaded."""

from pathlib import Path

import pytest

from tests.support.conformance import BACKENDS, NOBODY, cli, cli_process, sections
from tests.support.netns import inside, snapshot

RICH = (
    *("-m", "TPROXY", "-b", "*", "-d", "22", "-i", "10.0.0.0/8,fd00::/8", "-x", "10.9.0.0/16"),
    *("--redirect-dns", "--capture-all-dns", "--drop-invalid", "-c", "net1", "-k", "tap0"),
    *("--enable-ipv6", "true"),
)
FORMS = (("--format", "restore"), ("--format", "nft"), ("--output", "json"))


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INTERCEPT_STATE_DIR", str(tmp_path / "state"))


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form[1])
def test_plan_is_the_same_each_time_and_has_no_nul(form: tuple[str, str]) -> None:
    first, second = (cli_process("plan", *RICH, *form, user=NOBODY) for _ in range(2))
    assert (first.code, first.stderr) == (0, "")
    assert first.stdout == second.stdout
    assert "\0" not in first.stdout
    assert first.stdout.endswith("\n")


@pytest.mark.parametrize("backend", BACKENDS)
def test_restore_text_is_accepted_by_the_tool_and_leaves_nothing(backend: str, netns: str) -> None:
    parts = sections(cli("plan", *RICH, "--format", "restore").stdout)
    assert list(parts) == ["ipv4", "ipv6", "routes"]
    before = snapshot(netns)
    for title, tool in (("ipv4", "iptables"), ("ipv6", "ip6tables")):
        command = (f"{tool}-{backend.removeprefix('iptables-')}-restore", "--test", "--noflush")
        inside(netns, *command, stdin=parts[title])
    rules = [
        {k: v for k, v in s.items() if k != "legacy4" and k != "legacy6"}
        for s in (before, snapshot(netns))
    ]
    assert rules[0] == rules[1]


def test_whole_restore_output_is_accepted_as_it_is_printed(netns: str) -> None:
    """`agent plan > a; iptables-restore --test < a`, as one tries it first (field report 106)."""
    text = cli("plan", "-b", "*", "-i", "*", "--enable-ipv6", "false").stdout
    inside(netns, "iptables-nft-restore", "--test", stdin=text)


@pytest.mark.parametrize("words", [RICH, ("-b", "80"), ("-i", "*")], ids=["rich", "in", "out"])
def test_nft_script_is_accepted_by_nft(words: tuple[str, ...], netns: str) -> None:
    text = cli("plan", *words, "--format", "nft").stdout
    before = snapshot(netns)
    inside(netns, "nft", "-c", "-f", "-", stdin=text)
    assert snapshot(netns) == before


def test_routes_are_commands_that_work(netns: str) -> None:
    commands = sections(cli("plan", *RICH, "--format", "restore").stdout)["routes"]
    for command in commands.splitlines():
        inside(netns, *command.split())
    assert cli("plan", "--netns", netns, *RICH, "--backend", "iptables-nft").code == 1
    cli("apply", "--netns", netns, *RICH, "--backend", "iptables-nft")
    assert cli("plan", "--netns", netns, *RICH, "--backend", "iptables-nft").stdout == ""


def test_difference_to_a_fresh_namespace_is_all_plus(netns: str) -> None:
    before = snapshot(netns)
    done = cli("plan", "--netns", netns, "-b", "80", "--backend", "iptables-nft")
    assert done.code == 1
    assert {line[:2] for line in done.stdout.splitlines()} == {"+ "}
    assert "-A OUTPUT -j ISTIO_OUTPUT" in done.stdout
    assert snapshot(netns) == before


def test_difference_has_what_is_missing_too_much_and_out_of_place(netns: str) -> None:
    words = ("--netns", netns, "-b", "80,443", "-d", "22", "--backend", "iptables-nft")
    cli("apply", *words)
    assert (cli("plan", *words).code, cli("plan", *words).stdout) == (0, "")
    nat = ("iptables-nft", "-t", "nat")
    port = ("-p", "tcp", "--dport")
    inside(netns, *nat, "-D", "OUTPUT", "-j", "ISTIO_OUTPUT")
    inside(netns, *nat, "-A", "ISTIO_INBOUND", *port, "9999", "-j", "RETURN")
    inside(netns, *nat, "-D", "ISTIO_INBOUND", *port, "80", "-j", "ISTIO_IN_REDIRECT")
    inside(netns, *nat, "-A", "ISTIO_INBOUND", *port, "80", "-j", "ISTIO_IN_REDIRECT")
    done = cli("plan", *words)
    assert done.code == 1
    found = {line[0]: line for line in done.stdout.splitlines()}
    assert "-A OUTPUT -j ISTIO_OUTPUT" in found["+"]
    assert "--dport 9999 -j RETURN" in found["-"]
    assert "-j ISTIO_IN_REDIRECT" in found["~"]
    assert len(done.stdout.splitlines()) == 3


def test_other_settings_show_as_plus_and_minus(netns: str) -> None:
    cli("apply", "--netns", netns, "-b", "80", "--backend", "iptables-legacy")
    done = cli("plan", "--netns", netns, "-b", "81", "--backend", "iptables-legacy")
    lines = [line for line in done.stdout.splitlines() if "ipv4" in line]
    assert [line[0] for line in lines] == ["+", "-"]
    assert "--dport 81" in lines[0]
    assert "--dport 80" in lines[1]


@pytest.mark.parametrize("backend", ["nftables", *BACKENDS])
def test_dry_run_writes_nothing_and_says_what_it_would(
    backend: str, netns: str, tmp_path: Path
) -> None:
    before = snapshot(netns)
    words = ("--netns", netns, "--backend", backend, *RICH, "--dry-run")
    done = cli("apply", *words)
    assert done.code == 0
    assert "nothing was written" in done.stdout
    assert cli("apply", *words, "--output", "json").document["changed"] is True
    assert snapshot(netns) == before
    assert not list(tmp_path.rglob("*.json"))


def test_dry_run_of_a_removal_writes_nothing(netns: str) -> None:
    cli("apply", "--netns", netns, "-b", "80", "--backend", "iptables-nft")
    before = snapshot(netns)
    done = cli("remove", "--netns", netns, "--dry-run")
    assert (done.code, "nothing was written" in done.stdout) == (0, True)
    assert snapshot(netns) == before
