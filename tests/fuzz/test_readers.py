"""Any bytes are read or refused by every reader: raw ones, shaped ones, and real ones altered."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.seeds import FOREIGN_LISTING, LISTING, seeds
from tests.fuzz.targets import TARGETS
from tests.fuzz.test_walk_text import save_text

SPICE = (
    b"\0 \n \r\n \t \" ' \\ ! # % & * | > - --- ... : , ? [ ] { } << @ ` ~ null true 0 -1 65536 "
    b"1e999 0x7fffffff 99999999999999999999 \xff \xc3\xa9 \xe2\x80\xa8 \xef\xbb\xbf "
    b"-j -m -A COMMIT "
    b"*nat :A * &a *a !!str !x kind: Pod items: metadata: spec: template: annotations: labels:"
).split(b" ")


@st.composite
def altered(draw: st.DrawFn, target: str) -> bytes:
    """Return a real input in which slices are cut out, doubled, moved, or spiced."""
    data = draw(st.sampled_from(seeds()[target]))
    for _ in range(draw(st.integers(1, 6))):
        first = draw(st.integers(0, len(data)))
        last = min(len(data), first + draw(st.sampled_from((0, 1, 2, 8, 40, 400))))
        new = draw(
            st.one_of(
                st.sampled_from(SPICE),
                st.just(b""),
                st.just(data[first:last] * 2),
                st.binary(max_size=4),
                st.just(data[: last - first]),
            )
        )
        data = data[:first] + new + data[last:]
    return data


@pytest.mark.parametrize("target", TARGETS)
@given(data=st.data())
def test_real_inputs_that_were_altered_are_read_or_refused(
    target: str, data: st.DataObject
) -> None:
    TARGETS[target](data.draw(altered(target)))


@pytest.mark.parametrize("target", TARGETS)
@given(data=st.one_of(st.binary(max_size=400), st.lists(st.sampled_from(SPICE)).map(b"".join)))
def test_any_bytes_are_read_or_refused(target: str, data: bytes) -> None:
    TARGETS[target](data)


@given(save_text())
def test_any_tables_are_read_and_written_again(text: str) -> None:
    TARGETS["save"](text.encode())


# --- nft -----------------------------------------------------------------------------------------

NFT_WORDS = """
inet t v4-nat-OUTPUT v6-mangle-INPUT/socket nat-OUTPUT tcp dport meta mark skuid ct state ip saddr
ipv4 & | ^ == != in range prefix set addr len port jump target accept drop return
"""
WORDS = st.sampled_from(NFT_WORDS.split())
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), WORDS, st.text(max_size=5)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.one_of(WORDS, st.text()), inner, max_size=3)
    ),
    max_leaves=12,
)


def _parts(value: object) -> list[object]:
    """Return everything in a listing that something else may be put in place of."""
    found: list[object] = []
    todo = [value]
    while todo:
        one = todo.pop()
        if isinstance(one, (dict, list)):
            found.append(one)
            todo += one.values() if isinstance(one, dict) else one
    return found


@pytest.mark.parametrize("listing", [LISTING, FOREIGN_LISTING], ids=["ours", "foreign"])
@given(changes=st.lists(st.tuples(st.integers(0), st.integers(0), VALUES), min_size=1, max_size=4))
def test_listing_with_anything_in_any_place_is_read_or_refused(
    listing: object, changes: list[tuple[int, int, object]]
) -> None:
    document = json.loads(json.dumps(listing))
    for where, which, value in changes:
        parts = _parts(document)
        part = parts[where % len(parts)]
        if isinstance(part, dict) and part:
            part[list(part)[which % len(part)]] = value
        elif isinstance(part, list):
            part.insert(which % (len(part) + 1), value)
    TARGETS["nft"](json.dumps(document).encode())


@pytest.mark.parametrize("depth", [50, 200, 400, 800, 950, 990, 5000, 100_000])
@pytest.mark.parametrize("place", ["entry", "kind", "match", "value", "object", "comment"])
def test_listing_that_is_nested_too_deeply_is_refused(depth: int, place: str) -> None:
    deep = "[" * depth + "]" * depth
    linear = '{"&": [' * depth + "1" + ", 2]}" * depth
    rule = '"family": "inet", "table": "t", "chain": "v4-nat-OUTPUT"'
    table = '{"table": {"family": "inet", "name": "t"}}, '
    table += '{"chain": {"family": "inet", "table": "t", "name": "v4-nat-OUTPUT"}}, '
    match = f'{{"match": {{"op": "==", "left": {linear}, "right": {deep}}}}}'
    mark = f'{{"mangle": {{"key": {{"meta": {{"key": "mark"}}}}, "value": {linear}}}}}'
    body = {
        "entry": deep,
        "kind": f'{{"rule": {deep}}}',
        "match": f'{{"rule": {{{rule}, "expr": [{match}]}}}}',
        "value": f'{{"rule": {{{rule}, "expr": [{mark}]}}}}',
        "object": f'{{"set": {{"family": "inet", "table": "t", "name": {deep}}}}}',
        "comment": f'{{"rule": {{{rule}, "expr": [], "comment": {deep}}}}}',
    }[place]
    TARGETS["nft"](f'{{"nftables": [{table}{body}]}}'.encode())


# --- manifests -----------------------------------------------------------------------------------

KEY_WORDS = """
kind items metadata spec template jobTemplate containers initContainers securityContext runAsUser
annotations labels name namespace env value ports containerPort args << hostNetwork hostUsers
livenessProbe httpGet port command sidecar.istio.io/inject sidecar.istio.io/x
traffic.sidecar.istio.io/includeInboundPorts
"""
SCALAR_WORDS = """
Pod Deployment CronJob List Namespace a 80 '80' 1337 true ~ 0x50 1e9 .inf istio-proxy Always *a &a
!!str !x | > "\\u00e9" 70000 80,x '*' 2001-01-01
"""
KEYS, SCALARS = (st.sampled_from(words.split()) for words in (KEY_WORDS, SCALAR_WORDS))
FLOW = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda items: f"[{', '.join(items)}]"),
        st.lists(st.tuples(KEYS, inner), max_size=4).map(
            lambda pairs: "{" + ", ".join(f"{key}: {value}" for key, value in pairs) + "}"
        ),
    ),
    max_leaves=20,
)
DOCUMENT = st.lists(st.tuples(KEYS, FLOW), max_size=6).map(
    lambda pairs: "kind: Pod\n" + "".join(f"{key}: {value}\n" for key, value in pairs)
)


@given(st.lists(DOCUMENT, max_size=3), st.sampled_from(("utf-8", "utf-16", "utf-8-sig")))
def test_manifests_of_any_shape_are_read_or_refused(documents: list[str], encoding: str) -> None:
    TARGETS["manifest"]("---\n".join(documents).encode(encoding))
