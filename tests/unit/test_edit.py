"""Edits from one ruleset to another, applied as the kernel does, end at the wanted one."""

from hypothesis import given
from hypothesis import strategies as st

from agent.backends.edit import TableEdit, restore_text, shells, table_edits
from agent.model.ruleset import Chain, Family, Rule, Ruleset, Table, Target, basic

ALPHABET = tuple(Rule((basic(protocol="tcp"),), Target(name)) for name in ("A", "B", "C", "D"))
BODIES = st.lists(st.sampled_from(ALPHABET), max_size=7).map(tuple)
USER_CHAINS = st.dictionaries(st.sampled_from(["ONE", "TWO", "THREE"]), BODIES)


@st.composite
def rulesets(draw: st.DrawFn) -> Ruleset:
    chains = [Chain("OUTPUT", "ACCEPT", draw(BODIES)), Chain("PREROUTING", "ACCEPT", draw(BODIES))]
    chains += [Chain(name, None, body) for name, body in draw(USER_CHAINS).items()]
    return Ruleset(Family.IPV4).with_chains("nat", chains)


def applied(have: Ruleset, edits: tuple[TableEdit, ...]) -> dict[str, list[Rule]]:
    """Apply edits as iptables-restore would: -D takes the first equal rule, -I a position."""
    chains = {c.name: list(c.rules) for table in have.tables for c in table.chains}
    for edit in edits:
        for chain in edit.chains:
            if chain.rewrite:
                chains[chain.name] = []
        for chain in edit.chains:
            for rule in chain.delete:
                chains[chain.name].remove(rule)
        for chain in edit.chains:
            for position, rule in chain.insert:
                assert 1 <= position <= len(chains[chain.name]) + 1
                chains[chain.name].insert(position - 1, rule)
        for name in edit.drop_chains:
            del chains[name]
    return chains


@given(rulesets(), rulesets())
def test_edits_lead_from_any_ruleset_to_any_other(have: Ruleset, want: Ruleset) -> None:
    expected = {c.name: list(c.rules) for table in want.tables for c in table.chains}
    assert applied(have, table_edits(have, want)) == expected


@given(rulesets())
def test_nothing_to_change_means_no_edit(ruleset: Ruleset) -> None:
    assert table_edits(ruleset, ruleset) == ()


def test_foreign_rule_between_ours_is_neither_deleted_nor_written() -> None:
    a, foreign, b = ALPHABET[:3]
    have = Ruleset(Family.IPV4).with_chains("nat", [Chain("OUTPUT", "ACCEPT", (a, foreign, b))])
    want = Ruleset(Family.IPV4).with_chains("nat", [Chain("OUTPUT", "ACCEPT", (b, foreign))])
    (edit,) = table_edits(have, want)
    (chain,) = edit.chains
    assert foreign not in chain.delete
    assert foreign not in {rule for _, rule in chain.insert}


def test_restore_text_makes_chains_before_jumps_and_drops_them_after() -> None:
    jump = Rule((), Target("NEW"))
    have = Ruleset(Family.IPV4).with_chains(
        "nat", [Chain("OUTPUT", "ACCEPT", (Rule((), Target("OLD")),)), Chain("OLD")]
    )
    want = Ruleset(Family.IPV4).with_chains(
        "nat", [Chain("OUTPUT", "ACCEPT", (jump,)), Chain("NEW")]
    )
    assert restore_text(table_edits(have, want)).splitlines() == [
        "*nat",
        ":NEW - [0:0]",
        "-D OUTPUT -j OLD",
        "-I OUTPUT 1 -j NEW",
        "-F OLD",
        "-X OLD",
        "COMMIT",
    ]


def test_built_in_chain_without_rules_is_made_again() -> None:
    """The restore tools make a chain for a rule, and not for its declaration."""
    want = Ruleset(Family.IPV4, (Table("nat", (Chain("INPUT", "ACCEPT"),)),))
    assert restore_text(table_edits(Ruleset(Family.IPV4), want)).splitlines() == [
        "*nat",
        "-A INPUT -p 255 -j RETURN",
        "-D INPUT -p 255 -j RETURN",
        "COMMIT",
    ]
    assert not table_edits(want, want)


def test_shells_are_the_built_in_chains_and_tables_that_should_go() -> None:
    have = Ruleset(
        Family.IPV4,
        (Table("nat", (Chain("OUTPUT", "ACCEPT"),)), Table("raw", (Chain("OUTPUT", "ACCEPT"),))),
    )
    want = Ruleset(Family.IPV4, (Table("nat", (Chain("PREROUTING", "ACCEPT"),)),))
    found = shells(have, want)
    assert found.chains == (("nat", "OUTPUT"), ("raw", "OUTPUT"))
    assert found.tables == ("raw",)
