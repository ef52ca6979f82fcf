"""Real requests through a real Envoy: every backend, both modes, both families.

One pod with one capture serves all tests of a configuration. What a test did is read from the
answers (which Envoy listeners forwarded the request, whom the server saw) and from how far Envoy's
own counters moved; the two must agree.
"""

import concurrent.futures
import re
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Self

import pytest

from agent.model import numbers
from agent.model.state import EBPF
from tests.support import envoy
from tests.support.calls import Answer
from tests.support.ebpf import built
from tests.support.envoy import INBOUND, OUTBOUND, Counters
from tests.support.netns import inside
from tests.support.pod import APP_PORT, APP_UID, OUTSIDE_PORT, PEER, POD, STRANGER, Pod

BACKENDS = ("iptables-legacy", "iptables-nft", "nftables")
REPLACEMENTS = tuple(pairwise((*BACKENDS, BACKENDS[0])))
OTHER_SETTINGS = ("--istio-service-exclude-cidr", "192.0.2.0/24,2001:db8::/32")
MODES = ("REDIRECT", "TPROXY")
CONFIGURATIONS = (*((mode, backend) for mode in MODES for backend in BACKENDS), ("REDIRECT", EBPF))

# 250 per direction and family: 1,000 requests a configuration.
REQUESTS = 250
BATCH = 20
SHORT_S = 0.5  # for connections that nobody answers
PROXY_UID = numbers.PROXY_ID

PASSTHROUGH = {4: envoy.PASSTHROUGH_V4, 6: envoy.PASSTHROUGH_V6}
LOOPBACK = {4: "127.0.0.1", 6: "::1"}
SELF = {4: envoy.SELF_V4, 6: envoy.SELF_V6}

EMPTY_TABLE = re.compile(r"\*\w+\n(:\w+ ACCEPT\n)+COMMIT\n?")

OUT_ONCE = Counters(outbound_connections=1, outbound_requests=1)
IN_ONCE = Counters(inbound_connections=1, inbound_requests=1)
NOTHING = Counters()

pytestmark = pytest.mark.netns

both_families = pytest.mark.parametrize("version", [4, 6], ids=["ipv4", "ipv6"])


@pytest.fixture(
    scope="module",
    params=CONFIGURATIONS,
    ids="-".join,
)
def captured(request: pytest.FixtureRequest) -> Iterator[Pod]:
    """A pod under capture, for all tests of one mode and backend."""
    mode, backend = request.param
    if backend == EBPF:
        built()
    with Pod(mode=mode) as pod:
        pod.capture(backend)
        yield pod


@pytest.fixture(autouse=True)
def log_of_envoy(request: pytest.FixtureRequest) -> Iterator[None]:
    """Print what Envoy logged during the test; pytest shows it if the test failed."""
    pod = request.getfixturevalue("captured") if "captured" in request.fixturenames else None
    already = len(pod.proxy_log()) if pod else 0
    yield
    if pod:
        print(pod.proxy_log()[already:])


@dataclass
class Moved:
    """How far the counters moved since this was made."""

    pod: Pod

    def __post_init__(self) -> None:
        self._before = self.pod.counters()

    def counters(self) -> Counters:
        return self.pod.counters() - self._before


def summary(answers: list[Answer]) -> Counter[tuple[str, str, tuple[str, ...]]]:
    """Count answers by who answered (or why nobody did), whom it saw, and the way there."""
    return Counter((answer.name or answer.error, answer.peer, answer.via) for answer in answers)


@both_families
def test_no_outbound_request_is_lost_and_each_passes_envoy_once(
    captured: Pod, version: int
) -> None:
    moved = Moved(captured)
    answers = captured.call(PEER[version], OUTSIDE_PORT, count=REQUESTS)
    assert summary(answers) == {("outside", POD[version], (OUTBOUND,)): REQUESTS}
    assert moved.counters() == Counters(outbound_connections=REQUESTS, outbound_requests=REQUESTS)


@both_families
def test_no_inbound_request_is_lost_and_each_passes_envoy_once(captured: Pod, version: int) -> None:
    moved = Moved(captured)
    answers = captured.call_from_peer(POD[version], APP_PORT, count=REQUESTS)
    assert summary(answers) == {("app", PASSTHROUGH[version], (INBOUND,)): REQUESTS}
    assert moved.counters() == Counters(inbound_connections=REQUESTS, inbound_requests=REQUESTS)


@both_families
def test_request_arrives_with_the_path_it_was_sent_with(captured: Pod, version: int) -> None:
    (out,) = captured.call(PEER[version], OUTSIDE_PORT, path="/out?a=1")
    (into,) = captured.call_from_peer(POD[version], APP_PORT, path="/in?b=2")
    assert (out.status, out.path) == (200, "/out?a=1")
    assert (into.status, into.path) == (200, "/in?b=2")


