"""Kubernetes and CRI documents, and CNI calls, to what the model knows of a pod.

Whatever comes in, a pod comes out or InvalidSettings with a sentence for every mistake. Only what
is used is looked at; anything else in a document may be there and may be wrong. Nothing is filled
in: what a source does not know stays unknown.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from agent.model.errors import InvalidSettings
from agent.model.pod import Container, Namespace, Pod
from agent.model.values import shown

CRI_NAME = "io.kubernetes.pod.name"
CRI_NAMESPACE = "io.kubernetes.pod.namespace"
CRI_UID = "io.kubernetes.pod.uid"
CRI_LABELS = "io.kubernetes.pod."
CNI_ANNOTATIONS = "io.kubernetes.cri.pod-annotations"

# Names end up in paths, log lines and sentences. Kubernetes allows no more than this.
NAME = re.compile(r"(?!\.\.?$)[A-Za-z0-9._-]{0,253}")


def pod(document: object) -> Pod:
    """Return the pod that a document of kind Pod, or a pod template, describes.

    A document without `spec`, such as one with metadata only, says nothing about containers.

    Raises: InvalidSettings.
    """
    reader = _Reader()
    top = reader.top(document, "pod")
    metadata = reader.mapping(top, "metadata", "")
    found = Pod(
        namespace=reader.name(metadata, "namespace", "metadata"),
        name=reader.name(metadata, "name", "metadata")
        or reader.name(metadata, "generateName", "metadata"),
        uid=reader.name(metadata, "uid", "metadata"),
        labels=reader.texts(metadata, "labels", "metadata"),
        annotations=reader.texts(metadata, "annotations", "metadata"),
    )
    if top.get("spec") is not None:
        found = _with_spec(found, reader.mapping(top, "spec", ""), reader)
    reader.end()
    return found


def _with_spec(known: Pod, spec: Mapping[str, object], reader: "_Reader") -> Pod:
    context = reader.mapping(spec, "securityContext", "spec")
    return replace(
        known,
        containers=(
            *_containers(spec, "initContainers", reader),
            *_containers(spec, "containers", reader),
        ),
        host_network=reader.flag(spec, "hostNetwork", "spec"),
        runtime_class=reader.text(spec, "runtimeClassName", "spec"),
        run_as_user=reader.number(context, "runAsUser", "spec.securityContext"),
        run_as_group=reader.number(context, "runAsGroup", "spec.securityContext"),
    )


def _containers(spec: Mapping[str, object], key: str, reader: "_Reader") -> Iterator[Container]:
    for at, entry in reader.mappings(spec, key, "spec"):
        context = reader.mapping(entry, "securityContext", at)
        if entry.get("name") is None:
            reader.problems.append(f"{at}.name: it is missing")
        yield Container(
            name=reader.text(entry, "name", at),
            init=key == "initContainers",
            restart_policy=reader.text(entry, "restartPolicy", at),
            image=reader.text(entry, "image", at),
            args=reader.items(entry, "args", at),
            env=_environment(entry, at, reader),
            run_as_user=reader.number(context, "runAsUser", f"{at}.securityContext"),
            run_as_group=reader.number(context, "runAsGroup", f"{at}.securityContext"),
        )


def _environment(
    container: Mapping[str, object], where: str, reader: "_Reader"
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
    metadata = reader.mapping(reader.top(document, "namespace"), "metadata", "")
    found = Namespace(
        name=reader.name(metadata, "name", "metadata"),
        labels=reader.texts(metadata, "labels", "metadata"),
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
    found = reader.texts(document, "labels", "")
    own = {name: value for name, value in found.items() if not name.startswith(CRI_LABELS)}
    result = Pod(
        namespace=reader.name(found, CRI_NAMESPACE, "labels"),
        name=reader.name(found, CRI_NAME, "labels"),
        uid=reader.name(found, CRI_UID, "labels"),
        labels=own,
        annotations=reader.texts(document, "annotations", ""),
        host_network=host_network,
        runtime_class=runtime_handler or None,
    )
    if not (found.get(CRI_NAMESPACE) and found.get(CRI_NAME)):
        reader.problems.append(
            f"labels: {CRI_NAMESPACE} and {CRI_NAME} are missing: no kubelet made this sandbox"
        )
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
            reader.problems.append(f"CNI_ARGS: {shown(item)} is not KEY=VALUE")
        given[key] = value
    known = None
    if annotations is not None:
        known = reader.texts({"annotations": annotations}, "annotations", "")
    found = Pod(
        namespace=reader.name(given, "K8S_POD_NAMESPACE", "CNI_ARGS"),
        name=reader.name(given, "K8S_POD_NAME", "CNI_ARGS"),
        uid=reader.name(given, "K8S_POD_UID", "CNI_ARGS"),
        annotations=known,
    )
    reader.end()
    return found


class _Reader:
    """Takes typed values out of a document and keeps a sentence for each that is of another type.

    null stands for absent everywhere, as it does to the API server.
    """

    def __init__(self) -> None:
        self.problems: list[str] = []

    def end(self) -> None:
        if self.problems:
            raise InvalidSettings(tuple(self.problems))

    def _wrong(self, where: str, key: str, wanted: str, value: object) -> None:
        at = f"{where}.{_key(key)}" if where else _key(key)
        self.problems.append(f"{at}: {wanted} is expected, not {_kind(value)}")

    def top(self, document: object, what: str) -> Mapping[str, object]:
        if isinstance(document, Mapping):
            return document
        raise InvalidSettings((f"{what}: a mapping is expected, not {_kind(document)}",))

    def mapping(self, parent: Mapping[str, object], key: str, where: str) -> Mapping[str, object]:
        value = parent.get(key)
        if isinstance(value, Mapping):
            return value
        if value is not None:
            self._wrong(where, key, "a mapping", value)
        return {}

    def mappings(
        self, parent: Mapping[str, object], key: str, where: str
    ) -> Iterator[tuple[str, Mapping[str, object]]]:
        value = parent.get(key)
        if value is not None and not isinstance(value, list):
            self._wrong(where, key, "a list", value)
        for index, entry in enumerate(value if isinstance(value, list) else ()):
            at = f"{where}.{key}[{index}]"
            if isinstance(entry, Mapping):
                yield at, entry
            else:
                self._wrong(where, f"{key}[{index}]", "a mapping", entry)

    def items(self, parent: Mapping[str, object], key: str, where: str) -> tuple[str, ...]:
        value = parent.get(key)
        if value is not None and not isinstance(value, list):
            self._wrong(where, key, "a list", value)
        found = []
        for index, item in enumerate(value if isinstance(value, list) else ()):
            if isinstance(item, str):
                found.append(item)
            else:
                self._wrong(where, f"{key}[{index}]", _quoted(item), item)
        return tuple(found)

    def text(self, parent: Mapping[str, object], key: str, where: str) -> str:
        value = parent.get(key)
        if value is not None and not isinstance(value, str):
            self._wrong(where, key, _quoted(value), value)
        return value if isinstance(value, str) else ""

    def name(self, parent: Mapping[str, object], key: str, where: str) -> str:
        value = self.text(parent, key, where)
        if NAME.fullmatch(value):
            return value
        self.problems.append(
            f"{where}.{key}: {shown(value)} is no name: up to 253 letters, digits, '-', '_' and "
            "'.' are allowed"
        )
        return ""

    def texts(self, parent: Mapping[str, object], key: str, where: str) -> dict[str, str]:
        found = self.mapping(parent, key, where)
        at = f"{where}.{key}" if where else key
        for name in found:
            if not isinstance(name, str):
                self.problems.append(f"{at}: the key {shown(name)} is not text")
        return {name: self.text(found, name, at) for name in found if isinstance(name, str)}

    def flag(self, parent: Mapping[str, object], key: str, where: str) -> bool:
        value = parent.get(key)
        if value is not None and not isinstance(value, bool):
            self._wrong(where, key, "true or false", value)
        return value is True

    def number(self, parent: Mapping[str, object], key: str, where: str) -> int | None:
        value = parent.get(key)
        if value is None:
            return None
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31:
            return value
        self._wrong(where, key, "a whole number from 0 to 2147483647", value)
        return None


def _key(key: str) -> str:
    return key if re.fullmatch(r"[\w./\[\]-]{1,317}", key) else shown(key)


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
