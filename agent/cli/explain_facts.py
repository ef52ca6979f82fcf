"""Gathers what an explanation is made of; each part by itself, so that one that fails hides none.

Reads only, and leaves no trace.
"""

import asyncio
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from agent.backends.session import reading
from agent.capture import gate, record
from agent.capture.check import compare
from agent.capture.inputs import Target, settings_for
from agent.capture.observe import hidden, observe
from agent.cli.advice import apply_command
from agent.cli.pod_facts import Found, PodFinder
from agent.cli.pod_lookup import PREFIX
from agent.cli.seeing import Seen
from agent.explain.pod.facts import Facts, Said
from agent.explain.pod.listeners import listeners
from agent.formats import pod as manifests
from agent.kernel import processes, resolvconf
from agent.kernel.netns import Netns, node_reason, open_target
from agent.kernel.topology import read_host
from agent.model import ambient_pod
from agent.model import annotations as names
from agent.model.errors import AgentError, EnvironmentLacks, NamespaceRefused
from agent.model.numbers import ENVOY_ADMIN_PORT
from agent.model.plan import plan
from agent.model.pod import Pod
from agent.model.settings import dump, parse
from agent.model.state import EBPF, NamespaceState
from agent.model.values import SIDECAR
from agent.model.wanted import Known
from agent.proxy import ports
from agent.proxy.admin import Admin

ADMIN_DEADLINE_S = 5.0


def gather(target: str, finder: PodFinder) -> Facts:
    """Return everything that can be seen of a pod or namespace.

    Raises: NamespaceRefused if there is no such pod or namespace.
    """
    named = finder.named(target) if target.startswith(PREFIX) else None
    if target.startswith(PREFIX) and named is None:
        raise NamespaceRefused(_no_pod(target, finder))
    now = datetime.now(UTC)
    if named is not None and named.netns is None:
        if named.pod.host_network:
            return Facts(target=target, pod=named.pod, now=now, unseen=tuple(finder.unseen))
        raise NamespaceRefused(f"{target} has no network namespace: its sandbox has ended")
    netns, is_self = open_target(named.netns if named and named.netns else target)
    with netns:
        found = named or finder.living_in(netns.id) or finder.given()
        facts = Facts(
            target=target,
            path=netns.path,
            netns=(netns.id.dev, netns.id.ino),
            node=node_reason(netns, is_self=is_self) or "",
            pod=found.pod if found else None,
            now=now,
        )
        return _Reader(netns, facts, found).read(finder.unseen)


