"""One thing that is said about a document, and the place in it that it is about."""

import json
import re
from dataclasses import dataclass

Place = tuple[str | int, ...]
"""Keys and indices from the top of a document. A word in a list stands for the entry so named."""

SHOWN = 320  # a name of Kubernetes, with its prefix, is no longer


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """`message` is a sentence; `hint`, if there is one, says what to do.

    `key` tells that it is about the key at the place and not about its value.
    """

    message: str
    at: Place = ()
    hint: str = ""
    key: bool = False

    @property
    def text(self) -> str:
        return f"{self.message}; {self.hint}" if self.hint else self.message


def path(place: Place) -> str:
    """Return a place as people write it: `spec.containers[0].name`, `metadata.labels["a/b"]`."""
    words = ""
    for step in place:
        if isinstance(step, int):
            words += f"[{step}]"
        elif re.fullmatch(r"[A-Za-z_][A-Za-z0-9_-]*", step):
            words += f".{step}"
        else:
            words += f"[{json.dumps(step if len(step) <= SHOWN else step[:SHOWN] + '...')}]"
    return words.removeprefix(".")
