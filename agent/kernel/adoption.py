"""Has conntrack know the connections that were there before it: the first capture spares them.

Conntrack is asleep in a namespace until a rule needs it. What was open before then would count as
new with its next packet, be translated, and be reset (kernel fact 10). An entry that says that both
sides have been heard is no longer new, so no rule of nat is asked about it. Shown on 6.18 with idle
and busy connections, all three kinds of rules, IPv4 and IPv6.
"""

import errno
import struct

from agent.kernel.netlink import NLM_F_CREATE, NLM_F_EXCL, attribute
from agent.kernel.netns import Netns
from agent.kernel.sockets import (
    CTA_TUPLE_ORIG,
    CTA_TUPLE_REPLY,
    Conntrack,
    KernelSocket,
    SocketTable,
    ct_family,
    ct_tuple,
    nested,
)
from agent.model.errors import AgentError, ConnectionsAtRisk

# linux/netfilter/nfnetlink_conntrack.h, nf_conntrack_common.h, nf_conntrack_tcp.h
CT_NEW = 1 << 8 | 0
CTA_STATUS, CTA_PROTOINFO, CTA_TIMEOUT = 3, 4, 7
CTA_PROTOINFO_TCP = 1
TCP_STATE, TCP_FLAGS_ORIGINAL, TCP_FLAGS_REPLY = 1, 4, 5
ESTABLISHED = 3
# Seen both ways, assured, confirmed; and no sequence number is out of any window.
STATUS = struct.pack("!I", 1 << 1 | 1 << 2 | 1 << 3)
BE_LIBERAL = bytes((1 << 3, 1 << 3))
LIFE_S = struct.pack("!I", 5 * 24 * 3600)  # the kernel's own for established connections
KNOWN_ALREADY = frozenset({errno.EEXIST, errno.EBUSY})


def adopt(netns: Netns) -> int:
    """Let every TCP connection that is open in a namespace go on as it is; return how many.

    Those that conntrack knows already stay as they are, and are not counted.

    Raises: ConnectionsAtRisk, with nothing but further entries written, if that cannot be had.
    """

    def work() -> int:
        with SocketTable() as table:
            found = {_ends(one): one for one in table.connections()}
        if not found:
            return 0
        with Conntrack() as conntrack:
            return sum(_enter(conntrack, one) for one in found.values())

    try:
        return netns.run(work)
    except (AgentError, OSError, TimeoutError) as error:
        raise ConnectionsAtRisk(
            f"the connections that are open in {netns.path} cannot be spared: {error}"
        ) from error


def _ends(one: KernelSocket) -> frozenset[object]:
    """Return what both sockets of a connection within the namespace have in common."""
    return frozenset((one.local, one.remote))


def _enter(conntrack: Conntrack, one: KernelSocket) -> bool:
    """Make the entry of a connection; return whether it was not there."""
    state = nested(
        CTA_PROTOINFO_TCP,
        attribute(TCP_STATE, bytes((ESTABLISHED,)))
        + attribute(TCP_FLAGS_ORIGINAL, BE_LIBERAL)
        + attribute(TCP_FLAGS_REPLY, BE_LIBERAL),
    )
    body = (
        struct.pack("=BBH", ct_family(one.local[0]), 0, 0)
        + ct_tuple(CTA_TUPLE_ORIG, "tcp", one.local, one.remote)
        + ct_tuple(CTA_TUPLE_REPLY, "tcp", one.remote, one.local)
        + attribute(CTA_STATUS, STATUS)
        + attribute(CTA_TIMEOUT, LIFE_S)
        + nested(CTA_PROTOINFO, state)
    )
    try:
        conntrack.request(CT_NEW, NLM_F_CREATE | NLM_F_EXCL, body)
    except OSError as error:
        if error.errno not in KNOWN_ALREADY:
            raise
        return False
    return True
