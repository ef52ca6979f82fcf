"""The running agent with its worker, its plugin and its pages, on real namespaces."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support import calls
from tests.support.agent import INJECTED, RESULT, ROOT, Agent, running, wait_for
from tests.support.cgroup import cgroup, place
from tests.support.netns import inside, namespace, path_of, run
from tests.support.runtime import Runtime

EVERYTHING = {"inbound_ports_include": "*", "outbound_ip_ranges_include": "*"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def static(netns: str) -> list[dict[str, object]]:
    return [{"name": "one", "netns": f"/run/netns/{netns}", "settings": EVERYTHING}]


def generation(netns: str) -> int:
    """Return the number that every transaction of nf_tables raises."""
    listing = json.loads(inside(netns, "nft", "-j", "-a", "list", "ruleset"))
    handles = [v["handle"] for item in listing["nftables"] for v in item.values() if "handle" in v]
    return hash(tuple(handles))


def test_named_namespace_is_captured_and_shown(folder: Path, netns: str) -> None:
    with running(folder, static=static(netns)) as agent:
        wait_for(lambda: agent.state("one") == "in-sync")
        pod = agent.pod("one")
        assert pod is not None
        assert pod["captured"] is True
        assert pod["reason"] == "static"
        assert "table inet intercept-agent" in inside(netns, "nft", "list", "ruleset")
        assert agent.get("health", "/healthz/ready") == (200, '{"ready": true, "pending": []}\n')
        assert agent.get("health", "/healthz/live")[0] == 200
        assert (
            'intercept_pods{backend="nftables",state="in-sync"} 1.0'
            in agent.get("status", "/metrics")[1]
        )
        assert json.loads(agent.get("status", "/debug/pods")[1])["pods"] == agent.ask("pods")


def test_front_holds_no_right_to_change_networks(folder: Path, netns: str) -> None:
    with running(folder, static=static(netns)) as agent:
        wait_for(lambda: agent.state("one") == "in-sync")
        assert agent.process is not None
        for line in Path(f"/proc/{agent.process.pid}/status").read_text().splitlines():
            if line.startswith(("CapEff", "CapPrm", "CapInh", "CapAmb")):
                bits = int(line.split()[1], 16)
                assert not bits >> 12 & 1, "CAP_NET_ADMIN"
                assert not bits >> 21 & 1, "CAP_SYS_ADMIN"


def test_add_captures_before_it_answers_and_again_changes_nothing(folder: Path, netns: str) -> None:
    with running(folder) as agent:
        assert agent.cni("ADD", netns) == (0, RESULT)
        assert "table inet intercept-agent" in inside(netns, "nft", "list", "ruleset")
        before = generation(netns)
        assert agent.cni("ADD", netns) == (0, RESULT)
        assert agent.cni("CHECK", netns) == (0, None)
        assert generation(netns) == before
        assert agent.cni("STATUS", "", conf={"cniVersion": "1.1.0"}) == (0, None)


def test_plain_pod_passes_and_bad_annotations_are_refused_in_words(
    folder: Path, netns: str
) -> None:
    with running(folder) as agent:
        assert agent.cni("ADD", netns, annotations={}) == (0, RESULT)
        assert inside(netns, "nft", "list", "ruleset") == ""
        bad = {**INJECTED, "traffic.sidecar.istio.io/includeInboundPorts": "70000"}
        status, answer = agent.cni("ADD", netns, annotations=bad)
        assert status == 1
        assert "includeInboundPorts" in answer["msg"]
        assert "70000" in answer["msg"]
        assert "refused" in agent.kinds()


def test_check_names_what_was_altered_and_it_is_repaired(folder: Path, netns: str) -> None:
    with running(folder) as agent:
        agent.cni("ADD", netns)
        inside(netns, "nft", "delete", "table", "inet", "intercept-agent")
        status, answer = agent.cni("CHECK", netns)
        assert status == 0 or "ISTIO_OUTPUT" in answer["msg"]  # it may be repaired already
        wait_for(lambda: "drift-repaired" in agent.kinds())
        assert agent.cni("CHECK", netns) == (0, None)


def test_del_is_always_fine(folder: Path, netns: str) -> None:
    with running(folder) as agent:
        agent.cni("ADD", netns)
        assert agent.cni("DEL", netns) == (0, None)
        assert agent.pod("web") is None
        assert agent.cni("DEL", "") == (0, None)
        agent.stop()
        assert agent.cni("DEL", netns) == (0, None)


def test_mesh_pod_is_refused_without_an_agent_and_starts_when_it_is_back(
    folder: Path, netns: str
) -> None:
    with running(folder) as agent:
        agent.stop()
        status, answer = agent.cni("ADD", netns)
        assert status == 1
        assert "intercept-agent" in answer["msg"]
        assert agent.cni("ADD", netns, annotations={}) == (0, RESULT)
        agent.start()
        assert agent.cni("ADD", netns) == (0, RESULT)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_capture_outlives_the_agent_and_is_adopted_without_a_write(
    folder: Path, netns: str, number: signal.Signals
) -> None:
    with running(folder, static=static(netns)) as agent:
        wait_for(lambda: agent.state("one") == "in-sync")
        before = generation(netns)
        code = agent.stop(number)
        assert code == (0 if number == signal.SIGTERM else -number)
        assert generation(netns) == before
        agent.start()
        wait_for(lambda: agent.state("one") == "in-sync")
        assert generation(netns) == before
        assert agent.kinds() == []


def test_worker_that_is_killed_is_started_again(folder: Path, netns: str) -> None:
    with running(folder) as agent, namespace("second") as second:
        agent.cni("ADD", netns)
        first = agent.status()["worker_pid"]
        os.kill(first, signal.SIGKILL)
        inside(netns, "nft", "delete", "table", "inet", "intercept-agent")
        wait_for(lambda: "table inet intercept-agent" in inside(netns, "nft", "list", "ruleset"))
        assert agent.cni("ADD", second) == (0, RESULT)
        assert agent.status()["worker_pid"] != first


def test_alert_mode_tells_and_does_not_write(folder: Path, netns: str) -> None:
    with running(folder, mode="alert") as agent:
        agent.cni("ADD", netns)
        wait_for(lambda: agent.state("web") == "in-sync")
        inside(netns, "nft", "delete", "table", "inet", "intercept-agent")
        wait_for(lambda: agent.state("web") == "drifted")
        assert agent.kinds() == ["captured", "drift-found"]
        assert inside(netns, "nft", "list", "ruleset") == ""


def test_port_that_is_taken_ends_the_agent_with_a_sentence(folder: Path, netns: str) -> None:
    with running(folder) as agent:
        other = folder / "other.yaml"
        config = {"socket": str(folder / "other.sock"), "health": {"port": agent.ports["health"]}}
        other.write_text(yaml.safe_dump({**config, "status": {"port": 0}}))
        done = subprocess.run(
            [sys.executable, "-m", "agent.cli.main", "run", "--config", str(other)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        assert done.returncode == 3
        assert f":{agent.ports['health']}" in done.stderr
        assert "Traceback" not in done.stderr


def test_namespace_that_is_watched_goes_away_when_its_pod_does(folder: Path, netns: str) -> None:
    with namespace("gone") as name, running(folder, static=static(name)) as agent:
        wait_for(lambda: agent.state("one") == "in-sync")
        peer = ("type", "veth", "peer", "name", "there", "netns", name)
        inside(netns, "ip", "link", "add", "here", *peer)
        run("ip", "netns", "del", name)
        # The kernel takes the pair away when it destroys the namespace of one of them.
        wait_for(lambda: "here" not in inside(netns, "ip", "-br", "link"))


def test_sighup_reads_the_configuration_again_and_writes_nothing(folder: Path, netns: str) -> None:
    with running(folder, static=static(netns)) as agent:
        wait_for(lambda: agent.state("one") == "in-sync")
        before = generation(netns)
        agent.configure(static=static(netns), mode="alert")
        agent.tell(signal.SIGHUP)
        wait_for(lambda: agent.status()["mode"] == "alert")
        wait_for(lambda: agent.state("one") == "in-sync")
        assert generation(netns) == before
        assert agent.kinds() == ["captured"]


def test_configuration_that_is_wrong_changes_nothing_on_sighup(
    folder: Path, netns: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with running(folder, static=static(netns)) as agent:
        agent.configure(mode="repiar")
        agent.tell(signal.SIGHUP)
        wait_for(lambda: "the old one stays: mode: 'repiar'" in capfd.readouterr().err)
        assert agent.status()["mode"] == "repair"


def test_pod_that_only_the_plugin_told_of_is_kept_over_a_restart(folder: Path, netns: str) -> None:
    with running(folder) as agent:
        assert agent.cni("ADD", netns)[0] == 0
        agent.stop(signal.SIGKILL)
        agent.start()
        wait_for(lambda: agent.state("web") == "in-sync")
        agent.cni("DEL", netns)
        agent.stop()
        agent.start()
        assert agent.pod("web") is None


def test_pod_whose_namespace_ended_while_no_agent_ran_is_forgotten(folder: Path) -> None:
    with running(folder) as agent, namespace("gone") as name:
        assert agent.cni("ADD", name)[0] == 0
        agent.stop()
        run("ip", "netns", "del", name)
        run("ip", "netns", "add", name)
        agent.start()
        assert agent.pod("web") is None
        assert inside(name, "nft", "list", "ruleset") == ""


def test_pod_of_a_runtime_that_tells_nothing_of_namespaces_is_found_by_a_process(
    folder: Path, netns: str
) -> None:
    """As those for Docker are: they tell which sandboxes there are, and no more."""
    with cgroup("docker") as where, Runtime(folder / "runtime.sock") as runtime:
        join = f"echo $$ > {place(where)}/cgroup.procs && exec nsenter --net={path_of(netns)} cat"
        with calls.running(("sh", "-c", join), stdout=subprocess.DEVNULL):
            runtime.run(where.rpartition("-")[2], None, info="{}", pid=0, annotations=INJECTED)
            with running(folder, cri={"endpoint": str(runtime.socket)}) as agent:
                wait_for(lambda: [pod["state"] for pod in agent.ask("pods")] == ["in-sync"])
                assert "table inet intercept-agent" in inside(netns, "nft", "list", "ruleset")


def test_more_pods_than_the_usual_limit_of_open_files_lets_one_hold(folder: Path) -> None:
    """Pods take several each, and systemd and containerd allow few of them at first."""
    with contextlib.ExitStack() as stack:
        names = [stack.enter_context(namespace(f"many{number}")) for number in range(6)]
        found = [{**static(name)[0], "name": name} for name in names]
        agent = Agent(folder, static=found)
        stack.callback(agent.kill)
        agent.prefix = ("sh", "-c", 'ulimit -Sn 48; exec "$@"', "sh")
        agent.start()
        wait_for(lambda: [pod["state"] for pod in agent.ask("pods")] == ["in-sync"] * len(names))


def test_leftovers_of_a_pod_are_shown_by_page_and_metric(folder: Path, netns: str) -> None:
    with running(folder, static=static(netns)) as agent:

        def of_the_pod() -> list[dict[str, object]]:
            document = json.loads(agent.get("status", "/debug/leftovers")[1])
            return [f for f in document["findings"] if f["where"]["pod"]]

        wait_for(of_the_pod, timeout_s=60)
        [finding] = of_the_pod()
        # The pod asks for its capture, and no proxy listens in it.
        assert (finding["kind"], finding["severity"]) == ("blackhole", "warning")
        metrics = agent.get("status", "/metrics")[1]
        assert 'intercept_leftovers{kind="blackhole"} ' in metrics
        assert 'intercept_leftovers{kind="stale-capture"} 0.0' in metrics
