"""What is known of a pod when it is decided whether it is captured, and the agent's own rules.

Unknown is a value of its own here: `None`. The API server knows everything, a CRI sandbox knows no
containers, and a CNI call knows annotations only, or not even those.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from agent.model.note import Place
from agent.model.settings import parse
from agent.model.values import AMBIENT

PROXY = "istio-proxy"
INIT = "istio-init"
# The mesh's own containers run as the proxy's user on purpose.
MESH_CONTAINERS = frozenset({PROXY, INIT, "istio-validation", "enable-core-dump"})
AUTO = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """One container of a pod, as its own section of the manifest has it.

    `env` has None for a variable whose value stands elsewhere (`valueFrom`). `run_as_user` and
    `run_as_group` are the container's own; those of the pod are in `Pod`.
    """

    name: str
    init: bool = False
    ephemeral: bool = False  # added to a pod that runs, as `kubectl debug` does
    restart_policy: str = ""
    image: str = ""
    args: tuple[str, ...] = ()
    env: Mapping[str, str | None] = field(default_factory=dict)
    run_as_user: int | None = None
    run_as_group: int | None = None
    privileged: bool = False
    capabilities: tuple[str, ...] = ()  # those that are added

    @property
    def at(self) -> Place:
        """Where it stands in its pod."""
        ordinary = "ephemeralContainers" if self.ephemeral else "containers"
        return ("spec", "initContainers" if self.init else ordinary, self.name)

    def variable_at(self, name: str) -> Place:
        return (*self.at, "env", name, "value")

    @property
    def native_sidecar(self) -> bool:
        """Whether it is an init container that runs as long as the pod does."""
        return self.init and self.restart_policy == "Always"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """A pod; None means that its value is not known."""

    namespace: str
    name: str
    uid: str = ""
    labels: Mapping[str, str] | None = None
    annotations: Mapping[str, str] | None = None
    containers: tuple[Container, ...] | None = None
    host_network: bool | None = None
    runtime_class: str | None = None
    runtime_handler: str | None = None  # what the class means to the runtime, which alone tells it
    run_as_user: int | None = None
    run_as_group: int | None = None

    @property
    def title(self) -> str:
        if not self.name:
            return "this pod"
        return f"{self.namespace}/{self.name}" if self.namespace else self.name

    @property
    def proxy(self) -> Container | None:
        """The proxy's container: an ordinary one before a native sidecar before an init one."""
        found = [one for one in self.containers or () if one.name == PROXY]
        return min(found, key=lambda one: (one.init, not one.native_sidecar), default=None)

    def annotation(self, name: str) -> str | None:
        return None if self.annotations is None else self.annotations.get(name)

    def label(self, name: str) -> str | None:
        return None if self.labels is None else self.labels.get(name)

    def identity_at(self, container: Container, field: str) -> Place:
        """Where a container's `runAsUser` or `runAsGroup` stands: with it, or with the pod."""
        own = container.run_as_user if field == "runAsUser" else container.run_as_group
        place = ("spec",) if own is None else container.at
        return (*place, "securityContext", field)

    def user_of(self, container: Container) -> int | None:
        """The user it runs as; None where the image says so."""
        return self.run_as_user if container.run_as_user is None else container.run_as_user

    def group_of(self, container: Container) -> int | None:
        """The primary group it runs as; None where the image says so."""
        return self.run_as_group if container.run_as_group is None else container.run_as_group


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """A Kubernetes namespace; its labels are None when they are not known.

    `left` tells that it was in the mesh by its labels once, and is not any more.
    """

    name: str
    labels: Mapping[str, str] | None = None
    left: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What the agent's configuration says about which pods are captured, and how.

    `defaults` are raw settings that a pod's annotations may override: owner groups and the loopback
    network are read from there only. Names of users and groups must have been looked up already.
    `uncapturable_runtimes` are words of a runtime class's name, so `kata` stands for `kata-qemu`.
    In mode `ambient` pods of the node's own proxy are captured, too; `ambient` are their raw
    settings.

    Raises: InvalidSettings, when made with defaults that no pod could be captured with.
    """

    exclude_namespaces: tuple[str, ...] = ("kube-system",)
    own_namespace: str = ""
    own_name_prefix: str = "intercept-agent-"
    uncapturable_runtimes: tuple[str, ...] = ("gvisor", "runsc", "kata")
    failure_policy: Literal["closed", "open"] = "closed"
    mode: Literal["sidecar", "ambient"] = "sidecar"
    defaults: Mapping[str, object] = field(default_factory=dict)
    ambient: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        parse(parsable(self.defaults))
        parse(parsable({"mode": AMBIENT, **self.ambient}))

    @property
    def closed(self) -> bool:
        return self.failure_policy == "closed"


def namespace_list(text: str) -> tuple[str, ...]:
    """Return the names in a comma list; blanks and empty items do not count."""
    return tuple(name for item in text.split(",") if (name := item.strip()))


def parsable(raw: Mapping[str, object]) -> dict[str, object]:
    """Return raw settings as `settings.parse` takes them while no network namespace is known.

    What is found out in the namespace itself (IPv6 on `auto`, the name servers) is left open: IPv6
    counts as on, so that a pod is not refused for networks that it may well have.
    """
    values = {key: value for key, value in raw.items() if key != "dns_servers"}
    if values.get("enable_ipv6", AUTO) == AUTO:
        values["enable_ipv6"] = True
    return values
