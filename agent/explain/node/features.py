"""Which kernel features each backend needs: modules, configuration symbols, extensions. Data."""

from dataclasses import dataclass

from agent.model.state import IPTABLES_LEGACY, IPTABLES_NFT, NFTABLES

XTABLES = (IPTABLES_NFT, IPTABLES_LEGACY)
EVERY = (NFTABLES, *XTABLES)


@dataclass(frozen=True, slots=True)
class Feature:
    """One feature; without it the backends that `needed_by` names do not work.

    `only_for` names the part of a capture that needs it, where a capture can do without. `name` is
    what to call it where it is a part of its module.
    """

    module: str
    symbol: str
    needed_by: tuple[str, ...]
    extension: str = ""
    only_for: str = ""
    part: str = ""

    @property
    def name(self) -> str:
        return self.part or self.module


FEATURES: tuple[Feature, ...] = (
    Feature("nf_conntrack", "NF_CONNTRACK", EVERY),
    Feature("nf_nat", "NF_NAT", EVERY),
    Feature("nf_tables", "NF_TABLES", (NFTABLES, IPTABLES_NFT)),
    Feature("nf_tables", "NF_TABLES_INET", (NFTABLES,), part="inet tables"),
    Feature("nft_chain_nat", "NFT_NAT", (NFTABLES, IPTABLES_NFT)),
    Feature("nft_redir", "NFT_REDIR", (NFTABLES,)),
    Feature("nft_ct", "NFT_CT", (NFTABLES,)),
    Feature("nft_tproxy", "NFT_TPROXY", (NFTABLES,), only_for="TPROXY mode"),
    Feature("nft_compat", "NFT_COMPAT", (IPTABLES_NFT,)),
    Feature("ip_tables", "IP_NF_IPTABLES_LEGACY|IP_NF_IPTABLES", (IPTABLES_LEGACY,)),
    Feature("iptable_nat", "IP_NF_NAT", (IPTABLES_LEGACY,)),
    Feature("ip6table_nat", "IP6_NF_NAT", (IPTABLES_LEGACY,), only_for="IPv6"),
    Feature("iptable_filter", "IP_NF_FILTER", (IPTABLES_LEGACY,)),
    Feature("iptable_mangle", "IP_NF_MANGLE", (IPTABLES_LEGACY,), only_for="TPROXY mode"),
    Feature("iptable_raw", "IP_NF_RAW", (IPTABLES_LEGACY,), only_for="DNS capture"),
    Feature("xt_owner", "NETFILTER_XT_MATCH_OWNER", XTABLES, "matches:owner"),
    Feature("xt_REDIRECT", "NETFILTER_XT_TARGET_REDIRECT", XTABLES, "targets:REDIRECT"),
    Feature("xt_conntrack", "NETFILTER_XT_MATCH_CONNTRACK", XTABLES, "matches:conntrack"),
    Feature(
        "xt_multiport", "NETFILTER_XT_MATCH_MULTIPORT", XTABLES, "matches:multiport", "DNS capture"
    ),
    Feature("xt_CT", "NETFILTER_XT_TARGET_CT", XTABLES, "targets:CT", "DNS capture"),
    Feature("xt_mark", "NETFILTER_XT_MARK", XTABLES, "matches:mark", "TPROXY mode"),
    Feature("xt_connmark", "NETFILTER_XT_CONNMARK", XTABLES, "matches:connmark", "TPROXY mode"),
    Feature("xt_TPROXY", "NETFILTER_XT_TARGET_TPROXY", XTABLES, "targets:TPROXY", "TPROXY mode"),
)
