"""Real traffic of an ambient pod, whose proxy has its sockets in the pod and is known by its mark.

That rules and routes are the goldens' is shown in `test_ambient_conformance`, that nothing escapes
while captures are exchanged in `test_replacement`, and while rules are altered in `test_guard`.
"""

import shlex
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.kernel.namespaces import Place
from agent.kernel.netns import Netns
from agent.leftovers.finding import Finding
from agent.leftovers.node import Node, PodFact
from agent.leftovers.scan import Subject, inspect
from agent.model.decision import Reason
from tests.support.agent import running, wait_for
from tests.support.ambient_lab import PEER, POD, PORT, PROBE, SERVER, AmbientLab, ambient_lab
from tests.support.capturing import BACKENDS, STATE_DIR, assert_in_sync, capture, release, state
from tests.support.conformance import cli
from tests.support.netns import inside, path_of, snapshot

pytestmark = pytest.mark.netns

MARK = 0x539
AMBIENT = {"mode": "ambient", "enable_ipv6": True, "redirect_dns": True, "guard": "standing"}
SHORT_S = 0.5

each_backend = pytest.mark.parametrize("backend", BACKENDS)


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STATE_DIR, str(tmp_path))


@pytest.fixture(scope="module")
def everybody() -> Iterator[AmbientLab]:
    with ambient_lab() as made:
        # The sockets are opened by threads, after the processes have said that they are there.
        for space, to in ((made.peer, POD[4]), (made.pod, PEER[6]), (made.peer, POD[6])):
            deadline = time.monotonic() + 20
            while "Error" in made.dial(space, to) and time.monotonic() < deadline:
                time.sleep(0.05)
        yield made


@pytest.fixture
def lab(everybody: AmbientLab) -> Iterator[AmbientLab]:
    try:
        yield everybody
    finally:
        release(everybody.pod)


def walked(lab: AmbientLab, to: str, port: int = PORT, *more: str) -> tuple[str, int | None]:
    """Return what `trace` says of a packet."""
    target = f"[{to}]:{port}" if ":" in to else f"{to}:{port}"
    done = cli("trace", "--netns", lab.pod, "--to", target, "-o", "json", *more)
    assert done.code == 0, done.stderr
    return done.document["verdict"], done.document["port"]


@each_backend
@pytest.mark.parametrize("version", [4, 6])
def test_both_directions_pass_the_proxy_and_what_is_exempt_does_not(
    lab: AmbientLab, backend: str, version: int
) -> None:
    pod, peer, probe = POD[version], PEER[version], PROBE[version]
    loopback = "127.0.0.1" if version == 4 else "::1"
    capture(lab.pod, AMBIENT, backend)
    # The application calls out: the proxy calls on, with its mark, as the pod.
    assert lab.dial(lab.pod, peer) == f"out {peer} {PORT}, service {pod}"
    assert walked(lab, peer) == ("redirect", 15001)
    assert lab.dial(lab.pod, peer, mark=MARK) == f"service {pod}"
    assert walked(lab, peer, PORT, "--mark", hex(MARK)) == ("pass", None)
    # Others call: the proxy calls on as they, and the answers of the application come back to it.
    assert lab.dial(lab.peer, pod, source=peer) == f"in {pod} {PORT}, app {peer}"
    assert walked(lab, pod, PORT, "--in", "--from", peer) == ("redirect", 15006)
    # The tunnel, the node's probes and what stays in the pod are left alone.
    assert lab.dial(lab.peer, pod, 15008) == "tunnel"
    assert walked(lab, pod, 15008, "--in", "--from", peer) == ("pass", None)
    assert lab.dial(lab.peer, pod, source=probe) == f"app {probe}"
    assert walked(lab, pod, PORT, "--in", "--from", probe) == ("accept", None)
    assert lab.dial(lab.pod, probe) == f"service {pod}"
    assert walked(lab, probe) == ("accept", None)
    assert lab.dial(lab.pod, loopback) == f"app {loopback}"
    assert walked(lab, loopback) == ("pass", None)
    assert lab.dial(lab.pod, pod) == f"app {pod}"
    assert walked(lab, pod) == ("accept", None)


@each_backend
@pytest.mark.parametrize("version", [4, 6])
def test_queries_go_to_the_proxy_and_its_own_to_the_server(
    lab: AmbientLab, backend: str, version: int
) -> None:
    server = SERVER[version]
    capture(lab.pod, AMBIENT, backend)
    for kind, proto in (("udp", "udp"), ("ask", "tcp")):
        assert lab.dial(lab.pod, server, 53, kind=kind) == "dns server query"
        assert walked(lab, server, 53, "--proto", proto) == ("redirect", 15053)
    assert lab.dial(lab.pod, server, 53, kind="udp", mark=MARK) == "server query"
    own = ("--proto", "udp", "--mark", hex(MARK))
    assert walked(lab, server, 53, *own) == ("pass", None)
    capture(lab.pod, {**AMBIENT, "redirect_dns": False}, backend)
    assert lab.dial(lab.pod, server, 53, kind="udp") == "server query"


