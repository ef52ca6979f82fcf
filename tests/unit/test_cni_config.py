"""CNI configuration files and directories as values: what is read, edited, and comes back.

Istio's own expectations are met with our entry in the place of theirs. Where we do otherwise on
purpose, `OTHERWISE` says why.
"""

import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.cni import edits, plugin
from agent.cni.edits import KEPT_SUFFIX, Edit, Rename, Snapshot, Write, outcome, plan, plan_removal
from agent.formats import cni_config
from agent.formats.cni_config import TYPE, Entry, differences, insert, parse, to_bytes, without
from agent.model.errors import InvalidSettings
from tests.support.conformance import cases_dir

DECISIONS = json.loads((cases_dir() / "decisions.json").read_text())
ENTRY = Entry()
OURS = ENTRY.body()
BASE: dict[str, Any] = {"type": "bridge", "bridge": "cni0"}
CONF = b'{"cniVersion":"0.3.1","name":"n","type":"bridge"}'

OTHERWISE = {
    "owned, from .conf": "there is no owned file: the entry is chained into the base CNI's own",
    "owned, from .conflist": "there is no owned file: the entry is chained into the base CNI's own",
    "named, owned file missing": "there is no owned file, and the named one holds the entry",
    "owned custom name but other file is current": "there is no owned file, and this one is active",
    "standalone, no name": "a list without a plugin that makes the network starts no pod",
    "standalone ok": "a list without a plugin that makes the network starts no pod",
    "istio owned": "the file is the base CNI's, so only the entry goes",
}


def conflist(*plugins: Mapping[str, Any], **more: object) -> bytes:
    document = {"cniVersion": "1.0.0", "name": "net", "plugins": list(plugins), **more}
    return json.dumps(document, indent=2).encode()


