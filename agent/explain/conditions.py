"""Does a rule match a packet? Three answers: yes, no, and "nobody can foresee" (None).

Every test is that of the kernel's match module of the same name. What is not in `TESTS`, be it a
module, an option or a value that does not parse, gets the third answer: a walk that guesses would
be believed.
"""

import ipaddress
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

from agent.formats.iptables_save import render_spec
from agent.model.host import Host
from agent.model.packet import Address, Hit, Packet
from agent.model.ruleset import BASIC, Match, Option, Rule
from agent.model.values import Span, below

# ip_local_port_range as the kernel sets it: where the source port of a packet is when nobody says.
EPHEMERAL = Span(32768, 60999)
WHOLE_MARK = 0xFFFFFFFF

ANY_PROTOCOL = frozenset({"all", "0"})
PROTOCOL_NAMES = MappingProxyType({"tcp": frozenset({"tcp", "6"}), "udp": frozenset({"udp", "17"})})

# Modules that only ever match one protocol, so that they fail for all others without a look.
ONE_PROTOCOL = MappingProxyType(
    {name: name for name in ("tcp", "udp", "icmp", "icmp6", "sctp", "dccp", "esp", "ah", "mh")}
)
# `-m recent --set` and what may stand beside it (xt_recent.c).
RECENT_SET = ("--set", "--name", "--mask", "--rsource", "--rdest")
# Counters that only count: kube-proxy gives its own no quota, which others may have (xt_nfacct.c).
NO_QUOTA = frozenset({"ct_state_invalid_dropped_pkts", "localhost_nps_accepted_pkts"})
# Modules that add no condition when they stand without options.
EMPTY_IS_TRUE = frozenset({BASIC, "tcp", "udp", "comment"})


@dataclass(frozen=True, slots=True)
class Judgement:
    """Whether a rule matches and, unless it does, which condition says so."""

    hit: Hit
    why: str = ""


def judge(rule: Rule, packet: Packet, host: Host) -> Judgement:
    """Return whether `rule` matches. One condition that fails outweighs all unknown ones."""
    unknown = ""
    for match in rule.matches:
        if match.module == "comment":
            continue
        if ONE_PROTOCOL.get(match.module, packet.protocol) != packet.protocol:
            return Judgement(Hit.NO, f"-m {match.module}: the packet is {packet.protocol}")
        if not match.options and match.module not in EMPTY_IS_TRUE:
            unknown = unknown or f"-m {match.module}"
        for option in match.options:
            held = _holds(match, option, packet, host)
            if held is False:
                return Judgement(Hit.NO, f"not {_text(option)}")
            if held is None:
                unknown = unknown or f"-m {match.module or 'basic'} {_text(option)}"
    return Judgement(Hit.MAYBE, unknown) if unknown else Judgement(Hit.YES)


def _text(option: Option) -> str:
    return render_spec(Rule((Match(BASIC, (option,)),)))


def _holds(match: Match, option: Option, packet: Packet, host: Host) -> bool | None:
    test = TESTS.get((match.module, option.name))
    # Of a connection that does not exist nothing holds: even `!` fails (xt_connmark, xt_conntrack).
    of_connection = match.module == "connmark" or option.name.startswith("--ctorig")
    if test is None or (of_connection and not packet.tracked):
        return None if test is None else False
    held = test(option.values, packet, host)
    return None if held is None else held != option.negated


Values = tuple[str, ...]
Test = Callable[[Values, Packet, Host], bool | None]


def one(test: Callable[[str, Packet, Host], bool | None]) -> Test:
    """Return a test of an option with exactly one value; any other number is not understood."""

    def checked(values: Values, packet: Packet, host: Host) -> bool | None:
        return test(values[0], packet, host) if len(values) == 1 else None

    return checked


# --- values ------------------------------------------------------------------------------------


def number(text: str) -> int | None:
    """Return an unsigned number in decimal or 0x notation, None for anything else."""
    try:
        found = int(text, 16 if text.lower().startswith("0x") else 10)
    except ValueError:
        return None
    return found if 0 <= found <= WHOLE_MARK else None


def masked(text: str) -> tuple[int, int] | None:
    """Return value and mask of `VALUE[/MASK]`."""
    value, _, mask = text.partition("/")
    numbers = number(value), number(mask) if mask else WHOLE_MARK
    return None if numbers[0] is None or numbers[1] is None else (numbers[0], numbers[1])


