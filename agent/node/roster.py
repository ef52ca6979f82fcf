"""Which pods are on the node by what every source says, and what is decided about each."""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from agent.model.annotations import init_names
from agent.model.decision import Decision, Reason, decide
from agent.model.pod import Pod as ModelPod
from agent.model.pod import Policy
from agent.model.remarks import risks
from agent.node.memory import Memory
from agent.node.pod import Pod, Wish
from agent.node.reconciler import Reconciler
from agent.node.source import (
    KUBERNETES,
    NOTHING_KNOWN,
    STATIC,
    Changed,
    Described,
    Facts,
    Gone,
    PodRecord,
    Snapshot,
    Update,
)
from agent.node.static_source import identity_of

log = logging.getLogger(__name__)

PLUGIN = "cni"
# Sandboxes that are remembered: a runtime lists one for seconds after its network ended.
ENDED = 1024


@dataclass(frozen=True, slots=True)
class Entry:
    """One pod as a source last described it."""

    source: str
    record: PodRecord


class Roster:
    """Turns what sources say into wishes for the reconciler. For one event loop."""

    def __init__(
        self,
        reconciler: Reconciler,
        memory: Memory,
        policy: Policy,
        *,
        changed: Callable[[], None] = lambda: None,
        turned: Callable[[Pod], None] = lambda _: None,
        tell: Callable[[str, str, str], object] = lambda *_: None,
    ) -> None:
        """`changed` is called whenever a pod was described anew or is gone, `turned` when by
        the API server's word a pod is not to be captured any more, or is again, and `tell` with
        kind, pod and message of what people should know."""
        self.entries: dict[str, Entry] = {}
        self.policy = policy
        self.facts: Facts = NOTHING_KNOWN
        self.memory = memory
        self._reconciler = reconciler
        self._changed = changed
        self._turned = turned
        self._tell = tell
        self._remarks: dict[str, set[tuple[str, str]]] = {}
        self._forgetting: set[asyncio.Task[None]] = set()
        self._ended: deque[str] = deque(maxlen=ENDED)

    async def remember(self) -> None:
        """Keep the pods that only the plugin told of before the agent was started."""
        for wish in await asyncio.to_thread(self.memory.load):
            self._reconciler.want(wish).announced = True

    def hear(self, source: str, update: Update) -> None:
        """Take in what a source says of the pods of the node."""
        if isinstance(update, Changed):
            if update.pod.sandbox_id not in self._ended:
                self.describe(source, update.pod)
        elif isinstance(update, Gone):
            self._gone(source, pod_key(source, *update.key))
        elif isinstance(update, Described):
            self._decide_about(update)
        elif isinstance(update, Snapshot):
            keep = {pod_key(source, *key) for key in update.unknown}
            for record in update.pods:
                if record.sandbox_id in self._ended:
                    continue
                keep.add(self.describe(source, record).wish.key)
            for key, known in list(self._reconciler.pods.items()):
                # What the plugin told first becomes the runtime's with its first list.
                if known.wish.source == source and key not in keep:
                    self._gone(source, key)

    def describe(self, source: str, record: PodRecord) -> Pod:
        """Decide about one pod and have it kept so."""
        wish = self._as_known(self.wish_for(source, record))
        self.entries[wish.key] = Entry(source, record)
        known = wish.key in self._reconciler.pods
        pod = self._reconciler.want(wish)
        self._tell_remarks(wish, record, known=known)
        self._changed()
        return pod

    def _as_known(self, wish: Wish) -> Wish:
        """Return a wish with what was told of the same sandbox and is not told now.

        A plugin is called without the UID of its pod by runtimes for Docker, which in turn do not
        tell where a namespace is.
        """
        pods = self._reconciler.pods
        nameless = pod_key(wish.source, wish.namespace, wish.name, "")
        known = pods.get(wish.key) or pods.get(nameless)
        if known is None or known.wish.sandbox_id != wish.sandbox_id:
            return wish
        if wish.key not in pods:
            self._reconciler.rename(nameless, wish.key)
            self.entries.pop(nameless, None)
            self.memory.drop(nameless)
        return replace(wish, netns=known.wish.netns) if wish.netns is None else wish

    def _tell_remarks(self, wish: Wish, record: PodRecord, *, known: bool) -> None:
        """Tell what is odd about a pod that the API server knows, once of each thing."""
        said = self.facts.pod(wish.namespace, wish.name, wish.uid)
        decision = decision_for(record, self.policy, self.facts)
        if decision is None or (said is None and not decision.refuse):
            return
        found = {("remark", sentence) for sentence in decision.warnings if said}
        if said is not None and decision.settings is not None:
            ways = risks(said, decision.settings)
            found = {("bypass-risk", way) for way in ways} | {f for f in found if f[1] not in ways}
        elif decision.refuse:
            found.add(("refused", decision.text))
        elif decision.reason is Reason.NAMESPACE_LEFT and not known:
            found.add(("bypass-risk", decision.text))
        told = self._remarks.setdefault(wish.key, set())
        for kind, sentence in sorted(found - told):
            self._tell(kind, wish.label, sentence)
        told |= found

    def wish_for(self, source: str, record: PodRecord) -> Wish:
        """Return what a pod's namespace should be, and why, by what is known now."""
        return wish_for(source, record, self.policy, self.facts)

    def known(self, wish: Wish) -> dict[str, object]:
        """Return what a decision was made of, as plain values; null is what nobody told.

        `said_by` tells whose word the labels are: of the API server's they are as they are now.
        """
        entry = self.entries.get(wish.key)
        said = self.facts.pod(wish.namespace, wish.name, wish.uid)
        pod = with_facts(model_of(entry.record), self.facts) if entry else None
        namespace = self.facts.namespace(wish.namespace)
        return {
            "sandbox": wish.sandbox_id,
            "labels": dict(pod.labels or {}) if pod else None,
            "annotations": dict(pod.annotations or {}) if pod else None,
            "host_network": bool(pod and pod.host_network),
            "said_by": KUBERNETES if pod and said else wish.source,
            "namespace_labels": None if namespace.labels is None else dict(namespace.labels),
            "namespace_left": namespace.left,
        }

    def begin(self, sandbox_id: str) -> None:
        """Take a sandbox for one that is there, whatever became of it before."""
        with contextlib.suppress(ValueError):
            self._ended.remove(sandbox_id)

    def end(self, sandbox_id: str) -> None:
        """Take a sandbox for one that ends: its network is taken down.

        The runtime lists it as one that is ready for a moment more, and takes its namespace away
        meanwhile: looked at again it would be a pod that cannot be captured.
        """
        self.begin(sandbox_id)  # so that it is there once
        self._ended.append(sandbox_id)

    async def forget(self, key: str) -> None:
        """Stop keeping a pod that is gone, whoever told of it."""
        self.entries.pop(key, None)
        self._remarks.pop(key, None)
        await self._reconciler.forget(key)
        await asyncio.to_thread(self.memory.drop, key)
        self._changed()

    async def let_go(self) -> None:
        """Forget the pods that only the plugin told of and whose namespace is gone.

        A runtime that is killed between the two never calls the plugin to delete such a pod.
        """
        for key, pod in list(self._reconciler.pods.items()):
            wish = pod.wish
            if wish.source != PLUGIN or pod.state != "failed" or not wish.netns:
                continue
            if await asyncio.to_thread(identity_of, wish.netns) is None:
                log.info("forgotten, since its namespace is gone", extra={"pod": wish.label})
                await self.forget(key)

    def decide_again(self, policy: Policy) -> None:
        """Go by another policy from now on, for the pods that are there, too."""
        self.policy = policy
        for entry in list(self.entries.values()):
            self.describe(entry.source, entry.record)

    def _decide_about(self, update: Described) -> None:
        for pod in list(self._reconciler.pods.values()):
            wish = pod.wish
            if (wish.namespace, wish.name) in update.pods or wish.namespace in update.namespaces:
                entry = self.entries.get(wish.key) or self._remembered(wish)
                if entry is None:
                    continue
                self.describe(entry.source, entry.record)
                if (pod.wish.settings is None) != (wish.settings is None):
                    self._turned(pod)

    def _remembered(self, wish: Wish) -> Entry | None:
        """Return what the plugin told of a pod in an earlier life of the agent.

        What the pod asked for then was not kept, so there must be somebody else to say it.
        """
        if self.facts.pod(wish.namespace, wish.name, wish.uid) is None:
            return None
        record = PodRecord(
            namespace=wish.namespace,
            name=wish.name,
            uid=wish.uid,
            sandbox_id=wish.sandbox_id,
            netns=wish.netns,
            network=wish.network,
        )
        return Entry(wish.source, record)

    async def leave(self, source: str) -> None:
        """Go on without a source: the pods that only it told of are kept no more."""
        told = {wish.key: wish for wish in await asyncio.to_thread(self.memory.load)}
        for key, pod in list(self._reconciler.pods.items()):
            if pod.wish.source != source:
                continue
            if key in told:
                self.entries.pop(key, None)
                self._reconciler.want(told[key])
            else:
                self._gone(source, key)

    async def use_memory(self, memory: Memory) -> None:
        """Remember elsewhere from now on what is remembered."""
        for wish in await asyncio.to_thread(self.memory.load):
            await asyncio.to_thread(memory.keep, wish)
            await asyncio.to_thread(self.memory.drop, wish.key)
        self.memory = memory

    def _gone(self, source: str, key: str) -> None:
        pod = self._reconciler.pods.get(key)
        if pod is not None and pod.wish.source == source:
            task = asyncio.create_task(self.forget(key))
            self._forgetting.add(task)  # the event loop alone would not keep it
            task.add_done_callback(self._forgetting.discard)


