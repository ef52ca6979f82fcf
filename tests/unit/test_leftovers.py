"""Whose is what, which captures are whole, and what a removal takes and gives back. No kernel."""

import json
import subprocess
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.formats import iptables_save
from agent.kernel import namespaces
from agent.kernel.namespaces import Process
from agent.kernel.netns import NetnsId
from agent.leftovers import backup
from agent.leftovers.finding import Takes
from agent.leftovers.flaws import flaws, shadows
from agent.leftovers.look import Seen
from agent.leftovers.node import Node, sign_of_life, wants_capture
from agent.leftovers.removal import ordered, removal
from agent.model import catalogue, owned
from agent.model.decision import Reason
from agent.model.ruleset import Chain, Family, Rule, Ruleset, Target, match
from agent.model.state import IPTABLES_NFT, NamespaceState
from agent.model.wanted import Known

CASES = Path(__file__).parents[1] / "cases"
HERE = NetnsId(4, 100)


def golden() -> list[tuple[str, Family, str]]:
    found = []
    for file in ("sidecar.json", "cni_annotations.json"):
        for case in json.loads((CASES / file).read_text()):
            for family, key in ((Family.IPV4, "canonical_v4"), (Family.IPV6, "canonical_v6")):
                if case.get(key):
                    found.append((f"{case['name']}-{family}", family, case[key]))
    return found


GOLDEN = golden()


# --- whose is what --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("table", "chain", "owner"),
    [
        ("filter", "KUBE-FIREWALL", "kubelet"),
        ("nat", "KUBE-FIREWALL", "kube-proxy"),
        ("mangle", "KUBE-KUBELET-CANARY", "kubelet"),
        ("nat", "KUBE-SVC-TCOU7JCQXEZGVUNU", "kube-proxy"),
        ("filter", "KUBE-ROUTER-INPUT", "kube-router"),
        ("filter", "KUBE-NWPLCY-ABC", "kube-router"),
        ("nat", "ISTIO_OUTPUT", "istio"),
        ("nat", "ISTIO_POSTRT", "istio-ambient"),
        ("nat", "PROXY_INIT_REDIRECT", "linkerd"),
        ("nat", "KUMA_MESH_INBOUND_REDIRECT", "kuma"),
        ("nat", "KUMA_IN_REDIRECT", "kuma"),
        ("mangle", "ztunnel-PREROUTING", "istio-ztunnel"),
        ("nat", "OVN-KUBE-NODEPORT", "ovn-kubernetes"),
        ("nat", "OVN-NAT-POLICY", "kube-ovn"),
        ("nat", "OPENSHIFT-MASQUERADE-2", "openshift-sdn"),
        ("filter", "AZURE-NPM-INGRESS", "azure-npm"),
        ("nat", "KIND-MASQ-AGENT", "kindnet"),
        ("nat", "CONSUL_PROXY_OUTPUT", "consul"),
        ("nat", "OSM_PROXY_INBOUND", "osm"),
        ("filter", "OLD_CILIUM_FORWARD", "cilium"),
        ("filter", "cali-FORWARD", "calico"),
        ("filter", "FLANNEL-FWD", "flannel"),
        ("nat", "DOCKER", "docker"),
        ("nat", "CNI-HOSTPORT-DNAT", "portmap"),
        ("nat", "CNI-0123456789abcdef", "cni-masquerade"),
        ("filter", "CNI-FORWARD", "cni-firewall"),
        ("nat", "WEAVE-NPC", "weave"),
        ("nat", "MY-KUBE-SERVICES", None),
    ],
)
def test_chain_belongs_to_whoever_names_chains_so(
    table: str, chain: str, owner: str | None
) -> None:
    found = catalogue.owner_of_chain(table, chain)
    assert (found.name if found else None) == owner


def test_every_owner_names_where_its_facts_are_from() -> None:
    assert [owner.name for owner in catalogue.OWNERS if not owner.source] == []
    names = [owner.name for owner in catalogue.OWNERS]
    assert len(names) == len(set(names))


def process(name: str, *words: str, netns: NetnsId | None = HERE) -> Process:
    return Process(pid=7, name=name, words=words or (name,), netns=netns)


def seen(state: NamespaceState | None = None) -> Seen:
    return Seen(id=HERE, name="x", state=state or NamespaceState())


@pytest.mark.parametrize(
    ("running", "alive"),
    [
        (process("kube-proxy"), True),
        (process("python3", "/usr/bin/kube-proxy", "--v=2"), True),
        (process("kube-proxy", netns=NetnsId(4, 101)), False),
        (process("kube-proxy-exporter"), False),
        (process("k3s-server", "/usr/local/bin/k3s", "server"), True),
        (process("k3s-server", "/usr/local/bin/k3s", "server", "--disable-kube-proxy"), False),
        (process("hyperkube", "/hyperkube", "proxy", "--v=2"), True),
        (process("hyperkube", "/hyperkube", "kubelet"), False),
        (process("openshift-sdn-n", "/usr/bin/openshift-sdn-node"), True),
        (process("kube-proxy", netns=None), True),
    ],
)
def test_owner_lives_if_a_process_of_its_name_is_in_the_namespace(
    running: Process, alive: bool
) -> None:
    owner = catalogue.by_name("kube-proxy")
    assert (sign_of_life(owner, seen(), Node(processes=(running,))) is not None) == alive


