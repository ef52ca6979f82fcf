"""What Istio's injector refuses although this agent takes it: a pod that is never made.

It reads annotations more strictly than the CNI plugin of any mesh has to (istio/istio,
pkg/kube/inject/validate.go): no ranges of ports, no empty items, no address without its prefix.
"""

import re
from collections.abc import Callable, Iterator, Mapping

from agent.model import annotations as names
from agent.model.note import Note
from agent.model.pod import Pod
from agent.model.values import FALSE_WORDS, INTERFACE_NAME, MAX_PORT, NETWORK, TRUE_WORDS, shown

INTERFACES = f"{names.TRAFFIC}excludeInterfaces"
COUNTS = tuple(
    f"readiness.status.sidecar.istio.io/{name}"
    for name in ("initialDelaySeconds", "periodSeconds", "failureThreshold")
)
QUANTITIES = tuple(
    f"{names.SIDECAR}proxy{name}" for name in ("CPU", "CPULimit", "Memory", "MemoryLimit")
)
MERGE_METRICS = "prometheus.istio.io/merge-metrics"


def _port(item: str) -> bool:
    digits = item.strip()
    return re.fullmatch(r"[0-9]+", digits) is not None and int(digits[-9:]) <= MAX_PORT


def _network(item: str) -> bool:
    return NETWORK.fullmatch(item) is not None and "/" in item


def _count(text: str) -> bool:
    return re.fullmatch(r"[0-9]{1,10}", text) is not None and int(text) < 2**32


def _quantity(text: str) -> bool:
    number = r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)"
    return re.fullmatch(rf"{number}([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]+)?", text) is not None


def _interface(item: str) -> bool:
    return INTERFACE_NAME.fullmatch(item.strip()) is not None


def _list_of(right: Callable[[str], bool], *words: str) -> Callable[[str], bool]:
    return lambda text: text in words or not text.strip() or all(map(right, text.split(",")))


_TAKEN: Mapping[str, Callable[[str], bool]] = {
    names.MODE: lambda text: text in names.MODES,
    names.STATUS_PORT: _port,
    names.INCLUDE_INBOUND: _list_of(_port, "*"),
    names.EXCLUDE_INBOUND: _list_of(_port),
    names.EXCLUDE_OUTBOUND: _list_of(_port),
    names.INCLUDE_NETWORKS: _list_of(_network, "*"),
    names.EXCLUDE_NETWORKS: _list_of(_network),
    **dict.fromkeys((INTERFACES, names.REROUTE, names.KUBEVIRT), _list_of(_interface)),
    **dict.fromkeys(COUNTS, _count),
    **dict.fromkeys(QUANTITIES, _quantity),
    MERGE_METRICS: lambda text: text in TRUE_WORDS | FALSE_WORDS,
}
_WANTED = {
    names.MODE: f"{', '.join(names.MODES[:-1])} or {names.MODES[-1]}",
    names.STATUS_PORT: "one port",
    names.INCLUDE_NETWORKS: "'*', or ADDRESS/PREFIX between commas, without blanks",
    names.EXCLUDE_NETWORKS: "ADDRESS/PREFIX between commas, without blanks",
    **dict.fromkeys(
        (INTERFACES, names.REROUTE, names.KUBEVIRT), "names between commas, none of them empty"
    ),
    **dict.fromkeys(COUNTS, "a whole number"),
    **dict.fromkeys(QUANTITIES, "a quantity, such as 100m or 128Mi"),
    MERGE_METRICS: "true or false",
}


def refused(pod: Pod) -> Iterator[Note]:
    """Yield the values for which the injector refuses a pod; those that the agent takes, too."""
    for name, taken in _TAKEN.items():
        value = pod.annotation(name)
        if value is None or taken(value):
            continue
        wanted = _WANTED.get(name, "single ports between commas, no ranges and no empty items")
        yield Note(
            message=f"annotation {name} is {shown(value)}: Istio's injector refuses such a pod",
            hint=f"it takes {wanted}",
            at=names.annotation_at(name),
        )
