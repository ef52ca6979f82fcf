"""Gathers what the doctor judges; each part by itself, so that one that fails hides none.

Reads only: no table is asked for, no module loaded, no lock taken.
"""

import asyncio
import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agent.backends import registry
from agent.backends.session import reading
from agent.capture import record
from agent.capture.observe import observe
from agent.cli.agent_client import AgentClient
from agent.cli.cni_places import told, unfound, unread, usual
from agent.cli.seeing import Seen
from agent.cni import installer
from agent.cni.installer import Place
from agent.explain.node.facts import Cni, NodeFacts, Ports, Rules
from agent.explain.node.features import FEATURES
from agent.formats import cni_config
from agent.formats.cni_config import POLICIES, Entry
from agent.kernel import holders, libnftables, locks, node, processes, sockets
from agent.kernel.netns import INITIAL_PIDNS_INODE, Netns, id_at, open_target
from agent.model.errors import EnvironmentLacks
from agent.model.settings import Settings
from agent.model.state import BACKENDS, IPTABLES_LEGACY, IPTABLES_NFT, NamespaceState
from agent.node.config import Config
from agent.node.cri import endpoint

TOOLS = (
    *("iptables", "iptables-nft", "ip6tables-nft", "iptables-legacy", "ip6tables-legacy"),
    *("nft", "conntrack"),
)
KUBELET_CHAINS = ("KUBE-IPTABLES-HINT", "KUBE-KUBELET-CANARY")
WHOLE_USER_MAP = "0 0 4294967295"
FREE_BYTES = 1 << 20
_BPFFS = "/sys/fs/bpf"


def gather(known: Config, path: Path) -> NodeFacts:
    """Return everything that can be seen of this node; `path` is the agent's socket."""
    return _Reader(known, path).read()


class _Reader:
    """Reads one node, and remembers what it could not see."""

    def __init__(self, known: Config, path: Path) -> None:
        self._known = known
        self._path = path
        self._seen = Seen()

    def read(self) -> NodeFacts:
        kernel = node.Kernel()
        backends = {name: registry.ALL[name].missing() for name in BACKENDS}
        state = self._seen.part("the node's own rules", _observe)
        agent, no_agent, mute = self._agent()
        mounts = node.mounts()
        kinds = dict(reversed(mounts))
        count, limit = (node.number(f"net.netfilter.nf_conntrack_{w}") for w in ("count", "max"))
        instances = node.number("fs.inotify.max_user_instances")
        bridge = node.number("net.bridge.bridge-nf-call-iptables")
        return NodeFacts(
            release=kernel.release,
            root=os.geteuid() == 0,
            capabilities=self._seen.part("capabilities", lambda: processes.capabilities("self"))
            or 0,
            own_pid_namespace=_own_pid_namespace(_runtime(self._known)),
            own_user_namespace=_own_user_namespace(),
            backends=backends,
            configured=self._known.backend,
            chosen=_chosen(),
            features={f.name: kernel.has(f.module, f.symbol, f.extension) for f in FEATURES},
            lost_modules=kernel.lost_its_modules,
            loads_modules=kernel.loads_modules,
            tools=tuple(tool for name in TOOLS if (tool := node.tool(name))),
            libnftables=_has_library(),
            cgroup2=kinds.get("cgroup2"),
            cgroup1="cgroup" in kinds,
            bpffs=_BPFFS if ("bpf", _BPFFS) in mounts else kinds.get("bpf"),
            legacy=_rules(state, IPTABLES_LEGACY),
            nft=_rules(state, IPTABLES_NFT),
            unreadable=state.unreadable if state else (),
            lock_holder=_lock_holder(),
            conntrack=(count, limit) if count is not None and limit else None,
            rp_filter=node.number("net.ipv4.conf.all.rp_filter"),
            bridge_calls_iptables=None if bridge is None else bool(bridge),
            ipv6=_ipv6(),
            inotify=(node.inotify_instances(), instances) if instances else None,
            synchronised=node.clock_synchronised(),
            cni=self._seen.part("the CNI configuration", self._cni),
            runtime=_runtime(self._known),
            agent=agent,
            no_agent=no_agent,
            mute=mute,
            ports=() if agent is not None or mute else self._ports(),
            full_disk=_full_disk(),
            **_lsm(),
            unseen=tuple(self._seen.unseen),
        )

    def _agent(self) -> tuple[Mapping[str, object] | None, str, bool]:
        """Return the agent's status, or else why there is none, and whether it hangs."""
        try:
            with AgentClient(self._path) as agent:
                return dict(agent.ask("status")), "", False
        except EnvironmentLacks as error:
            if isinstance(error.__cause__, PermissionError):
                self._seen.unseen.append(f"the running agent cannot be asked: {error}")
            mute = isinstance(error.__cause__, TimeoutError)
            return None, str(error).partition("; ")[0], mute

    def _ports(self) -> tuple[Ports, ...]:
        """Return the ports of the agent that somebody else has (field report 94)."""
        found = []
        for what, listen in (("health", self._known.health), ("status", self._known.status)):
            holder = self._seen.part("listeners", lambda port=listen.port: _holder(port))  # type: ignore[misc]
            if listen.port and holder:
                found.append(
                    Ports(what=what, address=listen.address, port=listen.port, holder=holder)
                )
        return tuple(found)

    def _cni(self) -> Cni:
        places = asyncio.run(told(self._known.cri_endpoint))
        conf_dir, bin_dir = usual(places)
        conf = str(self._known.cni_conf_dir or conf_dir)
        bins = str(self._known.cni_bin_dir or bin_dir)
        program = str(self._known.cni_program) if self._known.cni_program else None
        # An entry is right with either policy: which one it is, is the installer's choice.
        entries = (Entry(socket=str(self._known.socket), failure_policy=one) for one in POLICIES)
        looks = [
            installer.look(Place(conf_dir=conf, bin_dir=bins, entry=entry, program=program))
            for entry in entries
        ]
        seen = next((look for look in looks if look.plan.present), looks[0])
        chains = {name: _types(data) for name, data in seen.snapshot.files.items()}
        active = {n: types for n, types in chains.items() if cni_config.is_configuration(n)}
        file = seen.plan.file
        before = file.removesuffix("list") if file else None
        name = file if file in active else before
        here = Place(conf_dir=conf, bin_dir=bins)
        return Cni(
            folder=conf,
            elsewhere=unread(here, places) or unfound(here, places),
            exists=seen.snapshot.exists,
            file=name,
            chain=active.get(name or "", ()),
            wanted=self._known.cni_conf_dir is not None,
            present=seen.plan.present,
            differences=seen.differences,
            binary=seen.binary,
            types=frozenset(one for types in active.values() for one in types),
        )


