"""The installer on real directories: every byte, mode and owner, whatever goes wrong on the way."""

import argparse
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent.cli import cni_command
from agent.cni import binary, installer
from agent.cni.edits import KEPT_SUFFIX
from agent.cni.folder import Busy, Folder
from agent.cni.installer import Place
from agent.formats.cni_config import TYPE, Entry
from agent.model.errors import AgentError, EnvironmentLacks, InvalidSettings
from tests.support.cni_program import Program

CONF = b'{"cniVersion":"0.3.1","name":"n","type":"bridge"}'
LIST = (
    b'{"cniVersion":"1.0.0","name":"n",\n "plugins":[\n  {"type":"bridge", "mtu":1.50e3}\n ]}\n\n'
)
Tree = dict[str, tuple[object, ...]]


class Node:
    """A node's two directories under one temporary folder."""

    def __init__(self, root: Path) -> None:
        self.conf, self.bin = root / "net.d", root / "bin"
        self.conf.mkdir()
        self.bin.mkdir()
        (self.bin / "bridge").touch(mode=0o755)

    def write(self, name: str, data: bytes) -> Path:
        (self.conf / name).write_bytes(data)
        return self.conf / name

    def place(self, **options: Any) -> Place:
        return Place(**{"conf_dir": str(self.conf), "bin_dir": str(self.bin), **options})

    def install(self, **options: Any) -> installer.Report:
        return installer.install(self.place(**options))

    def uninstall(self, **options: Any) -> installer.Report:
        return installer.uninstall(self.place(), **options)

    def check(self, **options: Any) -> installer.Report:
        return installer.check(self.place(**options))

    def tree(self) -> Tree:
        """Return everything that can be seen of both directories but times and inodes."""
        found: Tree = {}
        for folder in (self.conf, self.bin):
            for path in sorted(folder.iterdir()):
                seen = path.lstat()
                what = os.readlink(path) if path.is_symlink() else path.read_bytes()
                key = f"{folder.name}/{path.name}"
                found[key] = (what, stat.filemode(seen.st_mode), seen.st_uid, seen.st_gid)
        return found

    def names_us(self) -> bool:
        return any(f'"{TYPE}"'.encode() in path.read_bytes() for path in self.conf.glob("*.con*"))


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


STARTS: dict[str, dict[str, bytes]] = {
    "a list": {"10-x.conflist": LIST},
    "a conf": {"10-x.conf": CONF},
    "a json": {"10-x.json": CONF},
    "a conf and a list of that name": {"10-x.conf": CONF, "10-x.conflist": LIST},
    "several": {"10-x.conf": CONF, "20-y.conflist": LIST, "99-loopback.conf": CONF},
    "an invalid one in front": {"05-a.conflist": b"{", "10-x.conflist": LIST},
}


def start(node: Node, name: str) -> Tree:
    for file, data in STARTS[name].items():
        node.write(file, data)
    return node.tree()


# --- there and back ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STARTS)
def test_install_twice_then_uninstall_gives_back_every_byte(node: Node, name: str) -> None:
    before = start(node, name)
    first = node.install()
    installed = node.tree()
    assert first.changed
    assert node.check().in_sync
    second = node.install()
    assert (second.changes, node.tree()) == ((), installed)
    node.uninstall()
    assert node.tree() == before
    assert not node.uninstall().changed


def test_install_again_writes_nothing_at_all(node: Node) -> None:
    start(node, "a conf")
    node.install()
    seen = [path.stat() for path in (*node.conf.iterdir(), *node.bin.iterdir())]
    node.install()
    after = [path.stat() for path in (*node.conf.iterdir(), *node.bin.iterdir())]
    assert [(s.st_ino, s.st_mtime_ns, s.st_ctime_ns) for s in after] == [
        (s.st_ino, s.st_mtime_ns, s.st_ctime_ns) for s in seen
    ]


@pytest.mark.netns
@pytest.mark.parametrize("name", ["10-x.conflist", "10-x.conf"])
def test_mode_and_owner_are_kept(node: Node, name: str) -> None:
    path = node.write(name, LIST if name.endswith("list") else CONF)
    os.chown(path, 12, 34)
    path.chmod(0o640)
    before = node.tree()
    node.install()
    made = (node.conf / "10-x.conflist").stat()
    assert (stat.S_IMODE(made.st_mode), made.st_uid, made.st_gid) == (0o640, 12, 34)
    node.uninstall()
    assert node.tree() == before