@each_backend
def test_pod_that_bypasses_inbound_is_captured_outbound_only(lab: AmbientLab, backend: str) -> None:
    capture(lab.pod, {**AMBIENT, "inbound_ports_include": ""}, backend)
    for version in (4, 6):
        pod, peer = POD[version], PEER[version]
        assert lab.dial(lab.peer, pod, source=peer) == f"app {peer}"
        assert lab.dial(lab.pod, peer) == f"out {peer} {PORT}, service {pod}"


@each_backend
def test_the_other_family_is_left_alone_where_it_is_off(lab: AmbientLab, backend: str) -> None:
    capture(lab.pod, {**AMBIENT, "enable_ipv6": False}, backend)
    assert lab.dial(lab.pod, PEER[6]) == f"service {POD[6]}"
    assert lab.dial(lab.peer, POD[6], source=PEER[6]) == f"app {PEER[6]}"
    assert lab.dial(lab.pod, PEER[4]).startswith("out ")


@each_backend
def test_probe_proves_an_ambient_capture_beside_its_proxy_and_without(
    lab: AmbientLab, netns: str, backend: str
) -> None:
    for name in (lab.pod, netns):
        capture(name, AMBIENT, backend)
        done = cli("check", "--netns", name, "--probe", "--output", "json")
        assert done.code == 0, done.stdout
        found = {one["name"]: one["outcome"] for one in done.document["probes"]}
        assert {"inbound ipv4", "return ipv6", "exempt ipv4 proxy mark", "dns ipv6 udp"} <= {*found}
        assert "failed" not in found.values()
        skipped = [name for name, outcome in found.items() if outcome == "skipped"]
        assert not skipped, done.stdout


def test_probe_notices_that_the_answers_do_not_come_back_to_the_proxy(netns: str) -> None:
    capture(netns, AMBIENT, "iptables-nft")
    inside(netns, "ip", "rule", "del", "fwmark", "0x111/0xfff")
    done = cli("check", "--netns", netns, "--probe", "--output", "json")
    failed = {p["name"]: p["detail"] for p in done.document["probes"] if p["outcome"] == "failed"}
    assert failed.keys() == {"return ipv4"}
    assert "ip -4 rule add fwmark 0x111/0xfff pref 32764 lookup 100" in failed["return ipv4"]
    missing = [one["text"] for one in done.document["differences"]]
    assert missing == ["ip -4 rule add fwmark 0x111/0xfff pref 32764 lookup 100"]
    capture(netns, AMBIENT, "iptables-nft")
    assert_in_sync(netns, AMBIENT, "iptables-nft")


def test_table_100_of_others_is_left_to_them_without_a_record_too(
    netns: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside(netns, "ip", "rule", "add", "fwmark", "1", "lookup", "100")
    inside(netns, "ip", "route", "add", "local", "default", "dev", "lo", "table", "100")
    inside(netns, "ip", "-6", "rule", "add", "fwmark", "0x200/0xf00", "lookup", "200")
    before = snapshot(netns)
    capture(netns, AMBIENT, "nftables")
    assert_in_sync(netns, AMBIENT, "nftables")
    monkeypatch.setenv(STATE_DIR, str(tmp_path / "another"))
    release(netns)
    assert snapshot(netns) == before


@each_backend
def test_what_istio_left_is_taken_out_without_a_record(
    netns: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    before = state(netns)
    capture(netns, AMBIENT, backend)
    monkeypatch.setenv(STATE_DIR, str(tmp_path / "another"))
    assert cli("remove", "--netns", netns).code == 0
    after = state(netns)
    differ = {key for key in before if before[key] != after[key]}
    assert not differ or backend == "iptables-legacy"  # whose tables stay
    assert {key[:6] for key in differ} <= {"legacy"}


def test_ebpf_refuses_an_ambient_capture_and_auto_takes_another(netns: str) -> None:
    words = ("apply", "--netns", netns, "--mode", "ambient")
    before = snapshot(netns)
    refused = cli(*words, "--backend", "ebpf")
    assert refused.code == 2
    assert "sees no packets" in refused.stderr
    assert snapshot(netns) == before
    assert cli(*words, "--output", "json").document["backend"] != "ebpf"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("-p", "15002"), "proxy_port: an ambient capture has no choice of it"),
        (("-o", "5432"), "outbound_ports_exclude: an ambient capture has no choice of it"),
        (("-b", "80"), "inbound_ports_include: an ambient capture takes all of them (*) or none"),
        (("--host-probe-snat-ip", "fd00::1"), "host_probe_snat_ip: 'fd00::1' is an IPv6 address"),
        (("--host-probe-snat-ipv6", ""), "host_probe_snat_ipv6: '' is not one IPv6 address"),
        (("-k", "a-name-that-is-too-long"), "is not an interface name"),
    ],
)
def test_what_cannot_be_chosen_is_refused_before_anything_is_touched(
    netns: str, words: tuple[str, ...], said: str
) -> None:
    before = snapshot(netns)
    done = cli("apply", "--netns", netns, "--mode", "ambient", *words)
    assert done.code == 2
    assert said in done.stderr
    assert snapshot(netns) == before


