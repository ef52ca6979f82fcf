"""Watch the connections of pods as they are made: who dials whom, and what becomes of it.

Without POD|NS these are the connections of every captured namespace of the node. Nothing is
changed, and nothing is left behind.
"""

import argparse
import contextlib
import json
import math
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial

from agent.cli import output
from agent.cli.agent_client import add_agent_options
from agent.cli.configuration import configuration
from agent.cli.pod_lookup import meant, netns_of, titles
from agent.flows import render
from agent.flows.event import Event, Lost, Ready
from agent.flows.fate import Became, Flow
from agent.flows.query import Query
from agent.flows.space import Space
from agent.flows.spaces import Spaces
from agent.flows.watching import Told, Watch
from agent.kernel import netns
from agent.model.errors import AgentError, EnvironmentLacks, InvalidSettings
from agent.model.values import MAX_ID, MAX_PORT, shown, within
from agent.node import config

EXAMPLES = """examples:
  intercept-agent flows                                every captured pod of the node
  intercept-agent flows shop/web --uid 1000
  intercept-agent flows web --port 443,8443 --bypassed
  intercept-agent flows -o json --for 60               one JSON document a line, for a minute

what became of a connection:
  proxied      it was given to the proxy, on the port that is said
  exempt       a setting leaves it alone, which is named
  refused      by the gate (nobody listens where the capture sends it), the guard, or a rule
  bypassed     it passed the proxy by, and the capture should not have let it
  uncaptured   nothing captures the namespace
"""
LOOK_AGAIN_S = 2.0
MOST_VALUES = 64
COLOURS = {
    Became.PROXIED: output.GREEN,
    Became.REFUSED: output.YELLOW,
    Became.BYPASSED: output.RED,
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target",
        metavar="POD|NS",
        nargs="?",
        help="NAMESPACE/NAME, or a namespace as --netns of the other commands takes it",
    )
    parser.add_argument("--uid", metavar="U,U", help="only of processes of these users of the pod")
    parser.add_argument("--port", metavar="P,P", help="only to these ports, as they were dialled")
    parser.add_argument("--bypassed", action="store_true", help="only what passed the proxy by")
    parser.add_argument("--for", dest="seconds", metavar="SECONDS", help="end after so long")
    parser.add_argument("--count", metavar="N", help="end after so many connections")
    add_agent_options(parser)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wanted:
    """What the options ask for."""

    uids: tuple[int, ...]
    ports: tuple[int, ...]
    bypassed: bool
    seconds: float
    count: float

    def shows(self, flow: Flow) -> bool:
        return (
            (not self.uids or flow.uid in self.uids)
            and (not self.ports or (flow.destination or (None, 0))[1] in self.ports)
            and (not self.bypassed or flow.became is Became.BYPASSED)
        )


def run(arguments: argparse.Namespace) -> int:
    wanted = _wanted(arguments)
    known = configuration(arguments.config, arguments.socket)
    if os.geteuid() != 0:
        raise EnvironmentLacks("flows loads eBPF programs, which needs root; run this as root")
    names = partial(titles, known)
    only = _space(arguments.target, known) if arguments.target else None
    with Spaces(names, only) as spaces, _stopping() as wake:
        query = Query(
            # Without a target each pod may have a user namespace of its own.
            uids=tuple(only.outside(uid) for uid in wanted.uids) if only else (),
            ports=wanted.ports,
            netns=only.cookie if only else None,
        )
        with Watch(query) as watch:
            _Live(watch, spaces, wanted, as_json=arguments.output == "json").run(wake)
    return 0


def _space(target: str, known: config.Config) -> Space:
    """Raises: NamespaceRefused."""
    name = meant(target)
    found, is_self = netns.open_target(netns_of(name, known))
    with contextlib.ExitStack() as stack:
        stack.enter_context(found)
        netns.refuse_node(found, is_self=is_self)
        space = Space(found, titles(known).get(found.id, target))
        stack.pop_all()
        return space


# --- options --------------------------------------------------------------------------------------


def _wanted(arguments: argparse.Namespace) -> _Wanted:
    """Raises: InvalidSettings with every mistake."""
    problems: list[str] = []
    wanted = _Wanted(
        uids=_numbers("--uid", arguments.uid, 0, MAX_ID, problems),
        ports=_numbers("--port", arguments.port, 1, MAX_PORT, problems),
        bypassed=arguments.bypassed,
        seconds=_seconds(arguments.seconds, problems),
        count=(*_numbers("--count", arguments.count, 1, MAX_ID, problems), math.inf)[0],
    )
    if problems:
        raise InvalidSettings(tuple(problems))
    return wanted


