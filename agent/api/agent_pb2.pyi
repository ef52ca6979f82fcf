# ruff: noqa
# fmt: off
# mypy: ignore-errors
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ListRequest(_message.Message):
    __slots__ = ("namespace",)
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    def __init__(self, namespace: _Optional[str] = ...) -> None: ...

class ListReply(_message.Message):
    __slots__ = ("pods",)
    PODS_FIELD_NUMBER: _ClassVar[int]
    pods: _containers.RepeatedCompositeFieldContainer[Pod]
    def __init__(self, pods: _Optional[_Iterable[_Union[Pod, _Mapping]]] = ...) -> None: ...

class PodName(_message.Message):
    __slots__ = ("namespace", "name", "uid")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    UID_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    name: str
    uid: str
    def __init__(self, namespace: _Optional[str] = ..., name: _Optional[str] = ..., uid: _Optional[str] = ...) -> None: ...

class Pod(_message.Message):
    __slots__ = ("namespace", "name", "uid", "netns", "captured", "backend", "reason", "text", "state", "source")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    UID_FIELD_NUMBER: _ClassVar[int]
    NETNS_FIELD_NUMBER: _ClassVar[int]
    CAPTURED_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    name: str
    uid: str
    netns: str
    captured: bool
    backend: str
    reason: str
    text: str
    state: str
    source: str
    def __init__(self, namespace: _Optional[str] = ..., name: _Optional[str] = ..., uid: _Optional[str] = ..., netns: _Optional[str] = ..., captured: _Optional[bool] = ..., backend: _Optional[str] = ..., reason: _Optional[str] = ..., text: _Optional[str] = ..., state: _Optional[str] = ..., source: _Optional[str] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("namespace", "after_event")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    AFTER_EVENT_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    after_event: int
    def __init__(self, namespace: _Optional[str] = ..., after_event: _Optional[int] = ...) -> None: ...

class Change(_message.Message):
    __slots__ = ("pod", "gone", "event", "present")
    POD_FIELD_NUMBER: _ClassVar[int]
    GONE_FIELD_NUMBER: _ClassVar[int]
    EVENT_FIELD_NUMBER: _ClassVar[int]
    PRESENT_FIELD_NUMBER: _ClassVar[int]
    pod: Pod
    gone: Pod
    event: Event
    present: Present
    def __init__(self, pod: _Optional[_Union[Pod, _Mapping]] = ..., gone: _Optional[_Union[Pod, _Mapping]] = ..., event: _Optional[_Union[Event, _Mapping]] = ..., present: _Optional[_Union[Present, _Mapping]] = ...) -> None: ...

class Present(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Event(_message.Message):
    __slots__ = ("number", "time", "kind", "pod", "message")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    POD_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    number: int
    time: float
    kind: str
    pod: str
    message: str
    def __init__(self, number: _Optional[int] = ..., time: _Optional[float] = ..., kind: _Optional[str] = ..., pod: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class Explanation(_message.Message):
    __slots__ = ("pod", "decision", "settings", "mode", "backend", "findings")
    POD_FIELD_NUMBER: _ClassVar[int]
    DECISION_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    FINDINGS_FIELD_NUMBER: _ClassVar[int]
    pod: Pod
    decision: Decision
    settings: _containers.RepeatedCompositeFieldContainer[Choice]
    mode: Choice
    backend: Choice
    findings: Findings
    def __init__(self, pod: _Optional[_Union[Pod, _Mapping]] = ..., decision: _Optional[_Union[Decision, _Mapping]] = ..., settings: _Optional[_Iterable[_Union[Choice, _Mapping]]] = ..., mode: _Optional[_Union[Choice, _Mapping]] = ..., backend: _Optional[_Union[Choice, _Mapping]] = ..., findings: _Optional[_Union[Findings, _Mapping]] = ...) -> None: ...

class Decision(_message.Message):
    __slots__ = ("captured", "reason", "text", "certain", "problems", "warnings")
    CAPTURED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CERTAIN_FIELD_NUMBER: _ClassVar[int]
    PROBLEMS_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    captured: bool
    reason: str
    text: str
    certain: bool
    problems: _containers.RepeatedScalarFieldContainer[str]
    warnings: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, captured: _Optional[bool] = ..., reason: _Optional[str] = ..., text: _Optional[str] = ..., certain: _Optional[bool] = ..., problems: _Optional[_Iterable[str]] = ..., warnings: _Optional[_Iterable[str]] = ...) -> None: ...

class Choice(_message.Message):
    __slots__ = ("name", "value", "by")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    BY_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: str
    by: str
    def __init__(self, name: _Optional[str] = ..., value: _Optional[str] = ..., by: _Optional[str] = ...) -> None: ...

class Findings(_message.Message):
    __slots__ = ("in_sync", "differences", "foreign", "warnings", "guarded", "error")
    IN_SYNC_FIELD_NUMBER: _ClassVar[int]
    DIFFERENCES_FIELD_NUMBER: _ClassVar[int]
    FOREIGN_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    GUARDED_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    in_sync: bool
    differences: _containers.RepeatedScalarFieldContainer[str]
    foreign: _containers.RepeatedScalarFieldContainer[str]
    warnings: _containers.RepeatedScalarFieldContainer[str]
    guarded: bool
    error: str
    def __init__(self, in_sync: _Optional[bool] = ..., differences: _Optional[_Iterable[str]] = ..., foreign: _Optional[_Iterable[str]] = ..., warnings: _Optional[_Iterable[str]] = ..., guarded: _Optional[bool] = ..., error: _Optional[str] = ...) -> None: ...

class ScanRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ScanReply(_message.Message):
    __slots__ = ("findings", "scanned")
    FINDINGS_FIELD_NUMBER: _ClassVar[int]
    SCANNED_FIELD_NUMBER: _ClassVar[int]
    findings: _containers.RepeatedCompositeFieldContainer[Finding]
    scanned: Scanned
    def __init__(self, findings: _Optional[_Iterable[_Union[Finding, _Mapping]]] = ..., scanned: _Optional[_Union[Scanned, _Mapping]] = ...) -> None: ...

class Finding(_message.Message):
    __slots__ = ("kind", "severity", "where", "objects", "owner", "evidence", "explanation", "fix")
    KIND_FIELD_NUMBER: _ClassVar[int]
    SEVERITY_FIELD_NUMBER: _ClassVar[int]
    WHERE_FIELD_NUMBER: _ClassVar[int]
    OBJECTS_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    EVIDENCE_FIELD_NUMBER: _ClassVar[int]
    EXPLANATION_FIELD_NUMBER: _ClassVar[int]
    FIX_FIELD_NUMBER: _ClassVar[int]
    kind: str
    severity: str
    where: Where
    objects: _containers.RepeatedScalarFieldContainer[str]
    owner: str
    evidence: _containers.RepeatedScalarFieldContainer[str]
    explanation: str
    fix: str
    def __init__(self, kind: _Optional[str] = ..., severity: _Optional[str] = ..., where: _Optional[_Union[Where, _Mapping]] = ..., objects: _Optional[_Iterable[str]] = ..., owner: _Optional[str] = ..., evidence: _Optional[_Iterable[str]] = ..., explanation: _Optional[str] = ..., fix: _Optional[str] = ...) -> None: ...

class Where(_message.Message):
    __slots__ = ("netns", "pod", "family", "backend", "table")
    NETNS_FIELD_NUMBER: _ClassVar[int]
    POD_FIELD_NUMBER: _ClassVar[int]
    FAMILY_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    netns: str
    pod: str
    family: str
    backend: str
    table: str
    def __init__(self, netns: _Optional[str] = ..., pod: _Optional[str] = ..., family: _Optional[str] = ..., backend: _Optional[str] = ..., table: _Optional[str] = ...) -> None: ...

class Scanned(_message.Message):
    __slots__ = ("namespaces", "time", "failed")
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    namespaces: int
    time: float
    failed: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, namespaces: _Optional[int] = ..., time: _Optional[float] = ..., failed: _Optional[_Iterable[str]] = ...) -> None: ...
