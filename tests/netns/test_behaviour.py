"""What a capture does to real connections, on every backend.

Each test programs a pod and looks at who answers whom. Rules are not looked at here: two backends
are right if nobody can tell them apart from outside. `tests.support.behaviour` has the cast.

    INTERCEPT_BEHAVIOUR_SETTINGS   how many random settings are compared (60: about a minute)
    INTERCEPT_BEHAVIOUR_SEED       the first of them; a failure prints the one to repeat
    INTERCEPT_BEHAVIOUR_PROGRAM    who captures: applied, command, or direct (without the agent)
"""

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from random import Random

import pytest

from agent.model.enrolment import refusals
from agent.model.errors import InvalidSettings
from agent.model.settings import KEYS, parse
from agent.model.state import EBPF
from tests.support.behaviour import PATIENT_S, Outcome, Raw, Table, World, world
from tests.support.behaviour_cases import CASES, EVERYTHING, Case
from tests.support.behaviour_cast import HOSTS, PROBES, Probe, probe
from tests.support.behaviour_programs import BACKENDS, CHOSEN, WITH_RULES, program
from tests.support.behaviour_settings import random_settings
from tests.support.netns import PREFIX, inside

pytestmark = pytest.mark.netns

SETTINGS = int(os.environ.get("INTERCEPT_BEHAVIOUR_SETTINGS", "60"))
SEED = int(os.environ.get("INTERCEPT_BEHAVIOUR_SEED", "1"))
CHUNK = 20

REDIRECTED = {**EVERYTHING, "redirect_dns": True, "capture_all_dns": True}
TPROXY = {"inbound_interception_mode": "TPROXY", **EVERYTHING}
LISTED_DNS = {
    "redirect_dns": True,
    "dns_servers_v4": HOSTS["dns4"],
    "dns_servers_v6": HOSTS["dns6"],
    "enable_ipv6": True,
}

MODES = tuple(
    (backend, mode)
    for backend in BACKENDS
    for mode in ("REDIRECT", "TPROXY")
    if (backend, mode) != (EBPF, "TPROXY")
)

agent_only = pytest.mark.skipif(
    CHOSEN == "direct",
    reason="about how the agent applies, and these captures are loaded without it",
)


@pytest.fixture(scope="module")
def worlds() -> Iterator[Mapping[str, World]]:
    with contextlib.ExitStack() as stack:
        yield {
            backend: stack.enter_context(world(backend[-6:], program(backend)))
            for backend in BACKENDS
        }


@pytest.fixture(scope="module")
def untouched(worlds: Mapping[str, World]) -> Table:
    """The table of a pod without a capture."""
    return worlds[BACKENDS[0]].table()


@pytest.fixture(params=BACKENDS)
def pod(worlds: Mapping[str, World], untouched: Table, request: pytest.FixtureRequest) -> World:
    """A pod for each backend, still captured as the test before left it: each test captures."""
    return worlds[request.param]


@pytest.fixture(params=WITH_RULES)
def ruled(worlds: Mapping[str, World], untouched: Table, request: pytest.FixtureRequest) -> World:
    """As `pod`, for each backend that loads rules: for what only packets show."""
    return worlds[request.param]


@pytest.fixture(params=MODES, ids="-".join)
def moded(
    worlds: Mapping[str, World], untouched: Table, request: pytest.FixtureRequest
) -> tuple[World, str]:
    """As `pod`, with each inbound mode that the backend has."""
    backend, mode = request.param
    return worlds[backend], mode


def by_ebpf(pod: World) -> bool:
    return pod.pod.startswith(f"{PREFIX}{EBPF}")


# --- nobody interferes ---------------------------------------------------------------------------


