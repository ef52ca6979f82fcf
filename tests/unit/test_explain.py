"""What is made of what was seen of a pod: the findings, their evidence and their commands. Pure."""

import ipaddress
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from agent.explain.finding import Severity
from agent.explain.origin import setting_of
from agent.explain.pod import page
from agent.explain.pod.exemptions import exemptions
from agent.explain.pod.facts import AgentView, Facts, Listener, PodFacts, Said
from agent.explain.pod.flows import Fate
from agent.explain.pod.judge import Explanation, explain
from agent.formats.envoy import Certificate
from agent.kernel.processes import Process
from agent.kernel.sockets import KernelSocket
from agent.model.decision import decide
from agent.model.enrolment import Enrolment
from agent.model.host import LocalMark
from agent.model.native import NativeHook
from agent.model.plan import plan
from agent.model.pod import Namespace, Pod, Policy
from agent.model.ruleset import Chain, Family, Rule, Target
from agent.model.settings import parse
from agent.model.state import BaseChain, NamespaceState
from tests.support.capturing import BACKENDS, EVERYTHING, TPROXY
from tests.support.walks import POD, layer

NOW = datetime(2026, 11, 30, 12, 0, tzinfo=UTC)
INJECT = "sidecar.istio.io/inject"
STATUS = {"sidecar.istio.io/status": "{}"}
MARKED = replace(POD, local_marks=(LocalMark(1337),))
ENVOY = Process(pid=20, parent=19, name="envoy", uid=1337, gid=1337, container="c" * 64)
AGENT = Process(pid=19, parent=1, name="pilot-agent", uid=1337, gid=1337, container="c" * 64)
APP = Process(pid=30, parent=1, name="java", uid=1000, gid=1000)


def listener(port: int, process: Process, *, address: str = "::", **more: Any) -> Listener:
    local = (ipaddress.ip_address(address), port)
    values = {"protocol": "tcp", "dual": True, "transparent": False, **more}
    found = KernelSocket(local=local, remote=(local[0], 0), uid=process.uid, inode=port, **values)
    return Listener(socket=found, processes=(process,))


HEALTHY = (*(listener(port, ENVOY) for port in (15001, 15006, 15021)), listener(8080, APP))
STOPPED = (listener(8080, APP),)


def captured(raw: Mapping[str, object] = EVERYTHING, backend: str = "nftables") -> NamespaceState:
    return NamespaceState(loaded={backend: plan(parse(raw)).rulesets})


def said(labels: Mapping[str, str], annotations: Mapping[str, str] = STATUS) -> Said:
    pod = Pod(namespace="shop", name="web", labels=labels, annotations=annotations)
    return Said(
        who="somebody",
        labels=labels,
        annotations=annotations,
        decision=decide(pod, Namespace(name="shop"), Policy()),
    )


def facts(**fields: Any) -> Facts:
    """Return what is seen of a healthy pod, but for `fields`."""
    values: dict[str, Any] = {
        "target": "pod:shop/web",
        "path": "/run/netns/cni-1",
        "netns": (4, 4026532000),
        "pod": PodFacts(namespace="shop", name="web", created=said({INJECT: "true"})),
        "settings": parse(EVERYTHING),
        "origin": "the pod's annotations",
        "applies": "intercept-agent apply --netns pod:shop/web",
        "state": captured(),
        "backend": "nftables",
        "host": POD,
        "name_servers": ("10.96.0.10",),
        "listeners": HEALTHY,
        "processes": (AGENT, ENVOY, APP),
        "certificates": (),
        "now": NOW,
    }
    return Facts(**{**values, **fields})


def kinds(found: Explanation) -> dict[str, Severity]:
    return {finding.kind: finding.severity for finding in found.findings}


def fates(found: Explanation) -> dict[tuple[str, str], Fate]:
    return {(flow.direction, flow.family): flow.fate for flow in found.flows}


def one(found: Explanation, kind: str) -> Any:
    (finding,) = (finding for finding in found.findings if finding.kind == kind)
    return finding


