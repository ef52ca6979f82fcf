"""The command line as its contract has it: JSON shapes, exit codes, names and their precedence."""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from agent.model.annotations import MODE
from tests.support.conformance import BACKENDS, FLAGS, ROOT, SHORT, cli, cli_process, loaded
from tests.support.netns import inside, path_of, snapshot

COMMANDS = ("apply", "check", "plan", "remove")
ISTIO_INIT = [
    *("-p", "15001", "-z", "15006", "-u", "1337", "-m", "REDIRECT", "-i", "*", "-x", ""),
    *("-b", "*", "-d", "15090,15021,15020", "--log_output_level=default:info"),
]

# setting, variables of which the last wins, a value, and that value in the rule model
ENVIRONMENT: tuple[tuple[str, tuple[str, ...], str, object], ...] = (
    ("inbound_capture_port", ("INBOUND_CAPTURE_PORT",), "16006", 16006),
    ("inbound_tunnel_port", ("INBOUND_TUNNEL_PORT",), "16008", 16008),
    ("proxy_uid", ("PROXY_UID",), "7,8", ["7", "8"]),
    ("proxy_gid", ("PROXY_GID",), "9", ["9"]),
    ("inbound_interception_mode", ("ISTIO_INBOUND_INTERCEPTION_MODE",), "TPROXY", "TPROXY"),
    ("inbound_ports_include", ("ISTIO_INBOUND_PORTS",), "80,443", ["80", "443"]),
    ("inbound_ports_exclude", ("ISTIO_LOCAL_EXCLUDE_PORTS",), "22", ["22"]),
    ("outbound_ip_ranges_include", ("ISTIO_SERVICE_CIDR",), "10.0.0.0/8", ["10.0.0.0/8"]),
    ("outbound_ip_ranges_exclude", ("ISTIO_SERVICE_EXCLUDE_CIDR",), "10.1.0.0/16", ["10.1.0.0/16"]),
    ("outbound_ports_include", ("ISTIO_OUTBOUND_PORTS",), "3306", ["3306"]),
    ("outbound_ports_exclude", ("ISTIO_LOCAL_OUTBOUND_PORTS_EXCLUDE",), "25", ["25"]),
    ("exclude_interfaces", ("ISTIO_EXCLUDE_INTERFACES",), "net1", ["net1"]),
    ("reroute_virtual_interfaces", ("KUBE_VIRT_INTERFACES",), "tap0", ["tap0"]),
    ("inbound_tproxy_mark", ("ISTIO_INBOUND_TPROXY_MARK",), "77", 77),
    ("inbound_tproxy_route_table", ("ISTIO_INBOUND_TPROXY_ROUTE_TABLE",), "200", 200),
    ("redirect_dns", ("REDIRECT_DNS", "ISTIO_META_DNS_CAPTURE"), "true", True),
    ("capture_all_dns", ("CAPTURE_ALL_DNS",), "1", True),
    ("drop_invalid", ("DROP_INVALID", "INVALID_DROP"), "T", True),
    ("dual_stack", ("DUAL_STACK", "ISTIO_DUAL_STACK"), "TRUE", True),
    ("owner_groups_include", ("ISTIO_OUTBOUND_OWNER_GROUPS",), "5,6", ["5", "6"]),
    ("owner_groups_exclude", ("ISTIO_OUTBOUND_OWNER_GROUPS_EXCLUDE",), "5", ["5"]),
    (
        "host_ipv4_loopback_cidr",
        ("ISTIO_OUTBOUND_IPV4_LOOPBACK_CIDR",),
        "127.0.0.0/8",
        "127.0.0.0/8",
    ),
)
OPPOSITE = {"true": "false", "1": "0", "T": "f", "TRUE": "FALSE"}


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INTERCEPT_STATE_DIR", str(tmp_path / "state"))
    for name in (name for _, names, _, _ in ENVIRONMENT for name in names):
        monkeypatch.delenv(name, raising=False)


def planned(*words: str, environment: Mapping[str, str] | None = None) -> dict[str, object]:
    """Return the settings that a plan is made from."""
    done = cli("plan", "--output", "json", *words, environment=environment)
    assert done.code == 0, done.stderr
    settings = done.document["settings"]
    assert isinstance(settings, dict)
    return settings


