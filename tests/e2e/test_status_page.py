"""The status page in a real browser: it follows a live agent, and its drawings are right.

One agent serves them all. It only tells of what differs (mode alert) and keeps what it finds, so
each pod has the backend that it was captured by beforehand.
"""

import contextlib
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlencode

import pytest

from tests.support import standin
from tests.support.agent import Agent, running, wait_for
from tests.support.calls import nsenter
from tests.support.capturing import EVERYTHING, TPROXY, capture, release
from tests.support.chromium import DESK, PHONE, Browser, Tab, chromium
from tests.support.ebpf import built
from tests.support.netns import inside, namespace, run

MARKUP = "</title><script>window.hit = 1</script><img src=x onerror='window.hit = 1'>"
# By the name of a pod: the backend that captured it, if one did, and its settings.
PODS: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "redirect": ("nftables", EVERYTHING),
    "tproxy": ("iptables-nft", TPROXY),
    "legacy": ("iptables-legacy", EVERYTHING),
    "ebpf": ("ebpf", EVERYTHING),
    "altered": ("nftables", EVERYTHING),
    MARKUP: ("", EVERYTHING),
}
PROXIED = ("redirect", "tproxy", "legacy", "ebpf")


@dataclass(frozen=True)
class Node:
    """The agent and its pods: namespaces by name, and those at the other ends of their links."""

    agent: Agent
    netns: Mapping[str, str]
    worlds: Mapping[str, str]

    def url(self, path: str = "/", **query: str) -> str:
        asked = f"?{urlencode(query)}" if query else ""
        return f"http://127.0.0.1:{self.agent.ports['status']}{path}{asked}"

    def of(self, pod: str, **query: str) -> str:
        """Return the address of the page of a pod."""
        return self.url("/pod", namespace="static", name=pod, **query)


