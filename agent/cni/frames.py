"""The frames on the agent's socket: a length, a version, and one JSON document.

For both ends, and so without asyncio: the command line starts faster than that is loaded. The
plugin (agent/cni/plugin.py) writes and reads the same frames by itself: it is one file that imports
nothing of this package.
"""

import json
import struct
from typing import TYPE_CHECKING, Any

from agent.model.errors import AgentError

if TYPE_CHECKING:
    from asyncio import StreamReader, StreamWriter

# Big-endian: the number of bytes behind this header, then the version of the protocol.
HEADER = struct.Struct("!IB")
VERSION = 1
MAX_REQUEST = 8 * 1024 * 1024
MAX_REPLY = 64 * 1024 * 1024


class BadFrame(AgentError):
    """What came is no frame of this protocol, or is too large; the connection is closed."""


def encode(document: object) -> bytes:
    """Return the frame that holds a document."""
    payload = json.dumps(document).encode()
    return HEADER.pack(len(payload), VERSION) + payload


def size_of(header: bytes, limit: int) -> int:
    """Return how many bytes follow a header.

    Raises: BadFrame for another version, and for more than `limit` bytes.
    """
    size, version = HEADER.unpack(header)
    if version != VERSION:
        raise BadFrame(f"protocol version {version} is not spoken here; this is version {VERSION}")
    if size > limit:
        raise BadFrame(f"a frame of {size} bytes is larger than {limit}")
    return int(size)


def decode(payload: bytes) -> Any:
    """Return the document in a frame. Raises: BadFrame."""
    try:
        return json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise BadFrame(f"the frame holds no JSON: {error}") from error


async def read(reader: "StreamReader", limit: int = MAX_REQUEST, header: bytes = b"") -> Any:
    """Return the next document; `header` is its header where that has been read already.

    Raises: BadFrame; asyncio.IncompleteReadError if the connection ends.
    """
    header = header or await reader.readexactly(HEADER.size)
    return decode(await reader.readexactly(size_of(header, limit)))


async def write(writer: "StreamWriter", document: object) -> None:
    writer.write(encode(document))
    await writer.drain()
