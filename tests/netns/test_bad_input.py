"""Bad input through the real command line: exit 2, a clear sentence, and nothing touched."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.support.bad_values import BAD_VALUES
from tests.support.conformance import ENVIRONMENT, FLAGS, SWITCHES, Ran, cli, cli_process
from tests.support.netns import namespace, snapshot


@pytest.fixture(autouse=True, scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("INTERCEPT_STATE_DIR", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="module")
def captured() -> Iterator[str]:
    """A captured namespace, in which whatever any of these tests changed would show."""
    with namespace("bad") as name:
        done = cli("apply", "--netns", name, "--backend", "iptables-nft", "-b", "80,443")
        assert done.code == 0, done.stderr
        before = snapshot(name)
        yield name
        assert snapshot(name) == before, "bad input changed the namespace"


def assert_refused(done: Ran, *fragments: str, code: int = 2) -> str:
    """Assert that there is one sentence on stderr with these words in it, and nothing else."""
    assert (done.code, done.stdout) == (code, "")
    assert "Traceback" not in done.stderr
    assert len(done.lines) == 1, done.stderr
    (line,) = done.lines
    assert line.startswith("error: ")
    for fragment in fragments:
        assert fragment in line
    return line


def apply_words(key: str, value: str) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the flag that sets a value, or the variable where Istio has only that."""
    if key in ENVIRONMENT:
        return (), {ENVIRONMENT[key]: value}
    if key == "enable_ipv6":
        return (f"--enable-ipv6={value}",), {}
    return (f"{FLAGS.get(key) or SWITCHES[key]}={value}",), {}


@pytest.mark.parametrize(("key", "value", "named", "allowed"), BAD_VALUES)
def test_bad_value_is_refused_before_anything_is_touched(
    key: str, value: str, named: str, allowed: str, captured: str
) -> None:
    words, variables = apply_words(key, value)
    # The group has the user's text where only the user is given; say it, so that one thing is bad.
    extra = ("--proxy-gid", "1337") if key == "proxy_uid" else ()
    done = cli("apply", "--netns", captured, *words, *extra, environment=variables)
    assert_refused(done, f"{key}: ", named, allowed)


@pytest.mark.parametrize("command", ["apply", "check", "plan"])
def test_all_mistakes_are_reported_at_once(command: str, captured: str) -> None:
    words = ("-b", "x,80,70000", "-i", "10.0.0.1/33", "-c", "eth0,.x", "-m", "tproxy", "-p", "0")
    done = cli(command, "--netns", captured, *words)
    assert (done.code, done.stdout) == (2, "")
    assert sorted(line.split(": ")[1] for line in done.lines) == [
        "exclude_interfaces",
        "inbound_interception_mode",
        "inbound_ports_include",
        "outbound_ip_ranges_include",
        "proxy_port",
    ]


def test_mistake_in_one_id_is_not_reported_as_one_in_another(captured: str) -> None:
    done = cli("apply", "--netns", captured, "-u", "no-such-name", "-b", "80")
    assert_refused(done, "proxy_uid: ", "'no-such-name'")


# --- environment ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "key"),
    [
        ("REDIRECT_DNS", "maybe", "redirect_dns"),
        ("ISTIO_META_DNS_CAPTURE", "yes", "redirect_dns"),
        ("INVALID_DROP", "2", "drop_invalid"),
        ("ISTIO_DUAL_STACK", "on", "dual_stack"),
        ("CAPTURE_ALL_DNS", "y", "capture_all_dns"),
        ("INBOUND_CAPTURE_PORT", "70000", "inbound_capture_port"),
        ("ISTIO_INBOUND_PORTS", "80,*", "inbound_ports_include"),
    ],
)
def test_garbage_in_the_environment_is_refused_not_dropped(
    name: str, value: str, key: str, captured: str
) -> None:
    done = cli("apply", "--netns", captured, environment={name: value})
    assert_refused(done, f"{key}: ", value.rpartition(",")[2])


# --- the settings file ----------------------------------------------------------------------------

BAD_FILES = {
    "list": (b"- a\n- b\n", "mapping"),
    "text": (b"just words\n", "mapping"),
    "two-documents": (b"proxy_port: 1\n---\nproxy_port: 2\n", "mapping"),
    "cut-short": (b"proxy_port: [1, 2\n", "line 2"),
    "tab": (b"proxy_port:\n\t- 1\n", "line 2"),
    "nul": (b"proxy_port: \0\n", "YAML"),
    "binary": (b"\x7fELF\x02\x01\x01" + bytes(range(256)), "YAML"),
    "latin-1": ("proxy_uid: é\n".encode("latin-1"), "YAML"),
    "huge": (b"# nothing\n" * 500_000, "4194304"),
    "deep": (b"[" * 5000, "YAML"),
    "python-object": (b'!!python/object/apply:os.system ["false"]\n', "line 1"),
    "endless-number": (b"proxy_port: " + b"9" * 5000, "YAML"),
}


@pytest.mark.parametrize("kind", BAD_FILES)
def test_file_that_is_no_settings_is_refused_by_name(
    kind: str, captured: str, tmp_path: Path
) -> None:
    content, said = BAD_FILES[kind]
    path = tmp_path / "settings.yaml"
    path.write_bytes(content)
    done = cli("apply", "--netns", captured, "--settings", str(path))
    assert_refused(done, str(path), said)


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("inbound_port_include", "inbound_ports_include"),
        ("proxyport", "proxy_port"),
        ("Redirect_DNS", "redirect_dns"),
        ("outbound_ip_range_includes", "outbound_ip_ranges_include"),
    ],
)
def test_unknown_key_is_refused_and_the_nearest_is_named(
    key: str, nearest: str, captured: str, tmp_path: Path
) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text(f"proxy_port: 15001\n{key}: 80\n")
    done = cli("apply", "--netns", captured, "--settings", str(path))
    assert_refused(done, str(path), f"{key}: no such setting", nearest)