def span(text: str, separator: str, last: int) -> Span | None:
    """Return the range `A`, `A-B`, `A-` or `-B`, where `-` is `separator`."""
    first, mark, end = text.partition(separator)
    low = number(first) if first else 0
    high = (number(end) if end else last) if mark else low
    return None if low is None or high is None or text == "" else Span(low, high)


@lru_cache(maxsize=4096)
def network(text: str) -> tuple[int, int, int] | None:
    """Return (version, address & mask, mask) of `ADDRESS[/LENGTH or MASK]`."""
    host, _, tail = text.partition("/")
    try:
        address = ipaddress.ip_address(host)
        if not tail:
            mask = 2**address.max_prefixlen - 1
        elif tail.isdecimal() and int(tail) <= address.max_prefixlen:
            length = int(tail)
            mask = (2**length - 1) << (address.max_prefixlen - length)
        else:  # a mask with holes is printed as an address
            mask = int(type(address)(tail))
    except ValueError:
        return None
    return address.version, int(address) & mask, mask


def ports(values: Values, port: int | None) -> bool | None:
    """Return whether `port` is in a comma list of ports and ranges; None as port is ephemeral."""
    spans = [span(item, ":", 65535) for item in ",".join(values).split(",")]
    known = [found for found in spans if found is not None]
    if len(known) != len(spans):
        return None
    if port is not None:
        return any(port in found for found in known)
    if any(EPHEMERAL.first in found and EPHEMERAL.last in found for found in known):
        return True
    apart = all(s.last < EPHEMERAL.first or s.first > EPHEMERAL.last for s in known)
    return False if apart else None


# --- tests -------------------------------------------------------------------------------------


def _address(text: str, address: Address | None) -> bool | None:
    wanted = network(text)
    if wanted is None:
        return None
    if address is None:  # an unknown source is one that no rule names
        return wanted[2] == 0
    return wanted[0] == address.version and int(address) & wanted[2] == wanted[1]


def _interface(pattern: str, name: str) -> bool:
    # Where there is no interface the name is empty and is compared all the same.
    return name.startswith(pattern[:-1]) if pattern.endswith("+") else name == pattern


def _protocol(text: str, packet: Packet) -> bool:
    return text in ANY_PROTOCOL or text in PROTOCOL_NAMES[packet.protocol]


def _tcp_flags(values: Values, packet: Packet, host: Host) -> bool | None:
    if len(values) != 2:
        return None
    every = frozenset({"FIN", "SYN", "RST", "PSH", "ACK", "URG"})
    mask, wanted = (
        every if text == "ALL" else frozenset(text.split(",")) - {"NONE"} for text in values
    )
    return (mask & packet.tcp_flags) == wanted if mask | wanted <= every else None


def _any_port(values: Values, packet: Packet, host: Host) -> bool | None:
    answers = ports(values, packet.dport), ports(values, packet.sport)
    if True in answers:
        return True
    return None if None in answers else False


def _owner(text: str, identity: int | None) -> bool | None:
    wanted = span(text, "-", WHOLE_MARK)
    if wanted is None:
        return None
    # Without a socket only negated conditions hold (owner_mt), and `None in wanted` is false.
    return identity in wanted


def _cgroup(text: str, packet: Packet, host: Host) -> bool | None:
    """Whether the sender's is this cgroup or one below it."""
    if packet.uid is None:
        return False
    if packet.cgroup is None:
        return None
    return below(packet.cgroup, text)


def group(packet: Packet) -> int | None:
    """Return the packet's gid; a user without a stated group is taken to be in its own."""
    return packet.uid if packet.gid is None or packet.uid is None else packet.gid


def _mark(text: str, mark: int) -> bool | None:
    wanted = masked(text)
    return None if wanted is None else mark & wanted[1] == wanted[0]


STATES = frozenset({"NEW", "ESTABLISHED", "RELATED", "INVALID", "UNTRACKED", "DNAT", "SNAT"})


def _state(text: str, packet: Packet, host: Host) -> bool | None:
    wanted = frozenset(text.split(","))
    return bool(wanted & packet.states) if wanted <= STATES else None


def _original(packet: Packet) -> tuple[Address, int]:
    return packet.connection.original or (packet.destination, packet.dport)


def _direction(text: str, packet: Packet, host: Host) -> bool | None:
    return text == "ORIGINAL" if packet.connection.state == "NEW" else None


def _address_type(text: str, address: Address | None, host: Host) -> bool | None:
    wanted = frozenset(text.split(","))
    if address is None or not wanted <= {"UNICAST", "LOCAL", "BROADCAST", "MULTICAST", "UNSPEC"}:
        return None
    if address.version == 6:
        return _address_type_v6(wanted, address, host)
    if address.is_multicast:
        return "MULTICAST" in wanted
    if int(address) in (0, 2**32 - 1) or host.is_broadcast(address):
        return "BROADCAST" in wanted
    return ("LOCAL" if host.is_local(address) else "UNICAST") in wanted


