"""The chained CNI plugin, one self-contained file of the standard library, started as `-I -S`.

It holds no credential and decides nothing: it forwards the call to the node's agent and prints the
agent's answer. Where no agent answers, a pod that was not injected starts, and a mesh pod is
refused rather than started without its capture.

It runs for every pod, so it imports little: `json` and `socket` in Python each take as long as
starting the interpreter, the C halves below them next to nothing.
"""

import os
import sys
from time import monotonic, sleep

VERSIONS = ("0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0")
SINCE = {"ADD": "0.3.0", "DEL": "0.3.0", "CHECK": "0.4.0", "GC": "1.1.0", "STATUS": "1.1.0"}
VARIABLES = ("CONTAINERID", "NETNS", "IFNAME", "ARGS", "PATH", "NETNS_OVERRIDE")
REQUIRED = ("CONTAINERID", "NETNS", "IFNAME")  # by ADD and CHECK
ANNOTATIONS = "io.kubernetes.cri.pod-annotations"
INJECTED = "sidecar.istio.io/status"
# Istio's injector passes these over, whatever their labels.
NEVER_INJECTED = ("kube-system", "kube-public", "kube-node-lease", "local-path-storage")
SOCKET = "/run/intercept-agent/agent.sock"
MAX_STDIN_BYTES = 2 * 1024 * 1024  # escaped, it is at most three times as much for the agent
MAX_REPLY_BYTES = 1024 * 1024
# Runtimes wait for a plugin without a limit of their own; the kubelet gives up after some minutes.
TIMEOUT_S = 60.0
DEL_TIMEOUT_S = 10.0  # a pod must be able to end, also beside an agent that hangs
PROTOCOL = 1

# Error codes of the CNI specification; those from 100 on are ours.
BAD_VERSION, BAD_ENVIRONMENT, BAD_IO, BAD_CONTENT, BAD_CONFIG = 1, 4, 5, 6, 7
TRY_LATER, NOT_AVAILABLE, BUG = 11, 50, 999
MAX_CODE = 2**31 - 1