def ids(cases: list[dict[str, Any]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=lambda case: case["name"])


def with_ours(text: str) -> Any:
    """Return a document of Istio's with our entry, as it should be, in the place of theirs."""
    document = json.loads(text)
    places = document["plugins"]
    document["plugins"] = [OURS if found["type"] == "istio-cni" else found for found in places]
    return document


def retyped(text: str) -> bytes:
    """Return a text of Istio's in which their entry is one of ours with a body of theirs."""
    return text.replace('"type": "istio-cni"', f'"type": "{TYPE}"').encode()


def outcome_of(found: edits.Plan, snapshot: Snapshot) -> Snapshot:
    return outcome(snapshot, found.edits)


# --- Istio's expectations ------------------------------------------------------------------------


@ids(DECISIONS["cni_insert"]["cases"])
def test_istio_insert(case: dict[str, Any]) -> None:
    data = retyped(case["existing"])
    if case["fails"]:
        with pytest.raises(InvalidSettings, match=r"10-x\.conflist"):
            parse("10-x.conflist", data)
        return
    found = parse("10-x.conflist", data)
    after = json.loads(insert(found, ENTRY))
    assert after == with_ours(case["golden"])
    assert list(after) == list(found.document)
    assert json.dumps(after["plugins"][:-1]) == json.dumps(found.others)  # in the order of keys too


def existing(case: dict[str, Any], testdata: Mapping[str, str]) -> Snapshot:
    return Snapshot({name: retyped(testdata[source]) for source, name in case["existing"].items()})


@ids(DECISIONS["cni_create"]["cases"])
def test_istio_create(case: dict[str, Any]) -> None:
    snapshot = existing(case, DECISIONS["cni_create"]["testdata"])
    found = plan(snapshot, ENTRY, pinned=case["cni_conf_name"] or None)
    if case["waits_forever"] or not case["existing"]:
        assert (found.present, found.edits) == (False, ())
        assert found.reason
        return
    assert found.file is not None
    if case["name"] not in OTHERWISE:
        assert found.file == case["expected_file"]
    expected = with_ours(json.dumps(case["expected_content"]))
    after = json.loads(outcome_of(found, snapshot).files[found.file])
    assert without_inner_names(after) == without_inner_names(expected)
    # Istio renames the network and sets its version; leases are kept under the name, so we do not.
    assert (after["name"], after["cniVersion"]) == ("dbnet", "0.4.0")


def without_inner_names(document: dict[str, Any]) -> list[dict[str, Any]]:
    dropped = ("name", "cniVersion")
    return [{k: v for k, v in one.items() if k not in dropped} for one in document["plugins"]]


@ids(DECISIONS["cni_check"]["cases"])
def test_istio_check(case: dict[str, Any]) -> None:
    snapshot = existing(case, DECISIONS["cni_check"]["testdata"])
    # Istio asks only for the type. Here the body counts as well, so the entry is made whole first.
    whole = {
        name: json.dumps(with_ours(data.decode().replace(TYPE, "istio-cni"))).encode()
        if TYPE.encode() in data and name.endswith(".conflist")
        else data
        for name, data in snapshot.files.items()
    }
    found = plan(Snapshot(whole), ENTRY, pinned=case["cni_conf_name"] or None)
    assert found.present == (case["expect_valid"] != (case["name"] in OTHERWISE)), found.reason


@ids(DECISIONS["cni_cleanup"]["cases"])
def test_istio_cleanup(case: dict[str, Any]) -> None:
    snapshot = Snapshot({"10-x.conflist": retyped(case["before"])})
    after = outcome_of(plan_removal(snapshot), snapshot)
    if case["after"] is not None:
        assert after.files == {"10-x.conflist": case["after"].encode()}
    else:
        assert case["name"] in OTHERWISE
        assert not cni_config.mentions_us(after.files["10-x.conflist"])


def test_the_plugin_speaks_what_the_configuration_may_ask_for() -> None:
    answer = plugin.respond("VERSION", b"")
    assert isinstance(answer, dict)
    assert tuple(answer["supportedVersions"]) == cni_config.VERSIONS


# --- what differs, in words ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plugins", "words"),
    [
        ([BASE], ["entry is missing"]),
        ([BASE, OURS], []),
        ([OURS, BASE], ["entry stands before the base plugin bridge"]),
        ([BASE, OURS, {"type": "portmap"}], ["entry stands before portmap"]),
        ([BASE, OURS, OURS], ["entry is there twice"]),
        ([OURS, OURS, BASE, OURS], ["entry is there 3 times"]),
        (
            [BASE, {**OURS, "socket": "/tmp/x"}],
            ['body differs: socket "/tmp/x" instead of "/run/intercept-agent/agent.sock"'],
        ),
        (
            [BASE, {"type": TYPE}],
            [
                "body differs: socket is missing",
                "body differs: failurePolicy is missing",
                "body differs: capabilities is missing",
            ],
        ),
        ([BASE, {**OURS, "dns": {}}], ["body differs: dns does not belong there"]),
        (
            [BASE, {**OURS, "capabilities": {cni_config.ANNOTATIONS: 1}}],
            [
                f'body differs: capabilities {{"{cni_config.ANNOTATIONS}": 1}} instead of '
                f'{{"{cni_config.ANNOTATIONS}": true}}'
            ],
        ),
    ],
)
def test_differences_in_words_and_their_repair(
    plugins: list[dict[str, Any]], words: list[str]
) -> None:
    found = parse("10-x.conflist", conflist(*plugins))
    assert list(differences(found, ENTRY)) == words
    repaired = parse("10-x.conflist", to_bytes(insert(found, ENTRY)))
    assert differences(repaired, ENTRY) == ()
    assert (repaired.text == found.text) == (not words)


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("a.conflist", b"", "is empty"),
        ("a.conflist", b" \n", "is empty"),
        ("a.conflist", conflist(BASE)[:40], "is not JSON"),
        ("a.conflist", b'{"name": NaN}', "is not JSON"),
        ("a.conflist", b"[" * 100_000, "is not JSON"),
        ("a.conflist", b'{"name":' + b"[" * 200 + b"]" * 200 + b"}", "nested too deeply"),
        ("a.conflist", b"7", "is not a JSON object"),
        ("a.conflist", b'{"plugins": [{"type": "bridge"}]}', "has no name"),
        ("a.conflist", b'{"name": "n", "plugins": []}', "has no plugins"),
        ("a.conflist", b'{"name": "n", "type": "bridge"}', "has no plugins"),
        ("a.conflist", b'{"name": "n", "plugins": [{}]}', "without a type"),
        ("a.conflist", b'{"name": "n", "plugins": [{"type": ""}]}', "empty type"),
        ("a.conf", conflist(BASE), "looks like a .conflist"),
        ("a.conf", b" " * (cni_config.MAX_BYTES + 1), "is larger than"),
    ],
)
def test_invalid_file_is_named_with_its_fault(name: str, data: bytes, said: str) -> None:
    with pytest.raises(InvalidSettings, match=rf"^{name} .*{said}"):
        parse(name, data)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (conflist(OURS), "has no plugin that makes the network: only intercept-cni"),
        (conflist({"type": "portmap"}, {"type": "istio-cni"}), "portmap, istio-cni"),
        (conflist(BASE, cniVersion="0.2.0"), "has cniVersion 0.2.0"),
        (b'{"name": "n", "plugins": [{"type": "bridge"}]}', "has cniVersion 0.1.0"),
        (conflist(BASE, cniVersion="1.2.0"), "has cniVersion 1.2.0"),
        (conflist(BASE, cniVersions=["1.0.0", "1.10.0"]), "has cniVersion 1.10.0"),
        (conflist(BASE, cniVersion=1), "has cniVersion 1.0.0|has cniVersion 1,"),
    ],
)
def test_list_in_which_our_entry_would_stop_every_pod_is_refused(data: bytes, said: str) -> None:
    with pytest.raises(InvalidSettings, match=said):
        insert(parse("10-x.conflist", data), ENTRY)
    assert plan(Snapshot({"10-x.conflist": data}), ENTRY).edits == ()


