"""Where the runtime of this node looks for CNI, by its own word.

k3s, MicroK8s, GKE and others have directories of their own. An entry in one that the runtime does
not read captures nothing; one whose plugin is where the runtime does not look keeps every pod of
the node from starting, and from ending.
"""

import asyncio
import contextlib
import os
from typing import TYPE_CHECKING

from agent.cni.installer import BIN_DIR, CONF_DIR, Place
from agent.kernel.netns import id_at

if TYPE_CHECKING:
    from agent.node.cri.details import CniPlaces

PATIENCE_S = 3.0
NODE = "/proc/1/root"  # the node's files, as seen by a container that shares its processes


async def told(endpoint: str | None) -> "CniPlaces | None":
    """Return what the runtime says; None if there is none to ask, or it does not tell."""
    if endpoint == "none":
        return None
    # Here and not above: loading grpc takes longer than most commands.
    from agent.node.cri.client import CriClient
    from agent.node.cri.errors import CriError

    with contextlib.suppress(CriError, TimeoutError):
        async with asyncio.timeout(PATIENCE_S), CriClient(endpoint) as client:
            return await client.cni_places()
    return None


def usual(places: "CniPlaces | None") -> tuple[str, str]:
    """Return the directories of configurations and plugins where nobody names others."""
    return (places.conf_dir, places.bin_dirs[0]) if places else (CONF_DIR, BIN_DIR)


def unread(place: Place, places: "CniPlaces | None") -> str:
    """Return a sentence if the runtime surely does not read the configurations of a place."""
    if places is None or not _differ(place.conf_dir, places.conf_dir):
        return ""
    return (
        f"the runtime reads {places.conf_dir} and not {place.conf_dir} (cni.conf_dir): an entry "
        "there captures nothing"
    )


def unfound(place: Place, places: "CniPlaces | None") -> str:
    """Return a sentence if the runtime surely does not look for plugins in a place."""
    if places is None or not all(_differ(place.bin_dir, one) for one in places.bin_dirs):
        return ""
    return (
        f"the runtime looks for plugins in {' and '.join(places.bin_dirs)} and not in "
        f"{place.bin_dir} (cni.bin_dir): with the entry no pod could start or end"
    )


def _differ(ours: str, theirs: str) -> bool:
    """Whether two paths surely lead to different directories; theirs is one of the node."""
    if os.path.normpath(ours) == os.path.normpath(theirs):
        return False
    seen = [found for path in (f"{NODE}{theirs}", theirs) if (found := id_at(path))]
    return bool(seen) and id_at(ours) not in seen
