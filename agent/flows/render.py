"""A connection for people (one line) and for machines (one document a line). Pure."""

from datetime import UTC, datetime

from agent.explain.effects import endpoint
from agent.explain.pod.page import plain
from agent.flows.event import Endpoint
from agent.flows.fate import Flow

COLUMNS = ("time", "pod", "way", "process", "uid", "destination", "what became of it")
# So wide is each column, but for the last; what is longer is not cut and moves the rest.
WIDTHS = (12, 20, 3, 20, 5, 24)


def heading() -> str:
    return _line(tuple(column.upper() for column in COLUMNS), COLUMNS[-1].upper())


def row(flow: Flow, title: str, at: datetime, outcome: str) -> str:
    """Return one line; `outcome` is the flow's text as the terminal is to have it."""
    process = f"{flow.process or '?'}/{flow.pid}" if flow.pid else flow.process or "?"
    cells = (
        at.astimezone().strftime("%H:%M:%S.%f")[:12],
        title,
        way(flow),
        process,
        "?" if flow.uid is None else str(flow.uid),
        (_endpoint(flow.destination) or "?") + ("/udp" if flow.protocol == "udp" else ""),
    )
    return _line(tuple(plain(cell) for cell in cells), outcome)


def _endpoint(found: Endpoint | None) -> str | None:
    """Return it as text; a datagram that was dropped has no source yet."""
    return endpoint(*found) if found is not None and found[1] else None


def way(flow: Flow) -> str:
    return "in" if flow.inbound else "out"


def _line(cells: tuple[str, ...], last: str) -> str:
    padded = (cell.ljust(width) for cell, width in zip(cells, WIDTHS, strict=False))
    return f"{' '.join(padded)} {last}"


def to_json(flow: Flow, title: str, netns: str, at: datetime) -> dict[str, object]:
    return {
        "time": at.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z"),
        "pod": title,
        "netns": netns,
        "direction": way(flow),
        "protocol": flow.protocol,
        "pid": flow.pid or None,
        "process": flow.process or None,
        "uid": flow.uid,
        "source": _endpoint(flow.source),
        "destination": _endpoint(flow.destination),
        "became": flow.became.value,
        "port": flow.port,
        "setting": flow.setting,
        "result": flow.result.name.lower(),
        "took_ms": round(flow.took_ms, 3),
        "text": flow.text,
    }