@pytest.mark.parametrize(
    "values",
    [{"socket": "relative"}, {"socket": "/" + "x" * 107}, {"failure_policy": "Closed"}],
)
def test_entry_that_cannot_work_is_refused(values: dict[str, str]) -> None:
    with pytest.raises(InvalidSettings):
        Entry(**values)


def test_layout_of_the_file_is_kept() -> None:
    head = '{\r\n\t"name": "n", "cniVersion": "1.0.0",\r\n\t"plugins": ['
    text = head + '\r\n\t\t{"type": "a"}\r\n\t]\r\n}'
    after = insert(parse("x.conflist", text.encode()), ENTRY)
    assert '{"type": "a"},\r\n\t\t{\r\n\t\t\t"type": "intercept-cni",\r\n' in after
    assert after.endswith("\r\n\t\t}\r\n\t]\r\n}")


# --- directories ---------------------------------------------------------------------------------


def active(files: dict[str, bytes], **options: Any) -> str | None:
    return plan(Snapshot(files), ENTRY, **options).file


def test_first_valid_file_by_name_is_active() -> None:
    files = {"10-b.json": CONF, "20-c.conflist": conflist(BASE)}
    assert active(files) == "10-b.conflist"
    assert active({"00-readme.txt": CONF, **files}) == "10-b.conflist"
    assert active({".hidden.conf": CONF, **files}) == ".hidden.conflist"
    assert active({"05-z.conflist": conflist(BASE), **files}) == "05-z.conflist"


def test_invalid_file_in_front_is_skipped_and_told() -> None:
    found = plan(Snapshot({"05-a.conf": b"{", "10-b.conflist": conflist(BASE)}), ENTRY)
    assert found.file == "10-b.conflist"
    assert "05-a.conf is not JSON" in found.skipped[0]
    assert "containerd reads nothing behind it" in found.warnings[0]


def test_nothing_to_chain_to_is_waited_for() -> None:
    assert "the base CNI has to write one first" in plan(Snapshot(), ENTRY).reason
    assert "does not exist" in plan(Snapshot(exists=False), ENTRY).reason


def test_pinned_file_behind_another_is_told() -> None:
    files = {"a.conflist": conflist(BASE), "b.conflist": conflist(BASE)}
    found = plan(Snapshot(files), ENTRY, pinned="b.conflist")
    assert found.file == "b.conflist"
    assert "reads a.conflist before b.conflist" in found.warnings[0]


def test_conf_stays_active_until_its_list_is_there() -> None:
    found = plan(Snapshot({"10-x.conf": CONF}), ENTRY)
    assert [type(edit) for edit in found.edits] == [Write, Rename]
    assert found.edits[1] == Rename("10-x.conf", "10-x.conf" + KEPT_SUFFIX)