@both_families
def test_app_calling_its_own_pods_address_goes_past_envoy(captured: Pod, version: int) -> None:
    moved = Moved(captured)
    answers = captured.call(POD[version], APP_PORT)
    assert summary(answers) == {("app", POD[version], ()): 1}
    assert moved.counters() == NOTHING


@both_families
def test_app_calling_a_service_that_is_its_own_pod_goes_out_and_in_once(
    captured: Pod, version: int
) -> None:
    moved = Moved(captured)
    answers = captured.call(PEER[version], OUTSIDE_PORT, host=SELF[version])
    assert summary(answers) == {("app", PASSTHROUGH[version], (OUTBOUND, INBOUND)): 1}
    assert moved.counters() == Counters(1, 1, 1, 1)


@both_families
def test_process_with_the_proxys_uid_calling_its_own_pod_comes_in_through_envoy(
    captured: Pod, version: int
) -> None:
    moved = Moved(captured)
    answers = captured.call(POD[version], APP_PORT, uid=PROXY_UID)
    assert summary(answers) == {("app", PASSTHROUGH[version], (INBOUND,)): 1}
    assert moved.counters() == IN_ONCE


@pytest.mark.parametrize(
    ("uid", "gid"),
    [(PROXY_UID, PROXY_UID), (PROXY_UID, APP_UID), (APP_UID, PROXY_UID)],
    ids=["uid-and-gid", "uid", "gid"],
)
@both_families
def test_process_with_the_proxys_uid_or_gid_is_not_captured_on_the_way_out(
    captured: Pod, version: int, uid: int, gid: int
) -> None:
    moved = Moved(captured)
    answers = captured.call(PEER[version], OUTSIDE_PORT, uid=uid, gid=gid)
    assert summary(answers) == {("outside", POD[version], ()): 1}
    assert moved.counters() == NOTHING


@both_families
def test_root_is_captured_like_any_other_user(captured: Pod, version: int) -> None:
    moved = Moved(captured)
    answers = captured.call(PEER[version], OUTSIDE_PORT, uid=0)
    assert summary(answers) == {("outside", POD[version], (OUTBOUND,)): 1}
    assert moved.counters() == OUT_ONCE


@both_families
def test_loopback_is_not_captured(captured: Pod, version: int) -> None:
    moved = Moved(captured)
    for uid in (APP_UID, PROXY_UID):
        answers = captured.call(LOOPBACK[version], APP_PORT, uid=uid)
        assert summary(answers) == {("app", LOOPBACK[version], ()): 1}
    assert moved.counters() == NOTHING


@both_families
def test_excluded_inbound_port_is_reached_directly(captured: Pod, version: int) -> None:
    moved = Moved(captured)
    (answer,) = captured.call_from_peer(POD[version], numbers.HEALTH_PORT, path=envoy.HEALTH_PATH)
    assert answer.status == 200
    assert moved.counters() == NOTHING


@both_families
def test_traffic_both_ways_at_once_is_counted_by_the_right_listener(
    captured: Pod, version: int
) -> None:
    moved = Moved(captured)
    answers = captured.call(PEER[version], OUTSIDE_PORT, host=SELF[version], count=REQUESTS)
    assert summary(answers) == {("app", PASSTHROUGH[version], (OUTBOUND, INBOUND)): REQUESTS}
    assert moved.counters() == Counters(REQUESTS, REQUESTS, REQUESTS, REQUESTS)


@both_families
def test_without_a_running_envoy_nothing_passes(captured: Pod, version: int) -> None:
    """A client that called before is another matter under TPROXY.

    If Envoy was the first to close, its socket stays in TIME_WAIT for a minute. The kernel's TPROXY
    takes a SYN from the same client port for that connection, lets it through, and without Envoy
    the application gets it.
    """
    captured.stop_proxy()
    stranger = (STRANGER[version], 0)
    try:
        out = captured.call(PEER[version], OUTSIDE_PORT, timeout_s=SHORT_S)
        into = captured.call_from_peer(POD[version], APP_PORT, source=stranger, timeout_s=SHORT_S)
        uncaptured = captured.call(PEER[version], OUTSIDE_PORT, uid=PROXY_UID)
    finally:
        captured.start_proxy()
    assert summary(out) == {("refused", "", ()): 1}
    # A packet that TPROXY finds no socket for is dropped by the kernel, not refused.
    unanswered = "timeout" if captured.mode == "TPROXY" else "refused"
    assert summary(into) == {(unanswered, "", ()): 1}
    assert summary(uncaptured) == {("outside", POD[version], ()): 1}