def test_a_process_that_has_ended_and_waits_for_its_parent_is_no_sign_of_life() -> None:
    with subprocess.Popen(("true",)) as child:
        stat = Path(f"/proc/{child.pid}/stat")
        deadline = time.monotonic() + 30
        while stat.read_text().rpartition(")")[2].split()[0] != "Z":
            assert time.monotonic() < deadline
        assert child.pid not in {each.pid for each in namespaces.processes()}
    with subprocess.Popen(("sleep", "60")) as child:
        assert child.pid in {each.pid for each in namespaces.processes()}
        child.kill()


def test_a_name_that_the_kernel_cut_off_is_known_again() -> None:
    node = Node(processes=(process("linkerd2-proxy-", "/usr/lib/x"),))
    assert sign_of_life(catalogue.by_name("linkerd"), seen(), node)


@pytest.mark.parametrize(
    ("reason", "wants"),
    [
        (Reason.NOT_INJECTED, False),
        (Reason.INJECT_FALSE, False),
        (Reason.INIT_CONTAINER, True),
        (Reason.AMBIENT, True),
        (Reason.UNKNOWN_POD, None),
    ],
)
def test_uncaptured_pod_may_have_rightful_rules_of_others(
    reason: Reason, wants: bool | None
) -> None:
    assert wants_capture(reason, captured=False) is wants


# --- which captures are whole ---------------------------------------------------------------------


@pytest.mark.parametrize(("name", "family", "text"), GOLDEN, ids=[name for name, *_ in GOLDEN])
def test_what_istio_writes_has_no_flaw(name: str, family: Family, text: str) -> None:
    loaded = iptables_save.parse(text, family)
    assert flaws(owned.capture_of(loaded)) == ()
    assert shadows(loaded) == ()


@pytest.mark.parametrize("name", ["basic-ipv4", "tproxy-ipv4", "DNS-ipv4"])
def test_a_jump_that_is_missing_is_a_flaw(name: str) -> None:
    [(_, family, text)] = [case for case in GOLDEN if case[0] == name]
    lines = [line for line in text.splitlines() if not line.startswith("-A OUTPUT")]
    capture = owned.capture_of(iptables_save.parse("\n".join(lines), family))
    assert flaws(capture)


# --- what is taken and given back -----------------------------------------------------------------

NAMES = tuple(f"KUBE-SVC-{letter}" for letter in "ABCDE")
OTHERS = ("MINE", "THEIRS")
TARGETS = (*NAMES, *OTHERS, "ACCEPT", "RETURN", "DROP")

rules = st.builds(
    lambda port, name: Rule((match("tcp", "--dport", str(port)),), Target(name)),
    st.integers(1, 4),
    st.sampled_from(TARGETS),
)
bodies = st.lists(rules, max_size=6).map(tuple)


@st.composite
def rulesets(draw: st.DrawFn) -> Ruleset:
    chains = [Chain(name, "ACCEPT", draw(bodies)) for name in ("PREROUTING", "INPUT", "OUTPUT")]
    chains.append(Chain("POSTROUTING", "DROP", draw(bodies)))
    chains += [Chain(name, None, draw(bodies)) for name in (*NAMES, *OTHERS)]
    return Ruleset(Family.IPV4).with_chains("nat", chains)


@given(rulesets(), st.sets(st.sampled_from(NAMES)))
def test_what_was_taken_is_put_back_to_where_it_was(loaded: Ruleset, gone: set[str]) -> None:
    state = NamespaceState(loaded={IPTABLES_NFT: {Family.IPV4: loaded}})
    chains = frozenset((IPTABLES_NFT, Family.IPV4, "nat", name) for name in gone)
    taken = removal(seen(state), [Takes(chains=chains)], Known())
    left = taken.want.of(IPTABLES_NFT)[Family.IPV4]
    assert not [n for n in gone if left.chain("nat", n)]
    assert all(
        rule.target is None or rule.target.name not in gone
        for table in left.tables
        for chain in table.chains
        for rule in chain.rules
    )
    for section in backup.sections(taken, "", ()):
        left = backup.put_back(left, section.text)
        assert backup.put_back(left, section.text) == left
    assert left == loaded


@given(rulesets())
def test_chains_go_before_those_that_they_lead_to(loaded: Ruleset) -> None:
    table = loaded.tables[0]
    acyclic = [
        Chain(c.name, None, tuple(r for r in c.rules if r.target and r.target.name > c.name))
        for c in table.chains
        if c.name in NAMES
    ]
    order = [chain.name for chain in ordered(acyclic)]
    assert sorted(order) == sorted(NAMES)
    for chain in acyclic:
        for rule in chain.rules:
            if rule.target and rule.target.name in NAMES:
                assert order.index(chain.name) < order.index(rule.target.name)


def test_a_backup_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    sections = (
        backup.Section("iptables-nft", "*nat\nCOMMIT\n"),
        backup.Section("sh", "ip link set lo up\n"),
    )
    saved = backup.Saved(name="a b", id=NetnsId(4, 5), birth="b0:7", host=False, sections=sections)
    written = backup.write(tmp_path / "b.txt", [saved])
    assert backup.read(tmp_path / "b.txt") == (saved,)
    assert len(written) == 3
    assert all(Path(path).stat().st_mode & 0o077 == 0 for path in written)
