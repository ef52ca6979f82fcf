"""`explain` on real namespaces: what the kernel holds, who listens, who is who; and its exit codes.

Processes stand in for proxy and application here; the real Envoy is in tests/e2e.
"""

import contextlib
import json
import shlex
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.support import standin
from tests.support.capturing import BACKENDS, EVERYTHING, STATE_DIR, capture, state
from tests.support.conformance import NOBODY, cli, cli_process
from tests.support.foreign import ISTIO_INIT
from tests.support.netns import inside, namespace, path_of, run
from tests.support.proxy import SPIFFE, running_envoy, valid_for

MESH_PORTS = (15001, 15006, 15021)


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No agent and no runtime of this machine is asked."""
    monkeypatch.setenv("INTERCEPT_SOCKET", str(tmp_path / "agent.sock"))
    monkeypatch.setenv("INTERCEPT_CRI_ENDPOINT", "none")


@pytest.fixture
def pod() -> Iterator[str]:
    """A namespace with addresses and a way out in both families."""
    with namespace("pod") as name, namespace("peer") as peer:
        run(
            *("ip", "link", "add", "eth0", "netns", name, "type", "veth"),
            *("peer", "name", "eth0", "netns", peer),
        )
        for own, number in ((name, 2), (peer, 1)):
            # Without link-local addresses, which the kernel goes on checking for duplicates.
            run("ip", "-n", own, "link", "set", "eth0", "addrgenmode", "none", "up")
            run("ip", "-n", own, "addr", "add", f"10.79.0.{number}/24", "dev", "eth0")
            run("ip", "-n", own, "addr", "add", f"fd00:79::{number}/64", "dev", "eth0", "nodad")
        run("ip", "-n", name, "route", "add", "default", "via", "10.79.0.1")
        run("ip", "-n", name, "route", "add", "default", "via", "fd00:79::1")
        yield name


@contextlib.contextmanager
def sidecar(netns: str, *, uid: int = 1337, certs: object = None) -> Iterator[int]:
    ports = MESH_PORTS if certs is None else (*MESH_PORTS, 15000)
    with standin.process(netns, *ports, uid=uid, certs=certs) as pid:
        yield pid


def explained(target: str, *words: str) -> Any:
    done = cli("explain", target, "-o", "json", *words)
    assert (done.code, done.stderr) == (0, "")
    return done.document


def kinds(document: Any) -> dict[str, str]:
    return {found["kind"]: found["severity"] for found in document["findings"]}


def fates(document: Any) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for flow in document["flows"]:
        found.setdefault(flow["direction"], set()).add(flow["fate"])
    return found


# --- what a pod can be like -----------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_captured_pod_with_a_proxy_is_healthy_and_reading_leaves_no_trace(
    backend: str, pod: str
) -> None:
    capture(pod, EVERYTHING, backend)
    before = state(pod)
    with sidecar(pod) as pid, standin.process(pod, 8080, name="java", uid=1000):
        document = explained(pod)
        page = cli("explain", pod).stdout
    assert (document["captured"], document["should_be"], document["findings"]) == (True, True, [])
    assert [(one["backend"], one["owner"]) for one in document["loaded"]] == [
        (backend, "this agent")
    ]
    assert document["loaded"][0]["families"] == ["ipv4", "ipv6"]
    assert fates(document)["out"] == fates(document)["in"] == {"proxied"}
    assert len([flow for flow in document["flows"] if flow["direction"] == "in"]) == 2
    assert page.splitlines()[0] == f"{pod}: captured, and should be; as it should be"
    assert f"redirected to 15001, envoy (PID {pid})" in page
    assert len(page.splitlines()) <= 24
    assert state(pod) == before


def test_stopped_sidecar_is_told_with_what_becomes_of_connections(pod: str) -> None:
    capture(pod, EVERYTHING, "nftables")
    document = explained(pod)
    assert kinds(document) == {"blackhole": "critical"}
    assert fates(document)["out"] == fates(document)["in"] == {"refused"}
    (out, *_) = (flow for flow in document["flows"] if flow["direction"] == "out")
    assert out["result"] == "redirected to 15001, where nobody listens: refused"
    assert document["findings"][0]["fix"] == f"intercept-agent remove --netns {pod}"


def test_namespace_that_no_route_leads_out_of_is_judged_by_its_rules(netns: str) -> None:
    capture(netns, EVERYTHING, "nftables")
    document = explained(netns)
    assert kinds(document) == {"blackhole": "critical"}
    assert "if a route led there: none does" in document["flows"][0]["result"]


def test_plain_namespace_is_not_captured_and_nothing_is_wrong(netns: str) -> None:
    document = explained(netns)
    assert (document["captured"], document["should_be"]) == (False, None)
    assert document["findings"] == []
    assert "not captured" in cli("explain", netns).stdout.splitlines()[0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_lost_rule_is_shown_with_the_command_that_puts_it_right(backend: str, pod: str) -> None:
    capture(pod, EVERYTHING, backend)
    if backend == "nftables":
        inside(pod, "nft", "flush", "chain", "inet", "intercept-agent", "v6-nat-ISTIO_OUTPUT")
    else:
        tool = backend.replace("iptables", "ip6tables")
        inside(pod, tool, "-t", "nat", "-D", "OUTPUT", "-j", "ISTIO_OUTPUT")
    with sidecar(pod):
        document = explained(pod)
    assert kinds(document) == {"partial-capture": "critical"}
    assert any("ISTIO_OUTPUT" in line for line in document["differences"])
    assert cli(*shlex.split(document["findings"][0]["fix"])[1:]).code == 0
    with sidecar(pod):
        assert explained(pod)["findings"] == []


def test_command_that_puts_it_right_keeps_the_settings(pod: str) -> None:
    raw = {**EVERYTHING, "outbound_ports_exclude": "25,5432", "proxy_uid": "7", "proxy_gid": "7"}
    capture(pod, raw, "iptables-nft")
    inside(pod, "iptables-nft", "-t", "nat", "-F", "OUTPUT")
    fix = next(one["fix"] for one in explained(pod)["findings"] if one["kind"] == "partial-capture")
    assert cli("explain", pod).code == 0
    assert cli(*shlex.split(fix)[1:]).code == 0
    exempt = {one["setting"]: one["values"] for one in explained(pod)["exemptions"]}
    assert exempt["outbound_ports_exclude"] == ["25", "5432"]
    assert exempt["proxy_uid"] == exempt["proxy_gid"] == ["7"]


def test_standing_guard_is_told_and_kept(pod: str) -> None:
    capture(pod, {**EVERYTHING, "guard": "standing"}, "nftables")
    with sidecar(pod):
        assert explained(pod)["findings"] == []
        assert "the standing guard drops" in cli("explain", pod).stdout
        inside(pod, "nft", "flush", "chain", "inet", "intercept-agent", "v4-nat-OUTPUT")
        document = explained(pod)
        assert "dropped" in fates(document)["out"]
        fix = next(f["fix"] for f in document["findings"] if f["kind"] == "partial-capture")
        assert fix.endswith(" --guard standing")
        assert cli(*shlex.split(fix)[1:]).code == 0
        assert explained(pod)["findings"] == []


def test_capture_in_two_backends_is_named_with_both(pod: str) -> None:
    capture(pod, EVERYTHING, "iptables-nft")
    next(iter(ISTIO_INIT.values())).load(pod, "legacy")
    with sidecar(pod):
        document = explained(pod)
    assert {one["backend"] for one in document["loaded"]} == {"iptables-nft", "iptables-legacy"}
    assert kinds(document)["captured-twice"] == "critical"


def test_rules_of_istio_init_in_one_family_leave_the_other_open(pod: str) -> None:
    ISTIO_INIT["kube-virt-interfaces"].load(pod, "nft")
    with sidecar(pod):
        document = explained(pod)
    assert document["should_be"] is None
    assert document["loaded"][0]["owner"] == "istio-init or istio-cni"
    assert kinds(document)["one-family"] == "critical"


# --- processes ------------------------------------------------------------------------------------


def test_application_that_runs_as_the_proxy_is_found_by_its_process(pod: str) -> None:
    capture(pod, EVERYTHING, "nftables")
    with sidecar(pod), standin.process(pod, 8080, name="java", uid=1337, gid=0) as pid:
        document = explained(pod)
    assert [one["pid"] for one in document["processes"]["as_proxy"]] == [pid]
    assert kinds(document) == {"bypass-by-id": "critical"}


def test_root_in_the_pod_can_undo_the_capture_and_a_user_cannot(pod: str) -> None:
    capture(pod, EVERYTHING, "nftables")
    with (
        sidecar(pod),
        standin.process(pod, name="strong", uid=0) as strong,
        standin.process(pod, name="weak", uid=1000),
    ):
        document = explained(pod)
    assert [one["pid"] for one in document["processes"]["net_admin"]] == [strong]
    assert kinds(document) == {"net-admin": "warning"}


def test_proxy_of_another_user_than_is_exempt_is_in_a_circle(pod: str) -> None:
    capture(pod, EVERYTHING, "nftables")
    with sidecar(pod, uid=1400):
        assert kinds(explained(pod))["proxy-loop"] == "critical"


# --- certificates ---------------------------------------------------------------------------------


def certs(hours_left: float) -> dict[str, Any]:
    now = datetime.now(UTC)
    ends = now + timedelta(hours=hours_left)
    times = {"valid_from": now - timedelta(days=1), "expiration_time": ends}
    chain = {key: f"{value:%Y-%m-%dT%H:%M:%SZ}" for key, value in times.items()}
    san = [{"uri": "spiffe://cluster.local/ns/shop/sa/web"}]
    return {"certificates": [{"ca_cert": [], "cert_chain": [{**chain, "subject_alt_names": san}]}]}


@pytest.mark.parametrize(
    ("hours", "kind"), [(-1, "certificate-expired"), (4, "certificate-overdue")]
)
def test_certificate_is_read_from_the_proxy_inside_the_pod(
    hours: float, kind: str, pod: str
) -> None:
    capture(pod, EVERYTHING, "nftables")
    with sidecar(pod, certs=certs(hours)):
        document = explained(pod)
    assert list(kinds(document)) == [kind]
    (found,) = document["certificates"]
    assert found["name"] == "spiffe://cluster.local/ns/shop/sa/web"
    assert found["expired"] is (hours < 0)


def test_envoy_and_its_expired_certificate_are_told(pod: str) -> None:
    capture(pod, EVERYTHING, "nftables")
    with running_envoy(pod, pairs=[valid_for(timedelta(hours=-1)), valid_for(timedelta(hours=23))]):
        document = explained(pod)
    assert kinds(document)["certificate-expired"] == "critical"
    assert [one["expired"] for one in document["certificates"]] == [True, False]
    assert {one["name"] for one in document["certificates"]} == {SPIFFE}
    found = {one["port"]: one["processes"] for one in document["listeners"]}
    assert {process["uid"] for process in found[15001]} == {1337}
    assert not document["processes"]["as_proxy"]
    assert fates(document)["out"] == fates(document)["in"] == {"proxied"}


def test_admin_port_that_answers_nonsense_is_told_and_nothing_fails(pod: str) -> None:
    capture(pod, EVERYTHING, "nftables")
    with sidecar(pod, certs="\0 not what Envoy says"):
        document = explained(pod)
    assert document["certificates"] is None
    assert document["findings"] == []


# --- one flow -------------------------------------------------------------------------------------


def test_flow_names_the_deciding_rule_its_setting_and_who_listens(pod: str) -> None:
    capture(pod, {**EVERYTHING, "outbound_ports_exclude": "5432"}, "iptables-nft")
    with sidecar(pod) as pid:
        taken = cli("explain", "flow", "--uid", "1000", "--to", "10.9.8.7:80", pod)
        left = cli("explain", "flow", "--uid", "1000", "--to", "10.9.8.7:5432", pod)
        proxy = cli("explain", "flow", "--uid", "1337", "--to", "10.9.8.7:80", pod)
        machine = cli("explain", "-o", "json", "flow", "--to", "[fd00::9]:80", pod).document
    assert [done.code for done in (taken, left, proxy)] == [0, 0, 0]
    assert taken.stdout.count("\n") == left.stdout.count("\n") == 1
    assert f"where envoy (PID {pid}) takes it." in taken.stdout
    assert "(outbound_ip_ranges_include)" in taken.stdout
    assert "(outbound_ports_exclude) exempts it" in left.stdout
    assert "outbound_ports_exclude is from what was applied here" in left.stdout
    assert "(proxy_uid) exempts it" in proxy.stdout
    assert (machine["verdict"], machine["port"], machine["fate"]) == ("redirect", 15001, "proxied")
    assert machine["setting"] == "outbound_ip_ranges_include"
    assert machine["steps"]


def test_flow_in_names_the_setting_that_exempts_it(pod: str) -> None:
    capture(pod, {**EVERYTHING, "inbound_ports_exclude": "9090"}, "nftables")
    with standin.process(pod, 9090, name="java", uid=1000) as pid:
        done = cli("explain", "flow", pod, "--in", "--from", "10.79.0.1", "--to", "10.79.0.2:9090")
    assert "(inbound_ports_exclude) exempts it" in done.stdout
    assert f"reaches java (PID {pid})" in done.stdout


# --- targets and exit codes -----------------------------------------------------------------------


def test_record_of_a_capture_is_looked_for_where_the_configuration_says(
    pod: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    words = ("apply", "--netns", pod, "-b", "8080")
    assert cli(*words, environment={STATE_DIR: str(elsewhere)}).code == 0
    (kept,) = elsewhere.iterdir()
    monkeypatch.delenv(STATE_DIR)
    config = tmp_path / "agent.yaml"
    config.write_text(json.dumps({"state_dir": str(elsewhere), "cri": {"endpoint": "none"}}))
    document = explained(pod, "--config", str(config))
    assert document["compared_with"] == "what was applied here"
    assert document["differences"] == []
    words = ("--config", str(config), "--yes", "--backup-dir", str(tmp_path / "backups"))
    assert cli("clean", "--netns", pod, *words).code == 0
    assert not kept.exists()


def test_node_itself_is_said_to_be_never_captured() -> None:
    document = explained("host")
    assert document["node"]
    assert document["should_be"] is False
    assert "never captured" in cli("explain", "host").stdout


def test_manifest_says_what_a_namespace_should_be_where_nobody_else_does(
    pod: str, tmp_path: Path
) -> None:
    manifest = tmp_path / "pod.json"
    status = {"sidecar.istio.io/status": "{}"}
    traffic = {"traffic.sidecar.istio.io/excludeOutboundPorts": "5432"}
    metadata = {"name": "web", "annotations": {**status, **traffic}}
    containers = [{"name": "app"}, {"name": "istio-proxy"}]
    document = {"kind": "Pod", "metadata": metadata, "spec": {"containers": containers}}
    manifest.write_text(json.dumps(document))
    words = (pod, "--pod-manifest", str(manifest))
    bare = explained(*words)
    assert (bare["captured"], bare["should_be"], bare["reason"]) == (False, True, "injected")
    assert cli(*shlex.split(bare["findings"][0]["fix"])[1:]).code == 0
    with sidecar(pod):
        done = explained(*words)
        flow = cli("explain", "flow", "--to", "10.9.8.7:5432", *words).stdout
    assert done["findings"] == []
    (exempt,) = (one for one in done["exemptions"] if one["setting"] == "outbound_ports_exclude")
    assert exempt["values"] == ["5432"]
    assert exempt["source"] == f"annotation {next(iter(traffic))}"
    assert f"outbound_ports_exclude is from annotation {next(iter(traffic))}" in flow


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("nosuch-namespace",), 3),
        (("pod:shop/web",), 3),
        (("shop/web",), 3),
        (("pid:999999999",), 3),
        (("flow", "nosuch-namespace"), 2),
        (("flow", "nosuch-namespace", "--to", "nonsense"), 2),
        (("flow", "nosuch-namespace", "--to", "10.0.0.1:80"), 3),
    ],
)
def test_what_is_not_there_is_one_sentence_and_an_exit_code(
    words: tuple[str, ...], code: int
) -> None:
    done = cli("explain", *words)
    assert (done.code, done.stdout) == (code, "")
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


NO_ROOT = "explain enters the namespace, which needs root; run this as root"


def test_user_without_privileges_sees_what_there_is_to_see_of_the_own_namespace(pod: str) -> None:
    capture(pod, EVERYTHING, "nftables")
    within = (
        *("nsenter", f"--net={path_of(pod)}", "--"),
        *("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"),
    )
    with sidecar(pod):
        done = cli_process("explain", "self", "-o", "json", within=within)
        foreign = cli_process("explain", pod, user=NOBODY)
    assert done.code == 0, done.stderr
    assert done.document["captured"] is None
    ports = {one["port"] for one in done.document["listeners"]}
    assert set(MESH_PORTS) <= ports
    assert any("rules: cannot look into" in sentence for sentence in done.document["unseen"])
    assert foreign.code == 3
    assert foreign.stderr == f"error: {NO_ROOT}\n"
