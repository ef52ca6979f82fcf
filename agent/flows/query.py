"""What is asked for, and the programs that answer exactly that. Pure."""

from dataclasses import dataclass

RING_BYTES = 1 << 20
"""What waits to be read: about 9000 connections."""

MAX_WATCHED = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """What the programs are asked for; an empty tuple stands for all.

    `uids` are the node's, `ports` those that were dialled. `netns` is the cookie of the only
    namespace that is asked about. Inbound connections are told of whatever their port and user.
    """

    uids: tuple[int, ...] = ()
    ports: tuple[int, ...] = ()
    netns: int | None = None


def source(query: Query, programs: str, *, page_bytes: int, dialled_pin: str | None) -> str:
    """Return the programs (programs.c), made for one question.

    `dialled_pin` is where the eBPF backend keeps who was dialled, None if it is not loaded.
    """
    lines = [
        f"#define PAGE_SIZE {page_bytes}",
        f"#define RING_PAGES {RING_BYTES // page_bytes}",
        f"#define MAX_WATCHED {MAX_WATCHED}",
        f"#define ASKS_UID(uid) {_any('uid', query.uids)}",
        f"#define ASKS_PORT(port) {_any('port', query.ports)}",
    ]
    if query.netns is not None:
        lines.append(f"#define NETNS {query.netns}ULL")
    if dialled_pin is not None:
        lines.append(f'#define DIALLED "maps/sk_storage:{dialled_pin}"')
    return "\n".join((*lines, "#line 1", programs))


def _any(name: str, values: tuple[int, ...]) -> str:
    return "(" + (" || ".join(f"({name}) == {value}u" for value in values) or "1") + ")"