def test_without_a_capture_everyone_meets_whom_they_dialled(untouched: Table) -> None:
    listeners = {"in": "service", "out": "service", "dns": "dns", "odd": "dns", "vm": "vm"}
    ports = {8080: "app:8080", 9090: "app:9090", 9091: "app:pod-only", 53: "resolver"}
    ports |= {port: f"proxy:{port}" for port in range(15000, 17000)} | {15053: "refused"}
    for each in PROBES:
        host = each.name.split(">")[1].split(":")[0]
        expected = listeners.get(host[:-1]) or ports.get(each.port, "refused")
        if each.port == 9092 and host in ("lo4", "lo6"):
            expected = "app:loopback-only"
        if each.source == HOSTS["pass6"]:
            expected = "no-source"
        assert untouched[each.name].who == expected, each.name


def test_release_gives_everything_back(pod: World, untouched: Table) -> None:
    pod.capture(REDIRECTED if by_ebpf(pod) else TPROXY | REDIRECTED)
    assert pod.table() != untouched
    pod.release()
    assert pod.table() == untouched


# --- the backends are alike ----------------------------------------------------------------------


def settings_of(number: int) -> dict[str, object]:
    return random_settings(Random(number))


@pytest.mark.parametrize("first", range(SEED, SEED + SETTINGS, CHUNK))
def test_backends_cannot_be_told_apart(
    worlds: Mapping[str, World], untouched: Table, first: int
) -> None:
    for number in range(first, min(first + CHUNK, SEED + SETTINGS)):
        raw = settings_of(number)
        # One of them with a standing guard, which must not be seen while the capture is whole.
        guarded = WITH_RULES[number % len(WITH_RULES)]
        ruled = {backend: worlds[backend] for backend in WITH_RULES}
        for backend, made in ruled.items():
            made.capture(raw | {"guard": "standing"} if backend == guarded else raw)
        tables = {backend: made.table() for backend, made in ruled.items()}
        told = f"INTERCEPT_BEHAVIOUR_SEED={number} INTERCEPT_BEHAVIOUR_SETTINGS=1\n{raw}"
        assert not differences(ruled, tables), told
        for table in tables.values():
            assert not impossible(raw, table, untouched), told


@pytest.mark.skipif(EBPF not in BACKENDS, reason="eBPF takes the agent")
@pytest.mark.parametrize("first", range(SEED, SEED + SETTINGS, CHUNK))
def test_ebpf_cannot_be_told_from_rules(
    worlds: Mapping[str, World], untouched: Table, first: int
) -> None:
    """By the same settings less those that it refuses, and but for what is inherent in it.

    With rules, the answers of a DNS proxy get lost in conntrack's zones if it has other ids than
    the settings say, so 1337 is always among them.
    """
    pair = {name: worlds[name] for name in ("nftables", EBPF)}
    for number in range(first, min(first + CHUNK, SEED + SETTINGS)):
        raw = {key: value for key, value in settings_of(number).items() if key not in REFUSED}
        raw["proxy_gid"] = ",".join((str(raw.get("proxy_gid", "")), "1337")).lstrip(",")
        for made in pair.values():
            made.capture(raw)
        tables = {name: inherently(made.table()) for name, made in pair.items()}
        told = f"INTERCEPT_BEHAVIOUR_SEED={number} INTERCEPT_BEHAVIOUR_SETTINGS=1\n{raw}"
        assert not differences(pair, tables), told
        assert not impossible(raw, tables[EBPF], untouched), told


REFUSED = (
    *("inbound_interception_mode", "exclude_interfaces", "reroute_virtual_interfaces"),
    "drop_invalid",
)


def inherently(table: Table) -> Table:
    """Return a table without what eBPF cannot show as rules do; there are tests that it does not.

    What the pod forwards meets no socket in it. Of a client that has chosen its port the address
    is kept only where the proxy listens on all, which it does not for DNS.
    """
    forwarded = {f"vm>{host}{version}:80" for host in ("in", "out") for version in "46"}
    return {
        name: outcome._replace(source=None) if outcome.who == "proxy:15053" else outcome
        for name, outcome in table.items()
        if name not in forwarded
    }


