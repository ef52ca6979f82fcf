"""Settings that no golden covers, in the kernel, against a second reading of the same reference.

The expectation is what the reference generator of these tests writes, loaded by iptables-restore as
istio-init would, and besides it chains written by hand. Neither knows the agent's own plan.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from random import Random

import pytest

from tests.support import istio_rules
from tests.support.conformance import (
    BACKENDS,
    Rules,
    assert_same,
    cli,
    defaults,
    environment,
    flags,
    load,
    loaded,
    routing,
    settings_file,
)
from tests.support.conformance_gaps import GAPS, TPROXY, Gap
from tests.support.foreign import try_tools
from tests.support.netns import inside, namespace, snapshot

SEEDS = range(1, 31)
each_backend = pytest.mark.parametrize("backend", BACKENDS)

BIG: Mapping[str, object] = {
    **TPROXY,
    "outbound_ip_ranges_include": "*",
    "redirect_dns": True,
    "capture_all_dns": True,
    "drop_invalid": True,
    "exclude_interfaces": "net1",
    "reroute_virtual_interfaces": "tap0",
    "inbound_tproxy_mark": "77",
    "inbound_tproxy_route_table": "200",
    "enable_ipv6": True,
}
SMALL: Mapping[str, object] = {"outbound_ip_ranges_include": "10.0.0.0/8", "proxy_uid": "7"}
OTHER: Mapping[str, object] = {**SMALL, "inbound_ports_include": "*", "enable_ipv6": True}


@pytest.fixture(autouse=True, scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep what the agent remembers of the shared namespaces from test to test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("INTERCEPT_STATE_DIR", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="module")
def pods() -> Iterator[Mapping[str, str]]:
    """One namespace per backend, in which one capture after the other replaces the one before."""
    with namespace("legacy") as legacy, namespace("nft") as nft:
        yield dict(zip(BACKENDS, (legacy, nft), strict=True))


def expected(config: Mapping[str, object]) -> dict[int, Rules]:
    """Return what istio-init's rules read like once the kernel has them."""
    with namespace("want") as name:
        istio_init(name, config, "iptables-legacy")
        return {version: loaded(name, "iptables-legacy", version) for version in (4, 6)}


def istio_init(name: str, config: Mapping[str, object], backend: str) -> None:
    full = {**defaults(), **config}
    try_tools(name, backend.removeprefix("iptables-"))
    for version in (4, 6) if full["enable_ipv6"] else (4,):
        load(name, backend, version, istio_rules.restore_text(full, version))


def apply(name: str, backend: str, config: Mapping[str, object], folder: Path) -> bool:
    """Apply the settings and say whether anything was changed."""
    file = settings_file(folder, config)
    words = ("--netns", name, "--settings", file, "--backend", backend, "--output", "json")
    done = cli("apply", *words)
    assert done.code == 0, done.stderr
    return bool(done.document["changed"])


def assert_rules(name: str, backend: str, want: Mapping[int, Rules]) -> None:
    for version in (4, 6):
        assert_same(loaded(name, backend, version), want[version])


@pytest.mark.parametrize("gap", GAPS, ids=lambda gap: gap.name)
def test_setting_without_a_golden_loads_what_istio_would(
    gap: Gap, pods: Mapping[str, str], tmp_path: Path
) -> None:
    want = expected(gap.config)
    for backend, name in pods.items():
        apply(name, backend, gap.config, tmp_path)
        assert_rules(name, backend, want)
        for key, rules in gap.chains.items():
            version, table, chain = key.split()
            held = loaded(name, backend, int(version)).get(table, {})
            assert held.get(chain, []) == rules, key
        read = routing(name, gap.table)
        for key, lines in gap.routing.items():
            assert [line.replace("proto static ", "") for line in read[key]] == lines


@each_backend
def test_mark_and_table_of_the_settings_are_used_for_routing(
    backend: str, netns: str, tmp_path: Path
) -> None:
    words = ("-m", "TPROXY", "-b", "*", "-t", "4242", "-r", "200")
    done = cli("apply", "--netns", netns, "--backend", backend, "--enable-ipv6", "true", *words)
    assert done.code == 0, done.stderr
    read = routing(netns, "200")
    for version in (4, 6):
        marked = [line for line in read[f"rule{version}"] if "fwmark" in line]
        assert [line.split("\t")[1] for line in marked] == ["from all fwmark 0x1092 lookup 200"]
        assert read[f"route{version}_200"][0].startswith("local default dev lo")
    assert read["lo_v6_addrs"] == ["::1/128", "::6/128"]


@pytest.mark.parametrize("ports", ["8000-9000", "8000:9000"])
def test_both_spellings_of_a_range_are_one_rule(ports: str, netns: str) -> None:
    done = cli("apply", "--netns", netns, "-b", ports, "--backend", "iptables-nft")
    assert done.code == 0, done.stderr
    inbound = loaded(netns, "iptables-nft", 4)["nat"]["ISTIO_INBOUND"]
    assert inbound[1:] == ["-p tcp -m tcp --dport 8000:9000 -j ISTIO_IN_REDIRECT"]