# --- healthy --------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_healthy_pod_is_captured_as_it_should_be_in_both_families(backend: str) -> None:
    found = explain(facts(state=captured(backend=backend), backend=backend))
    assert found.summary == "captured, and should be; as it should be"
    assert (found.captured, found.should_be, found.reason) == (True, True, "injected")
    assert not found.findings
    for direction in ("out", "in"):
        for family in Family:
            assert fates(found)[direction, family.value] is Fate.PROXIED
    assert fates(found)["proxy", "ipv4"] is Fate.DIRECT
    out = next(flow for flow in found.flows if flow.direction == "out")
    assert out.result == "redirected to 15001, envoy (PID 20)"
    assert out.setting == "outbound_ip_ranges_include"


def test_page_fits_one_screen_and_each_line_has_its_evidence() -> None:
    found = explain(facts(recorded="/run/state/netns-1.json"))
    lines = [page.text(label, line) for label, line in page.rows(found)]
    assert len(lines) <= 24
    text = "\n".join(lines)
    assert "nftables, ipv4 and ipv6" in text
    assert "recorded in /run/state/netns-1.json" in text
    assert "15001 envoy (PID 20)" in text
    assert "nobody on 15008, 15053, 15090" in text
    assert f"{INJECT}='true'" in text


def test_guard_is_told_of_where_one_can_stand() -> None:
    settings = parse({**EVERYTHING, "guard": "standing"})
    rules, programs = captured(), NamespaceState(enrolment=Enrolment(settings=settings))
    for state, stands in ((rules, True), (programs, False)):
        shown = page.rows(explain(facts(settings=settings, state=state)))
        assert any("standing guard" in line for _, line in shown) is stands


def test_document_for_machines_has_the_keys_that_are_promised() -> None:
    document = page.to_json(explain(facts()))
    assert {
        *("target", "netns", "pod", "captured", "should_be", "reason", "text", "summary"),
        *("loaded", "differences", "foreign", "exemptions", "captures_dns", "listeners"),
        *("processes", "certificates", "flows", "findings", "unseen"),
    } <= set(document)


def test_namespace_that_is_named_in_the_configuration_has_no_log_at_a_cluster() -> None:
    agent = AgentView(state="in-sync", backend="nftables", text="it is named in the configuration")
    pod = PodFacts(namespace="static", name="build", agent=agent)
    found = one(explain(facts(pod=pod, listeners=STOPPED)), "blackhole")
    assert found.means.endswith("start it, or take it out of the agent's configuration")
    assert found.fix == ""


# --- what is not as it should be ------------------------------------------------------------------


def test_injected_pod_without_rules_is_critical_and_named_with_its_command() -> None:
    found = explain(facts(state=NamespaceState()))
    assert found.summary == "NOT captured, and should be"
    missing = one(found, "not-captured")
    assert missing.severity is Severity.CRITICAL
    assert missing.fix == "intercept-agent apply --netns pod:shop/web"
    assert fates(found)["out", "ipv4"] is Fate.DIRECT


def test_pod_whose_gate_is_open_is_not_captured_yet_until_the_proxy_listens() -> None:
    at = facts(settings=parse({**EVERYTHING, "gate": "open"}), state=NamespaceState())
    assert kinds(explain(replace(at, listeners=()))) == {"gate-open": Severity.INFO}
    assert kinds(explain(at)) == {"not-captured": Severity.CRITICAL}


def test_pod_that_was_never_injected_need_not_be_captured() -> None:
    pod = PodFacts(namespace="shop", name="web", created=said({}, {}))
    found = explain(facts(pod=pod, settings=None, state=NamespaceState()))
    assert found.summary == "not captured, and need not be"
    assert found.reason == "not-injected"
    assert not found.findings


def test_stopped_proxy_is_a_black_hole_in_every_direction() -> None:
    found = explain(facts(listeners=STOPPED, processes=(APP,)))
    assert found.summary.endswith("but nobody listens where its traffic is sent")
    hole = one(found, "blackhole")
    assert "15001 and 15006" in hole.seen
    assert "refused" in hole.seen
    assert hole.fix == "kubectl -n shop logs web -c istio-proxy"


