"""The ways to program a capture that the behaviour tests compare.

`Command` is the agent as a user runs it, `Applied` the same without the start of an interpreter.
`Direct` does without the agent: it loads what `plan` says with the tools themselves, and so shows
whether a difference is in the rules or in the way they get there.
"""

import atexit
import contextlib
import functools
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from agent.capture import apply
from agent.formats import iptables_save, nft_text
from agent.kernel import netns
from agent.model.plan import CapturePlan, LocalRoute, LoopbackAddress, PolicyRule, Route, plan
from agent.model.ruleset import BUILTIN_CHAINS, Family
from agent.model.settings import parse
from agent.model.state import EBPF
from tests.support.behaviour import Program, Raw
from tests.support.ebpf import built
from tests.support.netns import inside, path_of, run

WITH_RULES = ("iptables-legacy", "iptables-nft", "nftables")
ROOT = Path(__file__).parents[2]
TABLE = "intercept"
STATE = "INTERCEPT_STATE_DIR"


class Direct:
    """Loads the rules of `plan` with iptables-restore or nft, and the routes with ip."""

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self._loaded: dict[str, CapturePlan] = {}

    def apply(self, namespace: str, raw: Raw) -> None:
        """Replace what was loaded before by the capture that `raw` describes."""
        self.clear(namespace)
        wanted = plan(parse(raw))
        self._loaded[namespace] = wanted
        if self._backend == "nftables":
            script = nft_text.render_table(TABLE, wanted.rulesets)
            inside(namespace, "nft", "-f", "-", stdin=script)
        else:
            for family, ruleset in wanted.rulesets.items():
                text = iptables_save.render(ruleset, builtin=False)
                inside(namespace, self._tool(family, "restore"), "--noflush", stdin=text)
        for route in wanted.routes:
            # The kernel takes new addresses on trial, also on lo: for a moment nobody can use them.
            trial = ("nodad",) if isinstance(route, LoopbackAddress) else ()
            inside(namespace, *route.command().split(), *trial)

    def clear(self, namespace: str) -> None:
        """Empty every table: the namespace is the test's own."""
        loaded = self._loaded.pop(namespace, None)
        if loaded is None:
            return
        for route in reversed(loaded.routes):
            inside(namespace, *_undo(route))
        if self._backend == "iptables-legacy":
            for family, ruleset in loaded.rulesets.items():
                empty = "".join(_empty(table.name) for table in ruleset.tables)
                inside(namespace, self._tool(family, "restore"), stdin=empty)
        else:
            inside(namespace, "nft", "flush", "ruleset")

    def _tool(self, family: Family, action: str) -> str:
        variant = self._backend.removeprefix("iptables-")
        return f"{'ip' if family is Family.IPV4 else 'ip6'}tables-{variant}-{action}"


def _empty(table: str) -> str:
    chains = "".join(f":{chain} ACCEPT\n" for chain in BUILTIN_CHAINS[table])
    return f"*{table}\n{chains}COMMIT\n"


def _undo(route: Route) -> tuple[str, ...]:
    ip = ("ip", f"-{route.family.version}")
    match route:
        case PolicyRule(_, mark, table):
            return (*ip, "rule", "del", "fwmark", str(mark), "lookup", str(table))
        case LocalRoute(_, table):
            return (*ip, "route", "flush", "table", str(table))
        case LoopbackAddress(_, address, prefix):
            return (*ip, "addr", "del", f"{address}/{prefix}", "dev", "lo")


class Applied:
    """The agent's use cases `apply` and `remove`, called in this process."""

    def __init__(self, backend: str) -> None:
        self._backend = backend

    def apply(self, namespace: str, raw: Raw) -> None:
        """Run `apply` on the namespace as it is, so that most captures replace another."""
        with netns.Netns.open(path_of(namespace)) as opened, _own_state():
            apply.apply(opened, parse(raw), backend=self._backend)

    def clear(self, namespace: str) -> None:
        with netns.Netns.open(path_of(namespace)) as opened, _own_state():
            apply.remove(opened)


class Command:
    """The agent's own command line: `apply` and `remove`."""

    def __init__(self, backend: str) -> None:
        self._backend = backend

    def apply(self, namespace: str, raw: Raw) -> None:
        """Run `apply` with complete settings: nothing comes from the machine's own files."""
        document = json.dumps({**DEFAULTS, **raw})  # JSON is YAML
        arguments = ("--backend", self._backend, "--settings", "/dev/stdin")
        self._run("apply", "--netns", namespace, *arguments, stdin=document)

    def clear(self, namespace: str) -> None:
        self._run("remove", "--netns", namespace)

    def _run(self, *arguments: str, stdin: str | None = None) -> None:
        search = f"import sys; sys.path.insert(0, {str(ROOT)!r})"
        start = f"{search}; from agent.cli.main import main; sys.exit(main())"
        with _own_state():
            run(sys.executable, "-c", start, *arguments, stdin=stdin)


DEFAULTS: Raw = {
    "proxy_uid": "1337",
    "proxy_gid": "1337",
    "enable_ipv6": False,
    "dns_servers_v4": "",
    "dns_servers_v6": "",
}


@contextlib.contextmanager
def _own_state() -> Iterator[None]:
    """Keep what the agent remembers of the tests' namespaces out of the machine's own state."""
    before = os.environ.get(STATE)
    os.environ[STATE] = _state_dir()
    try:
        yield
    finally:
        os.environ.pop(STATE)
        if before is not None:
            os.environ[STATE] = before


@functools.cache
def _state_dir() -> str:
    """Return a folder that is there while this process runs."""
    path = tempfile.mkdtemp(prefix="it-behaviour-")
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


PROGRAMS: Mapping[str, Callable[[str], Program]] = {
    "direct": Direct,
    "applied": Applied,
    "command": Command,
}
# Read now: the tests run without such variables.
CHOSEN = os.environ.get("INTERCEPT_BEHAVIOUR_PROGRAM", "applied")
BACKENDS = WITH_RULES if CHOSEN == "direct" else (*WITH_RULES, EBPF)


def program(backend: str) -> Program:
    """Return how the tests program a backend; INTERCEPT_BEHAVIOUR_PROGRAM names another way."""
    if backend == EBPF:
        built()
    return PROGRAMS[CHOSEN](backend)
