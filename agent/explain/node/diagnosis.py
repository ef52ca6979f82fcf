"""From what was seen of a node to findings: what it means, and the command that mends it. Pure."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from agent.explain.finding import WORST_FIRST, Finding, Severity
from agent.explain.node.backends import backend_findings
from agent.explain.node.facts import Cni, NodeFacts
from agent.explain.node.network import network_findings

OK, INFO, WARNING, CRITICAL = Severity.OK, Severity.INFO, Severity.WARNING, Severity.CRITICAL

# linux/capability.h: number, whether the agent works without, and what it is for.
NEEDED = {
    "CAP_SYS_ADMIN": (21, False, "enters the namespaces of pods"),
    "CAP_NET_ADMIN": (12, False, "writes rules, routes and addresses"),
    "CAP_NET_RAW": (13, False, "reads the tables of iptables-legacy"),
    "CAP_SYS_PTRACE": (19, True, "finds which processes live in which namespace"),
    "CAP_SETUID": (7, True, "proves captures (check --probe) as the users of a pod"),
    "CAP_SETGID": (6, True, "proves captures (check --probe) as the groups of a pod"),
}
# Plugins of other meshes that steer traffic in pods too.
OTHER_MESHES = {
    "istio-cni": "Istio",
    "linkerd-cni": "Linkerd",
    "kuma-cni": "Kuma",
    "consul-cni": "Consul",
    "merbridge-cni": "Merbridge",
    "kmesh-cni": "Kmesh",
}


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All findings of a node, the worst first."""

    facts: NodeFacts
    findings: tuple[Finding, ...]

    def count(self, severity: Severity) -> int:
        return sum(finding.severity is severity for finding in self.findings)

    @property
    def works(self) -> bool:
        """Whether nothing here keeps the agent from working."""
        return not self.count(CRITICAL)


def diagnose(facts: NodeFacts) -> Diagnosis:
    """Return what the facts mean."""
    found = [finding for rule in _RULES for finding in rule(facts)]
    found += [*backend_findings(facts), *network_findings(facts)]
    found.sort(key=lambda finding: WORST_FIRST.index(finding.severity))
    return Diagnosis(facts, tuple(found))


def _capabilities(facts: NodeFacts) -> Iterator[Finding]:
    if not facts.root:
        yield Finding(
            kind="capabilities",
            severity=INFO,
            seen="this command does not run as root",
            means="it sees less than the agent would; what it could not see is listed at the end",
            fix="sudo intercept-agent doctor",
        )
        return
    for name, (number, optional, purpose) in NEEDED.items():
        if not facts.capabilities >> number & 1:
            yield Finding(
                kind="capabilities",
                severity=WARNING if optional else CRITICAL,
                seen=f"{name} is missing",
                means=f"with it the agent {purpose}",
                fix=f"add {name.removeprefix('CAP_')} to securityContext.capabilities (Kubernetes) "
                f"or to CapabilityBoundingSet (systemd)",
            )
    if all(facts.capabilities >> number & 1 for number, _, _ in NEEDED.values()):
        yield Finding(kind="capabilities", severity=OK, seen="all that the agent needs")


def _namespaces(facts: NodeFacts) -> Iterator[Finding]:
    if facts.own_user_namespace:
        yield Finding(
            kind="user-namespace",
            severity=CRITICAL,
            seen="this runs in a user namespace of its own",
            means="the namespaces of pods belong to the node's and cannot be entered from here",
            fix="run the agent with hostUsers: true, or on the node itself",
        )
    if facts.own_pid_namespace:
        yield Finding(
            kind="pid-namespace",
            severity=WARNING,
            seen="this runs in a process namespace of its own",
            means="pods' processes are not seen: container:ID and pid:N find nothing of the node, "
            "and the node's own network namespace is harder to tell",
            fix="hostPID: true (Kubernetes) or --pid=host (Docker, Podman)",
        )


def _lsm(facts: NodeFacts) -> Iterator[Finding]:
    seen = ", ".join(filter(None, (facts.lsm, facts.selinux and f"SELinux {facts.selinux}")))
    if facts.confined:
        yield Finding(
            kind="lsm",
            severity=WARNING,
            seen=f"AppArmor confines this process by profile {facts.confined}",
            means="the profile may refuse setns and mount, which entering a namespace takes",
            fix="appArmorProfile: {type: Unconfined} in the agent's securityContext",
        )
    if facts.lockdown:
        yield Finding(
            kind="lsm",
            severity=INFO,
            seen=f"kernel lockdown is {facts.lockdown}",
            means="it matters to eBPF only (mode confidentiality refuses it)",
        )
    if facts.selinux == "enforcing":
        yield Finding(
            kind="lsm",
            severity=INFO,
            seen=f"security modules: {seen}",
            means="a refusal stands in the audit log: ausearch -m avc -ts recent",
        )
    elif not facts.confined:
        yield Finding(kind="lsm", severity=OK, seen=f"security modules: {seen or 'none'}")


def _mounts(facts: NodeFacts) -> Iterator[Finding]:
    if facts.cgroup2 is None:
        yield Finding(
            kind="cgroup2",
            severity=INFO,
            seen="no cgroup2 is mounted",
            means="per-container exemptions and the eBPF backend need one",
            fix="boot with systemd.unified_cgroup_hierarchy=1",
        )
    else:
        hybrid = " beside cgroup v1 (hybrid)" if facts.cgroup1 else ""
        yield Finding(kind="cgroup2", severity=OK, seen=f"at {facts.cgroup2}{hybrid}")
    if facts.bpffs is None:
        yield Finding(
            kind="bpffs",
            severity=INFO,
            seen="no bpf file system is mounted",
            means="the eBPF backend pins its programs there",
            fix="mount -t bpf bpf /sys/fs/bpf",
        )
    else:
        yield Finding(kind="bpffs", severity=OK, seen=f"at {facts.bpffs}")


