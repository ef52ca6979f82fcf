"""What the eBPF programs decide is what the rules decide, and which settings are not theirs."""

import ipaddress
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest

from agent.explain.walk import Layer, walk
from agent.formats.bpf_capture import COOKIE, SIZE, decode, encode, own_keys
from agent.formats.iptables_save import parse as parse_rules
from agent.formats.iptables_save import render
from agent.model.enrolment import Enrolment, IdRange, Place, Site, effective, refusals, verdict
from agent.model.host import Host, Interface, Route
from agent.model.packet import Kind, Packet
from agent.model.plan import plan
from agent.model.settings import Settings, parse
from agent.model.values import Span
from tests.support.behaviour_cast import CREDENTIALS, HOSTS, PROBES, Probe
from tests.support.behaviour_settings import random_settings
from tests.support.capturing import EVERYTHING

NOT_THEIRS = {
    "inbound_interception_mode": "TPROXY",
    "exclude_interfaces": "net1",
    "reroute_virtual_interfaces": "net1",
    "drop_invalid": True,
}

PASSING = {"gate": "listener", "init_cgroups": "/kubepods/pod1/a,/kubepods/pod1/b"}
CGROUPS = ("/", "/kubepods/pod1", "/kubepods/pod1/a", "/kubepods/pod1/b/c", "/kubepods/pod1/ab")

LEAVING = Packet(protocol="tcp", destination=ipaddress.ip_address("192.0.2.1"), dport=80, uid=1000)
ARRIVING = Packet(protocol="tcp", destination=ipaddress.ip_address("10.77.0.2"), dport=80)

POD = Host(
    interfaces=(
        Interface("lo", (ipaddress.ip_interface("::6/128"),)),
        Interface(
            "eth0",
            (ipaddress.ip_interface("10.77.0.2/24"), ipaddress.ip_interface("fd77::2/64")),
        ),
        Interface(
            "net1",
            (ipaddress.ip_interface("10.78.0.2/24"), ipaddress.ip_interface("fd78::2/64")),
        ),
    ),
    routes=(
        Route(ipaddress.ip_network("0.0.0.0/0"), "eth0"),
        Route(ipaddress.ip_network("::/0"), "eth0"),
    ),
)


def honoured(number: int) -> Settings:
    """Return random settings less those that eBPF refuses."""
    raw = random_settings(Random(number)) | (PASSING if number % 3 == 0 else {})
    return parse({key: value for key, value in raw.items() if key not in NOT_THEIRS})


def packet_of(probe: Probe, cgroup: str | None = None) -> tuple[Packet, bool]:
    inbound = probe.sender in ("peer", "vm")
    to = ipaddress.ip_address(probe.host)
    owner = None if inbound else CREDENTIALS[probe.sender]
    source = probe.source
    if inbound:
        source = HOSTS[f"{probe.sender}{to.version}"]
    packet = Packet(
        protocol=probe.proto,
        destination=to,
        dport=probe.port,
        source=ipaddress.ip_address(source) if source else None,
        uid=owner and owner.uid,
        gid=owner and owner.gid,
        cgroup=cgroup,
        in_interface={"peer": "eth0", "vm": "net1"}[probe.sender] if inbound else "",
        out_interface="" if inbound else ("lo" if POD.is_local(to) else "eth0"),
    )
    return packet, inbound


def layers_of(settings: Settings) -> list[Layer]:
    return [
        Layer("iptables-nft", parse_rules(render(ruleset), family))
        for family, ruleset in plan(settings).rulesets.items()
    ]


def by_rules(layers: Sequence[Layer], packet: Packet, *, inbound: bool) -> str:
    found = walk(layers, packet, POD, inbound=inbound).verdict
    # An ACCEPT or RETURN exempts as much as no rule at all.
    return f"{found.port}" if found.kind is Kind.REDIRECT else "left alone"


def by_programs(settings: Settings, packet: Packet, *, inbound: bool) -> str:
    found = verdict(settings, packet, inbound=inbound).verdict
    return f"{found.port}" if found.kind is Kind.REDIRECT else "left alone"


def forwarded(probe: Probe) -> bool:
    """Whether a probe only passes through the pod, where no program is asked."""
    inbound = probe.sender in ("peer", "vm")
    return inbound and not POD.is_local(ipaddress.ip_address(probe.host))


