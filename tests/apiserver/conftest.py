"""Tests of a real API server, and only where KUBE_APISERVER names it (see `make test-apiserver`).

What is asked of it here is what the fake one cannot answer for: what a server does by itself.
Some of it takes the etcd, kubectl and controllers that were built with it: a server alone is asked
less.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agent.node.config import Kubernetes
from agent.node.kube.cluster import rights
from agent.node.kube.errors import ApiRefused
from tests.apiserver.at_work import NODES
from tests.fakes.fake_api import NODE
from tests.support import real_api
from tests.support.real_api import VARIABLE, RealApi, ask

BUILT_WITH_IT = ("etcd", "kubectl", "kube-controller-manager")
WITH_THESE = ["test_bookmarks.py", "test_manifests.py", "test_writing.py"]


def _left_out() -> list[str]:
    if not (binary := os.environ.get(VARIABLE)):
        return ["test_*.py"]
    missing = [each for each in BUILT_WITH_IT if not Path(binary).with_name(each).exists()]
    return WITH_THESE if missing else []


collect_ignore_glob = _left_out()
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
