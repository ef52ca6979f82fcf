"""What the list pages show, and what of it a client that is not on this host may see."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

Row = Mapping[str, Any]

PODS = ("namespace", "name", "captured", "backend", "reason", "state")
FINDINGS = ("kind", "severity", "owner")
EVENTS = ("time", "kind", "pod")
STATUS = ("version", "ready", "pending", "mode", "backend")
SOURCE = ("name", "connected")


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """Plain values as the daemon's JSON has them; events oldest first."""

    status: Row
    pods: Sequence[Row]
    findings: Sequence[Row]
    scanned: Row
    events: Sequence[Row]
    local: bool = True

    def for_strangers(self) -> "Given":
        """Return the names, states and reasons alone, which the metrics tell, too.

        Sentences and rules hold addresses, paths and what others wrote into annotations.
        """
        return replace(
            self,
            status={
                **_only(STATUS, self.status),
                "sources": [_only(SOURCE, source) for source in self.status["sources"]],
                "cni": self.status["cni"] and _only(("present",), self.status["cni"]),
            },
            pods=[_only(PODS, row) for row in self.pods],
            findings=[
                {**_only(FINDINGS, row), "where": {"pod": row["where"]["pod"]}}
                for row in self.findings
            ],
            scanned=_only(("namespaces", "time"), self.scanned),
            events=[_only(EVENTS, row) for row in self.events],
            local=False,
        )


def _only(keys: Sequence[str], row: Row) -> Row:
    return {key: row[key] for key in keys if key in row}
