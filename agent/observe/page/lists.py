"""The pages that list: pods with the state of the node, findings, events."""

from collections import Counter
from collections.abc import Iterator, Sequence

from agent.observe.http import Answer
from agent.observe.page.frame import Frame, document
from agent.observe.page.given import Given, Row
from agent.observe.page.html import Content, Html, join, tag
from agent.observe.page.parts import (
    Column,
    choice,
    mark,
    paged,
    search,
    section,
    table,
    terms,
    when,
)
from agent.observe.page.view import STATES, View

FEW = 5  # findings and events beside the pods; each has a page of its own
MOST_CHOICES = 200
SEVERITIES = ("critical", "warning", "info")

Rows = Sequence[Row]


def pods_page(frame: Frame, view: View, given: Given) -> Answer:
    """Return the page of the node: how it is, its pods worst first, what was found and happened."""
    findings, events = _worst(given.findings), _newest(given.events)
    return document(
        frame,
        view,
        "Pods",
        tag("h1", "Pods and their capture"),
        section("This node", _node(given, view.refresh), name="node", told=True),
        section("Pods", _pods(view, given), name="pods", form=_pods_form(view, given.pods)),
        section("Findings", _few(findings, FINDING_COLUMNS, view, "/findings"), name="findings"),
        section("Events", _few(events, EVENT_COLUMNS, view, "/events"), name="events"),
        _restricted(given),
    )


def findings_page(frame: Frame, view: View, given: Given) -> Answer:
    """Return the page of what others left behind, by the last scan."""
    title, scanned = "What others left behind", _scanned(given.scanned)
    rows = _worst(given.findings)
    return _list_page(frame, view, given, title, "Findings", FINDING_COLUMNS, rows, scanned)


def events_page(frame: Frame, view: View, given: Given) -> Answer:
    """Return the page of what happened, newest first."""
    rows = _newest(given.events)
    return _list_page(frame, view, given, "What happened", "Events", EVENT_COLUMNS, rows)


def _list_page(
    frame: Frame,
    view: View,
    given: Given,
    title: str,
    what: str,
    columns: Sequence[Column],
    rows: Rows,
    before: Content = None,
) -> Answer:
    """Return a page with one list that can be searched, by kind as well."""
    shown = [r for r in rows if view.kind in ("", r["kind"]) and view.fits(*_values(r))]
    name = what.lower()
    kinds = sorted({str(row["kind"]) for row in rows})[:MOST_CHOICES]
    form = search(view, name, choice("kind", "Kind", kinds, view.kind))
    listed = paged(what, view, columns, shown, _none(rows, name))
    part = section(what, before, listed, name=name, form=form)
    return document(frame, view, what, tag("h1", title), part, _restricted(given))


# --- the node -------------------------------------------------------------------------------------


def _node(given: Given, refresh: str) -> Iterator[Content]:
    status, states = given.status, Counter(row["state"] for row in given.pods)
    counted = [
        (" ", tag("a", f"{states[state]} {state}", href=View(state=state, refresh=refresh).href))
        for state in STATES
        if states[state]
    ]
    word = "Ready" if status["ready"] else "Not ready"
    yield tag("p", tag("strong", f"{word}. "), _number(given.pods), counted or " none")
    if status["pending"]:
        waits = (tag("li", reason) for reason in status["pending"])
        yield tag("div", "It waits for:", tag("ul", waits), class_="notice bad")
    yield terms(
        (
            ("Mode", status["mode"]),
            ("Backend", status["backend"]),
            ("CNI plugin", _plugin(status["cni"])),
            *(_source(source) for source in status["sources"]),
        )
    )


def _number(pods: Rows) -> str:
    return "1 pod:" if len(pods) == 1 else f"{len(pods)} pods:"


def _plugin(cni: Row | None) -> str:
    if cni is None:
        return "not kept by this agent"
    if cni["present"]:
        return "in the chain"
    return ": ".join(filter(None, ("not in the chain", cni.get("reason"))))


def _source(source: Row) -> tuple[str, Content]:
    word = "connected" if source["connected"] else "not connected"
    detail = source.get("detail")
    return f"Source {source['name']}", f"{word}: {detail}" if detail else word


def _restricted(given: Given) -> Html | None:
    if given.local:
        return None
    why = "Reasons in full, rules and the drawings of each pod are shown to this host only: "
    how = "open the page there, or through kubectl port-forward or an SSH tunnel."
    return tag("p", why, how, class_="notice")


# --- pods -----------------------------------------------------------------------------------------


