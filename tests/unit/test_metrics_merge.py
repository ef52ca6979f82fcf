"""Many proxies' metrics as one text: valid, complete, each family once, samples with their pod."""

from collections import Counter
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from agent.formats.exposition import MAX_NAMES, BadExposition, Reader
from agent.proxy.merge import Merge, Part

RESERVED = "intercept_"
MANY = range(MAX_NAMES + 10)
Texts = Mapping[str, str]


def merged(texts: Texts, *, piece: int = 1 << 20) -> tuple[str, Counter[int]]:
    """Return the texts of pods merged, and the samples that this cost, by the pod's number."""
    merge = Merge()
    try:
        for pod, text in texts.items():
            part = Part(merge)
            labels = {"namespace": "shop", "pod": pod}
            reader = Reader(labels, part.take, reserved=RESERVED)
            data = text.encode()
            for at in range(0, len(data), piece):
                reader.feed(data[at : at + piece])
            reader.end()
            merge.add(part)
        lost = merge.settle()
        return b"".join(merge).decode(), lost
    finally:
        merge.close()


def samples(text: str, pod: str | None = None) -> Counter[tuple[object, ...]]:
    """Return what a text says, comparable: NaN is not equal to itself, so values are text."""
    found: Counter[tuple[object, ...]] = Counter()
    for family in text_string_to_metric_families(text):
        for one in family.samples:
            labels = dict(one.labels)
            if pod is not None:
                labels |= {"namespace": "shop", "pod": pod}
            key = (family.type, one.name, tuple(sorted(labels.items())))
            found[(*key, str(one.value), str(one.timestamp))] += 1
    return found


def assert_well_formed(text: str) -> None:
    """Each family has one TYPE, which stands before all its samples, and these are together."""
    heads = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(heads) == len(set(heads))
    names = [family.name for family in text_string_to_metric_families(text)]
    assert len(names) == len(heads)


# --- any text -------------------------------------------------------------------------------------

LABEL_NAMES = st.from_regex(r"(?!__)[a-z_][a-z0-9_]{0,6}", fullmatch=True).filter(
    lambda name: name not in ("namespace", "pod", "le", "quantile")
)
LABEL_VALUES = st.text(max_size=12)
VALUES = st.one_of(
    st.sampled_from(["NaN", "+Inf", "-Inf", "0", "1e+06", "1.5e-7", "12345678901234567890"]),
    st.floats().map(repr),
    st.integers(-(10**18), 10**18).map(str),
)
LABELS = st.dictionaries(LABEL_NAMES, LABEL_VALUES, max_size=4)
SUFFIXES = {"counter": ("",), "gauge": ("",), "untyped": ("",), "histogram": (), "summary": ()}


def line(name: str, labels: Mapping[str, str], value: str, when: str = "") -> str:
    escaped = {
        key: found.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
        for key, found in labels.items()
    }
    inside = ",".join(f'{key}="{found}"' for key, found in escaped.items())
    return f"{name}{{{inside}}} {value}{when}" if inside else f"{name} {value}{when}"


@st.composite
def family(draw: st.DrawFn, name: str, kind: str) -> str:
    lines = [f"# HELP {name} what it is\\n \\\\ counted"] if draw(st.booleans()) else []
    lines.append(f"# TYPE {name} {kind}")
    for labels in draw(st.lists(LABELS, max_size=3)):
        when = draw(st.sampled_from(["", " 1700000000000"]))
        if kind in ("histogram", "summary"):
            for extra in draw(st.lists(st.sampled_from(["0.5", "1", "+Inf"]), max_size=3)):
                key = "le" if kind == "histogram" else "quantile"
                suffix = "_bucket" if kind == "histogram" else ""
                lines.append(line(name + suffix, {**labels, key: extra}, draw(VALUES), when))
            lines += [line(f"{name}_{end}", labels, draw(VALUES)) for end in ("sum", "count")]
        else:
            lines.append(line(name, labels, draw(VALUES), when))
    return "\n".join(lines)


# The type of a name is the same in all pods here.
NAMES = {f"{kind[:2]}:metric_{number}": kind for kind in SUFFIXES for number in range(3)}


@st.composite
def text(draw: st.DrawFn) -> str:
    names = draw(st.lists(st.sampled_from(sorted(NAMES)), unique=True, max_size=6))
    parts = [draw(family(name, NAMES[name])) for name in names]
    return "\n\n# a remark\n".join(parts) + ("\n" if parts else "")


