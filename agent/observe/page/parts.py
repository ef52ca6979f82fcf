"""What pages are made of: lists with search and paging, tables, marks."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from agent.observe.page.given import Row
from agent.observe.page.html import Content, Html, tag
from agent.observe.page.view import View

ROWS_A_PAGE = 50

LOOKS = {
    **{"in-sync": "good", "ignored": "calm", "repairing": "warn", "drifted": "bad"},
    **{"failed": "bad", "critical": "bad", "warning": "warn", "info": "calm"},
}


def mark(word: str) -> Html:
    """Return a word with the colour of what it means; the word alone says it, too."""
    return tag("span", word, class_=f"tag {LOOKS.get(word, 'calm')}")


def when(seconds: object) -> Html:
    """Return a time (seconds since the epoch) to the second, in UTC."""
    try:
        found = datetime.fromtimestamp(float(str(seconds)), UTC)
    except (ValueError, OverflowError, OSError):
        return tag("span", "at an unknown time")
    shown = found.strftime("%Y-%m-%d %H:%M:%S")
    return tag("time", shown, datetime=found.strftime("%Y-%m-%dT%H:%M:%SZ"))


def section(
    title: str, *content: Content, name: str, form: Content = None, told: bool = False
) -> Html:
    """Return a part of a page with a heading. `content` renews itself, `form` stays as it is.

    What changes in a part that is `told` is read out by a screen reader.
    """
    heading = tag("h2", title, id=f"{name}-title")
    inside = tag("div", content, id=name, data_live=True, aria_live="polite" if told else None)
    return tag("section", heading, form, inside, aria_labelledby=f"{name}-title")


@dataclass(frozen=True, slots=True)
class Column:
    """A column: its heading and what stands in it. The first of a table names the row."""

    title: str
    cell: Callable[[Row], Content]


def table(caption: str, columns: Sequence[Column], rows: Iterable[Row]) -> Html:
    """Return a table. The roles stay where a small screen shows a row as a block."""
    heads = (tag("th", one.title, scope="col", role="columnheader") for one in columns)
    first, *rest = columns
    body = (
        tag(
            "tr",
            tag("th", first.cell(row), scope="row", role="rowheader"),
            (tag("td", one.cell(row), role="cell", data_of=one.title) for one in rest),
            role="row",
        )
        for row in rows
    )
    return tag(
        "table",
        tag("caption", caption),
        tag("thead", tag("tr", heads, role="row"), role="rowgroup"),
        tag("tbody", body, role="rowgroup"),
        role="table",
    )


def paged(
    what: str, view: View, columns: Sequence[Column], rows: Sequence[Row], none: str
) -> tuple[Html, ...]:
    """Return the page of a list that is asked for; one beyond the last is the last."""
    if not rows:
        return (tag("p", none),)
    pages = -(-len(rows) // ROWS_A_PAGE)
    view = replace(view, page=min(view.page, pages))
    first = (view.page - 1) * ROWS_A_PAGE
    shown = rows[first : first + ROWS_A_PAGE]
    caption = f"{what} {first + 1} to {first + len(shown)} of {len(rows)}"
    return table(caption, columns, shown), _pages(what, view, pages)


def _pages(what: str, view: View, pages: int) -> Html:
    if pages == 1:
        return Html()
    here, links = view.page, []
    if here > 1:
        links += [("First", 1), ("Previous", here - 1)]
    if here < pages:
        links += [("Next", here + 1), ("Last", pages)]
    return tag(
        "nav",
        tag("span", f"Page {here} of {pages}"),
        (tag("a", name, href=replace(view, page=number).href) for name, number in links),
        class_="pages",
        aria_label=f"Pages of {what.lower()}",
    )


def search(view: View, what: str, *fields: Content) -> Html:
    """Return the form that searches a list; it needs no script."""
    return tag(
        "form",
        tag("div", tag("label", f"Search {what}", for_="q"), _box(view)),
        fields,
        tag("input", type="hidden", name="refresh", value=view.refresh) if view.refresh else None,
        tag("button", "Show", type="submit"),
        tag("a", "Show all", href=View(path=view.path, refresh=view.refresh).href)
        if view.filtered
        else None,
        role="search",
        method="get",
        action=view.path,
    )


def _box(view: View) -> Html:
    return tag("input", type="search", id="q", name="q", value=view.q, autocomplete="off")


def choice(name: str, title: str, values: Iterable[str], chosen: str) -> Html:
    """Return a list to choose one value from, or any; what was chosen is in it, be it gone."""
    values = dict.fromkeys((*values, chosen) if chosen else values)
    options = (tag("option", one, value=one, selected=one == chosen) for one in values)
    picked = tag("select", tag("option", "any", value=""), options, id=name, name=name)
    return tag("div", tag("label", title, for_=name), picked)


def terms(pairs: Iterable[tuple[str, Content]]) -> Html:
    """Return names and what they stand for."""
    found = (tag("div", tag("dt", name), tag("dd", value)) for name, value in pairs)
    return tag("dl", found)