class Refused(Exception):
    """Ends the call with a CNI error, in the version of the configuration once that is known."""

    version = VERSIONS[-1]

    def __init__(self, code: int, message: str, details: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.details = details


class NoAgent(Exception):
    """No agent answers; the message says why."""


def respond(command: str, text: bytes) -> object:
    """Return the document to print for a call, or None where the verb has no result.

    Raises: Refused.
    """
    if command == "VERSION":
        return _versions(text)
    if command not in SINCE:
        raise Refused(BAD_ENVIRONMENT, f"CNI_COMMAND {command!r} is not a CNI verb")
    if command == "DEL":
        _delete(text)
        return None
    config = _configuration(text)
    version = str(config["cniVersion"])
    try:
        if VERSIONS.index(version) < VERSIONS.index(SINCE[command]):
            raise Refused(BAD_VERSION, f"cniVersion {version} has no {command}")
        return _perform(command, config)
    except Refused as error:
        error.version = version
        raise


def _perform(command: str, config: dict[str, object]) -> object:
    result = None
    if command in ("ADD", "CHECK"):
        _require_variables()
        result = _previous_result(config)
    try:
        _require_yes(_ask(config, command, TIMEOUT_S))
    except NoAgent as error:
        _without_agent(command, config, str(error))
    return result if command == "ADD" else None


def _versions(text: bytes) -> object:
    """Answer in the version of the question, which may come without a configuration."""
    try:
        asked = _configuration(text)["cniVersion"]
    except Refused:
        asked = VERSIONS[-1]
    return {"cniVersion": asked, "supportedVersions": list(VERSIONS)}


def _delete(text: bytes) -> None:
    """A pod must be able to end whatever is wrong: tell the agent if it can be told."""
    try:
        _ask(_configuration(text), "DEL", DEL_TIMEOUT_S)
    except Exception as error:
        _warn(f"DEL goes on without the agent: {error}")


# --- what the runtime says ------------------------------------------------------------------------


def _configuration(text: bytes) -> dict[str, object]:
    if len(text) > MAX_STDIN_BYTES:
        raise Refused(BAD_CONTENT, f"the configuration is larger than {MAX_STDIN_BYTES} bytes")
    try:
        config = _loads(text)
    except (ValueError, RecursionError) as error:
        raise Refused(BAD_CONTENT, f"the configuration on stdin is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise Refused(BAD_CONTENT, "the configuration on stdin is not a JSON object")
    version = config.setdefault("cniVersion", "0.1.0")
    if version not in VERSIONS:
        raise Refused(BAD_VERSION, f"cniVersion {version!r} is none of {', '.join(VERSIONS)}")
    return config


def _require_variables() -> None:
    missing = [f"CNI_{name}" for name in REQUIRED if not os.environ.get(f"CNI_{name}")]
    if missing:
        raise Refused(BAD_ENVIRONMENT, f"the runtime did not set {', '.join(missing)}")


def _previous_result(config: dict[str, object]) -> dict[str, object]:
    """Return prevResult in the version of its configuration."""
    result, version = config.get("prevResult"), str(config["cniVersion"])
    if not isinstance(result, dict):
        raise Refused(
            BAD_CONFIG,
            "there is no prevResult: intercept-cni must be chained behind a plugin that makes the "
            "network",
        )
    if result.get("cniVersion") == version:
        return result
    result = {**result, "cniVersion": version}
    if isinstance(result.get("ips"), list):
        result["ips"] = [_address(ip, version) for ip in result["ips"]]
    return result


def _address(ip: object, version: str) -> object:
    """Return an address as a version has it: until 0.4.0 each names its family."""
    if not isinstance(ip, dict):
        return ip
    address = ip.get("address")
    family = {"version": "6" if isinstance(address, str) and ":" in address else "4"}
    plain = {key: value for key, value in ip.items() if key != "version"}
    return {**family, **plain} if version.startswith("0.") else plain


# --- what the agent says --------------------------------------------------------------------------


def _require_yes(reply: object) -> None:
    """Raise what the agent said instead of yes; anything but a plain yes is a no."""
    said: object = None
    if isinstance(reply, dict):
        result = reply.get("result")
        if result == {}:
            return
        said = result.get("error") if isinstance(result, dict) else reply.get("error")
    if not isinstance(said, dict) or not isinstance(said.get("message"), str):
        shown = f"{reply!r:.200}"
        raise Refused(TRY_LATER, "the agent's answer is not understood", shown)
    code = said.get("code")
    if not isinstance(code, int) or isinstance(code, bool) or not 0 < code <= MAX_CODE:
        code = TRY_LATER
    raise Refused(code, said["message"])


def _ask(config: dict[str, object], command: str, seconds: float) -> object:
    """Return the agent's answer.

    Raises: NoAgent, Refused.
    """
    from _socket import AF_UNIX, SOCK_STREAM, socket

    path = config.get("socket") or SOCKET
    if not isinstance(path, str) or not path.startswith("/"):
        raise Refused(BAD_CONFIG, f"socket {path!r:.200} is not an absolute path")
    environment = {name: os.environ.get(f"CNI_{name}", "") for name in VARIABLES}
    request = {"do": "cni", "command": command, "environment": environment, "config": config}
    payload = _dumps(request)
    ends = monotonic() + seconds
    agent = socket(AF_UNIX, SOCK_STREAM)
    try:
        agent.settimeout(seconds)
        _connect(agent, path, ends)
        agent.sendall(len(payload).to_bytes(4, "big") + bytes([PROTOCOL]) + payload)
        header = _exactly(agent, 5, ends)
        size, version = int.from_bytes(header[:4], "big"), header[4]
        if version != PROTOCOL:
            raise NoAgent(f"the agent behind {path} speaks another version of the protocol")
        if size > MAX_REPLY_BYTES:
            raise ValueError(f"an answer of {size} bytes is too large")
        return _loads(_exactly(agent, size, ends))
    except (OSError, ValueError, RecursionError) as error:
        said = getattr(error, "strerror", None) or str(error)
        raise NoAgent(f"no intercept-agent answers on {path} ({said})") from None
    finally:
        agent.close()


def _connect(agent: object, path: str, ends: float) -> None:
    """A queue that is full for a moment is told at once where a socket has a time limit."""
    while True:
        try:
            agent.connect(path)  # type: ignore[attr-defined]
            return
        except BlockingIOError:
            if monotonic() > ends:
                raise
            sleep(0.01)


def _exactly(agent: object, size: int, ends: float) -> bytes:
    """Return so many bytes; the time until `ends` is for all of them and not for each."""
    data = b""
    while len(data) < size:
        agent.settimeout(max(ends - monotonic(), 0.001))  # type: ignore[attr-defined]
        chunk = agent.recv(size - len(data))  # type: ignore[attr-defined]
        if not chunk:
            raise ValueError("it closed the connection")
        data += chunk
    return data


def _without_agent(command: str, config: dict[str, object], why: str) -> None:
    """Let the call succeed, or raise Refused where that could let traffic pass its proxy by."""
    if command == "CHECK":
        raise Refused(TRY_LATER, f"{why}; nothing was checked")
    if command == "GC" or config.get("failurePolicy") == "open":
        return
    if command == "STATUS":
        raise Refused(NOT_AVAILABLE, why)
    if _may_need_capture(config):
        raise Refused(
            TRY_LATER,
            f"{why}, so the traffic of this pod cannot be captured; it starts when the agent is "
            "back (see `intercept-agent status` on the node)",
        )


def _may_need_capture(config: dict[str, object]) -> bool:
    runtime = config.get("runtimeConfig")
    if isinstance(runtime, dict) and ANNOTATIONS in runtime:
        # null is what containerd makes of a pod that has none.
        annotations = runtime[ANNOTATIONS]
        if annotations is None:
            return False
        return not isinstance(annotations, dict) or INJECTED in annotations
    items = os.environ.get("CNI_ARGS", "").split(";")
    return not any(f"K8S_POD_NAMESPACE={name}" in items for name in NEVER_INJECTED)


# --- JSON -----------------------------------------------------------------------------------------


class _Strict:
    """What the C half of `json` asks its decoder for."""

    strict = True
    object_hook = object_pairs_hook = None
    parse_int = int

    @staticmethod
    def parse_float(digits: str) -> float:
        number = float(digits)
        if number in (float("inf"), float("-inf")):
            raise ValueError(f"{digits:.40} is too large a number")
        return number

    @staticmethod
    def parse_constant(word: str) -> object:
        raise ValueError(f"{word} is not a JSON value")


def _loads(data: bytes) -> object:
    """Raises: ValueError, RecursionError."""
    text = data.decode().strip(" \t\n\r")
    try:
        from _json import make_scanner

        value, end = make_scanner(_Strict)(text, 0)  # type: ignore[arg-type]
        if end == len(text):
            return value
    except Exception:  # there is no C half, or something is wrong, which `json` says in words
        pass
    import json

    return json.loads(text, parse_constant=_Strict.parse_constant, parse_float=_Strict.parse_float)


def _dumps(document: object) -> bytes:
    try:
        from _json import encode_basestring_ascii, make_encoder
    except ImportError:
        import json

        return json.dumps(document).encode()
    encode = make_encoder(
        None, repr, encode_basestring_ascii, None, ": ", ", ", False, False, False
    )
    return "".join(encode(document, 0)).encode()


# --- one call -------------------------------------------------------------------------------------


def main() -> int:
    """Run one call: stdout gets the result or one CNI error, and nothing else ever."""
    status, data = 0, b""
    try:
        document = respond(os.environ.get("CNI_COMMAND", ""), _stdin())
        if document is not None:
            data = _dumps(document)
    except Refused as error:
        status, data = 1, _error(error)
    except RecursionError:
        status, data = 1, _error(Refused(BAD_CONTENT, "the configuration is nested too deeply"))
    except Exception as error:  # a crash must reach the runtime as an error that it can show
        status, data = 1, _error(_bug(error))
    try:
        _print(data)
    except OSError as error:
        _warn(f"the result cannot be printed: {error.strerror}")
        return 1
    return status


def _stdin() -> bytes:
    chunks, size = [], 0
    try:
        while size <= MAX_STDIN_BYTES:
            chunk = os.read(0, 65536)
            if not chunk:
                break
            chunks.append(chunk)
            size += len(chunk)
    except OSError as error:
        if os.environ.get("CNI_COMMAND") not in ("DEL", "VERSION"):
            raise Refused(BAD_IO, f"stdin cannot be read: {error.strerror}") from None
    return b"".join(chunks)


def _print(data: bytes) -> None:
    while data:
        data = data[os.write(1, data) :]


def _warn(sentence: str) -> None:
    """Not by `print`, which takes stdout where stderr is closed."""
    try:  # noqa: SIM105 - contextlib is slow to import
        os.write(2, f"intercept-cni: {sentence}\n".encode(errors="replace"))
    except OSError:
        pass


def _error(error: Refused) -> bytes:
    said = {"code": error.code, "msg": str(error), "details": error.details}
    return _dumps({"cniVersion": error.version, **said})


def _bug(error: Exception) -> Refused:
    import traceback

    trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return Refused(BUG, f"intercept-cni failed, which is a bug to report: {error!r}", trace)


if __name__ == "__main__":
    sys.exit(main())
