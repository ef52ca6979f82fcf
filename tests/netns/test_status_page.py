"""Who sees what of the status page of a running agent, over the network."""

import contextlib
import http.client
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from agent.kernel.netns import Netns
from tests.support.agent import Agent, running, wait_for
from tests.support.netns import namespace, path_of, run
from tests.support.pages import Page

NODE, CLIENT = "10.9.0.1", "10.9.0.2"
EVERYTHING = {"inbound_ports_include": "*", "outbound_ip_ranges_include": "*"}
REASON = "it is named in the configuration"


@contextlib.contextmanager
def linked() -> Iterator[tuple[str, str]]:
    """Two namespaces that reach each other: the node and somebody in its network."""
    with namespace("node") as node, namespace("client") as client:
        command = ("ip", "-n", node, "link", "add", "net", "type", "veth", "peer", "name", "net")
        run(*command, "netns", client)
        for name, address in ((node, NODE), (client, CLIENT)):
            run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "net")
            run("ip", "-n", name, "link", "set", "net", "up")
        yield node, client


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Agent, str]]:
    """An agent that serves its pages to the network, and the namespace of somebody in it."""
    with linked() as (node, client), namespace("pod") as pod:
        static = [{"name": "one", "netns": f"/run/netns/{pod}", "settings": EVERYTHING}]
        agent = Agent(tmp_path_factory.mktemp("node"), node)
        agent.configure(static=static, status={"address": "0.0.0.0", "port": agent.ports["status"]})
        try:
            agent.start()
            wait_for(lambda: agent.state("one") == "in-sync", 60)
            yield agent, client
        finally:
            agent.kill()


def ask(
    netns: str, agent: Agent, path: str, *, method: str = "GET", host: str = ""
) -> tuple[int, Mapping[str, str], str]:
    """Ask from a namespace, which reaches the agent by loopback or by the network."""
    address = "127.0.0.1" if netns == agent.netns else NODE

    def request() -> tuple[int, Mapping[str, str], str]:
        client = http.client.HTTPConnection(address, agent.ports["status"], timeout=20)
        with contextlib.closing(client):
            client.request(method, path, headers={"Host": host} if host else {})
            answer = client.getresponse()
            return answer.status, dict(answer.headers), answer.read().decode()

    with Netns.open(path_of(netns)) as opened:
        return opened.run(request)


POD = "/pod?namespace=static&name=one"


def test_reasons_and_rules_are_for_this_host(served: tuple[Agent, str]) -> None:
    agent, client = served
    assert agent.netns
    status, _, text = ask(agent.netns, agent, "/")
    assert (status, REASON in text, POD.replace("&", "&amp;") in text) == (200, True, True)
    status, _, text = ask(agent.netns, agent, POD)
    assert (status, "ISTIO_OUTPUT rule" in Page.sound(text).root.one(id="ways").text) == (200, True)
    status, _, text = ask(client, agent, "/")
    assert (status, "static/one" in text, REASON in text) == (200, True, False)
    assert "/pod?" not in text
    for path in (POD, "/debug/pods", "/debug/config"):
        status, _, text = ask(client, agent, path)
        assert (status, REASON in text, "ISTIO" in text, "netns" in text) == (403, *[False] * 3)
    assert ask(client, agent, "/metrics")[0] == 200


def test_strange_name_leads_nobody_in(served: tuple[Agent, str]) -> None:
    agent, client = served
    assert agent.netns
    for path in ("/", "/findings", "/events", POD):
        for netns in (agent.netns, client):
            status, _, text = ask(netns, agent, path, host="rebound.example")
            assert (status, "static/one" in text) == (421, False)
    assert ask(agent.netns, agent, "/debug/pods", host="rebound.example:15020")[0] == 403
    assert ask(agent.netns, agent, POD, host="localhost:15020")[0] == 200
    assert ask(agent.netns, agent, "/metrics", host="rebound.example")[0] == 200


def test_pages_are_read_only_and_kept_nowhere(served: tuple[Agent, str]) -> None:
    agent, _ = served
    assert agent.netns
    status, headers, text = ask(agent.netns, agent, POD, method="HEAD")
    assert (status, text) == (200, "")
    assert int(headers["content-length"]) > 1000
    assert headers["cache-control"] == "no-store"
    assert headers["x-content-type-options"] == "nosniff"
    assert "default-src 'none'" in headers["content-security-policy"]
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert ask(agent.netns, agent, "/", method=method)[0] == 405


def test_pod_that_is_none_and_namespace_that_is_gone_are_said_so(
    tmp_path: Path,
) -> None:
    with namespace("gone") as netns, running(tmp_path) as agent:
        assert agent.cni("ADD", netns)[0] == 0
        status, text = agent.get("status", "/pod?namespace=shop&name=nobody")
        assert status == 404
        assert "the agent knows no pod shop/nobody" in Page.sound(text).root.one("h1").text
        run("ip", "netns", "del", netns)
        status, text = agent.get("status", "/pod?namespace=shop&name=web")
        assert status == 200
        assert "cannot be opened" in Page.sound(text).root.one(id="ways").text


def test_many_who_ask_keep_nobody_else_waiting(tmp_path: Path, netns: str) -> None:
    """Each of them gets a page, and pods go on being captured meanwhile."""

    def asked(number: int) -> int:
        path = f"/?q={number}" if number % 2 else f"/pod?namespace=shop&name=web&page={number}"
        return agent.get("status", path)[0]

    with running(tmp_path) as agent, ThreadPoolExecutor(32) as threads:
        statuses = threads.map(asked, range(200))
        assert agent.cni("ADD", netns)[0] == 0
        assert agent.state("web") == "in-sync"
        assert {*statuses} <= {200, 404}
