"""Who puts what into a node's kernel, and what proves that they are still there. Data only.

A pattern is one of shells (`*`, `?`). Chains are `TABLE/CHAIN`, tables of nf_tables `FAMILY NAME`,
pins are paths below a bpf file system. The first owner that fits has it, so those of whom nothing
is ever a leftover come first. To look somebody up: `owner_of_chain`, `owner_of_table`, `by_name`.

Each fact has been taken from the source that its row names.
"""

import re
from collections.abc import Iterable, Mapping
from fnmatch import translate
from functools import lru_cache

from agent.model.cni_owners import CNIS, K3S, KUBE_PROXY_INSIDE
from agent.model.owner import Owner, Role

# Chains of kube-proxy that one of its modes makes and the other has no use for.
IPTABLES_MODE = (
    *("*/KUBE-SVC-*", "*/KUBE-SVL-*", "*/KUBE-SEP-*", "*/KUBE-FW-*", "*/KUBE-EXT-*"),
    *("*/KUBE-XLB-*", "*/KUBE-EXTERNAL-SERVICES", "*/KUBE-NODEPORTS", "filter/KUBE-SERVICES"),
    "*/KUBE-PROXY-CANARY",
)
IPVS_MODE = (
    *("nat/KUBE-FIREWALL", "*/KUBE-NODE-PORT", "*/KUBE-LOAD-BALANCER"),
    *("*/KUBE-SOURCE-RANGES-FIREWALL", "*/KUBE-IPVS-*"),
)

