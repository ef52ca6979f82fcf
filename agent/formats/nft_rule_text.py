"""One rule of the model as the statements of one nft rule (two for TPROXY).

Values are checked, not passed through: what iptables-save never prints has no form here, so no
text of a rule can end up as syntax.
"""

import ipaddress
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise

from agent.formats.nft_shape import ALL_BITS, CT_STATES, PROTOCOLS, chain_name
from agent.model.ruleset import BASIC, Family, Option, Rule, Table, Target

# NFT_RULE_MAXEXPRS: the kernel takes this many expressions in one rule.
MAX_EXPRESSIONS = 128

_INTERFACE = re.compile(r"[A-Za-z0-9_.:@-]+")
_PORTS = re.compile(r"(\d{1,5})(?::(\d{1,5}))?")
_IDS = re.compile(r"(\d{1,10})(?:-(\d{1,10}))?")
_HEX = re.compile(r"0x[0-9a-f]{1,8}")
_CGROUP = re.compile(r"(?:/[A-Za-z0-9_.:@-]+)+")

# Where cgroup2 is one hierarchy of several, its root is a folder of this name, and no level.
HYBRID = "unified"


class Unable(Exception):
    """Why one part of a rule has no form."""


# --- conditions ----------------------------------------------------------------------------------


def _value(option: Option) -> str:
    if len(option.values) != 1:
        raise Unable(f"{option.name} with {len(option.values)} values")
    return option.values[0]


def _unequal(option: Option) -> str:
    return "!= " if option.negated else ""


def _address(field: str, prefix: str = "") -> Callable[[Family, Option], str]:
    def words(family: Family, option: Option) -> str:
        try:
            network = ipaddress.ip_network(_value(option))
        except ValueError as error:
            raise Unable(f"{option.name}: {error}") from None
        if network.version != family.version or not network.prefixlen:
            raise Unable(f"{option.name} {network} in {family.value}")
        single = network.prefixlen == network.max_prefixlen
        shown = str(network.network_address) if single else str(network)
        protocol = "ip" if family is Family.IPV4 else "ip6"
        return f"{prefix}{protocol} {field} {_unequal(option)}{shown}"

    return words


def _interface(key: str) -> Callable[[Family, Option], str]:
    def words(_: Family, option: Option) -> str:
        name = _value(option)
        stem = name.removesuffix("+")
        if not _INTERFACE.fullmatch(stem):
            raise Unable(f"the interface name {name!r}")
        wildcard = "*" if stem != name else ""
        return f'{key} {_unequal(option)}"{stem}{wildcard}"'

    return words


def _protocol(_: Family, option: Option) -> str:
    name = _value(option)
    number = PROTOCOLS.get(name, int(name) if re.fullmatch(r"\d{1,3}", name) else 0)
    if not 0 < number < 256:
        raise Unable(f"the protocol {name!r}")
    return f"meta l4proto {_unequal(option)}{name if name in ('tcp', 'udp') else number}"


def _range(text: str, pattern: re.Pattern[str], limit: int) -> tuple[int, int]:
    found = pattern.fullmatch(text)
    if not found:
        raise Unable(f"the number or range {text!r}")
    first = int(found[1])
    last = int(found[2] or found[1])
    if not first <= last <= limit:
        raise Unable(f"the range {text!r}")
    return first, last


