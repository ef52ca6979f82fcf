"""Every golden of an ambient pod, and what none covers, through the real command line.

A pod that Istio's node agent enrolled and one that this agent captured must read the same: rule for
rule, in order, in chains of the same names.
"""

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support import ambient_rules
from tests.support.conformance import (
    BACKENDS,
    Ran,
    assert_same,
    cases_dir,
    cli,
    load,
    loaded,
    routing,
    rules_of,
    sections,
)
from tests.support.netns import namespace, snapshot

pytestmark = pytest.mark.netns

INTERFACES = ["vnet0", "tap1.5"]
DEFAULTS: Mapping[str, Mapping[str, Any]] = json.loads((cases_dir() / "defaults.json").read_text())
CONFIG, OVERRIDES = DEFAULTS["ambient"], DEFAULTS["ambient_pod_overrides"]


@dataclass(frozen=True, slots=True)
class Case:
    """An ambient pod: what its node says, what it says itself, and what must be loaded."""

    name: str
    config: Mapping[str, Any]
    annotations: Mapping[str, str]
    rules: Mapping[int, str]  # canonical, by version
    ip_commands: tuple[str, ...]
    ip_readback: Mapping[str, list[str]]
    overrides: Mapping[str, Any]
    restore: Mapping[int, str]


@cache
def goldens() -> tuple[Case, ...]:
    return tuple(
        Case(
            name=case["name"],
            config={**CONFIG, **case["config"]},
            annotations=case["annotations"],
            rules={v: case[f"canonical_v{v}"] or "" for v in (4, 6)},
            ip_commands=tuple(case["ip_commands"]),
            ip_readback=case["ip_readback"],
            overrides={**OVERRIDES, **case["pod_overrides"]},
            restore={v: case[f"iptables_restore_v{v}"] or "" for v in (4, 6)},
        )
        for case in json.loads((cases_dir() / "ambient.json").read_text())
        if case["scope"] == "pod"
    )


each_golden = pytest.mark.parametrize("golden", goldens(), ids=lambda golden: golden.name)
each_backend = pytest.mark.parametrize("backend", BACKENDS)


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INTERCEPT_STATE_DIR", str(tmp_path / "state"))


def asked(folder: Path, config: Mapping[str, Any], annotations: Mapping[str, str]) -> list[str]:
    """Return the words that ask for it: the node's part as settings, the pod's as its manifest."""
    settings, pod = folder / "settings.yaml", folder / "pod.yaml"
    settings.write_text(yaml.safe_dump(dict(config)))
    metadata = {"name": "web-1", "annotations": dict(annotations)}
    spec = {"containers": [{"name": "web"}]}
    pod.write_text(yaml.safe_dump({"kind": "Pod", "metadata": metadata, "spec": spec}))
    return ["--mode", "ambient", "--settings", str(settings), "--pod-manifest", str(pod)]


def apply(name: str, backend: str, words: list[str]) -> Ran:
    done = cli("apply", "--netns", name, "--backend", backend, "--output", "json", *words)
    assert done.code == 0, done.stderr
    return done


@each_backend
@each_golden
def test_pod_holds_exactly_the_golden_until_it_is_taken_out(
    golden: Case, backend: str, netns: str, tmp_path: Path
) -> None:
    empty = snapshot(netns)
    words = asked(tmp_path, golden.config, golden.annotations)
    assert apply(netns, backend, words).document["changed"] is True
    for version in (4, 6):
        assert_same(loaded(netns, backend, version), rules_of(golden.rules[version]))
    assert routing(netns, "100") == golden.ip_readback
    check = cli("check", "--netns", netns, "--backend", backend, "--output", "json", *words)
    assert check.document["in_sync"] is True, check.stdout
    assert apply(netns, backend, words).document["changed"] is False
    assert cli("remove", "--netns", netns).code == 0
    after = snapshot(netns)
    differ = {key for key in after if after[key] != empty[key]}
    assert differ <= {f"legacy{v}" for v in (4, 6)}  # whose tables stay once they are made
    assert backend == "iptables-legacy" or not differ


@each_golden
def test_planned_text_is_the_golden(golden: Case, netns: str, tmp_path: Path) -> None:
    words = asked(tmp_path, golden.config, golden.annotations)
    done = cli("plan", "--format", "restore", *words)
    assert (done.code, done.stderr) == (0, "")
    parts = sections(done.stdout)
    assert tuple(parts.pop("routes").splitlines()) == golden.ip_commands
    assert list(parts) == [f"ipv{v}" for v in (4, 6) if golden.rules[v]]
    for version in (4, 6):
        assert_same(rules_of(parts.get(f"ipv{version}", "")), rules_of(golden.rules[version]))


