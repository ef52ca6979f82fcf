"""What is left when a node gets another CNI or kube-proxy another mode, or a tool dies in a pod."""

import json
from pathlib import Path

from tests.support import leftovers as left
from tests.support.leftovers import as_host, findings, listening, load, only
from tests.support.netns import inside

OF_IPTABLES = """\
*nat
:KUBE-SVC-TCOU7JCQXEZGVUNU - [0:0]
:KUBE-SEP-ABCDEFGHIJKLMNOP - [0:0]
-A KUBE-SVC-TCOU7JCQXEZGVUNU -j KUBE-SEP-ABCDEFGHIJKLMNOP
-A KUBE-SEP-ABCDEFGHIJKLMNOP -p udp -m udp -j DNAT --to-destination 10.0.0.53:53
COMMIT
*filter
:KUBE-SERVICES - [0:0]
-A OUTPUT -m conntrack --ctstate NEW -j KUBE-SERVICES
-A KUBE-SERVICES -d 10.96.7.7/32 -p tcp -m tcp --dport 80 -j REJECT
COMMIT
"""
OF_IPVS = """\
*filter
:KUBE-NODE-PORT - [0:0]
-A INPUT -m comment --comment "kubernetes health check rules" -j KUBE-NODE-PORT
COMMIT
"""
IN_IPVS_MODE = """\
*nat
:KUBE-SERVICES - [0:0]
:KUBE-NODE-PORT - [0:0]
-A OUTPUT -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A KUBE-SERVICES -m addrtype --dst-type LOCAL -j KUBE-NODE-PORT
-A KUBE-SERVICES -m set --match-set KUBE-CLUSTER-IP dst,dst -j ACCEPT
COMMIT
"""
WEAVE = """\
*nat
:WEAVE - [0:0]
-A POSTROUTING -j WEAVE
COMMIT
*filter
:WEAVE-NPC - [0:0]
-A FORWARD -o weave -j WEAVE-NPC
-A FORWARD -o weave -m state --state NEW -j NFLOG --nflog-group 86
-A FORWARD -o weave -j DROP
-A FORWARD -i weave ! -o weave -j ACCEPT
-A FORWARD -i eth9 ! -o weave -j ACCEPT
COMMIT
"""
NODE_LOCAL_DNS = """\
*raw
-A OUTPUT -p udp -m comment --comment "NodeLocal DNS Cache: skip conntrack" -j NOTRACK
COMMIT
"""
MIRRORD = """\
*nat
:MIRRORD_INPUT_aBc12 - [0:0]
-A PREROUTING -j MIRRORD_INPUT_aBc12
-A MIRRORD_INPUT_aBc12 -p tcp -m tcp --dport 80 -j REDIRECT --to-ports 35211
COMMIT
"""
OLD_AMBIENT = """\
*mangle
:ztunnel-PREROUTING - [0:0]
-A PREROUTING -j ztunnel-PREROUTING
-A ztunnel-PREROUTING -p tcp -m set --match-set ztunnel-pods-ips src -j MARK --set-xmark 0x100/0x100
COMMIT
"""


def link(namespace: str, name: str) -> None:
    inside(namespace, "ip", "link", "add", name, "type", "veth", "peer", "name", "it-peer")


def sets(namespace: str) -> str:
    return inside(namespace, "ipset", "list", "-n")


def cleaned(namespace: str, folder: Path, *words: str) -> None:
    backups = ("--backup-dir", str(folder / "backups"))
    code, _, err = as_host(namespace, "clean", "--host", "--yes", *backups, *words)
    assert code == 0, err


# --- kube-proxy -----------------------------------------------------------------------------------


def test_rules_of_iptables_mode_are_left_over_beside_a_kube_proxy_in_ipvs_mode(
    netns: str, tmp_path: Path
) -> None:
    inside(netns, "ipset", "create", "KUBE-CLUSTER-IP", "hash:ip,port")
    link(netns, "kube-ipvs0")
    load(netns, IN_IPVS_MODE)
    with listening(netns, 10256, name="kube-proxy", folder=tmp_path):
        assert findings(netns) == []
        load(netns, OF_IPTABLES)
        found = only(netns)
        assert (found["kind"], found["severity"]) == ("kube-proxy", "critical")
        assert {o for o in found["objects"] if not o.startswith("-t")} == {
            *("KUBE-SERVICES", "KUBE-SVC-TCOU7JCQXEZGVUNU", "KUBE-SEP-ABCDEFGHIJKLMNOP"),
        }
        cleaned(netns, tmp_path, "--only", "kube-proxy")
        assert findings(netns) == []
    assert "--match-set KUBE-CLUSTER-IP" in inside(netns, "iptables-nft-save", "-t", "nat")
    assert "KUBE-CLUSTER-IP" in sets(netns)