def _numbers(
    option: str, text: str | None, low: int, high: int, problems: list[str]
) -> tuple[int, ...]:
    if text is None:
        return ()
    words = text.split(",")
    if option == "--count" and len(words) > 1:
        problems.append(f"{option} {text!r} is not one number")
    if len(words) > MOST_VALUES:
        problems.append(f"{option}: {len(words)} values, and {MOST_VALUES} are the most")
        return ()
    found = []
    for word in words:
        if (number := within(word, low, high)) is not None:
            found.append(number)
        else:
            problems.append(f"{option} {shown(word)} is not a number from {low} to {high}")
    return tuple(dict.fromkeys(found))


def _seconds(text: str | None, problems: list[str]) -> float:
    if text is None:
        return math.inf
    with contextlib.suppress(ValueError):
        if math.isfinite(found := float(text)) and found > 0:
            return found
    problems.append(f"--for {text!r} is not a number of seconds above 0")
    return math.inf


# --- the view -------------------------------------------------------------------------------------


@contextlib.contextmanager
def _stopping() -> Iterator[int]:
    """Yield what becomes readable when somebody asks to stop: SIGTERM, or Ctrl-C, the usual way."""
    reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    kept = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    before = signal.set_wakeup_fd(writing)
    for each in kept:
        signal.signal(each, lambda *_: None)
    try:
        yield reading
    finally:
        for each, handler in kept.items():
            signal.signal(each, handler)
        signal.set_wakeup_fd(before)
        os.close(reading)
        os.close(writing)


class _Live:
    """Shows what is told until there is a reason to end."""

    def __init__(self, watch: Watch, spaces: Spaces, wanted: _Wanted, *, as_json: bool) -> None:
        self._watch = watch
        self._spaces = spaces
        self._wanted = wanted
        self._json = as_json
        self._shown = 0
        self._begun = False
        self._looked = -math.inf

    def run(self, wake: int) -> None:
        """Raises: EnvironmentLacks if the programs cannot be compiled, loaded or kept."""
        end = math.inf
        while not _stopped(wake) and (now := time.monotonic()) < end:
            if now - self._looked >= LOOK_AGAIN_S and not self._look():
                break
            for told in self._watch.read(min(LOOK_AGAIN_S, end - now), wake):
                if isinstance(told, Ready) and not self._begun:
                    end = self._begin()
                if self._tell(told):
                    return
        for told in self._watch.rest():
            if self._tell(told) or _stopped(wake):
                return

    def _tell(self, told: Told) -> bool:
        """Show what was told; True once that was all that is wanted."""
        if isinstance(told, Lost):
            self._say_lost(told.count)
        elif isinstance(told, Event):
            self._show(told)
        return self._shown >= self._wanted.count

    def _begin(self) -> float:
        """Say that it begins; return when it is to end."""
        self._begun = True
        output.say(f"watching {output.count(len(self._spaces), 'namespace')}; Ctrl-C ends it")
        if not self._json:
            print(output.paint(render.heading(), output.BOLD), flush=True)
        return time.monotonic() + self._wanted.seconds

    def _look(self) -> bool:
        """Follow pods that come and go; False if the only one is gone."""
        change = self._spaces.look()
        for space in change.come[:1]:
            with contextlib.suppress(AgentError):
                space.prepare()
        come = [(space.cookie, space.netns.path) for space in change.come]
        if come or change.gone or self._looked == -math.inf:
            self._watch.watch(come, change.gone)
        self._looked = time.monotonic()
        if change.gone and self._spaces.is_one:
            output.say("the namespace is gone")
            return False
        return True

    def _show(self, event: Event) -> None:
        space = self._spaces.of(event.netns)
        if space is None:  # it has just gone
            return
        try:
            flow = space.flow(event)
        except (AgentError, OSError):
            self._say_lost(1)
            return
        if flow is None or not self._wanted.shows(flow):
            return
        self._shown += 1
        ago_ns = time.monotonic_ns() - flow.at_ns
        at = datetime.fromtimestamp(time.time() - ago_ns / 1e9, UTC)
        if self._json:
            document = render.to_json(flow, space.title, space.netns.path, at)
            print(json.dumps(document), flush=True)
            return
        colour = COLOURS.get(flow.became)
        text = output.paint(flow.text, colour) if colour else flow.text
        print(render.row(flow, space.title, at, text), flush=True)

    def _say_lost(self, count: int) -> None:
        if self._json:
            print(json.dumps({"lost": count}), flush=True)
        else:
            output.warn((f"{output.count(count, 'connection')} not shown: too many at once",))


def _stopped(wake: int) -> bool:
    with contextlib.suppress(BlockingIOError):
        return bool(os.read(wake, 64))
    return False
