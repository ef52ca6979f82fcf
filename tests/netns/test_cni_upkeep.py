"""What others do to the node's CNI configuration, and how a running agent keeps its entry there.

The agent runs in a mount namespace of its own, in which both directories are small file systems.
"""

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agent.formats.cni_config import TYPE
from tests.support.agent import RESULT, Agent, wait_for
from tests.support.netns import inside, run

# `outside` is where everybody else writes the configurations, should the agent be unable to.
MOUNT = """
for place in net.d bin state; do mount -t tmpfs -o size=128k none "$0/$place" || exit; done
mount --bind "$0/net.d" "$0/outside" && exec "$@"
"""
FILE = "10-test.conflist"
VERSION = {"cniVersion": "1.0.0", "name": "test"}
BASE = json.dumps({**VERSION, "plugins": [{"type": "bridge"}]}).encode()
OTHER = json.dumps({**VERSION, "name": "other", "plugins": [{"type": "ptp"}]}).encode()
SINGLE = json.dumps({**VERSION, "type": "bridge"}).encode()


class Node:
    """An agent that keeps up the CNI of a node, and the directories as it sees them."""

    def __init__(self, folder: Path) -> None:
        for place in ("net.d", "outside", "bin", "state"):
            (folder / place).mkdir()
        self.folder = folder
        directories = {"conf_dir": str(folder / "net.d"), "bin_dir": str(folder / "bin")}
        self.agent = Agent(folder, cni=directories)
        self.agent.prefix = ("unshare", "--mount", "sh", "-c", MOUNT, str(folder))
        self.agent.start(ready=False)
        assert self.agent.process is not None
        seen = Path(f"/proc/{self.agent.process.pid}/root{folder}")
        self.conf, self.bin, self.state = seen / "outside", seen / "bin", seen / "state"

    def remount(self, options: str) -> None:
        """Let the agent write configurations or not."""
        assert self.agent.process is not None
        enter = ("nsenter", f"--target={self.agent.process.pid}", "--mount")
        run(*enter, "mount", "-o", f"remount,bind,{options}", str(self.folder / "net.d"))

    def chain(self, name: str = FILE) -> list[str]:
        try:
            document = json.loads((self.conf / name).read_bytes())
        except (OSError, ValueError):
            return []
        return [plugin["type"] for plugin in document.get("plugins", [document])]

    def put(self, name: str, data: bytes) -> None:
        """Write as programs do who mean well: a rename inside the directory."""
        (self.conf / ".draft").write_bytes(data)
        (self.conf / ".draft").rename(self.conf / name)

    def cni(self) -> dict[str, Any]:
        found: dict[str, Any] = self.agent.status()["cni"]
        return found

    def ready(self) -> bool:
        return self.agent.get("health", "/healthz/ready")[0] == 200

    def reason(self) -> str:
        """Return what readiness waits for."""
        pending = json.loads(self.agent.get("health", "/healthz/ready")[1])["pending"]
        return "; ".join(pending)

    def wait_for_reason(self, said: str) -> None:
        wait_for(lambda: said in self.reason())

    def wait_for_repairs(self, count: int) -> None:
        wait_for(lambda: self.cni()["repairs"] == count, 40)

    def wait_in_order(self, name: str = FILE, first: str = "bridge") -> None:
        wait_for(lambda: self.chain(name) == [first, TYPE], 40)
        wait_for(lambda: os.access(self.bin / TYPE, os.X_OK))
        wait_for(lambda: self.cni()["file"] == name and self.ready())

    def drafts(self) -> list[str]:
        """Return what is left of unfinished writes."""
        both = (*self.conf.iterdir(), *self.bin.iterdir())
        return [path.name for path in both if path.name.endswith(".tmp")]


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    monkeypatch.delenv("INTERCEPT_STATE_DIR", raising=False)
    found = Node(tmp_path)
    try:
        yield found
    finally:
        found.agent.kill()


@pytest.fixture
def installed(node: Node) -> Node:
    node.put(FILE, BASE)
    node.wait_in_order()
    return node


def fill(folder: Path) -> None:
    """Leave no byte free on the file system of a folder."""
    with (folder / "fill").open("wb", buffering=0) as file:
        for size in (65536, 4096, 1):
            while True:
                try:
                    file.write(bytes(size))
                except OSError:
                    break


