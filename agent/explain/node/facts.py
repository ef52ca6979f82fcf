"""What was seen of a node: the input of the doctor's judgement. Pure values; None: not seen."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from agent.kernel.node import Tool


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """A port that the agent is to listen on, and who does so already."""

    what: str
    address: str
    port: int
    holder: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cni:
    """The CNI configuration of the node. `chain` are the types of the plugins in order.

    `elsewhere` says that the runtime looks for it, or for plugins, somewhere else.
    """

    folder: str
    exists: bool = False
    elsewhere: str = ""
    file: str | None = None
    chain: tuple[str, ...] = ()
    wanted: bool = False  # the agent's configuration says that it keeps its entry here
    present: bool = False
    differences: tuple[str, ...] = ()
    binary: tuple[str, ...] = ()
    types: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How many rules one iptables flavour holds in the node's namespace; `kube`: kubelet's hint."""

    rules: int = 0
    kube: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """Everything about one node. `backends` says of each why it cannot be used, or None.

    `features` says of each kernel feature whether it is there or can be loaded, `configured` which
    backend the agent's configuration names, `chosen` which one auto takes. `mute` is an agent that
    takes connections and does not answer.
    """

    release: str = ""
    root: bool = True
    capabilities: int = 0
    own_pid_namespace: bool = False
    own_user_namespace: bool = False
    backends: Mapping[str, str | None] = field(default_factory=dict)
    configured: str = "auto"
    chosen: str | None = None
    features: Mapping[str, bool | None] = field(default_factory=dict)
    lost_modules: bool = False
    loads_modules: bool = True
    tools: tuple[Tool, ...] = ()
    libnftables: bool = False
    cgroup2: str | None = None
    cgroup1: bool = False
    bpffs: str | None = None
    lsm: str = ""
    confined: str = ""
    lockdown: str = ""
    selinux: str = ""
    legacy: Rules | None = None
    nft: Rules | None = None
    unreadable: tuple[str, ...] = ()
    lock_holder: str = ""
    conntrack: tuple[int, int] | None = None
    rp_filter: int | None = None
    bridge_calls_iptables: bool | None = None
    ipv6: str = ""
    inotify: tuple[int, int] | None = None
    synchronised: bool | None = None
    cni: Cni | None = None
    runtime: str = ""
    agent: Mapping[str, object] | None = None
    no_agent: str = ""
    mute: bool = False
    ports: tuple[Ports, ...] = ()
    full_disk: str = ""
    unseen: tuple[str, ...] = ()