# --- JSON -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["nftables", *BACKENDS])
def test_apply_answers_with_the_document_of_the_contract(backend: str, netns: str) -> None:
    words = ("apply", "--netns", netns, "--backend", backend, "-b", "80", "--output", "json")
    answers = [cli(*words).document for _ in range(2)]
    status = path_of(netns).stat()
    for answer in answers:
        assert {"netns", "backend", "changed", "rules", "duration_ms", "warnings"} <= set(answer)
        assert answer["netns"] == {
            "path": f"/run/netns/{netns}",
            "dev": status.st_dev,
            "ino": status.st_ino,
        }
        assert answer["backend"] == backend
        assert type(answer["rules"]) is int
        assert type(answer["duration_ms"]) is float
        assert isinstance(answer["warnings"], list)
    assert [answer["changed"] for answer in answers] == [True, False]


def test_nothing_but_one_document_is_printed_for_machines(netns: str) -> None:
    """As a process, so that what a library or a child prints would be seen too."""
    for words, code in (
        (("check", "--netns", netns, "-b", "80"), 1),
        (("apply", "--netns", netns, "-b", "80"), 0),
        (("check", "--netns", netns, "-b", "80"), 0),
        (("plan", "-b", "80"), 0),
        (("plan", "--netns", netns, "-b", "81"), 1),
        (("remove", "--netns", netns), 0),
    ):
        done = cli_process(*words, "--output", "json")
        assert (done.code, done.stderr) == (code, ""), words
        assert isinstance(done.document, dict)


def test_warnings_are_in_the_document_and_not_on_stderr(netns: str) -> None:
    done = cli("apply", "--netns", netns, "-b", "", "--output", "json")
    assert done.stderr == ""
    assert "nothing is captured" in done.document["warnings"][0]
    assert "nothing is captured" in cli("apply", "--netns", netns, "-b", "").stderr


def test_what_captures_nothing_is_not_called_captured(netns: str) -> None:
    for word in ("set up", "already set up"):
        done = cli("apply", "--netns", netns, "-u", "2000")
        assert f"{netns}: {word} to capture nothing" in done.stdout
        assert "captured" not in done.stdout
    assert "captured" in cli("apply", "--netns", netns, "-u", "2000", "-b", "80").stdout


@pytest.mark.parametrize("command", ["plan", "apply", "check"])
def test_network_that_is_wider_than_it_looks_is_warned_of(command: str, netns: str) -> None:
    words = ("-i", "10.0.0.5/8,10.1.0.0/16", "--host-ipv4-loopback-cidr", "127.0.0.9/8")
    namespace = ("--netns", netns) if command != "plan" else ()
    for output in ((), ("--output", "json")):
        done = cli(command, *namespace, *words, *output)
        said = done.stderr.splitlines() if not output else done.document["warnings"]
        (wide, loopback) = (line for line in said if "bits set behind its prefix" in line)
        assert "'10.0.0.5/8'" in wide
        assert "counts as 10.0.0.0/8; write that or, for the one address, 10.0.0.5" in wide
        assert "127.0.0.0/8" in loopback


def test_check_says_what_differs_and_where(netns: str) -> None:
    words = ("--netns", netns, "--backend", "iptables-nft", "-b", "80", "--output", "json")
    cli("apply", *words)
    inside(netns, "iptables-nft", "-t", "nat", "-D", "OUTPUT", "-j", "ISTIO_OUTPUT")
    done = cli("check", *words)
    assert (done.code, done.document["in_sync"]) == (1, False)
    (difference,) = done.document["differences"]
    assert (difference["sign"], difference["table"], difference["chain"]) == ("+", "nat", "OUTPUT")
    assert "-A OUTPUT -j ISTIO_OUTPUT" in difference["text"]


@pytest.mark.parametrize("given", [(), ("-b", "80", "-o", "5432")])
def test_check_advises_the_command_that_puts_it_right_and_keeps_the_settings(
    netns: str, given: tuple[str, ...]
) -> None:
    cli("apply", "--netns", netns, "--backend", "nftables", *given)
    before = snapshot(netns)
    inside(netns, "nft", "flush", "chain", "inet", "intercept-agent", "v4-nat-ISTIO_OUTPUT")
    done = cli("check", "--netns", netns)
    assert "parts that do not fit together: { ISTIO_OUTPUT, ISTIO_OUTPUT/rest" in done.stdout
    (advised,) = (line for line in done.stdout.splitlines() if line.strip().startswith("-> "))
    assert cli(*shlex.split(advised)[2:]).code == 0
    assert snapshot(netns) == before