@pytest.mark.skipif(EBPF not in BACKENDS, reason="eBPF takes the agent")
@pytest.mark.parametrize("version", "46")
def test_what_is_inherent_in_ebpf(
    worlds: Mapping[str, World], untouched: Table, version: str
) -> None:
    """What `inherently` leaves out, and the README names."""
    pod = worlds[EBPF]
    pod.capture(REDIRECTED)
    pod.meet(f"vm>in{version}:80")  # the first is lost while the links' own addresses are on trial
    for name in (f"vm>in{version}:80", f"vm>out{version}:80"):
        assert pod.meet(name) == untouched[name]
    for proto in ("", "/udp"):
        found = pod.meet(f"app>dns{version}:53{proto}")
        assert (found.who, found.source) == ("proxy:15053", HOSTS[f"lo{version}"])


def differences(worlds: Mapping[str, World], tables: Mapping[str, Table]) -> list[str]:
    """Return what is not the same everywhere; where somebody was slow, all are asked again."""
    probes = [each for each in PROBES if all(each.name in table for table in tables.values())]
    different = differing(tables, probes)
    if any(table[each.name].who == "timeout" for each in different for table in tables.values()):
        tables = {name: made.table(different, quiet_s=PATIENT_S) for name, made in worlds.items()}
        if EBPF in tables:
            tables = {name: inherently(table) for name, table in tables.items()}
        different = differing(tables, different)
    return [
        f"{each.name}: " + ", ".join(f"{name} {table[each.name]}" for name, table in tables.items())
        for each in different
    ]


def differing(tables: Mapping[str, Table], probes: Sequence[Probe]) -> list[Probe]:
    return [each for each in probes if len({table[each.name] for table in tables.values()}) > 1]


def impossible(raw: Raw, table: Table, untouched: Table) -> list[str]:
    """Return what no settings may do: hide an address, or touch IPv6 when it is off."""
    found = []
    for name, outcome in table.items():
        before = untouched[name]
        known = outcome.source is not None
        if outcome.destination and before.destination and known and outcome[1:] != before[1:]:
            found.append(f"{name}: the addresses are {outcome[1:]} and were {before[1:]}")
        if not raw["enable_ipv6"] and ":" in probe(name).host and outcome != before:
            found.append(f"{name}: IPv6 is off and {before} became {outcome}")
    return found


# Each test says who has a guard or a gate; ambient captures have tests of their own.
ELSEWHERE = {"guard", "gate", "init_cgroups", "mode", "host_probe_snat_ip", "host_probe_snat_ipv6"}


def test_random_settings_use_every_key() -> None:
    """Every key is there and varies, and all of them are valid."""
    seen: dict[str, set[object]] = {}
    for number in range(300):
        raw = settings_of(number)
        parse(raw)
        for key in set(KEYS) - ELSEWHERE:
            seen.setdefault(key, set()).add(raw.get(key))
    assert sorted(key for key, values in seen.items() if len(values) < 2) == []


# --- settings whose effect is known --------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.about.split(":")[0])
def test_capture_does_what_its_settings_say(pod: World, untouched: Table, case: Case) -> None:
    if by_ebpf(pod) and refusals(parse(case.raw)):
        before = pod.table()
        with pytest.raises(InvalidSettings):
            pod.capture(case.raw)
        assert pod.table() == before
        return
    pod.capture(case.raw)
    expected = case.expected(untouched)
    found = pod.table()
    if by_ebpf(pod):
        expected, found = inherently(expected), inherently(found)
    wrong = {n: (found[n], expected[n]) for n in expected if found[n] != expected[n]}
    assert wrong == {}, case.about


@pytest.mark.parametrize("version", "46")
def test_names_of_interfaces_are_compared_whole(ruled: World, version: str) -> None:
    """net1 is not lo. In IPv6 python-iptables compares only the lowest bit of each letter."""
    ruled.capture(EVERYTHING)
    assert ruled.meet(f"app>vm{version}:80").who == "proxy:15001"
    ruled.capture(TPROXY)
    assert ruled.meet(f"vm>second{version}:8080").who == "proxy:15006"


