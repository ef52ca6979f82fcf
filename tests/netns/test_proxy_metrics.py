"""What the daemon shows of the pods' proxies, on real namespaces: metrics, listeners, expiry."""

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from agent.kernel import capabilities
from agent.kernel.netns import Netns
from agent.model import numbers
from agent.node.proxies import Proxies
from agent.node.worker_client import JobFailed, WorkerClient
from agent.proxy import ports
from tests.support.agent import Agent, running, wait_for
from tests.support.netns import namespace, path_of
from tests.support.proxy import mute, running_envoy, saying, serving, valid_for

ADMIN, METRICS = numbers.ENVOY_ADMIN_PORT, numbers.ENVOY_METRICS_PORT
CAPTURE = {"inbound_ports_include": "*", "outbound_ip_ranges_include": "*"}
DAY_S = 86400.0

Samples = dict[str, dict[str, float]]


@contextlib.contextmanager
def node(folder: Path, **pods: str) -> Iterator[Agent]:
    """An agent that keeps these namespaces captured."""
    static = [
        {"name": name, "netns": f"/run/netns/{netns}", "settings": CAPTURE}
        for name, netns in pods.items()
    ]
    with running(folder, static=static) as agent:
        wait_for(lambda: agent.status()["pods"] == {"in-sync": len(pods)})
        yield agent


def read(agent: Agent, path: str) -> tuple[str, Samples]:
    """Return a page, which must be well formed, and its samples by name and pod."""
    status, text = agent.get("status", path)
    assert status == 200, text
    heads = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    families = list(text_string_to_metric_families(text))
    assert len(heads) == len(set(heads)) == len(families)
    found: Samples = {}
    for one in (sample for family in families for sample in family.samples):
        found.setdefault(one.name, {})[one.labels.get("pod", "")] = one.value
    return text, found


def test_metrics_of_a_real_proxy_are_there_beside_a_dead_one(tmp_path: Path, netns: str) -> None:
    with (
        namespace("dead") as dead,
        running_envoy(netns, pairs=[valid_for(timedelta(days=3))]),
        node(tmp_path, alive=netns, dead=dead) as agent,
    ):
        text, stats = read(agent, "/stats/prometheus")
        own, metrics = read(agent, "/metrics")
    assert stats["intercept_proxy_scrape_up"] == {"alive": 1, "dead": 0}
    assert stats["envoy_server_live"] == {"alive": 1}
    assert stats["envoy_cluster_upstream_cx_connect_ms_bucket"].keys() <= {"alive"}
    assert 'envoy_server_live{namespace="static",pod="alive"} 1' in text
    assert stats["intercept_pods"] == metrics["intercept_pods"] == {"": 2}
    assert metrics["intercept_proxy_listening"] == {"alive": 1, "dead": 0}
    (left,) = metrics["intercept_proxy_certificate_expiry_seconds"].values()
    assert 2.9 * DAY_S < left <= 3 * DAY_S
    assert metrics["intercept_source_connected"] == {"": 1}
    assert "envoy_" not in own
    for phase in ("watch", "check", "apply"):
        assert f'intercept_enrolment_seconds_count{{phase="{phase}"}} 2.0' in own


def test_slow_and_lying_proxies_cost_only_themselves(tmp_path: Path, netns: str) -> None:
    with (
        namespace("slow") as slow,
        namespace("liar") as liar,
        serving(netns, METRICS, saying("# TYPE c counter\nc 1"), address="::1"),
        serving(slow, METRICS, mute),
        serving(liar, METRICS, saying("c 1\nintercept_pods 99\nc 2 3 4\n")),
        serving(liar, ADMIN, saying("no Envoy")),
        node(tmp_path, good=netns, slow=slow, liar=liar) as agent,
    ):
        _, stats = read(agent, "/stats/prometheus")
        assert agent.get("health", "/healthz/ready")[0] == 200
    assert stats["intercept_proxy_scrape_up"] == {"good": 1, "slow": 0, "liar": 0}
    assert stats["c_total"] == {"good": 1}
    assert stats["intercept_pods"] == {"": 3}


