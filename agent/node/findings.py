"""What a look into a namespace found."""

from collections.abc import Mapping
from dataclasses import dataclass

SHOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """All that is not as it should be, a line each; `foreign` are rules of others ahead of ours."""

    backend: str
    in_sync: bool
    differences: tuple[str, ...]
    foreign: tuple[str, ...]
    warnings: tuple[str, ...]
    guarded: bool  # whether the standing guard is whole: nothing gets past the proxy
    bare: bool  # whether there never was a capture
    passing: bool  # whether some processes pass until the proxy listens

    @classmethod
    def of(cls, found: Mapping[str, object]) -> "Findings":
        """Return what the worker found, as it answers the job `check`."""
        lines = {key: _lines(found[key]) for key in ("differences", "foreign", "warnings")}
        return cls(
            backend=str(found["backend"]),
            in_sync=bool(found["in_sync"]),
            guarded=bool(found["guarded"]),
            bare=bool(found.get("bare")),
            passing=bool(found.get("passing")),
            **lines,
        )

    @property
    def text(self) -> str:
        """The first few lines in one, and how many more there are."""
        lines = (*self.foreign, *self.differences)
        more = len(lines) - SHOWN
        return "; ".join(lines[:SHOWN]) + (f"; and {more} more" if more > 0 else "")


def _lines(value: object) -> tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, (list, tuple)) else ()
