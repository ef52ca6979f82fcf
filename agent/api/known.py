"""What the gRPC service needs of the daemon. Light: it is there before gRPC is loaded."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

Row = Mapping[str, Any]


class Change(Protocol):
    """One change: `kind` is a field of the message Change, `what` that field's plain values."""

    @property
    def kind(self) -> str: ...
    @property
    def what(self) -> Mapping[str, object]: ...


class Watch(Protocol):
    """A subscription. `next` raises AgentError once too many changes waited."""

    async def next(self) -> Change: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """The ways to ask the daemon; rows are plain values, as its JSON has them.

    `pod` and `explain` take a pod's namespace, name and uid, and raise AgentError if there is no
    such pod; `events` are those after a number; `scan` is the last one.
    """

    pods: Callable[[], Sequence[Row]]
    pod: Callable[[Row], Awaitable[Row]]
    events: Callable[[int], Sequence[Row]]
    watch: Callable[[], AbstractContextManager[Watch]]
    explain: Callable[[Row], Awaitable[Row]]
    scan: Callable[[], Row]
