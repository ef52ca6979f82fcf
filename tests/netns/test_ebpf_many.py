"""Many namespaces under eBPF: they come, go, die and are upgraded, and nothing is left of them.

INTERCEPT_EBPF_PODS=200        how many are there at once
INTERCEPT_EBPF_STEPS=40        how long the random walk is
INTERCEPT_EBPF_SEED=1          which walk it is; a failure prints it
"""

import contextlib
import os
import random
import shutil
import struct
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agent.backends import ebpf, ebpf_sweep
from agent.formats.bpf_capture import COOKIE
from agent.kernel import bpf, bpf_loader, bpf_pins
from agent.model.state import EBPF
from tests.support.agent import RESULT, running, wait_for
from tests.support.capturing import EVERYTHING, Raw
from tests.support.ebpf import (
    capture,
    checked,
    cookie,
    detach,
    found_wrong,
    own_node,
    pinned,
    release,
    run_killed,
)
from tests.support.netns import namespace, run

pytestmark = pytest.mark.netns

PODS = int(os.environ.get("INTERCEPT_EBPF_PODS", "200"))
STEPS = int(os.environ.get("INTERCEPT_EBPF_STEPS", "40"))
SEED = int(os.environ.get("INTERCEPT_EBPF_SEED", "1"))
MAPS = ("captures", "own_addresses", "listeners", "listened", "passing")
MAP_CREATE, HASH = 0, 1  # linux/bpf.h, enum bpf_cmd and bpf_map_type
GET_LINK_BY_ID = 30  # BPF_LINK_GET_FD_BY_ID


@pytest.fixture(autouse=True)
def node(tmp_path: Path) -> Iterator[None]:
    with own_node(tmp_path):
        yield


def entries() -> dict[str, int]:
    """Return how many entries each map of the programs holds that is about namespaces."""
    found = {}
    for name in MAPS:
        with bpf_pins.open_map(name) as opened:
            found[name] = sum(1 for _ in opened.keys())  # noqa: SIM118
    return found


def links() -> set[int]:
    """Return the numbers of all links that are pinned."""
    paths = [*bpf_pins.links().iterdir(), *bpf_pins.pods().iterdir()]
    found = set()
    for path in paths:
        with bpf.opened(bpf.get(path)) as fd:
            found.add(int.from_bytes(bpf.info(fd, 8)[4:], sys.byteorder))
    return found


def living(numbers: set[int]) -> set[int]:
    """Return those of the links that the kernel still has."""
    found = set()
    for number in numbers:
        with contextlib.suppress(OSError):
            os.close(bpf.call(GET_LINK_BY_ID, number.to_bytes(4, sys.byteorder))[0])
            found.add(number)
    return found


def eventually(swept: Callable[[], bool]) -> None:
    """Sweep until it holds: the kernel takes a namespace down some time after its last user."""
    deadline = time.monotonic() + 30
    while not swept():
        assert time.monotonic() < deadline, (pinned(), entries())
        time.sleep(0.05)
        ebpf.sweep()


# --- all at once ----------------------------------------------------------------------------------


