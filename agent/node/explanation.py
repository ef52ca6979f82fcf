"""Why a pod is captured or not and how, what its namespace holds, and what decided each of it."""

from collections.abc import Mapping
from dataclasses import asdict

from agent.model import ambient_pod, annotations
from agent.model.errors import AgentError
from agent.model.pod import AUTO, parsable
from agent.model.settings import dump, parse
from agent.model.values import AMBIENT
from agent.node.config import Config
from agent.node.pod import Pod
from agent.node.reconciler import Reconciler
from agent.node.roster import Entry, Roster, decision_for, model_of, with_facts

DEFAULT = "default"
CONFIGURATION = "the agent's configuration"
IPV6, SERVERS = "enable_ipv6", "dns_servers"


async def explain(
    pod: Pod, roster: Roster, reconciler: Reconciler, config: Config
) -> dict[str, object]:
    """Return one pod's explanation as plain values; it looks into the namespace."""
    entry = roster.entries.get(pod.wish.key)
    found: dict[str, object] = {
        "decision": _decision(entry, pod, roster),
        "mode": _choice("mode", config.mode, CONFIGURATION),
        "backend": _backend(config.backend, pod.backend),
    }
    if pod.wish.settings is not None:
        settings = reconciler.with_defaults(pod.wish.settings)
        of_the_node = dict.fromkeys(settings.keys() - pod.wish.settings.keys(), CONFIGURATION)
        by = of_the_node | _by(pod.wish.settings, entry, roster)
        found["settings"] = _settings(settings, by)
        found["findings"] = await _findings(reconciler, pod)
    return {"pod": pod.row(), **found}  # at last, since looking can change how the pod stands


def _decision(entry: Entry | None, pod: Pod, roster: Roster) -> dict[str, object]:
    decision = decision_for(entry.record, roster.policy, roster.facts) if entry else None
    if decision is None:  # the configuration says it, or the plugin did before a restart
        captured = pod.wish.settings is not None
        said = {"captured": captured, "reason": pod.wish.reason, "text": pod.wish.text}
        return {**said, "certain": True, "problems": [], "warnings": []}
    return {
        "captured": decision.captured,
        "reason": decision.reason.value,
        "text": decision.text,
        "certain": decision.certain,
        "problems": list(decision.problems),
        "warnings": list(decision.warnings),
    }


def _backend(asked: str, used: str | None) -> dict[str, str]:
    by = CONFIGURATION
    if asked == AUTO:
        by = "auto: what the namespace already uses, or else the first that the node can do"
    return _choice("backend", used or asked, by)


def _settings(raw: Mapping[str, object], by: dict[str, str]) -> list[dict[str, str]]:
    values = dump(parse(parsable(raw)))
    values |= {key: value for key, value in raw.items() if key not in values}  # dns_servers
    for key in _found_out(raw, values):
        values[key], by[key] = AUTO, "found out in its namespace"
    return [_choice(key, _text(value), by.get(key, DEFAULT)) for key, value in values.items()]


def _found_out(raw: Mapping[str, object], values: Mapping[str, object]) -> tuple[str, ...]:
    """Return the settings that the worker finds out in the namespace."""
    found = () if raw.get(IPV6, AUTO) != AUTO else (IPV6,)
    servers = any(key.startswith(SERVERS) for key in raw)
    if servers or not values["redirect_dns"] or values["capture_all_dns"]:
        return found
    return (*found, f"{SERVERS}_v4", f"{SERVERS}_v6")


def _by(raw: Mapping[str, object], entry: Entry | None, roster: Roster) -> dict[str, str]:
    if entry is None:
        return dict.fromkeys(raw, "what the plugin was told when the pod started")
    if entry.record.settings is not None:
        return dict.fromkeys(raw, "static in the agent's configuration")
    found = with_facts(model_of(entry.record), roster.facts)
    if raw.get("mode") == AMBIENT:
        return ambient_pod.origins(found, roster.policy.ambient)
    return annotations.origins(found, roster.policy.defaults)


async def _findings(reconciler: Reconciler, pod: Pod) -> dict[str, object]:
    try:
        found = asdict(await reconciler.check(pod.wish))
    except AgentError as error:
        return {"error": str(error)}
    del found["backend"], found["bare"]
    return found


def _choice(name: str, value: str, by: str) -> dict[str, str]:
    return {"name": name, "value": value, "by": by}


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
