"""The chained CNI plugin, one self-contained file of the standard library, started as `-I -S`.

It holds no credential and decides nothing: it forwards the call to the node's agent and prints the
agent's answer. Where no agent answers, a pod that was not injected starts, and a mesh pod is
refused rather than started without its capture.
"""

import os
import sys

VERSIONS = ("0.3.1", "0.4.0", "1.0.0", "1.1.0")
ANNOTATIONS = "io.kubernetes.cri.pod-annotations"
INJECTED = "sidecar.istio.io/status"
SOCKET = "/run/intercept-agent/agent.sock"
MAX_STDIN_BYTES = 4 * 1024 * 1024
MAX_REPLY_BYTES = 64 * 1024 * 1024
# Runtimes wait for a plugin without a limit of their own; the kubelet gives up after some minutes.
TIMEOUT_S = 60.0
PROTOCOL = 1

# Error codes of the CNI specification; those from 100 on are ours.
BAD_VERSION, BAD_ENVIRONMENT, BAD_CONTENT, BAD_CONFIG, TRY_LATER, NOT_AVAILABLE = 1, 4, 6, 7, 11, 50


class Refused(Exception):
    """Ends the call with a CNI error."""

    def __init__(self, code: int, message: str, version: str = VERSIONS[-1]) -> None:
        super().__init__(message)
        self.code = code
        self.version = version


class NoAgent(Exception):
    """No agent answers; the message says why."""


def respond(command: str, text: bytes) -> object:
    """Return the document to print for a call, or None where the verb has no result.

    Raises: Refused.
    """
    if command == "VERSION":
        return {"cniVersion": VERSIONS[-1], "supportedVersions": list(VERSIONS)}
    if command not in ("ADD", "DEL", "CHECK", "GC", "STATUS"):
        raise Refused(BAD_ENVIRONMENT, f"CNI_COMMAND {command!r} is not a CNI verb")
    if command == "DEL":
        _delete(text)
        return None
    config = _configuration(text, chained=command in ("ADD", "CHECK"))
    version = str(config["cniVersion"])
    try:
        reply = _ask(config, command)
    except NoAgent as error:
        return _without_agent(command, config, version, str(error))
    if not isinstance(reply, dict) or reply.get("result") != {}:
        raise _refusal(reply, version)
    return config["prevResult"] if command == "ADD" else None


def _refusal(reply: object, version: str) -> Refused:
    """Return what the agent said instead of yes; anything but a plain yes is a no."""
    said: object = None
    if isinstance(reply, dict):
        result = reply.get("result")
        said = result.get("error") if isinstance(result, dict) else reply.get("error")
    if not isinstance(said, dict) or "message" not in said:
        return Refused(TRY_LATER, f"the agent's answer is not understood: {reply!r:.200}", version)
    return Refused(int(said.get("code", TRY_LATER)), str(said["message"]), version)


def _delete(text: bytes) -> None:
    """A pod must be able to end whatever is wrong: tell the agent if it can be told."""
    try:
        _ask(_configuration(text, chained=False), "DEL")
    except (Refused, NoAgent):
        return


def _configuration(text: bytes, *, chained: bool) -> dict[str, object]:
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
    if chained and not isinstance(config.get("prevResult"), dict):
        missing = "there is no prevResult: intercept-cni must be chained behind a plugin that "
        raise Refused(BAD_CONFIG, missing + "makes the network", str(version))
    return config


def _ask(config: dict[str, object], command: str) -> object:
    """Return the agent's answer.

    Raises: NoAgent.
    """
    import json
    import socket
    import struct

    path = config.get("socket") or SOCKET
    names = ("CONTAINERID", "NETNS", "IFNAME", "ARGS", "PATH", "NETNS_OVERRIDE")
    environment = {name: os.environ.get(f"CNI_{name}", "") for name in names}
    request = {"do": "cni", "command": command, "environment": environment, "config": config}
    payload = json.dumps(request).encode()
    header = struct.Struct("!IB")
    try:
        with socket.socket(socket.AF_UNIX) as agent:
            agent.settimeout(TIMEOUT_S)
            agent.connect(str(path))
            agent.sendall(header.pack(len(payload), PROTOCOL) + payload)
            size, version = header.unpack(_exactly(agent, header.size))
            if version != PROTOCOL or size > MAX_REPLY_BYTES:
                raise NoAgent(f"the agent behind {path} speaks another version of the protocol")
            return json.loads(_exactly(agent, size))
    except (OSError, ValueError) as error:
        said = getattr(error, "strerror", None) or str(error)
        raise NoAgent(f"no intercept-agent answers on {path} ({said})") from None


def _exactly(agent: object, size: int) -> bytes:
    data = b""
    while len(data) < size:
        chunk = agent.recv(size - len(data))  # type: ignore[attr-defined]
        if not chunk:
            raise ValueError("it closed the connection")
        data += chunk
    return data


def _without_agent(command: str, config: dict[str, object], version: str, why: str) -> object:
    if command == "GC":
        return None
    if command == "STATUS":
        raise Refused(NOT_AVAILABLE, why, version)
    if command == "CHECK":
        raise Refused(TRY_LATER, f"{why}; nothing was checked", version)
    runtime = config.get("runtimeConfig")
    annotations = runtime.get(ANNOTATIONS) if isinstance(runtime, dict) else None
    injected = not isinstance(annotations, dict) or INJECTED in annotations
    if injected and config.get("failurePolicy") != "open":
        raise Refused(
            TRY_LATER,
            f"{why}, so the traffic of this pod cannot be captured; it starts when the agent is "
            "back (see `intercept-agent status` on the node)",
            version,
        )
    return config["prevResult"]


def main() -> int:
    """Run one call: stdout gets the result or one CNI error, and nothing else ever."""
    import json

    out = os.dup(1)
    os.dup2(2, 1)
    status = 0
    document: object
    try:
        text = sys.stdin.buffer.read(MAX_STDIN_BYTES + 1)
        document = respond(os.environ.get("CNI_COMMAND", ""), text)
    except Refused as error:
        document, status = _error(error.version, error.code, str(error)), 1
    except Exception as error:  # a crash must reach the runtime as an error that it can show
        document, status = _error(VERSIONS[-1], 999, f"intercept-cni failed: {error!r}"), 1
    if document is not None:
        os.write(out, json.dumps(document).encode())
    return status


def _error(version: str, code: int, message: str) -> dict[str, object]:
    return {"cniVersion": version, "code": code, "msg": message}


if __name__ == "__main__":
    sys.exit(main())