def test_tproxy_without_a_listener_lets_nothing_through(ruled: World) -> None:
    """iptables drops what it cannot hand to a listener; a backend that goes on opens the pod."""
    ruled.capture(TPROXY)
    with ruled.deaf("proxy", "proxy:15006"):
        for name in ("peer>own4:8080", "peer>own6:8080"):
            assert ruled.table([probe(name)])[name] == Outcome("timeout")
    assert ruled.meet("peer>own4:8080").who == "proxy:15006"


def test_redirect_without_a_listener_refuses(pod: World) -> None:
    pod.capture(EVERYTHING)
    with pod.deaf("proxy", "proxy:15001"), pod.deaf("proxy", "proxy:15006"):
        for name in ("app>in4:80", "app>in6:80", "peer>own4:8080", "peer>own6:8080"):
            assert pod.meet(name) == Outcome("refused"), name


# --- field reports -------------------------------------------------------------------------------


def test_report_43_proxy_may_use_other_loopback_addresses_if_told(pod: World) -> None:
    """Istio's rules exempt 127.0.0.1 alone; the loopback setting widens that."""
    pod.capture(EVERYTHING)
    assert pod.meet("proxy>lob4:8080").who == "proxy:15006"
    pod.capture(EVERYTHING | {"host_ipv4_loopback_cidr": "127.0.0.0/8"})
    assert pod.meet("proxy>lob4:8080").who == "app:8080"
    pod.capture({"outbound_ip_ranges_include": f"{HOSTS['lob4']}/32"})
    assert pod.meet("app>lob4:8080") == ("proxy:15001", "127.1.2.3:8080", "127.0.0.1")


@pytest.mark.parametrize("version", "46")
@pytest.mark.parametrize("mark", [1337, 4096])
def test_report_44_proxy_under_tproxy_calls_the_app_as_the_client(
    ruled: World, version: str, mark: int
) -> None:
    """It takes the client's address and the mark; the app's answers must find back, and no loop.

    The proxy is root with the group 1337, as Istio runs it under TPROXY. As user 1337 it would be
    bounced by the nat rule for calls to itself, which knows no mark.
    """
    ruled.capture(TPROXY | {"inbound_tproxy_mark": mark})
    client = HOSTS[f"peer{version}"]
    inbound = ruled.meet(f"peer>own{version}:8080")
    assert inbound[::2] == ("proxy:15006", client)
    ruled.served()
    onward = ruled.meet(f"envoy>own{version}:8080", source=client, transparent=True, mark=mark)
    assert onward[::2] == ("app:8080", client)
    assert ruled.served() == {"app:8080": 1}


@pytest.mark.parametrize("version", "46")
def test_report_44_proxy_under_tproxy_calls_its_own_pod(ruled: World, version: str) -> None:
    ruled.capture(TPROXY)
    ruled.served()
    assert ruled.meet(f"proxy>own{version}:8080").who == "proxy:15006"
    assert ruled.meet(f"proxy@pass{version}>own{version}:8080").who == "app:8080"
    assert ruled.served() == {"proxy:15006": 1, "app:8080": 1}


@pytest.mark.parametrize(("drop", "after"), [(True, "proxy:15006"), (False, "reset")])
def test_report_46_stray_packet_resets_unless_dropped(ruled: World, drop: bool, after: str) -> None:
    """A segment outside the window is not translated and meets the app, which knows nothing."""
    ruled.capture(EVERYTHING | {"drop_invalid": drop})
    assert ruled.hold("peer>own4:8080").who == "proxy:15006"
    ruled.nodes["peer"].ask("stray", name="peer>own4:8080", ahead=10_000_000)
    assert ruled.use("peer>own4:8080").who == after
    ruled.drop("peer>own4:8080")


