"""The units under a real systemd: what they may do, and what becomes of captures meanwhile."""

import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.agent import wait_for
from tests.support.booted import Host, made
from tests.support.ebpf import built
from tests.support.netns import run

ROOT = Path(__file__).parents[2]
BIN, FRONT = "/opt/intercept-agent/bin", "intercept-agent.service"
AGENT, PYTHON = f"{BIN}/intercept-agent", f"{BIN}/python"
POD, BPFFS = "it-web", "/sys/fs/bpf"
CONFIG = f"""
cri: {{endpoint: none}}
cni: {{conf_dir: /etc/cni/net.d, bin_dir: /opt/cni/bin}}
static:
  - name: web
    netns: {POD}
    settings: {{inbound_ports_include: "*", outbound_ip_ranges_include: "*"}}
"""
CHAIN = '{"cniVersion": "1.0.0", "name": "n", "plugins": [{"type": "bridge"}]}'
CONFIG_FILE = "/etc/intercept-agent/config.yaml"
LONGEST_S = 60.0


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """A host on which the agent was installed, with a pod."""
    built()
    with made(tmp_path_factory.mktemp("host")) as found:
        run("make", "-s", "-C", str(ROOT), "install-units", f"DESTDIR={found.root}")
        found.write(CONFIG_FILE, CONFIG)
        found.write("/etc/cni/net.d/10-x.conflist", CHAIN)
        found.write("/opt/cni/bin/bridge", "")
        found.write(f"/etc/systemd/system/{FRONT}.d/hasty.conf", "[Service]\nWatchdogSec=2\n")
        log = "[Service]\nStandardError=append:/var/log/agent\n"
        found.write("/etc/systemd/system/service.d/log.conf", log)
        found.boot()
        found.run("ip", "netns", "add", POD)
        yield found


@pytest.fixture
def host(machine: Host) -> Host:
    """The same host with an agent that runs and has captured the pod."""
    machine.run("systemctl", "start", "intercept-agent")
    wait_for(lambda: captured(machine), LONGEST_S)
    return machine


def captured(host: Host) -> bool:
    pods: list[dict[str, Any]] = json.loads(host.run(AGENT, "pods", "-o", "json"))["pods"]
    return [pod["state"] for pod in pods] == ["in-sync"]


def backend(host: Host) -> str:
    (pod,) = json.loads(host.run(AGENT, "pods", "-o", "json"))["pods"]
    return str(pod["backend"])


def rules(host: Host) -> str:
    """Return the pod's rules with their handles, which change when a rule is written anew."""
    listed = host.run("ip", "netns", "exec", POD, "nft", "-a", "list", "ruleset")
    assert "table inet intercept-agent" in listed
    return re.sub(r"packets \d+ bytes \d+", "", listed)


def capabilities(host: Host, pid: str) -> set[str]:
    """Return what a process could ever have, by the names of libcap."""
    (bits,) = re.findall(r"CapBnd:\s+(\w+)", host.run("cat", f"/proc/{pid}/status"))
    return {name for name, number in NUMBERS.items() if int(bits, 16) >> number & 1}


NUMBERS = {
    **{"CAP_DAC_OVERRIDE": 1, "CAP_NET_ADMIN": 12, "CAP_NET_RAW": 13, "CAP_SYS_PTRACE": 19},
    "CAP_SYS_ADMIN": 21,
}


def test_front_and_worker_are_two_units_with_their_own_rights(host: Host) -> None:
    front = host.show(FRONT, "MainPID")
    (worker,) = re.findall(r"intercept-agent@\S+", host.run("systemctl", "list-units", "--plain"))
    assert capabilities(host, front) == {"CAP_SYS_PTRACE"}
    assert "NoNewPrivs:\t1" in host.run("cat", f"/proc/{front}/status")
    own = capabilities(host, host.show(worker, "MainPID"))
    assert own == {"CAP_NET_ADMIN", "CAP_NET_RAW", "CAP_SYS_ADMIN", "CAP_SYS_PTRACE"}
    assert host.show(FRONT, "StatusText") == "ready"
    assert "intercept-cni" in host.run("cat", "/etc/cni/net.d/10-x.conflist")


def test_captures_outlive_restart_reload_and_stop(host: Host) -> None:
    before, pid = rules(host), host.show(FRONT, "MainPID")
    host.run("systemctl", "restart", "intercept-agent")
    assert host.show(FRONT, "MainPID") != pid
    wait_for(lambda: captured(host), LONGEST_S)
    assert rules(host) == before
    pid = host.show(FRONT, "MainPID")
    host.run("systemctl", "reload", "intercept-agent")
    wait_for(lambda: "configuration read again" in host.run("cat", "/var/log/agent"), LONGEST_S)
    assert host.show(FRONT, "MainPID") == pid
    host.run("systemctl", "stop", "intercept-agent")
    assert rules(host) == before
    wait_for(lambda: "intercept-agent@" not in host.run("systemctl", "list-units"), LONGEST_S)


