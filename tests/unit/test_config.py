"""The daemon's configuration: every mistake at once, and nothing taken that is not understood."""

from pathlib import Path

import pytest

from agent.model.errors import InvalidSettings
from agent.node.config import Config, Listen, load


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "agent.yaml"
    path.write_text(text)
    return str(path)


def test_no_file_gives_the_defaults() -> None:
    assert load(None, {}) == Config()


def test_file_is_read(tmp_path: Path) -> None:
    text = """
    socket: /run/x/agent.sock
    backend: iptables-nft
    mode: alert
    cri: {endpoint: /run/containerd/containerd.sock}
    cni: {conf_dir: /etc/cni/net.d, bin_dir: /opt/cni/bin}
    health: {address: 0.0.0.0, port: 0}
    exclude_namespaces: [kube-system]
    static:
      - {name: web, netns: /run/netns/web, settings: {inbound_ports_include: "80"}}
    """
    found = load(written(tmp_path, text), {})
    assert found.socket == Path("/run/x/agent.sock")
    assert found.health == Listen(address="0.0.0.0", port=0)
    assert found.exclude_namespaces == ("kube-system",)
    assert found.static[0].settings == {"inbound_ports_include": "80"}


def test_environment_wins_over_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, "mode: alert\nhealth: {port: 1}\n")
    environment = {
        "INTERCEPT_MODE": "observe",
        "INTERCEPT_HEALTH_PORT": "2",
        "INTERCEPT_EXCLUDE_NAMESPACES": "a, b",
        "INTERCEPT_CRI_ENDPOINT": "/run/c.sock",
    }
    found = load(path, environment)
    assert (found.mode, found.health.port, found.cri_endpoint) == ("observe", 2, "/run/c.sock")
    assert found.exclude_namespaces == ("a", "b")


def test_every_mistake_is_told_at_once(tmp_path: Path) -> None:
    text = """
    sockt: /run/agent.sock
    state_dir: relative
    mode: fix
    health: {port: 70000, adress: x}
    cri: 5
    exclude_namespaces: kube-system
    static:
      - {name: web}
      - {name: a, netns: /n, settings: {inbound_ports_include: "70000"}}
      - {name: a, netns: /n}
    """
    with pytest.raises(InvalidSettings) as refused:
        load(written(tmp_path, text), {})
    told = "\n".join(refused.value.problems)
    for word in (
        "sockt: no such key; did you mean socket?",
        "state_dir: 'relative'",
        "mode: 'fix' is none of observe, alert, repair",
        "health.port: 70000",
        "health.adress: no such key; did you mean address?",
        "cri: a mapping",
        "exclude_namespaces: a list",
        "static[0]",
        "static[1].settings: inbound_ports_include",
        "the name a is given twice",
    ):
        assert word in told


@pytest.mark.parametrize("text", ["capture: sidecar", "gate: listener", "guard: standing"])
def test_what_this_version_does_anyway_may_be_said(tmp_path: Path, text: str) -> None:
    assert load(written(tmp_path, text), {}) == Config()


@pytest.mark.parametrize(
    ("text", "guard"),
    [
        ("mode: repair", "standing"),
        ("mode: alert", None),
        ("{mode: alert, guard: standing}", "standing"),
        ("guard: off", "off"),
        ("guard: 'off'", "off"),
    ],
)
def test_the_guard_stands_where_drift_is_repaired(
    tmp_path: Path, text: str, guard: str | None
) -> None:
    assert load(written(tmp_path, text), {}).guard == guard


@pytest.mark.parametrize("text", ["capture: ambient"])
def test_what_is_not_there_yet_is_refused_and_not_ignored(tmp_path: Path, text: str) -> None:
    with pytest.raises(InvalidSettings, match="is not there yet"):
        load(written(tmp_path, text), {})