def _range_text(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def _port(field: str) -> Callable[[Family, Option], str]:
    def words(_: Family, option: Option) -> str:
        ports = _range_text(*_range(_value(option), _PORTS, 65535))
        return f"{field} {_unequal(option)}{ports}"

    return words


def _multiport(protocol: str, option: Option) -> str:
    """Ports in one list. A negated list becomes one condition each, which keeps its order."""
    spans = [_range(item, _PORTS, 65535) for item in _value(option).split(",")]
    field = f"{protocol} {option.name.removeprefix('--').removesuffix('s')}"
    if len(spans) < 2:
        raise Unable("a list of one port")
    if option.negated:
        return " ".join(f"{field} != {_range_text(*span)}" for span in spans)
    # A set comes back sorted and with neighbours joined: any other list would look altered.
    if any(after[0] <= before[1] + 1 for before, after in pairwise(spans)):
        raise Unable("a list of ports that is not in order or has neighbours")
    return f"{field} {{ {', '.join(_range_text(*span) for span in spans)} }}"


def _owner(key: str) -> Callable[[Family, Option], str]:
    def words(_: Family, option: Option) -> str:
        ids = _range_text(*_range(_value(option), _IDS, ALL_BITS - 1))
        return f"{key} {_unequal(option)}{ids}"

    return words


def _cgroup(_: Family, option: Option) -> str:
    path = _value(option)
    if not _CGROUP.fullmatch(path):
        raise Unable(f"the cgroup {path!r}")
    parts = path.split("/")[1:]
    level = len(parts) - (parts[0] == HYBRID)
    return f'socket cgroupv2 level {level} {_unequal(option)}"{path[1:]}"'


def _number(text: str) -> int:
    if not _HEX.fullmatch(text):
        raise Unable(f"the number {text!r}")
    return int(text, 16)


def _masked(text: str) -> tuple[int, int]:
    """Return value and mask of `0x1/0xff`; without a mask all bits count."""
    value, slash, mask = text.partition("/")
    return _number(value), _number(mask) if slash else ALL_BITS


def _mark(key: str) -> Callable[[Family, Option], str]:
    def words(_: Family, option: Option) -> str:
        value, mask = _masked(_value(option))
        operator = "!=" if option.negated else "=="
        masked = f"{key} and {mask:#x}" if mask != ALL_BITS else key
        return f"{masked} {operator} {value:#x}"

    return words


def _ct_state(_: Family, option: Option) -> str:
    states = _value(option).split(",")
    if states != [state for state in CT_STATES if state in states]:
        raise Unable(f"the connection states {option.values[0]!r}")
    names = ",".join(states).lower()
    # A packet has exactly one state, so "none of these" is "not in the set".
    return f"ct state != {{ {names} }}" if option.negated else f"ct state {names}"


_CONDITIONS: Mapping[tuple[str, str], Callable[[Family, Option], str]] = {
    (BASIC, "-s"): _address("saddr"),
    (BASIC, "-d"): _address("daddr"),
    (BASIC, "-i"): _interface("iifname"),
    (BASIC, "-o"): _interface("oifname"),
    (BASIC, "-p"): _protocol,
    ("tcp", "--sport"): _port("tcp sport"),
    ("tcp", "--dport"): _port("tcp dport"),
    ("udp", "--sport"): _port("udp sport"),
    ("udp", "--dport"): _port("udp dport"),
    ("owner", "--uid-owner"): _owner("meta skuid"),
    ("owner", "--gid-owner"): _owner("meta skgid"),
    ("cgroup", "--path"): _cgroup,
    ("mark", "--mark"): _mark("meta mark"),
    ("connmark", "--mark"): _mark("ct mark"),
    ("conntrack", "--ctstate"): _ct_state,
    ("conntrack", "--ctorigdst"): _address("daddr", "ct original "),
    ("conntrack", "--ctorigdstport"): _port("ct original proto-dst"),
}


def _transport(rule: Rule) -> str:
    """Return the protocol of the rule if it is one with ports, else nothing."""
    option = rule.option(BASIC, "-p")
    known = option is not None and not option.negated and option.values in (("tcp",), ("udp",))
    return option.values[0] if option and known else ""


def _conditions(family: Family, rule: Rule) -> list[str]:
    protocol = _transport(rule)
    words = []
    for match in rule.matches:
        for option in match.options:
            if match.module in ("tcp", "udp", "multiport") and not protocol:
                raise Unable(f"-m {match.module} without a protocol that has ports")
            if match.module == "multiport" and option.name in ("--sports", "--dports"):
                words.append(_multiport(protocol, option))
            elif make := _CONDITIONS.get((match.module, option.name)):
                words.append(make(family, option))
            else:
                raise Unable(f"{match.module and '-m ' + match.module} {option.name}".strip())
    if _expressions(words) > MAX_EXPRESSIONS - 10:  # room for a counter and any target
        raise Unable(f"more conditions than {MAX_EXPRESSIONS} expressions of the kernel hold")
    return words


def _expressions(words: Iterable[str]) -> int:
    """Return an upper bound of the kernel's expressions: what nft makes of each word here."""
    count = 0
    for before, word in pairwise(["", *" ".join(words).split()]):
        count += _COST.get(word, 0)
        if re.search(r"\d-\d", word):  # a byte swap; and two comparisons unless negated
            count += 1 if before == "!=" else 2
        elif "/" in word:
            count += 1
    return count


# A load and a comparison; `ip` also compares the family, `ct state` needs a mask.
_COST = {"ip": 4, "ip6": 4, "ct": 3, "and": 1} | dict.fromkeys(
    ("meta", "iifname", "oifname", "tcp", "udp", "socket"), 2
)


# --- targets -------------------------------------------------------------------------------------

_VERDICTS = {"ACCEPT": "accept", "DROP": "drop", "RETURN": "return"}


def _options(target: Target, *names: str) -> dict[str, str]:
    """Return the options of a target by name; all must be among `names`, none negated."""
    found = {}
    for option in target.options:
        if option.name not in names or option.negated or len(option.values) > 1:
            raise Unable(f"-j {target.name} {option.name}")
        found[option.name] = option.values[0] if option.values else ""
    return found


def _redirect(rule: Rule, target: Target) -> str:
    options = _options(target, "--to-ports")
    if not options:
        return "redirect"
    if not _transport(rule):
        raise Unable("REDIRECT to a port without a protocol that has ports")
    ports = options["--to-ports"].replace("-", ":")
    return f"redirect to :{_range_text(*_range(ports, _PORTS, 65535))}"


def _change_bits(key: str, text: str) -> str:
    """Return the statement for `--set-xmark`: clear the bits of the mask, then flip the value's."""
    value, mask = _masked(text)
    if mask == ALL_BITS:
        return f"{key} set {value:#x}"
    return f"{key} set {key} and {ALL_BITS & ~mask:#x} xor {value:#x}"


def _set_mark(_: Rule, target: Target) -> str:
    return _change_bits("meta mark", _options(target, "--set-xmark").get("--set-xmark", ""))


def _connmark(_: Rule, target: Target) -> str:
    names = ("--save-mark", "--restore-mark", "--set-xmark", "--nfmask", "--ctmask")
    options = _options(target, *names)
    action = next(iter(options), "")
    if set(options) == {"--set-xmark"}:
        return _change_bits("ct mark", options["--set-xmark"])
    if set(options) != {action, "--nfmask", "--ctmask"}:
        raise Unable("CONNMARK without an action and both masks")
    packet, connection = _number(options["--nfmask"]), _number(options["--ctmask"])
    if action == "--save-mark":
        written, read, into, source = connection, packet, "ct mark", "meta mark"
    else:
        written, read, into, source = packet, connection, "meta mark", "ct mark"
    # Keeping some bits of one mark while taking others from another needs nft 1.1 and a new kernel.
    if written != ALL_BITS:
        raise Unable(f"CONNMARK {action} into a part of the mark")
    return f"{into} set {source}" + ("" if read == ALL_BITS else f" and {read:#x}")


def _conntrack(_: Rule, target: Target) -> str:
    options = _options(target, "--zone", "--notrack")
    if options == {"--notrack": ""}:
        return "notrack"
    if set(options) != {"--zone"} or not re.fullmatch(r"\d{1,5}", options["--zone"]):
        raise Unable("CT with anything but a zone")
    return f"ct zone set {options['--zone']}"


_TARGETS: Mapping[str, Callable[[Rule, Target], str]] = {
    "REDIRECT": _redirect,
    "MARK": _set_mark,
    "CONNMARK": _connmark,
    "CT": _conntrack,
}


def _tproxy(family: Family, rule: Rule, target: Target) -> str:
    options = _options(target, "--on-port", "--on-ip", "--tproxy-mark")
    if set(options) != {"--on-port", "--on-ip", "--tproxy-mark"} or not _transport(rule):
        raise Unable("TPROXY without port, address, mark and a protocol that has ports")
    try:
        address = ipaddress.ip_address(options["--on-ip"])
    except ValueError as error:
        raise Unable(str(error)) from None
    if address.version != family.version:
        raise Unable(f"TPROXY to {address} in {family.value}")
    protocol, shown = ("ip", str(address)) if address.version == 4 else ("ip6", f"[{address}]")
    port, _ = _range(options["--on-port"], _PORTS, 65535)
    to = f":{port}" if address.is_unspecified else f"{shown}:{port}"
    return f"tproxy {protocol} to {to} {_change_bits('meta mark', options['--tproxy-mark'])} accept"


# --- the rule ------------------------------------------------------------------------------------


def _jump(family: Family, table: Table, target: Target) -> str:
    chain = table.chain(target.name)
    if chain is None or chain.policy is not None or target.options:
        raise Unable(f"the target {target.name}")
    verb = "goto" if target.goto else "jump"
    return f"{verb} {chain_name(family, table.name, target.name)}"


def statements(family: Family, table: Table, rule: Rule) -> Iterator[str]:
    """Yield the rules that a rule becomes: one, or two for TPROXY."""
    conditions = [*_conditions(family, rule), "counter"]
    target = rule.target
    if target is None:
        yield " ".join(conditions)
    elif target.name == "TPROXY":
        yield " ".join([*conditions, _tproxy(family, rule, target)])
        yield " ".join([*conditions, "drop"])
    elif target.name in _VERDICTS and not target.options and not target.goto:
        yield " ".join([*conditions, _VERDICTS[target.name]])
    elif make := _TARGETS.get(target.name):
        yield " ".join([*conditions, make(rule, target)])
    else:
        yield " ".join([*conditions, _jump(family, table, target)])
