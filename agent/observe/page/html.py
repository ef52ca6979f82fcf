"""Markup from values. Whatever is not `Html` already is text, and text can do nothing to a page."""

from collections.abc import Mapping
from types import GeneratorType

TEXT = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;"})
VALUE = TEXT | {ord('"'): "&quot;"}  # every value stands in double quotes
# Elements without content (HTML standard, 13.1.2).
VOID = frozenset({"base", "br", "hr", "img", "input", "link", "meta", "wbr"})


class Html(str):
    """Markup that this module made, or that stands in our sources."""

    __slots__ = ()


Content = object
"""Html, text, a number, None (nothing), or any nesting of them."""
NESTED = (tuple, list, GeneratorType)  # real types: asking for Iterable is most of the work


def text(value: object, escapes: Mapping[int, str] = TEXT) -> Html:
    """Return a value as text. What cannot be printed, and what turns the writing, is U+FFFD."""
    shown = str(value)
    if not shown.isprintable():
        shown = "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in shown)
    return Html(shown.translate(escapes))


def join(content: Content) -> Html:
    """Return one piece of markup from content of any nesting."""
    if content is None:
        return Html()
    if isinstance(content, Html):
        return content
    if isinstance(content, NESTED):
        return Html("".join(map(join, content)))
    return text(content)


def tag(name: str, /, *content: Content, **attributes: object) -> Html:
    """Return an element, spelt as a browser spells it when it is asked for the markup of a page.

    `class_` is class, `aria_label` is aria-label. An attribute that is True has an empty value; one
    that is None or False is left out.
    """
    said = "".join(_attribute(key, value) for key, value in attributes.items())
    if name in VOID:
        return Html(f"<{name}{said}>")
    return Html(f"<{name}{said}>{join(content)}</{name}>")


def _attribute(key: str, value: object) -> str:
    if value is None or value is False:
        return ""
    shown = "" if value is True else text(value, VALUE)
    return f' {key.rstrip("_").replace("_", "-")}="{shown}"'
