"""The frames on the agent's socket: a length, a version, and one JSON document.

The plugin (agent/cni/plugin.py) writes and reads the same frames by itself: it is one file that
imports nothing of this package.
"""

import json
import struct
from asyncio import StreamReader, StreamWriter
from typing import Any

from agent.model.errors import AgentError

# Big-endian: the number of bytes behind this header, then the version of the protocol.
HEADER = struct.Struct("!IB")
VERSION = 1
MAX_REQUEST = 8 * 1024 * 1024
MAX_REPLY = 64 * 1024 * 1024


class BadFrame(AgentError):
    """What came is no frame of this protocol, or is too large; the connection is closed."""


async def read(reader: StreamReader, limit: int = MAX_REQUEST) -> Any:
    """Return the next document.

    Raises: BadFrame; asyncio.IncompleteReadError if the connection ends.
    """
    size, version = HEADER.unpack(await reader.readexactly(HEADER.size))
    if version != VERSION:
        raise BadFrame(f"protocol version {version} is not spoken here; this is version {VERSION}")
    if size > limit:
        raise BadFrame(f"a frame of {size} bytes is larger than {limit}")
    try:
        return json.loads(await reader.readexactly(size))
    except (ValueError, RecursionError) as error:
        raise BadFrame(f"the frame holds no JSON: {error}") from error


async def write(writer: StreamWriter, document: object) -> None:
    payload = json.dumps(document).encode()
    writer.write(HEADER.pack(len(payload), VERSION) + payload)
    await writer.drain()
