"""Which pods are on the node by what every source says, and what is decided about each."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from agent.model.decision import Decision, decide
from agent.model.pod import Namespace, Policy
from agent.model.pod import Pod as ModelPod
from agent.node.memory import Memory
from agent.node.pod import Pod, Wish
from agent.node.reconciler import Reconciler
from agent.node.source import Changed, Gone, PodRecord, Snapshot, Update

PLUGIN = "cni"
STATIC = "static"


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
    ) -> None:
        """`changed` is called whenever a pod was described anew or is gone."""
        self.entries: dict[str, Entry] = {}
        self.policy = policy
        self.memory = memory
        self._reconciler = reconciler
        self._changed = changed
        self._forgetting: set[asyncio.Task[None]] = set()

    async def remember(self) -> None:
        """Keep the pods that only the plugin told of before the agent was started."""
        for wish in await asyncio.to_thread(self.memory.load):
            self._reconciler.want(wish)

    def hear(self, source: str, update: Update) -> None:
        """Take in what a source says of the pods of the node."""
        if isinstance(update, Changed):
            self.describe(source, update.pod)
        elif isinstance(update, Gone):
            self._gone(source, pod_key(source, *update.key))
        elif isinstance(update, Snapshot):
            keep = {pod_key(source, *key) for key in update.unknown}
            for record in update.pods:
                keep.add(self.describe(source, record).wish.key)
            for key, known in list(self._reconciler.pods.items()):
                # What the plugin told first becomes the runtime's with its first list.
                if known.wish.source == source and key not in keep:
                    self._gone(source, key)

    def describe(self, source: str, record: PodRecord) -> Pod:
        """Decide about one pod and have it kept so."""
        wish = wish_for(source, record, self.policy)
        self.entries[wish.key] = Entry(source, record)
        pod = self._reconciler.want(wish)
        self._changed()
        return pod

    async def forget(self, key: str) -> None:
        """Stop keeping a pod that is gone, whoever told of it."""
        self.entries.pop(key, None)
        await self._reconciler.forget(key)
        await asyncio.to_thread(self.memory.drop, key)
        self._changed()

    def decide_again(self, policy: Policy) -> None:
        """Go by another policy from now on, for the pods that are there, too."""
        self.policy = policy
        for entry in list(self.entries.values()):
            self.describe(entry.source, entry.record)

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


def decision_for(record: PodRecord, policy: Policy) -> Decision | None:
    """Return what is decided about a pod; None where the configuration itself says it."""
    if record.settings is not None:
        return None
    return decide(model_of(record), Namespace(name=record.namespace), policy)


def model_of(record: PodRecord) -> ModelPod:
    """Return what is known of a pod, as decisions are made of."""
    return ModelPod(
        namespace=record.namespace,
        name=record.name,
        uid=record.uid,
        labels=record.labels,
        annotations=record.annotations,
        host_network=record.host_network,
    )


def wish_for(source: str, record: PodRecord, policy: Policy) -> Wish:
    """Return what a pod's namespace should be, and why."""
    decision = decision_for(record, policy)
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
    )


def pod_key(source: str, namespace: str, name: str, uid: str) -> str:
    """Return the key of a pod. The plugin and the runtime speak of the same pods."""
    kind = STATIC if source == STATIC else "pod"
    return f"{kind}/{namespace}/{name}/{uid}"
