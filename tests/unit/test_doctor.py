"""What the doctor makes of what was seen of a node: severity, meaning, command. Pure."""

from typing import Any

import pytest

from agent.explain.finding import Finding, Severity
from agent.explain.node.diagnosis import Diagnosis, diagnose
from agent.explain.node.facts import Cni, NodeFacts, Ports, Rules
from agent.explain.node.features import FEATURES
from agent.kernel.node import Tool
from agent.model.state import BACKENDS, IPTABLES_LEGACY, IPTABLES_NFT, NFTABLES

ALL_CAPABILITIES = (1 << 41) - 1
READY = {"version": "1.0", "ready": True, "pending": [], "mode": "repair", "backend": "auto"}
IPTABLES = Tool(name="iptables", path="/usr/sbin/xtables-nft-multi", version="v1.8.9 (nf_tables)")


def node(**fields: Any) -> NodeFacts:
    """Return a node on which all is well, but for `fields`."""
    values: dict[str, Any] = {
        "release": "6.12.1",
        "capabilities": ALL_CAPABILITIES,
        "backends": dict.fromkeys(BACKENDS),
        "chosen": NFTABLES,
        "features": {feature.name: True for feature in FEATURES},
        "tools": (IPTABLES,),
        "cgroup2": "/sys/fs/cgroup",
        "bpffs": "/sys/fs/bpf",
        "legacy": Rules(),
        "nft": Rules(),
        "conntrack": (10, 1000),
        "inotify": (3, 128),
        "synchronised": True,
        "cni": Cni(folder="/etc/cni/net.d", exists=True, file="10-x.conflist", present=True),
        "runtime": "/run/containerd/containerd.sock",
        "agent": READY,
    }
    return NodeFacts(**{**values, **fields})


def lacking(*names: str, **fields: Any) -> NodeFacts:
    return node(features={f.name: f.name not in names for f in FEATURES}, **fields)


def of(found: Diagnosis, kind: str) -> Finding:
    (finding,) = (finding for finding in found.findings if finding.kind == kind)
    return finding


def bad(found: Diagnosis) -> dict[str, Severity]:
    return {f.kind: f.severity for f in found.findings if f.severity is not Severity.OK}


def test_node_on_which_all_is_well_has_no_finding_but_good_ones() -> None:
    found = diagnose(node())
    assert found.works
    assert bad(found) == {}
    assert "auto takes nftables" in of(found, "backend").seen


def test_every_finding_that_is_not_good_says_what_it_means() -> None:
    worst = node(
        capabilities=0,
        own_pid_namespace=True,
        own_user_namespace=True,
        chosen=None,
        backends=dict.fromkeys(BACKENDS, "nft is not installed"),
        features={},
        lost_modules=True,
        cgroup2=None,
        bpffs=None,
        confined="docker-default",
        lockdown="integrity",
        selinux="enforcing",
        legacy=Rules(rules=3, kube=True),
        nft=Rules(rules=4),
        unreadable=("iptables-nft: incompatible",),
        lock_holder="iptables (PID 7)",
        conntrack=(999, 1000),
        rp_filter=1,
        ipv6="net.ipv6.conf.all.disable_ipv6 is 1",
        inotify=(128, 128),
        synchronised=False,
        cni=Cni(folder="/etc/cni/net.d"),
        runtime="",
        agent=None,
        ports=(Ports(what="health", address="127.0.0.1", port=15021, holder="nc (PID 8)"),),
        full_disk="no inode is free",
    )
    findings = [f for f in diagnose(worst).findings if f.severity is not Severity.OK]
    assert len(findings) >= 20
    for finding in findings:
        assert finding.seen, finding
        assert finding.means, finding
    unfixable = {f.kind for f in findings if not f.fix}
    assert unfixable <= {"cni", "lsm", "ipv6", "unreadable"}


# --- backends -------------------------------------------------------------------------------------


def test_backend_that_auto_takes_and_the_kernel_lacks_keeps_the_agent_from_working() -> None:
    found = diagnose(lacking("inet tables"))
    assert not found.works
    assert "auto takes nftables" in of(found, "backend").seen
    assert of(found, "backend").fix == "set backend: iptables-nft in the agent's configuration"


def test_backend_that_the_configuration_names_counts_and_not_the_one_that_auto_would_take() -> None:
    reasons = {NFTABLES: "nft is missing", IPTABLES_NFT: None, IPTABLES_LEGACY: None}
    found = diagnose(node(configured=NFTABLES, backends=reasons, chosen=IPTABLES_NFT))
    assert not found.works
    assert "asks for nftables, which cannot be used: nft is missing" in of(found, "backend").seen


def test_auto_says_why_it_passed_the_earlier_ones() -> None:
    reasons = {NFTABLES: "libnftables.so.1 is missing", IPTABLES_NFT: None, IPTABLES_LEGACY: None}
    found = diagnose(node(backends=reasons, chosen=IPTABLES_NFT))
    assert found.works
    assert "nftables: libnftables.so.1 is missing" in of(found, "backend").seen
    assert of(found, NFTABLES).fix == "apt-get install nftables"


def test_missing_module_comes_with_the_command_that_loads_it_for_good() -> None:
    found = diagnose(lacking("iptable_nat", "xt_owner"))
    fix = of(found, IPTABLES_LEGACY).fix
    assert fix.startswith("modprobe -a iptable_nat xt_owner && ")
    assert "/etc/modules-load.d/" in fix
    assert (
        "cannot load modules"
        in of(diagnose(lacking("iptable_nat", loads_modules=False)), IPTABLES_LEGACY).fix
    )


