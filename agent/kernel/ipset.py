"""The ipsets of a namespace, listed by hand over netlink; writing is left to the tool `ipset`.

Header only: names, types and how many rules hold each. Asking loads the module, so it is asked only
where that is there already.
"""

import errno
import struct
from dataclasses import dataclass

from agent.kernel import modules
from agent.kernel.netlink import NETLINK_NETFILTER, NetlinkSocket, attribute, attributes

# linux/netfilter/ipset/ip_set.h
NFNL_SUBSYS_IPSET = 6
IPSET_CMD_LIST = 7
IPSET_ATTR_PROTOCOL, IPSET_ATTR_SETNAME, IPSET_ATTR_TYPENAME = 1, 2, 3
IPSET_ATTR_FLAGS, IPSET_ATTR_DATA = 6, 7
IPSET_ATTR_REFERENCES, IPSET_ATTR_ELEMENTS = 23, 25
IPSET_PROTOCOL = 6
IPSET_FLAG_LIST_HEADER = 1 << 2
NO_IPSETS = (errno.EINVAL, errno.EOPNOTSUPP, errno.EPROTONOSUPPORT)  # a kernel without them
NFGENMSG = struct.pack("=BBH", 2, 0, 0)  # AF_INET


@dataclass(frozen=True, slots=True, order=True)
class IpSet:
    """One set; `references` counts the rules and lists that hold it."""

    name: str
    type: str
    references: int
    elements: int


def read_sets() -> tuple[IpSet, ...]:
    """Return the sets of the calling thread's namespace, by name.

    Raises: OSError if the kernel does not say.
    """
    if not modules.present("ip_set"):
        return ()
    request = (
        NFGENMSG
        + attribute(IPSET_ATTR_PROTOCOL, bytes([IPSET_PROTOCOL]))
        + attribute(IPSET_ATTR_FLAGS, struct.pack("!I", IPSET_FLAG_LIST_HEADER))
    )
    try:
        with NetlinkSocket(NETLINK_NETFILTER) as door:
            messages = door.dump((NFNL_SUBSYS_IPSET << 8) | IPSET_CMD_LIST, request)
    except OSError as error:
        if error.errno in NO_IPSETS:
            return ()
        raise
    return tuple(sorted(_set(message.payload) for message in messages))


def _set(payload: bytes) -> IpSet:
    found = attributes(payload, len(NFGENMSG))
    data = attributes(found.get(IPSET_ATTR_DATA, b""), 0)
    return IpSet(
        name=_text(found.get(IPSET_ATTR_SETNAME, b"")),
        type=_text(found.get(IPSET_ATTR_TYPENAME, b"")),
        references=_number(data.get(IPSET_ATTR_REFERENCES)),
        elements=_number(data.get(IPSET_ATTR_ELEMENTS)),
    )


def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode(errors="replace")


def _number(raw: bytes | None) -> int:
    return struct.unpack("!I", raw)[0] if raw else 0
