"""Whether the runtime looks for the plugin where it is put: said only where it is sure."""

import json
from pathlib import Path

import pytest

from agent.cli.cni_places import unfound, unread
from agent.cni.installer import Place
from agent.node.cri.details import CniPlaces, cni_places


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("ours", "theirs"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to("theirs")
    return tmp_path


@pytest.mark.parametrize(
    ("ours", "theirs", "differ"),
    [
        ("ours", "theirs", True),
        ("never", "theirs", True),
        ("theirs", "theirs", False),
        ("./theirs/", "theirs", False),
        ("link", "theirs", False),
        ("theirs", "link", False),
        ("ours", "never", False),  # it may be where this container does not see it
    ],
)
def test_two_directories_are_others_if_that_is_sure(
    folder: Path, ours: str, theirs: str, differ: bool
) -> None:
    mine, runtimes = f"{folder}/{ours}", f"{folder}/{theirs}"
    place = Place(conf_dir=mine, bin_dir=mine)
    said = unread(place, CniPlaces(runtimes, ("/never",)))
    assert (runtimes in said, mine in said) == (differ, differ)
    said = unfound(place, CniPlaces("/never", (runtimes,)))
    assert (runtimes in said, mine in said) == (differ, differ)


def test_one_of_several_plugin_directories_is_enough(folder: Path) -> None:
    place = Place(bin_dir=str(folder / "ours"))
    both = (str(folder / "theirs"), str(folder / "ours"))
    assert unfound(place, CniPlaces("/never", both)) == ""
    assert unfound(place, CniPlaces("/never", both[:1]))


def test_nothing_is_said_of_a_runtime_that_does_not_tell() -> None:
    assert unread(Place(), None) == unfound(Place(), None) == ""


@pytest.mark.parametrize(
    ("said", "found"),
    [
        (
            {"PluginDirs": ["/a", "/b"], "PluginConfDir": "/c", "Networks": [{"IFName": "lo"}]},
            CniPlaces("/c", ("/a", "/b")),
        ),
        ({"PluginDirs": [], "PluginConfDir": "/c"}, None),
        ({"PluginDirs": None, "PluginConfDir": "/c"}, None),
        ({"PluginDirs": ["/a"], "PluginConfDir": ""}, None),
        ({"PluginDirs": "/a", "PluginConfDir": "/c"}, None),
        ({}, None),
        ([], None),
    ],
)
def test_what_a_runtime_says_of_itself_is_read_with_care(
    said: object, found: CniPlaces | None
) -> None:
    assert cni_places({"cniconfig": json.dumps(said)}) == found


def test_runtime_of_another_make_says_nothing() -> None:
    assert cni_places({"config": '{"sandboxImage": "pause"}'}) is None
    assert cni_places({"cniconfig": "{"}) is None
