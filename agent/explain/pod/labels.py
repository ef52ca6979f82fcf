"""What a pod's labels and annotations say, then and now, and what follows from a change. Pure."""

from collections.abc import Iterator, Mapping

from agent.explain.finding import Finding, Severity
from agent.explain.pod.facts import Facts, PodFacts, Said
from agent.model import ambient_pod
from agent.model import annotations as names
from agent.model.pod import PROXY
from agent.model.values import shown

# What asks for a sidecar or for its capture; everything else of Istio's is about something else.
ASKING = frozenset(
    {
        *names.CAPTURE_NAMES,
        names.DATAPLANE_MODE,
        *ambient_pod.SWITCHES,
        ambient_pod.REDIRECTION,
        names.REVISION,
        names.TEMPLATES,
    }
)
NAMED = "named"  # the reason of a namespace that somebody captured by name


def wanted(facts: Facts) -> tuple[bool | None, str, str]:
    """Return whether the namespace should be captured, the reason in one word, and in words."""
    pod = facts.pod
    if facts.node:
        return False, "node", facts.node
    if pod is not None and pod.decision is not None:
        decision = pod.decision
        return decision.captured, decision.reason.value, decision.text
    if pod is not None and pod.agent is not None and facts.settings is not None:
        return True, NAMED, pod.agent.text
    if facts.settings is not None:
        return True, NAMED, "somebody captured it by `intercept-agent apply`, which is on record"
    return None, "", "no pod is known for this namespace, and this agent has not captured it"


def changes(pod: PodFacts) -> tuple[str, ...]:
    """Return what differs between the pod at the making of its sandbox and now, as sentences."""
    if pod.created is None or pod.now is None:
        return ()
    return (
        *_changed("label", pod.created.labels, pod.now.labels),
        *_changed("annotation", pod.created.annotations, pod.now.annotations),
    )


def _changed(kind: str, before: Mapping[str, str], now: Mapping[str, str]) -> Iterator[str]:
    for name in sorted(ASKING & (before.keys() | now.keys())):
        old, new = before.get(name), now.get(name)
        # Of the injector's own annotation only its presence means something.
        if old == new or (name == names.STATUS and old is not None and new is not None):
            continue
        if old is None:
            yield f"{kind} {name} is {shown(new)} now and was not there when the pod was made"
        elif new is None:
            yield f"{kind} {name} was {shown(old)} when the pod was made and is gone now"
        else:
            yield f"{kind} {name} was {shown(old)} when the pod was made and is {shown(new)} now"


def asked(said: Said) -> tuple[str, ...]:
    """Return the labels and annotations of a pod that matter here, `name=value` each."""
    return tuple(
        _asked(name, where[name])
        for where in (said.labels, said.annotations)
        for name in sorted(ASKING & where.keys())
    )


def _asked(name: str, value: str) -> str:
    if name == names.STATUS:
        added = ", ".join(sorted(names.injected_names(value) or ())) or "nothing it names"
        return f"{name} (the injector added {added})"
    return f"{name}={shown(value)}"


def findings(facts: Facts, *, captured: bool) -> Iterator[Finding]:
    """Return what a change after the start means, what the agent says, and odd annotations."""
    pod = facts.pod
    if pod is None:
        return
    changed = changes(pod)
    still = pod.decision is not None and pod.decision.captured
    if changed and captured and still and not pod.followed:
        yield Finding(
            kind="stale-capture",
            severity=Severity.WARNING,
            seen="; ".join(changed),
            means="labels and annotations are read when a pod is made: this one has its sidecar "
            "and its capture until it ends, and its traffic goes through the proxy",
            fix=f"kubectl -n {pod.namespace} delete pod {pod.name}",
        )
    elif changed:
        yield Finding(
            kind="changed-since",
            severity=Severity.INFO,
            seen="; ".join(changed),
            means="the running agent goes by what they are now"
            if pod.followed
            else "labels and annotations are read when a pod is made",
        )
    if pod.agent is not None and pod.agent.state in ("drifted", "failed"):
        yield Finding(
            kind=f"agent-{pod.agent.state}",
            severity=Severity.WARNING,
            seen=f"the running agent says: {pod.agent.state}: {pod.agent.text}",
            means="it tries again by itself",
            fix="intercept-agent events",
        )
    for sentence in pod.decision.warnings if pod.decision else ():
        yield Finding(kind="odd-annotation", severity=Severity.INFO, seen=sentence)


def proxy_command(facts: Facts) -> str:
    """Return the command that shows why the proxy does not run; nothing without a pod."""
    pod = facts.pod
    return f"kubectl -n {pod.namespace} logs {pod.name} -c {PROXY}" if pod else ""
