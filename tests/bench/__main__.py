"""Speed of apply and check against what istio-iptables executes, and what captures cost traffic.

The baseline of a flavour is two saves and two restores of the same rules, one after the other, in a
fresh namespace. Baseline and candidate alternate, each in a namespace of its own, in one warm
process; medians are printed. Nothing here passes or fails: the ratios are for people to read.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from agent.backends import registry
from agent.backends.session import writing
from agent.capture.apply import apply, remove
from agent.capture.check import check
from agent.formats.iptables_save import render
from agent.kernel import tools
from agent.kernel.netns import Netns
from agent.model.enrolment import enrolment
from agent.model.plan import plan
from agent.model.ruleset import Family
from agent.model.settings import Settings, parse
from agent.model.state import EBPF
from tests.bench import leftovers, node, proxied, traffic
from tests.support.ebpf import built, own_pins
from tests.support.netns import namespace, path_of

RUNS = 25
TARGETS = {
    ("apply", "nftables"): ("nft", 0.25),
    ("apply", "iptables-nft"): ("nft", 1.0),
    ("apply", "iptables-legacy"): ("legacy", 2.5),
    ("apply", EBPF): ("nft", 0.25),
    ("enrol", EBPF): ("nft", 0.02),
    ("check", "nftables"): ("nft", 0.4),
    ("check", "iptables-nft"): ("nft", 0.4),
    ("check", "iptables-legacy"): ("legacy", 0.4),
    ("check", EBPF): ("nft", 0.4),
}
SETTINGS = parse(
    {
        "inbound_ports_include": "*",
        "inbound_ports_exclude": "15020,15021,15090",
        "outbound_ip_ranges_include": "*",
        "redirect_dns": "true",
        "capture_all_dns": "true",
        "enable_ipv6": "true",
    }
)


def timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return (time.perf_counter() - started) * 1000


def baseline(netns: Netns, flavour: str, settings: Settings) -> float:
    """Run what istio-iptables runs: a save and a restore for each family."""
    rulesets = plan(settings).rulesets
    words = {Family.IPV4: "iptables", Family.IPV6: "ip6tables"}
    calls = [([f"{words[family]}-{flavour}-save"], "") for family in Family]
    for family, word in words.items():
        text = render(rulesets[family], builtin=False)
        calls.append(([f"{word}-{flavour}-restore", "--noflush"], text))

    def execute() -> None:
        for command, text in calls:
            subprocess.run(
                command,
                input=text,
                text=True,
                capture_output=True,
                check=True,
                env={"PATH": tools.SEARCH_PATH},
            )

    return timed(lambda: netns.run(execute))


def enrolled(netns: Netns) -> float:
    """Return how long the one write takes with which a namespace is captured by eBPF."""
    with writing(netns) as session:
        have = registry.EBPF_BACKEND.read(session)
        (step,) = registry.EBPF_BACKEND.steps(session, have, enrolment(SETTINGS))
        return timed(step.run)


def measure(action: str, backend: str) -> tuple[float, float]:
    """Return the medians of the baseline and of ours, in milliseconds."""
    flavour = TARGETS[action, backend][0]
    theirs, ours = [], []
    for round_number in range(RUNS + 3):
        with namespace("bench") as name, Netns.open(path_of(name)) as netns:
            base = baseline(netns, flavour, SETTINGS)
        with namespace("bench") as name, Netns.open(path_of(name)) as netns:
            if action == "enrol":
                applied = enrolled(netns)
            else:
                applied = timed(lambda: apply(netns, SETTINGS, backend=backend))
            if action == "check":
                applied = timed(lambda: check(netns, SETTINGS))
            if backend == EBPF:  # else the next one would clear up after it
                remove(netns)
        if round_number >= 3:  # the first rounds warm the caches
            theirs.append(base)
            ours.append(applied)
    return statistics.median(theirs), statistics.median(ours)


def main() -> int:
    if os.geteuid() != 0:
        print(
            "The bench makes network namespaces, which needs root: sudo make bench", file=sys.stderr
        )
        return 3
    print(
        f"Medians of {RUNS} runs in a warm process. Baseline: the two saves and two restores that\n"
        "istio-iptables executes. Ratio: ours to the baseline; aim: the ratio that is hoped for.\n"
        "enrol: of an apply by eBPF the write alone, without looking before and after.\n"
    )
    with tempfile.TemporaryDirectory(prefix="it-") as state:
        os.environ["INTERCEPT_STATE_DIR"] = state  # the records of all these namespaces
        os.environ["INTERCEPT_BPF_DIR"] = f"{state}/bpf"
        os.mkdir(f"{state}/bpf")
        built()
        with own_pins(Path(state, "bpf")), namespace("bench") as name:
            with Netns.open(path_of(name)) as first:
                apply(first, SETTINGS, backend=EBPF)  # the programs of a node come with its first
            table()
        with own_pins(Path(state, "bpf")):
            traffic.show()
            proxied.show()
        node.show()
        leftovers.show()
    return 0


def table() -> None:
    print(f"{'what':<8}{'backend':<18}{'baseline ms':>12}{'ours ms':>10}{'ratio':>8}{'aim':>8}")
    for (action, backend), (_, aim) in TARGETS.items():
        base, ours = measure(action, backend)
        ratio = ours / base
        print(
            f"{action:<8}{backend:<18}{base:>12.1f}{ours:>10.1f}{ratio:>8.2f}{aim:>8.2f}",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