@contextlib.contextmanager
def pod_captured_by(backend: str, settings: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """A namespace with an address and a way out, to a world of its own that has nobody in it."""
    with namespace("page") as name, namespace("world") as world:
        run("ip", "-n", name, "link", "add", "eth0", "type", "veth", "peer", "eth0", "netns", world)
        for end, address in ((name, "10.1.0.7/24"), (world, "10.1.0.1/24")):
            # An address that comes by itself comes late, which eBPF has to be told of.
            run("ip", "-n", end, "link", "set", "eth0", "up", "addrgenmode", "none")
            run("ip", "-n", end, "addr", "add", address, "dev", "eth0")
        run("ip", "-n", name, "route", "add", "default", "via", "10.1.0.1")
        if backend:
            capture(name, settings, backend)
        try:
            yield name, world
        finally:
            release(name)  # of eBPF something would stay


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    built()
    with contextlib.ExitStack() as stack:
        made = {name: stack.enter_context(pod_captured_by(*how)) for name, how in PODS.items()}
        netns = {name: pod for name, (pod, _) in made.items()}
        for name in PROXIED:
            proxy = standin.process(netns[name], 15001, 15006, transparent=name == "tproxy")
            stack.enter_context(proxy)
        static = [
            {"name": name, "netns": f"/run/netns/{where}", "settings": dict(PODS[name][1])}
            for name, where in netns.items()
        ]
        folder = tmp_path_factory.mktemp("node")
        agent = stack.enter_context(running(folder, mode="alert", static=static))
        wait_for(lambda: agent.status()["pods"] == {"in-sync": 5, "drifted": 1}, 60)
        yield Node(agent, netns, {name: world for name, (_, world) in made.items()})


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


# --- the drawings ---------------------------------------------------------------------------------

CONNECT = """
import os, socket, sys
client = socket.socket()
client.settimeout(20)
os.setgroups([]); os.setgid(1000); os.setuid(1000)
client.connect((sys.argv[1], 80))
"""


def drawn(tab: Tab, title: str) -> list[str]:
    """Return the places of a drawing, top down, as they are written into it."""
    found: list[str] = tab.run(
        f"""[...document.querySelectorAll("svg")]
            .filter((svg) => svg.querySelector("title").textContent.startsWith({json.dumps(title)}))
            .flatMap((svg) => [...svg.querySelectorAll(".strong")].map((one) => one.textContent))"""
    )
    return found


OUT = ["OUTPUT rule 1", "ISTIO_OUTPUT rule 9", "ISTIO_REDIRECT rule 1"]
IN = ["PREROUTING rule 1", "ISTIO_INBOUND rule 2", "ISTIO_IN_REDIRECT rule 1"]


@pytest.mark.parametrize(
    ("pod", "out", "into", "proxys"),
    [
        ("redirect", OUT, IN, "ISTIO_OUTPUT rule 4"),
        ("legacy", OUT, IN, "ISTIO_OUTPUT rule 4"),
        (
            "tproxy",
            OUT,
            ["PREROUTING rule 1", "ISTIO_INBOUND rule 5", "ISTIO_TPROXY rule 1"],
            "ISTIO_OUTPUT rule 4",
        ),
        ("ebpf", ["program connect4"], ["program inbound"], "program connect4"),
    ],
)
def test_drawing_is_the_way_that_connections_take(
    browser: Browser, node: Node, pod: str, out: list[str], into: list[str], proxys: str
) -> None:
    with browser.tab(size=PHONE) as tab:
        tab.open(node.of(pod))
        start, *way, end = drawn(tab, "Out of the pod, IPv4")
        assert (start, end) == ("The application, UID 1000", "The proxy, port 15001")
        assert [place for place in way if place != "the kernel"][: len(out)] == out
        start, *way, end = drawn(tab, "Into the pod, IPv4")
        assert (start, way) == ("A client outside the pod", into)
        assert end == "The proxy, port 15006"
        assert drawn(tab, "The proxy's own traffic, IPv4")[-2:] == [proxys, "Out, as it is"]
        assert tab.complaints() == []
    # Nobody has that address, and nobody that port: who gets through was taken by the stand-in.
    for netns, to in ((node.netns[pod], "192.0.2.1"), (node.worlds[pod], "10.1.0.7")):
        command = (*nsenter(netns), sys.executable, "-I", "-S", "-c", CONNECT, to)
        subprocess.run(command, check=True)


def test_pod_that_was_never_captured_is_drawn_so(browser: Browser, node: Node) -> None:
    with browser.tab() as tab:
        tab.open(node.of(MARKUP))
        assert drawn(tab, "Out of the pod") == ["The application, UID 1000", "Out, as it is"]
        assert drawn(tab, "Into the pod") == [
            "A client outside the pod",
            "The pod itself, as it came",
        ]
        assert "not what it should be" in tab.text("#ways")


# --- strangers' words -----------------------------------------------------------------------------


def test_name_that_is_markup_does_nothing(browser: Browser, node: Node) -> None:
    with browser.tab() as tab:
        tab.open(node.url(q="script"))
        assert MARKUP in tab.text("#pods")
        link = tab.run("document.querySelector('#pods tbody a').getAttribute('href')")
        tab.open(node.url() + link.removeprefix("/"))
        assert MARKUP in tab.text("h1")
        assert tab.run("[typeof window.hit, document.images.length]") == ["undefined", 0]
        assert tab.complaints() == []


def test_nothing_else_may_run_in_the_page(browser: Browser, node: Node) -> None:
    with browser.tab() as tab:
        tab.open(node.url())
        tab.run(
            """const picture = "<img src=x onerror='window.hit = 1'>";
            document.body.insertAdjacentHTML("beforeend", picture);
            const script = document.createElement("script");
            script.textContent = "window.hit = 1";
            document.body.append(script);"""
        )
        wait_for(lambda: len(tab.complaints()) >= 3)  # the picture, its handler, the script
        assert tab.run("typeof window.hit") == "undefined"


# --- everybody can use it -------------------------------------------------------------------------

# Everything that is written, with the contrast of its colour to what is behind it (WCAG 2).
CONTRAST = """
(() => {
  const numbers = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const light = (colour) => {
    const [r, g, b] = numbers(colour).map((part) => part / 255)
      .map((part) => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    if (element.closest("svg"))
      return getComputedStyle(element.parentNode.querySelector("rect")).fill;
    for (let at = element; at; at = at.parentElement) {
      const colour = getComputedStyle(at).backgroundColor;
      if (numbers(colour)[3] !== 0) return colour;
    }
    return "rgb(255, 255, 255)";
  };
  const hasText = (element) =>
    [...element.childNodes].some((one) => one.nodeType === 3 && one.data.trim());
  return [...document.body.querySelectorAll("*")]
    .filter((element) => !element.closest("script, title, desc, noscript") && hasText(element))
    .map((element) => {
      const style = getComputedStyle(element);
      const two = [element.closest("svg") ? style.fill : style.color, behind(element)].map(light);
      return [(Math.max(...two) + 0.05) / (Math.min(...two) + 0.05), element.outerHTML];
    });
})()
"""
ENOUGH = 4.5
ROLES = frozenset({"banner", "navigation", "main", "contentinfo", "search", "status", "heading"})
TABLE = frozenset({"table", "caption", "row", "columnheader", "rowheader", "cell"})


def roles(tab: Tab) -> set[str]:
    """Return what a screen reader is told that there is."""
    nodes = tab.ask("Accessibility.getFullAXTree")["nodes"]
    return {str(one["role"]["value"]).lower() for one in nodes if not one["ignored"]}


def addresses(node: Node, **query: str) -> list[str]:
    """Return where all the pages are, once something is on each of them."""
    wait_for(lambda: "blackhole" in node.agent.get("status", "/findings")[1], 60)
    lists = [node.url(path, **query) for path in ("/", "/findings", "/events")]
    pods = [node.of(name, **query) for name in ("redirect", "altered", MARKUP, "nobody")]
    return lists + pods


@pytest.mark.parametrize(("size", "scheme"), [(PHONE, "light"), (DESK, "dark")])
def test_every_page_can_be_read(
    browser: Browser, node: Node, size: tuple[int, int], scheme: str
) -> None:
    with browser.tab(size=size, features={"prefers-color-scheme": scheme}) as tab:
        for url in addresses(node):
            tab.open(url)
            # Not innerWidth: a phone widens that to what does not fit.
            assert tab.run("document.documentElement.scrollWidth") == size[0], url
            written = tab.run(CONTRAST)
            assert len(written) > 5
            assert [what for contrast, what in written if contrast < ENOUGH] == []
        tab.open(node.url())
        assert roles(tab) >= ROLES | TABLE
        key = {"key": "Tab", "code": "Tab", "windowsVirtualKeyCode": 9}
        tab.ask("Input.dispatchKeyEvent", type="rawKeyDown", **key)
        assert tab.run("document.activeElement.innerText") == "Skip to the content"
        assert tab.run("getComputedStyle(document.activeElement).outlineStyle") == "solid"


def test_browser_finds_nothing_to_mend(browser: Browser, node: Node) -> None:
    """What it makes of the markup, written out again, is that markup: nothing was misplaced."""

    def timeless(markup: str) -> str:
        return re.sub(r"As of [^<]*", "", markup)

    with browser.tab(scripts=False) as tab:
        for url in addresses(node, refresh="off"):
            tab.open(url)
            made = tab.run("document.documentElement.outerHTML")
            sent = node.agent.get("status", url.removeprefix(node.url().rstrip("/")))[1]
            assert timeless(made) == timeless(sent.removeprefix("<!DOCTYPE html>\n"))
            assert tab.run("document.compatMode") == "CSS1Compat"


# --- it follows -----------------------------------------------------------------------------------


def test_page_without_scripts_is_loaded_again_and_keeps_what_was_asked(
    browser: Browser, node: Node, netns: str
) -> None:
    with browser.tab(scripts=False) as tab:
        tab.open(node.url(q="shop"))
        assert "None of the" in tab.text("#pods")
        assert node.agent.cni("ADD", netns)[0] == 0
        wait_for(lambda: "shop/web" in tab.text("#pods"), 30)
        assert "static" not in tab.text("#pods")
        assert node.agent.cni("DEL", netns)[0] == 0


def test_page_follows_the_node_in_place(browser: Browser, node: Node, netns: str) -> None:
    with browser.tab() as tab, browser.tab() as other, browser.tab() as third:
        tab.open(node.url())
        other.open(node.of("altered"))
        assert drawn(other, "Out of the pod")[-1] == "Nobody takes it on port 15001"
        tab.run("window.mine = 1; q.focus(); q.value = 'half a wo'")
        assert node.agent.cni("ADD", netns)[0] == 0
        wait_for(lambda: "shop/web" in tab.text("#pods"), 30)
        inside(node.netns["altered"], "nft", "delete", "table", "inet", "intercept-agent")
        wait_for(lambda: tab.text("#pods").count("drifted") == 2, 30)
        wait_for(lambda: drawn(other, "Out of the pod")[1:] == ["Out, as it is"], 30)
        assert "ISTIO_OUTPUT" in other.text("#differences")
        assert "drift-found" in tab.text("#events")
        assert tab.run("[window.mine, q.value, document.activeElement.id]") == [1, "half a wo", "q"]
        third.open(node.url("/pod", namespace="shop", name="web"))
        assert third.text("h1") == "shop/web"
        tab.run("document.querySelector('#pods tbody a').focus()")
        focused = tab.run("document.activeElement.innerText")
        assert node.agent.cni("DEL", netns)[0] == 0
        wait_for(lambda: "shop/web" not in tab.text("#pods"), 30)
        assert tab.run("document.activeElement.innerText") == focused
        wait_for(lambda: "knows no pod shop/web" in third.text("h1"), 30)
        assert tab.complaints() == []


def test_page_says_for_how_long_the_agent_is_gone(browser: Browser, tmp_path: Path) -> None:
    with running(tmp_path) as agent, browser.tab() as tab:
        tab.open(f"http://127.0.0.1:{agent.ports['status']}/")
        agent.stop(signal.SIGTERM)
        wait_for(lambda: "does not answer" in tab.text("#said"), 30)
        assert "There are no pods" in tab.text("#pods")
        agent.start()
        wait_for(lambda: tab.text("#said") == "", 30)