def test_what_ipvs_mode_made_is_left_over_beside_a_kube_proxy_in_iptables_mode(
    netns: str, tmp_path: Path
) -> None:
    load(netns, left.KUBE_PROXY)
    with listening(netns, 10256, name="kube-proxy", folder=tmp_path):
        assert findings(netns) == []
        inside(netns, "ipset", "create", "KUBE-CLUSTER-IP", "hash:ip,port")
        link(netns, "kube-ipvs0")
        load(netns, OF_IPVS)
        found = only(netns)
        assert (found["kind"], found["severity"]) == ("kube-proxy", "critical")
        assert {"KUBE-NODE-PORT", "ipset KUBE-CLUSTER-IP", "interface kube-ipvs0"} <= {
            *found["objects"]
        }
        cleaned(netns, tmp_path, "--only", "kube-proxy")
        assert findings(netns) == []
    assert set(inside(netns, "iptables-nft-save").split()) >= left.KUBE_PROXY_CHAINS


# --- CNIs -----------------------------------------------------------------------------------------


def test_rules_about_a_cnis_own_bridge_go_with_it_and_no_others(netns: str, tmp_path: Path) -> None:
    for name in ("weave-local-pods", "weaver-no-masq-local"):
        inside(netns, "ipset", "create", name, "hash:ip")
    load(netns, WEAVE)
    found = only(netns)
    assert (found["kind"], found["owner"]) == ("foreign-cni", "weave")
    cleaned(netns, tmp_path)
    assert findings(netns) == []
    rules = [line for line in inside(netns, "iptables-nft-save").split("\n") if "-A" in line]
    assert rules == ["-A FORWARD -i eth9 ! -o weave -j ACCEPT"]
    assert sets(netns) == ""


def test_interface_of_a_cni_that_is_gone_is_told_and_left(netns: str, tmp_path: Path) -> None:
    link(netns, "flannel.1")
    with listening(netns, 8080, name="flanneld", folder=tmp_path):
        assert findings(netns) == []
    found = only(netns)
    assert (found["kind"], found["owner"]) == ("foreign-cni", "flannel")
    assert (found["objects"], found["fix"]) == (["interface flannel.1"], "ip link del flannel.1")
    cleaned(netns, tmp_path)
    assert "flannel.1" in inside(netns, "ip", "-br", "link")


def test_rules_of_a_dns_cache_that_is_gone_are_found(netns: str, tmp_path: Path) -> None:
    load(netns, NODE_LOCAL_DNS)
    with listening(netns, 9253, name="node-cache", folder=tmp_path):
        assert findings(netns) == []
    found = only(netns)
    assert (found["kind"], found["owner"]) == ("foreign-cni", "node-local-dns")


def test_configuration_of_the_cni_before_is_told_where_it_comes_first(
    netns: str, tmp_path: Path
) -> None:
    conf, plugins = tmp_path / "conf", tmp_path / "bin"
    for folder in (conf, plugins):
        folder.mkdir()
    for number, name in ((10, "calico"), (20, "bridge")):
        (plugins / name).touch()
        about = {"cniVersion": "1.0.0", "name": name, "plugins": [{"type": name}]}
        (conf / f"{number}-{name}.conflist").write_text(json.dumps(about))

    def told() -> list[tuple[str, str, list[str]]]:
        words = ("--conf-dir", str(conf), "--bin-dir", str(plugins), "-o", "json")
        document = json.loads(as_host(netns, "scan", "--host", *words)[1])
        found = (f for f in document["findings"] if f["kind"] == "cni-config")
        return [(f["owner"], f["severity"], f["objects"]) for f in found]

    assert told() == [("calico", "critical", [str(conf / "10-calico.conflist")])]
    with listening(netns, 9099, name="calico-node", folder=tmp_path):
        assert told() == []
    (conf / "20-bridge.conflist").unlink()
    assert told() == []  # a node whose CNI is about to start looks so, too


# --- meshes and their tools -----------------------------------------------------------------------


def test_redirect_of_a_debugging_tool_that_died_in_a_pod_is_found(netns: str) -> None:
    load(netns, MIRRORD)
    found = only(netns)
    assert (found["kind"], found["owner"], found["severity"]) == (
        *("foreign-mesh", "mirrord", "critical"),
    )
    assert any("35211" in line for line in found["evidence"])


def test_sets_and_policy_rules_of_the_first_ambient_agents_go_with_their_chains(
    netns: str, tmp_path: Path
) -> None:
    inside(netns, "ipset", "create", "ztunnel-pods-ips", "hash:ip")
    inside(netns, "ip", "rule", "add", "fwmark", "0x100/0x100", "lookup", "101", "pref", "20001")
    load(netns, OLD_AMBIENT)
    found = {(f["kind"], f["owner"]) for f in findings(netns)}
    assert found == {("foreign-mesh", "istio-ztunnel"), ("route", "istio-ztunnel")}
    cleaned(netns, tmp_path)
    assert findings(netns) == []
    assert sets(netns) == ""
    assert "101" not in inside(netns, "ip", "rule")
