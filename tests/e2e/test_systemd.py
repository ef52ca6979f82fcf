"""The units under a real systemd: what they may do, and what becomes of captures meanwhile."""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.agent import wait_for
from tests.support.booted import Host, made
from tests.support.netns import run

ROOT = Path(__file__).parents[2]
AGENT, FRONT = "/opt/intercept-agent/bin/intercept-agent", "intercept-agent.service"
POD = "it-web"
CONFIG = f"""
cri: {{endpoint: none}}
cni: {{conf_dir: /etc/cni/net.d, bin_dir: /opt/cni/bin}}
static:
  - name: web
    netns: {POD}
    settings: {{inbound_ports_include: "*", outbound_ip_ranges_include: "*"}}
"""
CHAIN = '{"cniVersion": "1.0.0", "name": "n", "plugins": [{"type": "bridge"}]}'
LONGEST_S = 60.0


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """A host on which the agent was installed, with a pod."""
    with made(tmp_path_factory.mktemp("host")) as found:
        run("make", "-s", "-C", str(ROOT), "install-units", f"DESTDIR={found.root}")
        found.write("/etc/intercept-agent/config.yaml", CONFIG)
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


def test_what_the_front_could_do_to_the_host_is_rated_low() -> None:
    command = ("systemd-analyze", "security", "--offline=true", str(ROOT / "systemd" / FRONT))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    (rated,) = re.findall(r"Overall exposure level for \S+: ([\d.]+)", done.stdout)
    assert float(rated) < 3.0