OWNERS: tuple[Owner, ...] = (
    Owner(
        name="kubelet",
        title="the kubelet",
        role=Role.NEVER,
        source="kubernetes pkg/kubelet/kubelet_network_linux.go; KEP-3178",
        chains=("*/KUBE-KUBELET-CANARY", "mangle/KUBE-IPTABLES-HINT", "filter/KUBE-FIREWALL"),
        processes=("kubelet", "hyperkube kubelet", *K3S),
        health=(10248,),
        heartbeats=("KUBE-KUBELET-CANARY",),
    ),
    Owner(
        name="portmap",
        title="the CNI plugin portmap",
        role=Role.NEVER,
        source="containernetworking/plugins plugins/meta/portmap",
        chains=("*/CNI-HOSTPORT-*", "*/CNI-DN-*", "*/CNI-SN-*"),
        tables=("* cni_hostport",),
        cni_types=("portmap",),
    ),
    Owner(
        name="cni-firewall",
        title="the CNI plugin firewall",
        role=Role.NEVER,
        source="containernetworking/plugins plugins/meta/firewall",
        chains=("*/CNI-FORWARD", "*/CNI-ADMIN", "*/CNI-ISOLATION-STAGE-*"),
        cni_types=("firewall",),
    ),
    Owner(
        name="cni-masquerade",
        title="the CNI plugins bridge and ptp",
        role=Role.NEVER,
        source="containernetworking/plugins pkg/ip/ipmasq_linux.go, pkg/utils/utils.go",
        chains=("nat/CNI-*",),
        tables=("* cni_plugins_masquerade",),
        cni_types=("bridge", "ptp"),
    ),
    Owner(
        name="docker",
        title="Docker",
        role=Role.NEVER,
        source="moby daemon/libnetwork/drivers/bridge; resolver rules in a container's namespace",
        chains=("*/DOCKER", "*/DOCKER-*", "*/DOCKER_*"),
        tables=("* docker-bridges",),
        processes=("dockerd",),
    ),
    Owner(
        name="podman",
        title="Podman",
        role=Role.NEVER,
        source="containers/netavark src/firewall",
        chains=("*/NETAVARK*",),
        tables=("* netavark",),
    ),
    Owner(
        name="kube-router",
        title="kube-router",
        role=Role.CNI,
        source="cloudnativelabs/kube-router pkg/controllers/netpol, proxy",
        chains=("*/KUBE-ROUTER-*", "*/KUBE-NWPLCY-*", "*/KUBE-POD-FW-*"),
        sets=("KUBE-SRC-*", "KUBE-DST-*", "kube-router-*", "inet6:KUBE-*"),
        links=("kube-dummy-if", "kube-bridge"),
        processes=("kube-router",),
        embedded=(("k3s", "--disable-network-policy"), ("k3s-server", "--disable-network-policy")),
        health=(20244,),
    ),
    Owner(
        name="kube-proxy",
        title="kube-proxy",
        role=Role.SERVICE_PROXY,
        source="kubernetes pkg/proxy/{iptables,ipvs,nftables}/proxier.go; KEP-3866",
        chains=(
            *("*/KUBE-SERVICES", "filter/KUBE-FORWARD", "*/KUBE-PROXY-FIREWALL"),
            *("nat/KUBE-POSTROUTING", "nat/KUBE-MARK-MASQ", "nat/KUBE-MARK-DROP"),
            *(*IPTABLES_MODE, *IPVS_MODE),
        ),
        tables=("ip kube-proxy", "ip6 kube-proxy"),
        sets=(
            *("KUBE-LOOP-BACK", "KUBE-CLUSTER-IP", "KUBE-EXTERNAL-IP*", "KUBE-LOAD-BALANCER*"),
            *("KUBE-NODE-PORT-*", "KUBE-HEALTH-CHECK-NODE-PORT", "KUBE-IPVS-IPS", "KUBE-6-*"),
        ),
        links=("kube-ipvs0",),
        processes=("kube-proxy", *KUBE_PROXY_INSIDE),
        embedded=tuple((name, "--disable-kube-proxy") for name in K3S),
        health=(10256, 10249),
        heartbeats=("KUBE-PROXY-CANARY",),
    ),
    Owner(
        name="istio",
        title="Istio (sidecar)",
        role=Role.CAPTURE,
        source="istio tools/istio-iptables, tools/istio-nftables; reference: README, Numbers",
        chains=(
            *("*/ISTIO_INBOUND", "*/ISTIO_OUTPUT", "*/ISTIO_OUTPUT_*", "*/ISTIO_REDIRECT"),
            *("*/ISTIO_IN_REDIRECT", "*/ISTIO_DIVERT", "*/ISTIO_TPROXY", "*/ISTIO_DROP"),
        ),
        tables=("inet istio-proxy-*",),
        policies=((1337, 0xFFFFFFFF, 133),),
        cni_types=("istio-cni",),
        processes=("pilot-agent", "envoy"),
    ),
    Owner(
        name="istio-ambient",
        title="Istio (ambient)",
        role=Role.CAPTURE,
        source="istio cni/pkg/iptables, cni/pkg/nftables, cni/pkg/config",
        chains=("*/ISTIO_PRERT", "*/ISTIO_POSTRT", "*/ISTIO_*"),
        tables=("inet istio-ambient-*",),
        sets=("istio-inpod-probes-v4", "istio-inpod-probes-v6"),
        policies=((0x111, 0xFFF, 100),),
        cni_types=("istio-cni",),
        processes=("install-cni", "istio-cni", "ztunnel"),
        health=(8000,),
    ),
    Owner(
        name="istio-ztunnel",
        title="Istio (ambient, before 1.21)",
        role=Role.MESH,
        source="istio 1.18 cni/pkg/ambient/constants: it worked in the node's own namespace",
        chains=("*/ztunnel-*",),
        sets=("ztunnel-pods-ips",),
        links=("istioin", "istioout"),
        policies=((0x100, 0x100, 101), (0x40, 0x40, 102)),
        processes=("install-cni", "istio-cni"),
    ),
    Owner(
        name="intercept-agent",
        title="this agent",
        role=Role.CAPTURE,
        source="agent/backends/nftables.py, agent/backends/registry.py",
        tables=("inet intercept-agent", "inet intercept-agent-guard"),
        pins=("intercept-agent*",),
        cni_types=("intercept-cni",),
        processes=("intercept-agent run", "agent.cli.main run"),
        health=(15021, 15020),
    ),
    Owner(
        name="linkerd",
        title="Linkerd",
        role=Role.MESH,
        source="linkerd2-proxy-init pkg/iptables/iptables.go",
        chains=("*/PROXY_INIT_*",),
        comments=("proxy-init/",),
        cni_types=("linkerd-cni",),
        processes=("linkerd2-proxy", "linkerd2-proxy-identity"),
    ),
    Owner(
        name="kuma",
        title="Kuma",
        role=Role.MESH,
        source="kumahq/kuma pkg/transparentproxy",
        chains=("*/KUMA_*", "*/MESH_INBOUND*", "*/MESH_OUTBOUND*"),
        comments=("kuma/",),
        cni_types=("kuma-cni",),
        processes=("kuma-dp",),
    ),
    Owner(
        name="consul",
        title="Consul",
        role=Role.MESH,
        source="hashicorp/consul sdk/iptables/iptables.go",
        chains=("*/CONSUL_PROXY_*", "*/CONSUL_DNS_*"),
        cni_types=("consul-cni",),
        processes=("consul-dataplane",),
    ),
    Owner(
        name="osm",
        title="Open Service Mesh",
        role=Role.MESH,
        source="openservicemesh/osm pkg/injector/iptables.go",
        chains=("*/OSM_PROXY_*",),
    ),
    Owner(
        name="app-mesh",
        title="AWS App Mesh",
        role=Role.MESH,
        source="aws-app-mesh-controller-for-k8s pkg/inject (the rules themselves are not public)",
        chains=("*/APPMESH_*",),
    ),
    Owner(
        name="mirrord",
        title="mirrord",
        role=Role.MESH,
        source="metalbear-co/mirrord mirrord/agent/iptables",
        chains=("*/MIRRORD_*",),
        processes=("mirrord-agent",),
    ),
    Owner(
        name="telepresence",
        title="Telepresence",
        role=Role.MESH,
        source="telepresenceio/telepresence cmd/traffic/cmd/agentinit",
        chains=("*/TEL_INBOUND_*",),
        processes=("traffic",),
    ),
    Owner(
        name="merbridge",
        title="Merbridge",
        role=Role.MESH,
        source="merbridge/merbridge bpf/Makefile, bpf/headers/maps.h",
        pins=(
            *("mb_*", "cookie_original_dst", "cookie_orig_dst", "local_pod_ips"),
            *("mark_pod_ips_map", "pair_original_dst", "pair_orig_dst", "sock_pair_map"),
        ),
        programs=("mb_*",),
        cni_types=("merbridge-cni",),
        processes=("mbctl",),
    ),
    Owner(
        name="kmesh",
        title="Kmesh",
        role=Role.MESH,
        source="kmesh-net/kmesh pkg/constants, daemon",
        pins=("bpf_kmesh*", "kmesh*"),
        programs=("*kmesh*",),
        cni_types=("kmesh-cni",),
        processes=("kmesh-daemon",),
        health=(15200,),
    ),
    *CNIS,
)

