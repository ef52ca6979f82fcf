"""What a plain scalar of YAML means: one answer is Kubernetes', the other is this project's own."""

import re

_DECIMAL = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_INTEGER = re.compile(r"[-+]?(0b[01]+|0x[0-9a-fA-F]+|0o[0-7]+|0[0-7]*|[1-9][0-9]*)")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NO_NUMBER = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_NULL = frozenset({"", "~", "null", "Null", "NULL"})
_TRUE = frozenset({"true", "yes", "on", "y"})
_FALSE = frozenset({"false", "no", "off", "n"})

# More digits than this do not fit into 64 bits, and Kubernetes' parser makes a float of them.
_INTEGER_DIGITS = 19


def kubernetes(text: str) -> object:
    """Return what sigs.k8s.io/yaml makes of it: YAML 1.1 without times and without base 60."""
    if text in _NULL:
        return None
    word = text.lower()
    if word in _TRUE | _FALSE and text in (word, word.upper(), word.capitalize()):
        return word in _TRUE
    if text[0] not in "-+.0123456789":
        return text
    digits = text.replace("_", "")
    if _INTEGER.fullmatch(digits) and len(digits) <= _INTEGER_DIGITS:
        return _integer(digits)
    if _FLOAT.fullmatch(digits):
        return float(digits)
    return float(word.replace(".", "")) if _NO_NUMBER.fullmatch(text) else text


def _integer(digits: str) -> int:
    bare = digits.lstrip("-+")
    if len(bare) > 1 and bare[0] == "0" and bare[1].isdigit():
        bare = f"0o{bare[1:]}"
    return -int(bare, 0) if digits[0] == "-" else int(bare, 0)


def documented(text: str) -> object:
    """Return the meaning in files of this project: 0x50, 010, 22:30, 1e3 and 1_000 stay text.

    Raises: ValueError for a number of so many digits that Python refuses it.
    """
    if _DECIMAL.fullmatch(text):
        return int(text)
    found = kubernetes(text)
    number = isinstance(found, (int, float)) and not isinstance(found, bool)
    letter = isinstance(found, bool) and len(text) == 1
    return text if letter or (number and "." not in text) else found