def test_as_many_as_a_node_has_come_and_go() -> None:
    """Half of them are let go, half just end; the programs go with the last."""
    with contextlib.ExitStack() as living_ones:
        stays = [living_ones.enter_context(namespace("stay")) for _ in range(PODS // 2)]
        with contextlib.ExitStack() as dying_ones:
            ends = [dying_ones.enter_context(namespace("end")) for _ in range(PODS - PODS // 2)]
            for name in (*stays, *ends):
                capture(name)
            assert len(os.listdir(bpf_pins.pods())) == PODS
            assert entries()["captures"] == PODS
            numbers = links()
            assert len(living(numbers)) == PODS + len(bpf_loader.HOOKS)
        eventually(lambda: len(os.listdir(bpf_pins.pods())) == len(stays))
        assert entries()["captures"] == len(stays)
        for name in stays:
            assert checked(name).in_sync
            release(name)
        assert pinned() == set()
    eventually(lambda: not living(numbers))


def test_a_map_that_is_full_is_called_so() -> None:
    """And not a list of arguments that is too long."""
    fd, _ = bpf.call(MAP_CREATE, struct.pack("=IIII", HASH, 8, 4, 1))
    with bpf.Map.of(fd) as small:
        small.update(bytes(8), bytes(4))
        with pytest.raises(OSError, match="one of the programs' maps is full"):
            small.update(bytes([1] * 8), bytes(4))


# --- what is gone and what is not -----------------------------------------------------------------


def test_what_a_namespace_that_is_gone_left_goes_with_the_next_change(netns: str) -> None:
    with namespace("gone") as other:
        capture(other)
        old = cookie(other)
        capture(netns)
    deadline = time.monotonic() + 10
    while str(old) in os.listdir(bpf_pins.pods()):
        assert time.monotonic() < deadline, "it stays"
        capture(netns, {**EVERYTHING, "outbound_ports_exclude": str(random.randint(1, 9999))})
        time.sleep(0.05)
    with bpf_pins.open_map("captures") as captures:
        assert list(captures.keys()) == [COOKIE.pack(cookie(netns))]


def test_a_program_that_was_detached_is_no_namespace_that_is_gone(netns: str) -> None:
    """Neither is one whose pin was removed: sweeping must not let a namespace that lives go."""
    capture(netns)
    pin = bpf_pins.pod_pin(cookie(netns))
    spoils: tuple[Callable[[], None], ...] = (lambda: detach(pin), pin.unlink)
    for spoil in spoils:
        spoil()
        with namespace("new") as other:
            capture(other)
            ebpf.sweep()
            release(other)
        assert ebpf.sweep().faults == (f"the program of namespace {cookie(netns)} is not attached",)
        with bpf_pins.open_map("captures") as captures:
            assert captures.lookup(COOKIE.pack(cookie(netns))) is not None
        assert capture(netns).changed
        assert ebpf.sweep().faults == ()
        assert found_wrong(netns) == []


def test_an_entry_whose_pin_is_gone_goes_with_its_namespace(netns: str) -> None:
    capture(netns)
    with namespace("gone") as other:
        capture(other)
        bpf_pins.pod_pin(cookie(other)).unlink()
    eventually(lambda: entries()["captures"] == 1)
    assert checked(netns).in_sync


@pytest.mark.parametrize("what", ["maps/captures", "maps/about", "maps/dialled", "maps", "pods"])
def test_pins_that_are_removed_come_back_with_what_they_held(netns: str, what: str) -> None:
    """The programs still hold the maps. Nobody is let go meanwhile, but who asks for that."""
    with namespace("other") as other:
        for each in (netns, other):
            capture(each)
        before, held = pinned(), entries()
        for go_on in (ebpf.sweep, lambda: release(other), lambda: capture(other)):
            remove_pins(bpf_pins.base() / what)
            assert pinned() < before
            go_on()
            assert cookie(netns) in ebpf_sweep.enrolled()
            for each in (netns, other):
                capture(each)
                assert found_wrong(each) == []
            assert (pinned(), entries()) == (before, held)
        remove_pins(bpf_pins.base() / what)
        for each in (other, netns):
            release(each)
    assert pinned() == set()


def remove_pins(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def test_half_loaded_programs_that_nobody_needs_go(netns: str) -> None:
    capture(netns)
    with bpf_pins.open_map("about") as about:
        about.update(bytes(4), bytes(24))
    release_entry(netns)
    ebpf.sweep()
    assert pinned() == set()


def release_entry(name: str) -> None:
    with bpf_pins.open_map("captures") as captures:
        captures.delete(COOKIE.pack(cookie(name)))


def test_the_daemon_sweeps_though_nothing_else_happens(tmp_path: Path) -> None:
    with running(tmp_path, backend=EBPF) as agent:
        with namespace("gone") as other:
            assert agent.cni("ADD", other) == (0, RESULT)
            wait_for(lambda: agent.state("web") == "in-sync")
            assert pinned()
        wait_for(lambda: pinned() == set(), timeout_s=60)


# --- a random walk --------------------------------------------------------------------------------


CHOICES: tuple[Raw, ...] = (
    EVERYTHING,
    {**EVERYTHING, "redirect_dns": True, "capture_all_dns": True},
    {**EVERYTHING, "enable_ipv6": False, "inbound_ports_include": "80,8080"},
    {**EVERYTHING, "outbound_ip_ranges_exclude": "10.0.0.0/8", "proxy_port": 15101},
)
SLOTS = 5


class Walk:
    """Namespaces, and what each of them should be; None: not captured."""

    def __init__(
        self, chance: random.Random, names: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.chance = chance
        self.monkeypatch = monkeypatch
        self.names = names
        self.builds = 0
        self.wanted: dict[str, Raw | None] = {self.fresh(): None for _ in range(SLOTS)}

    def fresh(self) -> str:
        return self.names.enter_context(namespace("walk"))

    def step(self) -> str:
        """Do something, put right what it concerned, and return what it was."""
        name = self.chance.choice(tuple(self.wanted))
        what = self.chance.choice(
            (self.enrol, self.remove, self.end, self.kill, self.upgrade, self.spoil, self.sweep)
        )
        what(name)
        return f"{what.__name__} {name}"

    def enrol(self, name: str) -> None:
        self.wanted[name] = self.chance.choice(CHOICES)
        self.put_right(name)

    def remove(self, name: str) -> None:
        self.wanted[name] = None
        self.put_right(name)

    def end(self, name: str) -> None:
        run("ip", "netns", "del", name)
        del self.wanted[name]
        self.wanted[self.fresh()] = None

    def kill(self, name: str) -> None:
        self.wanted[name] = EVERYTHING if self.chance.random() < 0.6 else None
        command = "apply" if self.wanted[name] else "remove"
        run_killed(command, name, self.chance.uniform(0.15, 1.0))
        self.put_right(name)

    def upgrade(self, _: str) -> None:
        """Another build, as if another version of the agent went over all its namespaces."""
        self.builds += 1
        number = self.builds % 250
        self.monkeypatch.setattr(bpf_pins, "build", lambda: bytes([number]) * 20)
        for name in self.wanted:
            self.put_right(name)

    def spoil(self, name: str) -> None:
        """Take something away of what is pinned, or detach it."""
        pins = [path for path in bpf_pins.base().rglob("*/*") if path.parent.name != "maps"]
        if pins:
            pin = self.chance.choice(sorted(pins))
            detach(pin) if self.chance.random() < 0.5 else pin.unlink()
        if self.wanted[name]:
            release_entry(name)
        for each in self.wanted:
            self.put_right(each)

    def sweep(self, _: str) -> None:
        ebpf.sweep()

    def put_right(self, name: str) -> None:
        wanted = self.wanted[name]
        if wanted is None:
            release(name)
        else:
            capture(name, wanted)

    def wrong(self) -> list[str]:
        """Return what is not as it should be."""
        found = []
        for name, wanted in self.wanted.items():
            if wanted is not None:
                found += [f"{name}: {said}" for said in found_wrong(name, wanted)]
            elif "is not enrolled" not in " ".join(found_wrong(name)):
                found.append(f"{name}: is captured")
        if not any(self.wanted.values()) and any(entries_of_living(self.wanted)):
            found.append("entries are left")
        return found


def entries_of_living(names: dict[str, Raw | None]) -> Iterator[str]:
    if bpf_pins.about() is None:
        return
    with bpf_pins.open_map("captures") as captures:
        for name in names:
            if captures.lookup(COOKIE.pack(cookie(name))) is not None:
                yield name


def test_random_steps_converge(monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(SEED)
    told: list[str] = []
    with contextlib.ExitStack() as names:
        walk = Walk(chance, names, monkeypatch)
        for number in range(STEPS):
            told.append(walk.step())
            assert walk.wrong() == [], (SEED, number, told[-5:])
        for name in walk.wanted:
            walk.remove(name)
        eventually(lambda: pinned() == set())