@given(st.lists(text(), max_size=5), st.integers(1, 40))
def test_every_sample_comes_out_as_it_went_in(texts: list[str], piece: int) -> None:
    pods = {f"web-{number}": one for number, one in enumerate(texts)}
    out, lost = merged(pods, piece=piece)
    assert not lost
    assert_well_formed(out)
    wanted = sum((samples(one, pod) for pod, one in pods.items()), Counter())
    assert samples(out) == wanted


@given(st.lists(st.text(max_size=60), max_size=5).map("\n".join))
def test_any_text_is_merged_or_refused(said: str) -> None:
    try:
        out, _ = merged({"web": said})
    except BadExposition:
        return
    assert_well_formed(out)


def test_hundreds_of_pods_make_each_family_once() -> None:
    counter = '# HELP c_total Calls\n# TYPE c_total counter\nc_total{a="1"} 5\nc_total{a="2"} 6\n'
    histogram = '# TYPE h histogram\nh_bucket{le="+Inf"} 2\nh_sum 1.5\nh_count 2\n'
    pods = {
        f"web-{number}": (counter + histogram if number % 2 else histogram + counter)
        for number in range(300)
    }
    out, lost = merged(pods)
    assert not lost
    assert_well_formed(out)
    assert out.count("# HELP c_total Calls\n# TYPE c_total counter\n") == 1
    assert sum(samples(out).values()) == 300 * 5
    assert 'h_count{namespace="shop",pod="web-299"} 2\n' in out


# --- labels ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given_labels", "wanted"),
    [
        ('{pod="mine"}', {"exported_pod": "mine"}),
        ('{pod="a",namespace="b"}', {"exported_pod": "a", "exported_namespace": "b"}),
        (
            '{pod="a",exported_pod="b"}',
            {"exported_exported_pod": "a", "exported_pod": "b"},
        ),
        (r'{a="x\"},y=\\",}', {"a": 'x"},y=\\'}),
        (r'{a="new\nline"}', {"a": "new\nline"}),
        ('{ a = "1" , b="2" }', {"a": "1", "b": "2"}),
        ("{}", {}),
        ("", {}),
        ('{a="pod=\\"x\\""}', {"a": 'pod="x"'}),
    ],
)
def test_labels_of_a_sample_are_kept_beside_those_of_its_pod(
    given_labels: str, wanted: dict[str, str]
) -> None:
    out, _ = merged({"web": f"x{given_labels} 1\n"})
    ((one,),) = [family.samples for family in text_string_to_metric_families(out)]
    assert one.labels == {"namespace": "shop", "pod": "web", **wanted}


def test_name_of_a_pod_is_escaped() -> None:
    out, _ = merged({'a"\\\nb': "x 1\n"})
    ((one,),) = [family.samples for family in text_string_to_metric_families(out)]
    assert one.labels["pod"] == 'a"\\\nb'


# --- types ----------------------------------------------------------------------------------------


def types(out: str) -> list[str]:
    return [line for line in out.splitlines() if line.startswith("# TYPE")]


def test_type_that_most_pods_declare_holds_and_every_plain_sample_stays() -> None:
    pods = {
        "a": "# TYPE x gauge\nx 1\n",
        "b": "# TYPE x counter\nx 2\n",
        "c": "# TYPE x counter\nx 3\n",
        "d": "x 4\n",
    }
    out, lost = merged(pods)
    assert types(out) == ["# TYPE x counter"]
    assert sum(samples(out).values()) == 4
    assert not lost


def test_samples_that_the_type_cannot_have_are_left_out_and_counted() -> None:
    histogram = '# TYPE x histogram\nx_bucket{le="+Inf"} 2\nx_sum 1\nx_count 2\n'
    pods = {"a": histogram, "b": histogram, "c": "# TYPE x gauge\nx 7\nok 1\n"}
    out, lost = merged(pods)
    assert_well_formed(out)
    assert types(out) == ["# TYPE ok untyped", "# TYPE x histogram"]
    assert lost == {2: 1}
    other, lost = merged({"a": histogram, "b": pods["c"], "c": pods["c"]})
    assert types(other) == ["# TYPE ok untyped", "# TYPE x gauge"]
    assert lost == {0: 3}


@pytest.mark.parametrize("kind", ["counter", "untyped"])
def test_family_named_as_a_part_of_a_histogram_joins_it(kind: str) -> None:
    histogram = '# TYPE x histogram\nx_bucket{le="+Inf"} 2\nx_sum 1\nx_count 2\n'
    out, lost = merged({"a": histogram, "b": f"# TYPE x_count {kind}\nx_count 9\n"})
    assert_well_formed(out)
    assert types(out) == ["# TYPE x histogram"]
    assert 'x_count{namespace="shop",pod="b"} 9' in out
    assert not lost


