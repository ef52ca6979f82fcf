"""The pods that only the CNI plugin told of, over a restart: one file a pod, in the state folder.

Where a runtime can be asked, its first list says the same and more; these files are for nodes where
it cannot, or not yet. A file that is lost or damaged, or whose namespace is gone, does no harm.
"""

import contextlib
import dataclasses
import hashlib
import json
import logging
from pathlib import Path

from agent.kernel.files import replace
from agent.model.errors import AgentError
from agent.node.pod import Wish
from agent.node.static_source import identity_of

log = logging.getLogger(__name__)

PATTERN = "pod-*.json"


class Memory:
    """One folder of such files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def keep(self, wish: Wish) -> None:
        """Remember a pod. That it cannot be written is logged: the pod itself is captured."""
        identity = identity_of(wish.netns) if wish.netns else None
        document = {"identity": identity, "wish": dataclasses.asdict(wish)}
        try:
            replace(self._path(wish.key), json.dumps(document, default=dict).encode())
        except AgentError as error:
            log.warning("a pod is not remembered over a restart", extra={"cause": str(error)})

    def drop(self, key: str) -> None:
        with contextlib.suppress(OSError):
            self._path(key).unlink()

    def load(self) -> list[Wish]:
        """Return the pods whose namespace still is the one that was captured, and drop the rest."""
        found = []
        for path in sorted(self._folder.glob(PATTERN)):
            wish = _read(path)
            if wish is None:
                with contextlib.suppress(OSError):
                    path.unlink()
            else:
                found.append(wish)
        return found

    def _path(self, key: str) -> Path:
        return self._folder / f"pod-{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


def _read(path: Path) -> Wish | None:
    try:
        document = json.loads(path.read_bytes())
        wish = Wish(**document["wish"])
        wish = dataclasses.replace(wish, init_names=tuple(wish.init_names))
        there = identity_of(str(wish.netns))
        return wish if there is not None and there == document["identity"] else None
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None
