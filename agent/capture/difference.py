"""What separates the state of a namespace from the wanted one, rule by rule and in order. Pure."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from agent.formats.nft_words import rule_in_words, spec_in_words
from agent.model import owned, standing
from agent.model.enrolment import Enrolment
from agent.model.ruleset import Chain, Family, Rule, Ruleset, matching
from agent.model.settings import dump
from agent.model.state import EBPF, GUARD, NFTABLES, NamespaceState, routes_without


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One difference: `+` is missing, `-` is too much, `~` is there but out of place.

    `family`, `table` and `chain` are empty for routes.
    """

    sign: str
    backend: str
    family: str = ""
    table: str = ""
    chain: str = ""
    text: str
    note: str = ""

    @property
    def is_of_guard(self) -> bool:
        """Whether the standing guard is concerned, wherever it is."""
        return self.backend == GUARD or self.chain.startswith(standing.PREFIX)

    def line(self) -> str:
        where = " ".join(part for part in (self.backend, self.family, self.table) if part)
        note = f"    ({self.note})" if self.note else ""
        return f"{self.sign} {where}: {self.text}{note}"


def differences(have: NamespaceState, want: NamespaceState) -> tuple[Difference, ...]:
    """Return what has to be added, removed or moved to turn `have` into `want`."""
    found: list[Difference] = []
    for backend in dict.fromkeys((*want.loaded, *have.loaded)):
        for family in Family:
            before = have.of(backend).get(family, Ruleset(family))
            after = want.of(backend).get(family, Ruleset(family))
            found += _rulesets(backend, before, after)
    for table in have.istio_tables:
        if table not in want.istio_tables:
            text = f"table inet {table.name}"
            found.append(Difference(sign="-", backend=NFTABLES, text=text, note="Istio's"))
    found += _enrolments(have.enrolment, want.enrolment)
    missing = routes_without(want.routes, have.routes)
    found += (Difference(sign="+", backend="routing", text=r.command()) for r in missing)
    for route in routes_without(have.routes, want.routes):
        note = "one copy too many" if route in want.routes else ""
        found.append(Difference(sign="-", backend="routing", text=route.command(), note=note))
    return tuple(found)


def _enrolments(have: Enrolment | None, want: Enrolment | None) -> Iterator[Difference]:
    """Yield what the programs were told otherwise, a setting at a time, and what else is wrong."""
    if have == want and not (have and have.stale):
        return
    loaded = None if have is None or have.settings is None else dump(have.settings)
    wanted = None if want is None or want.settings is None else dump(want.settings)
    if loaded is None and wanted is not None:
        yield Difference(sign="+", backend=EBPF, text="the namespace is not enrolled")
    elif loaded is not None and wanted is None:
        yield Difference(sign="-", backend=EBPF, text="the namespace is enrolled")
    elif loaded is not None and wanted is not None:
        for key, value in wanted.items():
            if loaded[key] != value:
                text = f"{key}: {_shown(loaded[key])} is loaded, and not {_shown(value)}"
                yield Difference(sign="~", backend=EBPF, text=text)
    for fault in (*have.faults, *have.stale) if have else ():
        yield Difference(sign="~" if wanted else "-", backend=EBPF, text=fault)


def _shown(value: object) -> str:
    if isinstance(value, list):
        return ",".join(str(item) for item in value) or "nothing"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _rulesets(backend: str, have: Ruleset, want: Ruleset) -> Iterator[Difference]:
    for name in sorted({t.name for t in have.tables} | {t.name for t in want.tables}):
        loaded, wanted = have.table(name), want.table(name)
        place = {"backend": backend, "family": have.family.value, "table": name}
        chains = (*(wanted.chains if wanted else ()), *(loaded.chains if loaded else ()))
        if loaded == wanted:
            continue
        for chain in dict.fromkeys(c.name for c in chains):
            before = loaded.chain(chain) if loaded else None
            after = wanted.chain(chain) if wanted else None
            yield from _chains(place, before, after, chain)


def _chains(
    place: dict[str, str], have: Chain | None, want: Chain | None, name: str
) -> Iterator[Difference]:
    loaded = have.rules if have else ()
    wanted = want.rules if want else ()
    if (
        owned.is_capture_chain(name)
        and not wanted
        and not loaded
        and (have is None) != (want is None)
    ):
        sign = "+" if have is None else "-"
        yield Difference(**place, chain=name, sign=sign, text=f"chain {name}")
    if loaded == wanted:
        return
    pairs = matching(loaded, wanted)
    same_a = {a for a, _ in pairs}
    same_b = {b for _, b in pairs}
    extra = [(i, r) for i, r in enumerate(loaded) if i not in same_a]
    missing = [(i, r) for i, r in enumerate(wanted) if i not in same_b]
    moved = Counter(r for _, r in extra) & Counter(r for _, r in missing)
    pending = moved.copy()
    for _, rule in missing:
        if pending[rule] > 0:
            pending[rule] -= 1
            words, note = rule_in_words(name, rule), _shadow(loaded, rule)
            yield Difference(**place, chain=name, sign="~", text=words, note=note)
        else:
            yield Difference(**place, chain=name, sign="+", text=rule_in_words(name, rule))
    pending = moved.copy()
    for _, rule in extra:
        if pending[rule] > 0:
            pending[rule] -= 1
        else:
            yield Difference(**place, chain=name, sign="-", text=rule_in_words(name, rule))


def _shadow(loaded: tuple[Rule, ...], rule: Rule) -> str:
    """Say what stands before a rule that should be further up."""
    at = loaded.index(rule)
    if at == 0:
        return "should stand further down"
    return f"rule {at + 1} of the chain; runs after: {spec_in_words(loaded[at - 1])}"
