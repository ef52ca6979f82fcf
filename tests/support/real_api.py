"""A real control plane, in a folder: etcd and kube-apiserver with RBAC, every request written down.

`KUBE_APISERVER` names the binary. etcd, kubectl and kube-controller-manager are taken from the
folder that it is in, or else from PATH.
"""

import asyncio
import base64
import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml

from agent.node.kube.access import Kubeconfig
from agent.node.kube.client import JSON, MERGE_PATCH, ApiClient
from agent.node.kube.errors import CONFLICT, ApiRefused
from tests.support.agent import free_port, wait_for

VARIABLE = "KUBE_APISERVER"
START_S = 120.0
ADMIN_TOKEN = "it-admin-token"
ISSUER = "https://it"
ACCOUNT = "intercept-agent"  # a namespace and an account in it, as in deploy/
ACCOUNT_PATH = f"/api/v1/namespaces/{ACCOUNT}/serviceaccounts/{ACCOUNT}"
USER = f"system:serviceaccount:{ACCOUNT}:{ACCOUNT}"
AT_ONCE = {"kind": "DeleteOptions", "apiVersion": "v1", "gracePeriodSeconds": 0}
EVERYTHING = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "rules": [{"level": "Metadata"}],
    "omitStages": ["RequestReceived"],
}


def tool(name: str) -> str:
    """Return the path of a program of the control plane; raises: FileNotFoundError."""
    beside = Path(os.environ[VARIABLE]).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise FileNotFoundError(f"{name} is neither beside {os.environ[VARIABLE]} nor in PATH")
    return found


