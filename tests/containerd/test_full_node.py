"""As many pods as a kubelet allows on one node, started at once, and an agent that starts anew."""

import re
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest

from tests.containerd.mesh import LABELS, agent_on
from tests.containerd.node import Node, Pod, containerd_node
from tests.support.agent import INJECTED, Agent, wait_for
from tests.support.capturing import generation
from tests.support.netns import inside

PODS = 110  # the kubelet's own limit
THREADS = 4
CAPTURED = frozenset({"injected"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of pod, and what the agent must make of it."""

    reason: str
    annotations: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    host_network: bool = False
    excluded: str = ""  # a port whose exclusion must show in the rules


# A mesh node's usual mixture: most pods are of the mesh, some have settings of their own.
EXCLUDING = {**INJECTED, "traffic.sidecar.istio.io/excludeOutboundPorts": "5432"}
OPTED_OUT = {**INJECTED, "sidecar.istio.io/inject": "false"}
MESH = Kind(reason="injected", annotations=INJECTED, labels=LABELS)
KINDS = (
    *(MESH, MESH, MESH, MESH, MESH),
    Kind(reason="injected", annotations=EXCLUDING, labels=LABELS, excluded="5432"),
    Kind(reason="not-injected"),
    Kind(reason="not-injected"),
    Kind(reason="inject-false", annotations=OPTED_OUT),
    Kind(reason="host-network", annotations=INJECTED, host_network=True),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    kind: Kind
    pod: Pod


def start(node: Node, number: int) -> Started:
    kind = KINDS[number % len(KINDS)]
    pod = node.run_pod(
        f"pod-{number}",
        "shop",
        labels=kind.labels,
        annotations=kind.annotations,
        host_network=kind.host_network,
    )
    return Started(kind=kind, pod=pod)


def known(agent: Agent) -> dict[str, tuple[str, str, str, bool]]:
    """Return what the agent says of each pod."""
    return {
        pod["name"]: (pod["state"], pod["reason"], pod["uid"], pod["captured"])
        for pod in agent.ask("pods")
    }


def expected(started: list[Started]) -> dict[str, tuple[str, str, str, bool]]:
    return {
        one.pod.name: (
            "in-sync" if one.kind.reason in CAPTURED else "ignored",
            one.kind.reason,
            one.pod.uid,
            one.kind.reason in CAPTURED,
        )
        for one in started
    }


def metrics(agent: Agent, name: str) -> dict[str, float]:
    """Return the samples of a metric by their labels."""
    text = agent.get("status", "/metrics")[1]
    pattern = rf"^{name}(?:{{(.*)}})? ([\d.e+]+)$"
    return {labels: float(value) for labels, value in re.findall(pattern, text, re.MULTILINE)}


@pytest.mark.timeout(400)
def test_full_node_is_right_pod_by_pod_also_after_the_agent_starts_anew() -> None:
    subnets = ("10.244.1.0/24", "fd00:10:244:1::/64")
    with containerd_node(subnets=subnets) as node, agent_on(node) as agent:
        with ThreadPoolExecutor(THREADS) as pool:
            started = list(pool.map(lambda number: start(node, number), range(PODS)))
        wait_for(lambda: known(agent) == expected(started))
        check_rules(started)
        count = Counter(one.kind.reason in CAPTURED for one in started)
        by_state = {
            'backend="nftables",state="in-sync"': count[True],
            'backend="none",state="ignored"': count[False],
        }
        assert metrics(agent, "intercept_pods") == by_state
        enrolled = {'reason="injected",result="done"': count[True]}
        assert metrics(agent, "intercept_enrolments_total") == enrolled
        assert metrics(agent, "intercept_apply_seconds_count") == {"": count[True]}

        before = generations(started)
        agent.stop()
        agent.start()
        wait_for(lambda: known(agent) == expected(started))
        assert generations(started) == before
        assert metrics(agent, "intercept_pods") == by_state
        assert metrics(agent, "intercept_enrolments_total") == {}
        assert metrics(agent, "intercept_apply_seconds_count") == {"": 0}
        assert metrics(agent, "intercept_drift_total") == {}
        assert agent.kinds() == []


def check_rules(started: list[Started]) -> None:
    """Look into each namespace: captured or untouched, and with its own settings."""
    for one in started:
        if one.pod.netns is not None:
            rules = inside(one.pod.netns, "nft", "list", "ruleset")
            assert bool(rules) is (one.kind.reason in CAPTURED)
            assert ("5432" in rules) is (one.kind.excluded == "5432")


def generations(started: list[Started]) -> list[int]:
    return [generation(one.pod.netns) for one in started if one.pod.netns is not None]
