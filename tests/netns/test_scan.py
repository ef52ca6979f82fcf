"""The scan, on what real programs leave in namespaces: the right kind, owner and severity."""

import asyncio
import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agent.kernel import bpf, namespaces
from agent.kernel.namespaces import Place
from agent.kernel.netns import Netns
from agent.leftovers.finding import Finding, Kind
from agent.leftovers.node import Node, owners_among
from agent.leftovers.scan import Memory, Subject
from tests.fakes.fake_cri import FakeCri, FakeSandbox, changed, serving
from tests.support import leftovers as left
from tests.support.capturing import BACKENDS, EVERYTHING, capture, command
from tests.support.foreign import add_foreign
from tests.support.leftovers import (
    as_host,
    findings,
    kinds,
    listening,
    load,
    only,
    proxying,
    scanned,
)
from tests.support.netns import inside, namespace, path_of, run, snapshot


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


# --- kube-proxy -----------------------------------------------------------------------------------


@pytest.mark.parametrize("flavour", left.FLAVOURS)
def test_rules_of_a_kube_proxy_that_is_gone_are_found_without_the_kubelets(
    netns: str, flavour: str
) -> None:
    load(netns, left.KUBELET, flavour)
    load(netns, left.KUBE_PROXY, flavour)
    found = only(netns)
    assert (found["kind"], found["owner"], found["severity"]) == (
        "kube-proxy",
        "kube-proxy",
        "critical",
    )
    assert found["where"]["backend"] == f"iptables-{flavour}"
    chains = {name for name in found["objects"] if not name.startswith("-t")}
    assert chains == left.KUBE_PROXY_CHAINS
    assert not [name for name in found["objects"] if "KUBE-FIREWALL" in name]
    assert any("10.0.0.53:53" in line for line in found["evidence"])


def test_a_sysctl_that_kube_proxy_may_have_set_is_told_beside_its_rules(netns: str) -> None:
    load(netns, left.KUBE_PROXY)
    assert not [line for line in only(netns)["evidence"] if "route_localnet" in line]
    inside(netns, "sysctl", "-qw", "net.ipv4.conf.all.route_localnet=1")
    assert [line for line in only(netns)["evidence"] if "route_localnet is 1" in line]


def test_the_kubelets_own_chains_are_no_leftovers(netns: str) -> None:
    load(netns, left.KUBELET)
    assert findings(netns) == []


def test_nothing_is_left_over_while_kube_proxy_lives(netns: str, folder: Path) -> None:
    load(netns, left.KUBELET)
    load(netns, left.KUBE_PROXY)
    with listening(netns, 10256, name="kube-proxy", folder=folder):
        assert findings(netns) == []
    assert kinds(netns) == ["kube-proxy"]


def test_another_program_on_kube_proxys_health_port_proves_nothing(netns: str) -> None:
    load(netns, left.KUBE_PROXY)
    with listening(netns, 10256):
        assert kinds(netns) == ["kube-proxy"]


def test_a_kube_proxy_of_another_namespace_proves_nothing(netns: str, folder: Path) -> None:
    load(netns, left.KUBE_PROXY)
    with namespace() as other, listening(other, name="kube-proxy", folder=folder):
        assert kinds(netns) == ["kube-proxy"]


def test_old_rules_beside_a_kube_proxy_in_nftables_mode_are_left_over(
    netns: str, folder: Path
) -> None:
    load(netns, left.KUBE_PROXY, "legacy")
    inside(netns, "nft", "-f", "-", stdin=left.KUBE_PROXY_NFT)
    with listening(netns, 10256, name="kube-proxy", folder=folder):
        assert only(netns)["where"]["backend"] == "iptables-legacy"
    assert kinds(netns) == ["kube-proxy", "kube-proxy"]


def test_a_kube_proxy_lives_that_says_its_mode_whatever_its_program_is_called(netns: str) -> None:
    load(netns, left.KUBE_PROXY)
    with proxying(netns, "iptables"):
        assert findings(netns) == []
    with proxying(netns, "hello"):
        assert kinds(netns) == ["kube-proxy"]


def test_whoever_listens_where_kube_proxy_would_and_never_answers_hides_nothing(netns: str) -> None:
    load(netns, left.KUBE_PROXY)
    with listening(netns, 10249, address=",".join(f"127.0.0.{n}" for n in range(1, 80))):
        assert kinds(netns) == ["kube-proxy"]


