"""Where the API server is and who the agent is to it: a pod's service account, or a kubeconfig.

Everything is read from its files again for each connection, since tokens and certificates are
exchanged while the agent runs (a projected token after an hour). A pod's proxy settings do not
count: the API server is asked directly.
"""

import base64
import binascii
import contextlib
import os
import ssl
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from agent.formats import documents
from agent.model.errors import EnvironmentLacks, InvalidSettings

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
HOST, PORT = "KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT"
MAX_TOKEN_BYTES = 64 * 1024
# Ways to prove who one is that need a program of somebody else's, or that Kubernetes has given up.
UNSUPPORTED = {
    "exec": "a program that makes credentials (exec) is not started; give a token or tokenFile",
    "auth-provider": "auth-provider is not supported; give a token or tokenFile",
    "username": "user name and password are not supported; give a token or tokenFile",
    "as": "impersonation (as) is not supported",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """All that one connection needs. `prefix` goes ahead of every path; `about` names the source
    of the token in sentences, with its age."""

    host: str
    port: int
    prefix: str = ""
    tls: ssl.SSLContext | None = None
    server_name: str | None = None
    token: str = ""
    about: str = ""

    @property
    def address(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Credentials(Protocol):
    """Reads them; the same files may say something else at the next call."""

    def read(self) -> Access:
        """Raises: EnvironmentLacks or InvalidSettings, naming the file."""


def credentials(kubeconfig: str, context: str | None) -> Credentials | None:
    """Return what a configuration means; None for no API server at all."""
    if kubeconfig == "none" or (kubeconfig == "auto" and not in_cluster()):
        return None
    if kubeconfig in ("auto", "in-cluster"):
        return InCluster()
    return Kubeconfig(Path(kubeconfig), context)


def in_cluster(account: Path = ACCOUNT) -> bool:
    """Whether this is a pod with a service account."""
    return bool(os.environ.get(HOST)) and (account / "token").exists()


@dataclass(frozen=True, slots=True)
class InCluster:
    """The service account that is mounted into a pod."""

    account: Path = ACCOUNT

    def read(self) -> Access:
        host, port = os.environ.get(HOST, ""), os.environ.get(PORT, "443")
        if not host or not port.isdigit():
            raise EnvironmentLacks(
                f"{HOST} or {PORT} is not set: this is no pod; name a kubeconfig in "
                "kubernetes.kubeconfig, or none"
            )
        token, about = _token(self.account / "token")
        authority = str(self.account / "ca.crt")
        return Access(host=host, port=int(port), tls=_context(authority), token=token, about=about)


@dataclass(frozen=True, slots=True)
class Kubeconfig:
    """One context of a kubeconfig file; the current one if none is named."""

    path: Path
    context: str | None = None

    def read(self) -> Access:
        document = documents.load_mapping(str(self.path))
        name = self.context or str(document.get("current-context") or "")
        if not name:
            raise self._wrong("it has no current-context; name one in kubernetes.context")
        context = self._named(document, "context", name)
        cluster = self._named(document, "cluster", str(context.get("cluster")))
        user = self._named(document, "user", str(context.get("user")))
        for key, sentence in UNSUPPORTED.items():
            if user.get(key):
                raise self._wrong(sentence)
        if cluster.get("proxy-url"):
            raise self._wrong("proxy-url is not supported: the API server is asked directly")
        return self._access(cluster, user)

    def _access(self, cluster: Mapping[str, Any], user: Mapping[str, Any]) -> Access:
        url = urlsplit(str(cluster.get("server", "")))
        try:
            host, port = url.hostname, url.port
        except ValueError:
            host = None
        if url.scheme not in ("http", "https") or not host:
            raise self._wrong(f"server {cluster.get('server')!r} is no http or https address")
        secure = url.scheme == "https"
        token, about = str(user.get("token") or ""), str(self.path)
        if user.get("tokenFile"):
            token, about = _token(self._beside(user["tokenFile"]))
        return Access(
            host=host,
            port=port or (443 if secure else 80),
            prefix=url.path.rstrip("/"),
            tls=self._tls(cluster, user) if secure else None,
            server_name=str(cluster.get("tls-server-name") or "") or None,
            token=token,
            about=about,
        )

    def _tls(self, cluster: Mapping[str, Any], user: Mapping[str, Any]) -> ssl.SSLContext:
        with contextlib.ExitStack() as stack:

            def path(section: Mapping[str, Any], key: str) -> str | None:
                if section.get(f"{key}-data"):
                    return stack.enter_context(self._decoded(key, section[f"{key}-data"]))
                return str(self._beside(section[key])) if section.get(key) else None

            verified = cluster.get("insecure-skip-tls-verify") is not True
            context = _context(path(cluster, "certificate-authority"), verified=verified)
            certificate, key = path(user, "client-certificate"), path(user, "client-key")
            if certificate and key:
                try:
                    context.load_cert_chain(certificate, key)
                except (OSError, ssl.SSLError) as error:
                    raise self._wrong(f"the client certificate or its key: {error}") from error
            return context

    @contextlib.contextmanager
    def _decoded(self, key: str, text: object) -> Iterator[str]:
        """Yield a path to what is in the file itself: OpenSSL reads certificates from files."""
        try:
            data = base64.b64decode(str(text), validate=True)
        except binascii.Error as error:
            raise self._wrong(f"{key}-data is not base64") from error
        fd = os.memfd_create(key)
        try:
            os.write(fd, data)
            yield f"/proc/self/fd/{fd}"
        finally:
            os.close(fd)

    def _named(self, document: Mapping[str, Any], kind: str, name: str) -> Mapping[str, Any]:
        listed = document.get(f"{kind}s")
        for item in listed if isinstance(listed, list) else ():
            if isinstance(item, Mapping) and item.get("name") == name:
                found = item.get(kind)
                return found if isinstance(found, Mapping) else {}
        raise self._wrong(f"it has no {kind} named {name}")

    def _beside(self, path: object) -> Path:
        return self.path.parent / str(path)

    def _wrong(self, sentence: str) -> InvalidSettings:
        return InvalidSettings((f"{self.path}: {sentence}",))


def _token(path: Path) -> tuple[str, str]:
    """Return a token and a word about it, since what is refused mostly is too old."""
    try:
        with path.open("rb") as file:
            token = file.read(MAX_TOKEN_BYTES).decode("ascii").strip()
            age_s = time.time() - os.fstat(file.fileno()).st_mtime
    except (OSError, UnicodeDecodeError) as error:
        raise EnvironmentLacks(f"the token {path} cannot be read: {error}") from error
    if not token or not token.isprintable():
        raise EnvironmentLacks(f"the token {path} is empty or no token")
    return token, f"{path}, written {age_s:.0f} s ago"


def _context(authority: str | None, *, verified: bool = True) -> ssl.SSLContext:
    """Return a client's side of TLS that trusts one authority, or those of the system."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if not verified:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        return context
    try:
        if authority:
            context.load_verify_locations(authority)
        else:
            context.load_default_certs()
    except (OSError, ssl.SSLError) as error:
        raise EnvironmentLacks(
            f"the certificate authority {authority} cannot be read: {error}"
        ) from error
    return context
