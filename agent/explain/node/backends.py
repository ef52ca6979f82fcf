"""Which backends this node can do, what `auto` takes and why, and who else uses which. Pure."""

from collections.abc import Iterator

from agent.explain.finding import Finding, Severity
from agent.explain.node.facts import NodeFacts
from agent.explain.node.features import FEATURES, Feature
from agent.model.state import BACKENDS, IPTABLES_LEGACY, IPTABLES_NFT, NFTABLES

INET_NAT = (5, 2)  # the first kernel with nat chains in inet tables
COOKIES = (5, 14)  # the first one that numbers namespaces
PACKAGES = {NFTABLES: "nftables", IPTABLES_NFT: "iptables", IPTABLES_LEGACY: "iptables"}
PERSIST = "/etc/modules-load.d/intercept-agent.conf"


def backend_findings(facts: NodeFacts) -> Iterator[Finding]:
    yield from _kernel(facts)
    yield from _auto(facts)
    for backend in BACKENDS:
        yield from _backend(facts, backend)
    yield from _tools(facts)
    yield from _both(facts)
    yield from _alternatives(facts)


def unusable(facts: NodeFacts, backend: str) -> str:
    """Return why a backend cannot be used on this node, or nothing."""
    if reason := facts.backends.get(backend):
        return reason
    lacking = _lacking(facts, backend)
    if lacking:
        return f"the kernel has no {', '.join(feature.name for feature in lacking)}"
    if backend == NFTABLES and _version(facts) < INET_NAT:
        return f"kernel {facts.release} has no nat chains in inet tables (5.2 has)"
    return ""


def _lacking(facts: NodeFacts, backend: str, *, optional: bool = False) -> list[Feature]:
    return [
        feature
        for feature in FEATURES
        if backend in feature.needed_by
        and bool(feature.only_for) is optional
        and facts.features.get(feature.name) is False
    ]


def _version(facts: NodeFacts) -> tuple[int, ...]:
    parts = facts.release.split("-")[0].split(".")[:2]
    return tuple(int(part) for part in parts) if all(p.isdigit() for p in parts) else (99,)


def _kernel(facts: NodeFacts) -> Iterator[Finding]:
    if facts.lost_modules and any(facts.features.get(one.name) is None for one in FEATURES):
        yield Finding(
            kind="kernel",
            severity=Severity.WARNING,
            seen=f"/lib/modules/{facts.release} is not here, and this kernel loads modules",
            means="what is not loaded yet cannot be loaded: the kernel was upgraded and not "
            "started anew, or the directory is not mounted into this container",
            fix="reboot, or mount /lib/modules into the agent's container",
        )
    if _version(facts) < COOKIES:
        yield Finding(
            kind="kernel",
            severity=Severity.INFO,
            seen=f"kernel {facts.release} does not number network namespaces (5.14 does)",
            means="nothing is put on record; captures are recognised by their rules alone",
        )
    else:
        yield Finding(kind="kernel", severity=Severity.OK, seen=facts.release)


def _auto(facts: NodeFacts) -> Iterator[Finding]:
    if facts.configured != "auto" and (reason := unusable(facts, facts.configured)):
        yield Finding(
            kind="backend",
            severity=Severity.CRITICAL,
            seen=f"the configuration asks for {facts.configured}, which cannot be used: {reason}",
            means="every capture fails",
            fix="set backend: auto in the agent's configuration",
        )
        return
    if facts.chosen is None:
        why = "; ".join(f"{name}: {unusable(facts, name)}" for name in BACKENDS)
        yield Finding(
            kind="backend",
            severity=Severity.CRITICAL,
            seen=f"no backend can be used here: {why}",
            means="no pod can be captured",
            fix="apt-get install nftables iptables",
        )
        return
    if reason := unusable(facts, facts.chosen):
        other = next((name for name in BACKENDS if not unusable(facts, name)), "")
        yield Finding(
            kind="backend",
            severity=Severity.CRITICAL,
            seen=f"auto takes {facts.chosen}, whose tools are here, but {reason}",
            means="every capture fails",
            fix=f"set backend: {other} in the agent's configuration" if other else _load(facts),
        )
        return
    passed = BACKENDS[: BACKENDS.index(facts.chosen)]
    why = "; ".join(f"{name}: {unusable(facts, name)}" for name in passed)
    first = "it is the first in order, and can be used" if not passed else f"before it, {why}"
    yield Finding(
        kind="backend",
        severity=Severity.OK,
        seen=f"auto takes {facts.chosen} in a namespace that uses none yet: {first}",
    )