@agent_only
@pytest.mark.parametrize("name", ["peer>own4:8080", "peer>own6:8080", "app>in4:80", "app>in6:80"])
def test_report_47_applying_again_keeps_captured_connections(pod: World, name: str) -> None:
    pod.capture(EVERYTHING)
    captured = pod.hold(name)
    pod.program.apply(pod.pod, EVERYTHING)
    assert pod.use(name) == captured
    pod.program.apply(pod.pod, EVERYTHING | {"outbound_ports_exclude": "7777"})
    assert pod.use(name) == captured
    pod.drop(name)


@pytest.mark.parametrize("version", "46")
def test_report_50_app_on_the_pod_address_alone_is_reached(
    moded: tuple[World, str], version: str
) -> None:
    pod, mode = moded
    pod.capture(EVERYTHING | {"inbound_interception_mode": mode})
    name = f"proxy@pass{version}>own{version}:9091"
    address = probe(name).host
    shown = f"[{address}]:9091" if ":" in address else f"{address}:9091"
    assert pod.meet(name) == ("app:pod-only", shown, HOSTS[f"pass{version}"])


@pytest.mark.parametrize("ports", ["7000-8080", "7000:8080", "7777,8000-8080"])
def test_report_52_ranges_of_ports(moded: tuple[World, str], ports: str) -> None:
    pod, mode = moded
    pod.capture({"inbound_ports_include": ports, "inbound_interception_mode": mode})
    met = {port: pod.meet(f"peer>own4:{port}").who for port in (7777, 8080, 9090)}
    assert met == {7777: "proxy:15006", 8080: "proxy:15006", 9090: "app:9090"}


@pytest.mark.parametrize(
    ("inbound", "captured"), [(None, set()), ("", set()), ("*", {8080, 9090}), ("8080", {8080})]
)
def test_report_55_no_list_empty_list_all_and_one(
    moded: tuple[World, str], inbound: str | None, captured: set[int]
) -> None:
    pod, mode = moded
    raw: dict[str, object] = {"inbound_interception_mode": mode, "enable_ipv6": True}
    pod.capture(raw if inbound is None else raw | {"inbound_ports_include": inbound})
    for version in "46":
        met = {port: pod.meet(f"peer>own{version}:{port}").who for port in (8080, 9090)}
        assert {port for port, who in met.items() if who == "proxy:15006"} == captured


def test_report_56_excluded_ports_win_over_everything(moded: tuple[World, str]) -> None:
    pod, mode = moded
    raw = {"inbound_ports_exclude": "15020,15021,15090,8080", "inbound_interception_mode": mode}
    pod.capture(EVERYTHING | raw)
    for version in "46":
        for port, who in ((8080, "app:8080"), *((p, f"proxy:{p}") for p in (15020, 15021, 15090))):
            assert pod.meet(f"peer>own{version}:{port}").who == who
        assert pod.meet(f"peer>own{version}:9090").who == "proxy:15006"


@pytest.mark.parametrize("version", "46")
def test_report_70_answers_find_the_zone_of_their_query(ruled: World, version: str) -> None:
    """One entry for the proxy's query and one for the app's, both answered."""
    ruled.capture(LISTED_DNS)
    assert ruled.meet(f"proxy>dns{version}:53/udp").who == "dns"
    assert ruled.meet(f"app>dns{version}:53/udp").who == "proxy:15053"
    queries = [line for line in ruled.nodes["root"].ask("tracked") if " udp " in line]
    assert len(queries) == 2
    assert not [line for line in queries if "UNREPLIED" in line]


@pytest.mark.parametrize("version", "46")
def test_report_70_queries_of_app_and_proxy_from_one_port(pod: World, version: str) -> None:
    """Only the zones keep the proxy's query from following the app's to the proxy."""
    pod.capture(LISTED_DNS)
    for sender, who in (("app", "proxy:15053"), ("proxy", "dns"), ("app", "proxy:15053")):
        assert pod.meet(f"{sender}>dns{version}:53/udp", source_port=15353).who == who


