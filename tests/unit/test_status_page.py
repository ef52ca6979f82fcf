"""The status page as markup: what is in it, for whom, and what strangers' text does to it."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from agent.api.known import Known
from agent.cli import status_page
from agent.cli.status_page import StatusPage
from agent.explain.pod.ways import Stop, Way
from agent.model.errors import AgentError, EnvironmentLacks
from agent.node.feed import Feed
from agent.observe.http import Answer, Request
from agent.observe.page import lists
from agent.observe.page.frame import Frame
from agent.observe.page.given import Given
from agent.observe.page.html import Html, join, tag
from agent.observe.page.pod import Drawn, Shown, missing_page, pod_page
from agent.observe.page.view import View
from tests.support.pages import Page

FRAME = Frame(node="node1", version="1.2.3", now="2026-12-01 10:00:00 UTC")
HOSTILE = (
    "</title></style><script>alert(1)</script><img src=x onerror=\"alert('2')\"><!-- &amp; '\" -->"
)
SECRET = "10.96.0.1 of /run/secret"

SOURCE = {"name": "cri", "connected": True, "detail": ""}
STATUS = {
    "version": "1.2.3",
    "ready": True,
    "pending": [],
    "sources": [SOURCE],
    "cni": {"present": False, "reason": "the entry is missing"},
    "mode": "repair",
    "backend": "auto",
    "worker_pid": 4711,
}


def pod(name: str = "web", **changes: object) -> dict[str, Any]:
    row = {
        "namespace": "shop",
        "name": name,
        "uid": "u1",
        "netns": "/run/netns/x",
        "captured": True,
        "backend": "nftables",
        "reason": "injected",
        "text": "a sidecar was injected",
        "state": "in-sync",
        "source": "cri",
    }
    return {**row, **changes}


def finding(**changes: object) -> dict[str, Any]:
    found = {
        "kind": "blackhole",
        "severity": "warning",
        "where": {"netns": "/run/x", "pod": "shop/web", "family": None, "backend": "nftables"},
        "objects": ["table inet x"],
        "owner": "istio",
        "evidence": ["nobody listens"],
        "explanation": "it leads nowhere",
        "fix": "intercept-agent clean",
    }
    return {**found, **changes}


def event(number: int = 1, **changes: object) -> dict[str, Any]:
    found = {"number": number, "time": 1.8e9 + number, "kind": "captured", "pod": "shop/web"}
    return {**found, "message": f"message {number}", **changes}


def given(**changes: Any) -> Given:
    found = {
        "status": STATUS,
        "pods": [pod()],
        "findings": [finding()],
        "scanned": {"namespaces": 2, "time": 1.8e9, "failed": []},
        "events": [event()],
    }
    return Given(**{**found, **changes})


def shown(answer: Answer) -> Page:
    assert answer.content_type == "text/html; charset=utf-8"
    return Page.sound(answer.body.decode())


def pods_page(view: View | None = None, of: Given | None = None) -> Page:
    return shown(lists.pods_page(FRAME, view or View(), of or given()))


def names(page: Page) -> list[str]:
    """Return the pods that are listed."""
    return [row.one("th").text for row in page.root.one(id="pods").one("tbody").all("tr")]


# --- markup ---------------------------------------------------------------------------------------


def test_values_are_text_and_only_markup_is_markup() -> None:
    made = tag("p", "<b>", [Html("<i>"), None, 7], title='"&<', hidden=False, open=True, data_x=0)
    assert made == '<p title="&quot;&amp;&lt;" open="" data-x="0">&lt;b&gt;<i>7</p>'
    assert tag("input", for_="x") == '<input for="x">'
    assert join(letter for letter in "<>") == "&lt;&gt;"


@pytest.mark.parametrize("letter", ["\0", "\x1b", "\u202e", "\u2066", "\udc80", "\ufeff", "\u2028"])
def test_what_turns_or_ends_a_line_cannot_be_written(letter: str) -> None:
    assert tag("p", f"a{letter}b") == "<p>a\ufffdb</p>"


HOSTILE_POD = pod(
    **{key: HOSTILE for key in ("namespace", "name", "uid", "reason", "text", "backend")}
)


def test_hostile_words_stay_words_on_every_page() -> None:
    of = given(
        pods=[{**HOSTILE_POD, "state": HOSTILE}],
        findings=[finding(owner=HOSTILE, explanation=HOSTILE, fix=HOSTILE, kind=HOSTILE)],
        events=[event(kind=HOSTILE, pod=HOSTILE, message=HOSTILE)],
        status={**STATUS, "pending": [HOSTILE], "sources": [{**SOURCE, "name": HOSTILE}]},
        scanned={"namespaces": 1, "time": 1, "failed": [HOSTILE]},
    )
    view = View.of(
        "/", {key: HOSTILE for key in ("q", "state", "namespace", "kind", "page", "refresh")}
    )
    clean = pods_page(of=given(pods=[], findings=[], events=[]))
    frame = Frame(node=HOSTILE, version=HOSTILE, now=HOSTILE)
    for made in (lists.pods_page, lists.findings_page, lists.events_page):
        for asked in (View(), view):
            page = shown(made(frame, asked, of))
            assert len(page.root.all("script")) == len(clean.root.all("script")) == 1
            assert not page.root.all("img")
            assert HOSTILE in page.root.text
    assert page.root.one("input", id="q").attributes["value"] == HOSTILE.strip()


def test_policy_allows_the_pages_own_script_and_style_alone() -> None:
    answer = lists.pods_page(FRAME, View(), given())
    policy = dict(answer.headers)["content-security-policy"]
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy


# --- lists ----------------------------------------------------------------------------------------


def test_pod_is_shown_with_its_state_and_reason() -> None:
    row = pods_page().root.one(id="pods").one("tbody").one("tr")
    assert [cell.text for cell in row.all("th", "td")] == [
        "shop/web",
        "in-sync",
        "nftables",
        "a sidecar was injected (injected)",
    ]
    assert row.one("a").attributes["href"] == "/pod?namespace=shop&name=web&uid=u1"


def test_node_is_summed_up() -> None:
    text = pods_page().root.one(id="node").text
    for said in ("Ready. 1 pod: 1 in-sync", "repair", "auto", "not in the chain: the entry is"):
        assert said in text
    waiting = given(status={**STATUS, "ready": False, "pending": ["cri: not there"]})
    text = pods_page(of=waiting).root.one(id="node").text
    assert "Not ready." in text
    assert "cri: not there" in text


def test_what_needs_somebody_comes_first() -> None:
    states = ("in-sync", "ignored", "failed", "repairing", "drifted")
    page = pods_page(of=given(pods=[pod(state, state=state) for state in states]))
    assert names(page) == [
        f"shop/{state}" for state in ("failed", "drifted", "repairing", "in-sync", "ignored")
    ]


def many() -> Given:
    return given(pods=[pod(f"web-{number:03}") for number in range(260)])


def test_many_pods_are_each_on_one_page() -> None:
    listed: list[str] = []
    href = "/"
    while href:
        query = dict(part.split("=") for part in href.partition("?")[2].split("&") if part)
        page = pods_page(View.of("/", query), many())
        listed += names(page)
        links = page.root.one("nav", **{"aria-label": "Pages of pods"}).all("a")
        href = next((link.attributes["href"] for link in links if link.text == "Next"), "")
    assert listed == [f"shop/web-{number:03}" for number in range(260)]


@pytest.mark.parametrize(
    ("page", "first"),
    [
        ("6", 250),
        ("7", 250),
        ("999999", 250),
        ("0", 0),
        ("-1", 0),
        ("x", 0),
        ("9" * 50, 0),
        ("", 0),
    ],
)
def test_page_that_is_none_is_the_nearest(page: str, first: int) -> None:
    assert names(pods_page(View.of("/", {"page": page}), many()))[0] == f"shop/web-{first:03}"


PODS = [
    pod("web", namespace="shop"),
    pod("db", namespace="shop", state="drifted", text="Rule 3 is missing"),
    pod("web", namespace="bank", backend="ebpf", uid="u2"),
]


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ({"q": "WEB"}, ["bank/web", "shop/web"]),
        ({"q": "shop missing"}, ["shop/db"]),
        ({"q": "Shop/Web"}, ["shop/web"]),
        ({"q": "ebpf"}, ["bank/web"]),
        ({"q": "u2"}, ["bank/web"]),
        ({"state": "drifted"}, ["shop/db"]),
        ({"namespace": "bank"}, ["bank/web"]),
        ({"namespace": "shop", "q": "web", "state": "in-sync"}, ["shop/web"]),
        ({"state": "nonsense", "other": "x"}, ["shop/db", "bank/web", "shop/web"]),
    ],
)
def test_search_and_filters_find_what_fits(query: Mapping[str, str], found: list[str]) -> None:
    assert names(pods_page(View.of("/", query), given(pods=PODS))) == found


def test_nothing_found_says_so_and_keeps_what_was_asked() -> None:
    page = pods_page(View.of("/", {"q": "nobody", "namespace": "gone"}), given(pods=PODS))
    assert "None of the 3 pods fits." in page.root.one(id="pods").text
    assert page.root.one("input", id="q").attributes["value"] == "nobody"
    assert page.root.one("option", selected="", value="gone").text == "gone"


def test_page_that_is_loaded_again_keeps_what_was_asked_and_can_stand_still() -> None:
    page = pods_page(View.of("/", {"q": "a&b", "page": "2"}), many())
    again = page.root.one("noscript").one("meta").attributes
    assert again == {"http-equiv": "refresh", "content": "10; url=/?q=a%26b&page=2"}
    still = pods_page(View.of("/", {"q": "web", "refresh": "off"}), many())
    assert not still.root.all("noscript")
    assert still.root.one("body").attributes["data-refresh"] == "0"
    links = still.root.one("main").all("a", "input")
    kept = [link for link in links if "refresh=off" in link.attributes.get("href", "")]
    assert kept  # the paging of a page that stands still, too


def test_findings_are_shown_worst_first_and_by_kind() -> None:
    rows = [finding(severity=s, kind=s) for s in ("info", "critical", "warning")]
    page = shown(lists.findings_page(FRAME, View(path="/findings"), given(findings=rows)))
    assert [row.one("th").text for row in page.root.one("tbody").all("tr")] == [
        "critical",
        "warning",
        "info",
    ]
    view = View.of("/findings", {"kind": "info"})
    page = shown(lists.findings_page(FRAME, view, given(findings=rows)))
    assert len(page.root.one("tbody").all("tr")) == 1


def test_events_are_shown_newest_first_page_by_page() -> None:
    of = given(events=[event(number) for number in range(120)])
    page = shown(lists.events_page(FRAME, View(path="/events"), of))
    rows = page.root.one("tbody").all("tr")
    assert (len(rows), rows[0].all("td")[-1].text) == (50, "message 119")
    assert rows[0].one("time").attributes["datetime"] == "2027-01-15T08:01:59Z"


def test_strangers_see_and_find_names_states_and_reasons_alone() -> None:
    told = {"text": SECRET, "netns": SECRET, "uid": SECRET, "source": SECRET}
    of = given(
        pods=[pod(**told)],
        findings=[
            finding(
                explanation=SECRET,
                fix=SECRET,
                evidence=[SECRET],
                objects=[SECRET],
                where={"pod": "shop/web", "netns": SECRET},
            )
        ],
        events=[event(message=SECRET)],
        scanned={"namespaces": 1, "time": 1.8e9, "failed": [SECRET]},
        status={
            **STATUS,
            "sources": [{**SOURCE, "detail": SECRET}],
            "cni": {"present": False, "reason": SECRET, "file": SECRET},
        },
    )
    for made in (lists.pods_page, lists.findings_page, lists.events_page):
        assert SECRET in made(FRAME, View(), of).body.decode()
        page = shown(made(FRAME, View(), of.for_strangers()))
        assert SECRET not in page.root.text
        assert "shop/web" in page.root.text
        assert not [a for a in page.root.all("a") if a.attributes["href"].startswith("/pod?")]
    found = pods_page(View.of("/", {"q": SECRET.split()[0]}), of.for_strangers())
    assert "None of the 1 pods" in found.root.text
    assert names(pods_page(View.of("/", {"q": "injected"}), of.for_strangers())) == ["shop/web"]


# --- a pod ----------------------------------------------------------------------------------------

EXPLAINED: dict[str, Any] = {
    "pod": pod(),
    "decision": {
        "captured": True,
        "reason": "injected",
        "text": "a sidecar was injected",
        "certain": True,
        "problems": [],
        "warnings": [],
    },
    "mode": {"name": "mode", "value": "repair", "by": "the agent's configuration"},
    "backend": {"name": "backend", "value": "nftables", "by": "auto"},
    "settings": [{"name": "proxy_port", "value": "15001", "by": "default"}],
    "findings": {"in_sync": True, "differences": [], "foreign": [], "warnings": []},
}
STOP = Stop(
    kind="rule",
    at="ISTIO_OUTPUT",
    where="OUTPUT nat, nftables",
    why="jumps to ISTIO_REDIRECT",
    number=9,
    text="-j ISTIO_REDIRECT",
    setting="outbound_ip_ranges_include",
    missed=8,
)
WAY = Way(
    direction="out",
    family="ipv4",
    packet="TCP to 192.0.2.1:80",
    start="The application, UID 1000",
    stops=(STOP,),
    end="The proxy, port 15001",
    result="redirected to 15001",
    fate="proxied",
    summary="It is redirected.",
)


def pod_shown(drawn: Drawn, **changes: object) -> Page:
    explained = {**EXPLAINED, **changes}
    return shown(
        pod_page(
            FRAME,
            View(path="/pod"),
            Shown(explained=explained, drawn=drawn, findings=[finding()], events=[event()]),
        )
    )


def test_way_is_drawn_and_told_alike() -> None:
    way = pod_shown(Drawn(ways=(WAY,))).root.one(id="ways")
    drawing = way.one("svg")
    told = drawing.one("desc").text
    assert told.startswith(
        "The application, UID 1000 -> ISTIO_OUTPUT rule 9 -> The proxy, port 15001. "
    )
    assert drawing.one("title").text == "Out of the pod, IPv4: TCP to 192.0.2.1:80"
    strong = [text.text for text in drawing.all("text", class_="strong")]
    assert strong == ["The application, UID 1000", "ISTIO_OUTPUT rule 9", "The proxy, port 15001"]
    items = [item.text for item in way.one("ol").all("li")]
    assert items[1].startswith(
        "ISTIO_OUTPUT rule 9 (OUTPUT nat, nftables): jumps to ISTIO_REDIRECT"
    )
    assert len(items) == 3


def test_drawing_holds_all_that_is_written_into_it() -> None:
    long = Stop(kind="rule", at="x" * 300, where="y" * 300, why="z " * 300)
    drawing = pod_shown(Drawn(ways=(replace(WAY, stops=(long,)),))).root.one("svg")
    height = float(drawing.attributes["viewbox"].split()[3])
    boxes = [(float(r.attributes["y"]), float(r.attributes["height"])) for r in drawing.all("rect")]
    for text in drawing.all("text"):
        y = float(text.attributes["y"])
        assert any(top < y < top + high for top, high in boxes)
        assert len(text.text) <= 44
    assert boxes[-1][0] + boxes[-1][1] <= height
    assert all(a[0] + a[1] < b[0] for a, b in pairwise(boxes))


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (pod(), "What becomes of new connections, by what is loaded now."),
        (pod(state="drifted"), "It is drifted: this is what becomes of its connections now"),
        (pod(state="failed"), "It is failed: this is what becomes of its connections now"),
        (pod(state="ignored", captured=False), "It is not to be captured."),
    ],
)
def test_drawing_says_whether_it_is_as_it_should_be(row: Mapping[str, object], said: str) -> None:
    assert said in pod_shown(Drawn(ways=(WAY,)), pod=row).root.one(id="ways").text


def test_findings_and_events_of_the_pod_are_on_its_page() -> None:
    page = pod_shown(Drawn())
    assert "it leads nowhere" in page.root.one(id="findings").text
    assert "message 1" in page.root.one(id="events").text


def test_what_differs_is_listed() -> None:
    found = {**EXPLAINED["findings"], "differences": ["- -A ISTIO_OUTPUT <x>"]}
    page = pod_shown(Drawn(), findings=found)
    assert "- -A ISTIO_OUTPUT <x>" in page.root.one(id="differences").text
    failed = pod_shown(Drawn(), findings={"error": "no such namespace"})
    assert "could not be compared: no such namespace" in failed.root.one(id="differences").text


def test_hostile_words_stay_words_on_the_page_of_a_pod() -> None:
    stop = Stop(kind=HOSTILE, at=HOSTILE, where=HOSTILE, why=HOSTILE, text=HOSTILE, setting=HOSTILE)
    words = dict.fromkeys(
        ("packet", "start", "end", "result", "fate", "summary", "direction"), HOSTILE
    )
    way = Way(family=HOSTILE, stops=(stop,), **words)
    page = pod_shown(
        Drawn(ways=(way,), not_walked=(HOSTILE,)),
        pod=HOSTILE_POD,
        decision={**EXPLAINED["decision"], "problems": [HOSTILE], "text": HOSTILE},
        settings=[{"name": HOSTILE, "value": HOSTILE, "by": HOSTILE}],
        findings={"foreign": [HOSTILE], "differences": [], "warnings": []},
    )
    assert len(page.root.all("script")) == 1
    assert not page.root.all("img")
    assert HOSTILE in page.root.one("h1").text


def test_page_without_a_pod_says_why() -> None:
    answer = missing_page(FRAME, View(path="/pod"), f"no pod {HOSTILE}", 404)
    assert answer.status == 404
    assert HOSTILE in shown(answer).root.one("h1").text


# --- who asks -------------------------------------------------------------------------------------


class Node:
    """What the page asks of: counts who asks, and answers when it may."""

    def __init__(self) -> None:
        self.looks = self.scans = 0
        self.may = asyncio.Event()
        self.may.set()

    def known(self) -> Known:
        return Known(
            pods=lambda: [pod()],
            pod=self.described,
            events=lambda _: [event()],
            watch=Feed().watch,
            explain=self.explain,
            scan=self.scan,
        )

    def scan(self) -> Mapping[str, Any]:
        self.scans += 1
        return {"findings": [finding()], "scanned": {"namespaces": 1, "time": 1.0, "failed": []}}

    async def status(self, _: Mapping[str, Any]) -> Mapping[str, Any]:
        return STATUS

    async def described(self, asked: Mapping[str, Any]) -> Mapping[str, Any]:
        if not str(asked["name"]).startswith("web"):
            raise EnvironmentLacks(f"the agent knows no pod {asked['name']} on this node")
        return {**pod(asked["name"], netns=None), "settings": None}

    async def explain(self, _: Mapping[str, Any]) -> Mapping[str, Any]:
        self.looks += 1
        await self.may.wait()
        return EXPLAINED

    async def job(self, *_: object, **__: object) -> Mapping[str, object]:
        raise AgentError("no jobs here")


def request(path: str, *, own_name: bool = True, local: bool = True, **query: str) -> Request:
    return Request(path, query, own_name, local)


async def ask(page: StatusPage, asked: Request) -> Answer:
    return await page.pages()[asked.path](asked)


def served(node: Node) -> StatusPage:
    return StatusPage(node.known(), node.status, node.described, node)


def test_pages_that_many_ask_for_are_made_once() -> None:
    async def run() -> None:
        node = Node()
        page = served(node)
        answers = await asyncio.gather(*(ask(page, request("/")) for _ in range(200)))
        assert {answer.status for answer in answers} == {200}
        assert node.scans == 1

    asyncio.run(run())


def test_pod_that_many_ask_for_is_looked_at_once() -> None:
    async def run() -> None:
        node = Node()
        page = served(node)
        asked = request("/pod", namespace="shop", name="web")
        answers = await asyncio.gather(*(ask(page, asked) for _ in range(200)))
        assert {answer.status for answer in answers} == {200}
        assert node.looks == 1

    asyncio.run(run())


def test_few_pods_are_looked_at_at_a_time_and_too_many_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(status_page, "LOOK_S", 0.2)

    async def run() -> None:
        node = Node()
        node.may.clear()
        page = served(node)
        asked = [request("/pod", namespace="shop", name=f"web{n}") for n in range(200)]
        answers = await asyncio.gather(*(ask(page, one) for one in asked))
        assert {answer.status for answer in answers} == {503}
        assert node.looks == status_page.AT_WORKER
        node.may.set()
        monkeypatch.undo()
        assert (await ask(page, asked[0])).status == 200

    asyncio.run(run())


def test_answers_that_are_kept_are_few() -> None:
    async def run() -> None:
        page = served(Node())
        for number in range(3 * status_page.KEPT):
            await ask(page, request("/", q=str(number)))
        assert len(page._made) <= status_page.KEPT

    asyncio.run(run())


def test_each_client_gets_what_it_may_see() -> None:
    async def run() -> None:
        page = served(Node())
        for path in ("/", "/findings", "/events"):
            local = await ask(page, request(path))
            strange = await ask(page, request(path, local=False))
            led = await ask(page, request(path, own_name=False, local=False))
            assert (local.status, strange.status, led.status) == (200, 200, 421)
            assert "shown to this host only" in strange.body.decode()
            assert "shown to this host only" not in local.body.decode()
            assert "shop/web" not in led.body.decode()
        asked: dict[str, Any] = {"namespace": "shop", "name": "web"}
        assert (await ask(page, request("/pod", **asked))).status == 200
        assert (await ask(page, request("/pod", local=False, **asked))).status == 403
        assert (
            await ask(page, request("/pod", own_name=False, local=False, **asked))
        ).status == 421
        assert (await ask(page, request("/pod", name="nobody"))).status == 404

    asyncio.run(run())
