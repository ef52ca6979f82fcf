"""Taking leftovers out and putting them back: all that was shown, nothing else, at any moment."""

import contextlib
import json
import os
import pty
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from agent.backends.protocol import Step
from agent.kernel.namespaces import Place
from agent.kernel.netns import Netns, id_at
from agent.leftovers import backup, clean
from agent.leftovers.clean import Planned
from agent.leftovers.node import Node
from agent.leftovers.scan import Subject
from agent.model.errors import KernelRejected, RolledBack
from agent.model.wanted import Known
from tests.support import leftovers as left
from tests.support.capturing import BACKENDS, DNS, EVERYTHING, TPROXY, capture, command, state
from tests.support.foreign import (
    ISTIO_INIT,
    add_foreign,
    counters,
    handles,
    try_tools,
    without_capture,
)
from tests.support.leftovers import as_host, kinds, listening, load
from tests.support.netns import inside, namespace, path_of

ABOUT = (
    f'{backup.FIRST_LINE}\n{backup.NAMESPACE}{{"name": "x", "dev": 4, "ino": 1, "host": false}}\n'
)
DIAL = "import socket; socket.create_connection(('10.77.9.2', 8080), 5).close()"


@pytest.fixture
def backups(tmp_path: Path) -> Path:
    return tmp_path / "backups"


def cleaned(name: str, backups: Path, *words: str) -> Path:
    """Clean a namespace by command and return the backup."""
    line = ("clean", "--netns", name, "--yes", "--backup-dir", str(backups), "-o", "json")
    code, out, err = command(*line, *words)
    assert code == 0, err
    found = json.loads(out)
    assert found["removed"]
    return Path(found["backup"])


def restored(path: Path) -> None:
    code, _, err = command("clean", "--restore", str(path))
    assert code == 0, err


def everything(name: str) -> dict[str, str]:
    """Return everything in a namespace; tables that were made anew stand in another order.

    Whether an address was tried before it was taken (nodad) makes no difference afterwards.
    """
    found = state(name)
    listing = "\n".join(sorted(found["nft"].splitlines()))
    addresses = found["addresses"].replace(" nodad", "")
    more = {"nft": listing, "addresses": addresses, "sets": inside(name, "ipset", "save")}
    return {**found, **more}


def kube_proxy(name: str) -> None:
    """Load what all three modes of kube-proxy leave."""
    for flavour in left.FLAVOURS:
        load(name, left.KUBE_PROXY, flavour)
    inside(name, "nft", "-f", "-", stdin=left.KUBE_PROXY_NFT)
    inside(name, "ipset", "restore", stdin=left.KUBE_PROXY_SETS)
    load(name, left.KUBE_PROXY_IPVS)


def surroundings(name: str) -> None:
    """Load rules that nobody may touch."""
    for flavour in left.FLAVOURS:
        load(name, left.DOCKER, flavour)
        load(name, left.KUBELET, flavour)
    add_foreign(name)


# --- kube-proxy -----------------------------------------------------------------------------------


def test_all_three_modes_of_kube_proxy_go_at_once_and_come_back(netns: str, backups: Path) -> None:
    surroundings(netns)
    before, numbers, objects = everything(netns), counters(netns), handles(netns)
    kube_proxy(netns)
    whole = everything(netns)
    path = cleaned(netns, backups, "--only", "kube-proxy")
    assert everything(netns) == before
    assert (counters(netns), handles(netns)) == (numbers, objects)
    assert "kube-proxy" not in kinds(netns)
    restored(path)
    assert everything(netns) == whole


def test_no_built_in_chain_stays_that_was_made_for_what_goes_alone(
    netns: str, backups: Path
) -> None:
    inside(netns, "iptables-nft", "-A", "OUTPUT", "-p", "sctp", "-j", "ACCEPT")
    inside(netns, "ip6tables-nft", "-P", "OUTPUT", "DROP")
    before = everything(netns)
    for version in (4, 6):
        text = left.KUBE_PROXY if version == 4 else "*nat\n:KUBE-SERVICES -\nCOMMIT\n"
        load(netns, text, version=version)
    canary = "*{}\n:KUBE-PROXY-CANARY - [0:0]\nCOMMIT\n"
    load(netns, canary.format("mangle") + canary.format("filter"), version=6)
    whole = everything(netns)
    path = cleaned(netns, backups)
    assert everything(netns) == before
    restored(path)
    assert everything(netns)["nft"] == whole["nft"]


