"""The API servers that the agent is held against: the fake one and, if KUBE_APISERVER names its
binary (and etcd is installed, which Debian has), a real one with RBAC.

Whoever made the cluster does everything by the API, so that one test fits both.
"""

import asyncio
import contextlib
import os
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from agent.node.kube.access import Kubeconfig
from agent.node.kube.client import JSON, MERGE_PATCH, ApiClient
from agent.node.kube.errors import ApiError
from tests.fakes import fake_api
from tests.support.agent import free_port

VARIABLE = "KUBE_APISERVER"
SERVERS = ("fake", *(("real",) if os.environ.get(VARIABLE) else ()))
START_S = 60.0
ADMIN, AGENT = "it-admin-token", "it-agent-token"

Rights = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class Server:
    """A cluster; `agent` and `admin` are kubeconfigs for those two."""

    agent: Path
    admin: Path


@contextlib.contextmanager
def serving(kind: str, folder: Path, rights: Rights) -> Iterator[Server]:
    """Serve an empty cluster in which the agent may do no more than this."""
    if kind == "fake":
        with fake_api.serving() as api:
            path = fake_api.kubeconfig(folder, api)
            yield Server(agent=path, admin=path)
        return
    with contextlib.ExitStack() as stack:
        certificates(folder)
        etcd = stack.enter_context(_etcd(folder))
        port = stack.enter_context(_apiserver(folder, etcd))
        server = Server(
            agent=_kubeconfig(folder, port, AGENT), admin=_kubeconfig(folder, port, ADMIN)
        )
        _wait_until_ready(server.admin)
        _allow(server.admin, rights)
        yield server


def certificates(folder: Path) -> None:
    """Make an authority (ca.crt) and a certificate for 127.0.0.1 that it has signed (tls.crt)."""
    for command in (
        "openssl req -x509 -newkey rsa:2048 -nodes -keyout ca.key -out ca.crt -subj /CN=it-ca",
        "openssl req -newkey rsa:2048 -nodes -keyout tls.key -out tls.csr -subj /CN=it"
        " -addext subjectAltName=IP:127.0.0.1",
        "openssl x509 -req -in tls.csr -CA ca.crt -CAkey ca.key -out tls.crt -copy_extensions copy",
    ):
        subprocess.run(command.split(), cwd=folder, capture_output=True, check=True)


@contextlib.contextmanager
def _running(folder: Path, *command: str) -> Iterator[None]:
    with (folder / f"{Path(command[0]).name}.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
        try:
            yield
        finally:
            process.terminate()
            process.wait()


@contextlib.contextmanager
def _etcd(folder: Path) -> Iterator[str]:
    client, peer = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
    listen = ("--listen-client-urls", client, "--advertise-client-urls", client)
    peers = ("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer)
    cluster = ("--initial-cluster", f"default={peer}")
    data = ("--data-dir", str(folder / "etcd"))
    with _running(folder, "etcd", *data, *listen, *peers, *cluster):
        yield client


@contextlib.contextmanager
def _apiserver(folder: Path, etcd: str) -> Iterator[int]:
    port = free_port()
    tokens = folder / "tokens.csv"
    tokens.write_text(f'{ADMIN},admin,admin,"system:masters"\n{AGENT},agent,agent\n')
    options = {
        "etcd-servers": etcd,
        "bind-address": "127.0.0.1",
        # Else it looks for a default route, which a machine for tests need not have.
        "advertise-address": "127.0.0.1",
        "endpoint-reconciler-type": "none",
        "allow-privileged": "true",
        "secure-port": port,
        "tls-cert-file": folder / "tls.crt",
        "tls-private-key-file": folder / "tls.key",
        "token-auth-file": tokens,
        "authorization-mode": "RBAC",
        "service-cluster-ip-range": "10.0.0.0/24",
        "service-account-issuer": "https://it",
        "service-account-key-file": folder / "tls.key",
        "service-account-signing-key-file": folder / "tls.key",
        "disable-admission-plugins": "ServiceAccount",
    }
    words = (f"--{name}={value}" for name, value in options.items())
    with _running(folder, os.environ[VARIABLE], *words):
        yield port


def _kubeconfig(folder: Path, port: int, token: str) -> Path:
    cluster = {"server": f"https://127.0.0.1:{port}", "certificate-authority": "ca.crt"}
    document = {
        "current-context": "it",
        "contexts": [{"name": "it", "context": {"cluster": "it", "user": "it"}}],
        "clusters": [{"name": "it", "cluster": cluster}],
        "users": [{"name": "it", "user": {"token": token}}],
    }
    path = folder / f"{token}.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def _wait_until_ready(admin: Path) -> None:
    deadline = time.monotonic() + START_S
    while True:
        try:
            ask(admin, "GET", "/api/v1/namespaces/default")
        except ApiError:
            assert time.monotonic() < deadline, "the API server did not start; see its log"
            time.sleep(0.2)
        else:
            return


def _allow(server_admin: Path, rights: Rights) -> None:
    """Give the agent what it says that it needs, and no more."""
    group, version = "rbac.authorization.k8s.io", "v1"
    path = f"/apis/{group}/{version}"
    about: dict[str, Any] = {"apiVersion": f"{group}/{version}"}
    rules = [{"apiGroups": [""], "resources": [r], "verbs": [*rights[r]]} for r in rights]
    name = {"name": "it-agent"}
    role = {**about, "kind": "ClusterRole", "metadata": name, "rules": rules}
    binding = {
        **about,
        "kind": "ClusterRoleBinding",
        "metadata": name,
        "roleRef": {"apiGroup": group, "kind": "ClusterRole", **name},
        "subjects": [{"apiGroup": group, "kind": "User", "name": "agent"}],
    }
    ask(server_admin, "POST", f"{path}/clusterroles", role)
    ask(server_admin, "POST", f"{path}/clusterrolebindings", binding)


def ask(kubeconfig: Path, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
    """Ask as somebody, and return the answer. Raises: ApiError."""
    client = ApiClient(Kubeconfig(kubeconfig))
    if body is None:
        return asyncio.run(client.get(path))
    kind = MERGE_PATCH if method == "PATCH" else JSON
    return asyncio.run(client.send(method, path, body, kind))
