"""The annotation by which a pod configures its proxy: YAML in YAML, which the injector reads.

It refuses a pod for which it cannot (istio/istio pkg/kube/inject/validate.go), but takes keys that
it does not know.
"""

from collections.abc import Iterator, Mapping

from agent.formats import yaml_scalars, yaml_tree
from agent.model import annotations as names
from agent.model.note import Note
from agent.model.pod import Pod
from agent.model.values import shown

CONFIG = "proxy.istio.io/config"
METADATA = "proxyMetadata"


def variables(pod: Pod) -> dict[str, str]:
    """Return the variables that the injector gives to the proxy because the annotation says so."""
    try:
        found = _read(pod)
    except yaml_tree.YamlError:
        return {}
    said = dict(_metadata(found))
    if isinstance(found, Mapping):
        said.setdefault(names.MODE_VARIABLE, found.get("interceptionMode"))
    return {name: value for name, value in said.items() if isinstance(value, str)}


def refused(pod: Pod) -> Iterator[Note]:
    """Yield why the injector cannot read it."""
    at, sentence = names.annotation_at(CONFIG), "Istio's injector refuses such a pod"
    try:
        found = _read(pod)
    except yaml_tree.YamlError as error:
        yield Note(message=f"annotation {CONFIG}, line {error.line}: {error}: {sentence}", at=at)
        return
    if found is not None and not isinstance(found, Mapping):
        yield Note(message=f"annotation {CONFIG} is no mapping: {sentence}", at=at)
    for name, value in _metadata(found).items():
        if value is not None and not isinstance(value, str):
            said = f"annotation {CONFIG}: {METADATA}.{name} is {shown(value)}, which is no text"
            yield Note(message=f"{said}: {sentence}", hint="write the value in quotes", at=at)


def _read(pod: Pod) -> object:
    """Raises: yaml_tree.YamlError."""
    root = yaml_tree.read(pod.annotation(CONFIG) or "")
    found: object = yaml_tree.plain(root, yaml_scalars.kubernetes)
    return found


def _metadata(config: object) -> Mapping[str, object]:
    found = config.get(METADATA) if isinstance(config, Mapping) else None
    return found if isinstance(found, Mapping) else {}