def test_a_table_that_kube_proxy_left_behind_is_no_sign_that_it_uses_it(netns: str) -> None:
    load(netns, left.KUBE_PROXY)
    inside(netns, "nft", "-f", "-", stdin=left.KUBE_PROXY_NFT)
    with proxying(netns, "iptables"):
        assert only(netns)["objects"] == ["table ip kube-proxy"]
    with proxying(netns, "nftables"):
        assert only(netns)["where"]["backend"] == "iptables-nft"


def test_a_living_kube_proxy_may_work_in_another_flavour_than_the_kubelet(netns: str) -> None:
    load(netns, left.KUBELET, "nft")
    load(netns, left.KUBE_PROXY, "legacy")
    with proxying(netns, "iptables"):
        assert "kube-proxy" not in kinds(netns)


def test_the_kubelet_shows_in_which_flavour_a_living_kube_proxy_works(netns: str) -> None:
    for flavour in left.FLAVOURS:
        load(netns, left.KUBE_PROXY, flavour)
        load(netns, left.KUBELET[left.KUBELET.index("*filter") :], flavour)  # kube-proxy's, too
    with proxying(netns, "iptables"):
        assert kinds(netns) == ["mixed-backends"]
        load(netns, "*mangle\n:KUBE-IPTABLES-HINT - [0:0]\nCOMMIT\n", "legacy")
        [found] = [f for f in findings(netns) if f["kind"] == "kube-proxy"]
    assert found["where"]["backend"] == "iptables-nft"


IPVS_CHAINS = {"KUBE-NODE-PORT", "KUBE-IPVS-FILTER", "KUBE-LOAD-BALANCER", "KUBE-FIREWALL"}
IPTABLES_CHAINS = {"KUBE-SVC-TCOU7JCQXEZGVUNU", "KUBE-SEP-ABCDEFGHIJKLMNOP"}
SETS = {"ipset KUBE-CLUSTER-IP", "ipset KUBE-LOOP-BACK"}


@pytest.mark.parametrize(
    ("mode", "written", "useless"),
    [
        ("iptables", left.KUBE_PROXY, IPVS_CHAINS | SETS),
        ("ipvs", left.KUBE_PROXY_IPVS_SERVICES, IPTABLES_CHAINS),
    ],
)
def test_what_another_mode_left_among_the_chains_of_a_living_kube_proxy_is_found_alone(
    netns: str, folder: Path, mode: str, written: str, useless: set[str]
) -> None:
    inside(netns, "ipset", "restore", stdin=left.KUBE_PROXY_SETS)
    for rules in (left.KUBE_PROXY, left.KUBE_PROXY_IPVS):
        load(netns, rules)
    load(netns, "*nat\n:KUBE-SERVICES - [0:0]\nCOMMIT\n")
    load(netns, "".join(line for line in written.splitlines(keepends=True) if line[1:3] != "A P"))
    with listening(netns, 10256, name="kube-proxy", folder=folder):  # says nothing of its mode
        found = only(netns)
    named = {name for name in found["objects"] if not name.startswith("-t")}
    assert (named, mode in found["explanation"]) == (useless, True)
    with proxying(netns, {"iptables": "ipvs", "ipvs": "iptables"}[mode]):
        assert findings(netns) == []  # it has not yet written what it needs in its new mode


def test_the_table_of_kube_proxys_nftables_mode_is_found(netns: str) -> None:
    inside(netns, "nft", "-f", "-", stdin=left.KUBE_PROXY_NFT)
    found = only(netns)
    assert (found["kind"], found["objects"]) == ("kube-proxy", ["table ip kube-proxy"])
    assert any("10.0.0.53:53" in line for line in found["evidence"])


def test_a_host_without_kube_proxy_and_its_chains_says_exactly_that(netns: str) -> None:
    [remark] = [r for r in host_scan(netns)["scanned"]["remarks"] if "KUBE-" in r]
    assert remark == "host: 0 KUBE- chains and no kube-proxy: it has left nothing here"


# --- captures -------------------------------------------------------------------------------------


@pytest.mark.parametrize("flavour", left.FLAVOURS)
@pytest.mark.parametrize("text", [left.SIDECAR, left.AMBIENT], ids=["sidecar", "ambient"])
def test_a_capture_that_leads_to_nobody_is_a_black_hole(
    netns: str, text: str, flavour: str
) -> None:
    load(netns, text, flavour)
    found = only(netns)
    assert (found["kind"], found["severity"]) == ("blackhole", "critical")
    assert any("15001" in line for line in found["evidence"])


