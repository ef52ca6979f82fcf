"""The text of iptables-save, to the model and back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.formats.iptables_save import SaveTextError, parse, parse_rule, render, render_rule
from agent.model.ruleset import Family, Match, Option, Rule, Target

# Lines as both tools print them; each must come back letter for letter.
LINES = (
    "-A OUTPUT -j ISTIO_OUTPUT",
    "-A C ! -s 10.0.0.0/8 ! -d 127.0.0.1/32 ! -i eth0 -o lo -p tcp -j RETURN",
    "-A C -p tcp -m tcp ! --dport 15008 -m owner ! --uid-owner 1337 -j RETURN",
    "-A C -m owner ! --gid-owner 1 -m owner ! --gid-owner 2 -j RETURN",
    "-A C -p tcp -m tcp --sport 1:2 --dport 3:4 -g OTHER",
    '-A C -m comment --comment "kubernetes service portals" -j KUBE-SERVICES',
    '-A C -m comment --comment "-j ACCEPT" -j DROP',
    '-A C -m comment --comment "a \\"quoted\\" \\\\ word" -j DROP',
    "-A C -p tcp -m tcp --tcp-flags FIN,SYN,RST,ACK SYN -j DROP",
    "-A C -m statistic --mode random --probability 0.33332999982 -j RETURN",
    "-A C -m set --match-set probes-v4 dst -j ACCEPT",
    "-A C -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT",
    "-A C -m mark ! --mark 0x539/0xfff -j CONNMARK --restore-mark --nfmask 0x1 --ctmask 0x2",
    "-A C -p tcp -j TPROXY --on-port 15006 --on-ip :: --tproxy-mark 0x539/0xffffffff",
    "-A C -p tcp -j DNAT --to-destination [fd00::1]:80",
    "-A C -p udp -j CT --zone 2",
    '-A C -m comment --comment "kube-system/kube-dns:dns cluster IP" -j RETURN',
    "-A C -m comment --comment plain-words_1 -j RETURN",
    "-A C -m comment --comment -j -j DROP",
    '-A C -m comment --comment "default/web:http" -j RETURN',
    "-A C -m cgroup --path /kubepods/pod1 -j RETURN",
    '-A C -j LOG --log-prefix "drop: " --log-level 4',
    "-A C -m unknown --strange ! 1 2 3 ! --other -j NFQUEUE --queue-num 3",
    "-A C -m limit --limit 5/min",
    "-A C",
)


@pytest.mark.parametrize("line", LINES)
def test_line_comes_back_letter_for_letter(line: str) -> None:
    assert render_rule(*parse_rule(line)) == line


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("*nat\n:A - [0:0]\n:A - [0:0]\nCOMMIT\n", "chain A is declared twice"),
        ("*nat\nCOMMIT\n*nat\nCOMMIT\n", "table nat is there twice"),
        ("*nat\n*raw\nCOMMIT\n", "table nat has no COMMIT"),
        ("*nat\n:A -\n-A A ! -j DROP\nCOMMIT\n", "-j cannot be negated"),
        ('*nat\n:A -\n-A A -m "" -j DROP\nCOMMIT\n', "no name"),
        ("*nat\n:A -\n-A A -m x --a \0 -j DROP\nCOMMIT\n", "NUL"),
    ],
)
def test_text_that_says_a_thing_twice_or_nothing_is_refused(text: str, word: str) -> None:
    with pytest.raises(SaveTextError, match=word):
        parse(text, Family.IPV4)


def test_errors_are_short_however_long_the_line_is() -> None:
    for line in ("x" * 100_000, f"-A {'c' * 100_000} -j X", f"-A A -j X -{'o' * 100_000}" + " x y"):
        with pytest.raises(SaveTextError) as caught:
            parse(f'*nat\n:A -\n{line} "\nCOMMIT\n', Family.IPV4)
        assert len(str(caught.value)) < 500


def test_parts_of_a_rule_are_told_apart() -> None:
    chain, rule = parse_rule(
        "-A C ! -d 127.0.0.1/32 -o lo -p tcp -m tcp ! --dport 53 -j REDIRECT --to-ports 15001"
    )
    assert chain == "C"
    assert rule == Rule(
        (
            Match(
                "",
                (
                    Option("-d", ("127.0.0.1/32",), negated=True),
                    Option("-o", ("lo",)),
                    Option("-p", ("tcp",)),
                ),
            ),
            Match("tcp", (Option("--dport", ("53",), negated=True),)),
        ),
        Target("REDIRECT", (Option("--to-ports", ("15001",)),)),
    )


def test_counters_and_comment_lines_are_dropped() -> None:
    text = "# made\n*nat\n:OUTPUT ACCEPT [5:300]\n[1:60] -A OUTPUT -j RETURN\nCOMMIT\n# done\n"
    plain = "*nat\n:OUTPUT ACCEPT [0:0]\n-A OUTPUT -j RETURN\nCOMMIT\n"
    assert render(parse(text, Family.IPV4)) == plain


def test_policy_and_empty_chains_are_kept() -> None:
    text = "*filter\n:INPUT DROP [0:0]\n:EMPTY - [0:0]\nCOMMIT\n"
    assert render(parse(text, Family.IPV6)) == text


def test_without_built_in_chains_no_policy_is_written() -> None:
    text = "*filter\n:INPUT DROP [0:0]\n:OWN - [0:0]\n-A INPUT -j OWN\nCOMMIT\n"
    assert ":INPUT" not in render(parse(text, Family.IPV4), builtin=False)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("-A OUTPUT -j X\n", "outside a table"),
        ("*nat\n-A OUTPUT -j X\nCOMMIT\n", "not declared"),
        ("*nat\n:OUTPUT ACCEPT\n", "cut short"),
        ("*nat\n:OUTPUT ACCEPT\n-A OUTPUT -j\nCOMMIT\n", "ends too early"),
        ('*nat\n:OUTPUT ACCEPT\n-A OUTPUT -m comment --comment "x\nCOMMIT\n', "quote"),
        ("*nat\n:OUTPUT ACCEPT\n-A OUTPUT --dport 5\nCOMMIT\n", "belongs to no match"),
        ("*nat\nwhat is this\nCOMMIT\n", "not a rule"),
        ("# Table `nat' is incompatible, use 'nft' tool.\n", "only nft can print"),
    ],
)
def test_text_without_meaning_is_refused(text: str, said: str) -> None:
    with pytest.raises(SaveTextError, match=said):
        parse(text, Family.IPV4)


@given(st.text())
def test_any_text_is_parsed_or_refused(text: str) -> None:
    try:
        parse(text, Family.IPV4)
    except SaveTextError:
        return


@given(st.lists(st.sampled_from([*LINES, "", "COMMIT", "*nat", ":C - [0:0]", "# x"]), max_size=12))
def test_any_order_of_lines_is_parsed_or_refused(lines: list[str]) -> None:
    try:
        found = parse("\n".join(lines), Family.IPV4)
    except SaveTextError:
        return
    assert parse(render(found), Family.IPV4) == found
