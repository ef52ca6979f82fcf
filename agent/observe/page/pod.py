"""The page of one pod: why it is captured or not, what differs, and the ways of its traffic."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agent.explain.pod.ways import Way
from agent.observe.http import Answer
from agent.observe.page.drawing import drawn
from agent.observe.page.frame import Frame, document
from agent.observe.page.given import Row
from agent.observe.page.html import Content, tag
from agent.observe.page.lists import FINDING_COLUMNS
from agent.observe.page.parts import Column, mark, section, table, terms, when
from agent.observe.page.view import View

NEWEST = 10
MOST_LINES = 100
DEFAULT = "default"

Explained = Mapping[str, Any]

SETTING_COLUMNS = (
    Column("Setting", lambda row: tag("code", row["name"])),
    Column("Value", lambda row: tag("code", row["value"]) if row["value"] else "nothing"),
    Column("From", lambda row: row["by"]),
)
EVENT_COLUMNS = (
    Column("Time (UTC)", lambda row: when(row["time"])),
    Column("Event", lambda row: row["kind"]),
    Column("What", lambda row: row["message"]),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """The ways of a pod's connections; `not_walked` says what they leave out, `why_none` why."""

    ways: tuple[Way, ...] = ()
    not_walked: tuple[str, ...] = ()
    why_none: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What is shown of a pod. `explained` is what `Explain` of the gRPC service answers."""

    explained: Explained
    drawn: Drawn
    findings: Sequence[Row]
    events: Sequence[Row]


def pod_page(frame: Frame, view: View, shown: Shown) -> Answer:
    """Return the page of a pod."""
    row = shown.explained["pod"]
    title = f"{row['namespace']}/{row['name']}" if row["namespace"] else str(row["name"])
    return document(
        frame,
        view,
        title,
        tag("p", tag("a", "All pods", href=View(refresh=view.refresh).href)),
        tag("h1", title),
        section("Capture", _capture(shown.explained), name="capture"),
        section("The way of its traffic", _ways(shown), name="ways"),
        section("What differs", _differences(shown.explained), name="differences"),
        section("Findings", _findings(shown.findings), name="findings"),
        section("Events", _events(shown.events), name="events"),
        section("Settings", _settings(shown.explained), name="settings"),
    )


def missing_page(frame: Frame, view: View, why: str, status: int) -> Answer:
    """Return a page that says why there is nothing to show."""
    back = tag("p", tag("a", "All pods", href=View(refresh=view.refresh).href))
    return document(frame, view, "Nothing to show", tag("h1", why), back, status=status)


def _capture(explained: Explained) -> Iterator[Content]:
    row, decision = explained["pod"], explained["decision"]
    wanted = "should be captured" if decision["captured"] else "is left alone"
    if not decision["certain"]:
        wanted += ", as far as is known yet"
    yield tag("p", mark(row["state"]), " ", row["text"])
    yield terms(
        (
            ("Decision", f"It {wanted}: {decision['text']} ({decision['reason']})"),
            ("Backend", _chosen(explained["backend"]) if decision["captured"] else "none"),
            ("Mode", _chosen(explained["mode"])),
            ("Namespace of the network", row["netns"] or "none of its own"),
            ("UID", row["uid"] or "none"),
            ("Known from", row["source"]),
        )
    )
    remarks = [*decision["problems"], *decision["warnings"]]
    if remarks:
        yield tag("div", tag("ul", (tag("li", one) for one in remarks)), class_="notice")


def _chosen(choice: Row) -> str:
    return f"{choice['value']} ({choice['by']})"


def _ways(shown: Shown) -> Iterator[Content]:
    """Yield the drawings, which are of what is loaded now, whether or not it should be so."""
    if shown.drawn.why_none:
        yield tag("p", shown.drawn.why_none, class_="notice")
        return
    row = shown.explained["pod"]
    if not row["captured"]:
        yield tag("p", "It is not to be captured. This is what becomes of its connections now.")
    elif row["state"] != "in-sync":
        yield tag(
            "p",
            f"It is {row['state']}: this is what becomes of its connections now, and not what it "
            "should be.",
            class_="notice bad",
        )
    else:
        yield tag("p", "What becomes of new connections, by what is loaded now.")
    drawings = (drawn(way, number) for number, way in enumerate(shown.drawn.ways, 1))
    yield tag("div", drawings, class_="ways")
    if shown.drawn.not_walked:
        left_out = (tag("li", one) for one in shown.drawn.not_walked)
        yield tag("div", "The drawings leave out:", tag("ul", left_out), class_="notice")


def _differences(explained: Explained) -> Content:
    found = explained.get("findings")
    if found is None:
        return tag("p", "Nothing is compared: it is not to be captured.")
    if "error" in found:
        return tag("p", f"It could not be compared: {found['error']}", class_="notice bad")
    lines = [*found["foreign"], *found["differences"], *found["warnings"]]
    if not lines:
        return tag("p", "Nothing: what is loaded is what should be.")
    more = len(lines) - MOST_LINES
    return (
        tag("ul", (tag("li", tag("code", line)) for line in lines[:MOST_LINES]), class_="pair"),
        tag("p", f"And {more} more.") if more > 0 else None,
    )


def _findings(findings: Sequence[Row]) -> Content:
    if not findings:
        return tag("p", "None.")
    return table("What was found in its namespace", FINDING_COLUMNS, findings)


def _events(events: Sequence[Row]) -> Content:
    newest = list(reversed(events))[:NEWEST]
    if not newest:
        return tag("p", "None.")
    return table(f"{len(newest)} of {len(events)} events", EVENT_COLUMNS, newest)


def _settings(explained: Explained) -> Content:
    rows = explained.get("settings")
    if rows is None:
        return tag("p", "None: it is not to be captured.")
    given = [row for row in rows if row["by"] != DEFAULT]
    rest = [row for row in rows if row["by"] == DEFAULT]
    title = tag("summary", f"{len(rest)} settings as they are by default")
    return (
        table("What somebody said", SETTING_COLUMNS, given) if given else None,
        tag("details", title, table("By default", SETTING_COLUMNS, rest), id="defaults"),
    )
