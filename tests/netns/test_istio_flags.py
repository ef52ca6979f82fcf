"""The options of istio-iptables about its own run, as injected pods and its users have them."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.conformance import cli
from tests.support.netns import snapshot

INJECTED = (
    *("-p", "15001", "-z", "15006", "-u", "1337", "-m", "REDIRECT", "-i", "*", "-x", ""),
    *("-b", "*", "-d", "15090,15021,15020", "--log_output_level=default:info", "--log_as_json"),
)
# What the injector writes behind that, by what the mesh was installed with, and which backend it is
BY_INSTALLATION: Mapping[str, tuple[tuple[str, ...], str | None]] = {
    "forceApplyIptables": (("--force-apply",), None),
    "nativeNftables": (("--native-nftables",), "nftables"),
    "both": (("--force-apply", "--native-nftables"), "nftables"),
}
OTHERS = (
    *("--iptables-probe-port", "15002", "--probe-timeout=5s", "--reconcile=true", "--cni-mode"),
    *("--network-namespace", "/run/netns/none", "--log_target", "stdout"),
    *("--log_caller", "all", "--log_stacktrace_level", "default:none"),
)


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INTERCEPT_STATE_DIR", str(tmp_path / "state"))


def applied(netns: str, *words: str, **variables: str) -> dict[str, object]:
    done = cli("apply", "--netns", netns, "--output", "json", *words, environment=variables)
    assert done.code == 0, done.stderr
    answer: dict[str, object] = json.loads(done.stdout)
    return answer


@pytest.mark.parametrize("name", BY_INSTALLATION)
def test_every_injected_command_line_is_taken_unchanged(netns: str, name: str) -> None:
    extra, backend = BY_INSTALLATION[name]
    answer = applied(netns, *INJECTED, *extra, *OTHERS)
    assert answer["changed"] is True
    assert backend in (None, answer["backend"])
    assert cli("check", "--netns", netns, *INJECTED, *extra, *OTHERS).code == 0
    assert cli("plan", *INJECTED, *extra, *OTHERS).code == 0


@pytest.mark.parametrize(
    ("words", "variables", "backend"),
    [
        (("--force-iptables-binary", "legacy"), {}, "iptables-legacy"),
        (("--force-iptables-binary=nft",), {"FORCE_IPTABLES_BINARY": "legacy"}, "iptables-nft"),
        ((), {"FORCE_IPTABLES_BINARY": "legacy"}, "iptables-legacy"),
        ((), {"NATIVE_NFTABLES": "true", "FORCE_IPTABLES_BINARY": "nft"}, "nftables"),
        (("--native-nftables=false",), {"NATIVE_NFTABLES": "1"}, None),
        (("--backend", "iptables-nft"), {"NATIVE_NFTABLES": "true"}, "iptables-nft"),
    ],
)
def test_backend_has_the_names_of_istio_iptables(
    netns: str, words: tuple[str, ...], variables: dict[str, str], backend: str | None
) -> None:
    default = applied(netns, "--dry-run")["backend"]
    assert applied(netns, *words, **variables)["backend"] == (backend or default)


@pytest.mark.parametrize(
    ("words", "variables"),
    [
        (("-n",), {}),
        (("--dry-run=true",), {}),
        ((), {"DRY_RUN": "true"}),
        (("--skip-rule-apply",), {}),
        ((), {"SKIP_RULE_APPLY": "1"}),
        (("--cleanup-only", "-n"), {}),
    ],
)
def test_run_without_writes_makes_none(
    netns: str, words: tuple[str, ...], variables: dict[str, str]
) -> None:
    before = snapshot(netns)
    answer = applied(netns, *INJECTED, *words, **variables)
    assert snapshot(netns) == before
    assert bool(answer["steps"]) is ("--cleanup-only" not in words)


def test_cleanup_alone_removes_the_capture_whatever_its_settings(netns: str) -> None:
    before = snapshot(netns)
    applied(netns, *INJECTED, "-m", "TPROXY", "--backend", "nftables")
    assert applied(netns, "--cleanup-only")["changed"] is True
    assert snapshot(netns) == before
    assert applied(netns, CLEANUP_ONLY="true")["changed"] is False
    assert snapshot(netns) == before


def test_validation_proves_the_capture_that_is_there(netns: str) -> None:
    words = ("apply", "--netns", netns, *INJECTED, "--run-validation", "--output", "json")
    without = cli(*words, "--skip-rule-apply")
    assert without.code == 1
    assert {one["outcome"] for one in without.document["probes"]} >= {"failed"}
    proved = cli(*words)
    assert proved.code == 0, proved.stdout
    assert {one["outcome"] for one in proved.document["probes"]} == {"ok"}
    assert cli(*words, "--skip-rule-apply").code == 0
    said = cli("apply", "--netns", netns, *INJECTED, environment={"RUN_VALIDATION": "true"})
    assert (said.code, said.stdout.count("\nok ")) == (0, len(proved.document["probes"]))


@pytest.mark.parametrize(
    ("words", "variables", "what"),
    [
        (("--force-iptables-binary", "nftables"), {}, "force_iptables_binary"),
        ((), {"FORCE_IPTABLES_BINARY": "iptables-nft"}, "force_iptables_binary"),
        (("--cleanup-only=perhaps",), {}, "cleanup_only"),
        ((), {"DRY_RUN": "perhaps"}, "dry_run"),
    ],
)
def test_value_that_is_none_is_refused_before_anything_is_touched(
    netns: str, words: tuple[str, ...], variables: dict[str, str], what: str
) -> None:
    before = snapshot(netns)
    done = cli("apply", "--netns", netns, *INJECTED, *words, environment=variables)
    assert (done.code, len(done.lines)) == (2, 1)
    assert what in done.stderr
    assert snapshot(netns) == before
