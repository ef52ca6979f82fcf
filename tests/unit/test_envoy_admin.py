"""What Envoy's admin port says, as values; documents as Envoy 1.40 writes them."""

import json
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.formats import envoy

Parsed = tuple[str, int, str, str] | None


@pytest.mark.parametrize(
    ("name", "parsed"),
    [
        (
            "outbound|9080|v2|reviews.default.svc.cluster.local",
            ("outbound", 9080, "v2", "reviews.default.svc.cluster.local"),
        ),
        ("outbound|443||*.example.com", ("outbound", 443, "", "*.example.com")),
        ("inbound|8080||", ("inbound", 8080, "", "")),
        ("inbound|80|http|web.shop.svc", ("inbound", 80, "http", "web.shop.svc")),
        ("inbound-vip|80|http|web.shop.svc", ("inbound-vip", 80, "http", "web.shop.svc")),
        ("outbound|80||[fd00::1]", ("outbound", 80, "", "[fd00::1]")),
        (
            "outbound_.9080_.v2_.reviews.default.svc.cluster.local",
            ("outbound", 9080, "v2", "reviews.default.svc.cluster.local"),
        ),
        ("outbound_.80_._.web.shop.svc", ("outbound", 80, "", "web.shop.svc")),
        ("PassthroughCluster", None),
        ("BlackHoleCluster", None),
        ("InboundPassthroughCluster", None),
        ("agent", None),
        ("", None),
        ("outbound|70000||a", None),
        ("outbound|http||a", None),
        ("outbound|-1||a", None),
        ("outbound|80|a", None),
        ("outbound|80|a|b|c", None),
        ("sideways|80|a|b", None),
        ("outbound|٨٠||a", None),
    ],
)
def test_name_of_a_cluster(name: str, parsed: Parsed) -> None:
    assert envoy.parse_cluster(name) == parsed


@given(st.text())
def test_no_name_of_a_cluster_is_an_error(name: str) -> None:
    assert envoy.parse_cluster(name) is None or "|" in name or "_." in name


def address(host: str, port: int, **more: object) -> dict[str, object]:
    return {"socket_address": {"address": host, "port_value": port, **more}}


def test_listeners_of_a_sidecar() -> None:
    statuses = [
        {"name": "virtualOutbound", "local_address": address("0.0.0.0", 15001)},
        {
            "name": "virtualInbound",
            "local_address": address("0.0.0.0", 15006),
            "additional_local_addresses": [address("::", 15006)],
        },
        {"name": "0.0.0.0_8080", "local_address": address("0.0.0.0", 8080)},
        {"name": "10.96.0.10_53", "local_address": address("10.96.0.10", 53, protocol="UDP")},
        {"name": "[fd00::1]_443", "local_address": address("fd00::1", 443)},
        {"name": "pipe", "local_address": {"pipe": {"path": "/run/x"}}},
        {
            "name": "connect_originate",
            "local_address": {"envoy_internal_address": {"server_listener_name": "c"}},
        },
        {"name": "own"},
    ]
    found = envoy.listeners(json.dumps({"listener_statuses": statuses}).encode(), False)
    assert [(one.address, one.port, one.protocol, one.purpose) for one in found] == [
        ("0.0.0.0", 15001, "tcp", "outbound capture"),
        ("0.0.0.0", 15006, "tcp", "inbound capture"),
        ("::", 15006, "tcp", "inbound capture"),
        ("0.0.0.0", 8080, "tcp", "outbound to any, port 8080"),
        ("10.96.0.10", 53, "udp", "outbound to 10.96.0.10, port 53"),
        ("fd00::1", 443, "tcp", "outbound to [fd00::1], port 443"),
        ("/run/x", None, "-", "a Unix socket"),
        ("c", None, "-", "inside Envoy only"),
    ]


def test_endpoint_counts_as_healthy_unless_something_failed() -> None:
    statuses = [
        {"eds_health_status": "HEALTHY"},
        {},
        {"eds_health_status": "UNHEALTHY"},
        {"eds_health_status": "HEALTHY", "failed_active_health_check": True},
        {"failed_outlier_check": True},
    ]
    hosts = [{"health_status": status} for status in statuses]
    body = json.dumps({"cluster_statuses": [{"name": "a", "host_statuses": hosts}]}).encode()
    (one,) = envoy.clusters(body, False)
    assert (one.healthy, one.endpoints) == (2, 5)


def test_clusters_of_the_mesh_come_first_in_order() -> None:
    names = ["agent", "outbound|80||b", "outbound|80|v1|a", "inbound|80||", "outbound|80||a"]
    body = json.dumps({"cluster_statuses": [{"name": name} for name in names]}).encode()
    assert [one.name for one in envoy.clusters(body, False)] == [
        "inbound|80||",
        "outbound|80||a",
        "outbound|80|v1|a",
        "outbound|80||b",
        "agent",
    ]


def certificate(serial: str, ends: str, **more: object) -> dict[str, object]:
    return {"serial_number": serial, "expiration_time": ends, "path": "<inline>", **more}


def test_certificates_come_once_each_and_the_first_to_expire_first() -> None:
    leaf = certificate("aa", "2026-12-01T00:00:00Z", subject_alt_names=[{"uri": "spiffe://x"}])
    root = certificate("bb", "2036-01-01T00:00:00.123456789Z")
    soon = certificate("cc", "2026-11-01T00:00:00Z", subject_alt_names=[{"dns": "web"}])
    pairs = [{"ca_cert": [root], "cert_chain": [leaf]}, {"cert_chain": [leaf, soon]}, {}]
    found = envoy.certificates(json.dumps({"certificates": pairs}).encode(), False)
    assert [(one.serial, one.kind, one.names) for one in found] == [
        ("cc", "chain", ("web",)),
        ("aa", "chain", ("spiffe://x",)),
        ("bb", "ca", ()),
    ]
    assert found[1].seconds_left(datetime(2026, 11, 30, tzinfo=UTC)) == 86400


@pytest.mark.parametrize("read", [envoy.listeners, envoy.clusters, envoy.certificates])
@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"7", b'"x"', b"\xff", b"[" * 100_000])
def test_document_of_another_shape_is_not_envoys(read: object, body: bytes) -> None:
    assert callable(read)
    with pytest.raises(envoy.NotEnvoy):
        read(body, True)


@pytest.mark.parametrize("read", [envoy.listeners, envoy.clusters, envoy.certificates])
def test_empty_document_is_believed_of_envoy_only(read: object) -> None:
    assert callable(read)
    assert read(b"{}", True) == ()
    with pytest.raises(envoy.NotEnvoy):
        read(b"{}", False)


@pytest.mark.parametrize("said", ["", "OK", "live", "LIVE LIVE", "<html>"])
def test_state_is_one_of_envoys_words(said: str) -> None:
    assert envoy.state("LIVE\n") == "LIVE"
    with pytest.raises(envoy.NotEnvoy):
        envoy.state(said)
