"""The API servers that the agent is held against: the fake one and, if KUBE_APISERVER names its
binary, a real one with RBAC.

Whoever made the cluster does everything by the API, so that one test fits both.
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.fakes import fake_api
from tests.support import real_api
from tests.support.real_api import VARIABLE

SERVERS = ("fake", *(("real",) if os.environ.get(VARIABLE) else ()))

Rights = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class Server:
    """A cluster; `agent` and `admin` are kubeconfigs for those two."""

    agent: Path
    admin: Path
    stop: Callable[[], None]
    start: Callable[[], object]  # again, where it was


@contextlib.contextmanager
def serving(kind: str, folder: Path, rights: Rights) -> Iterator[Server]:
    """Serve an empty cluster in which the agent may do no more than this."""
    if kind == "fake":
        with fake_api.serving() as api:
            api.rights = frozenset((verb, kind) for kind in rights for verb in rights[kind])
            yield Server(
                agent=fake_api.kubeconfig(folder, api),
                admin=fake_api.kubeconfig(folder, api, fake_api.ADMIN),
                stop=api.stop,
                start=api.start,
            )
        return
    with real_api.running(folder) as real:
        real.allow(rights)
        agent = real.kubeconfig("agent", real.token())
        yield Server(agent=agent, admin=real.admin, stop=real.stop, start=real.start)