# --- what others write ----------------------------------------------------------------------------


def in_place(node: Node) -> None:
    with (node.conf / FILE).open("r+b") as file:
        file.truncate(0)
        file.write(BASE)


def entry_torn_out_of_the_middle(node: Node) -> None:
    node.put(FILE, (node.conf / FILE).read_bytes().replace(b'"failurePolicy"', b'"failure"'))


# As many in a row as are put right at once; more of them within a minute are a fight.
@pytest.mark.parametrize(
    "damages",
    [
        (in_place, entry_torn_out_of_the_middle, lambda node: node.put(FILE, BASE)),
        (
            lambda node: (node.bin / TYPE).unlink(),
            lambda node: os.truncate(node.bin / TYPE, 1000),
            lambda node: (node.bin / TYPE).chmod(0o644),
        ),
    ],
    ids=["configuration", "binary"],
)
def test_what_is_altered_is_put_right(
    installed: Node, damages: tuple[Callable[[Node], object], ...]
) -> None:
    before = (installed.bin / TYPE).read_bytes()
    for number, damage in enumerate(damages):
        damage(installed)
        installed.wait_for_repairs(number + 2)
        installed.wait_in_order()
        assert (installed.bin / TYPE).read_bytes() == before
        assert not installed.drafts()


def test_file_that_cannot_be_edited_is_told_and_left_as_it_is(installed: Node) -> None:
    path = installed.conf / FILE
    for data, said in ((BASE[:30], "is not JSON"), (b"", "is empty"), (b"\xff", "is not JSON")):
        path.write_bytes(data)
        installed.wait_for_reason(f"{FILE} {said}")
        assert not installed.ready()
        time.sleep(1.2)  # longer than a write of somebody is given to be finished
        assert path.read_bytes() == data
    path.unlink()
    installed.wait_for_reason("there is no CNI configuration yet")
    installed.put(FILE, BASE)
    installed.wait_in_order()


def test_file_that_comes_first_is_followed_and_the_next_one_when_it_goes(installed: Node) -> None:
    installed.put("00-first.conflist", OTHER)
    installed.wait_in_order("00-first.conflist", "ptp")
    (installed.conf / "00-first.conflist").unlink()
    installed.wait_in_order()


@pytest.mark.parametrize(
    ("name", "becomes"),
    [
        ("05-new.conf", "05-new.conflist"),
        ("05-new.json", "05-new.conflist"),
        (".05-hidden.conflist", ".05-hidden.conflist"),  # runtimes read it, too
    ],
)
def test_cni_that_is_swapped_is_followed_whatever_its_file(
    installed: Node, name: str, becomes: str
) -> None:
    (installed.conf / FILE).unlink()
    data = SINGLE if name.endswith((".conf", ".json")) else BASE
    installed.put(name, data)
    installed.wait_in_order(becomes)


def test_names_that_no_runtime_reads_are_left_alone(installed: Node) -> None:
    names = ("00-a.conflist~", "00-b.conflist.bak", ".00-c.conflist.swp", "00-d.CONFLIST", "00-e")
    for name in names:
        installed.put(name, OTHER)
    (installed.conf / "00-folder.conflist").mkdir()
    installed.put(FILE, BASE)
    installed.wait_in_order()
    assert all((installed.conf / name).read_bytes() == OTHER for name in names)


def test_link_to_a_file_elsewhere_is_replaced_and_its_target_left_alone(installed: Node) -> None:
    target = installed.conf.parent / "elsewhere"
    target.write_bytes(BASE)
    (installed.conf / "link").symlink_to("../elsewhere")
    (installed.conf / "link").rename(installed.conf / FILE)
    installed.wait_in_order()
    assert target.read_bytes() == BASE


def test_bytes_that_are_no_text_stay(node: Node) -> None:
    node.put(FILE, BASE.replace(b'"test"', b'"t\xffst"'))
    wait_for(node.ready)
    assert b'"t\xffst"' in (node.conf / FILE).read_bytes()
    assert f'"{TYPE}"'.encode() in (node.conf / FILE).read_bytes()