def _observe() -> NamespaceState:
    host, _ = open_target("host")
    with host, reading(host) as session:
        return observe(session)


def _chosen() -> str | None:
    try:
        return registry.choose("auto", NamespaceState(), Settings()).name
    except EnvironmentLacks:
        return None


def _has_library() -> bool:
    try:
        libnftables.load()
    except EnvironmentLacks:
        return False
    return True


def _rules(state: NamespaceState | None, backend: str) -> Rules | None:
    if state is None:
        return None
    loaded = state.of(backend)
    chains = {c.name for rules in loaded.values() for table in rules.tables for c in table.chains}
    return Rules(
        rules=sum(rules.rule_count() for rules in loaded.values()),
        kube=any(chain in chains for chain in KUBELET_CHAINS),
    )


def _lock_holder() -> str:
    pid = locks.xtables_lock_holder()
    return "" if pid is None else f"{holders.name(pid) or 'a process'} (PID {pid})"


def _holder(port: int) -> str:
    with Netns.open("/proc/self/ns/net") as here, here.run(sockets.SocketTable) as table:
        found = [one for one in table.listeners("tcp") if one.local[1] == port]
    if not found:
        return ""
    pids = [pid for held in holders.all_holders(s.inode for s in found).values() for pid in held]
    names = ", ".join(f"{holders.name(pid)} (PID {pid})" for pid in pids)
    return names or f"a process of UID {found[0].uid}"


def _types(data: bytes) -> tuple[str, ...]:
    """Return the types of the plugins in a CNI configuration, in order; none of a broken one."""
    try:
        document: Any = json.loads(data)
        listed = document.get("plugins", [document])
        return tuple(str(one["type"]) for one in listed)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return ()


def _ipv6() -> str:
    if not node.SYSCTL.joinpath("net/ipv6").is_dir():
        return "the kernel has no IPv6 (ipv6.disable=1, or it was built without)"
    for name in ("all", "default"):
        if node.number(f"net.ipv6.conf.{name}.disable_ipv6"):
            return f"net.ipv6.conf.{name}.disable_ipv6 is 1"
    return ""


def _runtime(known: Config) -> str:
    if known.cri_endpoint == "none":
        return ""
    paths = endpoint.candidates(known.cri_endpoint)
    return next((path for path in paths if endpoint.unreachable(path) is None), "")


def _own_pid_namespace(runtime: str) -> bool:
    """Tell whether the node's processes are hidden from this one.

    A node that is a container itself (kind) has a process namespace of its own, too: there the
    runtime is among the processes that are seen.
    """
    found = id_at("/proc/self/ns/pid")
    hidden = found is not None and found.ino != INITIAL_PIDNS_INODE
    return hidden and not (runtime and endpoint.listener(runtime))


def _own_user_namespace() -> bool:
    return " ".join((node.text("/proc/self/uid_map") or WHOLE_USER_MAP).split()) != WHOLE_USER_MAP


def _full_disk() -> str:
    """Return a sentence if the folder for records has no room left."""
    folder = record.state_dir()
    while not os.path.exists(folder):
        folder = folder.parent
    with contextlib.suppress(OSError):
        status = os.statvfs(folder)
        if status.f_bavail * status.f_frsize < FREE_BYTES:
            return f"less than 1 MiB is free on the file system of {folder}"
        if status.f_files and not status.f_favail:
            return f"no inode is free on the file system of {folder}"
    return ""


def _lsm() -> dict[str, str]:
    enforce = node.text("/sys/fs/selinux/enforce")
    lockdown = node.text("/sys/kernel/security/lockdown") or ""
    profile = node.text("/proc/self/attr/apparmor/current") or ""
    chosen = lockdown.partition("[")[2].partition("]")[0]
    return {
        "lsm": node.text("/sys/kernel/security/lsm") or "",
        "confined": "" if profile.startswith("unconfined") else profile,
        "lockdown": "" if chosen == "none" else chosen,
        "selinux": {"0": "permissive", "1": "enforcing"}.get(enforce or "", ""),
    }