def test_a_foreign_rule_that_leads_to_a_chain_goes_with_it_and_comes_back(
    netns: str, backups: Path
) -> None:
    load(netns, left.KUBE_PROXY)
    for line in ("-N MINE", "-A MINE -p tcp -j KUBE-MARK-MASQ", "-A MINE -p udp -j RETURN"):
        inside(netns, "iptables-nft", "-t", "nat", *line.split())
    before = everything(netns)
    path = cleaned(netns, backups)
    assert inside(netns, "iptables-nft", "-t", "nat", "-S", "MINE").count("-A") == 1
    restored(path)
    assert everything(netns) == before


def test_the_interface_of_the_ipvs_mode_goes_too(netns: str, backups: Path) -> None:
    inside(netns, *["ip", "link", "add", "kube-ipvs0", "type", "veth", "peer", "name", "x"])
    load(netns, left.KUBE_PROXY)
    cleaned(netns, backups)
    assert "kube-ipvs0" not in inside(netns, "ip", "link")


def test_the_backup_is_what_the_restore_tool_takes(netns: str, backups: Path) -> None:
    load(netns, left.DOCKER)
    load(netns, left.KUBE_PROXY)
    before = everything(netns)
    path = cleaned(netns, backups)
    assert everything(netns) != before
    inside(netns, "iptables-nft-restore", "--noflush", str(path))
    assert everything(netns) == before


def test_restoring_twice_changes_nothing_more(netns: str, backups: Path) -> None:
    surroundings(netns)
    kube_proxy(netns)
    whole = everything(netns)
    path = cleaned(netns, backups, "--only", "kube-proxy")
    restored(path)
    restored(path)
    assert everything(netns) == whole


@pytest.mark.parametrize("flavour", left.FLAVOURS)
def test_what_people_write_into_comments_goes_and_comes_back_byte_for_byte(
    netns: str, backups: Path, flavour: str
) -> None:
    odd = "\u2028 \x85 \f \r \x1b[31m \"quoted\" 'single' back\\slash caf\u00e9 \udcff"
    tool = (f"iptables-{flavour}", "-t", "nat")
    for comment in (odd, "!not", "-j"):
        about = ("-m", "comment", "--comment", comment)
        inside(netns, *tool, "-A", "OUTPUT", *about, "-j", "ACCEPT")
    before = rules_of(netns, flavour)
    inside(netns, *tool, "-N", "KUBE-SERVICES")
    for comment in (odd, "!not", "-j"):
        about = ("-m", "comment", "--comment", comment)
        inside(netns, *tool, "-I", "OUTPUT", *about, "-j", "KUBE-SERVICES")
        inside(netns, *tool, "-A", "KUBE-SERVICES", *about, "-j", "RETURN")
    whole = rules_of(netns, flavour)
    path = cleaned(netns, backups, "--only", "kube-proxy")
    assert rules_of(netns, flavour) == before
    restored(path)
    assert rules_of(netns, flavour) == whole


def test_comments_in_a_table_of_nftables_come_back_byte_for_byte(netns: str, backups: Path) -> None:
    inside(netns, "nft", "add", "table", "ip", "kube-proxy")
    inside(netns, "nft", "add", "chain", "ip", "kube-proxy", "services")
    about = ("comment", '"\u2028 \x85 \f caf\u00e9 \udcff"')
    inside(netns, "nft", "add", "rule", "ip", "kube-proxy", "services", "counter", *about)
    listing = ("nsenter", f"--net={path_of(netns)}", "nft", "list", "ruleset")
    whole = subprocess.check_output(listing)
    path = cleaned(netns, backups, "--only", "kube-proxy")
    restored(path)
    assert subprocess.check_output(listing) == whole


def test_a_table_of_many_services_goes_and_comes_back_as_it_was(netns: str, backups: Path) -> None:
    services = "".join(
        f"chain service-{n}/web/tcp/http {{ "
        f'ip daddr 10.96.{n // 250}.{n % 250} jump masq comment "no {n}"; '
        f"numgen random mod 1 vmap {{ 0 : goto endpoint }}; }}\n"
        for n in range(600)
    )
    endpoint = "chain endpoint { update @seen { ip saddr }; meta l4proto tcp dnat to 10.0.0.7:80; }"
    seen = "set seen { type ipv4_addr; flags dynamic,timeout; timeout 3h; }"
    mark = "chain masq { ct state new meta mark set mark or 0x4000; }"
    text = f"table ip kube-proxy {{ {seen}\n {mark}\n {endpoint}\n {services} }}"
    inside(netns, "nft", "-f", "-", stdin=text)
    before = everything(netns)
    path = cleaned(netns, backups)
    assert "kube-proxy" not in everything(netns)["nft"]
    restored(path)
    assert everything(netns) == before