def test_part_that_a_capture_can_do_without_is_a_warning_for_the_chosen_backend() -> None:
    found = diagnose(lacking("nft_tproxy"))
    assert found.works
    assert bad(found) == {NFTABLES: Severity.WARNING}
    assert "nft_tproxy (TPROXY mode)" in of(found, NFTABLES).seen


def test_feature_that_nobody_can_tell_of_is_not_called_missing() -> None:
    found = diagnose(node(features={feature.name: None for feature in FEATURES}))
    assert bad(found) == {}
    assert "not known from here" in of(found, NFTABLES).seen


@pytest.mark.parametrize(("release", "works"), [("5.1.9", False), ("5.2.0-9-amd64", True)])
def test_kernel_without_nat_in_inet_tables_cannot_do_nftables(release: str, works: bool) -> None:
    assert diagnose(node(release=release)).works is works


def test_both_backends_with_rules_are_a_warning_and_one_is_none() -> None:
    both = node(legacy=Rules(rules=12), nft=Rules(rules=7))
    assert "12 rules in iptables-legacy and 7" in of(diagnose(both), "both-backends").seen
    assert bad(diagnose(both)) == {"both-backends": Severity.WARNING}
    assert bad(diagnose(node(legacy=Rules(rules=12)))) == {}


def test_iptables_that_leads_to_another_flavour_than_the_kubelet_uses_is_a_warning() -> None:
    found = diagnose(node(legacy=Rules(rules=1, kube=True)))
    fix = of(found, "alternatives").fix
    assert fix == "update-alternatives --set iptables /usr/sbin/iptables-legacy"
    assert bad(diagnose(node(nft=Rules(rules=1, kube=True)))) == {}


# --- the agent and what is around it --------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"capabilities": ALL_CAPABILITIES & ~(1 << 21)}, "capabilities"),
        ({"capabilities": ALL_CAPABILITIES & ~(1 << 12)}, "capabilities"),
        ({"own_user_namespace": True}, "user-namespace"),
        ({"chosen": None, "backends": dict.fromkeys(BACKENDS, "missing")}, "backend"),
        ({"conntrack": (990, 1000)}, "conntrack"),
        ({"agent": {**READY, "pending": ["cri: not asked yet"]}}, "agent"),
        ({"agent": None, "no_agent": "timed out", "mute": True}, "agent"),
        ({"full_disk": "no room"}, "disk"),
        ({"cni": Cni(folder="/d", wanted=True)}, "cni"),
        ({"cni": Cni(folder="/d", exists=True, present=True, elsewhere="in /e")}, "cni"),
        ({"cni": Cni(folder="/d", exists=True, present=True, binary=("missing",))}, "cni"),
    ],
)
def test_what_keeps_the_agent_from_working_is_critical(fields: dict[str, Any], kind: str) -> None:
    found = diagnose(node(**fields))
    assert not found.works
    assert of(found, kind).severity is Severity.CRITICAL


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"root": False, "capabilities": 0}, "capabilities"),
        ({"agent": None}, "agent"),
        ({"runtime": ""}, "runtime"),
        ({"cgroup2": None}, "cgroup2"),
        ({"bpffs": None}, "bpffs"),
        ({"ipv6": "off"}, "ipv6"),
        ({"synchronised": False}, "clock"),
        ({"rp_filter": 1}, "rp-filter"),
        ({"inotify": (127, 128)}, "inotify"),
        ({"conntrack": (850, 1000)}, "conntrack"),
        ({"lock_holder": "iptables (PID 7)"}, "xtables-lock"),
        ({"cni": Cni(folder="/d", exists=True, file="a", differences=("no entry",))}, "cni"),
    ],
)
def test_what_the_agent_can_work_with_is_no_more_than_a_warning(
    fields: dict[str, Any], kind: str
) -> None:
    found = diagnose(node(**fields))
    assert found.works
    assert list(bad(found)) == [kind]


def test_plugin_is_not_to_be_installed_before_there_is_a_cni_to_chain_it_into() -> None:
    found = diagnose(node(cni=Cni(folder="/d", exists=True, differences=("no configuration",))))
    assert of(found, "cni").fix == "intercept-agent cni install, once the base CNI is there"


def test_port_that_somebody_else_has_matters_only_while_the_agent_does_not_run() -> None:
    taken = (Ports(what="health", address="127.0.0.1", port=15021, holder="nc (PID 8)"),)
    found = diagnose(node(agent=None, ports=taken))
    assert not found.works
    assert "127.0.0.1:15021 is taken by nc (PID 8)" in of(found, "port").seen


def test_plugin_of_another_mesh_is_named() -> None:
    cni = Cni(folder="/d", exists=True, present=True, types=frozenset({"bridge", "linkerd-cni"}))
    assert "Linkerd" in of(diagnose(node(cni=cni)), "other-mesh").seen


def test_worst_findings_come_first() -> None:
    found = diagnose(node(full_disk="no room", bpffs=None, lock_holder="x"))
    order = [finding.severity for finding in found.findings][:3]
    assert order == [Severity.CRITICAL, Severity.WARNING, Severity.INFO]
