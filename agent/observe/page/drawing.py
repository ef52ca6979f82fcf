"""Draws the way of a connection, top down, and says the same as a list."""

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from agent.explain.pod.ways import Stop, Way
from agent.model.ruleset import Family
from agent.observe.page.html import Content, Html, tag

WIDTH, MARGIN, PAD, GAP = 320, 2, 10, 26
LINE, FIRST = 17, 18  # between lines of text, and from the top of a box to the first
TITLE_LETTERS, LETTERS = 36, 44  # that fit into a line of a box

DIRECTIONS = {
    "out": "Out of the pod",
    "in": "Into the pod",
    "dns": "DNS queries",
    "proxy": "The proxy's own traffic",
}
FAMILIES = {family.value: family.label for family in Family}


@dataclass(frozen=True, slots=True)
class Box:
    """One place in a drawing: a title and sentences below it; `look` chooses its colours."""

    title: str
    said: Sequence[str]
    look: str

    def lines(self) -> list[tuple[str, str]]:
        """Return what is written into it, line by line, each with its class."""
        title = textwrap.wrap(self.title, TITLE_LETTERS)
        small = (line for sentence in self.said for line in textwrap.wrap(sentence, LETTERS))
        return [*((line, "strong") for line in title), *((line, "small") for line in small)]


def drawn(way: Way, number: int) -> Html:
    """Return one way; `number` tells its drawing from the others of a page."""
    direction, family = DIRECTIONS.get(way.direction), FAMILIES.get(way.family)
    title = f"{direction or way.direction}, {family or way.family}"
    start, end = tag("li", way.start, " makes the connection."), tag("li", way.summary)
    return tag(
        "div",
        tag("h3", title),
        tag("p", way.packet, ": ", tag("strong", way.result), "."),
        _svg(way, title, f"way{number}"),
        tag("ol", start, _items(way), end),
        class_="way",
    )


# --- the same as text -----------------------------------------------------------------------------


def _items(way: Way) -> Iterator[Html]:
    for stop in way.stops:
        rule = f" rule {stop.number}" if stop.number else ""
        yield tag(
            "li",
            tag("strong", f"{stop.at}{rule}"),
            f" ({stop.where}): {stop.why}",
            "" if stop.sure else ", if it matches, which nobody can foresee",
            tag("span", "; from the setting ", tag("code", stop.setting)) if stop.setting else None,
            (tag("br"), tag("code", stop.text)) if stop.text else None,
        )


# --- the drawing ----------------------------------------------------------------------------------


def _svg(way: Way, title: str, name: str) -> Html:
    boxes = list(_boxes(way))
    parts: list[Content] = []
    top = MARGIN
    for number, box in enumerate(boxes):
        if number:
            parts.append(_arrow(top, top := top + GAP))
        height = FIRST + LINE * (len(box.lines()) - 1) + PAD
        parts.append(_box(box, top, height))
        top += height
    path = " -> ".join(box.title for box in boxes)
    return tag(
        "svg",
        tag("title", f"{title}: {way.packet}", id=f"{name}-title"),
        tag("desc", f"{path}. {way.summary}", id=f"{name}-desc"),
        parts,
        viewBox=f"0 0 {WIDTH} {top + MARGIN}",
        role="img",
        aria_labelledby=f"{name}-title {name}-desc",
    )


def _boxes(way: Way) -> Iterator[Box]:
    yield Box(way.start, (way.packet,), "ends")
    for stop in way.stops:
        look = stop.kind if stop.sure else f"{stop.kind} unsure"
        yield Box(_title(stop), (stop.where, _what(stop)), look)
    yield Box(way.end, (way.result,), f"ends {way.fate}")


def _title(stop: Stop) -> str:
    if stop.kind == "program":
        return f"program {stop.at}"
    return f"{stop.at} rule {stop.number}" if stop.number else stop.at


def _what(stop: Stop) -> str:
    passed = f"after {stop.missed} that did not match: " if stop.missed else ""
    setting = f" [{stop.setting}]" if stop.setting else ""
    return f"{passed}{stop.why}{setting}"


def _box(box: Box, top: int, height: int) -> Html:
    frame = tag("rect", x=MARGIN, y=top, width=WIDTH - 2 * MARGIN, height=height, rx=6)
    first = top + FIRST
    lines = (
        tag("text", line, x=MARGIN + PAD, y=first + LINE * number, class_=look)
        for number, (line, look) in enumerate(box.lines())
    )
    return tag("g", frame, lines, class_=box.look)


def _arrow(start: int, end: int) -> Html:
    middle = WIDTH // 2
    tip = f"{middle - 5},{end - 8} {middle + 5},{end - 8} {middle},{end - 1}"
    return tag(
        "g",
        tag("line", x1=middle, y1=start, x2=middle, y2=end - 8),
        tag("polygon", points=tip, class_="tip"),
    )