def test_report_71_local_resolver_reaches_its_upstream(pod: World) -> None:
    """Listed is the resolver in the pod alone: its own questions to the upstream must get out."""
    pod.capture({**LISTED_DNS, "dns_servers_v4": HOSTS["resolver4"], "dns_servers_v6": ""})
    pod.served()
    for proto in ("", "/udp"):
        assert pod.meet(f"app>resolver4:53{proto}").who == "proxy:15053"
        assert pod.meet(f"app>dns4:53{proto}").who == "dns"
    assert pod.served() == {"proxy:15053": 2, "dns": 2}


@agent_only
def test_report_73_dns_is_captured_before_docker_translates_it(ruled: World) -> None:
    rules = (
        "*nat\n:DOCKER_OUTPUT - [0:0]\n-A OUTPUT -d 127.0.0.53/32 -j DOCKER_OUTPUT\n"
        "-A DOCKER_OUTPUT -p udp --dport 53 -j DNAT --to-destination 127.0.0.53:40953\nCOMMIT\n"
    )
    legacy = ruled.pod.startswith("it-legacy")
    tool = "iptables-legacy-restore" if legacy else "iptables-nft-restore"
    inside(ruled.pod, tool, "--noflush", stdin=rules)
    try:
        ruled.capture({**LISTED_DNS, "dns_servers_v4": HOSTS["resolver4"]})
        assert ruled.meet("app>resolver4:53/udp").who == "proxy:15053"
    finally:
        ruled.release()
        inside(ruled.pod, tool, stdin="*nat\nCOMMIT\n")


def test_report_76_both_families_or_the_one_that_is_on(pod: World) -> None:
    pod.capture(EVERYTHING)
    assert {pod.meet(f"peer>own{version}:8080").who for version in "46"} == {"proxy:15006"}


def test_report_77_pod_with_ipv6_switched_off_is_captured(pod: World) -> None:
    pod.release()
    switch = ("sysctl", "-q", "-w")
    inside(pod.pod, *switch, "net.ipv6.conf.lo.disable_ipv6=1")
    try:
        pod.capture(EVERYTHING | {"enable_ipv6": False})
        assert pod.meet("app>in4:80").who == "proxy:15001"
        assert pod.meet("peer>own4:8080").who == "proxy:15006"
    finally:
        inside(pod.pod, *switch, "net.ipv6.conf.lo.disable_ipv6=0")
    assert pod.meet("app>lo6:8080").who == "app:8080"


def test_report_79_passthrough_address_comes_and_goes(pod: World) -> None:
    def addresses() -> int:
        return inside(pod.pod, "ip", "-6", "-o", "addr", "show", "dev", "lo").count("inet6 ::6/128")

    for _ in range(2):
        pod.capture(EVERYTHING)
        assert addresses() == 1
        assert pod.meet("proxy@pass6>own6:8080").who == "app:8080"
    pod.release()
    assert addresses() == 0


def test_report_97_whoever_runs_as_the_proxy_user_is_not_captured(pod: World) -> None:
    """Inherent in a rule by owner: the agent can only warn of it."""
    pod.capture(EVERYTHING)
    assert pod.meet("uidonly>in4:80").who == "service"
    pod.capture(EVERYTHING | {"proxy_uid": "2000", "proxy_gid": "2000"})
    assert pod.meet("uidonly>in4:80").who == "proxy:15001"
    assert pod.meet("second>in4:80").who == "service"


def test_report_98_group_counts_when_it_is_the_process_s_own(pod: World) -> None:
    """A process that runs in the group is exempt; a supplemental group does not count."""
    pod.capture(EVERYTHING)
    for version in "46":
        assert pod.meet(f"gidonly>in{version}:80").who == "service"
        assert pod.meet(f"extra>in{version}:80").who == "proxy:15001"
