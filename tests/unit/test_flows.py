"""What is told of a connection, and what is said of it: records, programs, judgements, lines."""

import ipaddress
import json
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial

import pytest

from agent.explain.branch import Layer
from agent.explain.walk import walk
from agent.flows import event, render
from agent.flows.event import Event, Kind, Lost, Ready, Result
from agent.flows.fate import Became, Flow, judge
from agent.flows.query import Query, source
from agent.flows.view import View
from agent.model.host import Host, Interface, Route
from agent.model.packet import Packet, Trace
from agent.model.plan import plan
from agent.model.settings import Settings, parse
from agent.model.state import NFTABLES

HERE = ipaddress.ip_address("10.1.0.7")
THERE = ipaddress.ip_address("10.9.8.7")
HOST = Host(
    interfaces=(Interface("eth0", (ipaddress.ip_interface("10.1.0.7/24"),)),),
    routes=(Route(ipaddress.ip_network("0.0.0.0/0"), "eth0"),),
)
SETTINGS = parse(
    {
        "inbound_ports_include": "*",
        "outbound_ip_ranges_include": "*",
        "outbound_ports_exclude": "5432",
        "redirect_dns": True,
        "dns_servers_v4": "10.9.8.7",
    }
)


def connection(**changes: object) -> Event:
    values: dict[str, object] = {
        "at_ns": 1,
        "took_ns": 2_500_000,
        "netns": 3,
        "pid": 4,
        "uid": 1000,
        "gid": 1000,
        "mark": 0,
        "source": (HERE, 40000),
        "asked": (THERE, 443),
        "went": (THERE, 443),
        "listening": 0,
        "kind": Kind.OUT_TCP,
        "result": Result.CONNECTED,
        "left": True,
        "name": "curl",
    }
    return Event(**(values | changes))  # type: ignore[arg-type]


# --- records --------------------------------------------------------------------------------------


def encoded(found: Event) -> bytes:
    """Return the record that the programs write, with every address in sixteen bytes."""
    ends = (found.source, found.asked, found.went)
    packed = [
        (ipaddress.ip_address(f"::ffff:{a}") if a.version == 4 else a).packed for a, _ in ends
    ]
    ports = [port for _, port in ends]
    head = (found.at_ns, found.took_ns, found.netns, found.pid, found.uid, found.gid, found.mark)
    tail = (found.listening, found.kind, found.result, found.left, found.name.encode())
    return event.EVENT.pack(*head, *packed, *ports, *tail)


@pytest.mark.parametrize("address", ["10.9.8.7", "fd00::7"])
def test_record_of_a_connection_is_read(address: str) -> None:
    told = connection(asked=(ipaddress.ip_address(address), 443), name="sixteen letters!")
    assert event.decode(encoded(told)) == told


def test_records_of_the_watch_itself_are_read() -> None:
    assert event.decode(event.ready()) == Ready()
    assert event.decode(event.lost(7)) == Lost(7)
    assert len(event.ready()) == len(event.lost(7)) == event.EVENT.size


# --- programs -------------------------------------------------------------------------------------


def test_programs_are_made_for_the_question() -> None:
    asked = source(
        Query(uids=(0, 1000), ports=(443,), netns=77),
        "int x;",
        page_bytes=4096,
        dialled_pin="/sys/fs/bpf/x",
    )
    assert "#define ASKS_UID(uid) ((uid) == 0u || (uid) == 1000u)" in asked
    assert "#define ASKS_PORT(port) ((port) == 443u)" in asked
    assert "#define NETNS 77ULL" in asked
    assert '#define DIALLED "maps/sk_storage:/sys/fs/bpf/x"' in asked
    assert asked.endswith("#line 1\nint x;")
    whole = source(Query(), "", page_bytes=4096, dialled_pin=None)
    assert "#define ASKS_PORT(port) (1)" in whole
    assert "NETNS" not in whole.replace("NETNS_", "")
    assert "DIALLED" not in whole


# --- judgements -----------------------------------------------------------------------------------


def view(settings: Settings | None = SETTINGS) -> View:
    def through(layers: tuple[Layer, ...], packet: Packet) -> Trace:
        return walk(layers, packet, HOST, inbound=packet.uid is None)

    rules = plan(settings or Settings()).rulesets.values()
    expected = partial(through, tuple(Layer(NFTABLES, found) for found in rules))
    return View(
        captured=settings is not None,
        translated=True,
        settings=settings,
        is_local=HOST.is_local,
        expected=expected,
        loaded=partial(through, ()),
    )


def judged(told: Event, seen: View | None = None, **packet: object) -> tuple[object, ...]:
    sent = {"protocol": told.protocol, "destination": told.asked[0], "dport": told.asked[1]}
    sent |= {} if told.inbound else {"uid": told.uid, "gid": told.gid}
    found = judge(seen or view(), told, Packet(**(sent | packet)), told.went)  # type: ignore[arg-type]
    return found.became, found.port, found.setting


LOOPBACK = ipaddress.ip_address("127.0.0.1")