def test_base_cni_that_writes_its_conf_anew_is_followed() -> None:
    first = Snapshot({"10-x.conf": CONF})
    installed = outcome_of(plan(first, ENTRY), first)
    newer = CONF.replace(b"bridge", b"macvlan")
    rewritten = Snapshot({**installed.files, "10-x.conf": newer})
    again = outcome_of(plan(rewritten, ENTRY), rewritten)
    assert b"macvlan" in again.files["10-x.conflist"]
    assert outcome_of(plan_removal(again), again).files == {"10-x.conf": newer}


def test_list_that_others_changed_keeps_their_change_at_removal() -> None:
    first = Snapshot({"10-x.conf": CONF})
    files = dict(outcome_of(plan(first, ENTRY), first).files)
    files["10-x.conflist"] = files["10-x.conflist"].replace(b'"bridge"', b'"macvlan"')
    found = plan_removal(Snapshot(files))
    after = outcome_of(found, Snapshot(files)).files
    assert b"macvlan" in after["10-x.conflist"]
    assert not cni_config.mentions_us(after["10-x.conflist"])
    assert after["10-x.conf" + KEPT_SUFFIX] == CONF
    assert "its original stays" in found.warnings[0]


@pytest.mark.parametrize("extension", cni_config.EXTENSIONS)
def test_twin_that_says_the_same_comes_back_as_well(extension: str) -> None:
    twin = {"10-x.conflist": conflist(json.loads(CONF), cniVersion="0.3.1", name="n")}
    first = Snapshot({"10-x" + extension: CONF, **twin} if extension != ".conflist" else twin)
    installed = outcome_of(plan(first, ENTRY), first)
    assert plan(installed, ENTRY).present
    assert outcome_of(plan_removal(installed), installed).files == first.files


def test_conf_and_json_that_say_the_same_both_come_back() -> None:
    first = Snapshot({"10-x.conf": CONF, "10-x.json": CONF})
    installed = outcome_of(plan(first, ENTRY), first)
    assert plan(installed, ENTRY).present
    assert outcome_of(plan_removal(installed), installed).files == first.files


def test_base_cni_that_writes_its_json_anew_is_followed_although_the_list_comes_first() -> None:
    first = Snapshot({"10-x.json": CONF})
    installed = outcome_of(plan(first, ENTRY), first)
    newer = CONF.replace(b"bridge", b"macvlan")
    rewritten = Snapshot({**installed.files, "10-x.json": newer})
    again = outcome_of(plan(rewritten, ENTRY), rewritten)
    assert b"macvlan" in again.files["10-x.conflist"]
    assert outcome_of(plan_removal(again), again).files == {"10-x.json": newer}


# --- for any file and any directory --------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
TYPES = st.sampled_from(["bridge", "cilium-cni", "calico", "portmap", "tuning"])
BROKEN_OURS = st.fixed_dictionaries({"type": st.just(TYPE)}, optional={"socket": JSON, "x": JSON})


@st.composite
def foreign(draw: st.DrawFn) -> dict[str, Any]:
    """A plugin of others, its keys in any order."""
    body = draw(st.dictionaries(st.text(max_size=6), JSON, max_size=4))
    keys = draw(st.permutations([*(key for key in body if key != "type"), "type"]))
    return {key: draw(TYPES) if key == "type" else body[key] for key in keys}


def laid_out(draw: st.DrawFn, document: dict[str, Any]) -> bytes:
    """Return the document with its keys in any order, in any layout."""
    shuffled = {key: document[key] for key in draw(st.permutations(list(document)))}
    text = json.dumps(
        shuffled,
        indent=draw(st.sampled_from([None, 0, 1, 2, 3, 4, "\t"])),
        ensure_ascii=draw(st.booleans()),
        separators=draw(st.sampled_from([None, (",", ":"), (" , ", " : ")])),
    )
    text = draw(st.sampled_from(["", "\n", " \t"])) + text + draw(st.sampled_from(["", "\n"]))
    newline = draw(st.sampled_from(["\n", "\r\n"]))
    return text.replace("\n", newline).encode("utf-8", "surrogatepass")


@st.composite
def list_file(draw: st.DrawFn, *, ours: bool = False) -> bytes:
    plugins = draw(st.lists(foreign(), min_size=1, max_size=3))
    plugins[0]["type"] = "bridge"
    if ours:
        for body in draw(st.lists(BROKEN_OURS | st.just(OURS), max_size=3)):
            plugins.insert(draw(st.integers(0, len(plugins))), body)
    document = draw(st.dictionaries(st.text(max_size=6), JSON, max_size=3))
    version = draw(st.sampled_from(cni_config.VERSIONS))
    document |= {"cniVersion": version, "name": "n\u00e9t", "plugins": plugins}
    document.pop("cniVersions", None)
    return laid_out(draw, document)