def test_openmetrics_is_understood() -> None:
    said = (
        "# TYPE calls counter\n# UNIT calls seconds\n# HELP calls All calls\n"
        'calls_total{a="b"} 5 # {trace_id="x"} 0.5 1700000000.5\ncalls_created 17.5\n'
        '# TYPE about info\nabout_info{v="1"} 1\n# TYPE age gauge\nage 3 1700000000.25\n# EOF\n'
    )
    out, _ = merged({"web": said})
    assert_well_formed(out)
    assert "# HELP calls_total All calls\n# TYPE calls_total counter\n" in out
    assert 'calls_total{namespace="shop",pod="web",a="b"} 5\n' in out
    assert 'age{namespace="shop",pod="web"} 3\n' in out
    assert "EOF" not in out


def test_agents_own_names_are_not_a_proxys_to_use() -> None:
    merge = Merge()
    part = Part(merge)
    reader = Reader({"pod": "web"}, part.take, reserved=RESERVED)
    reader.feed(b"# TYPE intercept_pods gauge\nintercept_pods 99\nfine 1\n")
    reader.end()
    merge.add(part)
    merge.settle()
    assert b"intercept_pods" not in b"".join(merge)
    assert reader.dropped == 1
    merge.close()


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "said",
    [
        "<html>\n",
        "x\n",
        "x one\n",
        "x 1 2 3\n",
        "x 1_000\n",
        "x 0x10\n",
        "2x 1\n",
        "x{a=b} 1\n",
        'x{a="b} 1\n',
        'x{a="b"c="d"} 1\n',
        'x{a="1",a="2"} 1\n',
        'x{__name__="y"} 1\n',
        "x{,} 1\n",
        "# EOF\nx 1\n",
        "x 1\r\n",
        "\0\n",
    ],
)
def test_text_with_a_bad_line_is_refused_as_a_whole(said: str) -> None:
    with pytest.raises(BadExposition):
        merged({"web": f"good 1\n{said}"})


def test_what_is_not_utf8_is_refused() -> None:
    with pytest.raises(BadExposition, match="UTF-8"):
        Reader({}, lambda block: None, reserved=RESERVED).feed(b'x{a="\xff"} 1\n')


def test_refused_text_leaves_nothing_of_it() -> None:
    merge = Merge()
    part = Part(merge)
    reader = Reader({"pod": "bad"}, part.take, reserved=RESERVED)
    reader.feed(b"a 1\nb 2\n")
    with pytest.raises(BadExposition):
        reader.feed(b"nonsense\n")
    merge.settle()
    assert b"".join(merge) == b""
    merge.close()


@pytest.mark.parametrize(
    "said",
    [
        "".join(f"m{number} 1\n" for number in MANY),
        "".join(f"# TYPE m{number} gauge\n" for number in MANY),
        "".join(f"# HELP m{number} x\n" for number in MANY),
        "".join(f"intercept_{number} 1\n" for number in MANY),
        "".join(f"# TYPE m{number % 9000} gauge\nn{number} 1\n" for number in MANY),
        "m" * 1000 + " 1\n",
        "# TYPE " + "m" * 1000 + " gauge\n",
        'x{a="' + "b" * 300_000,
    ],
    ids=["samples", "types", "helps", "reserved", "mixed", "name", "type", "line"],
)
def test_text_that_would_fill_the_memory_is_refused(said: str) -> None:
    with pytest.raises(BadExposition):
        merged({"web": said})


@pytest.mark.parametrize(
    "said",
    ["a" + " " * 99_999, "a{" + " " * 99_999, "a 1" + "1" * 99_999 + "x", 'a{b="' + "\\" * 99_999],
    ids=["blanks", "blanks in braces", "digits", "escapes"],
)
def test_long_bad_line_is_refused_without_trying_every_way_to_read_it(said: str) -> None:
    """Such a line would take minutes: pytest's own timeout ends the test."""
    with pytest.raises(BadExposition):
        merged({"web": said})


def test_text_that_is_too_long_to_be_kept_in_memory_is_merged_all_the_same() -> None:
    labels = ",".join(f'{chr(97 + number)}="{"x" * 500}"' for number in range(9))
    out, _ = merged({"web": f"# HELP c {'h' * 5000}\n# TYPE c counter\nc{{{labels}}} 1\n"})
    assert_well_formed(out)
    assert labels in out
    assert "# HELP" not in out


def sequence(names: Sequence[str]) -> str:
    return "".join(f"{name} 1\n" for name in names)


def test_blocks_of_a_family_that_comes_twice_are_put_together() -> None:
    out, _ = merged({"web": sequence(["a", "b", "a", "b"])})
    assert_well_formed(out)
    assert [line.split("{")[0] for line in out.splitlines() if line[0] != "#"] == list("aabb")