def test_stopped_proxy_of_a_pod_that_asks_for_none_is_ended_by_remove() -> None:
    pod = PodFacts(namespace="shop", name="web", created=said({INJECT: "false"}))
    found = explain(facts(pod=pod, listeners=STOPPED, processes=(APP,)))
    assert kinds(found) == {"blackhole": Severity.CRITICAL, "stale-capture": Severity.WARNING}
    remove = "intercept-agent remove --netns pod:shop/web"
    assert {finding.fix for finding in found.findings} == {remove}


def test_tproxy_listener_that_is_not_transparent_gets_nothing() -> None:
    at = facts(settings=parse(TPROXY), state=captured(TPROXY), host=MARKED)
    lost = explain(at)
    assert fates(lost)["in", "ipv4"] is Fate.REFUSED
    assert "without IP_TRANSPARENT" in one(lost, "blackhole").seen
    able = tuple(
        listener(one.port, ENVOY, transparent=True) if one.port == 15006 else one for one in HEALTHY
    )
    assert fates(explain(replace(at, listeners=able)))["in", "ipv4"] is Fate.PROXIED


def test_ebpf_gives_what_arrives_to_whoever_listens_and_nothing_to_nobody() -> None:
    loaded = NamespaceState(enrolment=Enrolment(settings=parse(EVERYTHING)))
    only = (listener(15006, ENVOY, address="10.1.0.2", dual=False),)
    for listeners in (HEALTHY, only):
        taken = explain(facts(state=loaded, listeners=listeners))
        assert fates(taken)["in", "ipv4"] is Fate.PROXIED
    nobody = explain(facts(state=loaded, listeners=STOPPED))
    assert fates(nobody)["in", "ipv4"] is Fate.REFUSED
    flow = next(one for one in nobody.flows if one.direction == "in")
    assert flow.result == "redirected to 15006, where nobody listens: refused"


def test_listener_on_one_address_only_does_not_take_what_is_redirected() -> None:
    only = (listener(15001, ENVOY, address="10.1.0.2", dual=False), *HEALTHY[1:])
    found = explain(facts(listeners=only))
    assert fates(found)["out", "ipv4"] is Fate.REFUSED
    assert "listens on 10.1.0.2:15001 only" in one(found, "blackhole").seen


@pytest.mark.parametrize("backend", BACKENDS)
def test_proxy_of_a_mesh_for_one_family_is_not_called_stopped(backend: str) -> None:
    """Istio's listens on 0.0.0.0 alone, also in a pod of both families, if not told otherwise."""
    only = tuple(listener(p, ENVOY, address="0.0.0.0", dual=False) for p in (15001, 15006))
    found = explain(facts(state=captured(backend=backend), backend=backend, listeners=only))
    hole = one(found, "blackhole")
    assert hole.severity is Severity.WARNING
    assert hole.seen.startswith("new connections (out, in) by IPv6 are sent to 15001 and 15006")
    assert hole.means.startswith("the proxy listens for IPv4 alone")
    assert hole.fix == ""
    assert found.summary == "captured, and should be; as it should be"


# --- label and annotation, then and now -----------------------------------------------------------


def test_label_that_was_removed_after_the_start_is_answered_in_words() -> None:
    pod = PodFacts(namespace="shop", name="web", created=said({INJECT: "true"}), now=said({}))
    found = explain(facts(pod=pod))
    stale = one(found, "stale-capture")
    assert stale.seen == f"label {INJECT} was 'true' when the pod was made and is gone now"
    assert "read when a pod is made" in stale.means
    assert stale.fix == "kubectl -n shop delete pod web"


