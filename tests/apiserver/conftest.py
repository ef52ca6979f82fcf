"""Tests of a real API server, and only where KUBE_APISERVER names it (see `make test-apiserver`).

What is asked of it here is what the fake one cannot answer for: what a server does by itself.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from agent.node.config import Kubernetes
from agent.node.kube.cluster import rights
from agent.node.kube.errors import ApiRefused
from tests.apiserver.at_work import NODES
from tests.fakes.fake_api import NODE
from tests.support import real_api
from tests.support.real_api import VARIABLE, RealApi, ask

collect_ignore_glob = [] if os.environ.get(VARIABLE) else ["test_*.py"]
POLICY = Kubernetes(repair="label", unsafe="delete", taint="intercept-agent/not-ready")


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealApi]:
    """One for all tests of this folder: to start it takes longer than they do."""
    with real_api.running(tmp_path_factory.mktemp("api")) as api:
        api.allow(rights(POLICY))
        yield api


@pytest.fixture
def api(server: RealApi) -> Iterator[RealApi]:
    """The server with a namespace `shop` in the mesh, and nothing in it."""
    server.make_shop()
    yield server
    server.empty_shop()


@pytest.fixture
def node(api: RealApi) -> Callable[[], dict[str, Any]]:
    """The agent's node, which stays from one test to the next; the value returns what it is."""
    with contextlib.suppress(ApiRefused):
        ask(api.admin, "POST", NODES, {"metadata": {"name": NODE}})
    return lambda: dict(ask(api.admin, "GET", f"{NODES}/{NODE}"))