def test_plan_gives_the_rule_model_of_both_families() -> None:
    document = cli("plan", "-b", "80", "--enable-ipv6", "true", "--output", "json").document
    assert set(document["rulesets"]) == {"ipv4", "ipv6"}
    assert document["routes"] == ["ip -6 addr add ::6/128 dev lo"]
    assert document["settings"]["inbound_ports_include"] == ["80"]


# --- exit codes -----------------------------------------------------------------------------------


def test_exit_codes_of_a_namespace_from_fresh_to_removed(netns: str) -> None:
    words = ("--netns", netns, "-b", "80")
    codes = [cli("check", *words).code, cli("plan", *words).code, cli("apply", *words).code]
    codes += [cli("check", *words).code, cli("plan", *words).code, cli("apply", *words).code]
    codes += [cli("remove", "--netns", netns).code for _ in range(2)]
    assert codes == [1, 1, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("backend", ["nftables", *BACKENDS])
def test_refusal_by_the_kernel_part_way_is_exit_4_and_all_is_as_before(
    backend: str, netns: str
) -> None:
    """Another route of table 133 stands where the capture's has to be."""
    inside(netns, "ip", "route", "add", "unreachable", "default", "table", "133")
    before = without_empty_tables(snapshot(netns))
    done = cli("apply", "--netns", netns, "-m", "TPROXY", "-b", "*", "--backend", backend)
    assert (done.code, done.stdout) == (4, ""), done.stderr
    assert len(done.lines) == 1
    assert "put back" in done.stderr
    assert without_empty_tables(snapshot(netns)) == before


def without_empty_tables(state: Mapping[str, str]) -> dict[str, str]:
    """Drop what says that an empty legacy table exists: the kernel never forgets one."""
    return {
        key: "\n".join(line for line in text.splitlines() if line.startswith("-A"))
        if key.startswith("legacy")
        else text
        for key, text in state.items()
    }


def test_lack_of_ipv6_on_lo_is_exit_3_and_nothing_is_touched(netns: str) -> None:
    inside(netns, "sysctl", "-qw", "net.ipv6.conf.lo.disable_ipv6=1")
    before = snapshot(netns)
    done = cli("apply", "--netns", netns, "-b", "80", "--enable-ipv6", "true")
    assert done.code == 3
    assert "--enable-ipv6 false" in done.stderr
    assert snapshot(netns) == before


def test_ipv6_networks_are_left_out_where_there_is_no_ipv6_at_all(netns: str) -> None:
    off = [f"net.ipv6.conf.{name}.disable_ipv6=1" for name in ("all", "default", "lo")]
    inside(netns, "sysctl", "-qw", *off)
    words = ("--netns", netns, "-i", "10.0.0.0/8,fd00::/8")
    assert [cli(command, *words).code for command in ("apply", "check", "apply")] == [0, 0, 0]
    assert cli("apply", *words, "--enable-ipv6", "false").code == 2


# --- help and tables ------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [*COMMANDS, "trace"])
def test_help_has_examples_that_use_the_command(command: str) -> None:
    done = cli(command, "--help")
    assert (done.code, done.stderr) == (0, "")
    examples = done.stdout.partition("examples:")[2]
    assert f"intercept-agent {command} " in examples
    assert "--output" in done.stdout


def test_help_names_every_command() -> None:
    done = cli("--help")
    assert done.code == 0
    for command in COMMANDS:
        assert f"  {command} " in done.stdout


def test_tables_for_people_are_short_plain_lines(netns: str) -> None:
    words = ("--netns", netns, "-b", "80", "--backend", "iptables-nft")
    said = [cli(command, *words).stdout for command in ("apply", "apply", "check")]
    said.append(cli("remove", "--netns", netns).stdout)
    said.append(cli("remove", "--netns", netns).stdout)
    expected = ("captured by iptables-nft", "already captured", "in sync", "removed", "nothing to")
    for text, words_in_it in zip(said, expected, strict=True):
        assert text.count("\n") == 1
        assert netns in text
        assert words_in_it in text
        assert "\033" not in text


FULL = "/dev/full"


def shell(line: str, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command, which is `"$@"` in the line."""
    return subprocess.run(
        ("sh", "-c", line, "sh", sys.executable, "-m", "agent.cli.main", *words),
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, **environment},
    )


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_cannot_be_written_is_told_and_what_was_done_counts(
    unbuffered: str, netns: str
) -> None:
    def run(*words: str) -> tuple[int, str]:
        done = shell(f'"$@" > {FULL}', *words, PYTHONUNBUFFERED=unbuffered)
        return done.returncode, done.stderr

    said = "error: cannot write the output: No space left on device\n"
    assert run("apply", "--netns", netns, "-b", "80") == (0, said)
    assert cli("check", "--netns", netns).code == 0
    assert run("check", "--netns", netns) == (3, said)
    assert run("plan", "--output", "json") == (3, said)
    assert run("plan", "--help") == (3, said)
    assert run("remove", "--netns", netns) == (0, said)
    assert loaded(netns, "iptables-nft", 4) == {}


@pytest.mark.parametrize("closed", ["2>&-", f"2> {FULL}", "<&- 2>&-"])
def test_errors_that_nobody_can_read_change_nothing(closed: str, netns: str) -> None:
    """Nor do they end up on the standard output, which may be a document."""
    done = shell(f'"$@" {closed}', "scan", "--netns", netns)
    assert (done.returncode, done.stdout.count("nothing found")) == (0, 1)
    done = shell(f'"$@" {closed}', "apply", "--netns", netns, "-u", "2000", "--output", "json")
    assert (done.returncode, json.loads(done.stdout)["changed"]) == (0, True)
    done = shell(f'"$@" {closed}', "check", "--netns", netns, "-v", "--output", "json")
    assert (done.returncode, json.loads(done.stdout)["in_sync"]) == (0, True)
    assert shell(f'"$@" {closed}', "plan", "-b", "x").returncode == 2
    assert shell(f'"$@" {closed}', "plan", "--nonsense").returncode == 2


def test_reader_that_goes_away_early_is_no_failure() -> None:
    command = f"{sys.executable} -m agent.cli.main plan -i '*' -b '*'; echo $? >&2"
    done = subprocess.run(
        ("bash", "-c", f"({command}) | true"),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr in ("0\n", "141\n")


# --- where settings come from ---------------------------------------------------------------------


@pytest.mark.parametrize(("key", "names", "value", "expected"), ENVIRONMENT)
def test_variable_of_istio_sets_its_setting(
    key: str, names: tuple[str, ...], value: str, expected: object
) -> None:
    for name in names:
        assert planned(environment={name: value})[key] == expected
    if len(names) > 1:
        first, last = names
        assert planned(environment={first: OPPOSITE[value], last: value})[key] == expected
        assert planned(environment={first: value, last: OPPOSITE[value]})[key] is False


def test_manifest_may_come_by_standard_input() -> None:
    done = subprocess.run(
        (sys.executable, "-m", "agent.cli.main", "plan", "--pod-manifest", "-", "--output", "json"),
        cwd=ROOT,
        input=f"kind: Pod\nmetadata: {{name: a, annotations: {{{MODE}: TPROXY}}}}",
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout)["settings"]["inbound_interception_mode"] == "TPROXY"


def test_switch_of_an_empty_variable_is_not_given() -> None:
    found = planned(environment={"REDIRECT_DNS": "1", "ISTIO_META_DNS_CAPTURE": ""})
    assert found["redirect_dns"] is True
    assert planned(environment={"INVALID_DROP": ""})["drop_invalid"] is False


@pytest.mark.parametrize("key", FLAGS)
def test_long_and_short_flag_are_the_same(key: str) -> None:
    samples = {key: (value, model) for key, _, value, model in ENVIRONMENT}
    value, expected = samples.get(key, ("16001", 16001))
    assert planned(FLAGS[key], value)[key] == expected
    assert planned(f"{FLAGS[key]}={value}")[key] == expected
    assert planned(f"-{SHORT[key]}", value)[key] == expected


@pytest.mark.parametrize(
    "flag", ["--redirect-dns", "--capture-all-dns", "--drop-invalid", "--dual-stack"]
)
def test_switch_may_stand_alone_or_have_a_value(flag: str) -> None:
    key = flag[2:].replace("-", "_")
    assert [planned(word)[key] for word in (flag, f"{flag}=true", f"{flag}=false")] == [
        True,
        True,
        False,
    ]


def test_variable_yields_to_the_file_and_the_file_to_the_flag(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("inbound_tunnel_port: 2\ninbound_capture_port: 2\n")
    variables = {
        "INBOUND_TUNNEL_PORT": "1",
        "INBOUND_CAPTURE_PORT": "1",
        "ISTIO_INBOUND_TPROXY_MARK": "1",
    }
    words = ("--settings", str(file), "--inbound-tunnel-port", "3")
    found = planned(*words, environment=variables)
    names = (
        "inbound_tunnel_port",
        "inbound_capture_port",
        "inbound_tproxy_mark",
        "inbound_tproxy_route_table",
    )
    assert [found[name] for name in names] == [3, 2, 1, 133]


def test_variable_that_is_set_but_empty_really_sets_an_empty_list() -> None:
    found = planned("-i", "*", environment={"ISTIO_OUTBOUND_OWNER_GROUPS": ""})
    assert found["owner_groups_include"] == []
    assert planned("-i", "*")["owner_groups_include"] == "*"


def test_empty_proxy_uid_is_that_of_the_proxy_and_the_group_follows_the_user() -> None:
    assert planned("-b", "80", environment={"PROXY_UID": ""})["proxy_uid"] == ["1337"]
    found = planned("-u", "7", environment={"PROXY_GID": ""})
    assert (found["proxy_uid"], found["proxy_gid"]) == (["7"], ["7"])
    root = planned("-b", "80", environment={"ENVOY_USER": "daemon"})
    assert root["proxy_uid"] == ["1"]


def test_without_any_setting_the_whole_pod_is_captured() -> None:
    found = planned()
    assert (found["inbound_ports_include"], found["outbound_ip_ranges_include"]) == ("*", "*")
    assert found["inbound_ports_exclude"] == ["15020", "15021", "15090"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_command_line_of_istio_init_is_taken_unchanged(backend: str, netns: str) -> None:
    done = cli("apply", "--netns", netns, "--backend", backend, *ISTIO_INIT)
    assert (done.code, done.stderr) == (0, "")
    nat = loaded(netns, backend, 4)["nat"]
    assert nat["ISTIO_INBOUND"] == [
        *(f"-p tcp -m tcp --dport {port} -j RETURN" for port in (15008, 15090, 15021, 15020)),
        "-p tcp -j ISTIO_IN_REDIRECT",
    ]
    assert nat["ISTIO_OUTPUT"][-1] == "-j ISTIO_REDIRECT"
    assert cli("check", "--netns", netns, "--backend", backend, *ISTIO_INIT).code == 0


POD = {
    "metadata": {
        "annotations": {
            "sidecar.istio.io/status": "{}",
            "traffic.sidecar.istio.io/includeInboundPorts": "80, 443",
            "traffic.sidecar.istio.io/excludeOutboundIPRanges": "10.9.0.0/16",
        }
    },
    "spec": {"containers": [{"name": "istio-proxy", "securityContext": {"runAsUser": 77}}]},
}
MANIFESTS: dict[str, dict[str, object]] = {
    "Pod": {"kind": "Pod", "apiVersion": "v1", **POD},
    "Deployment": {"kind": "Deployment", "spec": {"replicas": 1, "template": POD}},
    "CronJob": {"kind": "CronJob", "spec": {"jobTemplate": {"spec": {"template": POD}}}},
}


def test_mistake_in_a_manifest_is_told_with_its_annotation_and_line(tmp_path: Path) -> None:
    file = tmp_path / "pod.yaml"
    prefix = "traffic.sidecar.istio.io"
    lines = ("excludeOutboundPorts: '70000'", "includeInboundPorts: x")
    written = "".join(f"        {prefix}/{line}\n" for line in lines)
    template = f"  template:\n    metadata:\n      annotations:\n{written}"
    file.write_text(f"kind: Service\n---\nkind: Deployment\nspec:\n{template}")
    for command in (("plan",), ("apply", "--netns", "it-none")):
        done = cli(*command, "--pod-manifest", str(file))
        assert done.code == 2
        assert f"{file}, line 8: annotation {prefix}/excludeOutboundPorts: '70000'" in done.stderr
        assert f"{file}, line 9: annotation {prefix}/includeInboundPorts: 'x'" in done.stderr


@pytest.mark.parametrize("kind", MANIFESTS)
def test_settings_come_from_the_annotations_of_a_manifest(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "pod.yaml"
    other = {"kind": "Service", "spec": {"ports": [{"port": 80}]}}
    file.write_text(yaml.safe_dump_all([other, MANIFESTS[kind]]))
    found = planned("--pod-manifest", str(file))
    assert found["inbound_ports_include"] == ["80", "443"]
    assert found["outbound_ip_ranges_exclude"] == ["10.9.0.0/16"]
    assert found["outbound_ip_ranges_include"] == "*"
    assert (found["proxy_uid"], found["proxy_gid"]) == (["77"], ["1337"])
    assert planned("--pod-manifest", str(file), "-b", "90")["inbound_ports_include"] == ["90"]