def _agent(facts: NodeFacts) -> Iterator[Finding]:
    status = facts.agent
    if status is None:
        yield Finding(
            kind="agent",
            severity=CRITICAL if facts.mute else INFO,
            seen=facts.no_agent or "no agent runs here",
            means="captured pods stay captured; new ones are not",
            fix="systemctl restart intercept-agent"
            if facts.mute
            else "intercept-agent run --config FILE",
        )
        for port in facts.ports:
            yield Finding(
                kind="port",
                severity=CRITICAL,
                seen=f"{port.address}:{port.port} is taken by {port.holder}",
                means=f"the agent serves its {port.what} there, and does not start without it",
                fix=f"stop it, or set {port.what}: {{port: N}} in the agent's configuration",
            )
        return
    pending = status.get("pending")
    words = [str(one) for one in pending] if isinstance(pending, list) else []
    version = f"version {status.get('version', 'unknown')}"
    if words:
        yield Finding(
            kind="agent",
            severity=CRITICAL,
            seen=f"the running agent ({version}) is not ready: {'; '.join(words)}",
            means="it does not know, or cannot start, all pods of this node yet",
            fix="intercept-agent status",
        )
    else:
        mode = f"mode {status.get('mode')}, backend {status.get('backend')}"
        yield Finding(kind="agent", severity=OK, seen=f"runs and is ready ({version}, {mode})")


def _runtime(facts: NodeFacts) -> Iterator[Finding]:
    if facts.runtime:
        yield Finding(kind="runtime", severity=OK, seen=f"a runtime listens on {facts.runtime}")
    else:
        yield Finding(
            kind="runtime",
            severity=INFO,
            seen="no container runtime listens on any of the usual sockets",
            means="pods are known from the CNI plugin and the configuration alone",
            fix="set cri: {endpoint: unix:///path} in the agent's configuration, if there is one",
        )


def _cni(facts: NodeFacts) -> Iterator[Finding]:
    cni = facts.cni
    if cni is None:
        return
    if cni.elsewhere:
        yield Finding(
            kind="cni",
            severity=CRITICAL,
            seen=cni.elsewhere,
            means="the agent waits with its entry until the two agree",
            fix="set cni: {conf_dir: D, bin_dir: D} in the agent's configuration to the runtime's",
        )
        return
    if not cni.exists:
        yield Finding(
            kind="cni",
            severity=CRITICAL if cni.wanted else INFO,
            seen=f"there is no directory {cni.folder}",
            means="pods of a runtime are captured once it tells of them, not before they start",
            fix="intercept-agent cni install --conf-dir D" if cni.wanted else "",
        )
        return
    chain = " -> ".join(cni.chain) or "no plugin"
    where = (
        f"{cni.folder}/{cni.file}: {chain}" if cni.file else f"{cni.folder} has no configuration"
    )
    if cni.present and cni.binary:
        yield Finding(
            kind="cni",
            severity=CRITICAL,
            seen=f"{where}; {'; '.join(cni.binary)}",
            means="the runtime fails every start and stop of a pod while the plugin is missing",
            fix="intercept-agent cni install",
        )
    elif not cni.present:
        yield Finding(
            kind="cni",
            severity=CRITICAL if cni.wanted else WARNING,
            seen=f"{where}; {'; '.join(cni.differences)}",
            means="a pod can send before it is captured: the plugin is not in the chain as it "
            "should be",
            fix="intercept-agent cni install"
            + ("" if cni.file else ", once the base CNI is there"),
        )
    else:
        yield Finding(kind="cni", severity=OK, seen=where)
    yield from _other_meshes(cni)


def _other_meshes(cni: Cni) -> Iterator[Finding]:
    for plugin in sorted(cni.types & OTHER_MESHES.keys()):
        yield Finding(
            kind="other-mesh",
            severity=WARNING,
            seen=f"{plugin}, the plugin of {OTHER_MESHES[plugin]}, is in {cni.folder}",
            means="it programs pods as well: of two captures in one pod the later one wins",
            fix=f"uninstall one of the two: {OTHER_MESHES[plugin]}'s, or `intercept-agent cni "
            "uninstall`",
        )


def _disk(facts: NodeFacts) -> Iterator[Finding]:
    if facts.full_disk:
        yield Finding(
            kind="disk",
            severity=CRITICAL,
            seen=facts.full_disk,
            means="a capture is refused when it cannot be put on record",
            fix="df -h; df -i",
        )


def _lock(facts: NodeFacts) -> Iterator[Finding]:
    if facts.lock_holder:
        yield Finding(
            kind="xtables-lock",
            severity=WARNING,
            seen=f"/run/xtables.lock is held by {facts.lock_holder}",
            means="iptables-legacy waits for it; if that process never ends, so do writes",
            fix="intercept-agent doctor  # again: a moment later it is usually free",
        )
    else:
        yield Finding(kind="xtables-lock", severity=OK, seen="free")


_RULES: tuple[Callable[[NodeFacts], Iterator[Finding]], ...] = (
    _capabilities,
    _namespaces,
    _agent,
    _cni,
    _runtime,
    _lsm,
    _mounts,
    _lock,
    _disk,
)
