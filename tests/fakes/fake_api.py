"""A Kubernetes API server as far as the agent needs one, on real HTTP, with switches for faults.

List in pieces, watch from a version with bookmarks, 410 for what is too old, merge patches and
deletes with preconditions, Events, bearer tokens, and no right that was not given.
"""

import contextlib
import json
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml

Document = dict[str, Any]
Key = tuple[str, str]

KINDS = {"pods": "Pod", "namespaces": "Namespace", "nodes": "Node", "events": "Event"}
NODE = "it-node"
ADMIN = "admin"  # the token of one who may do all
UNSAID_IN_LISTS = {"kind", "apiVersion"}


class Refused(Exception):
    """An answer with a Status object."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass
class Faults:
    """What the server does wrong; all may be changed while it runs."""

    status: int = 0  # answer everything with it
    retry_after_s: int = 0  # and ask for that patience
    delay_s: float = 0.0  # before every answer
    silent: bool = False  # take connections and never answer
    deaf_watches: bool = False  # agree to watches and tell nothing more
    cut_every_watch: bool = False  # end each in the middle of its first line
    garbage: list[bytes] = field(
        default_factory=list
    )  # what the watch of pods says first, once each
    page: int = 0  # pieces are no larger than this
    chop: int = 0  # send so many bytes at a time
    lie: list[Document] = field(default_factory=list)  # objects that are in every list besides
    expire_pieces: bool = False  # 410 for every further piece of a list


class FakeApi:
    """The objects of one cluster. `put` and `remove` are what others do to them."""

    def __init__(self) -> None:
        self.token = "first"
        self.rights: frozenset[tuple[str, str]] | None = None  # verb and resource; None: all
        self.faults = Faults()
        self.requests: list[str] = []
        self.refused: list[str] = []  # for want of a right
        self.port = 0
        self._objects: dict[str, dict[Key, Document]] = {kind: {} for kind in KINDS}
        self._history: list[tuple[int, str, str, Document]] = []
        self._version = 100
        self._oldest = 100
        self._changed = threading.Condition()
        self._pieces: dict[str, tuple[int, list[Document]]] = {}  # what is left, by token
        self._epoch = 0  # another one ends every watch
        self._server: ThreadingHTTPServer | None = None
        self._tls: ssl.SSLContext | None = None

    # --- what others do ---------------------------------------------------------------------------

    def put(self, resource: str, thing: Document) -> Document:
        """Create or replace an object; namespace, name and uid are its own."""
        with self._changed:
            metadata = thing["metadata"]
            key = (metadata.get("namespace", ""), metadata["name"])
            before = self._objects[resource].get(key)
            self._version += 1
            made = deepcopy(thing)
            made |= {"kind": KINDS[resource], "apiVersion": "v1"}
            made["metadata"].setdefault("uid", f"uid-{self._version}")
            made["metadata"]["resourceVersion"] = str(self._version)
            for name in ("labels", "annotations"):
                if not made["metadata"].get(name, True):
                    del made["metadata"][name]  # a server says nothing of an empty one
            self._objects[resource][key] = made
            self._tell(resource, "MODIFIED" if before else "ADDED", made)
            return made

    def remove(self, resource: str, namespace: str, name: str) -> None:
        with self._changed:
            self._version += 1
            gone = self._objects[resource].pop((namespace, name))
            gone["metadata"]["resourceVersion"] = str(self._version)
            self._tell(resource, "DELETED", gone)

    def change(self, resource: str, namespace: str, name: str, patch: Document) -> Document:
        with self._changed:
            return self.put(resource, merged(self.get(resource, namespace, name), patch))

    def get(self, resource: str, namespace: str, name: str) -> Document:
        return deepcopy(self._objects[resource][namespace, name])

    def all(self, resource: str) -> list[Document]:
        with self._changed:
            return deepcopy(list(self._objects[resource].values()))

    def begin_anew(self) -> None:
        """Have another history, of which only a little has happened yet, and no objects."""
        with self._changed:
            self._objects = {kind: {} for kind in KINDS}
            self._history.clear()
            self._version = self._oldest = 1

    def compact(self) -> None:
        """Forget what happened: who watches from an older version is told that it is gone."""
        with self._changed:
            self._version += 1
            self._oldest = self._version
            self._history.clear()

    def end_watches(self) -> None:
        with self._changed:
            self._epoch += 1
            self._changed.notify_all()

    def bookmark(self) -> None:
        with self._changed:
            self._version += 1
            for resource, kind in KINDS.items():
                metadata = {"resourceVersion": str(self._version)}
                self._tell(resource, "BOOKMARK", {"kind": kind, "metadata": metadata})

    def count(self, start: str) -> int:
        """Return how many requests began so."""
        return sum(request.startswith(start) for request in self.requests)

    def _tell(self, resource: str, what: str, thing: Document) -> None:
        self._history.append((self._version, resource, what, deepcopy(thing)))
        self._changed.notify_all()

    # --- its life ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Listen, on the port of the last time if there was one."""
        handler = type("Bound", (Handler,), {"api": self})
        server = ThreadingHTTPServer(("127.0.0.1", self.port), handler)
        server.daemon_threads = True
        if self._tls is not None:
            server.socket = self._tls.wrap_socket(server.socket, server_side=True)
        self._server, self.port = server, server.server_address[1]
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        """Be gone: nobody listens, and every connection is cut."""
        server, self._server = self._server, None
        if server is not None:
            self.end_watches()
            server.shutdown()
            server.server_close()

    # --- requests ---------------------------------------------------------------------------------

    def allow(self, verb: str, resource: str) -> None:
        if self.rights is not None and (verb, resource) not in self.rights:
            self.refused.append(f"{verb} {resource}")
            raise Refused(403, f"cannot {verb} {resource}")

    def listing(self, resource: str, query: Mapping[str, str]) -> Document:
        """Return a list, or a piece of one; all pieces are of the moment of the first."""
        with self._changed:
            version, rest = self._version, self._all_of(resource, query)
            if token := query.get("continue"):
                if self.faults.expire_pieces:
                    raise Refused(410, "the continue token is too old")
                version, rest = self._pieces.pop(token)
            limit = int(query.get("limit", 0)) or len(rest)
            if self.faults.page and "limit" in query:
                limit = min(limit, self.faults.page)
            metadata: Document = {"resourceVersion": str(version)}
            if rest[limit:]:
                metadata["continue"] = f"{version}-{len(self.requests)}"
                self._pieces[metadata["continue"]] = version, rest[limit:]
            items = [*rest[:limit], *self.faults.lie]
            kind = f"{KINDS[resource]}List"
            return {"kind": kind, "apiVersion": "v1", "metadata": metadata, "items": items}

    def _all_of(self, resource: str, query: Mapping[str, str]) -> list[Document]:
        """Return what is asked for, as it stands in a list: without kind and version of each."""
        found = [one for one in self._objects[resource].values() if _selected(one, query)]
        return [{key: deepcopy(one[key]) for key in one.keys() - UNSAID_IN_LISTS} for one in found]

    def watching(self, resource: str, query: Mapping[str, str]) -> Iterator[Document | None]:
        """Yield events, and None now and then."""
        since, epoch, server = int(query["resourceVersion"]), self._epoch, self._server
        if since < self._oldest:
            yield {"type": "ERROR", "object": {"kind": "Status", "code": 410, "reason": "Expired"}}
            return
        yield None
        deadline = time.monotonic() + int(query.get("timeoutSeconds", 60))
        while time.monotonic() < deadline:
            with self._changed:
                news = [entry for entry in self._history if entry[0] > since]
                if not news:
                    self._changed.wait(0.2)
            if epoch != self._epoch or server is None or server is not self._server:
                return
            for version, of, what, thing in news:
                since = version
                if of == resource and (what == "BOOKMARK" or _selected(thing, query)):
                    yield {"type": what, "object": thing}
            yield None

    def create(self, resource: str, namespace: str, body: Document) -> Document:
        """Make an object; its uid and the time of its birth are the server's affair."""
        metadata = {key: value for key, value in body["metadata"].items() if key != "uid"}
        if metadata.get("namespace", namespace) != namespace:
            raise Refused(400, "the namespace of the object is not that of the request")
        about = body.get("involvedObject", {}).get("namespace") or "default"
        if resource == "events" and about != namespace:
            raise Refused(422, "involvedObject.namespace: does not match event.namespace")
        metadata["creationTimestamp"] = now()
        if namespace:
            metadata["namespace"] = namespace
        with self._changed:
            if (namespace, metadata["name"]) in self._objects[resource]:
                raise Refused(409, "AlreadyExists")
            return self.put(resource, {**body, "metadata": metadata})

    def patch(self, resource: str, key: Key, body: Document) -> Document:
        with self._changed:
            before = self._objects[resource].get(key)
            if before is None:
                raise Refused(404, f"{resource} {key[1]} not found")
            for name, code in (("resourceVersion", 409), ("uid", 422)):
                wanted = body.get("metadata", {}).get(name)
                if wanted is not None and wanted != before["metadata"][name]:
                    raise Refused(code, f"{name} is another one: the object has been modified")
            return self.put(resource, merged(before, body))

    def delete(self, resource: str, key: Key, body: Document) -> Document:
        """Delete an object. A pod on a node only bears a date then, until its kubelet has ended it
        (`remove`)."""
        with self._changed:
            before = self._objects[resource].get(key)
            if before is None:
                raise Refused(404, f"{resource} {key[1]} not found")
            uid = body.get("preconditions", {}).get("uid")
            if uid is not None and uid != before["metadata"]["uid"]:
                raise Refused(409, "the UID in the precondition is not that of the object")
            if resource == "pods" and before["spec"].get("nodeName"):
                dated = {"deletionTimestamp": now(), "deletionGracePeriodSeconds": 30}
                return self.put(resource, merged(before, {"metadata": dated}))
            self.remove(resource, *key)
            return before


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def merged(before: Document, patch: Document) -> Document:
    """Return a JSON merge patch applied (RFC 7386)."""
    found = deepcopy(before)
    for key, value in patch.items():
        if value is None:
            found.pop(key, None)
        elif isinstance(value, dict):
            inner = found.get(key)
            found[key] = merged(inner if isinstance(inner, dict) else {}, value)
        else:
            found[key] = value
    return found