def test_label_that_is_false_now_makes_the_capture_stale() -> None:
    now = said({INJECT: "false"})
    pod = PodFacts(namespace="shop", name="web", created=said({INJECT: "true"}), now=now)
    found = explain(facts(pod=pod))
    assert found.summary == "captured, and should not be"
    assert (found.should_be, found.reason) == (False, "inject-false")
    assert one(found, "stale-capture").fix == "intercept-agent remove --netns pod:shop/web"
    assert kinds(found)["changed-since"] is Severity.INFO


def test_labels_of_others_are_no_change() -> None:
    before, now = said({INJECT: "true", "app": "web"}), said({INJECT: "true", "app": "shop"})
    pod = PodFacts(namespace="shop", name="web", created=before, now=now)
    assert not explain(facts(pod=pod)).findings


def test_agent_that_failed_is_quoted() -> None:
    view = AgentView(state="failed", backend="", text="nf_tables: no memory")
    pod = PodFacts(namespace="shop", name="web", created=said({INJECT: "true"}), agent=view)
    assert "no memory" in one(explain(facts(pod=pod)), "agent-failed").seen


# --- rules ----------------------------------------------------------------------------------------


def test_differences_are_a_partial_capture() -> None:
    found = explain(facts(differences=("+ nftables ipv4 nat: -A OUTPUT -j ISTIO_OUTPUT",)))
    assert kinds(found) == {"partial-capture": Severity.CRITICAL}
    assert "-A OUTPUT -j ISTIO_OUTPUT" in one(found, "partial-capture").seen


def test_capture_of_one_family_only_shows_although_nobody_knows_what_should_be() -> None:
    half = plan(parse({**EVERYTHING, "enable_ipv6": False}))
    found = explain(
        facts(pod=None, settings=None, state=NamespaceState(loaded={"iptables-nft": half.rulesets}))
    )
    assert found.should_be is None
    assert one(found, "one-family").severity is Severity.CRITICAL
    assert fates(found)["out", "ipv6"] is Fate.DIRECT


def test_two_backends_with_a_capture_each_are_both_named() -> None:
    rules = plan(parse(EVERYTHING)).rulesets
    state = NamespaceState(loaded={"iptables-legacy": rules, "iptables-nft": rules})
    found = explain(facts(state=state, backend="iptables-nft", differences=("- x",)))
    twice = one(found, "captured-twice")
    assert "iptables-legacy" in twice.seen
    assert "iptables-nft" in twice.seen
    assert twice.severity is Severity.CRITICAL


def test_rules_that_nothing_leads_to_are_told_although_no_settings_are_known() -> None:
    unhooked = "nat ISTIO_OUTPUT -j ISTIO_REDIRECT\nnat ISTIO_REDIRECT -p tcp -j REDIRECT"
    rules = layer(unhooked).ruleset
    state = NamespaceState(loaded={"iptables-nft": {Family.IPV4: rules}})
    found = explain(facts(pod=None, settings=None, state=state))
    assert one(found, "idle-capture").severity is Severity.WARNING


def test_rule_that_drops_what_would_be_captured_is_named() -> None:
    guard = {"iptables-nft": {Family.IPV4: layer("filter OUTPUT -j DROP").ruleset}}
    loaded = {**captured().loaded, **guard}
    found = explain(facts(state=NamespaceState(loaded=loaded)))
    assert "is dropped by filter OUTPUT" in one(found, "dropped").seen


AMBIENT_RULES = """
nat PREROUTING -j ISTIO_PRERT
nat OUTPUT -j ISTIO_OUTPUT
nat ISTIO_PRERT ! -d 127.0.0.1/32 -p tcp -m tcp ! --dport 15008 -m mark ! --mark 0x539/0xfff -j REDIRECT --to-ports 15006
nat ISTIO_OUTPUT ! -d 127.0.0.1/32 -p tcp -m mark ! --mark 0x539/0xfff -j REDIRECT --to-ports 15001
"""  # noqa: E501