@each_backend
def test_range_of_all_ports_is_every_port(backend: str, netns: str) -> None:
    words = ("--netns", netns, "-b", "0-65535", "--backend", backend, "--output", "json")
    assert cli("apply", *words).code == 0
    inbound = loaded(netns, backend, 4)["nat"]["ISTIO_INBOUND"]
    assert [rule.replace("-m tcp ", "") for rule in inbound[1:]] == ["-p tcp -j ISTIO_IN_REDIRECT"]
    assert cli("check", *words).document["in_sync"] is True
    assert cli("apply", *words).document["changed"] is False


@each_backend
@pytest.mark.parametrize("count", [49, 50, 64])
def test_owner_groups_beyond_the_limit_of_iptables_decide_as_few_do(
    count: int, backend: str, netns: str, tmp_path: Path
) -> None:
    groups = range(2000, 2000 + count)
    config = {
        "owner_groups_include": ",".join(map(str, groups)),
        "outbound_ip_ranges_include": "*",
    }
    apply(netns, backend, config, tmp_path)
    assert apply(netns, backend, config, tmp_path) is False
    asked = (1999, 2000, 1999 + count // 2, 1999 + count, 2000 + count)
    assert captured_groups(netns, asked) == [group for group in asked if group in groups]


def captured_groups(name: str, groups: tuple[int, ...]) -> list[int]:
    """Return the groups whose connections come out at the port that a capture sends them to."""
    inside(name, "ip", "link", "add", "out0", "type", "veth", "peer", "name", "nowhere0")
    inside(name, "ip", "addr", "add", "10.9.0.1/24", "dev", "out0")
    for device in ("out0", "nowhere0"):
        inside(name, "ip", "link", "set", device, "up")
    program = (
        "import os, socket, sys\n"
        "server = socket.create_server(('0.0.0.0', 15001))\n"
        "for group in sys.argv[1:]:\n"
        "    os.setegid(int(group))\n"
        "    client = socket.socket()\n"
        "    client.settimeout(0.4)\n"
        "    if client.connect_ex(('10.9.0.7', 80)) == 0:\n"
        "        print(group)\n"
        "    os.setegid(0)\n"
    )
    said = inside(name, "python3", "-c", program, *map(str, groups))
    return [int(line) for line in said.split()]


# --- cleanup and replacement ----------------------------------------------------------------------


@each_backend
@pytest.mark.parametrize(
    ("first", "second"), [(BIG, SMALL), (SMALL, BIG), (BIG, OTHER)], ids=["less", "more", "other"]
)
def test_other_settings_replace_the_capture_and_removal_leaves_nothing(
    first: Mapping[str, object],
    second: Mapping[str, object],
    backend: str,
    netns: str,
    tmp_path: Path,
) -> None:
    before = snapshot(netns)
    for config in (first, second):
        assert apply(netns, backend, config, tmp_path) is True
        assert_rules(netns, backend, expected(config))
    marks = [line for line in routing(netns)["rule4"] if "fwmark" in line]
    assert len(marks) == (1 if second is BIG else 0)
    assert cli("remove", "--netns", netns).code == 0
    assert without_empty_tables(snapshot(netns)) == without_empty_tables(before)


@each_backend
def test_capture_of_istio_init_is_replaced_and_removed(
    backend: str, netns: str, tmp_path: Path
) -> None:
    before = snapshot(netns)
    with_routes(netns, BIG)
    istio_init(netns, BIG, backend)
    assert apply(netns, backend, OTHER, tmp_path) is True
    assert_rules(netns, backend, expected(OTHER))
    assert cli("remove", "--netns", netns).code == 0
    assert without_empty_tables(snapshot(netns)) == without_empty_tables(before)


@each_backend
def test_capture_of_istio_init_that_nobody_remembers_is_removed(backend: str, netns: str) -> None:
    before = snapshot(netns)
    with_routes(netns, OTHER)
    istio_init(netns, OTHER, backend)
    done = cli("remove", "--netns", netns, "--output", "json")
    assert (done.code, done.document["changed"]) == (0, True)
    assert without_empty_tables(snapshot(netns)) == without_empty_tables(before)


@each_backend
@pytest.mark.parametrize("config", [BIG, SMALL], ids=["big", "small"])
def test_capture_of_istio_init_is_taken_for_our_own(
    config: Mapping[str, object], backend: str, netns: str, tmp_path: Path
) -> None:
    untouched = snapshot(netns)
    with_routes(netns, config)
    istio_init(netns, config, backend)
    before = snapshot(netns)
    assert apply(netns, backend, config, tmp_path) is False
    assert snapshot(netns) == before
    assert cli("remove", "--netns", netns).code == 0
    assert without_empty_tables(snapshot(netns)) == without_empty_tables(untouched)


@each_backend
def test_guard_rails_that_came_and_went_are_no_reason_to_write(
    backend: str, netns: str, tmp_path: Path
) -> None:
    assert apply(netns, backend, SMALL, tmp_path) is True
    for verb in ("-I", "-D"):
        for chain in ("INPUT", "FORWARD", "OUTPUT"):
            tool = f"iptables-{backend.removeprefix('iptables-')}"
            inside(netns, tool, verb, chain, "-p", "tcp", "-j", "DROP")
    before = snapshot(netns)
    assert apply(netns, backend, SMALL, tmp_path) is False
    assert snapshot(netns) == before


def with_routes(name: str, config: Mapping[str, object]) -> None:
    for command in istio_rules.ip_commands({**defaults(), **config}):
        inside(name, *command.split())


def without_empty_tables(state: Mapping[str, str]) -> dict[str, str]:
    """Drop what says that an empty legacy table exists: the kernel never forgets one."""
    kept = {key: value for key, value in state.items() if not key.startswith("legacy")}
    for key in ("legacy4", "legacy6"):
        lines = state[key].splitlines()
        kept[key] = "\n".join(line for line in lines if line.startswith("-A"))
    return kept


# --- random settings ------------------------------------------------------------------------------

PORTS = ("22", "53", "80", "443", "8000:9000", "15020", "65535", "1")
NETWORKS_4 = ("10.0.0.0/8", "10.9.8.0/24", "127.4.0.0/16", "0.0.0.0/0", "192.0.2.7/32")
NETWORKS_6 = ("fd00::/8", "2001:db8:0:1::/64", "::/0", "2001:db8::7/128", "::ffff:10.0.0.0/104")
NAMES = ("eth0", "net1", "tap0", "a.b-c_d", "fifteen-letters")
IDS = ("0", "7", "1000", "1337", "4294967294")


def random_settings(numbers: Random) -> dict[str, object]:
    def some(pool: tuple[str, ...], chance: float = 0.4, *, most: int = 3) -> str:
        if numbers.random() > chance:
            return ""
        return ",".join(numbers.sample(pool, numbers.randint(1, min(most, len(pool)))))

    ipv6 = numbers.random() < 0.6
    networks = (*NETWORKS_4, *NETWORKS_6) if ipv6 else NETWORKS_4
    tproxy = numbers.random() < 0.4
    inbound = numbers.choice(("*", some(PORTS, 1), "*" if tproxy else ""))
    return {
        "enable_ipv6": ipv6,
        "inbound_interception_mode": "TPROXY" if tproxy else "REDIRECT",
        "inbound_ports_include": inbound,
        "inbound_ports_exclude": some(PORTS),
        "outbound_ports_include": some(PORTS),
        "outbound_ports_exclude": some(PORTS),
        "outbound_ip_ranges_include": numbers.choice(("*", "", some(networks, 1, most=4))),
        "outbound_ip_ranges_exclude": some(networks),
        "proxy_port": numbers.choice(("15001", "16001")),
        "inbound_capture_port": numbers.choice(("15006", "16006")),
        "inbound_tunnel_port": numbers.choice(("15008", "16008")),
        "proxy_uid": some(IDS, 1),
        "proxy_gid": some(IDS, 1),
        "inbound_tproxy_mark": numbers.choice(("1337", "1", "4294967295")),
        "inbound_tproxy_route_table": numbers.choice(("133", "1", "70000")),
        "owner_groups_include": numbers.choice(("*", "*", some(IDS, 0.9))),
        "owner_groups_exclude": some(IDS),
        "exclude_interfaces": some(NAMES, 0.3),
        "reroute_virtual_interfaces": some(NAMES, 0.3),
        "redirect_dns": numbers.random() < 0.5,
        "capture_all_dns": numbers.random() < 0.4,
        "dns_servers_v4": numbers.choice(([], ["10.96.0.10"], ["10.96.0.10", "127.0.0.53"])),
        "dns_servers_v6": numbers.choice(([], ["fd00::a"])),
        "drop_invalid": numbers.random() < 0.3,
        "host_ipv4_loopback_cidr": numbers.choice(("127.0.0.1/32", "127.0.0.0/8")),
    }


@pytest.mark.parametrize("seed", SEEDS)
def test_random_settings_replace_the_last_ones_and_are_in_sync(
    seed: int, pods: Mapping[str, str], tmp_path: Path
) -> None:
    config = random_settings(Random(seed))
    want = expected(config)
    for backend, name in pods.items():
        apply(name, backend, config, tmp_path)
        assert_rules(name, backend, want)
        words = ("--netns", name, "--backend", backend, "--output", "json", *flags(config))
        report = cli("check", *words, environment=environment(config))
        assert (report.code, report.document["in_sync"]) == (0, True), report.stdout
        assert apply(name, backend, config, tmp_path) is False