def rules_of(name: str, flavour: str) -> bytes:
    command = ("nsenter", f"--net={path_of(name)}", f"iptables-{flavour}-save", "-t", "nat")
    lines = subprocess.check_output(command).split(b"\n")
    return b"\n".join(line for line in lines if not line.startswith((b"#", b":")))


# --- captures -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", left.LEADING[::3])
def test_whatever_istio_init_wrote_goes_whatever_its_flags_were(
    netns: str, backups: Path, name: str
) -> None:
    add_foreign(netns)
    before = everything(netns)
    ISTIO_INIT[name].load(netns, "nft")
    whole = everything(netns)
    path = cleaned(netns, backups, "--only", "blackhole")
    assert everything(netns) == before
    restored(path)
    try_tools(netns, "nft")  # a chain without rules is not put back
    assert everything(netns) == whole


@pytest.mark.parametrize("backend", BACKENDS)
def test_traffic_flows_again_once_a_capture_without_a_proxy_is_gone(
    backups: Path, backend: str
) -> None:
    with namespace("pod") as pod, namespace("peer") as peer:
        link(pod, peer)
        capture(pod, {**EVERYTHING, "enable_ipv6": False}, backend)
        with listening(pod, 8080, address="10.77.9.2"):
            with pytest.raises(AssertionError, match="refused"):
                inside(peer, "python3", "-c", DIAL)
            cleaned(pod, backups)
            inside(peer, "python3", "-c", DIAL)
        assert without_capture("".join(state(pod).values()))


def link(pod: str, peer: str) -> None:
    inside(pod, *f"ip link add eth0 type veth peer name eth0 netns {peer}".split())
    for name, address in ((pod, "10.77.9.2/24"), (peer, "10.77.9.1/24")):
        inside(name, "ip", "addr", "add", address, "dev", "eth0")
        inside(name, "ip", "link", "set", "eth0", "up")


def test_a_capture_of_this_agent_goes_with_its_guard_and_comes_back(
    netns: str, backups: Path
) -> None:
    add_foreign(netns)
    before = everything(netns)
    capture(netns, {**TPROXY, **DNS, "guard": "standing"}, "iptables-nft")
    whole = everything(netns)
    path = cleaned(netns, backups, "--only", "blackhole")
    assert everything(netns) == before
    restored(path)
    assert everything(netns) == whole


def test_routing_goes_with_the_rules_and_comes_back(netns: str, backups: Path) -> None:
    load(netns, left.AMBIENT)
    inside(netns, *["ip", "route", "add", "local", "default", "dev", "lo", "table", "100"])
    inside(netns, *["ip", "rule", "add", "fwmark", "0x111/0xfff", "pref", "32764", "lookup", "100"])
    whole = everything(netns)
    path = cleaned(netns, backups)
    assert "0x111" not in inside(netns, "ip", "rule")
    assert inside(netns, "ip", "route", "show", "table", "100", check=False) == ""
    restored(path)
    assert everything(netns) == whole


def test_a_mesh_that_is_gone_is_taken_out(netns: str, backups: Path) -> None:
    load(netns, left.DOCKER)
    before = everything(netns)
    load(netns, left.LINKERD)
    cleaned(netns, backups)
    assert everything(netns) == before


def test_marked_rules_in_chains_of_the_kernel_go_too(netns: str, backups: Path) -> None:
    load(netns, left.DOCKER)
    before = everything(netns)
    load(netns, left.CALICO)
    cleaned(netns, backups)
    assert everything(netns) == before


# --- what is asked --------------------------------------------------------------------------------


def test_nothing_is_removed_without_a_yes(netns: str, backups: Path) -> None:
    load(netns, left.KUBE_PROXY)
    before = everything(netns)
    where = ("--netns", netns, "--backup-dir", str(backups))
    code, out, err = command("clean", *where)
    assert (code, "--yes" in err) == (2, True)
    assert "-X KUBE-SERVICES" in out
    code, out, _ = command("clean", *where, "--dry-run", "-o", "json")
    assert (code, json.loads(out)["removed"]) == (1, [])
    assert any("KUBE-SVC" in line for line in json.loads(out)["would_remove"])
    assert everything(netns) == before
    assert not backups.exists()


def test_a_person_is_asked_and_may_say_no(netns: str, backups: Path) -> None:
    load(netns, left.KUBE_PROXY)
    words = f"clean --netns {netns} --backup-dir {backups}"
    assert "Make these 14 steps?" in left.on_terminal(words, "n\n")
    assert kinds(netns) == ["kube-proxy"]
    assert "removed" in left.on_terminal(words, "y\n")
    assert kinds(netns) == []


