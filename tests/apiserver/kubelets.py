"""What a scheduler and a kubelet do to the API's pods, and no more: no container runs."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from agent.node.kube.errors import ApiError
from tests.support.real_api import AT_ONCE, RealApi, ask

READY = {
    "phase": "Running",
    "conditions": [{"type": "Ready", "status": "True"}],
    "startTime": "2026-01-01T00:00:00Z",
}


@contextlib.contextmanager
def kubelet(api: RealApi, node: str) -> Iterator[None]:
    """Have a node on which pods start and end at once, until the block ends."""
    labels = {"kubernetes.io/os": "linux"}
    ask(api.admin, "POST", "/api/v1/nodes", {"metadata": {"name": node, "labels": labels}})
    ended = threading.Event()

    def work() -> None:
        while not ended.wait(0.2):
            with contextlib.suppress(ApiError):
                for pod in ask(api.admin, "GET", "/api/v1/pods")["items"]:
                    _bring_on(api, node, pod)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _bring_on(api: RealApi, node: str, pod: dict[str, Any]) -> None:
    metadata = pod["metadata"]
    path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}"
    if "deletionTimestamp" in metadata:
        ask(api.admin, "DELETE", path, AT_ONCE)
    elif "nodeName" not in pod["spec"]:
        target = {"kind": "Node", "name": node}
        binding = {"metadata": {"name": metadata["name"]}, "target": target}
        ask(api.admin, "POST", f"{path}/binding", binding)
    elif pod["status"]["phase"] != READY["phase"]:
        ask(api.admin, "PATCH", f"{path}/status", {"status": READY})
