"""What scan says of captures by eBPF, and what clean does about them."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from agent.kernel import bpf_pins
from agent.kernel.namespaces import Place
from agent.kernel.netns import Netns
from agent.leftovers.finding import Finding, Kind, Severity
from agent.leftovers.node import Node, PodFact
from agent.leftovers.scan import Subject, inspect
from tests.support.capturing import EVERYTHING, command
from tests.support.ebpf import capture, checked, cookie, detach, own_node, pinned
from tests.support.ebpf_pod import SETTINGS, free_pod
from tests.support.netns import path_of, snapshot

pytestmark = pytest.mark.netns


@pytest.fixture(autouse=True)
def node(tmp_path: Path) -> Iterator[None]:
    with own_node(tmp_path):
        yield


def findings(name: str, *, wants: bool | None = None) -> Sequence[Finding]:
    with Netns.open(path_of(name)) as opened:
        pods = {opened.id: PodFact(title="shop/web", wants=wants, reason="it has no sidecar")}
        subject = Subject(place=Place(opened.id, opened.path, name))
        _, found = inspect(opened, subject, Node(pods=pods if wants is not None else {}))
    return found


def test_a_capture_without_a_proxy_leads_nowhere(netns: str) -> None:
    capture(netns, SETTINGS)
    (found,) = findings(netns)
    assert (found.kind, found.severity) == (Kind.BLACKHOLE, Severity.CRITICAL)
    assert (found.owner, found.where.backend) == ("intercept-agent", "ebpf")
    assert found.where.family == "ipv4,ipv6"
    for port in ("TCP port 15001", "TCP port 15006", "UDP port 15053"):
        assert port in found.explanation


def test_with_its_proxy_it_is_no_leftover(tmp_path: Path) -> None:
    with free_pod("left") as pod:
        pod.tell("open a")
        capture(pod.name, {**SETTINGS, "enable_ipv6": False})
        assert findings(pod.name) == ()
        assert [found.kind for found in findings(pod.name, wants=False)] == [Kind.STALE_CAPTURE]
        assert findings(pod.name, wants=True) == ()


def test_an_open_gate_leads_nowhere_yet(netns: str) -> None:
    capture(netns, {**EVERYTHING, "gate": "open"})
    assert findings(netns) == ()


@pytest.mark.parametrize("what", ["connect4", "handshake", "inbound", "entry"])
def test_a_part_that_is_missing_is_told(netns: str, what: str) -> None:
    capture(netns)
    pin = bpf_pins.pod_pin(cookie(netns))
    if what == "entry":
        with bpf_pins.open_map("captures") as captures:
            captures.delete(next(captures.keys()))
    else:
        detach(pin if what == "inbound" else bpf_pins.links() / what)
    found = {each.kind: each for each in findings(netns)}
    said = " ".join(found[Kind.PARTIAL_CAPTURE].evidence)
    assert ("not enrolled" if what == "entry" else what) in said


def test_another_version_is_no_gap(netns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    capture(netns)
    monkeypatch.setattr(bpf_pins, "build", lambda: bytes(range(20)))
    assert {each.kind for each in findings(netns)} == {Kind.BLACKHOLE}


def test_it_is_taken_out_and_put_back(netns: str, tmp_path: Path) -> None:
    raw = {**SETTINGS, "outbound_ip_ranges_exclude": "10.1.0.0/16", "proxy_uid": "2000,1337"}
    before = snapshot(netns)
    capture(netns, raw)
    line = ("clean", "--netns", netns, "--backup-dir", str(tmp_path / "backups"), "-o", "json")
    code, out, _ = command(*line, "--dry-run")
    assert code == 1
    assert json.loads(out)["would_remove"][-1].startswith(f"{netns}: # ebpf:")
    assert checked(netns, raw).in_sync
    code, out, err = command(*line, "--yes")
    assert code == 0, err
    assert pinned() == set()
    assert snapshot(netns) == before
    for restored in ([netns], []):
        code, back, err = command("clean", "--restore", json.loads(out)["backup"], "-o", "json")
        assert code == 0, err
        assert json.loads(back)["restored"] == restored
    assert checked(netns, raw).in_sync