def test_a_clean_namespace_needs_no_cleaning(netns: str) -> None:
    surroundings(netns)
    code, out, _ = command("clean", "--netns", netns, "--only", "kube-proxy", "-o", "json")
    assert (code, json.loads(out)) == (0, {"removed": [], "backup": None})


def test_only_the_kind_that_was_named_goes(netns: str, backups: Path) -> None:
    load(netns, left.KUBE_PROXY)
    load(netns, left.SIDECAR)
    cleaned(netns, backups, "--only", "blackhole")
    assert kinds(netns) == ["kube-proxy"]


def test_the_nodes_own_namespace_needs_a_word_for_it(netns: str, backups: Path) -> None:
    load(netns, left.KUBE_PROXY)
    words = ("--yes", "--only", "kube-proxy", "--backup-dir", str(backups))
    code, _, err = as_host(netns, "clean", "--netns", netns, *words)
    assert (code, "--host" in err) == (3, True)
    assert kinds(netns) == ["kube-proxy"]
    code, out, _ = as_host(netns, "clean", "--all", "--dry-run", "-o", "json")
    assert not [line for line in json.loads(out)["would_remove"] if line.startswith("host:")]
    code, _, err = as_host(netns, "clean", "--host", *words)
    assert (code, err) == (0, "")
    assert kinds(netns) == []


# --- while others write, and when it is killed ----------------------------------------------------


def planned(name: str) -> Planned:
    with Netns.open(path_of(name)) as opened:
        subject = Subject(place=Place(opened.id, str(path_of(name)), name))
    found = clean.prepare(subject, Node(), kinds=frozenset(), known_of=lambda _: Known())
    assert found is not None
    return found


class Killed(BaseException):
    """Stands for the end of the process: nobody gets to do anything about it."""


class Until:
    """Lets some steps happen and then fails."""

    def __init__(self, steps: int, failure: BaseException) -> None:
        self.left = steps
        self.failure = failure

    def __call__(self, _: Step) -> None:
        if self.left == 0:
            raise self.failure
        self.left -= 1


def perform(found: Planned, hook: Until) -> None:
    clean.perform(found, Node(), kinds=frozenset(), known_of=lambda _: Known(), before_step=hook)


def test_a_removal_of_what_is_not_there_any_more_is_refused(netns: str) -> None:
    load(netns, left.KUBE_PROXY)
    found = planned(netns)
    inside(netns, "iptables-nft", "-t", "nat", "-A", "KUBE-SERVICES", "-j", "RETURN")
    before = everything(netns)
    with pytest.raises(clean.Moved):
        perform(found, Until(9, Killed()))
    assert everything(netns) == before


def test_what_others_write_meanwhile_is_nobodys_business(netns: str) -> None:
    load(netns, left.KUBE_PROXY)
    found = planned(netns)
    load(netns, left.DOCKER)
    perform(found, Until(99, Killed()))
    assert kinds(netns) == []
    assert "DOCKER-USER" in inside(netns, "iptables-nft-save")


@pytest.mark.parametrize("steps", [0, 2, 4])
def test_whoever_is_killed_can_go_on_or_go_back(netns: str, tmp_path: Path, steps: int) -> None:
    surroundings(netns)
    clean_state = everything(netns)
    kube_proxy(netns)
    whole = everything(netns)
    found = planned(netns)
    backup.write(tmp_path / "b.txt", [found.saved])
    with contextlib.suppress(Killed):
        perform(found, Until(steps, Killed()))
    with contextlib.suppress(AssertionError):  # there may be nothing left to do
        perform(planned(netns), Until(99, Killed()))
    assert everything(netns) == clean_state
    restored(tmp_path / "b.txt")
    assert everything(netns) == whole
    with contextlib.suppress(Killed):
        perform(planned(netns), Until(steps, Killed()))
    restored(tmp_path / "b.txt")
    assert everything(netns) == whole


@pytest.mark.parametrize("steps", [1, 4])
def test_a_write_that_is_refused_is_undone_with_all_before_it(netns: str, steps: int) -> None:
    surroundings(netns)
    kube_proxy(netns)
    whole = everything(netns)
    with pytest.raises(RolledBack):
        perform(planned(netns), Until(steps, KernelRejected("no")))
    assert everything(netns) == whole


