"""The CNI plugin while no agent answers: every verb, and never anything but JSON on stdout."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agent.cni import plugin

PLUGIN = Path(plugin.__file__)
RESULT = {"cniVersion": "1.0.0", "ips": [{"address": "10.0.0.5/32"}]}


def call(verb: str, config: object) -> tuple[int, Any]:
    text = config if isinstance(config, str) else json.dumps(config)
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(PLUGIN)],
        input=text,
        text=True,
        capture_output=True,
        env={"CNI_COMMAND": verb},
        check=False,
    )
    return done.returncode, json.loads(done.stdout) if done.stdout else None


def config(annotations: dict[str, str] | None = None, **more: object) -> dict[str, object]:
    found: dict[str, object] = {"cniVersion": "1.0.0", "name": "n", "prevResult": RESULT, **more}
    if annotations is not None:
        found["runtimeConfig"] = {plugin.ANNOTATIONS: annotations}
    return found


def test_version_lists_what_is_spoken() -> None:
    assert call("VERSION", "") == (
        0,
        {"cniVersion": "1.1.0", "supportedVersions": ["0.3.1", "0.4.0", "1.0.0", "1.1.0"]},
    )


def test_plain_pod_starts_with_the_earlier_result() -> None:
    assert call("ADD", config({})) == (0, RESULT)


@pytest.mark.parametrize("annotations", [{"sidecar.istio.io/status": "x"}, None])
def test_mesh_or_unknown_pod_is_refused_and_the_agent_named(
    annotations: dict[str, str] | None,
) -> None:
    status, answer = call("ADD", config(annotations))
    assert status == 1
    assert answer["code"] == 11
    assert "intercept-agent" in answer["msg"]


def test_open_policy_lets_a_mesh_pod_start() -> None:
    mesh = config({"sidecar.istio.io/status": "x"}, failurePolicy="open")
    assert call("ADD", mesh) == (0, RESULT)


@pytest.mark.parametrize("text", ["garbage", "", "{}", "[" * 100_000])
def test_del_always_succeeds_without_output(text: str) -> None:
    assert call("DEL", text) == (0, None)


def test_gc_without_an_agent_succeeds() -> None:
    assert call("GC", config()) == (0, None)


def test_status_says_that_an_add_would_fail() -> None:
    status, answer = call("STATUS", config())
    assert (status, answer["code"]) == (1, 50)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", 6),
        ("{", 6),
        ("[]", 6),
        ('{"cniVersion": "9.9.9"}', 1),
        ('{"cniVersion": "1.0.0"}', 7),
        ("[" * 100_000, 6),
    ],
)
def test_bad_configuration_is_a_cni_error(text: str, code: int) -> None:
    status, answer = call("ADD", text)
    assert (status, answer["code"]) == (1, code)


def test_unknown_verb_is_a_cni_error() -> None:
    status, answer = call("FROB", config())
    assert (status, answer["code"]) == (1, 4)
