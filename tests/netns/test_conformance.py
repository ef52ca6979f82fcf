"""Every golden of the corpus, through the real command line, on both flavours of iptables.

A pod that istio-init set up and one that this agent set up must read the same: rule for rule, in
order, in chains of the same names.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.support import istio_rules
from tests.support.conformance import (
    BACKENDS,
    NOBODY,
    Golden,
    Ran,
    assert_same,
    cli,
    cli_process,
    defaults,
    environment,
    flags,
    goldens,
    load,
    loaded,
    python_process,
    routing,
    rules_of,
    sections,
    settings_file,
)
from tests.support.netns import namespace, snapshot

each_golden = pytest.mark.parametrize("golden", goldens(), ids=lambda golden: golden.name)
each_backend = pytest.mark.parametrize("backend", BACKENDS)

ROUTED = tuple(golden for golden in goldens() if golden.ip_commands)
PODS = tuple(golden for golden in goldens() if golden.pod)
GROUPS = "root:x:0:\nnogroup:x:65534:\njava:x:5001:\nftp:x:5002:\n"


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INTERCEPT_STATE_DIR", str(tmp_path / "state"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "files"
    made.mkdir()
    return made


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that a user without privileges can read."""
    with tempfile.TemporaryDirectory(prefix="it-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture
def group_file(folder: Path) -> Path:
    path = folder / "group"
    path.write_text(GROUPS)
    return path


@pytest.fixture(scope="module")
def untouched() -> Iterator[dict[str, list[str]]]:
    """What the routing of a namespace without a capture reads like."""
    with namespace("plain") as name:
        yield routing(name)


def run(golden: Golden, group_file: Path, *words: str, **extra: dict[str, str]) -> Ran:
    """Run in this process, or in one that knows the group names that the case has."""
    if golden.group_names:
        variables = [f"{key}={value}" for key, value in extra.get("environment", {}).items()]
        return cli_process(*words, groups=group_file, within=("env", *variables))
    return cli(*words, **extra)


def assert_loaded(name: str, golden: Golden, backend: str) -> None:
    """Assert that the namespace holds the golden's rules in this flavour and none in the other."""
    for version in (4, 6):
        assert_same(loaded(name, backend, version), rules_of(golden.canonical[version]))
        (other,) = set(BACKENDS) - {backend}
        assert loaded(name, other, version) == {}


@each_golden
def test_the_reference_generator_of_these_tests_reproduces_the_golden(golden: Golden) -> None:
    config = {**defaults(), **golden.config}
    families = (4, 6) if config["enable_ipv6"] else (4,)
    for version in families:
        assert istio_rules.restore_text(config, version) == golden.restore[version]
    assert tuple(istio_rules.ip_commands(config)) == golden.ip_commands


@each_backend
@each_golden
def test_settings_file_loads_exactly_the_golden(
    golden: Golden,
    backend: str,
    netns: str,
    folder: Path,
    group_file: Path,
    untouched: dict[str, list[str]],
) -> None:
    file = settings_file(folder, golden.config)
    words = ("--netns", netns, "--settings", file, "--backend", backend, "--output", "json")
    done = run(golden, group_file, "apply", *words)
    assert done.code == 0, done.stderr
    assert_loaded(netns, golden, backend)
    if not golden.ip_commands:
        assert routing(netns) == untouched
    rules = sum(text.count("\n-A ") for text in golden.canonical.values())
    answer = done.document
    assert (answer["changed"], answer["rules"], answer["backend"]) == (True, rules, backend)


@pytest.mark.parametrize("golden", ROUTED, ids=lambda golden: golden.name)
def test_routing_reads_as_the_ip_commands_of_the_golden_leave_it(
    golden: Golden, netns: str, folder: Path, untouched: dict[str, list[str]]
) -> None:
    file = settings_file(folder, golden.config)
    done = cli("apply", "--netns", netns, "--settings", file, "--backend", "iptables-nft")
    assert done.code == 0, done.stderr
    assert routing(netns) == {**untouched, **golden.ip_readback}


@each_backend
@each_golden
def test_flags_of_istio_iptables_load_exactly_the_golden(
    golden: Golden, backend: str, netns: str, group_file: Path
) -> None:
    words = ("--netns", netns, "--backend", backend, *flags(golden.config))
    done = run(golden, group_file, "apply", *words, environment=environment(golden.config))
    assert done.code == 0, done.stderr
    assert_loaded(netns, golden, backend)


@each_golden
def test_what_was_loaded_is_in_sync_and_is_not_loaded_again(
    golden: Golden, netns: str, folder: Path, group_file: Path
) -> None:
    file = settings_file(folder, golden.config)
    words = ("--netns", netns, "--settings", file, "--backend", "iptables-nft", "--output", "json")
    assert run(golden, group_file, "apply", *words).document["changed"] is True
    before = snapshot(netns)
    assert run(golden, group_file, "check", *words).document["in_sync"] is True
    assert run(golden, group_file, "apply", *words).document["changed"] is False
    assert snapshot(netns) == before


@pytest.mark.parametrize("golden", PODS, ids=lambda golden: golden.name)
def test_pod_of_the_golden_is_captured_by_its_annotations(
    golden: Golden, netns: str, folder: Path
) -> None:
    file = folder / "pod.yaml"
    file.write_text(yaml.safe_dump(manifest(golden)))
    words = ("--pod-manifest", str(file), "--enable-ipv6", "false", "--backend", "iptables-nft")
    done = cli("apply", "--netns", netns, *words)
    assert done.code == 0, done.stderr
    assert_loaded(netns, golden, "iptables-nft")


def manifest(golden: Golden) -> dict[str, object]:
    """Return the pod that a case of the CNI plugin is about, as Kubernetes would have it."""
    pod = golden.pod
    proxy = {
        "env": [{"name": name, "value": value} for name, value in pod["proxy_env"].items()],
        "securityContext": {
            "runAsUser": pod["proxy_run_as_user"],
            "runAsGroup": pod["proxy_run_as_group"],
        },
    }
    containers = [
        {"name": name, **(proxy if name == "istio-proxy" else {})} for name in pod["containers"]
    ]
    metadata = {"name": "web-1", "annotations": pod["annotations"]}
    return {"kind": "Pod", "metadata": metadata, "spec": {"containers": containers}}


@each_golden
def test_planned_restore_text_loads_exactly_the_golden(
    golden: Golden, netns: str, folder: Path, group_file: Path
) -> None:
    file = settings_file(folder, golden.config)
    done = run(golden, group_file, "plan", "--settings", file, "--format", "restore")
    assert (done.code, done.stderr.count("error")) == (0, 0)
    parts = sections(done.stdout)
    families = [f"ipv{v}" for v in (4, 6) if golden.canonical[v]]
    assert list(parts) == [*families, *(["routes"] if golden.ip_commands else [])]
    assert tuple(parts.get("routes", "").splitlines()) == golden.ip_commands
    for version in (4, 6):
        text = parts.get(f"ipv{version}", "")
        assert_same(rules_of(text), rules_of(golden.canonical[version]))
        for backend in BACKENDS if text else ():
            load(netns, backend, version, text)
            assert_same(loaded(netns, backend, version), rules_of(golden.canonical[version]))


def test_plan_needs_no_privileges(open_folder: Path) -> None:
    """One process without any plans every golden, so that the tests stay quick."""
    groups = open_folder / "group"
    groups.write_text(GROUPS)
    files = [settings_file(open_folder, golden.config) for golden in goldens()]
    program = (
        "import sys; from agent.cli.main import main; codes = [main(['plan', '--settings', f])"
        " for f in sys.argv[1:]]; sys.exit(max(codes))"
    )
    done = python_process(program, *files, user=NOBODY, groups=groups)
    assert done.code == 0, done.stderr
    texts = done.stdout.split("# ipv4\n")[1:]
    assert [rules_of(text.split("# ")[0]) for text in texts] == [
        rules_of(golden.canonical[4]) for golden in goldens()
    ]
