"""Random rule sets that iptables accepts, made of what meshes and kube-proxy use.

Each table has a tree of chains at most three deep. What may stand in a chain depends on the hooks
from which it can be reached, as the kernel checks it when it loads the rules.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from agent.model.ruleset import BUILTIN_CHAINS, Family
from tests.support.wire import PORTS

DEPTH = 3

# Packets of a TCP connection behind its first one must get through, or nobody answers.
NOT_FIRST = "-p tcp -m tcp ! --tcp-flags FIN,SYN,RST,ACK SYN -j ACCEPT"

V4 = "127.0.0.1 127.0.0.5 10.77.0.2 10.77.0.3 10.78.0.2 10.77.0.1 10.96.0.1 192.168.5.5 8.8.8.8"
V6 = "::1 fd77::2 fd77::3 fd78::2 fd77::1 fd96::1 fd96::10 fd99::5 2001:db8::8"
NETWORKS_V4 = (
    "127.0.0.0/8 127.0.0.1/32 127.0.0.6/32 10.77.0.0/24 10.0.0.0/8 10.96.0.0/12 192.168.0.0/16 "
    "10.77.0.2/32 8.0.0.0/7 10.0.0.1/255.0.0.255"
)
NETWORKS_V6 = "::1/128 ::6/128 fd77::/64 fd00::/8 fd96::/16 fd77::2/128 2001:db8::/32 fd99::/16"
ADDRESSES = {Family.IPV4: tuple(V4.split()), Family.IPV6: tuple(V6.split())}
NETWORKS = {Family.IPV4: tuple(NETWORKS_V4.split()), Family.IPV6: tuple(NETWORKS_V6.split())}
OWN_SOURCES = {Family.IPV4: ("10.77.0.2", "10.77.0.3"), Family.IPV6: ("fd77::2", "fd77::3")}
INTERFACES = ("lo", "eth0", "net1", "eth+", "e+", "dummy9")
MARKS = ("0x1", "0x2", "0x539", "0x53a", "0x4000", "0x8000")
MASKS = ("0xffffffff", "0xfff", "0x4000", "0x1", "0xff00")


@dataclass(frozen=True, slots=True)
class Spot:
    """A chain in which rules are written, and the hooks from which it is reached."""

    table: str
    hooks: frozenset[str]
    builtin: str = ""

    def within(self, *hooks: str) -> bool:
        return self.hooks <= frozenset(hooks)


class Rules:
    """Writes rule sets of one family; the same random numbers give the same text."""

    def __init__(self, random: Random, family: Family) -> None:
        self._random = random
        self._family = family

    def text(self) -> str:
        """Return a complete set of tables in the form of iptables-save."""
        return "".join(self._table(name) for name in ("filter", "mangle", "nat", "raw", "security"))

    # --- chains ----------------------------------------------------------------------------------

    def _table(self, table: str) -> str:
        hooks = BUILTIN_CHAINS[table]
        groups = self._groups(table)
        lines = [f"*{table}"]
        lines += [f":{hook} {self._policy(table)} [0:0]" for hook in hooks]
        names = {
            group: [f"{table[0].upper()}{index}D{d}" for d in range(1, DEPTH + 1)]
            for index, group in enumerate(groups)
        }
        lines += [f":{name} - [0:0]" for chains in names.values() for name in chains]
        if table != "nat":
            lines += [f"-A {hook} {NOT_FIRST}" for hook in hooks]
        for hook in hooks:
            group = self._random.choice([g for g in groups if hook in g])
            spot = Spot(table, frozenset({hook}), hook)
            lines += self._rules(hook, spot, names[group][:1], self._random.randint(0, 4))
        for group, chains in names.items():
            for depth, chain in enumerate(chains):
                spot = Spot(table, group)
                lines += self._rules(chain, spot, chains[depth + 1 :], self._random.randint(1, 5))
        return "\n".join([*lines, "COMMIT", ""])

    def _groups(self, table: str) -> list[frozenset[str]]:
        """Return sets of hooks that share chains; some are narrow, so that more may stand there."""
        hooks = frozenset(BUILTIN_CHAINS[table])
        if table == "nat":
            return [frozenset({"PREROUTING", "OUTPUT"}), frozenset({"INPUT", "POSTROUTING"})]
        local = hooks & {"OUTPUT", "POSTROUTING"}
        return [hooks, local, hooks - local]

    def _policy(self, table: str) -> str:
        return "DROP" if table != "nat" and self._random.random() < 0.02 else "ACCEPT"

    def _rules(self, chain: str, spot: Spot, below: Sequence[str], count: int) -> list[str]:
        found = []
        for _ in range(count):
            conditions, protocol = self._conditions(spot)
            found.append(f"-A {chain} {conditions} {self._target(spot, below, protocol)}")
        if below and self._random.random() < 0.7:
            found.append(f"-A {chain} -j {below[0]}")
        return found

    # --- conditions ------------------------------------------------------------------------------

    def _conditions(self, spot: Spot) -> tuple[str, str]:
        """Return conditions and the protocol that they require, if any."""
        protocol = self._random.choice(("", "tcp", "tcp", "udp"))
        made = [f"-p {protocol}"] if protocol else []
        made += self._interfaces(spot)
        kinds: list[Callable[[], str]] = [
            self._network,
            self._mark,
            self._state,
            self._addrtype,
            self._range,
        ]
        if protocol:
            kinds += [lambda: self._ports(protocol), self._multiport]
        if protocol == "tcp":
            kinds.append(lambda: "-m tcp --tcp-flags FIN,SYN,RST,ACK SYN")
        if spot.within("OUTPUT", "POSTROUTING"):
            kinds += [self._owner] * 2
        count = self._random.choice((0, 1, 1, 2))
        made += [kind() for kind in self._random.sample(kinds, count)]
        if self._random.random() < 0.03:
            made.append("-m statistic --mode random --probability 0.5")
        return " ".join(made), protocol

    def _not(self) -> str:
        return "! " if self._random.random() < 0.25 else ""

    def _interfaces(self, spot: Spot) -> list[str]:
        # In a chain of its own -i is refused at OUTPUT; in a shared one it compares an empty name.
        name = self._random.choice(INTERFACES)
        sides = []
        if spot.builtin not in ("OUTPUT", "POSTROUTING"):
            sides.append("-i")
        if spot.builtin not in ("PREROUTING", "INPUT"):
            sides.append("-o")
        if self._random.random() > 0.25:
            return []
        return [f"{self._not()}{self._random.choice(sides)} {name}"]

    def _network(self) -> str:
        network = self._random.choice(NETWORKS[self._family])
        return f"{self._not()}{self._random.choice(('-d', '-d', '-s'))} {network}"

    def _port(self) -> str:
        first = self._random.choice(PORTS)
        return str(first) if self._random.random() < 0.7 else f"{first}:{first + 8000}"

    def _ports(self, protocol: str) -> str:
        side = self._random.choice(("--dport", "--dport", "--dport", "--sport"))
        ports = self._port() if side == "--dport" else self._random.choice(("20000:20999", "53"))
        return f"-m {protocol} {self._not()}{side} {ports}"

    def _multiport(self) -> str:
        count = self._random.randint(1, 4)
        ports = ",".join(dict.fromkeys(self._port() for _ in range(count)))
        side = self._random.choice(("--dports", "--dports", "--ports", "--sports"))
        return f"-m multiport {self._not()}{side} {ports}"

    def _mark(self) -> str:
        module = self._random.choice(("mark", "connmark"))
        mask = self._random.choice(("", *(f"/{mask}" for mask in MASKS)))
        return f"-m {module} {self._not()}--mark {self._random.choice(MARKS)}{mask}"

    def _state(self) -> str:
        states = ("NEW", "ESTABLISHED,RELATED", "INVALID", "DNAT", "SNAT", "NEW,DNAT", "UNTRACKED")
        return f"-m conntrack {self._not()}--ctstate {self._random.choice(states)}"

    def _addrtype(self) -> str:
        kinds = ["LOCAL", "UNICAST", "MULTICAST"]
        kinds += (
            ["LOCAL,UNICAST"] if self._family is Family.IPV6 else ["BROADCAST", "LOCAL,UNICAST"]
        )
        side = self._random.choice(("--dst-type", "--src-type"))
        return f"-m addrtype {self._not()}{side} {self._random.choice(kinds)}"

    def _range(self) -> str:
        first, last = {
            Family.IPV4: ("10.77.0.1", "10.77.0.2"),
            Family.IPV6: ("fd77::1", "fd77::2"),
        }[self._family]
        side = self._random.choice(("--dst-range", "--src-range"))
        return f"-m iprange {self._not()}{side} {first}-{last}"

    def _owner(self) -> str:
        users = ("0", "1000", "1337", "1000-1337", "2000")
        groups = ("0", "1000", "1337", "3000", "1337-3000")
        if self._random.random() < 0.6:
            return f"-m owner {self._not()}--uid-owner {self._random.choice(users)}"
        if self._random.random() < 0.2:
            return f"-m owner {self._not()}--socket-exists"
        return f"-m owner {self._not()}--gid-owner {self._random.choice(groups)}"

    # --- targets ---------------------------------------------------------------------------------

    def _target(self, spot: Spot, below: Sequence[str], protocol: str) -> str:
        """Return a target that may stand here. Weights keep most packets alive for a while."""
        kinds: list[tuple[float, Callable[[], str]]] = [
            (3, lambda: "-j RETURN"),
            (1, lambda: "-j ACCEPT"),
            (3, self._set_mark),
            (1, lambda: '-m comment --comment "a b"'),
        ]
        if below:
            kinds.append((4, lambda: f"-j {self._random.choice(below)}"))
            kinds.append((2, lambda: f"-g {self._random.choice(below)}"))
        if spot.table != "nat":
            kinds.append((0.4, lambda: "-j DROP"))
        if spot.table == "filter" and spot.within("INPUT", "FORWARD", "OUTPUT"):
            kinds.append((0.3, lambda: "-j REJECT"))
        if spot.table == "raw" and protocol == "udp":
            kinds.append((2, lambda: self._random.choice(("-j CT --notrack", "-j CT --zone 2"))))
        if spot.table == "mangle" and spot.builtin == "PREROUTING" and protocol:
            kinds.append((6, self._tproxy))
        if spot.table == "nat" and spot.within("PREROUTING", "OUTPUT") and protocol:
            kinds += [(6, self._redirect), (5, self._dnat)]
        if spot.table == "nat" and spot.within("INPUT", "POSTROUTING"):
            kinds.append((2, self._snat))
        if spot.builtin == "POSTROUTING" and spot.table == "nat":
            kinds.append((2, lambda: "-j MASQUERADE"))
        weights = [weight for weight, _ in kinds]
        return self._random.choices([kind for _, kind in kinds], weights)[0]()

    def _set_mark(self) -> str:
        mark, mask = self._random.choice(MARKS), self._random.choice(MASKS)
        return self._random.choice(
            (
                f"-j MARK --set-mark {mark}",
                f"-j MARK --set-xmark {mark}/{mask}",
                f"-j MARK --or-mark {mark}",
                f"-j CONNMARK --set-xmark {mark}/{mask}",
                f"-j CONNMARK --save-mark --nfmask {mask} --ctmask {mask}",
                f"-j CONNMARK --restore-mark --nfmask {mask} --ctmask {mask}",
            )
        )

    def _tproxy(self) -> str:
        port = self._random.choice((15001, 15006))
        mark = self._random.choice(
            ("", " --tproxy-mark 0x539/0xffffffff", " --tproxy-mark 0x1/0x1")
        )
        return f"-j TPROXY --on-port {port}{mark}"

    def _redirect(self) -> str:
        ports = self._random.choice(("", "15001", "15006", "80", "15053-15060", "443-9090"))
        return f"-j REDIRECT --to-ports {ports}" if ports else "-j REDIRECT"

    def _dnat(self) -> str:
        address = self._random.choice([a for a in ADDRESSES[self._family] if a != "127.0.0.5"])
        port = self._random.choice(("", ":80", ":8080", ":15006"))
        brackets = port and self._family is Family.IPV6
        return f"-j DNAT --to-destination {f'[{address}]' if brackets else address}{port}"

    def _snat(self) -> str:
        return f"-j SNAT --to-source {self._random.choice(OWN_SOURCES[self._family])}"