def test_symbolic_link_is_replaced_and_comes_back_as_a_link(node: Node, tmp_path: Path) -> None:
    target = tmp_path / "elsewhere"
    target.write_bytes(LIST)
    (node.conf / "10-x.conflist").symlink_to(target)
    before = node.tree()
    node.install()
    assert not (node.conf / "10-x.conflist").is_symlink()
    assert target.read_bytes() == LIST
    assert node.check().in_sync
    node.uninstall()
    assert node.tree() == before


def test_strange_things_in_the_directory_stop_nothing(node: Node) -> None:
    start(node, "a list")
    os.mkfifo(node.conf / "00-fifo.conf")
    (node.conf / "01-dir.conflist").mkdir()
    (node.conf / "02-dangling.conflist").symlink_to("/no/such/file")
    report = node.install()
    assert report.file == "10-x.conflist"
    assert sum("cannot be read" in warning for warning in report.warnings) == 2


def test_wrong_entry_is_repaired_in_words(node: Node) -> None:
    start(node, "a list")
    node.install(entry=Entry(socket="/old.sock", failure_policy="open"))
    said = node.check().differences
    assert said == (
        '10-x.conflist: body differs: socket "/old.sock" instead of '
        '"/run/intercept-agent/agent.sock"; body differs: failurePolicy "open" instead of "closed"',
    )
    node.install()
    assert node.check().in_sync


def test_base_plugin_that_is_not_in_the_plugin_directory_is_told(node: Node) -> None:
    start(node, "a list")
    (node.bin / "bridge").unlink()
    assert "name that directory with --bin-dir" in node.install().warnings[0]


# --- the binary ----------------------------------------------------------------------------------


def call(node: Node, verb: str, text: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    environment = {"CNI_COMMAND": verb}
    return subprocess.run(
        [node.bin / TYPE], input=text, capture_output=True, env=environment, check=False
    )


def test_binary_is_one_file_that_runs_by_the_nodes_python(node: Node) -> None:
    start(node, "a list")
    node.install()
    first, second, _ = (node.bin / TYPE).read_bytes().split(b"\n", 2)
    assert first.startswith(b"#!/")
    assert first.endswith(b"python3 -ISE")
    assert sys.prefix.encode() == sys.base_prefix.encode() or sys.prefix.encode() not in first
    assert second.startswith(b"# intercept-cni ")
    assert json.loads(call(node, "VERSION").stdout)["cniVersion"] == "1.1.0"
    assert call(node, "DEL").returncode == 0


def test_binary_is_replaced_while_it_runs(node: Node) -> None:
    start(node, "a list")
    node.install()
    path = node.bin / TYPE
    path.write_bytes(path.read_bytes() + b"# older\n")
    pipe = subprocess.PIPE
    about = {"CONTAINERID": "c", "NETNS": "/n", "IFNAME": "eth0", "COMMAND": "ADD"}
    environment = {f"CNI_{name}": value for name, value in about.items()}
    with subprocess.Popen([path], stdin=pipe, stdout=pipe, stderr=pipe, env=environment) as old:
        assert "with other contents" in node.check().differences[0]
        node.install()
        result = {"cniVersion": "1.0.0", "ips": []}
        annotations: dict[str, object] = {"io.kubernetes.cri.pod-annotations": {}}
        conf = {
            "cniVersion": "1.0.0", "name": "n", "prevResult": result,
            "socket": "/no.sock", "runtimeConfig": annotations,
        }  # fmt: skip
        answer, _ = old.communicate(json.dumps(conf).encode())
    assert json.loads(answer) == result
    assert node.check().in_sync


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: path.unlink(), "is missing"),
        (lambda path: path.write_bytes(b""), "is not started as it should be"),
        (lambda path: path.chmod(0o644), "is not executable"),
        (lambda path: path.write_bytes(b"#!/no/python3 -ISE\n"), "which is not there"),
        (lambda path: path.write_bytes(b"#!/usr/bin/python3 -ISE\nx"), "of another make"),
    ],
)
def test_damaged_binary_is_told_and_mended(
    node: Node, damage: Callable[[Path], object], said: str
) -> None:
    start(node, "a list")
    node.install()
    good = node.tree()
    damage(node.bin / TYPE)
    assert said in " ".join(node.check().differences)
    node.install()
    assert node.tree() == good


