"""Namespaces that do not exist, are none, or must not be touched: exit 3 and a clear sentence.

Whatever names the node's own namespace is tried with --dry-run only, so that a mistake in the agent
fails a test and does not take the machine off the network.
"""

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.conformance import NOBODY, Ran, cli, cli_process, loaded
from tests.support.netns import inside, path_of, snapshot

WHOLE = ("-b", "80", "--backend", "iptables-nft")


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INTERCEPT_STATE_DIR", str(tmp_path / "state"))


@pytest.fixture(autouse=True)
def run_netns_unchanged() -> Iterator[None]:
    """Fail if a namespace came into being: a tool that is asked for one may make it."""
    before = named()
    yield
    assert not {name for name in named() - before if not name.startswith("it-")}


def named() -> set[str]:
    return set(os.listdir("/run/netns"))


def assert_refused(done: Ran, *fragments: str, code: int = 3) -> None:
    assert (done.code, done.stdout) == (code, ""), done.stderr
    assert len(done.lines) == 1, done.stderr
    assert done.stderr.startswith("error: ")
    for fragment in fragments:
        assert fragment in done.stderr


@pytest.mark.parametrize("command", ["apply", "check", "plan", "remove"])
def test_namespace_that_is_missing_is_not_created(command: str) -> None:
    words = () if command == "remove" else ("-b", "80")
    done = cli(command, "--netns", "it-missing", *words)
    assert_refused(done, "/run/netns/it-missing", "ip netns list")
    assert "it-missing" not in named()


@pytest.mark.parametrize("command", ["apply", "check", "plan", "remove"])
@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("/etc/hostname", "/etc/hostname is not a network namespace"),
        ("/proc/self/ns/mnt", "/proc/self/ns/mnt is not a network namespace"),
        ("/tmp", "/tmp is not a network namespace"),
        ("/dev/null", "/dev/null is not a network namespace"),
        ("/run/netns/../it-missing", "/run/netns/../it-missing"),
        ("pid:4194305", "4194305"),
        ("pid:one", "pid:one"),
        ("pid:", "pid:"),
        ("pid:-1", "pid:-1"),
        ("pid:0", "0"),
        ("pid:\u0661", "pid:"),
        ("container:0123456789abcdef", "container 0123456789abcdef"),
        ("container:ID", "container:ID"),
        ("container:", "container:"),
        ("pod:shop/web-1", "web-1"),
        ("pod:web-1", "pod:NAMESPACE/NAME"),
        ("..", "'..'"),
    ],
)
def test_target_that_is_no_namespace_is_refused(command: str, target: str, said: str) -> None:
    assert_refused(cli(command, "--netns", target), said)


def test_named_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    path = str(tmp_path / "pipe")
    done = cli_process("apply", "--netns", path, within=("timeout", "3"))
    assert_refused(done, path)


@pytest.mark.parametrize("command", ["apply", "check", "remove"])
def test_without_root_nothing_is_done_and_the_sentence_says_so(command: str, netns: str) -> None:
    before = snapshot(netns)
    done = cli_process(command, "--netns", netns, user=NOBODY)
    assert_refused(done, "root", netns)
    assert snapshot(netns) == before


@pytest.mark.parametrize(
    "target",
    [
        "host",
        "self",
        "/proc/self/ns/net",
        "/proc/thread-self/ns/net",
        "/proc/1/ns/net",
        "/proc/2/ns/net",
        "pid:1",
        "pid:2",
        "pid:OWN",
        "/proc/OWN/ns/net",
        "/proc/OWN/root/proc/self/ns/net",
    ],
)
@pytest.mark.parametrize("command", ["apply", "remove"])
def test_namespace_of_the_node_is_refused_by_every_name(command: str, target: str) -> None:
    done = cli(command, "--netns", target.replace("OWN", str(os.getpid())), "--dry-run")
    assert_refused(done)
    assert "node's own" in done.stderr or "Permission denied" in done.stderr


def test_link_to_the_namespace_of_the_node_is_refused(tmp_path: Path) -> None:
    link = tmp_path / "pod"
    link.symlink_to("/proc/self/ns/net")
    assert_refused(cli("apply", "--netns", str(link), "--dry-run"), "node's own")


def test_apply_has_no_way_to_allow_the_node() -> None:
    done = cli("apply", "--netns", "host", "--host", "--dry-run")
    assert_refused(done, "--host", code=2)


def test_self_is_the_pod_for_an_init_container(netns: str) -> None:
    within = ("ip", "netns", "exec", netns)
    done = cli_process("apply", "--netns", "self", *WHOLE, within=within)
    assert done.code == 0, done.stderr
    assert "ISTIO_INBOUND" in loaded(netns, "iptables-nft", 4)["nat"]


def test_self_is_accepted_in_an_unnamed_namespace() -> None:
    done = cli_process("apply", "--netns", "self", *WHOLE, within=("unshare", "--net"))
    assert done.code == 0, done.stderr
    assert "captured" in done.stdout


def test_own_namespace_by_another_name_than_self_is_refused_in_a_pod(netns: str) -> None:
    within = ("ip", "netns", "exec", netns)
    done = cli_process("apply", "--netns", "/proc/self/ns/net", *WHOLE, within=within)
    assert_refused(done, "self")
    assert loaded(netns, "iptables-nft", 4) == {}


@pytest.mark.parametrize("form", ["{name}", "/run/netns/{name}", "pid:{pid}"])
def test_pod_may_be_named_in_every_form(form: str, netns: str) -> None:
    with subprocess.Popen(("nsenter", f"--net=/run/netns/{netns}", "sleep", "30")) as sleeper:
        try:
            while os.stat(f"/proc/{sleeper.pid}/ns/net").st_ino != path_of(netns).stat().st_ino:
                time.sleep(0.01)
            target = form.format(name=netns, pid=sleeper.pid)
            done = cli("apply", "--netns", target, *WHOLE)
        finally:
            sleeper.kill()
    assert done.code == 0, done.stderr
    assert "ISTIO_INBOUND" in loaded(netns, "iptables-nft", 4)["nat"]


@pytest.mark.parametrize("backend", ["nftables", "iptables-nft", "iptables-legacy"])
def test_tproxy_is_refused_while_lo_is_down(netns: str, backend: str) -> None:
    inside(netns, "ip", "link", "set", "lo", "down")
    before = snapshot(netns)
    done = cli("apply", "--netns", netns, "-m", "TPROXY", "-b", "80", "--backend", backend)
    assert_refused(done, "lo is down", "ip link set lo up")
    assert snapshot(netns) == before
