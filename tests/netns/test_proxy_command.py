"""`proxy` against a real Envoy, and against what is no Envoy or does not answer as one."""

import json
from collections.abc import Iterator
from datetime import timedelta

import pytest

from agent.model import numbers
from tests.containerd.kubelet import daemonset
from tests.support.conformance import cli, cli_process
from tests.support.netns import namespace, path_of
from tests.support.proxy import (
    SPIFFE,
    Talk,
    dripping,
    endless,
    mute,
    running_envoy,
    saying,
    serving,
    valid_for,
)

ADMIN = numbers.ENVOY_ADMIN_PORT
SUBSET = "outbound|9080|v2|reviews.default.svc.cluster.local"
CLUSTERS = (SUBSET, "inbound|8080||", "PassthroughCluster", "BlackHoleCluster", "agent")


@pytest.fixture(scope="module")
def pod() -> Iterator[str]:
    """A namespace with an Envoy that has one good certificate."""
    with namespace("proxy") as name:
        good = valid_for(timedelta(days=3))
        with running_envoy(name, pairs=[good, good], clusters=CLUSTERS):
            yield name


def test_ready_tells_the_state_and_who_listens(pod: str) -> None:
    done = cli("proxy", "ready", pod, "-o", "json")
    assert done.code == 0, done.stderr
    status = path_of(pod).stat()
    assert done.document["netns"] == {
        "path": f"/run/netns/{pod}",
        "dev": status.st_dev,
        "ino": status.st_ino,
    }
    assert (done.document["ready"], done.document["state"]) == (True, "LIVE")
    ports = {port["port"]: port for port in done.document["ports"]}
    assert set(ports) == {15001, 15006, 15021}
    for port in ports.values():
        assert {one["address"] for one in port["sockets"]} == {"0.0.0.0", "::"}
        assert {one["uid"] for one in port["sockets"]} == {numbers.PROXY_ID}
        assert all(one["pid"] for one in port["sockets"])
    table = cli("proxy", "ready", pod)
    assert table.code == 0
    assert f"{pod}: ready (Envoy is LIVE)" in table.stdout


def test_the_agents_container_sees_who_listens_too(pod: str) -> None:
    """It may trace processes, but not read every file, so none of another user shows its own."""
    container = daemonset()["spec"]["template"]["spec"]["containers"][0]
    rights = (f"+{name.lower()}" for name in container["securityContext"]["capabilities"]["add"])
    within = ("setpriv", f"--bounding-set=-all,{','.join(rights)}", "--")
    done = cli_process("proxy", "ready", pod, "-o", "json", within=within)
    assert done.code == 0, done.stderr
    sockets = [one for port in done.document["ports"] for one in port["sockets"]]
    assert sockets
    assert all(one["pid"] for one in sockets)


def test_listeners_have_addresses_ports_names_and_what_they_are_for(pod: str) -> None:
    done = cli("proxy", "listeners", pod, "-o", "json")
    assert done.code == 0, done.stderr
    found = {(one["name"], one["address"]): one for one in done.document["listeners"]}
    outbound = found["outbound", "::"]
    assert (outbound["port"], outbound["purpose"]) == (15001, "outbound capture")
    assert outbound["bound"] is True
    assert found["metrics", "0.0.0.0"]["purpose"] == "metrics"
    assert "inbound capture" in cli("proxy", "listeners", pod).stdout


def test_names_of_clusters_are_taken_apart(pod: str) -> None:
    done = cli("proxy", "clusters", pod, "-o", "json")
    assert done.code == 0, done.stderr
    found = {one["name"]: one for one in done.document["clusters"]}
    assert found[SUBSET] == {
        "name": SUBSET,
        "direction": "outbound",
        "port": 9080,
        "subset": "v2",
        "fqdn": "reviews.default.svc.cluster.local",
        "endpoints": 1,
        "healthy": 1,
    }
    inbound = found["inbound|8080||"]
    assert (inbound["direction"], inbound["port"], inbound["fqdn"]) == ("inbound", 8080, "")
    assert found["PassthroughCluster"]["direction"] is None
    lines = [line.split() for line in cli("proxy", "clusters", pod).stdout.splitlines()]
    assert ["outbound", "9080", "v2", "reviews.default.svc.cluster.local", "1/1"] in lines
    assert ["-", "-", "-", "BlackHoleCluster", "1/1"] in lines


def test_certificate_that_two_clusters_share_is_shown_once(pod: str) -> None:
    done = cli("proxy", "certs", pod, "-o", "json")
    assert done.code == 0, done.stderr
    (one,) = done.document["certificates"]
    assert (one["kind"], one["names"], one["expired"]) == ("chain", [SPIFFE], False)
    assert 2.9 < one["days_left"] <= 3
    assert "2 d 23 h" in cli("proxy", "certs", pod).stdout


