"""What is known of the pod behind a namespace: from the running agent, the runtime, a manifest."""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from agent.cli.agent_client import AgentClient, AgentSays
from agent.cli.pod_lookup import PREFIX, runtime_view
from agent.explain.pod.facts import AgentView, PodFacts, Said
from agent.formats import documents, kube
from agent.formats import pod as manifests
from agent.kernel.netns import NetnsId, id_at
from agent.model.decision import decide
from agent.model.errors import AgentError, EnvironmentLacks, InvalidSettings
from agent.model.pod import Namespace, Pod
from agent.node.config import Config
from agent.node.cri import endpoint
from agent.node.roster import model_of
from agent.node.source import KUBERNETES, PodRecord

# Sources that tell of a pod as it was when its sandbox was made, and of no change since.
AT_THE_START = frozenset({"cri", "cni", "static"})
THE_MANIFEST = "the manifest given"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A pod and where its namespace is; `settings` are those that the agent keeps it to."""

    pod: PodFacts
    netns: str | None = None
    settings: Mapping[str, object] | None = None


class PodFinder:
    """Asks the agent and the runtime, whichever answer; `unseen` says who did not, and why."""

    def __init__(self, known: Config, manifest: str | None = None) -> None:
        """Raises: InvalidSettings for a manifest that holds no pod."""
        self._known = known
        self._policy = known.policy()
        self._manifest = _pod_in(manifest) if manifest else None
        self.unseen: list[str] = []
        self._runtime = self._ask(self._ask_runtime, "the container runtime") or {}
        self._agent = self._ask(self._ask_agent, "the running agent") or []
        self.asked = len(self.unseen) < 2  # whether anybody answered

    def given(self) -> Found | None:
        """Return the pod of the manifest, for a namespace of which nobody else knows the pod."""
        if self._manifest is None:
            return None
        pod = self._manifest
        now = self._said(THE_MANIFEST, pod)
        return Found(
            pod=PodFacts(namespace=pod.namespace, name=pod.name or "given", uid=pod.uid, now=now)
        )

    def named(self, target: str) -> Found | None:
        """Return the pod `pod:NAMESPACE/NAME`, if anybody knows it."""
        namespace, _, name = target.removeprefix(PREFIX).partition("/")
        return self._found(lambda ns, pod, _: (ns, pod) == (namespace, name))

    def living_in(self, netns: NetnsId) -> Found | None:
        """Return the pod whose namespace it is, if anybody knows it."""
        return self._found(lambda _, __, path: path is not None and id_at(path) == netns)

    # --- who is asked -----------------------------------------------------------------------------

    def _ask(self, ask: Callable[[], Any], who: str) -> Any:
        try:
            return ask()
        except (EnvironmentLacks, AgentSays) as error:
            self.unseen.append(f"{who} cannot be asked: {str(error).partition('; ')[0]}")
            return None

    def _ask_agent(self) -> list[dict[str, Any]]:
        with AgentClient(self._known.socket) as agent:
            return list(agent.ask("pods"))

    def _ask_runtime(self) -> Mapping[Any, PodRecord]:
        paths = endpoint.candidates(self._known.cri_endpoint) if self._has_runtime else ()
        if not any(endpoint.unreachable(path) is None for path in paths):
            raise EnvironmentLacks("no runtime listens on any of its usual sockets")
        return asyncio.run(runtime_view(self._known)).pods

    @property
    def _has_runtime(self) -> bool:
        return self._known.cri_endpoint != "none"

    # --- what they say ----------------------------------------------------------------------------

    def _found(self, fits: Callable[[str, str, str | None], bool]) -> Found | None:
        record = next(
            (p for p in self._runtime.values() if fits(p.namespace, p.name, p.netns)), None
        )
        row = next((r for r in self._agent if fits(r["namespace"], r["name"], r["netns"])), None)
        about = self._about(row) if row is not None else {}
        if record is None and not about:
            return None
        settings = about.get("settings")
        return Found(
            pod=self._facts(record, about),
            netns=record.netns if record is not None else about.get("netns"),
            settings=settings if isinstance(settings, Mapping) else None,
        )

    def _about(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return all that the agent knows of a pod; nothing of one that is gone meanwhile."""

        def ask() -> Mapping[str, Any]:
            with AgentClient(self._known.socket) as agent:
                return agent.ask("pod", namespace=row["namespace"], name=row["name"]) or {}

        return self._ask(ask, "the running agent") or {}

    def _facts(self, record: PodRecord | None, about: Mapping[str, Any]) -> PodFacts:
        namespace, name, uid = (
            (record.namespace, record.name, record.uid)
            if record is not None
            else (str(about["namespace"]), str(about["name"]), str(about["uid"]))
        )
        created = (
            self._said("the container runtime", model_of(record)) if record is not None else None
        )
        said = self._of_agent(about)
        started = about.get("said_by") in AT_THE_START
        if created is None and started:
            created = said
        now = None if started else said
        if self._manifest is not None:
            now = self._said(THE_MANIFEST, _same(self._manifest, name))
        return PodFacts(
            namespace=namespace,
            name=name,
            uid=uid,
            sandbox=record.sandbox_id if record is not None else str(about.get("sandbox", "")),
            host_network=record.host_network if record is not None else _flag(about),
            created=created,
            now=now,
            agent=_view(about) if about else None,
            followed=about.get("said_by") == KUBERNETES,
            containers=self._containers(record),
        )

    def _of_agent(self, about: Mapping[str, Any]) -> Said | None:
        if about.get("annotations") is None or about.get("source") == "static":
            return None
        pod = Pod(
            namespace=str(about["namespace"]),
            name=str(about["name"]),
            uid=str(about["uid"]),
            labels=about["labels"],
            annotations=about["annotations"],
            host_network=_flag(about),
        )
        namespace = Namespace(
            name=pod.namespace,
            labels=about.get("namespace_labels"),
            left=about.get("namespace_left") is True,
        )
        return self._said(f"the running agent, from {about['said_by']}", pod, namespace)

    def _said(self, who: str, pod: Pod, namespace: Namespace | None = None) -> Said:
        return Said(
            who=who,
            labels=pod.labels or {},
            annotations=pod.annotations or {},
            decision=decide(pod, namespace or Namespace(name=pod.namespace), self._policy),
        )

    def _containers(self, record: PodRecord | None) -> Mapping[str, str]:
        """Return the names of a pod's containers by their ids; none where nobody tells."""
        if record is None:
            return {}
        try:
            return asyncio.run(_container_names(self._known, record.sandbox_id))
        except AgentError as error:
            self.unseen.append(f"the names of the containers: {error}")
            return {}


async def _container_names(known: Config, sandbox: str) -> dict[str, str]:
    from agent.node.cri.client import CriClient  # loading grpc takes longer than most commands

    async with CriClient(known.cri_endpoint) as client:
        return {found.id: found.name for found in await client.containers(sandbox)}


def _pod_in(path: str) -> Pod:
    found: Iterable[Any] = (manifests.pod_of(one) for one in documents.load_all(path))
    for document in found:
        if document is not None:
            return kube.pod(document)
    raise InvalidSettings((f"{path}: there is no Pod and nothing with a pod template in it",))


def _same(manifest: Pod, name: str) -> Pod:
    """Return the manifest's pod. Raises: InvalidSettings if it is another one's."""
    if not name.startswith(manifest.name):  # a template has none, or the begin of it
        raise InvalidSettings((f"the manifest is of the pod {manifest.name}, not of {name}",))
    return manifest


def _view(about: Mapping[str, Any]) -> AgentView:
    return AgentView(
        state=str(about["state"]), backend=str(about["backend"] or ""), text=str(about["text"])
    )


def _flag(about: Mapping[str, Any]) -> bool:
    return about.get("host_network") is True
