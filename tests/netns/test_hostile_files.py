"""Files that others have a say in: nobody makes the agent wait for ever, or read without an end."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from agent.kernel import files
from tests.support.capturing import command
from tests.support.conformance import cli_process
from tests.support.netns import path_of

ROOTED = """
import os, sys
os.chroot(sys.argv[1])
print("up", flush=True)
sys.stdin.read()
"""


@contextmanager
def process_with_root(netns: str, root: Path) -> Iterator[None]:
    """Run a process in the namespace that has a root of its own, as one in a container has."""
    words = (sys.executable, "-I", "-S", "-c", ROOTED, str(root))
    pipe = subprocess.PIPE
    with subprocess.Popen(
        ("nsenter", f"--net={path_of(netns)}", *words), stdin=pipe, stdout=pipe, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "up\n"
            yield
        finally:
            process.kill()


def captured_servers(target: str) -> str:
    """Return the name servers whose queries would be captured: those that the pod asks."""
    code, _, err = command("check", "--netns", target, "--redirect-dns", "-v")
    assert code == 1, err
    found = re.search(r"'dns_servers_v4': \[(.*?)\], 'dns_servers_v6': \[(.*?)\]", err)
    assert found is not None, err
    return " ".join(found.groups())


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root/etc").mkdir(parents=True)
    return tmp_path / "root"


def test_resolv_conf_is_that_of_the_pods_own_root(netns: str, root: Path) -> None:
    run = root / "run"
    run.mkdir()
    (run / "resolv.conf").write_text("nameserver 192.0.2.53\nnameserver fe80::1%eth0\n")
    (root / "etc/resolv.conf").symlink_to("/run/resolv.conf")
    with process_with_root(netns, root):
        assert captured_servers(netns) == "'192.0.2.53' "


@pytest.mark.parametrize("kind", ["fifo", "device", "endless"])
def test_pod_cannot_stop_the_agent_with_its_resolv_conf(kind: str, netns: str, root: Path) -> None:
    path = root / "etc/resolv.conf"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")  # of the node: the pod has no such file
    else:
        with path.open("wb") as file:
            file.truncate(1 << 34)
    own = captured_servers(netns)
    with process_with_root(netns, root):
        assert captured_servers(netns) == own


def test_what_is_no_ordinary_file_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "large").write_bytes(b"x" * 11)
    (tmp_path / "right").write_bytes(b"x" * 10)
    assert files.read(tmp_path / "right", 10) == b"x" * 10
    for path in (tmp_path / "fifo", tmp_path / "large", tmp_path, Path("/dev/zero")):
        with pytest.raises(OSError, match=r"no ordinary file|larger than 10 bytes|Is a directory"):
            files.read(path, 10)


def test_configuration_of_cni_that_is_no_file_is_a_finding(netns: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "10-fifo.conflist")
    (tmp_path / "20-device.conf").symlink_to("/dev/zero")
    (tmp_path / "30-folder.conf").mkdir()
    code, out, _ = command("scan", "--host", "--conf-dir", str(tmp_path), "-o", "json")
    told = {
        Path(found["objects"][0]).name: found["evidence"]
        for found in json.loads(out)["findings"]
        if found["kind"] == "cni-config"
    }
    assert code == 1
    ordinary = "it is no ordinary file"
    assert told == {
        "10-fifo.conflist": [ordinary],
        "20-device.conf": [ordinary],
        "30-folder.conf": ["Is a directory"],
    }


def test_backup_without_an_end_is_refused(netns: str) -> None:
    code, _, err = command("clean", "--netns", netns, "--restore", "/dev/zero", "--yes")
    assert code == 2
    assert "/dev/zero is no backup" in err


@pytest.mark.parametrize("words", [("scan", "--host"), ("clean", "--host", "--dry-run")])
def test_lack_of_proc_is_told_in_one_sentence(words: tuple[str, ...]) -> None:
    hide = 'mount -t tmpfs none /proc && exec "$@"'
    done = cli_process(*words, within=("unshare", "--mount", "sh", "-c", hide, "sh"))
    assert (done.code, done.stdout, done.stderr.count("\n")) == (3, "", 1)
    assert done.stderr.startswith("error: /proc is not mounted here; mount it")