def _address_type_v6(wanted: frozenset[str], address: Address, host: Host) -> bool:
    """Test as match_type6 does: several types must all hold, and UNICAST holds for LOCAL too."""
    holds = {
        "MULTICAST": address.is_multicast,
        "UNICAST": not address.is_multicast and not address.is_unspecified,
        "UNSPEC": address.is_unspecified,
        "LOCAL": host.is_local(address),
        "BROADCAST": True,  # IPv6 has none, and the kernel does not look
    }
    return all(holds[kind] for kind in wanted)


def _range(text: str, address: Address | None) -> bool | None:
    try:
        first, last = (ipaddress.ip_address(end) for end in text.split("-"))
    except ValueError:
        return None
    if address is None:
        return False
    return first.version == address.version and int(first) <= int(address) <= int(last)


def _probability(text: str, packet: Packet, host: Host) -> bool | None:
    try:
        chance = float(text)
    except ValueError:
        return None
    return True if chance >= 1 else False if chance <= 0 else None


def _group_of_ports(module: str) -> dict[tuple[str, str], Test]:
    return {
        (module, "--sport"): lambda v, p, h: ports(v, p.sport),
        (module, "--dport"): lambda v, p, h: ports(v, p.dport),
        (module, "--source-port"): lambda v, p, h: ports(v, p.sport),
        (module, "--destination-port"): lambda v, p, h: ports(v, p.dport),
    }


TESTS: Mapping[tuple[str, str], Test] = MappingProxyType(
    {
        (BASIC, "-s"): one(lambda text, p, h: _address(text, p.source)),
        (BASIC, "-d"): one(lambda text, p, h: _address(text, p.destination)),
        (BASIC, "-i"): one(lambda text, p, h: _interface(text, p.in_interface)),
        (BASIC, "-o"): one(lambda text, p, h: _interface(text, p.out_interface)),
        (BASIC, "-p"): one(lambda text, p, h: _protocol(text, p)),
        (BASIC, "-f"): lambda v, p, h: False,  # a second fragment; conntrack put them together
        **_group_of_ports("tcp"),
        **_group_of_ports("udp"),
        ("tcp", "--tcp-flags"): _tcp_flags,
        ("tcp", "--syn"): lambda v, p, h: _tcp_flags(("FIN,SYN,RST,ACK", "SYN"), p, h),
        ("multiport", "--dports"): lambda v, p, h: ports(v, p.dport),
        ("multiport", "--sports"): lambda v, p, h: ports(v, p.sport),
        ("multiport", "--ports"): _any_port,
        ("owner", "--uid-owner"): one(lambda text, p, h: _owner(text, p.uid)),
        ("owner", "--gid-owner"): one(lambda text, p, h: _owner(text, group(p))),
        ("owner", "--socket-exists"): lambda v, p, h: p.uid is not None,
        ("cgroup", "--path"): one(_cgroup),
        ("mark", "--mark"): one(lambda text, p, h: _mark(text, p.mark)),
        ("connmark", "--mark"): one(lambda text, p, h: _mark(text, p.connection.mark)),
        ("conntrack", "--ctstate"): one(_state),
        ("conntrack", "--ctproto"): one(lambda text, p, h: _protocol(text, p)),
        ("conntrack", "--ctdir"): one(_direction),
        ("conntrack", "--ctorigdst"): one(lambda text, p, h: _address(text, _original(p)[0])),
        ("conntrack", "--ctorigdstport"): lambda v, p, h: ports(v, _original(p)[1]),
        ("state", "--state"): one(_state),
        ("addrtype", "--src-type"): one(lambda text, p, h: _address_type(text, p.source, h)),
        ("addrtype", "--dst-type"): one(lambda text, p, h: _address_type(text, p.destination, h)),
        ("iprange", "--src-range"): one(lambda text, p, h: _range(text, p.source)),
        ("iprange", "--dst-range"): one(lambda text, p, h: _range(text, p.destination)),
        # What was noted down before nobody can foresee; to note a source down always matches.
        **{("recent", option): lambda v, p, h: True for option in RECENT_SET},
        ("nfacct", "--nfacct-name"): one(lambda text, p, h: text in NO_QUOTA or None),
        ("statistic", "--mode"): lambda v, p, h: True if v == ("random",) else None,
        ("statistic", "--probability"): one(_probability),
    }
)