@each_golden
def test_flags_and_environment_of_the_node_agent_ask_for_the_golden(
    golden: Case, tmp_path: Path
) -> None:
    config = golden.config
    switches = {"AMBIENT_DNS_CAPTURE": "redirect_dns", "AMBIENT_IPV6": "enable_ipv6"}
    variables = {name: str(config[key]).lower() for name, key in switches.items()}
    addresses = ("host_probe_snat_ip", "host_probe_snat_ipv6")
    variables |= {key.upper(): config[key] for key in addresses}
    flags = ["--redirect-dns", variables["AMBIENT_DNS_CAPTURE"]]
    flags += ["--enable-ipv6", variables["AMBIENT_IPV6"]]
    flags += [word for key in addresses for word in (f"--{key.replace('_', '-')}", config[key])]
    pod = asked(tmp_path, {}, golden.annotations)[4:]
    by_name = cli("plan", "--mode", "ambient", *pod, environment=variables)
    by_flag = cli("plan", "--mode", "ambient", *pod, *flags)
    assert by_name.stdout == by_flag.stdout
    parts = sections(by_flag.stdout)
    for version in (4, 6):
        assert_same(rules_of(parts.get(f"ipv{version}", "")), rules_of(golden.rules[version]))


def test_flag_wins_over_the_mode_of_a_settings_file(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("mode: ambient\nredirect_dns: true\ndns_servers: 10.0.0.1\n")
    done = cli("plan", "--mode", "sidecar", "--settings", str(file))
    assert done.code == 0, done.stderr
    assert "ISTIO_PRERT" not in done.stdout
    refused = cli("plan", "--settings", str(file))
    assert (refused.code, "dns_servers_v4: an ambient capture has" in refused.stderr) == (2, True)


@each_golden
def test_the_reference_generator_of_these_tests_loads_the_golden(golden: Case, netns: str) -> None:
    assert tuple(ambient_rules.ip_commands(golden.config)) == golden.ip_commands
    for version in (4, 6) if golden.config["enable_ipv6"] else (4,):
        text = ambient_rules.restore_text(golden.config, golden.overrides, version)
        load(netns, "iptables-nft", version, text)
        assert_same(loaded(netns, "iptables-nft", version), rules_of(golden.rules[version]))


WORDS = {"enabled": "true", "disabled": "false"}
COMBINATIONS = [
    *itertools.product((False, True), ("unset", "disabled"), (False, True), ((), INTERFACES)),
    *((dns, "enabled", dns, ()) for dns in (False, True)),
]


@pytest.mark.parametrize("number", range(len(COMBINATIONS)))
def test_what_no_golden_covers_is_loaded_as_the_reference_has_it(
    number: int, netns: str, tmp_path: Path
) -> None:
    dns, of_pod, bypass, interfaces = COMBINATIONS[number]
    config = {
        "redirect_dns": dns,
        "enable_ipv6": True,
        "host_probe_snat_ip": f"169.254.9.{number + 1}",
        "host_probe_snat_ipv6": f"fd00:0:0::{number + 1:x}",
    }
    overrides = {"virtual_interfaces": [*interfaces], "ingress_mode": bypass, "dns_proxy": of_pod}
    annotations = {"ambient.istio.io/bypass-inbound-capture": "T" if bypass else "0"}
    if interfaces:
        annotations["istio.io/reroute-virtual-interfaces"] = f" {', '.join(interfaces)},"
    if of_pod != "unset":
        annotations["ambient.istio.io/dns-capture"] = WORDS[of_pod]
    apply(netns, "iptables-nft", asked(tmp_path, config, annotations))
    with namespace("reference") as reference:
        for version in (4, 6):
            text = ambient_rules.restore_text(config, overrides, version)
            load(reference, "iptables-nft", version, text)
            want = loaded(reference, "iptables-nft", version)
            assert_same(loaded(netns, "iptables-nft", version), want)
    # The names that Istio has for what a pod overrides are settings, too.
    plan = cli("plan", *asked(tmp_path, {**config, **overrides}, {}))
    assert plan.stdout == cli("plan", *asked(tmp_path, config, annotations)).stdout