@st.composite
def conf_file(draw: st.DrawFn) -> bytes:
    document = draw(foreign()) | {"cniVersion": "0.4.0", "name": "n", "type": "bridge"}
    document.pop("cniVersions", None)
    document.pop("plugins", None)
    return laid_out(draw, document)


@st.composite
def directory(draw: st.DrawFn, *, ours: bool = False) -> Snapshot:
    """Some files, valid and not, of which at least one can take our entry."""
    torn = st.sampled_from([b"", b"{", b"[]", b'{"cniVersion": "1.0.0", "name": "n"'])
    files: dict[str, bytes] = {}
    for stem in draw(st.lists(st.sampled_from(["05-a", "10-b", "20-c"]), max_size=3)):
        extension = draw(st.sampled_from(cni_config.EXTENSIONS))
        valid = list_file(ours=ours) if extension == ".conflist" else conf_file()
        files[stem + extension] = draw(valid | torn)
    files["30-d.conflist"] = draw(list_file(ours=ours))
    return Snapshot(files)


@given(list_file())
def test_any_list_comes_back_byte_for_byte(data: bytes) -> None:
    found = parse("x.conflist", data)
    after = parse("x.conflist", to_bytes(insert(found, ENTRY)))
    assert differences(after, ENTRY) == ()
    assert json.dumps(after.others) == json.dumps(found.plugins)
    assert to_bytes(without(after)) == data
    assert insert(after, ENTRY) == after.text


@given(list_file(ours=True))
def test_any_broken_entry_is_mended_and_the_others_stay(data: bytes) -> None:
    found = parse("x.conflist", data)
    after = parse("x.conflist", to_bytes(insert(found, ENTRY)))
    assert differences(after, ENTRY) == ()
    assert json.dumps(after.others) == json.dumps(found.others)
    rest = {key: value for key, value in found.document.items() if key != "plugins"}
    assert {key: value for key, value in after.document.items() if key != "plugins"} == rest
    assert list(after.document) == list(found.document)


def test_bytes_that_are_not_text_stay() -> None:
    data = conflist({"type": "bridge", "note": "X"}).replace(b'"X"', b'"\xff\xfe"')
    after = to_bytes(insert(parse("x.conflist", data), ENTRY))
    assert b'"\xff\xfe"' in after
    assert to_bytes(without(parse("x.conflist", after))) == data


@given(directory(ours=True))
def test_any_directory_is_in_order_after_one_plan(snapshot: Snapshot) -> None:
    after = outcome_of(plan(snapshot, ENTRY), snapshot)
    again = plan(after, ENTRY)
    assert (again.present, again.edits) == (True, ())
    removed = outcome_of(plan_removal(after), after)
    assert not [name for name, data in removed.files.items() if cni_config.mentions_us(data)]
    assert plan_removal(removed).edits == ()


@given(directory(), st.data())
def test_removal_after_a_plan_cut_off_anywhere_gives_back_every_byte(
    snapshot: Snapshot, data: st.DataObject
) -> None:
    todo = plan(snapshot, ENTRY).edits
    partly = outcome(snapshot, cut(data, todo))
    assert outcome_of(plan(partly, ENTRY), partly).files == outcome(snapshot, todo).files
    cleared = outcome(partly, cut(data, plan_removal(partly).edits))
    assert outcome_of(plan_removal(cleared), cleared).files == snapshot.files


def cut(data: st.DataObject, todo: tuple[Edit, ...]) -> tuple[Edit, ...]:
    return todo[: data.draw(st.integers(0, len(todo)))]


@given(directory(), st.data())
def test_there_is_a_valid_active_file_at_every_moment(
    snapshot: Snapshot, data: st.DataObject
) -> None:
    todo = plan(snapshot, ENTRY).edits
    installed = outcome(snapshot, todo)
    for moment in (
        outcome(snapshot, cut(data, todo)),
        outcome(installed, cut(data, plan_removal(installed).edits)),
    ):
        assert active(dict(moment.files)) == active(dict(snapshot.files))
