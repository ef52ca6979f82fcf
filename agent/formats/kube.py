"""Kubernetes and CRI documents, and CNI calls, to what the model knows of a pod.

Whatever comes in, a pod comes out or InvalidSettings with a sentence for every mistake. Only what
is used is looked at; anything else in a document may be there and may be wrong. Nothing is filled
in: what a source does not know stays unknown.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from agent.model.errors import InvalidSettings
from agent.model.note import Note, Place, path
from agent.model.pod import Container, Namespace, Pod
from agent.model.values import shown

CRI_NAME = "io.kubernetes.pod.name"
CRI_NAMESPACE = "io.kubernetes.pod.namespace"
CRI_UID = "io.kubernetes.pod.uid"
CRI_LABELS = "io.kubernetes.pod."
CNI_ANNOTATIONS = "io.kubernetes.cri.pod-annotations"

# Names end up in paths, log lines and sentences. Kubernetes allows no more than this.
NAME = re.compile(r"(?!\.\.?$)[A-Za-z0-9._-]{0,253}")

METADATA: Place = ("metadata",)
SPEC: Place = ("spec",)
CONTEXT = "securityContext"


def pod(document: object) -> Pod:
    """Return the pod that a document of kind Pod, or a pod template, describes.

    A document without `spec`, such as one with metadata only, says nothing about containers.

    Raises: InvalidSettings.
    """
    found, mistakes = pod_and_mistakes(document)
    if mistakes:
        raise InvalidSettings(tuple(note.text for note in mistakes))
    return found


def pod_and_mistakes(document: object) -> tuple[Pod, tuple[Note, ...]]:
    """Return the pod as far as it can be read, and what is of another type than it must be.

    Raises: InvalidSettings for what is no mapping at all.
    """
    reader = _Reader()
    top = reader.top(document, "pod")
    metadata = reader.mapping(top, "metadata", ())
    found = Pod(
        namespace=reader.name(metadata, "namespace", METADATA),
        name=reader.name(metadata, "name", METADATA)
        or reader.name(metadata, "generateName", METADATA),
        uid=reader.name(metadata, "uid", METADATA),
        labels=reader.texts(metadata, "labels", METADATA),
        annotations=reader.texts(metadata, "annotations", METADATA),
    )
    if top.get("spec") is not None:
        found = _with_spec(found, reader.mapping(top, "spec", ()), reader)
    return found, tuple(reader.notes)


def _with_spec(known: Pod, spec: Mapping[str, object], reader: "_Reader") -> Pod:
    context = reader.mapping(spec, CONTEXT, SPEC)
    return replace(
        known,
        containers=(
            *_containers(spec, "initContainers", reader),
            *_containers(spec, "containers", reader),
            *_containers(spec, "ephemeralContainers", reader),
        ),
        host_network=reader.flag(spec, "hostNetwork", SPEC),
        runtime_class=reader.text(spec, "runtimeClassName", SPEC),
        run_as_user=reader.number(context, "runAsUser", (*SPEC, CONTEXT)),
        run_as_group=reader.number(context, "runAsGroup", (*SPEC, CONTEXT)),
    )


def _containers(spec: Mapping[str, object], key: str, reader: "_Reader") -> Iterator[Container]:
    for at, entry in reader.mappings(spec, key, SPEC):
        context = reader.mapping(entry, CONTEXT, at)
        added = reader.mapping(context, "capabilities", (*at, CONTEXT))
        if entry.get("name") is None:
            reader.wrong((*at, "name"), "it is missing")
        yield Container(
            name=reader.text(entry, "name", at),
            init=key == "initContainers",
            ephemeral=key == "ephemeralContainers",
            restart_policy=reader.text(entry, "restartPolicy", at),
            image=reader.text(entry, "image", at),
            args=reader.items(entry, "args", at),
            env=_environment(entry, at, reader),
            run_as_user=reader.number(context, "runAsUser", (*at, CONTEXT)),
            run_as_group=reader.number(context, "runAsGroup", (*at, CONTEXT)),
            privileged=reader.flag(context, "privileged", (*at, CONTEXT)),
            capabilities=reader.items(added, "add", (*at, CONTEXT, "capabilities")),
        )


def _environment(
    container: Mapping[str, object], where: Place, reader: "_Reader"
) -> dict[str, str | None]:
    """Return the variables; of those with one name the last counts, as it does for the kubelet."""
    found: dict[str, str | None] = {}
    for at, entry in reader.mappings(container, "env", where):
        elsewhere = entry.get("valueFrom") is not None
        found[reader.text(entry, "name", at)] = (
            None if elsewhere else reader.text(entry, "value", at)
        )
    return found


def namespace(document: object) -> Namespace:
    """Return the namespace that a document of kind Namespace describes.

    Raises: InvalidSettings.
    """
    reader = _Reader()
    metadata = reader.mapping(reader.top(document, "namespace"), "metadata", ())
    found = Namespace(
        name=reader.name(metadata, "name", METADATA),
        labels=reader.texts(metadata, "labels", METADATA),
    )
    reader.end()
    return found


def sandbox(
    labels: object,
    annotations: object,
    *,
    host_network: bool | None = None,
    runtime_handler: str = "",
) -> Pod:
    """Return what a CRI sandbox says of its pod: everything but its containers.

    The kubelet puts the pod's own labels and annotations there and its identity beside them.
    `host_network` is `network: NODE` of the sandbox's namespace options.

    Raises: InvalidSettings, also for a sandbox that no kubelet made.
    """
    reader = _Reader()
    document = {"labels": labels, "annotations": annotations}
    found = reader.texts(document, "labels", ())
    own = {name: value for name, value in found.items() if not name.startswith(CRI_LABELS)}
    result = Pod(
        namespace=reader.name(found, CRI_NAMESPACE, ("labels",)),
        name=reader.name(found, CRI_NAME, ("labels",)),
        uid=reader.name(found, CRI_UID, ("labels",)),
        labels=own,
        annotations=reader.texts(document, "annotations", ()),
        host_network=host_network,
        runtime_handler=runtime_handler or None,
    )
    if not (found.get(CRI_NAMESPACE) and found.get(CRI_NAME)):
        missing = f"{CRI_NAMESPACE} and {CRI_NAME} are missing: no kubelet made this sandbox"
        reader.wrong(("labels",), missing)
    reader.end()
    return result


def cni(arguments: str, annotations: object = None) -> Pod:
    """Return what a CNI call says of its pod: CNI_ARGS, and the annotations if the runtime passes
    them (`runtimeConfig` of the configuration, under CNI_ANNOTATIONS); None if it does not.

    Raises: InvalidSettings.
    """
    reader = _Reader()
    given: dict[str, object] = {}
    for item in filter(None, arguments.split(";")):
        key, separator, value = item.partition("=")
        if not separator:
            reader.wrong(("CNI_ARGS",), f"{shown(item)} is not KEY=VALUE")
        given[key] = value
    known = None
    if annotations is not None:
        known = reader.texts({"annotations": annotations}, "annotations", ())
    found = Pod(
        namespace=reader.name(given, "K8S_POD_NAMESPACE", ("CNI_ARGS",)),
        name=reader.name(given, "K8S_POD_NAME", ("CNI_ARGS",)),
        uid=reader.name(given, "K8S_POD_UID", ("CNI_ARGS",)),
        annotations=known,
    )
    reader.end()
    return found


class _Reader:
    """Takes typed values out of a document and keeps a sentence for each that is of another type.

    null stands for absent everywhere, as it does to the API server.
    """

    def __init__(self) -> None:
        self.notes: list[Note] = []

    def end(self) -> None:
        if self.notes:
            raise InvalidSettings(tuple(note.text for note in self.notes))

    def wrong(self, at: Place, sentence: str) -> None:
        self.notes.append(Note(message=f"{path(at)}: {sentence}", at=at))

    def _wrong(self, at: Place, wanted: str, value: object) -> None:
        self.wrong(at, f"{wanted} is expected, not {_kind(value)}")

    def top(self, document: object, what: str) -> Mapping[str, object]:
        if isinstance(document, Mapping):
            return document
        raise InvalidSettings((f"{what}: a mapping is expected, not {_kind(document)}",))

    def mapping(self, parent: Mapping[str, object], key: str, where: Place) -> Mapping[str, object]:
        value = parent.get(key)
        if isinstance(value, Mapping):
            return value
        if value is not None:
            self._wrong((*where, key), "a mapping", value)
        return {}

    def mappings(
        self, parent: Mapping[str, object], key: str, where: Place
    ) -> Iterator[tuple[Place, Mapping[str, object]]]:
        value = parent.get(key)
        if value is not None and not isinstance(value, list):
            self._wrong((*where, key), "a list", value)
        for index, entry in enumerate(value if isinstance(value, list) else ()):
            at = (*where, key, index)
            if isinstance(entry, Mapping):
                yield at, entry
            else:
                self._wrong(at, "a mapping", entry)

    def items(self, parent: Mapping[str, object], key: str, where: Place) -> tuple[str, ...]:
        value = parent.get(key)
        if value is not None and not isinstance(value, list):
            self._wrong((*where, key), "a list", value)
        found = []
        for index, item in enumerate(value if isinstance(value, list) else ()):
            if isinstance(item, str):
                found.append(item)
            else:
                self._wrong((*where, key, index), _quoted(item), item)
        return tuple(found)

    def text(self, parent: Mapping[str, object], key: str, where: Place) -> str:
        value = parent.get(key)
        if value is not None and not isinstance(value, str):
            self._wrong((*where, key), _quoted(value), value)
        return value if isinstance(value, str) else ""

    def name(self, parent: Mapping[str, object], key: str, where: Place) -> str:
        value = self.text(parent, key, where)
        if NAME.fullmatch(value):
            return value
        allowed = "up to 253 letters, digits, '-', '_' and '.' are allowed"
        self.wrong((*where, key), f"{shown(value)} is no name: {allowed}")
        return ""

    def texts(self, parent: Mapping[str, object], key: str, where: Place) -> dict[str, str]:
        """Return what is text, and null as no text; what is neither is left out."""
        found, at, texts = self.mapping(parent, key, where), (*where, key), {}
        for name, value in found.items():
            if not isinstance(name, str):
                self.wrong(at, f"the key {shown(name)} is not text")
                continue
            text = self.text(found, name, at)
            if value is None or isinstance(value, str):
                texts[name] = text
        return texts

    def flag(self, parent: Mapping[str, object], key: str, where: Place) -> bool:
        value = parent.get(key)
        if value is not None and not isinstance(value, bool):
            self._wrong((*where, key), "true or false", value)
        return value is True

    def number(self, parent: Mapping[str, object], key: str, where: Place) -> int | None:
        value = parent.get(key)
        if value is None:
            return None
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31:
            return value
        self._wrong((*where, key), "a whole number from 0 to 2147483647", value)
        return None


def _quoted(value: object) -> str:
    """Numbers and booleans are what an unquoted text becomes in YAML."""
    if isinstance(value, bool):
        return f'text, "{str(value).lower()}" in quotes,'
    if isinstance(value, (int, float)) and len(text := shown(value)) <= 20:
        return f'text, "{text}" in quotes,'
    return "text"


_KINDS: tuple[tuple[type | tuple[type, ...], str], ...] = (
    (bool, "true or false"),
    ((int, float), "a number"),
    (str, "text"),
    (Mapping, "a mapping"),
    (list, "a list"),
    (type(None), "nothing"),
)


def _kind(value: object) -> str:
    """Return what a value is: the value itself too, where it is short and of a simple type."""
    for kinds, name in _KINDS:
        if isinstance(value, kinds):
            simple = isinstance(value, (str, int)) and not isinstance(value, bool)
            return f"{name} ({shown(value)})" if simple else name
    return f"a {type(value).__name__}"
