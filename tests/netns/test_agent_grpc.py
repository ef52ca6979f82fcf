"""gRPC on the socket of the running agent, with real namespaces behind it."""

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from agent.api import agent_pb2
from tests.support.agent import Agent, running, wait_for
from tests.support.netns import inside

EVERYTHING = {"inbound_ports_include": "*", "outbound_ip_ranges_include": "*"}
ONE = agent_pb2.PodName(namespace="static", name="one")


@contextlib.contextmanager
def channel_to(agent: Agent) -> Iterator[Any]:
    options = (("grpc.use_local_subchannel_pool", 1),)
    with grpc.insecure_channel(f"unix:{agent.socket}", options=options) as channel:
        yield channel


def call(channel: Any, method: str, request: Any, kind: Any) -> Any:
    path = f"/intercept.v1.Agent/{method}"
    make = channel.unary_stream if kind is agent_pb2.Change else channel.unary_unary
    ask = make(
        path,
        request_serializer=type(request).SerializeToString,
        response_deserializer=kind.FromString,
    )
    return ask(request, timeout=60)


def config(netns: str, **more: object) -> dict[str, object]:
    pod = {"name": "one", "netns": f"/run/netns/{netns}", "settings": EVERYTHING}
    return {"static": [pod], "backend": "nftables", **more}


def flush(netns: str) -> None:
    inside(netns, "nft", "delete", "table", "inet", "intercept-agent")


def test_pod_is_watched_and_explained_while_it_drifts_and_is_repaired(
    tmp_path: Path, netns: str
) -> None:
    with running(tmp_path, **config(netns, mode="alert")) as agent, channel_to(agent) as channel:
        agent.configure(**config(netns))
        agent.tell(signal.SIGHUP)  # repairs are on until it is captured
        wait_for(lambda: agent.state("one") == "in-sync")
        agent.configure(**config(netns, mode="alert"))
        agent.tell(signal.SIGHUP)
        wait_for(lambda: agent.status()["mode"] == "alert")
        changes = call(channel, "Watch", agent_pb2.WatchRequest(), agent_pb2.Change)
        assert next(changes).pod.name == "one"
        assert next(changes).HasField("present")
        flush(netns)
        assert told(changes) == ["drift-found", "drifted"]
        found = call(channel, "Explain", ONE, agent_pb2.Explanation)
        assert found.pod.state == "drifted"
        assert found.mode.value == "alert"
        assert not found.findings.in_sync
        assert any("ISTIO_OUTPUT" in line for line in found.findings.differences)
        agent.configure(**config(netns))
        agent.tell(signal.SIGHUP)
        assert told(changes) == ["drift-repaired", "in-sync"]
        found = call(channel, "Explain", ONE, agent_pb2.Explanation)
        assert found.findings.in_sync


def told(changes: Iterator[Any]) -> list[str]:
    """Return the next event, and the state that the pod then has."""
    kinds, states = [], []
    for change in changes:
        if change.HasField("event"):
            kinds.append(change.event.kind)
        else:
            states.append(change.pod.state)
        if kinds and states and states[-1] != "repairing":
            return [*kinds, states[-1]]
    raise AssertionError("the stream ended")


def test_health_follows_readiness_over_a_connection_that_outlives_reloads(
    tmp_path: Path, netns: str
) -> None:
    with running(tmp_path, **config(netns)) as agent, channel_to(agent) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service="intercept.v1.Agent")
        watching = stub.Watch(request, timeout=60)
        kinds = health_pb2.HealthCheckResponse
        assert next(watching).status == kinds.SERVING
        nobody = {"cri": {"endpoint": f"unix://{tmp_path}/nobody.sock"}}
        agent.configure(**config(netns, **nobody))
        agent.tell(signal.SIGHUP)
        assert next(watching).status == kinds.NOT_SERVING
        assert stub.Check(health_pb2.HealthCheckRequest(), timeout=60).status == kinds.NOT_SERVING
        assert agent.get("health", "/healthz/ready")[0] == 503
        agent.configure(**config(netns))
        agent.tell(signal.SIGHUP)
        assert next(watching).status == kinds.SERVING


def test_worker_is_started_again_beside_the_threads_of_grpc(tmp_path: Path, netns: str) -> None:
    with running(tmp_path, **config(netns)) as agent, channel_to(agent) as channel:
        wait_for(lambda: agent.state("one") == "in-sync")
        for _ in range(3):
            os.kill(agent.status()["worker_pid"], signal.SIGKILL)
            found = call(channel, "Explain", ONE, agent_pb2.Explanation)
            assert found.findings.in_sync, found.findings.error


def test_agent_that_ends_ends_those_who_watch(tmp_path: Path, netns: str) -> None:
    with running(tmp_path, **config(netns)) as agent, channel_to(agent) as channel:
        changes = call(channel, "Watch", agent_pb2.WatchRequest(), agent_pb2.Change)
        next(changes)
        assert agent.stop() == 0
        with pytest.raises(grpc.RpcError) as caught:
            list(changes)
        assert caught.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
        assert [path.name for path in tmp_path.iterdir() if "grpc" in path.name] == []