def test_certificate_that_has_expired_is_negative(tmp_path: Path, netns: str) -> None:
    ended = datetime.now(UTC) - timedelta(days=1)
    chain = [{"expiration_time": ended.isoformat()}]
    later = [{"expiration_time": (ended + timedelta(days=9)).isoformat()}]
    body = json.dumps({"certificates": [{"cert_chain": later, "ca_cert": chain}]})
    worse = json.dumps({"certificates": [{"cert_chain": later}, {"cert_chain": chain}]})
    with (
        namespace("expired") as expired,
        serving(netns, ADMIN, saying(body)),
        serving(expired, ADMIN, saying(worse)),
        node(tmp_path, fine=netns, expired=expired) as agent,
    ):
        found = read(agent, "/metrics")[1]["intercept_proxy_certificate_expiry_seconds"]
    assert -1.1 * DAY_S < found["expired"] <= -DAY_S
    assert found["fine"] > 7 * DAY_S


def test_pod_that_is_gone_is_in_no_metric_of_proxies(tmp_path: Path, netns: str) -> None:
    with running(tmp_path) as agent, serving(netns, METRICS, saying("c 1\n")):
        agent.cni("ADD", netns)
        assert read(agent, "/stats/prometheus")[1]["c"] == {"web": 1}
        agent.cni("DEL", netns)
        text, stats = read(agent, "/stats/prometheus")
    assert 'pod="web"' not in text
    assert stats["intercept_removals_total"] == {"": 1}


def test_scrapes_leave_no_file_open(tmp_path: Path, netns: str) -> None:
    with (
        namespace("slow") as slow,
        serving(netns, METRICS, saying("c 1\n" * 400_000)),  # too much to be kept in memory
        serving(slow, METRICS, mute),
        node(tmp_path, good=netns, slow=slow) as agent,
    ):
        assert agent.process is not None
        files = Path(f"/proc/{agent.process.pid}/fd")

        def count() -> int:
            return len(list(files.iterdir()))

        read(agent, "/metrics")
        before = count()
        for _ in range(3):
            assert "c{" in agent.get("status", "/stats/prometheus")[1]
        wait_for(lambda: count() <= before)


def test_worker_connects_to_the_proxys_own_ports_only(netns: str) -> None:
    async def run() -> None:
        worker = WorkerClient()
        proxies = Proxies(worker)
        path = str(path_of(netns))
        try:
            for port in (22, 15020, -1, "15090", None):
                with pytest.raises(JobFailed, match="none of the proxy's"):
                    await proxies.connect(path, port)  # type: ignore[arg-type]
            with pytest.raises(JobFailed, match="nobody listens on port 15090"):
                await proxies.connect(path, METRICS)
            with serving(netns, METRICS, saying("")):
                with await proxies.connect(path, METRICS) as made:
                    assert made.getpeername() == ("127.0.0.1", METRICS)
                assert await proxies.listening(path, [22, METRICS]) == {METRICS}
            with pytest.raises(JobFailed, match="the node's own"):
                await proxies.connect("/proc/self/ns/net", METRICS)
        finally:
            await worker.close()

    asyncio.run(run())


def test_connection_that_is_handed_over_reaches_the_pod_itself_only(netns: str) -> None:
    """The front lacks CAP_NET_RAW, without which the socket cannot be unbound from lo."""
    refused: list[type[BaseException]] = []

    def try_to_unbind(made: socket.socket) -> None:
        capabilities.drop(["CAP_NET_RAW"])  # of this thread
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"")
        except OSError as error:
            refused.append(type(error))

    with (
        serving(netns, METRICS, saying("")),
        Netns.open(path_of(netns)) as there,
        ports.connect(there, METRICS) as made,
    ):
        bound = made.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16)
        assert bound.rstrip(b"\0") == b"lo"
        thread = threading.Thread(target=try_to_unbind, args=(made,))
        thread.start()
        thread.join()
    assert refused == [PermissionError]