def _backend(facts: NodeFacts, backend: str) -> Iterator[Finding]:
    reason = unusable(facts, backend)
    if reason:
        installs = f"apt-get install {PACKAGES[backend]}" if backend in PACKAGES else ""
        yield Finding(
            kind=backend,
            severity=Severity.INFO,
            seen=f"cannot be used: {reason}",
            means="only where this backend is asked for does that matter",
            fix=installs if facts.backends.get(backend) else _load(facts, backend),
        )
        return
    parts = [f"{f.name} ({f.only_for})" for f in _lacking(facts, backend, optional=True)]
    unknown = [
        feature.name
        for feature in FEATURES
        if backend in feature.needed_by and facts.features.get(feature.name) is None
    ]
    if parts:
        yield Finding(
            kind=backend,
            severity=Severity.WARNING if backend == facts.chosen else Severity.INFO,
            seen=f"can be used, but the kernel has no {', '.join(parts)}",
            means="a pod that asks for that part is refused",
            fix=_load(facts, backend, optional=True),
        )
    else:
        more = f"; not known from here: {', '.join(unknown)}" if unknown else ""
        yield Finding(kind=backend, severity=Severity.OK, seen=f"can be used{more}")


def _load(facts: NodeFacts, backend: str = NFTABLES, *, optional: bool = False) -> str:
    """Return the command that loads what is missing, now and after each start of the node."""
    lacking = _lacking(facts, backend, optional=optional)
    names = dict.fromkeys(feature.module for feature in lacking)
    if not names:
        return ""
    if not facts.loads_modules:
        return "boot a kernel that has them: this one cannot load modules"
    return f"modprobe -a {' '.join(names)} && printf '%s\\n' {' '.join(names)} >> {PERSIST}"


def _tools(facts: NodeFacts) -> Iterator[Finding]:
    words = [f"{tool.name} {tool.version}" for tool in facts.tools]
    words += ["libnftables.so.1"] if facts.libnftables else []
    yield Finding(kind="tools", severity=Severity.OK, seen=", ".join(words) or "none")


def _both(facts: NodeFacts) -> Iterator[Finding]:
    for reason in facts.unreadable:
        yield Finding(
            kind="unreadable",
            severity=Severity.WARNING,
            seen=f"in the node's namespace, {reason}",
            means="what is there cannot be judged",
        )
    if facts.legacy is None or facts.nft is None:
        return
    legacy, nft = facts.legacy.rules, facts.nft.rules
    if legacy and nft:
        yield Finding(
            kind="both-backends",
            severity=Severity.WARNING,
            seen=f"the node has {legacy} rules in iptables-legacy and {nft} in iptables-nft",
            means="both are in force: a packet meets first what was programmed last, and each "
            "tool shows one half only; one of them is probably left over",
            fix="intercept-agent scan --host",
        )
    else:
        yield Finding(
            kind="both-backends",
            severity=Severity.OK,
            seen=f"{legacy} rules in iptables-legacy, {nft} in iptables-nft",
        )


def _alternatives(facts: NodeFacts) -> Iterator[Finding]:
    """The plain name `iptables` leads to one flavour, and the kubelet's hint is in the other."""
    plain = next((tool for tool in facts.tools if tool.name == "iptables"), None)
    if plain is None or facts.legacy is None or facts.nft is None:
        return
    flavour = IPTABLES_NFT if "nf_tables" in plain.version else IPTABLES_LEGACY
    used = IPTABLES_NFT if facts.nft.kube else IPTABLES_LEGACY if facts.legacy.kube else flavour
    if used != flavour:
        target = "/usr/sbin/iptables-nft" if used == IPTABLES_NFT else "/usr/sbin/iptables-legacy"
        yield Finding(
            kind="alternatives",
            severity=Severity.WARNING,
            seen=f"`iptables` is {plain.path} ({flavour}), and the kubelet's chains are in {used}",
            means="whoever calls plain `iptables` here sees and writes the rules that nobody "
            "else uses",
            fix=f"update-alternatives --set iptables {target}",
        )