def test_interpreter_that_does_not_run_the_plugin_changes_nothing(node: Node) -> None:
    before = start(node, "a conf")
    with pytest.raises(EnvironmentLacks, match="no interpreter on this node runs"):
        node.install(interpreter="/bin/false")
    assert node.tree() == before


def test_interpreter_that_only_the_node_has_is_taken_without_a_trial(node: Node) -> None:
    start(node, "a list")
    report = node.install(interpreter="/host-only/python3")
    assert "without a trial run" in report.warnings[0]
    assert node.check(interpreter="/host-only/python3").in_sync


@pytest.mark.parametrize("path", ["/with blank/python3", "/" + "x" * 127])
def test_interpreter_that_the_kernel_cannot_start_is_refused(node: Node, path: str) -> None:
    before = start(node, "a list")
    with pytest.raises(EnvironmentLacks):
        node.install(interpreter=path)
    assert node.tree() == before


# --- what cannot be done, changes nothing --------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "there is no CNI configuration yet"),
        ({"10-x.conflist": b""}, "10-x.conflist is empty"),
        ({"10-x.conflist": LIST[:-9]}, "is not JSON"),
        ({"10-x.conf": json.dumps({**Entry().body(), "name": "n"}).encode()}, "makes the network"),
        ({"10-x.conflist": LIST.replace(b"1.0.0", b"0.2.0")}, "cniVersion 0.2.0"),
    ],
)
def test_nothing_to_chain_to_touches_nothing(
    node: Node, files: dict[str, bytes], said: str
) -> None:
    for name, data in files.items():
        node.write(name, data)
    before = node.tree()
    with pytest.raises(EnvironmentLacks, match=said):
        node.install()
    assert node.tree() == before
    assert not node.check().in_sync


def test_missing_directories_are_named(node: Node, tmp_path: Path) -> None:
    start(node, "a list")
    for conf, bins in ((str(tmp_path / "no"), str(node.bin)), (str(node.conf), "/no/bin")):
        with pytest.raises(EnvironmentLacks, match="No such file or directory"):
            installer.install(Place(conf_dir=conf, bin_dir=bins))
    with pytest.raises(EnvironmentLacks, match="--conf-dir"):
        node.check(conf_dir="/no/net.d")
    assert installer.uninstall(Place(conf_dir="/no/net.d", bin_dir="/no/bin")).changes == ()


def test_entry_whose_binary_cannot_be_put_back_is_taken_out(node: Node) -> None:
    before = start(node, "a conf")
    node.install()
    (node.bin / TYPE).unlink()
    with pytest.raises(EnvironmentLacks, match="the entry was taken out"):
        node.install(interpreter="/bin/false")
    assert node.tree() == before


def test_entry_whose_plugin_directory_is_gone_is_taken_out(node: Node) -> None:
    start(node, "a conf")
    node.install()
    with pytest.raises(EnvironmentLacks, match="the entry was taken out"):
        node.install(bin_dir="/no/bin")
    assert not node.names_us()


def test_binary_stays_while_an_entry_that_cannot_be_edited_names_it(node: Node) -> None:
    start(node, "a list")
    node.install()
    delegate = {"type": "multus", "delegates": [{"plugins": [Entry().body()]}]}
    node.write("00-multus.conf", json.dumps({**delegate, "name": "m"}).encode())
    before = node.tree()
    with pytest.raises(EnvironmentLacks, match=r"00-multus\.conf names intercept-cni"):
        node.uninstall()
    assert node.tree() == before


def test_binary_can_stay_for_runtimes_that_remember(node: Node) -> None:
    start(node, "a list")
    node.install()
    node.uninstall(keep_binary=True)
    assert (node.bin / TYPE).exists()
    assert not node.names_us()


def test_list_of_ours_alone_goes_at_uninstall(node: Node) -> None:
    start(node, "a list")
    node.install()
    alone = {"cniVersion": "1.0.0", "name": "m", "plugins": [Entry().body()]}
    node.write("20-ours.conflist", json.dumps(alone).encode())
    node.uninstall()
    assert sorted(path.name for path in node.conf.iterdir()) == ["10-x.conflist"]


