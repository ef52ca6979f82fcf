"""An explanation for people (one screen) and for machines (one document)."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import groupby

from agent.explain.pod.certificates import expired, is_authority, overdue, title
from agent.explain.pod.expiry import clock
from agent.explain.pod.facts import Facts, Said
from agent.explain.pod.flows import Flow, listener_text, mesh_ports
from agent.explain.pod.identities import container_of, impostors, listed, powerful, proxies
from agent.explain.pod.judge import Explanation
from agent.explain.pod.labels import asked, changes

LABEL_WIDTH = 14
SHOWN_FLOWS = 3  # a direction
SHOWN_VALUES = 8
SHOWN_CERTIFICATES = 3
SHOWN_DIFFERENCES = 3
LESS_IMPORTANT = frozenset({"admin", "debug", "status"})  # ports that only machines are told of

Row = tuple[str, str]


def rows(explanation: Explanation) -> Iterator[Row]:
    """Yield the lines of the page, each with the label that stands before it (empty: the same)."""
    facts = explanation.facts
    yield from _who(facts)
    word = {True: "yes", False: "no", None: "not known"}[explanation.should_be]
    yield "should be", f"{word}: {explanation.why}"
    if facts.pod is not None:
        yield from _labels(facts)
    yield from _loaded(explanation)
    if facts.node or (facts.pod is not None and facts.pod.host_network):
        return
    if explanation.captured:
        yield from _exempt(explanation)
    yield from _listening(facts)
    yield from _processes(explanation)
    yield from _certificates(facts)
    yield from _now(explanation)


def text(label: str, line: str) -> str:
    """Return one line of the page."""
    return f"  {label:<{LABEL_WIDTH}}{plain(line)}".rstrip()


def plain(line: str) -> str:
    """Return a line that does nothing to a terminal: processes name themselves as they like."""
    return "".join(letter if letter.isprintable() else "?" for letter in line)


def _who(facts: Facts) -> Iterator[Row]:
    where = f"{facts.path} (inode {facts.netns[1]})" if facts.netns else "no namespace of its own"
    if facts.pod is not None:
        sandbox = f", sandbox {facts.pod.sandbox[:12]}" if facts.pod.sandbox else ""
        yield "pod", f"{facts.pod.title}{sandbox}"
        if facts.pod.agent is not None:
            backend = f", {facts.pod.agent.backend}" if facts.pod.agent.backend else ""
            yield "agent", f"says: {facts.pod.agent.state}{backend}; {facts.pod.agent.text}"
    yield "namespace", where


def _labels(facts: Facts) -> Iterator[Row]:
    pod = facts.pod
    assert pod is not None
    if pod.created is not None:
        yield "labels", f"at the start ({pod.created.who}): {_given(pod.created)}"
    if pod.now is not None:
        changed = "; ".join(changes(pod)) or ("the same" if pod.created else _given(pod.now))
        yield "" if pod.created else "labels", f"now ({pod.now.who}): {changed}"
    elif pod.created is not None:
        yield "", "now: only the API server knows; give it by --pod-manifest"


def _given(said: Said) -> str:
    return ", ".join(asked(said)) or "nothing of Istio's"


def _loaded(explanation: Explanation) -> Iterator[Row]:
    facts = explanation.facts
    if facts.state is None:
        yield "loaded", "not seen"
        return
    if not explanation.loaded:
        yield "loaded", "nothing of a capture, in any backend"
        return
    label = "loaded"
    for one in explanation.loaded:
        families = " and ".join(one.families)
        yield label, f"{one.backend}, {families}, {one.rules} rules, by {one.owner}: {one.evidence}"
        label = ""
    found = (*facts.differences, *facts.foreign)
    if facts.settings is not None:
        with_what = facts.origin or "its settings"
        yield "", f"compared with {with_what}: " + (_count(found) if found else "in sync")
    for line in found[:SHOWN_DIFFERENCES]:
        yield "", f"  {line}"
    if len(found) > SHOWN_DIFFERENCES:
        more = len(found) - SHOWN_DIFFERENCES
        yield "", f"  ... {more} more: intercept-agent check --netns {facts.target}"


def _count(found: tuple[str, ...]) -> str:
    return f"{len(found)} difference{'s' if len(found) > 1 else ''}"


def _exempt(explanation: Explanation) -> Iterator[Row]:
    parts = []
    for one in explanation.exemptions:
        values = ", ".join(one.values[:SHOWN_VALUES])
        more = len(one.values) - SHOWN_VALUES
        source = explanation.facts.sources.get(one.setting, "")
        source = "" if source == explanation.facts.origin else source
        parts.append(
            f"{one.what} {values}"
            + (f" and {more} more" if more > 0 else "")
            + (f" ({source})" if source else "")
        )
    yield "exempt", "; ".join(parts) or "nothing"
    facts = explanation.facts
    if facts.settings and facts.settings.guarded and not (facts.state and facts.state.enrolment):
        yield "", "nothing more: the standing guard drops what should be redirected and was not"
    dns = "captured" if explanation.captures_dns else "not captured"
    yield "", f"DNS {dns}; UDP other than DNS, ICMP and raw sockets are never captured"


def _listening(facts: Facts) -> Iterator[Row]:
    if facts.listeners is None:
        yield "listening", "not seen"
        return
    there = {
        port: (*facts.listening(port), *facts.listening(port, protocol="udp"))
        for port, purpose in mesh_ports(facts).items()
        if purpose not in LESS_IMPORTANT
    }
    parts = [f"{port} {listener_text(found)}" for port, found in there.items() if found]
    empty = ", ".join(str(port) for port, found in there.items() if not found)
    parts += [f"nobody on {empty}"] if empty else []
    yield "listening", "; ".join(parts)


def _processes(explanation: Explanation) -> Iterator[Row]:
    facts = explanation.facts
    if facts.processes is None:
        yield "processes", "not seen"
        return
    ids = "/".join(str(first) for first, _ in facts.proxy_uids)
    found, own = impostors(facts), proxies(facts)
    only = f"only the proxy: {listed(facts, own)}" if own else "nobody"
    yield f"as UID {ids}", f"besides the proxy: {listed(facts, found)}" if found else only
    yield "NET_ADMIN", listed(facts, powerful(facts)) or "nobody besides the proxy has it"


def _certificates(facts: Facts) -> Iterator[Row]:
    if facts.certificates is None:
        yield "certificates", f"not seen: {facts.no_certificates}"
        return
    if not facts.certificates:
        yield "certificates", "the proxy holds none"
    label = "certificates"
    for one in facts.certificates[:SHOWN_CERTIFICATES]:
        yield label, f"{title(one)}: {clock(one, facts)}"
        label = ""


def _now(explanation: Explanation) -> Iterator[Row]:
    if not explanation.flows:
        yield "now", "what happens to new connections was not seen: the rules could not be read"
    label = "now"
    for direction, group in groupby(explanation.flows, key=lambda flow: flow.direction):
        found = list(group)
        for flow in found[:SHOWN_FLOWS]:
            yield label, f"{direction:<6}{flow.packet}: {flow.result}"
            label = ""
        if len(found) > SHOWN_FLOWS:
            yield "", f"{direction:<6}and {len(found) - SHOWN_FLOWS} more (-o json shows all)"


# --- machines -------------------------------------------------------------------------------------


def to_json(explanation: Explanation) -> dict[str, object]:
    """Return the document. Keys are stable; what was not seen is null."""
    facts = explanation.facts
    return {
        "target": facts.target,
        "netns": _netns(facts),
        "node": bool(facts.node),
        "pod": _pod(facts),
        "captured": explanation.captured,
        "should_be": explanation.should_be,
        "reason": explanation.reason or None,
        "text": explanation.why,
        "summary": explanation.summary,
        "loaded": [asdict(one) for one in explanation.loaded],
        "compared_with": facts.origin or None,
        "differences": list(facts.differences),
        "foreign": list(facts.foreign),
        "exemptions": [
            {**asdict(one), "source": facts.sources.get(one.setting)}
            for one in explanation.exemptions
        ],
        "captures_dns": explanation.captures_dns,
        "listeners": _listeners(facts),
        "processes": _process_lists(facts),
        "certificates": _certificate_list(facts),
        "flows": [flow_json(flow) for flow in explanation.flows],
        "findings": [asdict(finding) for finding in explanation.findings],
        "unseen": list(facts.unseen),
    }


def flow_json(flow: Flow) -> dict[str, object]:
    return {**asdict(flow), "rule": flow.rule or None}


def _netns(facts: Facts) -> dict[str, object] | None:
    if facts.netns is None:
        return None
    return {"path": facts.path, "dev": facts.netns[0], "ino": facts.netns[1]}


def _pod(facts: Facts) -> dict[str, object] | None:
    pod = facts.pod
    if pod is None:
        return None
    return {
        "namespace": pod.namespace,
        "name": pod.name,
        "uid": pod.uid,
        "sandbox": pod.sandbox or None,
        "host_network": pod.host_network,
        "created": _said(pod.created),
        "now": _said(pod.now),
        "changed": list(changes(pod)),
        "agent": asdict(pod.agent) if pod.agent else None,
    }


def _said(said: Said | None) -> Mapping[str, object] | None:
    if said is None:
        return None
    decision = said.decision
    return {
        "who": said.who,
        "labels": dict(said.labels),
        "annotations": dict(said.annotations),
        "captured": decision.captured,
        "reason": decision.reason.value,
        "text": decision.text,
    }


def _listeners(facts: Facts) -> list[dict[str, object]] | None:
    if facts.listeners is None:
        return None
    names = mesh_ports(facts)
    return [
        {
            "protocol": one.socket.protocol,
            "address": str(one.socket.local[0]),
            "port": one.port,
            "mesh": names.get(one.port),
            "uid": one.socket.uid,
            "processes": [{"pid": p.pid, "name": p.name, "uid": p.uid} for p in one.processes],
        }
        for one in facts.listeners
    ]


def _process_lists(facts: Facts) -> dict[str, object] | None:
    if facts.processes is None:
        return None
    return {
        key: [
            {**asdict(process), "container": container_of(facts, process) or None}
            for process in found
        ]
        for key, found in (
            ("proxy", proxies(facts)),
            ("as_proxy", impostors(facts)),
            ("net_admin", powerful(facts)),
        )
    }


def _certificate_list(facts: Facts) -> list[dict[str, object]] | None:
    if facts.certificates is None:
        return None
    return [
        {
            "name": title(one),
            "authority": is_authority(one),
            "valid_from": one.valid_from.isoformat() if one.valid_from else None,
            "expires": one.expires.isoformat(),
            "seconds_left": int(one.seconds_left(facts.now)),
            "expired": expired(one, facts.now),
            "overdue": overdue(one, facts.now),
        }
        for one in facts.certificates
    ]
