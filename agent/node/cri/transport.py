"""One gRPC channel to one Unix socket: requests with deadlines, and errors with a meaning.

Answers are taken as bytes and parsed here: grpc.aio logs what it cannot parse and hands out None.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any, NoReturn, Protocol, Self, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from agent.kernel.netns import id_at
from agent.node.cri.errors import CriBroken, CriMissing, CriRefused, CriUnsupported, RuntimeAbsent

SERVICE = "/runtime.v1.RuntimeService/"

# The most that a runtime sends (containerd's and the kubelet's own limit), and so the bound of what
# one answer can take here.
MAX_ANSWER_BYTES = 16 * 1024 * 1024

OPTIONS = (
    # Channels to one target that are open together share their connection, and with it its
    # back-off, unless told not to: a new one would wait for the old one's next try.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", MAX_ANSWER_BYTES),
    ("grpc.default_authority", "localhost"),
    ("grpc.enable_http_proxy", 0),
)

ABSENT = frozenset({grpc.StatusCode.UNAVAILABLE})
SLOW_OR_WRONG = frozenset(
    {
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.DATA_LOSS,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    }
)


class Message(Protocol):
    """What the generated classes have in common."""

    def SerializeToString(self) -> bytes: ...

    @classmethod
    def FromString(cls, data: bytes) -> Self: ...


M = TypeVar("M", bound=Message)


class Transport:
    """A channel, for one event loop. It must not be made or used in a thread that did setns.

    gRPC starts its threads at the first use of a channel. In such a thread they would all be born
    in the pod's namespace and pin it until the channel is closed (measured).
    """

    def __init__(self, path: str) -> None:
        self.path = path
        _refuse_foreign_namespace()
        self._channel: Any = grpc.aio.insecure_channel(f"unix:{path}", options=OPTIONS)

    async def ask(self, method: str, request: Message, answer: type[M], timeout_s: float) -> M:
        """Send one request and return its answer.

        Raises: CriError, its kind by who is to blame.
        """
        call = self._channel.unary_unary(SERVICE + method)
        try:
            raw = await call(request.SerializeToString(), timeout=timeout_s)
            return answer.FromString(raw)
        except grpc.aio.AioRpcError as error:
            self._explain(method, error)
        except DecodeError as error:
            raise CriBroken(f"{method} at {self.path}: the answer is no CRI answer") from error
        except (asyncio.CancelledError, grpc.aio.UsageError) as error:
            self._raise_if_closed(method, error)

    async def stream(self, method: str, request: Message) -> AsyncGenerator[bytes, None]:
        """Yield the messages of a stream, unparsed, until the other side ends it.

        Raises: CriError.
        """
        call = None
        try:
            call = self._channel.unary_stream(SERVICE + method)(request.SerializeToString())
            async for raw in call:
                yield raw
        except grpc.aio.AioRpcError as error:
            self._explain(method, error)
        except (asyncio.CancelledError, grpc.aio.UsageError) as error:
            self._raise_if_closed(method, error)
        finally:
            if call is not None:
                call.cancel()

    async def close(self) -> None:
        """End what is under way with CriBroken and close the connection."""
        await self._channel.close()

    def _explain(self, method: str, error: Any) -> NoReturn:
        code, said = error.code(), str(error.details() or "").strip()
        kind: Callable[[str], Exception] = CriRefused
        if code in ABSENT:
            kind = RuntimeAbsent
        elif code is grpc.StatusCode.UNIMPLEMENTED:
            kind = CriUnsupported
        elif code is grpc.StatusCode.NOT_FOUND:
            kind = CriMissing
        elif code in SLOW_OR_WRONG:
            kind = CriBroken
        raise kind(f"{method} at {self.path}: {code.name}: {said}") from error

    def _raise_if_closed(self, method: str, error: BaseException) -> NoReturn:
        """Tell the two cancellations apart: this task's, and that of a call by `close`."""
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and (task is None or task.cancelling()):
            raise error
        raise CriBroken(f"{method} at {self.path}: the connection was closed") from error


def _refuse_foreign_namespace() -> None:
    if id_at("/proc/thread-self/ns/net") != id_at("/proc/self/ns/net"):
        raise RuntimeError("a gRPC channel must not be made in a thread that did setns")