@pytest.mark.parametrize("backend", BACKENDS)
def test_this_agents_own_capture_is_a_black_hole_without_a_proxy_only(
    netns: str, backend: str
) -> None:
    capture(netns, {**EVERYTHING, "enable_ipv6": False}, backend)
    assert kinds(netns) == ["blackhole"]
    with listening(netns, 15001, 15006):
        assert kinds(netns) == []


def test_a_listener_that_tproxy_cannot_use_does_not_count(netns: str) -> None:
    mode = {"inbound_interception_mode": "TPROXY", "enable_ipv6": False}
    capture(netns, {**EVERYTHING, **mode}, "iptables-nft")
    with listening(netns, 15001, 15006):
        found = only(netns)
    assert found["kind"] == "blackhole"
    assert [line for line in found["evidence"] if "15006" in line]
    assert not [line for line in found["evidence"] if "15001" in line]


def injected_pod(netns: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSandbox:
    """Return a pod for the fake runtime, which commands ask from now on."""
    monkeypatch.setenv("INTERCEPT_CRI_ENDPOINT", f"unix://{folder}/c.sock")
    monkeypatch.setenv("INTERCEPT_SOCKET", f"{folder}/none.sock")
    pod = FakeSandbox(id="s1", netns=f"/run/netns/{netns}", labels={"app": "web"})
    return changed(
        pod, annotations={"sidecar.istio.io/status": json.dumps({"containers": ["istio-proxy"]})}
    )


def test_a_pod_without_its_label_is_stale_and_without_its_proxy_a_black_hole(
    netns: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(netns, left.SIDECAR)
    injected = injected_pod(netns, folder, monkeypatch)
    unlabelled = changed(injected, labels={"sidecar.istio.io/inject": "false"})

    async def main() -> None:
        cri = FakeCri()
        async with serving(cri, folder / "c.sock"):
            with listening(netns, 15001, 15006):
                cri.add(injected)
                assert await asyncio.to_thread(kinds, netns) == []
                cri.add(unlabelled)
                found = await asyncio.to_thread(only, netns)
                assert (found["kind"], found["severity"]) == ("stale-capture", "warning")
                assert found["where"]["pod"] == "shop/web"
                assert any("sidecar.istio.io/inject" in line for line in found["evidence"])
            assert await asyncio.to_thread(kinds, netns) == ["blackhole", "stale-capture"]
            cri.add(injected)
            found = await asyncio.to_thread(only, netns)
            assert (found["kind"], found["severity"]) == ("blackhole", "warning")

    asyncio.run(main())


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_proxy_that_listens_for_one_family_alone_is_not_called_missing(
    netns: str, backend: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Istio's does so in pods of both families, unless the mesh is made for both."""
    capture(netns, EVERYTHING, backend)
    injected = injected_pod(netns, folder, monkeypatch)

    async def main() -> None:
        cri = FakeCri()
        cri.add(injected)
        async with serving(cri, folder / "c.sock"):
            with listening(netns, 15001, 15006):
                found = await asyncio.to_thread(only, netns)
        assert (found["kind"], found["severity"]) == ("blackhole", "warning")
        assert found["explanation"].startswith("New connections by IPv6 are sent to TCP port 15001")
        assert "the proxy listens for IPv4 alone" in found["explanation"]
        assert "missing" not in found["explanation"]

    asyncio.run(main())


def test_a_capture_of_one_family_leaves_the_other_open(netns: str) -> None:
    inside(netns, "ip", "link", "add", "d0", "type", "veth", "peer", "name", "d1")
    inside(netns, "ip", "-6", "addr", "add", "fd00::7/128", "dev", "d0", "nodad")
    load(netns, left.SIDECAR)
    with listening(netns, 15001, 15006):
        found = only(netns)
    assert found["kind"] == "partial-capture"
    assert any("ipv6 has an address here" in line for line in found["evidence"])


@pytest.mark.parametrize(
    "change",
    [
        ("-t", "nat", "-D", "OUTPUT", "-p", "tcp", "-j", "ISTIO_OUTPUT"),
        ("-t", "nat", "-F", "ISTIO_REDIRECT"),
        ("-t", "nat", "-I", "ISTIO_OUTPUT", "1", "-j", "ISTIO_REDIRECT"),
    ],
    ids=["jump-gone", "chain-emptied", "out-of-order"],
)
def test_a_torn_capture_is_partial(netns: str, change: tuple[str, ...]) -> None:
    load(netns, left.SIDECAR)
    inside(netns, "iptables-nft", *change)
    with listening(netns, 15001, 15006):
        assert kinds(netns) == ["partial-capture"]


def test_a_guard_without_its_capture_is_found(netns: str) -> None:
    capture(netns, {**EVERYTHING, "enable_ipv6": False, "guard": "standing"}, "iptables-nft")
    with listening(netns, 15001, 15006):
        assert kinds(netns) == []
    inside(netns, "nft", "delete", "table", "ip", "nat")
    found = only(netns)
    assert (found["kind"], found["severity"]) == ("partial-capture", "critical")


def test_a_rule_before_the_capture_is_told_with_its_place(netns: str) -> None:
    load(netns, left.SIDECAR)
    line = "iptables-nft -t nat -I OUTPUT 1 -p tcp -m owner --uid-owner 0 -j RETURN"
    inside(netns, *line.split())
    with listening(netns, 15001, 15006):
        found = only(netns)
    assert found["kind"] == "partial-capture"
    assert any("position 1" in line and "--uid-owner 0" in line for line in found["evidence"])


def test_a_capture_in_two_backends_is_told_once(netns: str) -> None:
    for flavour in left.FLAVOURS:
        load(netns, left.SIDECAR, flavour)
    with listening(netns, 15001, 15006):
        assert kinds(netns) == ["mixed-backends"]


def test_sets_of_an_ambient_agent_that_is_gone_are_found(netns: str, folder: Path) -> None:
    inside(netns, "ipset", "create", "istio-inpod-probes-v4", "hash:ip")
    [found] = [f for f in host_scan(netns)["findings"] if f["where"]["netns"] == "host"]
    assert (found["kind"], found["objects"]) == ("host-rules", ["ipset istio-inpod-probes-v4"])
    with namespace() as other, listening(other, name="install-cni", folder=folder):
        assert not [f for f in host_scan(netns)["findings"] if f["where"]["netns"] == "host"]


def test_a_capture_in_the_nodes_own_namespace_is_found(netns: str) -> None:
    load(netns, left.SIDECAR)
    [found] = [f for f in host_scan(netns)["findings"] if f["where"]["netns"] == "host"]
    assert (found["kind"], found["severity"]) == ("host-rules", "critical")
    assert "--host" in found["fix"]


# --- others ---------------------------------------------------------------------------------------


def test_a_mesh_whose_proxy_is_gone_is_found(netns: str) -> None:
    load(netns, left.LINKERD)
    found = only(netns)
    assert (found["kind"], found["owner"], found["severity"]) == (
        "foreign-mesh",
        "linkerd",
        "critical",
    )
    with listening(netns, 4143, 4140):
        assert kinds(netns) == []


@pytest.mark.parametrize(
    ("text", "owner"), [(left.CILIUM, "cilium"), (left.CALICO, "calico")], ids=["cilium", "calico"]
)
def test_rules_of_a_cni_that_is_gone_are_found(
    netns: str, text: str, owner: str, folder: Path
) -> None:
    load(netns, text)
    found = only(netns)
    assert (found["kind"], found["owner"]) == ("foreign-cni", owner)
    process = {"cilium": "cilium-agent", "calico": "calico-node"}[owner]
    with listening(netns, name=process, folder=folder):
        assert kinds(netns) == []


def test_rules_of_docker_and_of_nobody_known_are_no_leftovers(netns: str) -> None:
    load(netns, left.DOCKER)
    add_foreign(netns)
    assert set(kinds(netns)) <= {"mixed-backends"}  # add_foreign loads both flavours


def test_rules_that_cni_plugins_make_in_use_are_no_leftovers(netns: str, folder: Path) -> None:
    with namespace("pod") as pod:
        left.cni_chain(netns, pod, folder)
        loaded = inside(netns, "iptables-save")
        for chain in ("CNI-HOSTPORT-DNAT", "CNI-DN-", "CNI-FORWARD", "MASQUERADE"):
            assert chain in loaded
        assert findings(netns) == []
        assert findings(pod) == []
        document = host_scan(netns)
        assert [f for f in document["findings"] if f["where"]["netns"]] == []


def host_scan(name: str) -> dict[str, Any]:
    """Scan a namespace as the node's own."""
    _, out, _ = as_host(name, "scan", "--host", "-o", "json", "--conf-dir", "/nonexistent")
    found: dict[str, Any] = json.loads(out)
    return found


def test_rules_for_one_hook_in_both_backends_are_told_with_their_numbers(netns: str) -> None:
    for flavour, port in (("legacy", "15001"), ("nft", "16001")):
        line = (
            f"iptables-{flavour} -t nat -A OUTPUT -p tcp --dport 80 -j REDIRECT --to-ports {port}"
        )
        inside(netns, *line.split())
    found = only(netns)
    assert found["kind"] == "mixed-backends"
    assert found["where"]["table"] == "nat"
    assert any("1 rules in iptables-legacy" in line for line in found["evidence"])


@pytest.mark.parametrize(
    "commands",
    [
        ["ip rule add fwmark 1337 lookup 133", "ip route add local default dev lo table 133"],
        ["ip rule add fwmark 0x111/0xfff pref 32764 lookup 100"],
        ["ip -6 addr add ::6/128 dev lo"],
    ],
    ids=["tproxy", "ambient", "address"],
)
def test_routing_without_the_rules_that_need_it_is_found(netns: str, commands: list[str]) -> None:
    for line in commands:
        inside(netns, *line.split())
    found = only(netns)
    assert found["kind"] == "route"
    assert len(found["objects"]) == len(commands)


def test_a_route_in_a_table_that_others_use_is_theirs(netns: str) -> None:
    for line in (
        "ip rule add fwmark 1 lookup 100",
        "ip route add local default dev lo table 100",
        "ip rule add fwmark 1337 lookup 133",
        "ip rule add fwmark 7 lookup 133",
        "ip route add local default dev lo table 133",
    ):
        inside(netns, *line.split())
    found = only(netns)
    assert found["objects"] == ["ip -4 rule fwmark 1337 lookup 133"]


def test_routing_that_a_capture_needs_is_not_left_over(netns: str) -> None:
    mode = {"inbound_interception_mode": "TPROXY"}
    capture(netns, {**EVERYTHING, **mode}, "iptables-nft")
    assert "route" not in kinds(netns)


def test_a_table_that_no_tool_can_print_is_not_called_clean(netns: str) -> None:
    script = """
        table ip nat {
          chain OUTPUT { type nat hook output priority -100;
            tcp dport { 80, 443 } meta skuid != 1337 redirect to :15001; }
          chain KUBE-SERVICES { }
        }"""
    inside(netns, "nft", "-f", "-", stdin=script)
    found = only(netns)
    assert (found["kind"], found["where"]["table"]) == ("unreadable", "nat")
    assert "KUBE-SERVICES" in found["objects"]
    assert found["owner"] == "kube-proxy"


def test_a_tool_that_leaves_a_table_out_without_a_word_is_not_believed(
    netns: str, folder: Path
) -> None:
    load(netns, left.KUBE_PROXY)
    tool = folder / "iptables-nft-save"
    tool.write_text("#!/bin/sh\nexit 0\n")
    tool.chmod(0o755)
    _, out, _ = command("scan", "--netns", netns, "-o", "json", path=str(folder))
    found = json.loads(out)["findings"]
    assert {(f["kind"], f["where"]["table"], f["owner"]) for f in found} == {
        ("unreadable", "nat", "kube-proxy"),
        ("unreadable", "filter", "kube-proxy"),
    }


def test_a_conflist_whose_plugin_is_gone_is_found(netns: str, folder: Path) -> None:
    (folder / "bin").mkdir()
    (folder / "bin/bridge").touch()
    plugins = [{"type": "bridge", "ipam": {"type": "host-local"}}, {"type": "istio-cni"}]
    text = json.dumps({"cniVersion": "0.3.1", "name": "n", "plugins": plugins})
    (folder / "10-n.conflist").write_text(text)
    words = ("--host", "--conf-dir", str(folder), "--bin-dir", str(folder / "bin"), "-o", "json")
    _, out, _ = as_host(netns, "scan", *words)
    [found] = [f for f in json.loads(out)["findings"] if f["kind"] == "cni-config"]
    assert found["severity"] == "critical"
    assert found["objects"][1:] == ["host-local", "istio-cni"]


# --- how it looks ---------------------------------------------------------------------------------


def test_looking_leaves_no_trace(netns: str) -> None:
    load(netns, left.KUBE_PROXY)
    capture(netns, EVERYTHING, "nftables")
    before = snapshot(netns), left.legacy_tables(netns)
    findings(netns)
    assert (snapshot(netns), left.legacy_tables(netns)) == before
    assert before[1] == ""


def test_every_namespace_is_looked_into_once(netns: str) -> None:
    load(netns, left.SIDECAR)
    with listening(netns):  # known by its name and by a process
        found = scanned("--all", "--conf-dir", "/nonexistent")["findings"]
    assert [f["kind"] for f in found if f["where"]["netns"] == netns] == ["blackhole"]


def test_a_person_sees_how_far_it_is_and_a_pipe_does_not(netns: str) -> None:
    watched = left.on_terminal(f"scan --netns {netns}")
    assert "looking" in watched
    assert "nothing found" in watched
    _, out, err = command("scan", "--netns", netns)
    assert ("looking" in out + err, "nothing found" in out) == (False, True)


def test_json_is_all_that_is_printed_and_lines_say_what_to_do(netns: str) -> None:
    load(netns, left.KUBE_PROXY)
    code, out, err = command("scan", "--netns", netns, "-o", "json")
    assert (code, err) == (1, "")
    json.loads(out)
    code, out, err = command("scan", "--netns", netns)
    assert (code, err) == (1, "")
    assert f"intercept-agent clean --netns {netns} --only kube-proxy" in out


def test_pins_and_programs_of_a_mesh_that_is_gone_are_found(folder: Path) -> None:
    mount = folder / "bpf"
    mount.mkdir()
    run("mount", "-t", "bpf", "bpf", str(mount))
    try:
        (mount / "tc/globals").mkdir(parents=True)
        pin = mount / "tc/globals/cilium_it_test"
        pin_a_map(pin)
        with namespace() as name:
            [finding] = [f for f in host_scan(name)["findings"] if str(pin) in f["objects"]]
            assert (finding["kind"], finding["owner"]) == ("ebpf", "cilium")
            assert f"rm -r {mount}/tc" in finding["fix"]
    finally:
        run("umount", str(mount))


def pin_a_map(path: Path) -> None:
    create, array = 0, 2  # linux/bpf.h
    fd, _ = bpf.call(create, struct.pack("=IIII", array, 4, 4, 1))
    bpf.pin(fd, path)
    os.close(fd)


@pytest.mark.parametrize("words", ["scan", "clean --dry-run"])
def test_what_others_wrote_does_not_steer_the_terminal(netns: str, words: str) -> None:
    inside(netns, "iptables-nft", "-t", "nat", "-N", "KUBE-SERVICES")
    evil = ("-m", "comment", "--comment", "\x1b[2J\x1b]0;name\x07\x9b31m\u202e\udcff")
    inside(netns, "iptables-nft", "-t", "nat", "-A", "OUTPUT", *evil, "-j", "KUBE-SERVICES")
    shown = left.on_terminal(f"{words} --netns {netns}")
    assert r"\x1b[2J\x1b]0;name\x07\x9b31m\u202e\udcff" in shown
    steering = ("\x1b[2J", "\x1b]", "\x07", "\x9b", "\u202e")
    assert not [letters for letters in steering if letters in shown]


def test_nobody_who_reads_is_no_error(netns: str) -> None:
    line = (sys.executable, "-m", "agent.cli.main", "scan", "--netns", netns)
    done = subprocess.run(("sh", "-c", '"$@" >&-', "sh", *line), capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


# --- again and again ------------------------------------------------------------------------------


def test_a_namespace_is_judged_anew_only_where_something_changed(netns: str, folder: Path) -> None:
    memory = Memory()

    def look() -> tuple[Finding, ...]:
        with Netns.open(path_of(netns)) as opened:
            subject = Subject(place=Place(opened.id, opened.path, netns))
            node = Node(processes=owners_among(namespaces.processes()))
            return memory.inspect(opened, subject, node)

    load(netns, left.KUBE_PROXY)
    first = look()
    assert [finding.kind for finding in first] == [Kind.KUBE_PROXY]
    assert look() is first
    with listening(netns, 10256, name="kube-proxy", folder=folder):
        assert look() == ()
    assert look() == first
    inside(netns, "iptables-nft", "-t", "nat", "-F")
    assert look() != first
