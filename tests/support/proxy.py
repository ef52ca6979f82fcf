"""A proxy in a namespace of a test: a real Envoy with certificates, or a server that plays one."""

import contextlib
import http.client
import json
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from agent.kernel.netns import Netns
from agent.model import numbers
from tests.support import envoy, netns
from tests.support.pod import START_TIMEOUT_S, run_envoy, wait_for

SPIFFE = "spiffe://cluster.local/ns/shop/sa/web"
CA = f"""
[ca]
default_ca = own
[own]
database = index.txt
new_certs_dir = .
rand_serial = yes
default_md = sha256
policy = names
x509_extensions = extensions
[names]
commonName = supplied
[extensions]
subjectAltName = URI:{SPIFFE}
[req]
distinguished_name = empty
[empty]
"""
TRANSPORT = "envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext"
Talk = Callable[[socket.socket], None]


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate that signed itself, and its key, as PEM."""

    certificate: str
    key: str


def pair(*, begins: datetime, ends: datetime) -> Pair:
    """Make a certificate for any time, past ones too."""
    with tempfile.TemporaryDirectory(prefix="it-") as folder:
        (Path(folder) / "ca.cnf").write_text(CA)
        (Path(folder) / "index.txt").touch()

        def openssl(*words: str) -> None:
            command = ("openssl", *words, "-config", "ca.cnf")
            subprocess.run(command, cwd=folder, check=True, capture_output=True)

        curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
        openssl("req", "-new", *curve, "-subj", "/CN=web", "-keyout", "key.pem", "-out", "csr.pem")
        dates = ("-startdate", f"{begins:%Y%m%d%H%M%SZ}", "-enddate", f"{ends:%Y%m%d%H%M%SZ}")
        files = ("-keyfile", "key.pem", "-in", "csr.pem", "-out", "cert.pem", "-notext")
        openssl("ca", "-batch", "-selfsign", *files, *dates)
        return Pair(*(Path(folder, name).read_text() for name in ("cert.pem", "key.pem")))


def valid_for(time_left: timedelta) -> Pair:
    """Make one that began a day ago and ends then; a negative time has passed."""
    now = datetime.now(UTC)
    return pair(begins=min(now, now + time_left) - timedelta(days=1), ends=now + time_left)


@contextlib.contextmanager
def running_envoy(
    namespace: str, *, pairs: Sequence[Pair] = (), clusters: Sequence[str] = ()
) -> Iterator[None]:
    """Run an Envoy with these certificates and clusters, and its metrics where Istio has them."""
    config = json.loads(
        envoy.config(envoy.ProxySpec(self_v4=("10.9.9.9", 80), self_v6=("fd00:9::9", 80)))
    )
    resources = config["static_resources"]
    for number, one in enumerate(pairs):
        there = envoy.fixed(f"tls-{number}", "10.9.9.9", 443)
        resources["clusters"].append(there | {"transport_socket": _tls(one)})
    resources["clusters"] += [envoy.fixed(name, "10.9.9.9", 80) for name in clusters]
    resources["clusters"].append(envoy.fixed("prometheus_stats", "127.0.0.1", envoy.ADMIN_PORT))
    resources["listeners"].append(
        envoy.listener("metrics", numbers.ENVOY_METRICS_PORT, cluster="prometheus_stats")
    )
    with tempfile.TemporaryFile("w+") as log:
        ids = {"uid": numbers.PROXY_ID, "gid": numbers.PROXY_ID}
        with run_envoy(namespace, json.dumps(config), **ids, capabilities=(), log=log):
            wait_for(
                lambda: get(namespace, envoy.ADMIN_PORT, "/ready") == "LIVE\n",
                "Envoy is ready",
                timeout_s=START_TIMEOUT_S,
            )
            yield


def _tls(one: Pair) -> envoy.Json:
    certificate = {
        "certificate_chain": {"inline_string": one.certificate},
        "private_key": {"inline_string": one.key},
    }
    context = {"tls_certificates": [certificate]}
    typed = {"@type": f"type.googleapis.com/{TRANSPORT}", "common_tls_context": context}
    return {"name": "envoy.transport_sockets.tls", "typed_config": typed}


def get(namespace: str, port: int, path: str) -> str:
    """Return what is answered on loopback inside a namespace, or nothing where nobody does."""

    def connect() -> socket.socket:
        return socket.create_connection(("127.0.0.1", port), 5)

    with contextlib.suppress(OSError), Netns.open(netns.path_of(namespace)) as there:
        connection = http.client.HTTPConnection("127.0.0.1", port)
        connection.sock = there.run(connect)
        with contextlib.closing(connection):
            connection.request("GET", path)
            return connection.getresponse().read().decode()
    return ""


@contextlib.contextmanager
def serving(namespace: str, port: int, talk: Talk, *, address: str = "127.0.0.1") -> Iterator[None]:
    """Let `talk` answer whoever connects to a port inside a namespace, until the block ends."""

    def listen() -> socket.socket:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.create_server((address, port), family=family)

    with Netns.open(netns.path_of(namespace)) as there:
        listener = there.run(listen)
    threads: list[threading.Thread] = []

    def answer(client: socket.socket) -> None:
        with client, contextlib.suppress(OSError):
            client.settimeout(10)
            client.recv(4096)
            talk(client)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                threads.append(threading.Thread(target=answer, args=(client,)))
                threads[-1].start()

    acceptor = threading.Thread(target=accept)
    acceptor.start()
    try:
        yield
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        acceptor.join()
        listener.close()
        for thread in threads:
            thread.join()


def saying(body: str | bytes, *, status: int = 200, kind: str = "text/plain") -> Talk:
    """Return a talk that is one HTTP answer."""
    data = body.encode() if isinstance(body, str) else body
    head = f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ncontent-length: {len(data)}\r\n\r\n"
    return lambda client: client.sendall(head.encode() + data)


def endless(client: socket.socket) -> None:
    """Answer with a body that does not end."""
    client.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
    with contextlib.suppress(OSError):
        while True:
            client.sendall(b"# nothing\n" * 1000)


def mute(client: socket.socket) -> None:
    """Take the request and say nothing, for as long as the other side waits."""
    with contextlib.suppress(OSError):
        client.recv(1)


def dripping(client: socket.socket) -> None:
    """Answer so slowly that each byte comes in time and the whole never does."""
    client.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\n")
    with contextlib.suppress(OSError):
        while True:
            client.sendall(b"#")
            time.sleep(0.05)