def _selected(thing: Document, query: Mapping[str, str]) -> bool:
    field_, _, wanted = query.get("fieldSelector", "").partition("=")
    if field_ == "spec.nodeName":
        return bool(thing.get("spec", {}).get("nodeName") == wanted)
    return not field_ or bool(thing["metadata"]["name"] == wanted)


class Handler(BaseHTTPRequestHandler):
    api: FakeApi
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def handle(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            super().handle()

    def finish(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            super().finish()

    def do_GET(self) -> None:
        self._serve()

    do_POST = do_PATCH = do_DELETE = do_GET

    def _serve(self) -> None:
        url = urlsplit(self.path)
        query = {key: values[-1] for key, values in parse_qs(url.query).items()}
        watch = query.get("watch") == "true"
        self.api.requests.append(f"{'WATCH' if watch else self.command} {self.path}")
        length = int(self.headers.get("content-length") or 0)
        body = json.loads(self.rfile.read(length)) if length else {}
        faults = self.api.faults
        time.sleep(faults.delay_s)
        while faults.silent:
            time.sleep(0.05)
        try:
            if faults.status:
                raise Refused(faults.status, "told to")
            path = url.path.strip("/").split("/")[2:]
            self._admit(path, watch=watch)
            if watch:
                self._watch(path[-1], query)
            else:
                self._answer(200, self._do(path, query, body))
        except Refused as error:
            document = {"kind": "Status", "code": error.code, "message": str(error)}
            self._answer(error.code, document)

    def _admit(self, path: list[str], *, watch: bool) -> None:
        """Refuse who is nobody, or has no right to what he asks for."""
        token = self.headers.get("authorization", "").removeprefix("Bearer ")
        if token not in (self.api.token, ADMIN):
            raise Refused(401, "Unauthorized")
        named = path[2:] if path[0] == "namespaces" and len(path) > 2 else path
        reads = "watch" if watch else "get" if len(named) > 1 else "list"
        verb = {"GET": reads, "POST": "create"}.get(self.command, self.command.lower())
        if token != ADMIN:
            self.api.allow(verb, named[0])

    def _do(self, path: list[str], query: Mapping[str, str], body: Document) -> Document:
        api = self.api
        match path:
            case [resource] if self.command == "GET":
                return api.listing(resource, query)
            case [resource] if self.command == "POST":
                return api.create(resource, "", body)
            case ["namespaces", namespace, resource] if self.command == "POST":
                return api.create(resource, namespace, body)
            case ["namespaces", namespace, resource, name]:
                return self._one(resource, (namespace, name), body)
            case [resource, name]:
                return self._one(resource, ("", name), body)
        raise Refused(404, f"there is no {self.path}")

    def _one(self, resource: str, key: Key, body: Document) -> Document:
        if self.command == "PATCH":
            wanted = "application/merge-patch+json"
            if self.headers.get("content-type") != wanted:
                raise Refused(415, f"only {wanted} is taken here")
            return self.api.patch(resource, key, body)
        if self.command == "DELETE":
            return self.api.delete(resource, key, body)
        try:
            return self.api.get(resource, *key)
        except KeyError:
            raise Refused(404, f"{resource} {key[1]} not found") from None

    def _answer(self, code: int, document: Document) -> None:
        data = json.dumps(document).encode()
        self.send_response(code)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        if code >= 400 and self.api.faults.retry_after_s:
            self.send_header("retry-after", str(self.api.faults.retry_after_s))
        self.end_headers()
        self._send(data)

    def _watch(self, resource: str, query: Mapping[str, str]) -> None:
        faults = self.api.faults
        events = self.api.watching(resource, query)
        first = next(events)  # what is refused is refused before the answer begins
        self.send_response(200)
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        self.wfile.flush()
        while faults.deaf_watches:
            time.sleep(0.05)
        while faults.garbage and resource == "pods":
            self._chunk(faults.garbage.pop(0))
        event: Document | None = first
        while True:
            if event is not None:
                line = json.dumps(event).encode() + b"\n"
                if faults.cut_every_watch:
                    self._chunk(line[: len(line) // 2])
                    self.close_connection = True
                    return
                self._chunk(line)
            try:
                event = next(events)
            except StopIteration:
                self._chunk(b"")
                return

    def _chunk(self, data: bytes) -> None:
        """Send a piece of an answer; with `chop` in several, cut wherever it happens to be."""
        size = self.api.faults.chop or len(data) or 1
        for at in range(0, len(data) or 1, size):
            part = data[at : at + size]
            self._send(f"{len(part):x}\r\n".encode() + part + b"\r\n")

    def _send(self, data: bytes) -> None:
        self.wfile.write(data)
        self.wfile.flush()


@contextlib.contextmanager
def serving(tls: tuple[Path, Path] | None = None) -> Iterator[FakeApi]:
    """Serve an empty cluster until the block ends; `tls` are a certificate and its key."""
    api = FakeApi()
    if tls is not None:
        api._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        api._tls.load_cert_chain(*tls)
    api.start()
    try:
        yield api
    finally:
        api.stop()


def kubeconfig(folder: Path, api: FakeApi, who: str = "", **cluster: str) -> Path:
    """Write a kubeconfig beside a token file, as a node has them; `who` may be ADMIN."""
    token, path = folder / f"{who}token", folder / f"{who}kubeconfig"
    token.write_text(who or api.token)
    scheme = "https" if cluster else "http"
    document = {
        "current-context": "it",
        "contexts": [{"name": "it", "context": {"cluster": "it", "user": "it"}}],
        "clusters": [
            {"name": "it", "cluster": {"server": f"{scheme}://127.0.0.1:{api.port}", **cluster}}
        ],
        "users": [{"name": "it", "user": {"tokenFile": token.name}}],
    }
    path.write_text(yaml.safe_dump(document))
    return path


# --- objects --------------------------------------------------------------------------------------


def namespace(name: str, **labels: str) -> Document:
    written = {key.replace("_", "-"): value for key, value in labels.items()}
    return {"metadata": {"name": name, "uid": f"uid-ns-{name}", "labels": written}}


def pod(
    name: str,
    *,
    namespace: str = "shop",
    uid: str = "",
    annotations: Mapping[str, str] | None = None,
    labels: Mapping[str, str] | None = None,
    node: str = NODE,
    created: str = "2020-01-01T00:00:00Z",
    containers: list[Document] | None = None,
    owned: bool = True,
    **top: object,
) -> Document:
    """Return a pod that a controller made and Istio's injector gave a sidecar."""
    metadata: Document = {
        "name": name,
        "namespace": namespace,
        "uid": uid or f"uid-{name}",
        "labels": dict(labels or {}),
        "annotations": {"sidecar.istio.io/status": "{}", **(annotations or {})},
        "creationTimestamp": created,
    }
    if owned:
        owner = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "rs", "uid": "uid-rs"}
        metadata["ownerReferences"] = [{**owner, "controller": True}]
    app: Document = {"name": "app", "image": "it"}
    sidecar: Document = {"name": "istio-proxy", "image": "it", "args": ["proxy", "sidecar"]}
    spec: Document = {"nodeName": node, "containers": containers or [app, sidecar]}
    return {**top, "metadata": metadata, "spec": spec, "status": {"phase": "Running"}}
