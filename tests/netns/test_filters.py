"""The digest of all rules: it changes with every rule and with nothing else."""

import os
from collections.abc import Iterator

import pytest

from agent.backends.session import Session, reading
from agent.capture.apply import apply
from agent.capture.check import check
from agent.kernel.netns import Netns
from agent.model.settings import parse
from tests.support.netns import inside, path_of

TOOLS = ("iptables-legacy", "ip6tables-legacy", "iptables-nft", "ip6tables-nft")


@pytest.fixture
def session(netns: str) -> Iterator[Session]:
    with Netns.open(path_of(netns)) as opened, reading(opened) as found:
        yield found


def connect(netns: str, address: str) -> None:
    """Make packets that counters of OUTPUT count; nobody answers."""
    code = f"import socket; socket.create_connection(('{address}', 9))"
    inside(netns, "python3", "-c", code, check=False)


@pytest.mark.parametrize("tool", TOOLS)
def test_traffic_does_not_change_the_digest(netns: str, session: Session, tool: str) -> None:
    inside(netns, tool, "-A", "OUTPUT", "-p", "tcp", "-j", "RETURN")
    before = session.eye.digest()
    connect(netns, "::1" if tool.startswith("ip6") else "127.0.0.1")
    listing = inside(netns, f"{tool}-save", "-c", "-t", "filter")
    assert "[2:" in listing  # the SYN and the answer to it were counted
    assert session.eye.digest() == before


def test_traffic_does_not_change_the_digest_of_native_rules(netns: str, session: Session) -> None:
    script = "add table inet t\nadd chain inet t c { type filter hook output priority 0; }\n"
    script += "add rule inet t c tcp dport 9 counter\n"
    inside(netns, "nft", "-f", "-", stdin=script)
    before = session.eye.digest()
    connect(netns, "127.0.0.1")
    assert "packets 1" in inside(netns, "nft", "list", "ruleset")
    assert session.eye.digest() == before


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize(
    "change",
    [
        ("-A", "OUTPUT", "-p", "tcp", "-j", "ACCEPT"),
        ("-A", "OUTPUT", "-p", "udp", "-j", "RETURN"),
        ("-I", "OUTPUT", "1", "-d", "192.0.2.1", "-j", "RETURN"),
        ("-D", "OUTPUT", "1"),
        ("-N", "OTHER"),
        ("-P", "OUTPUT", "DROP"),
    ],
)
def test_every_change_of_a_rule_changes_the_digest(
    netns: str, session: Session, tool: str, change: tuple[str, ...]
) -> None:
    table = "filter"
    inside(netns, tool, "-t", table, "-A", "OUTPUT", "-p", "tcp", "-j", "RETURN")
    before = session.eye.digest()
    words = ["2001:db8::1" if w == "192.0.2.1" and tool.startswith("ip6") else w for w in change]
    inside(netns, tool, "-t", table, *words)
    assert session.eye.digest() != before


def test_looking_creates_no_table(netns: str, session: Session) -> None:
    session.eye.digest()
    assert session.eye.legacy.tables() in ({4: (), 6: ()}, {4: ()})
    assert inside(netns, "nft", "list", "ruleset") == ""


def test_tables_of_a_module_that_is_loaded_meanwhile_are_seen(netns: str, session: Session) -> None:
    """As on a node on which nobody has used iptables-legacy yet."""
    for fd in session.eye.legacy._names.values():
        os.close(fd)
    session.eye.legacy._names.clear()
    assert session.eye.legacy.tables() == {}
    inside(netns, "iptables-legacy", "-t", "nat", "-A", "OUTPUT", "-j", "RETURN")
    session.forget()
    assert session.eye.legacy.tables()[4] == ("nat",)


def test_looking_again_at_known_rules_opens_no_libnftables_context(
    netns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = parse({"inbound_ports_include": "*"})
    with Netns.open(path_of(netns)) as target:
        apply(target, settings, backend="nftables")
        assert check(target, settings).in_sync
        monkeypatch.setattr("agent.backends.session.open_nft", None)  # whoever calls it fails
        assert check(target, settings).in_sync