def test_two_runs_do_not_meet(node: Node) -> None:
    start(node, "a list")
    with Folder(str(node.conf), lock=True), pytest.raises(Busy, match="another run"):
        node.install()
    assert not node.names_us()


def test_change_between_look_and_write_is_not_overwritten(node: Node) -> None:
    path = node.write("10-x.conflist", LIST)
    newer = LIST.replace(b"bridge", b"macvlan")

    def and_then_somebody_writes(event: str, args: tuple[Any, ...]) -> None:
        # The trial run of the binary comes between the look and the write.
        if event == "subprocess.Popen" and TYPE in str(args[0]) and str(node.bin) in str(args[0]):
            path.write_bytes(newer)

    sys.addaudithook(and_then_somebody_writes)
    with pytest.raises(AgentError, match="was changed by somebody else meanwhile"):
        node.install()
    assert path.read_bytes() == newer
    assert not (node.bin / TYPE).exists()


# --- killed anywhere -----------------------------------------------------------------------------

STEPS = ("rename", "unlink", "link", "fsync", "chmod", "fchmod", "open")


def killed_at(step: int, work: Callable[[], object]) -> bool:
    """Run the work in a child that SIGKILLs itself before a step; tell if it came to that."""
    pid = os.fork()
    if pid == 0:
        count = 0

        def counted(original: Callable[..., object]) -> Callable[..., object]:
            def call(*args: Any, **options: Any) -> object:
                nonlocal count
                count += 1
                if count > step:
                    os.kill(os.getpid(), signal.SIGKILL)
                return original(*args, **options)

            return call

        for name in STEPS:
            setattr(os, name, counted(getattr(os, name)))
        try:
            work()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


@pytest.mark.parametrize("name", ["a list", "a conf", "a conf and a list of that name"])
def test_killed_at_any_step_the_node_works_and_the_next_run_ends_it(node: Node, name: str) -> None:
    before = start(node, name)
    for work, undo_first in ((node.install, False), (node.uninstall, True)):
        step = 0
        while True:
            if undo_first:
                node.install()
            came_to_it = killed_at(step, work)
            assert not node.names_us() or os.access(node.bin / TYPE, os.X_OK), (name, step)
            assert any(path.suffix in (".conf", ".conflist") for path in node.conf.iterdir())
            if step % 2:
                node.install()
                assert node.check().in_sync, (name, step)
            node.uninstall()
            assert node.tree() == before, (name, step)
            step += 1
            if not came_to_it:
                break
        assert step > 5


# --- a full or read-only file system -------------------------------------------------------------

ON_TMPFS = """
import os, sys
from pathlib import Path
from agent.cni import installer
from agent.cni.installer import Place
from agent.model.errors import EnvironmentLacks
conf, bins, full = Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
def tree():
    return {str(p): p.read_bytes() for d in (conf, bins) for p in d.iterdir() if p.name != "fill"}
before = tree()
with open(full / "fill", "wb", buffering=0) as fill:
    try:
        while True:
            fill.write(b"x" * 4096)
    except OSError:
        pass
try:
    installer.install(Place(conf_dir=str(conf), bin_dir=str(bins)))
except EnvironmentLacks as error:
    print(error)
else:
    sys.exit("it was installed on a full disk")
assert tree() == before, tree()
os.unlink(full / "fill")
installer.install(Place(conf_dir=str(conf), bin_dir=str(bins)))
"""


def on_tmpfs(node: Node, where: Path, options: str, code: str, *more: str) -> str:
    """Run code in a mount namespace in which one directory is a small file system of its own."""
    mount = f'mount -t tmpfs -o {options} none "$1" && cp -a "$2"/. "$1"/ && shift 2 && exec "$@"'
    copy = where.with_name("copy")
    where.rename(copy)
    where.mkdir()
    python = [sys.executable, "-c", code, str(node.conf), str(node.bin), *more]
    command = ["unshare", "--mount", "sh", "-c", mount, "sh", str(where), str(copy), *python]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.netns
@pytest.mark.parametrize("name", ["a list", "a conf"])
@pytest.mark.parametrize("which", ["conf", "bin"])
def test_full_disk_changes_nothing(node: Node, name: str, which: str) -> None:
    start(node, name)
    where = node.conf if which == "conf" else node.bin
    said = on_tmpfs(node, where, "size=64k", ON_TMPFS, str(where))
    assert "No space left on device; nothing was changed" in said