def _pods(view: View, given: Given) -> tuple[Html, ...]:
    rows = sorted(
        (row for row in given.pods if _wanted(view, row)),
        key=lambda row: (_badness(row), row["namespace"], row["name"]),
    )
    columns = POD_COLUMNS if given.local else (Column("Pod", _name), *POD_COLUMNS[1:])
    return paged("Pods", view, columns, rows, _none(given.pods, "pods"))


def _wanted(view: View, row: Row) -> bool:
    return (
        view.state in ("", row["state"])
        and view.namespace in ("", row["namespace"])
        and view.fits(_name(row), *_values(row))
    )


def _badness(row: Row) -> int:
    order = ("failed", "drifted", "repairing", "in-sync", "ignored")
    return order.index(row["state"]) if row["state"] in order else 0


def _pods_form(view: View, pods: Rows) -> Html:
    namespaces = sorted({str(row["namespace"]) for row in pods} - {""})[:MOST_CHOICES]
    return search(
        view,
        "pods",
        choice("state", "State", STATES, view.state),
        choice("namespace", "Namespace", namespaces, view.namespace),
    )


def _name(row: Row) -> str:
    return f"{row['namespace']}/{row['name']}" if row["namespace"] else str(row["name"])


def _linked(row: Row) -> Html:
    view = View(path="/pod", namespace=row["namespace"], name=row["name"], uid=row["uid"])
    return tag("a", _name(row), href=view.href)


def _why(row: Row) -> Content:
    text = row.get("text")
    return (text, " ", tag("span", f"({row['reason']})", class_="dim")) if text else row["reason"]


# --- findings and events --------------------------------------------------------------------------


def _found(pod: str) -> Html:
    """Return a pod's name as a link to it among the pods; it may be gone."""
    return tag("a", pod, href=View(q=pod).href) if pod else Html()


def _finding_where(row: Row) -> Content:
    where = row["where"]
    return _found(where["pod"]) if where["pod"] else where.get("netns") or "this node"


def _finding_means(row: Row) -> Content:
    fix = row.get("fix")
    return row.get("explanation"), (tag("br"), tag("code", fix)) if fix else None


def _scanned(scanned: Row) -> Html:
    if not scanned["time"]:
        return tag("p", "Nobody has looked yet.", class_="dim")
    failed = tuple(tag("li", one) for one in scanned.get("failed", ()))
    seen = tag("p", f"{scanned['namespaces']} namespaces seen, ", when(scanned["time"]), " UTC.")
    unseen = tag("div", "Not seen:", tag("ul", failed), class_="notice") if failed else None
    return join((seen, unseen))


def _worst(findings: Rows) -> Rows:
    return sorted(findings, key=lambda row: SEVERITIES.index(row["severity"]))


def _newest(events: Rows) -> Rows:
    return list(reversed(events))


def _few(rows: Rows, columns: Sequence[Column], view: View, path: str) -> Content:
    name = path.strip("/")
    if not rows:
        return tag("p", f"No {name}.")
    link = tag("a", f"All {name}", href=View(path=path, refresh=view.refresh).href)
    shown = rows[:FEW]
    caption = f"{len(shown)} of {len(rows)} {name}"
    return table(caption, columns, shown), tag("p", link, class_="pages")


# --- what lists share -----------------------------------------------------------------------------


def _none(rows: Rows, what: str) -> str:
    return f"None of the {len(rows)} {what} fits." if rows else f"There are no {what}."


def _values(row: Row) -> Iterator[object]:
    """Yield everything that a row holds, nested or not."""
    for value in row.values():
        if isinstance(value, dict):
            yield from _values(value)
        elif isinstance(value, (list, tuple)):
            yield from value
        elif value is not None:
            yield value


FINDING_COLUMNS = (
    Column("Kind", lambda row: row["kind"]),
    Column("Severity", lambda row: mark(row["severity"])),
    Column("Where", _finding_where),
    Column("Owner", lambda row: row["owner"]),
    Column("What it means, and what ends it", _finding_means),
)
EVENT_COLUMNS = (
    Column("Time (UTC)", lambda row: when(row["time"])),
    Column("Event", lambda row: row["kind"]),
    Column("Pod", lambda row: _found(row["pod"])),
    Column("What", lambda row: row.get("message")),
)
POD_COLUMNS = (
    Column("Pod", _linked),
    Column("State", lambda row: mark(row["state"])),
    Column("Backend", lambda row: row["backend"] or "none"),
    Column("Why", _why),
)
