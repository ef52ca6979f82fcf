"""What every page has: head, navigation, footer, and the headers that go with it."""

import base64
import hashlib
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from agent.observe.http import Answer
from agent.observe.page.html import Content, Html, tag
from agent.observe.page.view import OFF, View

# How often a page renews itself: in place, or as a whole where there are no scripts.
RENEWED_S = 3
LOADED_AGAIN_S = 10

MENU = (("/", "Pods"), ("/findings", "Findings"), ("/events", "Events"))
ICON = "data:,"  # or each browser asks for /favicon.ico


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """What is the same on every page: the node, the agent's version and the time, all as text."""

    node: str
    version: str
    now: str


def document(frame: Frame, view: View, title: str, *content: Content, status: int = 200) -> Answer:
    """Return a page. `content` goes into its main part."""
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="robots", content="noindex"),
        tag("title", f"{title} - intercept-agent on {frame.node}"),
        tag("link", rel="icon", href=ICON),
        None if view.still else _reload(view),
        tag("style", Html(_source("page.css"))),
    )
    body = tag(
        "body",
        tag("a", "Skip to the content", class_="skip", href="#main"),
        _header(frame, view),
        tag("main", *content, id="main", class_="band", tabindex="-1"),
        _footer(frame, view),
        tag("script", Html(_source("page.js"))),
        data_refresh=0 if view.still else RENEWED_S,
    )
    page = "<!DOCTYPE html>\n" + tag("html", head, body, lang="en")
    headers = (*HEADERS, ("content-security-policy", _policy()))
    return Answer(status, page.encode(), "text/html; charset=utf-8", headers=headers)


HEADERS = (
    ("referrer-policy", "no-referrer"),
    ("cross-origin-resource-policy", "same-origin"),
    ("cross-origin-opener-policy", "same-origin"),
)


def _reload(view: View) -> Html:
    again = f"{LOADED_AGAIN_S}; url={view.href}"
    return tag("noscript", tag("meta", http_equiv="refresh", content=again))


def _header(frame: Frame, view: View) -> Html:
    def link(path: str, name: str) -> Html:
        here = "page" if path == view.path else None
        return tag("a", name, href=View(path=path, refresh=view.refresh).href, aria_current=here)

    links = (tag("li", link(path, name)) for path, name in MENU)
    title = tag("p", tag("strong", "intercept-agent"), " on ", frame.node)
    menu = tag("nav", tag("ul", links), aria_label="Pages")
    said = tag("p", id="said", role="status")  # what the script has to say
    return tag("header", tag("div", title, menu, said, class_="band"))


def _footer(frame: Frame, view: View) -> Html:
    if view.still:
        other, does, offer = "", "This page stands still.", "Let it renew itself"
    else:
        other, does, offer = OFF, "This page renews itself.", "Let it stand still"
    as_of = tag("span", f"As of {frame.now}.", id="as-of", data_live=True)
    link = tag("a", offer, href=replace(view, refresh=other).href)
    version = tag("p", "Version ", frame.version)
    return tag("footer", tag("p", as_of, f" {does} ", link), version, class_="band")


@cache
def _source(name: str) -> str:
    return Path(__file__).with_name(name).read_text()


@cache
def _policy() -> str:
    """Allow this style, this script and fetching the page anew, and nothing else."""
    return (
        f"default-src 'none'; style-src '{_digest('page.css')}'; "
        f"script-src '{_digest('page.js')}'; "
        "connect-src 'self'; img-src data:; form-action 'self'; base-uri 'none'; "
        "frame-ancestors 'none'"
    )


def _digest(name: str) -> str:
    found = hashlib.sha256(_source(name).encode()).digest()
    return "sha256-" + base64.b64encode(found).decode()