READ_ONLY = """
import subprocess, sys
from agent.cni import installer
from agent.cni.installer import Place
from agent.model.errors import EnvironmentLacks
conf, bins = sys.argv[1:3]
place = Place(conf_dir=conf, bin_dir=bins)
subprocess.run(["mount", "-o", "remount,ro", conf], check=True)
try:
    installer.install(place)
except EnvironmentLacks as error:
    print(error)
assert "binary intercept-cni is missing" in installer.check(place).differences
"""


@pytest.mark.netns
def test_read_only_directory_changes_nothing_and_says_what_to_do(node: Node) -> None:
    start(node, "a list")
    said = on_tmpfs(node, node.conf, "size=64k", READ_ONLY)
    assert "Read-only file system; mount it writable into the agent's container" in said


# --- the command ---------------------------------------------------------------------------------


def command(node: Node, *words: str) -> int:
    parser = argparse.ArgumentParser()
    cni_command.add_options(parser)
    where = ["--conf-dir", str(node.conf), "--bin-dir", str(node.bin)]
    return cni_command.run(parser.parse_args([*words, *where]))


def test_command_exit_codes_and_json(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    before = start(node, "a conf")
    assert command(node, "check", "-o", "json") == 1
    assert json.loads(capsys.readouterr().out)["differences"] == [
        "10-x.conf: entry is missing",
        "binary intercept-cni is missing",
    ]
    assert command(node, "install", "-o", "json") == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["changed"], document["in_sync"]) == (True, True)
    assert document["file"] == "10-x.conflist"
    assert document["changes"][0] == f"installed {node.bin}/{TYPE}"
    assert command(node, "install") == 0
    assert "in sync" in capsys.readouterr().out
    assert command(node, "check") == 0
    assert command(node, "uninstall") == 0
    assert command(node, "uninstall") == 0
    assert "nothing to remove" in capsys.readouterr().out
    assert node.tree() == before
    assert [code.exit_code for code in (EnvironmentLacks, InvalidSettings)] == [3, 2]


def test_command_takes_socket_and_directories_from_the_agents_configuration(
    node: Node, tmp_path: Path
) -> None:
    start(node, "a list")
    file = tmp_path / "config.yaml"
    cni = f"cni: {{conf_dir: {node.conf}, bin_dir: {node.bin}}}"
    file.write_text(f"socket: /run/other.sock\n{cni}\n")
    parser = argparse.ArgumentParser()
    cni_command.add_options(parser)
    words = ["install", "--config", str(file), "--failure-policy", "open"]
    assert cni_command.run(parser.parse_args(words)) == 0
    ours = json.loads((node.conf / "10-x.conflist").read_bytes())["plugins"][-1]
    assert (ours["socket"], ours["failurePolicy"]) == ("/run/other.sock", "open")


def test_kept_original_has_a_name_that_no_runtime_reads() -> None:
    assert not KEPT_SUFFIX.endswith((".conf", ".conflist", ".json"))
    assert binary.FLAGS == "-ISE"


# --- a program instead of Python -----------------------------------------------------------------


def test_static_program_is_installed_checked_and_taken_away(
    node: Node, static_cni: Program, tmp_path: Path
) -> None:
    before = start(node, "a list")
    program = str(shutil.copy(static_cni.words[0], tmp_path / "program"))
    node.install()
    assert node.check(program=program).differences == (f"binary {TYPE} is not {program}",)
    assert node.install(program=program).changed
    assert (node.bin / TYPE).read_bytes() == Path(program).read_bytes()
    assert node.check(program=program).in_sync
    assert not node.install(program=program).changed
    assert not node.check().in_sync
    node.uninstall()
    assert node.tree() == before


def test_program_that_is_none_is_refused_and_nothing_is_changed(node: Node, tmp_path: Path) -> None:
    before = start(node, "a list")
    foreign = tmp_path / "foreign"  # as a program of another architecture
    foreign.write_bytes(b"\x7fELF\x02")
    for program, said in ((foreign, "does not run"), (tmp_path / "absent", "cannot read")):
        with pytest.raises(EnvironmentLacks, match=f"{said}.*nothing was changed"):
            node.install(program=str(program))
        assert node.tree() == before
    node.install()
    (word,) = node.check(program=str(tmp_path / "absent")).differences
    assert "cannot be read: No such file" in word