ORIGINS = {
    ("mangle", "ISTIO_PRERT"): ["mode"],
    ("mangle", "ISTIO_OUTPUT"): ["mode"],
    ("nat", "PREROUTING"): ["mode"],
    ("nat", "OUTPUT"): ["mode"],
    ("nat", "ISTIO_PRERT"): [
        *("reroute_virtual_interfaces", "reroute_virtual_interfaces"),
        *("host_probe_snat_ip", "inbound_ports_include"),
    ],
    ("nat", "ISTIO_OUTPUT"): [
        *("init_cgroups", "host_probe_snat_ip", "redirect_dns", "redirect_dns"),
        *("mode", "mode", "mode"),
    ],
    ("raw", "ISTIO_OUTPUT"): ["redirect_dns"],
    ("raw", "ISTIO_PRERT"): ["redirect_dns"],
}


def test_each_rule_of_an_ambient_capture_comes_from_its_setting() -> None:
    raw = {"mode": "ambient", "redirect_dns": True, "reroute_virtual_interfaces": "tap0"}
    gate = {"gate": "listener", "init_cgroups": ["/kubepods/pod1/abc"]}
    ruleset = plan(parse({**raw, **gate})).rulesets[Family.IPV4]
    for (name, chain), wanted in ORIGINS.items():
        table = ruleset.table(name)
        assert table is not None
        found = [setting_of(table, chain, number + 1) for number in range(len(wanted))]
        assert found == wanted, (name, chain)
        assert setting_of(table, chain, len(wanted) + 1) is None


def test_ambient_namespace_is_known_as_such_and_not_called_stale() -> None:
    loaded = {"iptables-nft": {Family.IPV4: layer(AMBIENT_RULES).ruleset}}
    pod = PodFacts(
        namespace="shop", name="web", created=said({"istio.io/dataplane-mode": "ambient"}, {})
    )
    found = explain(facts(pod=pod, settings=None, state=NamespaceState(loaded=loaded)))
    assert found.reason == "ambient"
    (one_loaded,) = found.loaded
    assert one_loaded.owner == "Istio's node agent (ambient mode)"
    assert one_loaded.evidence == "chain ISTIO_PRERT"
    assert "stale-capture" not in kinds(found)


def test_native_tables_of_others_are_named_and_said_to_be_left_out_of_the_walk() -> None:
    chain = BaseChain("inet", "istio-proxy-nat", "output", "nat", "output", -100, "accept", 9)
    found = explain(facts(state=NamespaceState(base_chains=(chain,))))
    assert found.captured
    assert "inet istio-proxy-nat" in one(found, "not-walked").seen


def test_native_tables_of_others_that_are_walked_are_not_said_to_be_left_out() -> None:
    chain = BaseChain("inet", "istio-proxy-nat", "output", "nat", "output", -100, "accept", 1)
    rules = {"output": Chain("output", "ACCEPT", (Rule((), Target("istio-output")),))}
    rules["istio-output"] = Chain("istio-output", None, (Rule((), Target("RETURN")),) * 2)
    hook = NativeHook(
        family=Family.IPV4,
        table="inet istio-proxy-nat",
        entry="output",
        kind="nat",
        hook="output",
        priority=-100,
        chains=rules,
    )
    found = explain(facts(state=NamespaceState(base_chains=(chain,), native=(hook,))))
    assert "not-walked" not in kinds(found)
    assert [one.rules for one in found.loaded] == [3]


def test_other_mesh_is_known_by_its_chains() -> None:
    rules = layer("nat OUTPUT -j PROXY_INIT_OUTPUT\nnat PROXY_INIT_OUTPUT -j RETURN").ruleset
    state = NamespaceState(loaded={"iptables-nft": {Family.IPV4: rules}})
    assert [one.owner for one in explain(facts(state=state)).loaded] == ["Linkerd"]


@pytest.mark.parametrize(
    ("annotations", "recorded", "owner"),
    [
        (STATUS, "", "istio-init or istio-cni"),
        (STATUS, "/run/state/netns-1.json", "this agent"),
        ({"sidecar.istio.io/status": '{"initContainers":["istio-init"]}'}, "", "istio-init"),
        ({"sidecar.istio.io/status": '{"initContainers":["istio-validation"]}'}, "", "istio-cni"),
    ],
)
def test_who_loaded_the_rules_is_told_by_record_or_annotation(
    annotations: Mapping[str, str], recorded: str, owner: str
) -> None:
    pod = PodFacts(namespace="shop", name="web", created=said({}, annotations))
    state = captured(backend="iptables-nft")
    found = explain(facts(pod=pod, state=state, backend="iptables-nft", recorded=recorded))
    assert [one.owner for one in found.loaded] == [owner]


