"""Whether a namespace's gate is still open: until its proxy has listened there once. Pure.

eBPF closes it by itself. Of rules, the record says how it stood when they were last written: what
is captured and on no record has its gate closed, since nobody knows what was before.
"""

from dataclasses import replace

from agent.capture.record import Record
from agent.model.settings import Settings, parse
from agent.model.state import EBPF, NamespaceState
from agent.model.wanted import captures

CLOSED = "closed"
KEYS = ("gate", "init_cgroups")


def stands(have: NamespaceState, found: Record | None) -> str | None:
    """Return the gate as it stands, None where nothing was captured yet."""
    enrolled = have.enrolment
    if enrolled is not None and enrolled.shut:
        return CLOSED
    if enrolled is not None and enrolled.settings is not None:
        return enrolled.settings.gate
    if found is not None:
        return str(found.settings.get("gate", CLOSED))
    return CLOSED if captures(have) else None


def settled(
    settings: Settings, have: NamespaceState, found: Record | None, backend: str, *, listening: bool
) -> Settings:
    """Return the settings as they are to be loaded: with the gate closed once the proxy listened.

    `listening` says that it does now. The programs of eBPF know of that themselves, so what they
    were told stays. Rules know no gate that is open for all: where they are written it is closed.
    """
    if settings.gate == CLOSED:
        return settings
    shut = listening or stands(have, found) == CLOSED
    if not shut and (backend == EBPF or settings.gate == "listener"):
        return settings
    told = CLOSED
    if backend == EBPF and have.enrolment is not None and have.enrolment.settings is not None:
        told = have.enrolment.settings.gate
    elif backend == EBPF and stands(have, found) is None:
        told = settings.gate
    return replace(settings, gate=told, init_cgroups=())


def as_applied(settings: Settings, have: NamespaceState, found: Record | None) -> Settings:
    """Return the settings with the gate as it was applied: it is to be compared with no other."""
    if settings.gate == CLOSED:
        return settings
    if found is None:
        return replace(settings, gate=stands(have, found) or CLOSED, init_cgroups=())
    applied = parse({key: found.settings[key] for key in KEYS if key in found.settings})
    return replace(settings, gate=applied.gate, init_cgroups=applied.init_cgroups)
