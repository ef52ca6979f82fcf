"""Answers the CNI plugin: what an ADD, DEL, CHECK, GC or STATUS means for a pod of this node."""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from agent.formats import kube
from agent.model.decision import Decision, decide
from agent.model.errors import AgentError
from agent.model.pod import Pod
from agent.node.events import Events
from agent.node.reconciler import Reconciler
from agent.node.roster import PLUGIN, Roster, pod_key, said_by, with_facts
from agent.node.source import PodRecord
from agent.observe.metrics import Metrics

# CNI error codes; those from 100 on are a plugin's own.
BAD_CONTENT, TRY_LATER, REFUSED, NOT_IN_SYNC = 6, 11, 101, 102
# The list of a GC: the name in the specification, and the one that libcni sends besides.
ATTACHMENTS = ("cni.dev/valid-attachments", "cni.dev/attachments")
# What runtimes call a pod's interface to its own network.
MAIN = "eth0"

Environment = Mapping[str, str]
Conf = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Refusal:
    """What the plugin is to print as a CNI error."""

    code: int
    message: str


class CniCalls:
    """The agent's side of the plugin."""

    def __init__(
        self,
        roster: Roster,
        reconciler: Reconciler,
        events: Events,
        metrics: Metrics,
        *,
        seen: Callable[[], None] = lambda: None,
    ) -> None:
        """`seen` is called whenever a pod has started or ended."""
        self._roster = roster
        self._reconciler = reconciler
        self._events = events
        self._metrics = metrics
        self._seen = seen

    async def answer(self, request: Mapping[str, Any]) -> object:
        """Return an empty document for yes, or the error that the plugin is to print."""
        started = time.monotonic()
        verb = str(request.get("command"))
        verbs = {
            "ADD": self._add,
            "DEL": self._delete,
            "CHECK": self._check,
            "GC": self._gc,
            "STATUS": self._status,
        }
        environment, conf = (_mapping(request.get(key)) for key in ("environment", "config"))
        try:
            if verb not in verbs:
                raise AgentError(f"{verb} is no CNI verb")
            refusal = await verbs[verb]({k: str(v) for k, v in environment.items()}, conf)
        except AgentError as error:
            refusal = Refusal(TRY_LATER, str(error))
        result = "refused" if refusal else "done"
        self._metrics.cni_seconds.labels(verb, result).observe(time.monotonic() - started)
        return {"error": asdict(refusal)} if refusal else {}

    async def _add(self, environment: Environment, conf: Conf) -> Refusal | None:
        """Capture the pod before its first process runs. Asked again, it changes nothing."""
        self._roster.begin(environment.get("CONTAINERID", ""))
        pod, decision = await self._decide(environment, conf)
        if decision.refuse:
            self._events.add("refused", pod.title, decision.message)
            return Refusal(REFUSED, decision.message)
        if not decision.captured:
            return None
        kept = self._roster.describe(PLUGIN, self._record(environment, conf, pod))
        wish = kept.wish
        await self._reconciler.enrol(kept)
        await asyncio.to_thread(self._roster.memory.keep, wish)
        self._seen()
        return None

    def _record(self, environment: Environment, conf: Conf, pod: Pod) -> PodRecord:
        sandbox_id = environment.get("CONTAINERID", "")
        network = self._network_of(self._key(pod, environment), sandbox_id)
        return PodRecord(
            namespace=pod.namespace,
            name=pod.name,
            uid=self._uid(pod, environment),
            sandbox_id=sandbox_id,
            netns=environment.get("NETNS") or None,
            annotations=pod.annotations or {},
            network=network or str(conf.get("name", "")),
        )

    def _key(self, pod: Pod, environment: Environment) -> str:
        return pod_key(PLUGIN, pod.namespace, pod.name, self._uid(pod, environment))

    def _uid(self, pod: Pod, environment: Environment) -> str:
        """Return what tells a call's pod from others: its container, where Kubernetes has no name.

        Where the runtime does not pass the UID, it is that of the pod whose sandbox this is, if
        somebody told of it since.
        """
        container = environment.get("CONTAINERID", "")
        if pod.uid or not (pod.namespace or pod.name):
            return pod.uid or container
        this = (pod.namespace, pod.name, container)
        wishes = (kept.wish for kept in self._reconciler.pods.values())
        return next((w.uid for w in wishes if (w.namespace, w.name, w.sandbox_id) == this), "")

    def _network_of(self, key: str, sandbox_id: str) -> str:
        """Return what was noted at the first ADD: a further interface may be of another network."""
        known = self._reconciler.pods.get(key)
        if known is None or known.wish.sandbox_id != sandbox_id:
            return ""
        return known.wish.network

    async def _delete(self, environment: Environment, conf: Conf) -> Refusal | None:
        """Forget the pod; its rules end with its namespace. A pod that is not known is fine.

        Runtimes repeat the DEL of a sandbox after the same pod has got a new one: that one stays.
        """
        sandbox_id = environment.get("CONTAINERID", "")
        if environment.get("IFNAME") == MAIN:  # of a further interface the pod may live on
            self._roster.end(sandbox_id)
        key = self._key(kube.cni(environment.get("ARGS", "")), environment)
        known = self._reconciler.pods.get(key)
        if known is None or known.wish.sandbox_id == sandbox_id:
            await self._roster.forget(key)
        self._seen()
        return None

    async def _check(self, environment: Environment, conf: Conf) -> Refusal | None:
        pod, decision = await self._decide(environment, conf)
        if not decision.captured:
            return None
        record = self._record(environment, conf, pod)
        found = await self._reconciler.check(self._roster.wish_for(PLUGIN, record))
        if found.in_sync:
            return None
        return Refusal(NOT_IN_SYNC, f"{pod.title} is not captured as it should be: {found.text}")

    async def _gc(self, environment: Environment, conf: Conf) -> Refusal | None:
        """Forget the pods of this network that the runtime does not list any more.

        A pod that the runtime's own list (CRI) shows is left to that one.
        """
        given = [conf[key] for key in ATTACHMENTS if key in conf]
        if not given:
            return None  # without a list nothing is known to be gone
        listed = [] if given[0] is None else given[0]  # Go's empty list
        if not isinstance(listed, list) or not all(isinstance(x, Mapping) for x in listed):
            return Refusal(BAD_CONTENT, f"{ATTACHMENTS[0]}: a list of attachments is expected")
        valid = {str(item.get("containerID")) for item in listed}
        for key, pod in list(self._reconciler.pods.items()):
            wish = pod.wish
            ours = wish.source == "cni" and wish.network == conf.get("name")
            if ours and wish.sandbox_id not in valid:
                await self._roster.forget(key)
        return None

    async def _status(self, environment: Environment, conf: Conf) -> Refusal | None:
        return None  # whoever answers can do an ADD

    async def _decide(self, environment: Environment, conf: Conf) -> tuple[Pod, Decision]:
        """Decide about the pod of a call, by the failure policy of that call's configuration.

        What the runtime passed is enough where it leaves nothing open. The API server is asked for
        the rest, once, and only if it has not told of the pod before.

        Raises: InvalidSettings if the call says nothing that can be understood.
        """
        runtime = _mapping(conf.get("runtimeConfig"))
        annotations = runtime.get(kube.CNI_ANNOTATIONS)
        if annotations is None and kube.CNI_ANNOTATIONS in runtime:
            annotations = {}  # null is what containerd makes of a pod that has none
        pod = kube.cni(environment.get("ARGS", ""), annotations)
        is_open = conf.get("failurePolicy") == "open"
        policy = replace(self._roster.policy, failure_policy="open" if is_open else "closed")
        facts = self._roster.facts
        namespace = facts.namespace(pod.namespace)
        decision = decide(with_facts(pod, facts), namespace, policy)
        if decision.certain:
            return pod, decision
        known = await facts.look_up(pod.namespace, pod.name, pod.uid)
        return pod, decide(said_by(known, pod), namespace, policy)


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