@pytest.mark.parametrize("name", ["missing.yaml", "."], ids=["missing", "folder"])
def test_settings_file_that_cannot_be_read_is_named(
    name: str, captured: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    done = cli("apply", "--netns", captured, "--settings", str(path))
    assert_refused(done, str(path), "cannot read")


def test_settings_file_without_a_name_is_refused(captured: str) -> None:
    done = cli("apply", "--netns", captured, "--settings", "", "--dry-run")
    assert_refused(done)


def test_settings_file_without_an_end_is_not_read_to_it(captured: str) -> None:
    """The memory is limited, so that a reader without a bound fails here and not the machine."""
    within = ("prlimit", "--as=1500000000", "timeout", "20")
    words = ("apply", "--netns", captured, "--settings", "/dev/zero")
    assert_refused(cli_process(*words, within=within), "/dev/zero")


@pytest.mark.parametrize("kind", ["redirect_dns", "capture_all_dns", "enable_ipv6", "proxy_port"])
@pytest.mark.parametrize(
    "value", [[1], {"a": 1}, [[]], 1.5], ids=["list", "mapping", "nested", "float"]
)
def test_value_of_another_shape_is_refused(
    kind: str, value: object, captured: str, tmp_path: Path
) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text(yaml.safe_dump({kind: value}))
    done = cli("apply", "--netns", captured, "--settings", str(path))
    assert_refused(done, kind)


@pytest.mark.parametrize("text", ["0x50", "010", "1_000", "!!binary YWJj", "0b101", "0o17"])
def test_number_that_yaml_reads_as_another_is_refused(
    text: str, captured: str, tmp_path: Path
) -> None:
    """YAML 1.1 makes 80, 8, 1000, three bytes and 5 of them, and nobody sees it happen."""
    path = tmp_path / "settings.yaml"
    path.write_text(f"inbound_ports_include: {text}\n")
    done = cli("apply", "--netns", captured, "--settings", str(path), "--dry-run")
    assert_refused(done, "inbound_ports_include")


def test_range_that_yaml_reads_as_a_time_of_day_stays_a_range(tmp_path: Path) -> None:
    """22:30 is 1350 in YAML 1.1, and here the ports from 22 to 30."""
    path = tmp_path / "settings.yaml"
    path.write_text("inbound_ports_include: 22:30\n")
    done = cli("plan", "--settings", str(path), "--output", "json")
    assert done.document["settings"]["inbound_ports_include"] == ["22-30"]


def test_key_that_is_given_twice_is_refused(captured: str, tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("inbound_ports_include: 80\ninbound_ports_include: 90\n")
    done = cli("apply", "--netns", captured, "--settings", str(path), "--dry-run")
    assert_refused(done, "inbound_ports_include")


# --- the command line itself ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "fragments"),
    [
        (("--no-such-flag",), ("--no-such-flag",)),
        (("--backend", "random"), ("--backend", "'random'", "iptables-nft")),
        (("--backend", ""), ("--backend", "''", "iptables-nft")),
        (("--mode", "bridge"), ("--mode", "'bridge'", "sidecar")),
        (("--gate", "ajar"), ("--gate", "'ajar'", "closed")),
        (("--output", "xml"), ("--output", "'xml'", "json")),
        (("-c", "-j"), ("-c", "argument")),
        (("-p",), ("-p", "argument")),
        (("surplus",), ("surplus",)),
        (("--envoy-por", "15001"), ("--envoy-por",)),
    ],
    ids=lambda value: " ".join(value),
)
def test_bad_usage_is_refused(
    words: tuple[str, ...], fragments: tuple[str, ...], captured: str
) -> None:
    done = cli("apply", "--netns", captured, *words)
    assert "intercept-agent" in assert_refused(done, *fragments)


@pytest.mark.parametrize("command", ["apply", "check", "remove"])
def test_command_without_a_namespace_is_refused(command: str) -> None:
    assert_refused(cli(command), "--netns")


def test_unknown_command_is_refused_and_said_where_the_known_are() -> None:
    assert_refused(cli("capture"), "'capture'", "`intercept-agent --help`")
    assert_refused(cli(), "COMMAND")


def test_bad_input_comes_before_a_bad_namespace() -> None:
    assert_refused(cli("apply", "--netns", "it-no-such", "-b", "70000"), "inbound_ports_include")


@pytest.mark.parametrize(
    "words",
    [
        *(("trace", "--netns", "it-no-such", "--to", to) for to in ("10.0.0.1:{}", "[::1]:{}")),
        *(
            ("trace", "--netns", "it-no-such", "--to", "10.0.0.1:80", option, "{}")
            for option in ("--uid", "--gid", "--mark")
        ),
        *(("flows", option, "{}") for option in ("--uid", "--port", "--count")),
    ],
)
def test_number_of_thousands_of_digits_is_out_of_range(words: tuple[str, ...]) -> None:
    done = cli(*(word.format("9" * 5000) for word in words))
    assert_refused(done, "is not a number from")
    assert len(done.stderr) < 300
