"""What the catalogue says of each program that writes rules. Data only."""

from dataclasses import dataclass
from enum import StrEnum


class Role(StrEnum):
    """What an owner is to a node, which decides what its remains are called."""

    NEVER = "never"  # its rules end with what they serve, or belong to the node
    SERVICE_PROXY = "service-proxy"
    CNI = "cni"
    MESH = "mesh"  # steers a pod's traffic into a proxy beside it
    CAPTURE = "capture"  # the same, of Istio's kind: what this agent itself writes


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """One program's traces, and the signs of its life.

    `processes` are names of which one must run in the namespace, each with the word that it must
    have been started with, if any; `embedded` are programs that have it inside unless they were
    started with the word next to them. `health` are TCP ports that it
    alone answers on. `heartbeats` are chains that it renews while it lives; found alone they prove
    nothing, for they stay. `bridges` are interfaces of which only the owner writes rules.
    """

    name: str
    title: str
    role: Role
    source: str
    chains: tuple[str, ...] = ()
    tables: tuple[str, ...] = ()
    comments: tuple[str, ...] = ()
    sets: tuple[str, ...] = ()
    links: tuple[str, ...] = ()
    bridges: tuple[str, ...] = ()
    pins: tuple[str, ...] = ()
    programs: tuple[str, ...] = ()
    policies: tuple[tuple[int, int, int], ...] = ()  # mark, mask, route table
    cni_types: tuple[str, ...] = ()
    processes: tuple[str, ...] = ()
    embedded: tuple[tuple[str, str], ...] = ()
    health: tuple[int, ...] = ()
    heartbeats: tuple[str, ...] = ()
