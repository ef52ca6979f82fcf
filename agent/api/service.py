"""The service intercept.v1.Agent: what the daemon knows, as the messages of agent.proto.

A method of the class is a method of the service: to add one, name it in agent.proto, `make proto`,
and write it here.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Any, TypeVar

import grpc
import grpc.aio
from google.protobuf.json_format import ParseDict
from google.protobuf.message_factory import GetMessageClass

from agent.api import agent_pb2
from agent.api.known import Known, Row
from agent.api.known import Watch as Watching
from agent.model.errors import AgentError

SERVICE = agent_pb2.DESCRIPTOR.services_by_name["Agent"]
TAKE_S = 30.0

M = TypeVar("M")


class Agent:
    """Answers the calls. A client is given `take_s` seconds to take a message of a stream."""

    def __init__(self, known: Known, take_s: float = TAKE_S) -> None:
        self._known = known
        self._take_s = take_s

    async def List(self, request: Any, context: Any) -> Any:
        rows = (row for row in self._known.pods() if _in(request.namespace, row))
        return agent_pb2.ListReply(pods=[message(agent_pb2.Pod, row) for row in rows])

    async def Get(self, request: Any, context: Any) -> Any:
        return message(agent_pb2.Pod, await _about_one(self._known.pod, request, context))

    async def Explain(self, request: Any, context: Any) -> Any:
        found = await _about_one(self._known.explain, request, context)
        return message(agent_pb2.Explanation, found)

    async def Scan(self, request: Any, context: Any) -> Any:
        return message(agent_pb2.ScanReply, self._known.scan())

    async def Watch(self, request: Any, context: Any) -> None:
        why = f"no message was taken for {self._take_s:.0f} s"
        with self._known.watch() as watch, suppress(TimeoutError):
            async with aclosing(self._changes(request, watch)) as changes:
                async for change in changes:
                    async with asyncio.timeout(self._take_s):
                        await context.write(change)
            why = "too many changes waited to be taken"
        said = f"this watcher is too slow: {why}; watch again for the present state"
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, said)

    async def _changes(self, request: Any, watch: Watching) -> AsyncGenerator[Any, None]:
        """Yield what one watcher is told; ends when too much waited for it."""
        namespace = request.namespace
        present = [row for row in self._known.pods() if _in(namespace, row)]
        events: Sequence[Row] = ()
        if request.HasField("after_event"):
            events = self._known.events(request.after_event)
        for row in present:
            yield message(agent_pb2.Change, {"pod": row})
        yield agent_pb2.Change(present=agent_pb2.Present())
        for event in events:
            if _about(namespace, event):
                yield message(agent_pb2.Change, {"event": event})
        while True:
            try:
                change = await watch.next()
            except AgentError:
                return
            chosen = _about if change.kind == "event" else _in
            if chosen(namespace, change.what):
                yield message(agent_pb2.Change, {change.kind: change.what})


async def _about_one(ask: Callable[[Row], Awaitable[Row]], request: Any, context: Any) -> Row:
    try:
        return await ask({key: getattr(request, key) for key in ("namespace", "name", "uid")})
    except AgentError as error:
        await context.abort(grpc.StatusCode.NOT_FOUND, str(error))
        raise  # for the type checker: abort does not return


def handlers(agent: Agent) -> Any:
    """Return the service as a gRPC server takes it."""
    found = {one.name: _handler(getattr(agent, one.name), one) for one in SERVICE.methods}
    return grpc.method_handlers_generic_handler(SERVICE.full_name, found)


def _handler(call: Callable[..., Any], method: Any) -> Any:
    make = grpc.unary_unary_rpc_method_handler
    if method.server_streaming:
        make = grpc.unary_stream_rpc_method_handler
    return make(
        call,
        request_deserializer=GetMessageClass(method.input_type).FromString,
        response_serializer=GetMessageClass(method.output_type).SerializeToString,
    )


def message(kind: Callable[[], M], values: Mapping[str, object]) -> M:
    """Return plain values as a message; what is None, or has no field there, is left out."""
    found: M = ParseDict(values, kind(), ignore_unknown_fields=True)
    return found


def _in(namespace: str, row: Row) -> bool:
    return namespace in ("", row["namespace"])


def _about(namespace: str, event: Row) -> bool:
    return not namespace or str(event["pod"]).startswith(f"{namespace}/")
