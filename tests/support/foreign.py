"""What others put into a namespace: istio-init's capture, and rules that are nobody's of a mesh."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.support.netns import inside

FLAVOURS = ("legacy", "nft")
TOOLS = {4: "iptables", 6: "ip6tables"}
TABLES = ("raw", "mangle", "nat", "filter", "security")
CASES_FILE = Path(__file__).with_name("istio_init.json")

# Both have counters, comments, policies, user chains, goto, and extensions that no capture uses.
FOREIGN = {
    4: """\
*raw
:FOREIGN - [0:0]
[3:180] -A PREROUTING -p udp -m udp --dport 4789 -j CT --notrack
[0:0] -A OUTPUT -j FOREIGN
[7:420] -A FOREIGN -d 10.5.0.0/16 -m comment --comment "not ours, \\"really\\"" -j ACCEPT
COMMIT
*mangle
:FOREIGN - [0:0]
[1:60] -A PREROUTING -i eth7 -j FOREIGN
[2:120] -A FOREIGN -p tcp -m tcp --tcp-flags SYN,RST SYN -j TCPMSS --set-mss 1300
[5:300] -A POSTROUTING -o eth7 -j MARK --set-xmark 0x4000/0x4000
COMMIT
*nat
:FOREIGN - [0:0]
:FOREIGN-EMPTY - [0:0]
[11:660] -A PREROUTING -d 10.96.0.1/32 -p tcp -m tcp --dport 4 -j DNAT --to-destination 10.5.0.1:643
[0:0] -A OUTPUT -d 127.0.0.11/32 -j FOREIGN
[4:240] -A FOREIGN -p udp -m udp --dport 53 -j DNAT --to-destination 127.0.0.11:40953
[6:360] -A POSTROUTING -s 10.5.0.0/16 ! -o lo -j MASQUERADE --random-fully
COMMIT
*filter
:FOREIGN - [0:0]
[9:540] -A INPUT -i eth7 -p tcp -m tcp --dport 22 -m conntrack --ctstate NEW -j FOREIGN
[8:480] -A FORWARD -m mark --mark 0x4000/0x4000 -g FOREIGN
[2:80] -A FOREIGN -m limit --limit 5/sec --limit-burst 7 -j LOG --log-prefix "x "
[1:40] -A FOREIGN -j REJECT --reject-with icmp-admin-prohibited
COMMIT
*security
[1:40] -A OUTPUT -p icmp -m icmp --icmp-type 8 -j RETURN
COMMIT
""",
}
FOREIGN[6] = (
    FOREIGN[4]
    .replace("10.5.0.0/16", "fd00:5::/32")
    .replace("10.5.0.1:643", "[fd00:5::1]:643")
    .replace("10.96.0.1/32", "fd00:96::1/128")
    .replace("127.0.0.11/32", "fd00:11::1/128")
    .replace("127.0.0.11:40953", "[fd00:11::1]:40953")
    .replace("icmp-admin-prohibited", "icmp6-adm-prohibited")
    .replace("-p icmp -m icmp --icmp-type 8", "-p ipv6-icmp -m icmp6 --icmpv6-type 128")
)

FOREIGN_NFT = """\
table inet theirs {
  set blocked { type ipv4_addr; flags interval; elements = { 10.6.0.0/16, 10.7.0.1 } }
  map ports { type inet_service : verdict; elements = { 22 : accept, 23 : drop } }
  counter seen { packets 5 bytes 300 }
  chain input {
    type filter hook input priority 10; policy accept;
    ip saddr @blocked counter packets 7 bytes 420 drop comment "theirs"
    iifname "eth7" tcp dport vmap @ports
    counter name seen
  }
  chain loose { tcp dport { 80, 443 } accept; }
}
table ip intercept-lookalike {
  chain ISTIO_OUTPUT { accept; }
}
table netdev wire {
  set macs { type ether_addr; }
}
"""

FOREIGN_ROUTING = (
    "ip addr add 10.9.9.9/32 dev lo",
    "ip -6 addr add fd00:9::9/128 dev lo",
    "ip -4 rule add pref 90 fwmark 0x4000/0x4000 lookup 200",
    "ip -4 rule add pref 91 fwmark 0x29 lookup 200",
    "ip -4 rule add pref 92 from 10.9.0.0/16 lookup 200",
    "ip -6 rule add pref 91 fwmark 0x29 lookup 200",
    "ip -4 route add 10.8.0.0/16 dev lo table 200",
    "ip -6 route add fd00:8::/32 dev lo table 200",
    "ip -4 route add local 10.10.0.0/16 dev lo table 200",
)


def add_foreign(name: str) -> None:
    """Put foreign things into every table of both flavours and families, nf_tables and routing."""
    for flavour in FLAVOURS:
        for version, text in FOREIGN.items():
            tool = f"{TOOLS[version]}-{flavour}-restore"
            inside(name, tool, "--noflush", "--counters", stdin=text)
    inside(name, "nft", "-f", "-", stdin=FOREIGN_NFT)
    for line in FOREIGN_ROUTING:
        inside(name, *line.split())


def counters(name: str) -> dict[str, str]:
    """Return all rules with their counters; built-in chains count every packet, so not theirs."""
    found = {}
    for flavour in FLAVOURS:
        for version, tool in TOOLS.items():
            text = inside(name, f"{tool}-{flavour}-save", "-c")
            lines = (line for line in text.splitlines() if not line.startswith(("#", ":")))
            found[f"{flavour}{version}"] = "\n".join(lines)
    found["nft"] = inside(name, "nft", "list", "table", "inet", "theirs")
    return found


def handles(name: str) -> tuple[str, ...]:
    """Return every object of nf_tables with its handle: a rule written anew has another one.

    What nft prints of a rule behind its counter is not always the same, see `capturing.state`.
    """
    text = re.sub(r" counter .*(?=# handle)", " ", inside(name, "nft", "-a", "list", "ruleset"))
    return tuple(line.strip() for line in text.splitlines() if "# handle" in line)


@dataclass(frozen=True, slots=True)
class IstioInit:
    """What istio-init writes for one configuration: restore text by family, and `ip` commands."""

    name: str
    texts: Mapping[int, str]
    commands: tuple[str, ...]

    def load(self, namespace: str, flavour: str) -> None:
        try_tools(namespace, flavour)
        for version, text in self.texts.items():
            inside(namespace, f"{TOOLS[version]}-{flavour}-restore", "--noflush", stdin=text)
        for line in self.commands:
            inside(namespace, *line.split())


def try_tools(namespace: str, flavour: str) -> None:
    """Do as istio-init does first, in both families, whichever it then writes to.

    It leaves an empty chain, and an empty table in a family that it leaves alone.
    """
    for tool in TOOLS.values():
        for verb in ("-A", "-D"):
            rule = ("-t", "nat", verb, "INPUT", "-p", "255", "-j", "RETURN")
            inside(namespace, f"{tool}-{flavour}", *rule)


def istio_init_cases() -> tuple[IstioInit, ...]:
    """Return the sidecar cases of Istio's own golden files (Apache-2.0)."""
    return tuple(
        IstioInit(
            case["name"],
            {v: text for v in (4, 6) if (text := case[f"ipv{v}"])},
            tuple(case["commands"]),
        )
        for case in json.loads(CASES_FILE.read_text())
    )


