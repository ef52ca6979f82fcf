"""Walk one packet through the loaded rules: each rule looked at, its setting, and the verdict."""

import argparse
import ipaddress
import re

from agent.backends.session import reading
from agent.capture.observe import observe
from agent.cli import output
from agent.cli.target import add_netns_option, opened
from agent.explain import render
from agent.explain.trace import not_walked, trace
from agent.kernel.topology import read_host
from agent.model.errors import InvalidSettings
from agent.model.host import loopback
from agent.model.packet import Address, Packet
from agent.model.values import MAX_ID, MAX_PORT, shown, within

EXAMPLES = """examples:
  intercept-agent trace --netns web --uid 1000 --to 10.0.0.9:5432
  intercept-agent trace --netns web --uid 1337 --to '[fd00::9]:443'
  intercept-agent trace --netns web --mark 0x539 --to 10.0.0.9:80     the node's proxy (ambient)
  intercept-agent trace --netns web --in --from 10.0.0.7 --to 10.0.0.5:8080
  intercept-agent trace --netns web --uid 1000 --to 10.96.0.10:53 --proto udp -o json
"""
VERBOSE = "as --all"


def add_options(parser: argparse.ArgumentParser) -> None:
    add_netns_option(parser)
    add_packet_options(parser, required=True)
    parser.add_argument(
        "--all", action="store_true", help="sum up no long runs of rules that do not match"
    )
    output.add_output_option(parser, "-o")


def add_packet_options(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup, *, required: bool
) -> None:
    """Add what describes one packet; `packet_of` makes it of them."""
    parser.add_argument("--uid", metavar="U", help="user id of the sending process (0)")
    parser.add_argument("--gid", metavar="G", help="its group id (as --uid)")
    parser.add_argument(
        "--cgroup", metavar="PATH", help="its cgroup, such as /kubepods/pod1/abc (not known)"
    )
    parser.add_argument(
        "--to", metavar="ADDR:PORT", required=required, help="destination; IPv6 is [ADDR]:PORT"
    )
    parser.add_argument(
        "--from",
        dest="source",
        metavar="ADDR",
        help="source address (outbound: the one that its route gives)",
    )
    parser.add_argument("--mark", metavar="M", help="mark of the sending socket, such as 0x539 (0)")
    parser.add_argument("--proto", choices=("tcp", "udp"), default="tcp", help="protocol (tcp)")
    parser.add_argument(
        "--in",
        dest="inbound",
        action="store_true",
        help="a packet that arrives from outside, not one that is sent",
    )


def run(arguments: argparse.Namespace) -> int:
    packet = packet_of(arguments)
    with opened(arguments.netns, allow_node=True) as target, reading(target.netns) as session:
        state = observe(session)
        found = trace(state, read_host(target.netns), packet, inbound=arguments.inbound)
    if arguments.output == "json":
        output.print_json({**render.to_json(found), "not_walked": list(not_walked(state))})
    else:
        output.warn(not_walked(state))
        print(render.to_text(found, all_rules=arguments.all or arguments.verbose), end="")
    return 0


def packet_of(arguments: argparse.Namespace) -> Packet:
    """Return the packet that the options describe.

    Raises: InvalidSettings with every mistake.
    """
    problems: list[str] = []
    destination, port = _endpoint(arguments.to, problems)
    source = _address("--from", arguments.source, problems) if arguments.source else None
    uid: int | None = _identity("--uid", arguments.uid or "0", problems)
    gid = _identity("--gid", arguments.gid, problems) if arguments.gid else uid
    mark = _mark(arguments.mark, problems) if arguments.mark else 0
    of_sender = (arguments.uid, arguments.gid, arguments.cgroup, arguments.mark)
    if arguments.inbound and any(of_sender):
        which = "--uid, --gid, --cgroup and --mark are of a sender in the namespace"
        problems.append(f"{which}, which --in has not")
    if arguments.inbound:  # a packet that arrives belongs to no process here
        uid = gid = None
    if source is not None and destination is not None and source.version != destination.version:
        problems.append(f"--from {source} and --to {destination} are of different families")
    if problems or destination is None:
        raise InvalidSettings(tuple(problems))
    return Packet(
        protocol=arguments.proto,
        destination=destination,
        dport=port,
        source=source,
        uid=uid,
        gid=gid,
        cgroup=arguments.cgroup,
        mark=mark,
    )


def _mark(text: str, problems: list[str]) -> int:
    if re.fullmatch(r"0x[0-9a-fA-F]{1,8}", text):
        return int(text, 16)
    if (number := within(text, 0, 2**32 - 1)) is not None:
        return number
    problems.append(f"--mark {shown(text)} is not a number from 0 to {2**32 - 1}, or 0x and one")
    return 0


def _endpoint(text: str, problems: list[str]) -> tuple[Address | None, int]:
    address, colon, port = text.rpartition(":")
    if not colon or not address or (":" in address and not address.startswith("[")):
        problems.append(f"--to {text!r}: write ADDRESS:PORT, or [ADDRESS]:PORT for IPv6")
        return None, 0
    number = _number("--to", port, 1, MAX_PORT, problems)
    found = _address("--to", address.strip("[]"), problems)
    return None if found is None else _dialled(found), number


def _dialled(address: Address) -> Address:
    """Return where the kernel sends what is dialled: 0.0.0.0 and :: are this host itself."""
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return loopback(address) if address.is_unspecified else address


def _address(option: str, text: str, problems: list[str]) -> Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        problems.append(f"{option} {text!r} is not an IP address; names are not looked up")
        return None


def _identity(option: str, text: str, problems: list[str]) -> int:
    return _number(option, text, 0, MAX_ID, problems)


def _number(option: str, text: str, low: int, high: int, problems: list[str]) -> int:
    if (number := within(text, low, high)) is not None:
        return number
    problems.append(f"{option} {shown(text)} is not a number from {low} to {high}")
    return 0