# --- exemptions -----------------------------------------------------------------------------------


def test_exemptions_are_read_from_the_loaded_rules() -> None:
    raw = {
        **EVERYTHING,
        "inbound_ports_exclude": "15090,9000-9010",
        "outbound_ports_exclude": "25",
        "outbound_ip_ranges_exclude": "10.5.0.0/16",
        "exclude_interfaces": "net1",
        "proxy_uid": "7,8",
        "owner_groups_exclude": "99",
    }
    found = {one.setting: one.values for one in exemptions(captured(raw))}
    assert found == {
        "inbound_ports_exclude": ("15090", "9000:9010"),
        "inbound_tunnel_port": ("15008",),
        "outbound_ports_exclude": ("25",),
        "outbound_ip_ranges_exclude": ("10.5.0.0/16",),
        "exclude_interfaces": ("net1",),
        "proxy_uid": ("7", "8"),
        "proxy_gid": ("1337",),
        "owner_groups_exclude": ("99",),
    }


def test_capture_of_listed_ports_and_networks_leaves_the_rest_alone() -> None:
    raw = {"inbound_ports_include": "80,443", "outbound_ip_ranges_include": "10.0.0.0/8"}
    found = {one.setting: one.values for one in exemptions(captured(raw))}
    assert found["inbound_ports_include"] == ("80", "443")
    assert found["outbound_ip_ranges_include"] == ("10.0.0.0/8",)
    at = facts(settings=parse(raw), state=captured(raw))
    out = next(flow for flow in explain(at).flows if flow.direction == "out")
    assert out.packet == "TCP to 10.0.0.1:80 from UID 1000"
    assert out.fate is Fate.PROXIED


def test_listed_ports_narrow_nothing_where_every_network_is_captured() -> None:
    raw = {**EVERYTHING, "outbound_ports_include": "3306"}
    found = {one.setting for one in exemptions(captured(raw))}
    assert not found & {"outbound_ports_include", "outbound_ip_ranges_include"}


# --- processes ------------------------------------------------------------------------------------


def test_application_that_runs_as_the_proxy_bypasses_it() -> None:
    bad = Process(pid=40, parent=1, name="sh", uid=1337, gid=0, container="d" * 64)
    pod = PodFacts(
        namespace="shop",
        name="web",
        created=said({INJECT: "true"}),
        containers={"d" * 64: "app", "c" * 64: "istio-proxy"},
    )
    found = explain(facts(pod=pod, processes=(AGENT, ENVOY, APP, bad)))
    seen = one(found, "bypass-by-id").seen
    assert "sh (PID 40, UID 1337, GID 0) in container app" in seen
    assert "envoy" not in seen


def test_group_of_the_proxy_bypasses_as_its_user_does() -> None:
    bad = replace(APP, pid=41, gid=1337)
    assert "PID 41" in one(explain(facts(processes=(AGENT, ENVOY, bad))), "bypass-by-id").seen


def test_shell_in_the_container_of_the_proxy_is_the_proxys() -> None:
    shell = replace(ENVOY, pid=50, parent=0, name="sh")
    assert not explain(facts(processes=(AGENT, ENVOY, APP, shell))).findings


def test_process_that_only_has_the_name_of_a_proxy_is_none_where_one_listens() -> None:
    fake = replace(ENVOY, pid=60, parent=1, container="d" * 64)
    assert "PID 60" in one(explain(facts(processes=(AGENT, ENVOY, APP, fake))), "bypass-by-id").seen


