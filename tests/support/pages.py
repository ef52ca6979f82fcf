"""Reads the status page as those do who cannot see it: the tree, the names, the texts."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Self

from agent.observe.page.html import VOID

HEADINGS = ("h1", "h2", "h3", "h4", "h5", "h6")
SHAPES = frozenset({"rect", "line", "polygon"})


@dataclass
class Node:
    """An element; `children` are elements and texts."""

    name: str
    attributes: dict[str, str]
    children: list["Node | str"] = field(default_factory=list)

    def all(self, *names: str, **attributes: str) -> list["Node"]:
        """Return the elements below that have one of the names (or any), and these attributes."""
        return [
            node
            for node in self.below()
            if (not names or node.name in names)
            and all(node.attributes.get(key.rstrip("_")) == v for key, v in attributes.items())
        ]

    def one(self, *names: str, **attributes: str) -> "Node":
        (found,) = self.all(*names, **attributes)
        return found

    def below(self) -> Iterator["Node"]:
        for child in self.children:
            if isinstance(child, Node):
                yield child
                yield from child.below()

    @property
    def text(self) -> str:
        parts = (child if isinstance(child, str) else child.text for child in self.children)
        return "".join(parts)


class Page(HTMLParser):
    """The tree of a page; markup that a browser would have to mend is an AssertionError."""

    def __init__(self, markup: str) -> None:
        super().__init__()
        self.root = Node("", {})
        self._open = [self.root]
        assert markup.startswith("<!DOCTYPE html>\n<html ")
        self.feed(markup)
        self.close()
        assert self._open == [self.root]

    @classmethod
    def sound(cls, markup: str) -> Self:
        """Return a page that has what it needs for everybody to use it."""
        page = cls(markup)
        page.check()
        return page

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len(dict(attrs)) == len(attrs), f"{tag} says something twice: {attrs}"
        node = Node(tag, {key: value or "" for key, value in attrs})
        self._open[-1].children.append(node)
        if tag not in VOID:
            self._open.append(node)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop().name == tag

    def handle_data(self, data: str) -> None:
        self._open[-1].children.append(data)

    def check(self) -> None:
        """Whether everything has a name, and every name something that it is of."""
        root = self.root
        names = [node.attributes["id"] for node in root.below() if "id" in node.attributes]
        assert len(names) == len(set(names))
        assert root.one("html").attributes["lang"] == "en"
        assert root.one("head").one("title").text.strip()
        for landmark in ("header", "main", "footer", "h1"):
            root.one(landmark)
        self._check_headings()
        for node in root.below():
            self._check_node(node, names)

    def _check_headings(self) -> None:
        level = 0
        for heading in self.root.all(*HEADINGS):
            depth = HEADINGS.index(heading.name) + 1
            assert depth <= level + 1, f"{heading.text} skips a level"
            assert heading.text.strip()
            level = depth

    def _check_node(self, node: Node, names: list[str]) -> None:
        said = node.attributes
        assert not [key for key in said if key.startswith("on") or key == "style"], said
        for key in ("for", "aria-labelledby"):
            assert set(said.get(key, "").split()) <= set(names), said
        if node.name in ("a", "button", "summary", "caption", "th", "dt", "label"):
            assert node.text.strip(), node
        if node.name == "a":
            assert said["href"].startswith(("/", "#"))
        if node.name in ("input", "select") and said.get("type") != "hidden":
            assert self.root.all("label", for_=said["id"])
        if node.name == "th":
            assert said["scope"] in ("row", "col")
        if node.name == "table":
            node.one("caption")
        if node.name == "svg":
            assert said["role"] == "img"
            assert node.one("title").text
            assert node.one("desc").text
        if node.name == "nav":
            assert said["aria-label"]
        if node.name == "section":
            assert said["aria-labelledby"]