@both_families
def test_capture_works_again_once_envoy_is_back(captured: Pod, version: int) -> None:
    captured.stop_proxy()
    captured.start_proxy()
    moved = Moved(captured)
    assert {answer.via for answer in captured.call(PEER[version], OUTSIDE_PORT)} == {(OUTBOUND,)}
    into = captured.call_from_peer(POD[version], APP_PORT)
    assert {answer.via for answer in into} == {(INBOUND,)}
    assert moved.counters() == Counters(1, 1, 1, 1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_tproxy_can_show_the_app_its_clients_own_address(backend: str) -> None:
    """Envoy must then be root with the proxy's group, as Istio runs it.

    As user 1337 its connection to the app, which comes from the client's address and not from
    127.0.0.6, would be taken for a call to its own pod and come in again.
    """
    with Pod(mode="TPROXY", keep_source=True, proxy_uid=0) as pod:
        pod.capture(backend)
        for version in (4, 6):
            moved = Moved(pod)
            answers = pod.call_from_peer(POD[version], APP_PORT)
            assert summary(answers) == {("app", PEER[version], (INBOUND,)): 1}
            assert moved.counters() == IN_ONCE


@pytest.mark.parametrize(
    ("mode", "backend", "other"),
    [*((mode, *pair) for mode in MODES for pair in REPLACEMENTS), ("REDIRECT", EBPF, EBPF)],
)
def test_no_request_escapes_or_is_lost_while_the_capture_is_replaced(
    mode: str, backend: str, other: str
) -> None:
    with Pod(mode=mode) as pod:
        pod.capture(backend)
        with Traffic(pod) as traffic:
            pod.capture(backend, *OTHER_SETTINGS)
            pod.capture(other)
        assert set(summary(traffic.outbound)) == {
            ("outside", POD[version], (OUTBOUND,)) for version in (4, 6)
        }
        assert set(summary(traffic.inbound)) == {
            ("app", PASSTHROUGH[version], (INBOUND,)) for version in (4, 6)
        }


class Traffic:
    """Requests both ways over both families, without a pause for as long as the block lasts."""

    def __init__(self, pod: Pod) -> None:
        self.outbound: list[Answer] = []
        self.inbound: list[Answer] = []
        self._pod = pod
        self._enough = threading.Event()
        self._threads = concurrent.futures.ThreadPoolExecutor(max_workers=2)

    def __enter__(self) -> Self:
        self._senders = [self._threads.submit(self._send_out), self._threads.submit(self._send_in)]
        return self

    def __exit__(self, *_: object) -> None:
        self._enough.set()
        self._threads.shutdown()
        for sender in self._senders:
            sender.result()

    def _send_out(self) -> None:
        while not self._enough.is_set():
            for version in (4, 6):
                self.outbound += self._pod.call(PEER[version], OUTSIDE_PORT, count=BATCH)

    def _send_in(self) -> None:
        while not self._enough.is_set():
            for version in (4, 6):
                self.inbound += self._pod.call_from_peer(POD[version], APP_PORT, count=BATCH)


@pytest.mark.parametrize(("mode", "backend"), CONFIGURATIONS)
def test_after_removal_requests_take_the_direct_way_again(mode: str, backend: str) -> None:
    with Pod(mode=mode) as pod:
        before = pod.snapshot()
        pod.capture(backend)
        assert pod.snapshot() != before
        pod.release()
        assert without_empty_tables(pod.snapshot()) == without_empty_tables(before)
        moved = Moved(pod)
        for version in (4, 6):
            out = pod.call(PEER[version], OUTSIDE_PORT)
            into = pod.call_from_peer(POD[version], APP_PORT)
            assert summary(out) == {("outside", POD[version], ()): 1}
            assert summary(into) == {("app", PEER[version], ()): 1}
        assert moved.counters() == NOTHING


def without_empty_tables(snapshot: dict[str, str]) -> dict[str, str]:
    """Leave out legacy tables that hold nothing: once made, a table stays as long as the pod."""
    return {
        key: EMPTY_TABLE.sub("", text) if key.startswith("legacy") else text
        for key, text in snapshot.items()
    }


@pytest.mark.parametrize("backend", ["nftables", EBPF])
@both_families
def test_names_are_answered_by_envoy(backend: str, version: int, tmp_path: Path) -> None:
    """Whichever name server the pod has, and as if that had answered."""
    server = {4: "198.51.100.53", 6: "2001:db8::53"}[version]
    file = tmp_path / "resolv.conf"
    file.write_text(f"nameserver {server}\noptions timeout:5 attempts:1\n")
    with Pod() as pod:
        pod.capture(backend, "--redirect-dns", "--capture-all-dns")
        script = f'mount --bind {file} /etc/resolv.conf && exec {sys.executable} -I -S -c "$0"'
        found = inside(pod.namespace, "unshare", "--mount", "sh", "-c", script, LOOK_UP)
        assert found.split() == list(envoy.DNS_ADDRESSES)


LOOK_UP = f"""
import os, socket, encodings.idna  # loaded while the files may be read
os.setgid({APP_UID}); os.setuid({APP_UID})
print(*sorted({{found[4][0] for found in socket.getaddrinfo("{envoy.DNS_NAME}", 80)}}))
"""