def test_process_that_runs_as_the_proxy_where_nobody_listens_is_no_proxy() -> None:
    bad = replace(APP, uid=1337, gid=1337)
    found = explain(facts(listeners=(), processes=(bad,)))
    assert "PID 30" in one(found, "bypass-by-id").seen


def test_proxy_that_is_not_exempt_gets_its_own_traffic_back() -> None:
    root = replace(ENVOY, uid=0, gid=0)
    at = facts(listeners=tuple(listener(p, root) for p in (15001, 15006)), processes=(root, APP))
    assert one(explain(at), "proxy-loop").severity is Severity.CRITICAL


def test_who_can_undo_the_capture_is_named_and_the_proxy_is_not() -> None:
    strong = replace(APP, net_admin=True)
    found = explain(facts(processes=(AGENT, replace(ENVOY, net_admin=True), strong)))
    assert kinds(found) == {"net-admin": Severity.WARNING}
    assert "PID 30" in one(found, "net-admin").seen
    assert "PID 20" not in one(found, "net-admin").seen


def test_name_of_a_process_does_nothing_to_a_terminal() -> None:
    evil = replace(ENVOY, name="\033[2Jenvoy\n")
    found = explain(facts(listeners=(listener(15001, evil), *HEALTHY[1:])))
    text = "".join(page.text(label, line) for label, line in page.rows(found))
    assert "?[2Jenvoy?" in text
    assert text.isprintable()


# --- certificates ---------------------------------------------------------------------------------


def certificate(age_h: float, left_h: float, *, authority: bool = False) -> Certificate:
    return Certificate(
        kind="ca" if authority else "chain",
        serial="1",
        names=("spiffe://cluster.local/ns/shop/sa/web",),
        path="",
        valid_from=NOW - timedelta(hours=age_h),
        expires=NOW + timedelta(hours=left_h),
    )


@pytest.mark.parametrize(
    ("found", "kind"),
    [
        (certificate(1, 23), None),
        (certificate(13, 11), None),
        (certificate(20, 4), "certificate-overdue"),
        (certificate(25, -1), "certificate-expired"),
        (certificate(-1, 25), "certificate-not-yet"),
        (certificate(80_000, 7_000, authority=True), None),
        (certificate(80_000, -7, authority=True), "certificate-expired"),
    ],
)
def test_certificate_is_judged_by_its_age(found: Certificate, kind: str | None) -> None:
    told = kinds(explain(facts(certificates=(found,))))
    assert list(told) == ([kind] if kind else [])


def test_clock_that_runs_while_istiod_is_down_is_told() -> None:
    text = "\n".join(
        line for _, line in page.rows(explain(facts(certificates=(certificate(1, 23),))))
    )
    assert "expires in 23 h 0 min" in text
    assert "if istiod is down" in text
    overdue = one(explain(facts(certificates=(certificate(20, 4),))), "certificate-overdue")
    assert "the clock runs: at 2026-11-30 16:00 UTC" in overdue.means


# --- the node, and what could not be seen ---------------------------------------------------------


def test_node_is_never_captured_and_rules_there_are_critical() -> None:
    found = explain(facts(pod=None, settings=None, node="init (PID 1) lives in it"))
    assert found.should_be is False
    assert one(found, "host-rules").fix == "intercept-agent remove --netns host --host"
    clean = explain(facts(pod=None, settings=None, node="it is", state=NamespaceState()))
    assert clean.summary == "the node itself, never captured"


def test_host_network_pod_is_never_captured() -> None:
    pod = PodFacts(namespace="shop", name="web", host_network=True)
    found = explain(Facts(target="pod:shop/web", pod=pod, now=NOW))
    assert (found.captured, found.should_be, found.reason) == (False, False, "host-network")


def test_what_could_not_be_seen_is_not_concluded_from() -> None:
    found = explain(facts(state=None, host=None, listeners=None, processes=None, certificates=None))
    assert found.captured is None
    assert found.summary == "what is loaded could not be seen"
    assert not found.findings
    text = "\n".join(line for _, line in page.rows(found))
    assert text.count("not seen") >= 4