def _no_pod(target: str, finder: PodFinder) -> str:
    namespace, slash, name = target.removeprefix(PREFIX).partition("/")
    if not (namespace and slash and name):
        return f"{target} is not a pod: write {PREFIX}NAMESPACE/NAME"
    if not finder.asked:
        unseen = "; ".join(finder.unseen)
        return f"{target} cannot be looked up: {unseen}; `intercept-agent run` starts the agent"
    return f"there is no pod {name} of the namespace {namespace} on this node"


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Raw settings that a namespace should follow, and who says so."""

    raw: Mapping[str, object]
    origin: str


class _Reader:
    """Reads one namespace."""

    def __init__(self, netns: Netns, facts: Facts, found: Found | None) -> None:
        self._netns = netns
        self._facts = facts
        self._found = found
        self._seen = Seen()
        self._record = self._seen.part("the record", lambda: record.load(netns))

    def read(self, unseen: list[str]) -> Facts:
        raw = self._settings()
        self._rules()
        backend = EBPF if self._facts.backend == EBPF else "auto"
        applies = apply_command(self._facts.target, raw, backend)
        self._facts = replace(self._facts, applies=applies)
        host = self._seen.part("addresses and routes", lambda: read_host(self._netns))
        self._facts = replace(self._facts, host=host, name_servers=self._name_servers())
        self._processes()
        self._certificates()
        if self._facts.state is None and self._facts.pod is None and self._facts.listeners is None:
            if os.geteuid():  # nothing at all could be seen, and for one reason
                raise EnvironmentLacks(
                    "explain enters the namespace, which needs root; run this as root"
                )
            raise EnvironmentLacks("; ".join(self._seen.unseen))
        return replace(self._facts, unseen=(*unseen, *self._seen.unseen))

    # --- what should be ---------------------------------------------------------------------------

    def _wanted(self) -> _Wanted | None:
        """Return the settings by who decides them: the agent, the pod, or what was applied here."""
        if self._found is not None and self._found.settings is not None:
            return _Wanted(self._found.settings, "what the running agent keeps it to")
        said = _read_at_the_start(self._facts)
        if said is not None:
            raw = said.decision.settings
            return None if raw is None else _Wanted(raw, "the pod's annotations")
        if self._record is None or not self._record.known().plans:
            return None
        return _Wanted(dict(self._record.settings), "what was applied here")

    def _settings(self) -> Mapping[str, object]:
        """Note the settings that should be in force, and return them as given."""
        wanted = self._wanted()
        raw = wanted.raw if wanted else manifests.DEFAULTS
        if self._record is not None:  # a guard that stands here is no matter of what is captured
            raw = {"guard": self._record.settings.get("guard", "off"), **raw}
        facts = replace(
            self._facts,
            recorded=str(record.file_of(self._netns)) if self._record is not None else "",
        )
        if wanted is not None:
            target = Target(self._netns, facts.path)
            facts = replace(
                facts,
                settings=self._seen.part("settings", lambda: settings_for(raw, target)),
                origin=wanted.origin,
                sources=_sources(facts, wanted),
            )
        self._facts = facts
        return raw

    # --- what is ----------------------------------------------------------------------------------

    def _rules(self) -> None:
        seen = self._seen.part("the loaded rules", self._observe)
        if seen is None:
            return
        state, unreadable = seen
        self._facts = replace(self._facts, state=replace(state, unreadable=unreadable))
        settings = self._facts.settings
        if settings is None:
            return
        known = self._record.known() if self._record is not None else Known()
        applied = gate.as_applied(settings, state, self._record)
        report = self._seen.part(
            "what differs", lambda: compare(state, plan(applied), "auto", known, applied)
        )
        if report is not None:
            self._facts = replace(
                self._facts,
                backend=report.backend,
                differences=tuple(difference.line() for difference in report.differences),
                foreign=report.foreign,
            )

    def _observe(self) -> tuple[NamespaceState, tuple[str, ...]]:
        with reading(self._netns) as session:
            state = observe(session)
            return state, (*state.unreadable, *hidden(session, state))

    def _name_servers(self) -> tuple[str, ...]:
        found = self._seen.part(
            "the name servers", lambda: resolvconf.servers(self._facts.target, self._netns.id)
        )
        return found or ()

    def _processes(self) -> None:
        living = self._seen.part("processes", lambda: processes.living_in(self._netns))
        if living is not None and living.hidden and os.geteuid():
            self._seen.unseen.append(
                f"{living.hidden} processes of other users may live here too; root sees them"
            )
        found = living.found if living is not None else None
        self._facts = replace(self._facts, processes=found)
        here = self._seen.part("listeners", lambda: listeners(self._netns, self._facts))
        self._facts = replace(self._facts, listeners=here)

    def _certificates(self) -> None:
        async def connect() -> socket.socket:
            return ports.connect(self._netns, ENVOY_ADMIN_PORT)

        admin = Admin(connect, f"port {ENVOY_ADMIN_PORT}", ADMIN_DEADLINE_S)
        try:
            found = asyncio.run(admin.certificates())
        except (AgentError, OSError) as error:
            self._facts = replace(self._facts, no_certificates=str(error))
        else:
            self._facts = replace(self._facts, certificates=found)


def _read_at_the_start(facts: Facts) -> Said | None:
    """Return the annotations that a capture follows: a running pod keeps those it was made with."""
    pod = facts.pod
    return (pod.created or pod.now) if pod else None


def _sources(facts: Facts, wanted: _Wanted) -> dict[str, str]:
    """Return where each setting stands that somebody gave."""
    said = _read_at_the_start(facts)
    mode = str(wanted.raw.get("mode", SIDECAR))
    if said is None:
        defaults = dump(parse({"mode": mode}))
        given = {key: value for key, value in wanted.raw.items() if value != defaults.get(key)}
        return dict.fromkeys(given, wanted.origin)
    whom = Pod(namespace="", name="", labels=said.labels, annotations=said.annotations)
    of_pod = names.given if mode == SIDECAR else ambient_pod.given
    return {one.key: one.source for one in of_pod(whom)}