ISTIO_INIT = {case.name: case for case in istio_init_cases()}

# A hand-written sidecar with DNS rules straight in built-in chains, as older versions had them.
OLDER = IstioInit(
    "older",
    {
        4: """\
*nat
:ISTIO_INBOUND - [0:0]
:ISTIO_REDIRECT - [0:0]
:ISTIO_IN_REDIRECT - [0:0]
:ISTIO_OUTPUT - [0:0]
-A ISTIO_REDIRECT -p tcp -j REDIRECT --to-ports 15001
-A ISTIO_IN_REDIRECT -p tcp -j REDIRECT --to-ports 15006
-A PREROUTING -p tcp -j ISTIO_INBOUND
-A ISTIO_INBOUND -p tcp --dport 15008 -j RETURN
-A ISTIO_INBOUND -p tcp -j ISTIO_IN_REDIRECT
-A OUTPUT -p tcp -j ISTIO_OUTPUT
-A ISTIO_OUTPUT -m owner --uid-owner 1337 -j RETURN
-A ISTIO_OUTPUT -d 127.0.0.1/32 -j RETURN
-A ISTIO_OUTPUT -j ISTIO_REDIRECT
-A OUTPUT -p udp --dport 53 -m owner --uid-owner 1337 -j RETURN
-A OUTPUT -p udp --dport 53 -d 10.96.0.10/32 -j REDIRECT --to-ports 15053
COMMIT
*raw
-A OUTPUT -p udp --dport 53 -m owner --uid-owner 1337 -j CT --zone 1
-A OUTPUT -p udp --sport 15053 -m owner --uid-owner 1337 -j CT --zone 2
-A OUTPUT -p udp --dport 53 -d 10.96.0.10/32 -j CT --zone 2
-A PREROUTING -p udp --sport 53 -s 10.96.0.10/32 -j CT --zone 1
COMMIT
""",
    },
    (),
)


# A sidecar as Istio's own nftables mode has it, cut down to one rule of each kind.
ISTIO_NFT = """\
table inet istio-proxy-nat {
    chain prerouting {
        type nat hook prerouting priority dstnat; policy accept;
        meta l4proto tcp jump istio-inbound
    }
    chain output {
        type nat hook output priority -100; policy accept;
        jump istio-output
    }
    chain istio-inbound {
        tcp dport 15008 counter return
        meta l4proto tcp counter redirect to :15006
    }
    chain istio-output {
        meta skuid 1337 counter return
        meta l4proto tcp counter redirect to :15001
    }
}
table inet istio-proxy-mangle {
    chain prerouting {
        type filter hook prerouting priority mangle; policy accept;
        meta l4proto tcp meta mark 1337 counter ct mark set meta mark
    }
}
table inet istio-ambient-raw {
    chain output {
        type filter hook output priority raw; policy accept;
        udp dport 53 counter ct zone set 1
    }
}
"""


def without_capture(text: str) -> bool:
    """Tell whether a printed ruleset names nothing of a capture."""
    return not re.search(r"ISTIO_(?!OUTPUT \{ accept)|150(01|06|53)|intercept-agent", text)