def test_agent_is_taken_away_as_the_readme_says_and_its_plugin_stays_away(host: Host) -> None:
    before = rules(host)
    told = host.run(AGENT, "cni", "uninstall", "-o", "json", "--config", CONFIG_FILE)
    assert "the agent that runs here keeps the plugin" in json.loads(told)["warnings"][0]
    block = (ROOT / "README.md").read_text().partition("\nsystemctl disable --now ")
    stop, uninstall = (block[1] + block[2]).strip().splitlines()[:2]
    host.run(*shlex.split(stop))
    command, *words = shlex.split(uninstall, comments=True)
    said = host.run(f"{BIN}/{command}", *words)
    assert POD in said  # which still holds a capture
    assert host.run("ls", "/opt/cni/bin").split() == ["bridge"]
    assert host.run("cat", "/etc/cni/net.d/10-x.conflist") == CHAIN
    for unit in (FRONT, "intercept-agent.socket"):
        assert host.show(unit, "ActiveState") == "inactive"
    assert rules(host) == before


def test_watchdog_starts_a_hung_front_again_and_captures_stay(host: Host) -> None:
    before, pid = rules(host), host.show(FRONT, "MainPID")
    host.run("kill", "-STOP", pid)
    wait_for(lambda: host.show(FRONT, "MainPID") not in (pid, "0"), LONGEST_S)
    wait_for(lambda: captured(host), LONGEST_S)
    assert host.show(FRONT, "NRestarts") == "1"
    assert rules(host) == before


def test_worker_that_dies_is_had_anew(host: Host) -> None:
    before = rules(host)
    host.run("systemctl", "kill", "--signal=KILL", "intercept-agent@*")
    host.run("ip", "netns", "exec", POD, "nft", "flush", "ruleset")
    wait_for(lambda: "table inet intercept-agent" in host.run(*LIST), LONGEST_S)
    wait_for(lambda: captured(host), LONGEST_S)
    assert rules(host).count("\n") == before.count("\n")


LIST = ("ip", "netns", "exec", POD, "nft", "list", "ruleset")


# A proxy, and an application that dials; says what the proxy is told of where that was going.
DIAL = """
import os, socket, struct
socket.setdefaulttimeout(20)
ready, other = socket.socketpair()
if child := os.fork():
    ready.recv(1)
    socket.create_connection(("192.0.2.1", 8080))
    os.waitpid(child, 0)
else:
    os.setgid(1337), os.setuid(1337)
    proxy = socket.create_server(("127.0.0.1", 15001))
    other.send(b"!")
    raw = proxy.accept()[0].getsockopt(socket.IPPROTO_IP, 80, 16)
    print(socket.inet_ntoa(raw[4:8]), *struct.unpack("!H", raw[2:4]), flush=True)
"""


def is_turned(host: Host) -> bool:
    dial = ("ip", "netns", "exec", POD, PYTHON, "-I", "-S", "-c", DIAL)
    return host.run(*dial, check=False) == "192.0.2.1 8080\n"


def pins(host: Host) -> set[str]:
    return set(host.run("find", BPFFS, "-path", f"{BPFFS}/intercept-agent*").split())


def test_programs_do_under_the_units_rights_what_rules_do(host: Host) -> None:
    host.run("ip", "-n", POD, "link", "set", "lo", "up")
    host.run("sed", "-i", "$ a backend: ebpf", "/etc/intercept-agent/config.yaml")
    host.run("umount", BPFFS)
    host.run("systemctl", "reload", "intercept-agent")
    wait_for(lambda: f"mount -t bpf bpf {BPFFS}" in host.run(AGENT, "pods"), LONGEST_S)
    host.run("mount", "-t", "bpf", "bpf", BPFFS)
    wait_for(lambda: backend(host) == "ebpf" and captured(host), LONGEST_S)
    before = pins(host)
    assert is_turned(host)
    host.run("systemctl", "restart", "intercept-agent")
    assert is_turned(host)
    wait_for(lambda: captured(host), LONGEST_S)
    host.run("systemctl", "stop", "intercept-agent")
    wait_for(lambda: "intercept-agent@" not in host.run("systemctl", "list-units"), LONGEST_S)
    assert is_turned(host)
    assert pins(host) == before
    host.run("rm", f"{BPFFS}/intercept-agent/links/connect4")
    host.run("systemctl", "start", "intercept-agent")
    wait_for(lambda: pins(host) == before and captured(host), LONGEST_S)
    assert is_turned(host)
    host.run("systemctl", "stop", "intercept-agent")
    host.run(AGENT, "remove", "--netns", POD)
    assert pins(host) == set()


def test_what_the_front_could_do_to_the_host_is_rated_low() -> None:
    command = ("systemd-analyze", "security", "--offline=true", str(ROOT / "systemd" / FRONT))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    (rated,) = re.findall(r"Overall exposure level for \S+: ([\d.]+)", done.stdout)
    assert float(rated) < 3.0