def test_writer_that_never_ends_is_named_and_not_fought_for_ever(installed: Node) -> None:
    before, ends, undone = installed.cni()["repairs"], time.monotonic() + 3, 0
    with (installed.conf / "held open").open("wb"):
        while time.monotonic() < ends:
            if TYPE in installed.chain():
                installed.put(FILE, BASE)
                undone += 1
            time.sleep(0.01)
        assert undone <= installed.cni()["repairs"] - before + 1 <= 10
        assert f"[{os.getpid()}]" in installed.cni()["opponent"]
        assert not installed.ready()
    installed.wait_in_order()


# --- what happens to the directories --------------------------------------------------------------


def test_directory_that_comes_late_vanishes_and_comes_back(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    conf = tmp_path / "net.d"
    agent = Agent(tmp_path, cni={"conf_dir": str(conf), "bin_dir": str(tmp_path / "bin")})
    try:
        agent.start(ready=False)
        assert "the directory does not exist" in str(agent.status()["pending"])
        for number in range(2):
            conf.mkdir()
            (conf / FILE).write_bytes(BASE)
            wait_for(lambda: agent.status()["ready"])
            assert TYPE in (conf / FILE).read_text()
            conf.rename(tmp_path / f"away-{number}")
            wait_for(lambda: "the directory does not exist" in str(agent.status()["pending"]))
        (tmp_path / "away-0").rename(tmp_path / "real")
        (tmp_path / "real" / FILE).write_bytes(BASE)
        conf.symlink_to("real")
        wait_for(lambda: agent.status()["ready"])
        assert TYPE in (tmp_path / "real" / FILE).read_text()
        (tmp_path / "away-1" / FILE).write_bytes(OTHER)
        (tmp_path / "link").symlink_to("away-1")
        (tmp_path / "link").rename(conf)
        wait_for(lambda: TYPE in (tmp_path / "away-1" / FILE).read_text())
    finally:
        agent.kill()


@pytest.mark.parametrize("which", ["conf", "bin"])
def test_full_disk_leaves_nothing_half_written_and_is_made_good_for(node: Node, which: str) -> None:
    folder: Path = getattr(node, which)
    (node.conf / ".base").write_bytes(BASE)
    fill(folder)
    before = sorted(path.name for path in (*node.conf.iterdir(), *node.bin.iterdir()))
    (node.conf / ".base").rename(node.conf / FILE)
    node.wait_for_reason("No space left on device")
    assert not node.ready()
    assert (node.conf / FILE).read_bytes() == BASE
    after = sorted(path.name for path in (*node.conf.iterdir(), *node.bin.iterdir()))
    assert after == sorted({*before, FILE} - {".base"})
    (folder / "fill").unlink()
    node.wait_in_order()
    assert not node.drafts()


def test_disk_that_fills_up_later_takes_no_pods_network_away(installed: Node) -> None:
    fill(installed.conf)
    fill(installed.bin)
    installed.wait_in_order()  # what is there needs no write
    in_place(installed)
    installed.wait_for_reason("No space left on device")
    assert (installed.conf / FILE).read_bytes() == BASE
    (installed.conf / "fill").unlink()
    installed.wait_in_order()


def test_directory_that_is_read_only_is_told_and_written_once_it_can_be(installed: Node) -> None:
    installed.remount("ro")
    installed.wait_in_order()  # what is there needs no write
    installed.put(FILE, BASE)
    installed.wait_for_reason("Read-only file system; mount it writable")
    assert (installed.conf / FILE).read_bytes() == BASE
    installed.remount("rw")
    installed.wait_in_order()


def test_full_disk_below_the_state_refuses_pods_in_words_and_stops_no_repair(
    netns: str, node: Node
) -> None:
    fill(node.state)
    status, answer = node.agent.cni("ADD", netns)
    assert (status, answer["code"]) == (1, 11)
    assert "cannot write" in answer["msg"]
    assert "No space left on device" in answer["msg"]
    assert inside(netns, "nft", "list", "ruleset") == ""
    assert [path.name for path in node.state.iterdir()] == ["fill"]
    (node.state / "fill").unlink()
    assert node.agent.cni("ADD", netns) == (0, RESULT)
    fill(node.state)
    inside(netns, "nft", "flush", "table", "inet", "intercept-agent")
    wait_for(lambda: "drift-repaired" in node.agent.kinds())
    assert node.agent.state("web") == "in-sync"
