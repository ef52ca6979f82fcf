"""Requests between real pods on two nodes: through both of their Envoys, or untouched."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.containerd.mesh import APP_PORT, App, agent_on, join, mesh_pod, run_app, run_proxy
from tests.containerd.node import containerd_node
from tests.support.agent import Agent, wait_for
from tests.support.envoy import INBOUND, OUTBOUND, PASSTHROUGH_V4, PASSTHROUGH_V6, Counters
from tests.support.netns import snapshot

PASSTHROUGH = {4: PASSTHROUGH_V4, 6: PASSTHROUGH_V6}
REQUESTS = 20

both_families = pytest.mark.parametrize("version", [4, 6], ids=["ipv4", "ipv6"])


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Two nodes; on each a pod of the mesh and one that is not."""

    agents: tuple[Agent, Agent]
    web: App
    cart: App
    plain: App
    other: App


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with contextlib.ExitStack() as stack:
        one, other = (
            stack.enter_context(containerd_node(subnets=subnets))
            for subnets in (
                ("10.244.1.0/24", "fd00:10:244:1::/64"),
                ("10.244.2.0/24", "fd00:10:244:2::/64"),
            )
        )
        join(one, other)
        agents = tuple(stack.enter_context(agent_on(node)) for node in (one, other))
        yield World(
            agents=(agents[0], agents[1]),
            web=run_proxy(run_app(one, mesh_pod(one, "web"))),
            cart=run_proxy(run_app(other, mesh_pod(other, "cart"))),
            plain=run_app(one, one.run_pod("plain")),
            other=run_app(other, other.run_pod("other")),
        )


@both_families
def test_request_between_pods_of_two_nodes_passes_both_proxies(world: World, version: int) -> None:
    web, cart = world.web, world.cart
    before = web.counters(), cart.counters()
    answers = web.call(cart.address[version], APP_PORT, count=REQUESTS)
    assert {(a.name, a.via, a.local, a.peer) for a in answers} == {
        ("cart", (OUTBOUND, INBOUND), cart.address[version], PASSTHROUGH[version])
    }
    assert web.counters() - before[0] == Counters(REQUESTS, REQUESTS, 0, 0)
    assert cart.counters() - before[1] == Counters(0, 0, REQUESTS, REQUESTS)


@both_families
def test_request_from_outside_the_mesh_passes_the_proxy_of_the_pod_that_it_goes_to(
    world: World, version: int
) -> None:
    before = world.cart.counters()
    (answer,) = world.plain.call(world.cart.address[version], APP_PORT)
    assert (answer.name, answer.via, answer.peer) == ("cart", (INBOUND,), PASSTHROUGH[version])
    assert world.cart.counters() - before == Counters(0, 0, 1, 1)


@both_families
def test_request_to_outside_the_mesh_passes_the_proxy_of_the_pod_that_it_comes_from(
    world: World, version: int
) -> None:
    before = world.web.counters()
    (answer,) = world.web.call(world.other.address[version], APP_PORT)
    assert (answer.name, answer.via, answer.peer) == (
        "other",
        (OUTBOUND,),
        world.web.address[version],
    )
    assert world.web.counters() - before == Counters(1, 1, 0, 0)


@both_families
def test_plain_pod_beside_a_mesh_pod_is_untouched(world: World, version: int) -> None:
    (answer,) = world.plain.call(world.other.address[version], APP_PORT)
    assert (answer.name, answer.via, answer.peer) == ("other", (), world.plain.address[version])
    found = snapshot(world.plain.netns)
    assert {found[f"{kind}{digit}"] for kind in ("legacy", "nft") for digit in (4, 6)} == {""}
    assert found["nft"] == ""
    assert "lookup 133" not in found["rules4"] + found["rules6"]
    wait_for(lambda: world.agents[0].state("plain") == "ignored")


def test_each_agent_knows_the_pods_of_its_own_node(world: World) -> None:
    for agent, states in (
        (world.agents[0], {"web": "in-sync", "plain": "ignored"}),
        (world.agents[1], {"cart": "in-sync", "other": "ignored"}),
    ):
        wait_for(lambda: {pod["name"]: pod["state"] for pod in agent.ask("pods")} == states)  # noqa: B023
