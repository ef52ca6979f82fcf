"""What an uninstall of the plugin leaves in pods: it is named, and the way out of it works."""

import json
import shlex
from pathlib import Path

from tests.support.capturing import EVERYTHING, capture, command
from tests.support.netns import namespace


def uninstall(folder: Path, *words: str) -> str:
    where = ("--conf-dir", str(folder), "--bin-dir", str(folder))
    code, said, error = command("cni", "uninstall", *where, *words)
    assert code == 0, error
    return said


def test_uninstall_names_the_namespaces_that_hold_a_capture(tmp_path: Path, netns: str) -> None:
    with namespace("nft") as nft, namespace("legacy") as legacy:
        capture(nft, EVERYTHING, "nftables")
        capture(legacy, {**EVERYTHING, "guard": "standing"}, "iptables-legacy")
        found = json.loads(uninstall(tmp_path, "-o", "json"))["holding"]
        ours = {one["netns"]: one for one in found if one["netns"] in (netns, nft, legacy)}
        assert {name: one["backends"] for name, one in ours.items()} == {
            nft: ["nftables"],
            legacy: ["iptables-legacy", "guard"],
        }
        lines = uninstall(tmp_path).splitlines()
        ways = [line.partition(": ")[2] for line in lines if nft in line or legacy in line]
        assert len(ways) == 2
        for way in ways:
            program, *words = shlex.split(way)
            assert program == "intercept-agent"
            assert command(*words)[0] == 0
        said = uninstall(tmp_path)
        assert nft not in said
        assert legacy not in said