# --- what is said of it ---------------------------------------------------------------------------


def test_explain_knows_the_proxy_by_its_mark(lab: AmbientLab) -> None:
    capture(lab.pod, AMBIENT, "iptables-nft")
    done = cli("explain", lab.pod, "-o", "json")
    assert done.code == 0, done.stdout
    document = done.document
    assert document["captured"] is True
    assert {one["owner"] for one in document["loaded"]} == {"this agent"}
    fates = {(flow["direction"], flow["fate"]) for flow in document["flows"]}
    assert ("proxy", "direct") in fates
    assert {("out", "proxied"), ("in", "proxied")} <= fates
    (sent,) = (flow for flow in document["flows"] if flow["direction"] == "proxy")
    assert sent["packet"].endswith("with mark 0x539")
    kinds = {finding["kind"] for finding in document["findings"]}
    assert not kinds & {"proxy-loop", "bypass-by-id", "stale-capture", "partial-capture"}
    exempt = {one["setting"]: one["values"] for one in document["exemptions"]}
    assert exempt["host_probe_snat_ip"] == [f"{PROBE[4]}/32"]


def test_explain_names_the_command_that_puts_an_ambient_capture_right(netns: str) -> None:
    raw = {**AMBIENT, "inbound_ports_include": "", "host_probe_snat_ip": "169.254.9.9"}
    capture(netns, raw, "iptables-nft")
    inside(netns, "iptables-nft", "-t", "nat", "-F", "ISTIO_OUTPUT")
    findings = cli("explain", netns, "-o", "json").document["findings"]
    (fix,) = (one["fix"] for one in findings if one["kind"] == "partial-capture")
    assert "--mode ambient" in fix
    assert cli(*shlex.split(fix)[1:]).code == 0
    assert_in_sync(netns, raw, "iptables-nft")


def found_of(name: str, reason: Reason) -> tuple[Finding, ...]:
    """Return what a scan finds in the namespace of a pod about which that was decided."""
    captured = reason is Reason.INJECTED
    with Netns.open(path_of(name)) as opened:
        fact = PodFact.of("shop/web", reason, "that was decided", captured=captured)
        subject = Subject(place=Place(opened.id, opened.path, name), host=False)
        return inspect(opened, subject, Node(pods={opened.id: fact}))[1]


def test_ambient_rules_are_stale_only_where_no_label_can_ask_for_them(lab: AmbientLab) -> None:
    capture(lab.pod, AMBIENT, "iptables-nft")
    asked = (Reason.AMBIENT, Reason.UNKNOWN_LABELS, Reason.NOT_INJECTED)
    for reason in asked:
        assert found_of(lab.pod, reason) == (), reason
    (stale,) = found_of(lab.pod, Reason.NOT_ENROLLED)
    assert (stale.kind, stale.owner) == ("stale-capture", "istio-ambient")
    assert "no process of Istio (ambient) runs on this node" in stale.evidence
    capture(lab.pod, AMBIENT, "nftables")
    assert [one.owner for one in found_of(lab.pod, Reason.NOT_ENROLLED)] == ["intercept-agent"]


def test_ambient_rules_without_a_proxy_behind_them_say_who_does_not_run(netns: str) -> None:
    capture(netns, {**AMBIENT, "guard": "off"}, "iptables-nft")
    found = found_of(netns, Reason.AMBIENT)
    assert {one.kind for one in found} == {"blackhole"}
    assert "no process of Istio (ambient) runs on this node" in found[0].evidence


def test_agent_captures_named_namespaces_so_and_otherwise_once_it_is_told(
    tmp_path: Path, netns: str
) -> None:
    named = {"name": "web", "netns": f"/run/netns/{netns}"}
    common = {"capture": "ambient", "guard": "off", "backend": "iptables-nft"}
    with running(tmp_path, **common, ambient={"redirect_dns": False}, static=[named]) as agent:
        wait_for(lambda: agent.state("web") == "in-sync")
        saved = inside(netns, "iptables-nft-save")
        assert "-A ISTIO_PRERT" in saved
        assert "15053" not in saved
        origins = {
            one["name"]: one
            for one in agent.ask("explain", namespace="static", name="web")["settings"]
        }
        assert origins["mode"]["value"] == "ambient"
        assert "intercept_proxy_scrape_up{" not in agent.get("status", "/stats/prometheus")[1]
        sidecar = {"mode": "sidecar", "outbound_ip_ranges_include": "*"}
        agent.configure(**common, static=[{**named, "settings": sidecar}])
        agent.tell(signal.SIGHUP)
        wait_for(lambda: "ISTIO_REDIRECT" in inside(netns, "iptables-nft-save"))
        wait_for(lambda: agent.state("web") == "in-sync")
        saved = inside(netns, "iptables-nft-save")
        assert "ISTIO_PRERT" not in saved
        assert "0x111" not in inside(netns, "ip", "rule")
