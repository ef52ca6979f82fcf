"""What somebody wants to see: the checked parameters of an address, and addresses made of them."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from urllib.parse import urlencode

LONGEST = 300  # a name of Kubernetes has 253 letters at most
STATES = ("in-sync", "drifted", "repairing", "failed", "ignored")
OFF = "off"


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Filters (empty: everything), the page of a list from 1, and whether it is to stand still.

    `q` is searched for in everything that is known of a row, its words each by itself. `name` and
    `uid` name the one pod that is shown, with its namespace.
    """

    path: str = "/"
    q: str = ""
    state: str = ""
    namespace: str = ""
    name: str = ""
    uid: str = ""
    kind: str = ""
    page: int = 1
    refresh: str = ""

    @classmethod
    def of(cls, path: str, query: Mapping[str, str]) -> "View":
        """Return what is asked for; a value that makes no sense is as none."""
        page = query.get("page", "")
        good = page.isascii() and page.isdigit() and len(page) < 7
        return cls(
            path=path,
            q=query.get("q", "").strip()[:LONGEST],
            state=query.get("state", "") if query.get("state") in STATES else "",
            **{key: query.get(key, "")[:LONGEST] for key in ("namespace", "name", "uid", "kind")},
            page=max(int(page), 1) if good else 1,
            refresh=OFF if query.get("refresh") == OFF else "",
        )

    @property
    def still(self) -> bool:
        return self.refresh == OFF

    @property
    def filtered(self) -> bool:
        return bool(self.q or self.state or self.namespace or self.kind)

    @property
    def href(self) -> str:
        """The address that shows it; what is as usual is left out."""
        said = {
            one.name: value
            for one in fields(View)
            if one.name != "path" and (value := getattr(self, one.name)) != one.default
        }
        return self.path + (f"?{urlencode(said)}" if said else "")

    def fits(self, *words: object) -> bool:
        """Whether every word of the search is somewhere among these."""
        shown = " ".join(str(word) for word in words).casefold()
        return all(word in shown for word in self.q.casefold().split())