_BY_NAME: Mapping[str, Owner] = {owner.name: owner for owner in OWNERS}

# Chains that old kubelets make too (KEP-3178): theirs while one runs, kube-proxy's otherwise.
SHARED_WITH_KUBELET = frozenset({"KUBE-POSTROUTING", "KUBE-MARK-MASQ", "KUBE-MARK-DROP"})


def by_name(name: str) -> Owner:
    """Return an owner of the catalogue. Raises: KeyError."""
    return _BY_NAME[name]


@lru_cache(maxsize=256)
def _pattern(patterns: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(translate(pattern) for pattern in patterns) or r"(?!)")


def fits(patterns: tuple[str, ...], text: str) -> bool:
    """Tell whether a text is what one of the patterns describes."""
    return _pattern(patterns).match(text) is not None


def owner_of_chain(table: str, chain: str) -> Owner | None:
    """Return whose a chain of an iptables table is, by its name alone."""
    return _find("chains", f"{table}/{chain}")


def owner_of_table(family: str, table: str) -> Owner | None:
    """Return whose a table of nf_tables is."""
    return _find("tables", f"{family} {table}")


def owner_of_set(name: str) -> Owner | None:
    return _find("sets", name)


def owner_of_link(name: str) -> Owner | None:
    return _find("links", name)


def owner_of_pin(path: str) -> Owner | None:
    """Return whose a pin is, by its path below the bpf file system."""
    return _find("pins", path)


def owner_of_program(name: str) -> Owner | None:
    return _find("programs", name)


def owner_of_comments(comments: Iterable[str]) -> Owner | None:
    """Return whose a rule is by what its comments begin with."""
    texts = tuple(comments)
    for owner in OWNERS:
        if owner.comments and any(text.startswith(owner.comments) for text in texts):
            return owner
    return None


def owner_of_bridge(interfaces: Iterable[str]) -> Owner | None:
    """Return whose a rule is by the interfaces that it is about."""
    names = frozenset(interfaces)
    return next((o for o in OWNERS if names & set(o.bridges)), None) if names else None


def owner_of_policy(mark: int, mask: int, table: int) -> Owner | None:
    """Return whose an `ip rule` is: all three numbers must be the owner's."""
    return next((o for o in OWNERS if (mark, mask, table) in o.policies), None)


def owner_of_route_table(table: int) -> Owner | None:
    return next((o for o in OWNERS for _, _, known in o.policies if known == table), None)


def owner_of_plugin(type_: str) -> Owner | None:
    return next((owner for owner in OWNERS if type_ in owner.cni_types), None)


@lru_cache(maxsize=4096)
def _find(kind: str, text: str) -> Owner | None:
    for owner in OWNERS:
        patterns: tuple[str, ...] = getattr(owner, kind)
        if patterns and fits(patterns, text):
            return owner
    return None
