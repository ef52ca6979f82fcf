"""The chained CNI plugin, one self-contained file of the standard library, started as `-I -S`.

It holds no credential and decides nothing: the node's agent does. What stands here is what holds
while no agent answers, which is always so as long as this version has no agent: a pod that was not
injected starts, a mesh pod is refused rather than started without its capture.
"""

import os
import sys

VERSIONS = ("0.3.1", "0.4.0", "1.0.0", "1.1.0")
ANNOTATIONS = "io.kubernetes.cri.pod-annotations"
INJECTED = "sidecar.istio.io/status"
MAX_STDIN_BYTES = 4 * 1024 * 1024

# Error codes of the CNI specification.
BAD_VERSION, BAD_ENVIRONMENT, BAD_CONTENT, BAD_CONFIG, TRY_LATER, NOT_AVAILABLE = 1, 4, 6, 7, 11, 50


class Refused(Exception):
    """Ends the call with a CNI error."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


def respond(command: str, text: bytes) -> object:
    """Return the document to print for a call, or None where the verb has no result.

    Raises: Refused.
    """
    if command == "VERSION":
        return {"cniVersion": VERSIONS[-1], "supportedVersions": list(VERSIONS)}
    if command in ("DEL", "GC"):
        return None  # nothing of a pod outlives its namespace; a missing agent must not stop it
    if command == "STATUS":
        raise Refused(NOT_AVAILABLE, "no intercept-agent answers on this node")
    if command not in ("ADD", "CHECK"):
        raise Refused(BAD_ENVIRONMENT, f"CNI_COMMAND {command!r} is not a CNI verb")
    config = _configuration(text)
    if command == "CHECK":
        raise Refused(TRY_LATER, "no intercept-agent answers on this node; nothing was checked")
    return _add(config)


def _configuration(text: bytes) -> dict[str, object]:
    import json

    if len(text) > MAX_STDIN_BYTES:
        raise Refused(BAD_CONTENT, f"the configuration is larger than {MAX_STDIN_BYTES} bytes")
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Refused(BAD_CONTENT, f"the configuration on stdin is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise Refused(BAD_CONTENT, "the configuration on stdin is not a JSON object")
    version = config.get("cniVersion", "0.1.0")
    if version not in VERSIONS:
        raise Refused(BAD_VERSION, f"cniVersion {version!r} is none of {', '.join(VERSIONS)}")
    if not isinstance(config.get("prevResult"), dict):
        raise Refused(
            BAD_CONFIG,
            "there is no prevResult: intercept-cni must be chained behind a "
            "plugin that makes the network",
        )
    return config


def _add(config: dict[str, object]) -> object:
    runtime = config.get("runtimeConfig")
    annotations = runtime.get(ANNOTATIONS) if isinstance(runtime, dict) else None
    injected = not isinstance(annotations, dict) or INJECTED in annotations
    if injected and config.get("failurePolicy") != "open":
        raise Refused(
            TRY_LATER,
            "no intercept-agent answers on this node, so the traffic of this pod cannot be "
            "captured; it starts when the agent is back",
        )
    return config["prevResult"]


def main() -> int:
    """Run one call: stdout gets the result or one CNI error, and nothing else ever."""
    import json

    out = os.dup(1)
    os.dup2(2, 1)
    version = VERSIONS[-1]
    status = 0
    document: object
    try:
        text = sys.stdin.buffer.read(MAX_STDIN_BYTES + 1)
        document = respond(os.environ.get("CNI_COMMAND", ""), text)
    except Refused as error:
        document, status = _error(version, error.code, str(error)), 1
    except Exception as error:  # a crash must reach the runtime as an error that it can show
        document, status = _error(version, 999, f"intercept-cni failed: {error!r}"), 1
    if document is not None:
        os.write(out, json.dumps(document).encode())
    return status


def _error(version: str, code: int, message: str) -> dict[str, object]:
    return {"cniVersion": version, "code": code, "msg": message}


if __name__ == "__main__":
    sys.exit(main())
