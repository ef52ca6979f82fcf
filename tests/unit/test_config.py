"""The daemon's configuration: every mistake at once, and nothing taken that is not understood."""

from pathlib import Path

import pytest

from agent.model.decision import decide
from agent.model.errors import InvalidSettings
from agent.model.pod import Container, Namespace, Pod
from agent.node.config import Config, Kubernetes, Listen, load


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


AMBIENT = """
capture: ambient
ambient: {redirect_dns: false, host_probe_snat_ip: 169.254.9.9}
static:
  - {name: web, netns: web}
  - {name: api, netns: api, settings: {redirect_dns: true}}
  - {name: db, netns: db, settings: {mode: sidecar, inbound_ports_include: '5432'}}
"""


def test_ambient_pods_have_the_settings_of_the_node_and_static_ones_their_own_too(
    tmp_path: Path,
) -> None:
    config = load(written(tmp_path, AMBIENT), {"INTERCEPT_AMBIENT_ENABLE_IPV6": "false"})
    assert config.capture == "ambient"
    common = {"redirect_dns": False, "host_probe_snat_ip": "169.254.9.9", "enable_ipv6": "false"}
    assert config.ambient == common
    web, api, db = (pod.settings for pod in config.static)
    assert web == {"mode": "ambient", **common}
    assert api == {**web, "redirect_dns": True}
    assert db == {"mode": "sidecar", "inbound_ports_include": "5432"}


def test_pods_with_a_sidecar_have_what_the_node_says_of_them(tmp_path: Path) -> None:
    found = load(written(tmp_path, "sidecar: {enable_ipv6: false}"), {})
    injected = Pod(
        name="web",
        namespace="shop",
        annotations={"sidecar.istio.io/status": "{}"},
        labels={},
        containers=(Container(name="app"), Container(name="istio-proxy")),
    )
    decision = decide(injected, Namespace(name="shop", labels={}), found.policy())
    assert decision.settings is not None
    assert decision.settings["enable_ipv6"] is False


def test_mistake_is_told_with_the_file_or_the_variable_that_it_stands_in(tmp_path: Path) -> None:
    path = written(tmp_path, "gaurd: off\nmode: alert\nhealth: {port: x}\nstatus: {port: y}")
    with pytest.raises(InvalidSettings) as refused:
        load(path, {"INTERCEPT_MODE": "fix", "INTERCEPT_STATUS_PORT": "z"})
    wrong = "is not a port from 0 (off) to 65535"
    assert set(refused.value.problems) == {
        f"gaurd: no such key; did you mean guard? (in {path})",
        "mode: 'fix' is none of observe, alert, repair (in INTERCEPT_MODE)",
        f"health.port: 'x' {wrong} (in {path})",
        f"status.port: 'z' {wrong} (in INTERCEPT_STATUS_PORT)",
    }


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("capture: ambiant", "capture: 'ambiant' is none of sidecar, ambient"),
        ("ambient: {redirect_dns: maybe}", "ambient: redirect_dns: 'maybe' is neither true nor"),
        ("ambient: {dns: true}", "ambient.dns: no such key"),
        ("ambient: {enable_ipv6: maybe}", "ambient: enable_ipv6: 'maybe' is neither"),
        ("sidecar: {enable_ipv6: maybe}", "sidecar: enable_ipv6: 'maybe' is neither"),
        (
            "{capture: ambient, static: [{name: a, netns: a, settings: {proxy_port: 1}}]}",
            r"static\[0\].settings: proxy_port: an ambient capture has no choice of it",
        ),
    ],
)
def test_wrong_words_about_ambient_pods_are_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(InvalidSettings, match=said):
        load(written(tmp_path, text), {})


def test_api_server_is_described(tmp_path: Path) -> None:
    text = "kubernetes: {kubeconfig: /etc/k/config, node: n1, repair: delete, events: false}"
    found = load(written(tmp_path, text), {"INTERCEPT_KUBERNETES_UNSAFE": "label"}).kubernetes
    assert found == Kubernetes(
        kubeconfig="/etc/k/config", node="n1", repair="delete", unsafe="label", events=False
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{kubeconfg: x}", "kubernetes.kubeconfg: no such key; did you mean kubeconfig?"),
        ("{kubeconfig: config}", "kubernetes.kubeconfig: 'config' is none of auto, in-cluster"),
        ("{repair: kill}", "kubernetes.repair: 'kill' is none of program, event, label, delete"),
        ("{unsafe: [x]}", "kubernetes.unsafe: "),
        ("{events: perhaps}", "kubernetes.events: 'perhaps' is neither true nor false"),
        ("{taint: 5}", "taint: text is expected"),
        ("in-cluster", "kubernetes: a mapping with kubeconfig"),
    ],
)
def test_wrong_words_about_the_api_server_are_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(InvalidSettings) as refused:
        load(written(tmp_path, f"kubernetes: {text}"), {})
    assert said in "\n".join(refused.value.problems)
