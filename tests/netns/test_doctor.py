"""`doctor` on the real node: it reads, changes nothing, and says what it could not see."""

import fcntl
import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent.kernel import locks
from tests.support.agent import running
from tests.support.capturing import generation
from tests.support.conformance import NOBODY, Ran, cli, cli_process
from tests.support.netns import namespace


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No agent, runtime or CNI configuration of this machine is looked at."""
    monkeypatch.setenv("INTERCEPT_SOCKET", str(tmp_path / "agent.sock"))
    monkeypatch.setenv("INTERCEPT_CRI_ENDPOINT", "none")
    monkeypatch.setenv("INTERCEPT_CNI_CONF_DIR", str(tmp_path / "net.d"))
    monkeypatch.setenv("INTERCEPT_CNI_BIN_DIR", str(tmp_path / "bin"))


def doctor(*words: str) -> tuple[int, Any]:
    done: Ran = cli("doctor", "-o", "json", *words)
    assert done.stderr == ""
    return done.code, done.document


def finding(document: Any, kind: str) -> Any:
    (found,) = (found for found in document["findings"] if found["kind"] == kind)
    return found


def loaded() -> dict[str, object]:
    """Return what asking the wrong question would change: tables and modules of the node."""
    modules = Path("/proc/modules")
    names = {
        version: Path(f"/proc/net/{version}_tables_names").read_text() for version in ("ip", "ip6")
    }
    return {**names, "modules": modules.read_text().split("\n") if modules.exists() else None}


def test_reading_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("INTERCEPT_CNI_CONF_DIR")
    before = loaded()
    code, document = doctor()
    assert loaded() == before
    assert document["works"] is (code == 0)
    assert document["errors"] == sum(f["severity"] == "critical" for f in document["findings"])
    for found in document["findings"]:
        assert set(found) == {"kind", "severity", "seen", "means", "fix"}


def test_backend_that_auto_takes_is_the_one_that_apply_takes(netns: str) -> None:
    _, document = doctor()
    done = cli("apply", "--netns", netns, "-i", "*", "--output", "json")
    assert document["auto"]["backend"] == done.document["backend"]
    # Every backend is used by these tests, so the kernel has what each needs.
    assert set(document["auto"]["reasons"].values()) == {None}
    assert False not in document["features"].values()
    assert {tool["name"] for tool in document["tools"]} >= {"nft", "iptables-nft"}


def test_namespaces_of_others_are_left_alone() -> None:
    with namespace() as name:
        before = generation(name)
        doctor()
        assert generation(name) == before


def test_page_for_people_ends_in_one_sentence() -> None:
    done = cli("doctor")
    assert done.stdout.splitlines()[-1].startswith(
        ("nothing keeps the agent", "1 finding keeps the agent")
    )
    assert "backend: auto takes" in done.stdout


def test_missing_cni_folder_that_the_configuration_names_is_an_error() -> None:
    code, document = doctor()
    assert (code, finding(document, "cni")["severity"]) == (1, "critical")


def test_chain_of_the_node_is_shown_and_other_meshes_in_it_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "net.d"
    folder.mkdir()
    plugins = [{"type": "bridge"}, {"type": "linkerd-cni"}]
    conflist = {"cniVersion": "1.0.0", "name": "net", "plugins": plugins}
    (folder / "10-net.conflist").write_text(json.dumps(conflist))
    (folder / "20-broken.conflist").write_text("{")
    code, document = doctor()
    assert code == 1
    assert "10-net.conflist: bridge -> linkerd-cni" in finding(document, "cni")["seen"]
    assert finding(document, "cni")["fix"] == "intercept-agent cni install"
    assert "Linkerd" in finding(document, "other-mesh")["seen"]
    assert sorted(os.listdir(folder)) == ["10-net.conflist", "20-broken.conflist"]


@pytest.mark.parametrize("policy", ["closed", "open"])
def test_chain_that_holds_the_entry_is_fine_with_either_policy(policy: str, tmp_path: Path) -> None:
    folder, bins = tmp_path / "net.d", tmp_path / "bin"
    folder.mkdir()
    bins.mkdir()
    conflist = {"cniVersion": "1.0.0", "name": "net", "plugins": [{"type": "bridge"}]}
    (folder / "10-net.conflist").write_text(json.dumps(conflist))
    assert cli("cni", "install", "--failure-policy", policy).code == 0
    code, document = doctor()
    found = finding(document, "cni")
    assert (code, found["severity"]) == (0, "ok")
    assert found["seen"].endswith("10-net.conflist: bridge -> intercept-cni")
    (bins / "intercept-cni").unlink()
    assert finding(doctor()[1], "cni")["severity"] == "critical"


def test_port_that_somebody_else_has_is_found_with_its_holder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = held.getsockname()[1]
        file = tmp_path / "agent.yaml"
        file.write_text(yaml.safe_dump({"health": {"port": port}, "status": {"port": 0}}))
        code, document = doctor("--config", str(file))
    assert code == 1
    assert f"127.0.0.1:{port} is taken by" in finding(document, "port")["seen"]
    assert f"PID {os.getpid()}" in finding(document, "port")["seen"]


def test_holder_of_the_lock_is_found_without_taking_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = tmp_path / "xtables.lock"
    monkeypatch.setattr(locks, "XTABLES_LOCK", str(lock))
    assert finding(doctor()[1], "xtables-lock")["severity"] == "ok"
    assert not lock.exists()
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        found = finding(doctor()[1], "xtables-lock")
    assert found["severity"] == "warning"
    assert f"PID {os.getpid()}" in found["seen"]


def test_running_agent_is_asked_for_its_version_and_whether_it_is_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CONF", "BIN"):
        monkeypatch.delenv(f"INTERCEPT_CNI_{name}_DIR")
    monkeypatch.delenv("INTERCEPT_SOCKET")
    with running(tmp_path) as agent:
        found = finding(doctor("--socket", str(agent.socket))[1], "agent")
    assert found["severity"] == "ok"
    assert "runs and is ready (version " in found["seen"]


def test_user_without_privileges_is_told_what_could_not_be_seen() -> None:
    done = cli_process("doctor", "-o", "json", user=NOBODY)
    document = done.document
    assert done.stderr == ""
    assert finding(document, "capabilities")["severity"] == "info"
    assert any("rules: cannot look into" in sentence for sentence in document["unseen"])
    assert document["auto"]["backend"]


# Listens as a runtime does, in one process namespace with the command.
BESIDE = """
import socket, subprocess, sys
with socket.socket(socket.AF_UNIX) as runtime:
    runtime.bind(sys.argv[1])
    runtime.listen()
    sys.exit(subprocess.run(sys.argv[2:]).returncode)
"""


@pytest.mark.parametrize("beside", [True, False], ids=["seen", "hidden"])
def test_node_that_is_a_container_itself_is_no_container_without_the_nodes_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, beside: bool
) -> None:
    """As kind's are: its process namespace is not the kernel's first, and the runtime is in it."""
    path = tmp_path / "cri.sock"
    monkeypatch.setenv("INTERCEPT_CRI_ENDPOINT", f"unix://{path}")
    within: tuple[str, ...] = ("unshare", "--pid", "--fork", "--mount-proc")
    with socket.socket(socket.AF_UNIX) as elsewhere:
        if beside:
            within += (sys.executable, "-c", BESIDE, str(path))
        else:
            elsewhere.bind(str(path))
            elsewhere.listen()
        done = cli_process("doctor", "-o", "json", within=within)
    kinds = {found["kind"] for found in done.document["findings"]}
    assert ("pid-namespace" in kinds) is not beside