class RealApi:
    """One control plane, which `running` starts and ends. The kubeconfig `admin` may do all."""

    def __init__(self, folder: Path, options: Mapping[str, object]) -> None:
        self.folder = folder
        self.port = free_port()
        self._etcd_port, self._peer_port = free_port(), free_port()
        self._options = options
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        certificates(folder)
        self.admin = self.kubeconfig("admin", token=ADMIN_TOKEN)

    # --- its life ---------------------------------------------------------------------------------

    def start(self, port: int | None = None) -> Path:
        """Start what does not run, and return a kubeconfig that may do all.

        At another port it is hidden from whoever knows the usual one.
        """
        if "etcd" not in self._processes:
            self._start_etcd()
        self._start_server(port or self.port)
        admin = self.admin if port is None else self.kubeconfig("hidden", ADMIN_TOKEN, port)
        wait_for(lambda: ask(admin, "GET", "/api/v1/namespaces/kube-system"), START_S)
        return admin

    def stop(self, name: str = "kube-apiserver", number: signal.Signals = signal.SIGKILL) -> None:
        """End a process of it: kill it, as a crash does, or ask it to end."""
        process = self._processes.pop(name, None)
        if process is not None:
            process.send_signal(number)
            process.wait()

    def wipe(self) -> None:
        """Have a new etcd that knows nothing in place of the old one; the server is stopped."""
        self.stop()
        self.stop("etcd")
        shutil.rmtree(self.folder / "etcd")

    def end(self) -> None:
        for name in reversed(tuple(self._processes)):
            self.stop(name)

    def run(self, program: str, options: Mapping[str, object]) -> None:
        """Start a process that ends with the rest; what it says goes to a file."""
        words = [f"--{name}={value}" for name, value in options.items()]
        with (self.folder / f"{program}.log").open("ab") as log:
            self._processes[program] = subprocess.Popen(
                [tool(program), *words], stdout=log, stderr=log, cwd=self.folder
            )

    def _start_etcd(self) -> None:
        client, peer = (f"http://127.0.0.1:{port}" for port in (self._etcd_port, self._peer_port))
        options = {
            "data-dir": self.folder / "etcd",
            "listen-client-urls": client,
            "advertise-client-urls": client,
            "listen-peer-urls": peer,
            "initial-advertise-peer-urls": peer,
            "initial-cluster": f"default={peer}",
        }
        self.run("etcd", options)

    def _start_server(self, port: int) -> None:
        policy, tokens = self.folder / "audit.yaml", self.folder / "tokens.csv"
        policy.write_text(yaml.safe_dump(EVERYTHING))
        tokens.write_text(f'{ADMIN_TOKEN},admin,admin,"system:masters"\n')
        options = {
            "etcd-servers": f"http://127.0.0.1:{self._etcd_port}",
            "bind-address": "127.0.0.1",
            # Else it looks for a default route, which a machine for tests need not have.
            "advertise-address": "127.0.0.1",
            "endpoint-reconciler-type": "none",
            "allow-privileged": "true",
            "secure-port": port,
            "tls-cert-file": self.folder / "tls.crt",
            "tls-private-key-file": self.folder / "tls.key",
            "token-auth-file": tokens,
            "client-ca-file": self.folder / "ca.crt",
            "authorization-mode": "RBAC",
            "service-cluster-ip-range": "10.0.0.0/24",
            "service-account-issuer": ISSUER,
            "service-account-key-file": self.folder / "tls.key",
            "service-account-signing-key-file": self.folder / "tls.key",
            # Nobody makes the accounts that pods have if they name none, unless a test has it done.
            "disable-admission-plugins": "ServiceAccount",
            "audit-policy-file": policy,
            "audit-log-path": self.folder / "audit.log",
            **self._options,
        }
        self.run("kube-apiserver", options)

    def forget_history(self, admin: Path) -> None:
        """Compact etcd up to now."""
        revision = int(ask(admin, "GET", "/api/v1/namespaces")["metadata"]["resourceVersion"])
        document = json.dumps({"revision": revision, "physical": True}).encode()
        url = f"http://127.0.0.1:{self._etcd_port}/v3/kv/compaction"
        with urllib.request.urlopen(url, document, timeout=30):
            pass

    # --- who may do what --------------------------------------------------------------------------

    def kubeconfig(self, name: str, token: str, port: int | None = None) -> Path:
        """Write one for whoever has this token."""
        server = f"https://127.0.0.1:{port or self.port}"
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "it",
            "contexts": [{"name": "it", "context": {"cluster": "it", "user": "it"}}],
            "clusters": [
                {"name": "it", "cluster": {"server": server, "certificate-authority": "ca.crt"}}
            ],
            "users": [{"name": "it", "user": {"token": token}}],
        }
        path = self.folder / f"{name}.kubeconfig"
        path.write_text(yaml.safe_dump(document))
        return path

    def allow(self, rights: Mapping[str, tuple[str, ...]]) -> None:
        """Make the agent's account and give it these verbs by resource, and no more."""
        group = "rbac.authorization.k8s.io"
        about: dict[str, Any] = {"apiVersion": f"{group}/v1", "metadata": {"name": ACCOUNT}}
        rules = [{"apiGroups": [""], "resources": [r], "verbs": [*rights[r]]} for r in rights]
        role = {"apiGroup": group, "kind": "ClusterRole", "name": ACCOUNT}
        subject = {"kind": "ServiceAccount", "namespace": ACCOUNT, "name": ACCOUNT}
        binding = {**about, "kind": "ClusterRoleBinding", "roleRef": role, "subjects": [subject]}
        named = {"metadata": {"name": ACCOUNT}}
        for path, document in (
            ("/api/v1/namespaces", named),
            (f"/api/v1/namespaces/{ACCOUNT}/serviceaccounts", named),
            (f"/apis/{group}/v1/clusterroles", {**about, "kind": "ClusterRole", "rules": rules}),
            (f"/apis/{group}/v1/clusterrolebindings", binding),
        ):
            ask(self.admin, "POST", path, document)

    def token(self) -> str:
        """Have the server make a token for that account, as the kubelet does for a pod."""
        about = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest"}
        made = ask(self.admin, "POST", f"{ACCOUNT_PATH}/token", {**about, "spec": {}})
        return str(made["status"]["token"])

    def short_token(self, seconds: int) -> str:
        """Make one that ends before the server would let it; signed by the server's own key."""
        uid, now = ask(self.admin, "GET", ACCOUNT_PATH)["metadata"]["uid"], int(time.time())
        claims = {
            "iss": ISSUER,
            "aud": [ISSUER],
            "sub": USER,
            "iat": now,
            "nbf": now,
            "exp": now + seconds,
            "kubernetes.io": {
                "namespace": ACCOUNT,
                "serviceaccount": {"name": ACCOUNT, "uid": uid},
            },
        }
        signed = ".".join(_base64(json.dumps(part).encode()) for part in ({"alg": "RS256"}, claims))
        command = ("openssl", "dgst", "-sha256", "-sign", str(self.folder / "tls.key"))
        done = subprocess.run(command, input=signed.encode(), capture_output=True, check=True)
        return f"{signed}.{_base64(done.stdout)}"

    # --- what is in it ----------------------------------------------------------------------------

    def requests(self, user: str = USER) -> Iterator[Mapping[str, Any]]:
        """Yield what the server has written down of a user's requests: one a stage."""
        for line in (self.folder / "audit.log").read_text().splitlines():
            event: dict[str, Any] = json.loads(line)
            if event["user"].get("username") == user:
                yield event

    def make_shop(self) -> None:
        """Have a namespace `shop` that is in the mesh. It stays: nobody here ends namespaces."""
        try:
            ask(self.admin, "POST", "/api/v1/namespaces", {"metadata": {"name": "shop"}})
        except ApiRefused as error:
            if error.status != CONFLICT:
                raise
        self.label_shop("enabled")

    def label_shop(self, value: str | None) -> None:
        patch = {"metadata": {"labels": {"istio-injection": value}}}
        ask(self.admin, "PATCH", "/api/v1/namespaces/shop", patch)

    def empty_shop(self) -> None:
        for kind in ("pods", "events"):
            ask(self.admin, "DELETE", f"/api/v1/namespaces/shop/{kind}", AT_ONCE)

    def end_pod(self, name: str, admin: Path | None = None) -> None:
        """Do what its kubelet does when a pod that was deleted has ended."""
        ask(admin or self.admin, "DELETE", f"/api/v1/namespaces/shop/pods/{name}", AT_ONCE)

    def kubectl(
        self, *words: str, kubeconfig: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run kubectl, as the administrator or as another. An exit code is for the caller."""
        command = (tool("kubectl"), f"--kubeconfig={kubeconfig or self.admin}", *words)
        environment = {**os.environ, "HOME": str(self.folder)}
        return subprocess.run(
            command, capture_output=True, text=True, check=False, env=environment, timeout=100
        )


@contextlib.contextmanager
def running(folder: Path, **options: object) -> Iterator[RealApi]:
    """Run one until the block ends; `options` are further ones of kube-apiserver, `_` for `-`."""
    made = RealApi(folder, {name.replace("_", "-"): value for name, value in options.items()})
    try:
        made.start()
        yield made
    finally:
        made.end()


def certificates(folder: Path) -> None:
    """Make an authority (ca.crt) and a certificate for 127.0.0.1 that it has signed (tls.crt)."""
    for command in (
        "openssl req -x509 -newkey rsa:2048 -nodes -keyout ca.key -out ca.crt -subj /CN=it-ca",
        "openssl req -newkey rsa:2048 -nodes -keyout tls.key -out tls.csr -subj /CN=it"
        " -addext subjectAltName=IP:127.0.0.1",
        "openssl x509 -req -in tls.csr -CA ca.crt -CAkey ca.key -out tls.crt -copy_extensions copy",
    ):
        subprocess.run(command.split(), cwd=folder, capture_output=True, check=True)


def ask(kubeconfig: Path, method: str, path: str, document: Mapping[str, Any] | None = None) -> Any:
    """Ask once, as whoever the kubeconfig is for, and return the answer. Raises: ApiError.

    In a thread of its own: the test may be within an event loop.
    """
    client = ApiClient(Kubeconfig(kubeconfig))
    if document is None:
        asked = client.get(path)
    else:
        kind = MERGE_PATCH if method == "PATCH" else JSON
        asked = client.send(method, path, document, kind)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, asked).result()


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