@pytest.mark.parametrize(
    ("told", "became", "port", "setting"),
    [
        ({"went": (LOOPBACK, 15001)}, Became.PROXIED, 15001, None),
        (
            {"went": (LOOPBACK, 15001), "result": Result.REFUSED},
            Became.REFUSED,
            15001,
            "gate",
        ),
        ({}, Became.BYPASSED, None, "outbound_ip_ranges_include"),
        # Somebody else's rule sends it to somebody else.
        ({"went": (LOOPBACK, 9999)}, Became.BYPASSED, None, "outbound_ip_ranges_include"),
        ({"went": (HERE, 443)}, Became.BYPASSED, None, "outbound_ip_ranges_include"),
        ({"uid": 1337, "gid": 1337}, Became.EXEMPT, None, "proxy_uid"),
        ({"uid": 7, "gid": 1337}, Became.EXEMPT, None, "proxy_gid"),
        (
            {"asked": (THERE, 5432), "went": (THERE, 5432)},
            Became.EXEMPT,
            None,
            "outbound_ports_exclude",
        ),
        ({"left": False, "result": Result.UNANSWERED}, Became.REFUSED, None, None),
        (
            {
                "asked": (THERE, 53),
                "went": (THERE, 53),
                "kind": Kind.OUT_UDP,
                "result": Result.SENT,
            },
            Became.BYPASSED,
            None,
            "dns_servers_v4",
        ),
        (
            {"asked": (HERE, 53), "went": (HERE, 53), "kind": Kind.OUT_UDP, "result": Result.SENT},
            Became.EXEMPT,
            None,
            "dns_servers_v4",
        ),
    ],
)
def test_outbound_connections_are_judged_by_where_they_went(
    told: dict[str, object], became: Became, port: int | None, setting: str | None
) -> None:
    assert judged(connection(**told)) == (became, port, setting)


def test_what_is_included_nowhere_is_exempt_by_the_list_that_lacks_it() -> None:
    some = parse({"outbound_ip_ranges_include": "10.0.0.0/16", "inbound_ports_include": "80"})
    assert judged(connection(), view(some))[2] == "outbound_ip_ranges_include"
    arrived = connection(kind=Kind.IN_TCP, asked=(HERE, 8080), went=(HERE, 8080))
    assert judged(arrived, view(some)) == (Became.EXEMPT, None, "inbound_ports_include")


def test_ipv6_that_is_left_alone_is_exempt_by_that() -> None:
    there = (ipaddress.ip_address("fd00::7"), 443)
    told = connection(asked=there, went=there)
    assert judged(told) == (Became.EXEMPT, None, "enable_ipv6")


def test_proxys_own_port_that_is_dialled_from_outside_is_given_to_the_proxy() -> None:
    arrived = connection(kind=Kind.IN_TCP, asked=(HERE, 15006), went=(HERE, 15006))
    assert judged(arrived) == (Became.PROXIED, 15006, None)


def test_what_somebody_at_the_gate_may_do_is_not_bypassed() -> None:
    """The rule asks for the sender's cgroup, which is not known any more; it was let pass."""
    waiting = replace(SETTINGS, gate="listener", init_cgroups=("/kubepods/init",))
    assert judged(connection(), view(waiting)) == (Became.EXEMPT, None, "init_cgroups")


def test_nothing_is_bypassed_where_nothing_captures() -> None:
    assert judged(connection(), view(None)) == (Became.UNCAPTURED, None, None)


# --- lines ----------------------------------------------------------------------------------------

AT = datetime(2026, 12, 1, 10, 14, 3, 512000, UTC)


def flow(**changes: object) -> Flow:
    values: dict[str, object] = {
        "at_ns": 1,
        "took_ms": 2.5,
        "inbound": False,
        "protocol": "tcp",
        "pid": 4,
        "process": "curl",
        "uid": 1000,
        "source": (HERE, 40000),
        "destination": (ipaddress.ip_address("fd00::7"), 443),
        "became": Became.PROXIED,
        "port": 15001,
        "setting": None,
        "result": Result.CONNECTED,
        "text": "to the proxy, port 15001",
    }
    return Flow(**(values | changes))  # type: ignore[arg-type]


def test_line_for_people_stands_under_its_heading() -> None:
    line = render.row(flow(), "shop/web", AT, "to the proxy, port 15001")
    for title, cell in (("POD", "shop/web"), ("UID", "1000"), ("DESTINATION", "[fd00::7]:443")):
        assert line.index(cell) == render.heading().index(title)


def test_processes_that_name_themselves_badly_do_no_harm() -> None:
    line = render.row(flow(process="a\n\033[2Jb"), "web", AT, "")
    assert "a??[2Jb/4" in line


def test_document_holds_what_the_readme_lists() -> None:
    document = render.to_json(flow(uid=None, pid=0), "shop/web", "/run/netns/x", AT)
    assert json.loads(json.dumps(document)) == {
        "time": "2026-12-01T10:14:03.512000Z",
        "pod": "shop/web",
        "netns": "/run/netns/x",
        "direction": "out",
        "protocol": "tcp",
        "pid": None,
        "process": "curl",
        "uid": None,
        "source": "10.1.0.7:40000",
        "destination": "[fd00::7]:443",
        "became": "proxied",
        "port": 15001,
        "setting": None,
        "result": "connected",
        "took_ms": 2.5,
        "text": "to the proxy, port 15001",
    }