@pytest.mark.parametrize("number", range(60))
def test_programs_decide_as_the_rules_do(number: int) -> None:
    settings = honoured(number)
    chosen = Random(number).sample([p for p in PROBES if not forwarded(p)], 40)
    layers = layers_of(settings)
    wrong = {}
    for probe in chosen:
        packet, inbound = packet_of(probe, Random(probe.name).choice(CGROUPS))
        rules = by_rules(layers, packet, inbound=inbound)
        programs = by_programs(settings, packet, inbound=inbound)
        if rules != programs:
            wrong[probe.name] = (rules, programs)
        # What the programs are told is as good as what the user said.
        assert by_programs(effective(settings), packet, inbound=inbound) == programs
    assert wrong == {}, settings


@pytest.mark.parametrize("key", NOT_THEIRS)
def test_a_setting_that_only_packets_can_show_is_refused_by_name(key: str) -> None:
    (sentence,) = refusals(parse({key: NOT_THEIRS[key]}))
    assert sentence.startswith(f"{key}: ")


def test_more_entries_than_the_programs_hold_are_refused() -> None:
    ports = ",".join(str(port) for port in range(1, 66))
    (sentence,) = refusals(parse({"outbound_ports_exclude": ports}))
    assert sentence == "outbound_ports_exclude: 65 entries, and the programs hold 64"


@pytest.mark.parametrize("number", range(200))
def test_what_the_programs_are_told_can_be_read_back(number: int) -> None:
    settings = effective(honoured(number))
    places = (
        Place(ipaddress.ip_network("10.0.0.2/32"), ipaddress.ip_address("10.0.0.2"), local=True),
        Place(ipaddress.ip_network("fd00::/64"), None, local=False),
    )
    site = Site(places, users=IdRange(0, 100000, 65536))
    # The cgroups are in a map of their own.
    assert decode(encode(settings, site)) == (replace(settings, init_cgroups=()), site)
    assert effective(settings) == settings


@pytest.mark.parametrize("gate", ["open", "closed"])
def test_an_open_gate_takes_nothing_until_the_proxy_has_listened(gate: str) -> None:
    settings = parse({**EVERYTHING, "gate": gate})
    for enrolled in (Enrolment(settings), Enrolment(settings, listened=True)):
        now = enrolled.in_force
        assert now is not None
        kinds = {
            verdict(now, packet, inbound=inbound).verdict.kind
            for packet, inbound in ((LEAVING, False), (ARRIVING, True))
        }
        is_open = gate == "open" and not enrolled.listened
        assert kinds == {Kind.PASS if is_open else Kind.REDIRECT}


def test_inbound_ports_of_any_number_are_held_and_read_in_as_few_spans_as_can_be() -> None:
    ports = ",".join(str(port) for port in (*range(1, 400, 2), 7, 8, 9, 443, 444, 65535))
    settings = effective(parse({"inbound_ports_include": "*", "inbound_ports_exclude": ports}))
    assert refusals(settings) == ()
    assert decode(encode(settings, Site())) == (settings, Site())
    assert settings.inbound_ports_exclude[3:5] == (Span(7, 9), Span(11, 11))
    assert settings.inbound_ports_exclude[-2:] == (Span(443, 444), Span(65535, 65535))


def test_single_addresses_are_the_namespaces_own() -> None:
    def place(network: str, local: bool) -> Place:
        return Place(ipaddress.ip_network(network), None, local)

    site = Site(
        (
            *(place("10.0.0.2/32", True), place("fd00::2/128", True), place("127.0.0.1/32", True)),
            *(place("10.1.0.0/16", True), place("10.0.0.9/32", False), place("::1/128", True)),
        )
    )
    four = bytes(10) + b"\xff\xff" + bytes((10, 0, 0, 2))
    six = ipaddress.ip_address("fd00::2").packed
    assert own_keys(77, site) == {COOKIE.pack(77) + four, COOKIE.pack(77) + six}


@pytest.mark.parametrize("spoilt", [b"", b"\xff" * SIZE])
def test_an_entry_that_nobody_wrote_is_refused(spoilt: bytes) -> None:
    with pytest.raises(ValueError, match=r"entry of 0 bytes|items where there is room"):
        decode(spoilt)


@pytest.mark.parametrize("number", range(60))
def test_random_settings_without_those_are_honoured(number: int) -> None:
    assert refusals(honoured(number)) == ()
