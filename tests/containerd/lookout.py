"""Counts in a node's network namespace which pods reach it without their proxies.

The pods of a node with `images.EAGER` try to from their first process on. The kernel counts them,
before anything that could refuse them, so that no attempt is missed.
"""

import json
from collections.abc import Iterable

from tests.containerd.images import LOOKOUT, LOOKOUT_PORT
from tests.containerd.node import Node, Pod

TABLE = """
table inet lookout {
    set callers4 { type ipv4_addr; size 65535; flags dynamic; }
    set callers6 { type ipv6_addr; size 65535; flags dynamic; }
    chain in {
        type filter hook prerouting priority raw; policy accept;
        tcp dport PORT ip daddr V4 add @callers4 { ip saddr }
        tcp dport PORT ip6 daddr V6 add @callers6 { ip6 saddr }
    }
}
"""


def post(node: Node) -> None:
    """Give the node the addresses that eager pods call, and count who comes."""
    for address in LOOKOUT.values():
        node.run("ip", "addr", "add", address, "dev", "lo")
    text = TABLE.replace("PORT", str(LOOKOUT_PORT))
    text = text.replace("V4", LOOKOUT[4]).replace("V6", LOOKOUT[6])
    file = node.base / "lookout.nft"
    file.write_text(text)
    node.run("nft", "-f", str(file))


def callers(node: Node) -> set[str]:
    """Return the addresses that were counted so far."""
    found: set[str] = set()
    for version in LOOKOUT:
        listing = node.run("nft", "-j", "list", "set", "inet", "lookout", f"callers{version}")
        for item in json.loads(listing)["nftables"]:
            found.update(item.get("set", {}).get("elem", ()))
    return found


def addresses(pods: Iterable[Pod]) -> set[str]:
    return {ip for pod in pods for ip in pod.ips}