def test_expired_certificate_comes_first_and_is_a_finding(netns: str) -> None:
    pairs = [valid_for(timedelta(hours=7)), valid_for(timedelta(days=-2))]
    with running_envoy(netns, pairs=pairs):
        done = cli("proxy", "certs", netns, "-o", "json")
        table = cli("proxy", "certs", netns)
    assert (done.code, done.document["expired"]) == (1, 1)
    assert [one["expired"] for one in done.document["certificates"]] == [True, False]
    assert table.code == 1
    assert "expired 2 d 0 h ago" in table.stdout
    assert "6 h 59 min" in table.stdout
    assert f"{netns}: 1 certificate is not valid now" in table.stdout


def test_envoy_without_certificates_is_fine(netns: str) -> None:
    with running_envoy(netns):
        done = cli("proxy", "certs", netns)
    assert (done.code, done.stdout) == (0, f"{netns}: Envoy holds no certificates\n")


@pytest.mark.parametrize(
    ("state", "status"), [("PRE_INITIALIZING", 503), ("DRAINING", 503), ("LIVE", 200)]
)
def test_proxy_that_takes_nothing_is_not_ready(netns: str, state: str, status: int) -> None:
    """The last of these is live, and yet nobody listens on the ports of the capture."""
    with serving(netns, ADMIN, saying(f"{state}\n", status=status)):
        done = cli("proxy", "ready", netns, "-o", "json")
        table = cli("proxy", "ready", netns)
    assert (done.code, done.document["ready"], done.document["state"]) == (1, False, state)
    assert f"{netns}: not ready (Envoy is {state})" in table.stdout
    assert "nobody" in table.stdout


def test_ports_of_the_capture_that_was_applied_are_the_ones_that_count(netns: str) -> None:
    assert cli("apply", "--netns", netns, "-b", "*", "-p", "16001").code == 0
    with serving(netns, ADMIN, saying("LIVE")):
        done = cli("proxy", "ready", netns, "-o", "json")
    assert [port["port"] for port in done.document["ports"]] == [15006, 15021, 16001]


def test_admin_port_elsewhere_and_on_ipv6_only_is_found(netns: str) -> None:
    with serving(netns, 19000, saying("DRAINING", status=503), address="::1"):
        done = cli("proxy", "ready", netns, "--admin-port", "19000", "-o", "json")
    assert done.document["state"] == "DRAINING"
    assert done.document["admin_port"] == 19000


@pytest.mark.parametrize("what", ["ready", "listeners", "clusters", "certs"])
def test_admin_port_where_nobody_listens_is_a_sentence(what: str, netns: str) -> None:
    done = cli("proxy", what, netns, "-o", "json")
    assert (done.code, done.stdout) == (3, "")
    assert f"nobody listens on port {ADMIN}" in done.stderr
    assert "--admin-port" in done.stderr


@pytest.mark.parametrize("what", ["ready", "listeners", "clusters", "certs"])
@pytest.mark.parametrize(
    "talk",
    [
        saying("<html>hello</html>", kind="text/html"),
        saying("{}", kind="application/json"),
        saying("[1, 2]", kind="application/json"),
        saying('{"listener_statuses": 5, "cluster_statuses": 5, "certificates": 5}'),
        saying("no such page", status=404),
        saying(b"\xff\xfe\x00"),
        lambda client: client.sendall(b"SSH-2.0-OpenSSH_9.2\r\n"),
        lambda client: client.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\n{"),
        lambda client: None,
    ],
    ids=["page", "empty", "list", "numbers", "404", "bytes", "ssh", "cut", "closed"],
)
def test_what_is_no_envoy_is_a_sentence(what: str, netns: str, talk: Talk) -> None:
    with serving(netns, ADMIN, talk):
        done = cli("proxy", what, netns)
    assert (done.code, done.stdout) == (3, "")
    assert f"port {ADMIN} in {netns}" in done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("talk", [mute, dripping])
def test_slow_answer_is_given_up(netns: str, talk: Talk) -> None:
    with serving(netns, ADMIN, talk):
        done = cli("proxy", "certs", netns, "--timeout", "0.3")
    assert done.code == 3
    assert "did not answer in full within 0.3 seconds" in done.stderr


def test_endless_answer_is_given_up(netns: str) -> None:
    with serving(netns, ADMIN, endless):
        done = cli("proxy", "clusters", netns, "--timeout", "60")
    assert done.code == 3
    assert "more than 64 MiB" in done.stderr


def test_names_cannot_steer_the_terminal(netns: str) -> None:
    body = json.dumps({"cluster_statuses": [{"name": "\x1b]0;owned\x07\nsecond"}]})
    with serving(netns, ADMIN, saying(body)):
        done = cli("proxy", "clusters", netns)
    assert done.code == 0
    assert "\x1b" not in done.stdout
    assert done.stdout.count("\n") == 2


@pytest.mark.parametrize(
    "words",
    [
        ("--admin-port", "0"),
        ("--admin-port", "70000"),
        ("--admin-port", "http"),
        ("--admin-port", "9" * 5000),
        ("--timeout", "0"),
        ("--timeout", "nan"),
        ("--timeout", "soon"),
    ],
)
def test_bad_option_is_refused_by_name(netns: str, words: tuple[str, str]) -> None:
    done = cli("proxy", "ready", netns, *words)
    assert (done.code, done.stdout) == (2, "")
    assert words[0] in done.stderr
