"""What must be remembered of a capture while it stands: its settings, and what was there before.

One file a namespace, named after its inode. The kernel gives inodes out again, which keeps the
files few, so a record also holds the namespace's cookie, which no other gets until reboot, and the
boot: a folder that outlives it has records of namespaces whose numbers others get next. A lost
record does no harm: rules are then recognised by name and shape alone.
"""

import contextlib
import errno
import ipaddress
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent.kernel import files
from agent.kernel.netns import Netns, boot
from agent.model.errors import EnvironmentLacks, InvalidSettings
from agent.model.plan import WHOLE_MARK, LocalRoute, LoopbackAddress, PolicyRule, Route, plan
from agent.model.ruleset import Family
from agent.model.settings import parse
from agent.model.wanted import Before, Known

VERSION = 1
STATE_DIR = "INTERCEPT_STATE_DIR"


def state_dir() -> Path:
    return Path(os.environ.get(STATE_DIR) or "/run/intercept-agent/state")


@dataclass(frozen=True, slots=True)
class Record:
    """A capture that stands: its settings, and what was there before it.

    `pending` are the settings that are being applied in their place; a run that was killed leaves
    them, and then either may be what is loaded.
    """

    settings: Mapping[str, object]
    before: Before
    pending: Mapping[str, object] | None = None

    def known(self) -> Known:
        """Return what the planner can use; settings that no longer parse are worth nothing."""
        plans = []
        for settings in (self.settings, self.pending):
            with contextlib.suppress(InvalidSettings):
                plans += [] if settings is None else [plan(parse(settings))]
        return Known(tuple(plans), self.before)


def load(netns: Netns) -> Record | None:
    """Return the record of a namespace; one that is missing or damaged is none."""
    path = file_of(netns)
    if path is None:
        return None
    try:
        document = json.loads(path.read_text())
        now = boot()
        is_its = (document["cookie"], document.get("boot", now)) == (netns.cookie(), now)
        return _decode(document) if is_its else None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None


def as_applied(netns: Netns, settings: Mapping[str, object]) -> dict[str, object]:
    """Return the settings with the guard and the gate that were applied here, unless they say.

    These are no part of what is captured: who asks about that does not ask for them to be gone.
    """
    found = load(netns)
    applied = found.settings if found else {}
    kept = {key: applied[key] for key in ("guard", "gate", "init_cgroups") if key in applied}
    return {"guard": "off", **kept, **settings}


def save(netns: Netns, record: Record) -> None:
    """Write the record atomically; in a container whose root is read-only there is none.

    Raises: EnvironmentLacks if it cannot be written.
    """
    path = file_of(netns)
    if path is None:
        return
    document = {"cookie": netns.cookie(), "boot": boot(), **_encode(record)}
    try:
        files.replace(path, json.dumps(document).encode())
    except EnvironmentLacks as error:
        if getattr(error.__cause__, "errno", None) != errno.EROFS:
            raise


def drop(netns: Netns) -> None:
    path = file_of(netns)
    if path is not None:
        with contextlib.suppress(OSError):
            path.unlink()


def file_of(netns: Netns) -> Path | None:
    """Return the file of a namespace, or None where the kernel (before 5.14) knows no cookies."""
    return None if netns.cookie() is None else state_dir() / f"netns-{netns.id.ino}.json"


def _encode(record: Record) -> dict[str, Any]:
    return {
        "version": VERSION,
        "settings": dict(record.settings),
        "pending": None if record.pending is None else dict(record.pending),
        "before": {
            "shells": sorted(
                [family, table, chain] for family, table, chain in record.before.shells
            ),
            "routes": [_encode_route(route) for route in record.before.routes],
        },
    }


def _decode(document: Any) -> Record:
    if document["version"] != VERSION:
        raise ValueError("a record of another version")
    before = document["before"]
    shells = frozenset((Family(f), str(t), str(c)) for f, t, c in before["shells"])
    routes = tuple(_decode_route(route) for route in before["routes"])
    pending = document["pending"]
    settings = dict(document["settings"])
    known = Before(shells, routes)
    return Record(settings, known, None if pending is None else dict(pending))


def _encode_route(route: Route) -> list[object]:
    if isinstance(route, PolicyRule):
        return ["rule", route.family, route.mark, route.table, route.mask]
    if isinstance(route, LocalRoute):
        return ["route", route.family, route.table]
    return ["address", route.family, f"{route.address}/{route.prefix}"]


def _decode_route(words: Any) -> Route:
    kind, family = words[0], Family(words[1])
    if kind == "rule":
        mask = _word(words[4]) if len(words) > 4 else WHOLE_MARK
        return PolicyRule(family, _word(words[2]), _word(words[3]), mask=mask)
    if kind == "route":
        return LocalRoute(family, _word(words[2]))
    there = ipaddress.IPv6Interface(words[2])
    return LoopbackAddress(family, str(there.ip), there.network.prefixlen)


def _word(value: Any) -> int:
    number = int(value)
    if not 0 <= number < 2**32:
        raise ValueError(f"{number} is no mark and no route table")
    return number