@pytest.mark.parametrize("birth", [True, False], ids=["told", "of an older agent"])
def test_a_backup_of_a_namespace_that_is_gone_is_not_put_into_one_with_its_number(
    netns: str, backups: Path, birth: bool
) -> None:
    with namespace() as name:
        load(name, left.KUBE_PROXY)
        path = cleaned(name, backups)
        old = id_at(path_of(name))
    now = id_at(path_of(netns))
    assert old is not None
    assert now is not None
    text = path.read_text().replace(f'"ino": {old.ino}', f'"ino": {now.ino}')
    path.write_text(text if birth else re.sub(r'"birth": "[^"]*", ', "", text))
    before = state(netns)
    code, _, err = command("clean", "--restore", str(path))
    assert (code, ("is gone" if birth else "cannot be told") in err) == (3, True)
    assert state(netns) == before
    code, _, err = command("clean", "--restore", str(path), "--netns", netns)
    assert (code, state(netns) == before) == (0, False), err


def test_a_namespace_that_was_made_anew_meanwhile_is_not_cleaned(netns: str) -> None:
    load(netns, left.KUBE_PROXY)
    found = planned(netns)
    before = state(netns)
    with pytest.raises(clean.Moved, match="another namespace"):
        perform(replace(found, saved=replace(found.saved, birth="b0:7")), Until(99, Killed()))
    assert state(netns) == before


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("*nat\nCOMMIT\n", "no backup"),
        (f"{backup.FIRST_LINE}\n{backup.NAMESPACE}{{}}\n", "line 2"),
        (f"{ABOUT}{backup.SECTION}sh: sh\ntouch /nonexistent/x\n", "no command of ip"),
        (f"{ABOUT}{backup.SECTION}gawk: gawk\n", "no tool gawk"),
    ],
    ids=["another", "torn", "command", "tool"],
)
def test_a_file_that_is_no_backup_is_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "x").write_text(text)
    code, _, err = command("clean", "--restore", str(tmp_path / "x"))
    assert (code, said in err) == (2, True)


def test_a_backup_that_is_cut_short_is_refused_as_a_whole(netns: str, backups: Path) -> None:
    load(netns, left.KUBE_PROXY)
    path = cleaned(netns, backups)
    empty = state(netns)
    path.write_text(path.read_text().rpartition("COMMIT")[0])
    code, _, err = command("clean", "--restore", str(path))
    assert (code, "cut short" in err) == (2, True)
    assert state(netns) == empty


def test_a_backup_goes_into_the_nodes_own_namespace_only_when_that_is_said(
    netns: str, backups: Path
) -> None:
    load(netns, left.KUBE_PROXY)
    path = cleaned(netns, backups)
    with namespace("node") as node:
        before = state(node)
        code, _, err = as_host(node, "clean", "--restore", str(path), "--netns", node)
        assert (code, "say --host" in err) == (3, True), err
        assert state(node) == before
        code, _, err = as_host(node, "clean", "--restore", str(path), "--netns", node, "--host")
        assert code == 0, err
        assert "KUBE-SERVICES" in inside(node, "iptables-nft-save")


def test_of_a_backup_of_several_namespaces_only_its_own_part_goes_into_one_that_is_named(
    netns: str, backups: Path
) -> None:
    with namespace("two") as two, namespace("three") as three:
        for name in (netns, two):
            load(name, left.KUBE_PROXY)
        whole, other = everything(two), state(three)
        line = ("clean", "--netns", netns, "--netns", two, "--yes", "--backup-dir", str(backups))
        code, out, err = command(*line, "-o", "json")
        assert code == 0, err
        path = json.loads(out)["backup"]
        assert command("clean", "--restore", path, "--netns", three)[0] == 2
        assert state(three) == other
        empty = everything(netns)
        code, _, err = command("clean", "--restore", path, "--netns", two)
        assert code == 0, err
        assert (everything(two), everything(netns)) == (whole, empty)


def test_a_no_on_the_terminal_leaves_everything_and_says_that_it_is_there(
    netns: str, backups: Path
) -> None:
    kube_proxy(netns)
    before = state(netns)
    ours, theirs = pty.openpty()
    line = ("clean", "--netns", netns, "--backup-dir", str(backups))
    command = (sys.executable, "-m", "agent.cli.main", *line)
    try:
        with subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=subprocess.PIPE, text=True
        ) as process:
            os.close(theirs)
            os.write(ours, b"n\n")
            _, err = process.communicate(timeout=60)
    finally:
        os.close(ours)
    assert process.returncode == 1
    assert err.endswith("error: nothing was removed: the answer was no\n")
    assert state(netns) == before