def decision_for(record: PodRecord, policy: Policy, facts: Facts) -> Decision | None:
    """Return what is decided about a pod; None where the configuration itself says it."""
    if record.settings is not None:
        return None
    return decide(with_facts(model_of(record), facts), facts.namespace(record.namespace), policy)


def with_facts(pod: ModelPod, facts: Facts) -> ModelPod:
    """Return all that is known of a pod: what the API server says is more, and newer."""
    return said_by(facts.pod(pod.namespace, pod.name, pod.uid), pod)


def said_by(known: ModelPod | None, pod: ModelPod) -> ModelPod:
    """Return a pod as the API server knows it, with what only its sandbox shows."""
    if known is None:
        return pod
    return replace(
        known,
        uid=pod.uid,
        host_network=known.host_network or pod.host_network,
        runtime_handler=pod.runtime_handler,
    )


def model_of(record: PodRecord) -> ModelPod:
    """Return what is known of a pod, as decisions are made of."""
    return ModelPod(
        namespace=record.namespace,
        name=record.name,
        uid=record.uid,
        labels=record.labels,
        annotations=record.annotations,
        host_network=record.host_network,
        runtime_handler=record.runtime_handler or None,
    )


def wish_for(source: str, record: PodRecord, policy: Policy, facts: Facts) -> Wish:
    """Return what a pod's namespace should be, and why."""
    decision = decision_for(record, policy, facts)
    pod = with_facts(model_of(record), facts)
    if decision is None:
        settings, reason = record.settings, STATIC
        text = "it is named in the configuration"
    else:
        settings = decision.settings if decision.captured else None
        reason, text = decision.reason.value, decision.text
    return Wish(
        key=pod_key(source, *record.key),
        namespace=record.namespace,
        name=record.name,
        uid=record.uid,
        sandbox_id=record.sandbox_id,
        netns=record.netns,
        settings=settings,
        reason=reason,
        text=text,
        source=source,
        network=record.network,
        init_names=init_names(pod) if settings is not None else (),
    )


def pod_key(source: str, namespace: str, name: str, uid: str) -> str:
    """Return the key of a pod. The plugin and the runtime speak of the same pods."""
    kind = STATIC if source == STATIC else "pod"
    return f"{kind}/{namespace}/{name}/{uid}"
