"""What was seen of a pod and its namespace: the input of every judgement. Pure values.

None stands for what could not be seen; `unseen` then has the reason in words.
"""

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from agent.formats.envoy import Certificate
from agent.kernel.processes import Process
from agent.kernel.sockets import KernelSocket
from agent.model import owned
from agent.model.decision import Decision
from agent.model.host import LOOPBACK, Host
from agent.model.numbers import PROXY_ID
from agent.model.ruleset import Family
from agent.model.settings import Settings
from agent.model.state import NamespaceState
from agent.model.values import Address


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What labels and annotations a pod has, who says so, and what follows from them."""

    who: str
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    decision: Decision


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentView:
    """What the running agent says of a pod; `state` is one of the contract's words."""

    state: str
    backend: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PodFacts:
    """A pod: as it was when its sandbox was made, and as it is now, as far as anybody knows.

    `containers` has the names of containers by their ids. `followed` tells that the running agent
    goes by what the pod is now.
    """

    namespace: str
    name: str
    uid: str = ""
    sandbox: str = ""
    host_network: bool = False
    created: Said | None = None
    now: Said | None = None
    agent: AgentView | None = None
    followed: bool = False
    containers: Mapping[str, str] = field(default_factory=dict)

    @property
    def title(self) -> str:
        return f"{self.namespace}/{self.name}"

    @property
    def decision(self) -> Decision | None:
        """The decision on the pod as it is now."""
        said = self.now or self.created
        return said.decision if said else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Listener:
    """A socket that waits for others, and the processes that hold it (none: not known)."""

    socket: KernelSocket
    processes: tuple[Process, ...] = ()

    @property
    def port(self) -> int:
        return self.socket.local[1]

    @property
    def who(self) -> str:
        if not self.processes:
            return f"a process of UID {self.socket.uid} that cannot be seen from here"
        return ", ".join(f"{process.name} (PID {process.pid})" for process in self.processes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Everything about one namespace.

    `target` is what the user called it, and what commands that are suggested call it. `node` says
    why it is the node's own. `settings` are those that the capture should follow, `origin` says who
    says so, `sources` where a setting stands that somebody gave. `applies` is the command that
    captures it so. `recorded` is the file in which this agent remembers a capture of it.
    """

    target: str
    path: str = ""
    netns: tuple[int, int] | None = None
    node: str = ""
    pod: PodFacts | None = None
    settings: Settings | None = None
    origin: str = ""
    sources: Mapping[str, str] = field(default_factory=dict)
    applies: str = ""
    recorded: str = ""
    state: NamespaceState | None = None
    backend: str = ""
    differences: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()
    host: Host | None = None
    name_servers: tuple[str, ...] = ()
    listeners: tuple[Listener, ...] | None = None
    processes: tuple[Process, ...] | None = None
    certificates: tuple[Certificate, ...] | None = None
    no_certificates: str = ""
    now: datetime
    unseen: tuple[str, ...] = ()

    @property
    def families(self) -> tuple[Family, ...]:
        """The families in which the namespace has an address that others can reach."""
        found = {
            Family.IPV4 if own.version == 4 else Family.IPV6
            for interface in (self.host.interfaces if self.host else ())
            for own in interface.addresses
            if interface.name != LOOPBACK and not own.ip.is_link_local
        }
        return tuple(family for family in Family if family in found)

    def own_address(self, family: Family) -> Address | None:
        """Return an address of the namespace that others reach it by."""
        like = ipaddress.ip_address("0.0.0.0" if family is Family.IPV4 else "::")
        for interface in self.host.interfaces if self.host else ():
            found = self.host.own(interface.name, like) if self.host else None
            if interface.name != LOOPBACK and found is not None and not found.is_link_local:
                return found
        return None

    def listening(
        self, port: int, *, protocol: str = "tcp", address: Address | None = None
    ) -> tuple[Listener, ...]:
        """Return who listens on a port, of those that take what arrives for `address`."""
        return tuple(
            listener
            for listener in self.listeners or ()
            if (listener.port, listener.socket.protocol) == (port, protocol)
            and (address is None or listener.socket.accepts(address))
        )

    @property
    def ambient(self) -> bool:
        """Whether the proxy is the node's, which is known by its mark and not by its user."""
        if self.settings is not None:
            return self.settings.ambient
        loaded = self.state.loaded.values() if self.state else ()
        return any(owned.is_ambient(r) for rulesets in loaded for r in rulesets.values())

    @property
    def proxy_uids(self) -> tuple[tuple[int, int], ...]:
        """The ranges of user ids that are exempt as the proxy's."""
        if self.ambient:
            return ()
        if self.settings is None:
            return ((PROXY_ID, PROXY_ID),)
        return tuple((span.first, span.last) for span in self.settings.proxy_uid)

    @property
    def proxy_gids(self) -> tuple[tuple[int, int], ...]:
        if self.ambient:
            return ()
        if self.settings is None:
            return ((PROXY_ID, PROXY_ID),)
        return tuple((span.first, span.last) for span in self.settings.proxy_gid)
