"""Whatever text is read as rules, a walk through them ends and answers."""

import contextlib
import ipaddress

from hypothesis import given, settings
from hypothesis import strategies as st

from agent.explain.render import summary, to_json, to_text
from agent.explain.walk import Layer, walk
from agent.formats.iptables_save import SaveTextError, parse
from agent.model.packet import Kind, Packet
from agent.model.ruleset import BUILTIN_CHAINS, Family
from tests.support.walks import POD

NAMES = sorted({chain for chains in BUILTIN_CHAINS.values() for chain in chains})
CHAINS = [*NAMES, "A", "B", "C", "ISTIO_OUTPUT", "ISTIO_REDIRECT"]
VOCABULARY = """
-s -d -i -o -p -f -m -j -g ! tcp udp all multiport owner mark connmark conntrack addrtype comment
statistic limit iprange set --dport --sport --dports --ports --syn --tcp-flags --uid-owner
--gid-owner --socket-exists --mark --ctstate --dst-type --src-type --comment --mode --probability
--to-ports --to-port --to-destination --to-source --on-port --on-ip --tproxy-mark --set-xmark
--set-mark --save-mark --restore-mark --nfmask --ctmask --notrack --zone --src-range --random
ACCEPT DROP RETURN REJECT LOG MARK CONNMARK CT NOTRACK REDIRECT DNAT SNAT MASQUERADE TPROXY QUEUE
80 1:2 :5 7: 99999 -1 0x1/0xff 0x /0 10.0.0.0/8 10.0.0.0/33 10.0.0.1/255.0.0.255 ::1/128 fd00::/8
[::1]:80 []:80 [fd00::1]:80-90 10.0.0.1:80 10.0.0.1-10.0.0.9 :80 10.0.0.1-fd00::1 NEW,DNAT LOCAL
LOCAL,UNICAST SYN,ACK random 0.5 nan inf 1e999 1000-2000 lo eth+ + 15001-15010 A B C
"""
WORDS = VOCABULARY.split()

rule = st.builds(
    lambda chain, words: " ".join(["-A", chain, *words]),
    st.sampled_from(CHAINS),
    st.lists(st.sampled_from([*WORDS, '""', '"-x"']), max_size=9),
)


@st.composite
def save_text(draw: st.DrawFn) -> str:
    lines = []
    for table in draw(st.lists(st.sampled_from(sorted(BUILTIN_CHAINS)), max_size=3, unique=True)):
        lines.append(f"*{table}")
        for chain in CHAINS:
            policy = draw(st.sampled_from(("ACCEPT", "ACCEPT", "DROP", "-", "ODD")))
            lines.append(f":{chain} {policy}")
        # Lines that do not parse are left out one by one, or nothing would ever be walked.
        lines += [line for line in draw(st.lists(rule, max_size=12)) if _parses(line)]
        lines.append("COMMIT")
    return "\n".join(lines)


def _parses(line: str) -> bool:
    with contextlib.suppress(SaveTextError):
        chain = line.split()[1]
        return bool(parse(f"*nat\n:{chain} -\n{line}\nCOMMIT", Family.IPV4).tables)
    return False


packets = st.builds(
    Packet,
    protocol=st.sampled_from(("tcp", "udp")),
    destination=st.sampled_from(
        [ipaddress.ip_address(a) for a in ("10.1.0.2", "127.0.0.1", "8.8.8.8", "::1", "fd09::1")]
    ),
    dport=st.integers(0, 65535),
    sport=st.none() | st.integers(0, 65535),
    uid=st.none() | st.integers(0, 2**32 - 2),
    gid=st.none() | st.just(1000),
    mark=st.integers(0, 2**32 - 1),
)


def _walks(text: str, sent: Packet, inbound: bool) -> None:
    try:
        layer = Layer("iptables-nft", parse(text, sent.family))
    except SaveTextError:
        return
    trace = walk([layer, layer], sent, POD, inbound=inbound)
    assert (trace.verdict.port is None) == (trace.verdict.kind is not Kind.REDIRECT)
    assert to_json(trace)["verdict"] == trace.verdict.kind.value
    assert summary(trace) in to_text(trace)


@given(save_text(), packets, st.booleans())
def test_any_rules_are_walked_to_an_end(text: str, sent: Packet, inbound: bool) -> None:
    _walks(text, sent, inbound)


@settings(max_examples=200)
@given(st.text(), packets)
def test_any_text_is_refused_or_walked(text: str, sent: Packet) -> None:
    _walks(f"*filter\n:OUTPUT ACCEPT\n-A OUTPUT {text}\nCOMMIT", sent, inbound=False)
