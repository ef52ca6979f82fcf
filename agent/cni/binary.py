"""The file `intercept-cni` in the runtime's plugin directory: what it holds, and whether it runs.

It is `agent/cni/plugin.py` behind two lines: how to start it, and which version it is. One file,
because it runs on the node and not where the agent is installed, with an interpreter that sees no
site-packages (`-I -S` starts in 6 ms, with them it takes twice as long).

The interpreter is the node's own `/usr/bin/python3` if there is one, never that of the virtual
environment in which the agent may run: that goes away with the agent, and then no pod of the node
could start or stop. A node without Python gets another program in its place: the static one of
deploy/cni, as it is. Nothing is put in place that did not run once and answer VERSION.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from hashlib import sha256
from importlib import resources
from pathlib import Path

from agent.cni.folder import Folder, explained
from agent.formats.cni_config import TYPE, VERSIONS
from agent.kernel import files, package
from agent.model.errors import AgentError, EnvironmentLacks

INTERPRETERS = (
    "/usr/bin/python3",
    "/usr/libexec/platform-python",  # RHEL 8 and 9 have it without the package python3
    "/usr/local/bin/python3",
)
FLAGS = "-ISE"
MODE = 0o755
MAX_PROGRAM = 64 << 20
MAX_SHEBANG_BYTES = 127  # what kernels before 5.1 read of the first line
PROOF_TIMEOUT_S = 10.0


class Unproven(AgentError):
    """A plugin file did not run or did not answer as a CNI plugin must."""


@cache
def body() -> bytes:
    """Return the file without its first line: the version and the plugin's source.

    Read once: an agent whose package is replaced below it goes on with what it started as.
    """
    source = resources.files("agent.cni").joinpath("plugin.py").read_bytes()
    if source.startswith(b"#!"):
        source = source.partition(b"\n")[2]
    return (
        f"# {TYPE} {package.version()} sha256:{sha256(source).hexdigest()[:16]}\n".encode() + source
    )


def whole(interpreter: str) -> bytes:
    return f"#!{interpreter} {FLAGS}\n".encode() + body()


def put(
    folder: Folder, interpreter: str | None = None, program: str | None = None
) -> tuple[bool, tuple[str, ...]]:
    """Make the file be there and run; return whether it was changed, and warnings.

    Raises: EnvironmentLacks; leaving the folder then undoes what was done.
    """
    if not differences(folder, interpreter, program):
        return False, ()
    if program is not None:
        _put_program(folder, program)
        return True, ()
    failures = []
    for candidate in (interpreter,) if interpreter else tuple(_interpreters()):
        draft = _draft(folder, candidate)
        warnings: tuple[str, ...] = ()
        if interpreter and not os.access(interpreter, os.X_OK):
            # It may be there on the node and not in the container that the agent runs in.
            warnings = (f"{interpreter} is not here, so {TYPE} was installed without a trial run",)
        else:
            try:
                prove(f"{folder.path}/{draft}")
            except Unproven as error:
                failures.append(str(error))
                continue
        with explained(f"cannot write {folder.path}/{TYPE}"):
            folder.install(draft, TYPE)
        folder.sync()
        return True, warnings
    raise EnvironmentLacks(
        f"no interpreter on this node runs {TYPE}: {'; '.join(failures) or 'there is none'}; "
        "install python3, or name one with --interpreter; nothing was changed"
    )


def _put_program(folder: Folder, program: str) -> None:
    with explained(f"cannot read {program}"):
        contents = files.read(Path(program), MAX_PROGRAM)
    with explained(f"cannot write {folder.path}/{TYPE}"):
        draft = folder.draft(TYPE, contents, MODE)
    try:
        prove(f"{folder.path}/{draft}")
    except Unproven as error:
        raise EnvironmentLacks(
            f"{program} is no {TYPE} for this node: {error}; nothing was changed"
        ) from error
    with explained(f"cannot write {folder.path}/{TYPE}"):
        folder.install(draft, TYPE)
    folder.sync()


def differences(
    folder: Folder, interpreter: str | None = None, program: str | None = None
) -> tuple[str, ...]:
    """Return in words what keeps the file from being this version, whole and able to start."""
    try:
        found = folder.read(TYPE)
    except OSError as error:
        return (
            f"binary {TYPE} is missing"
            if not folder.has(TYPE)
            else f"binary {TYPE} cannot be read: {error.strerror}",
        )
    if program is None:
        words = _script_differences(found, interpreter)
    else:
        words = _program_differences(found, program)
    if not folder.runs(TYPE):
        words.append(f"binary {TYPE} is not executable")
    return tuple(words)


def _program_differences(found: bytes, program: str) -> list[str]:
    try:
        if found == files.read(Path(program), MAX_PROGRAM):
            return []
    except OSError as error:
        return [f"{program}, which binary {TYPE} is to be, cannot be read: {error.strerror}"]
    return [f"binary {TYPE} is not {program}"]


def _script_differences(found: bytes, interpreter: str | None) -> list[str]:
    first, _, rest = found.partition(b"\n")
    words = []
    path = first.removeprefix(b"#!").split(b" ")[0].decode("utf-8", "replace")
    if not first.startswith(b"#!/") or not first.endswith(f" {FLAGS}".encode()):
        words.append(f"binary {TYPE} is not started as it should be: {first[:60]!r}")
    elif interpreter not in (None, path):
        words.append(f"binary {TYPE} is run by {path} instead of {interpreter}")
    elif interpreter is None and not os.access(path, os.X_OK):
        words.append(f"binary {TYPE} is run by {path}, which is not there")
    if rest != body():
        words.append(f"binary {TYPE} is {_said(rest)}, this agent has {_said(body())}")
    return words


def prove(path: str) -> None:
    """Start a plugin as a runtime does and ask for its versions.

    Raises: Unproven, with what went wrong.
    """
    try:
        done = subprocess.run(
            [path],
            input=b'{"cniVersion": "1.0.0"}',
            capture_output=True,
            env={"CNI_COMMAND": "VERSION", "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
            timeout=PROOF_TIMEOUT_S,
            check=False,
        )
        spoken = json.loads(done.stdout)["supportedVersions"]
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unproven(f"{path} does not run: {error}") from error
    except (ValueError, KeyError, TypeError) as error:
        lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
        raise Unproven(f"{path} gives no versions: {lines[-1] if lines else 'no error'}") from error
    if not set(VERSIONS) <= set(spoken):
        raise Unproven(f"{path} speaks {spoken} and not all of {', '.join(VERSIONS)}")


def _draft(folder: Folder, interpreter: str) -> str:
    if " " in interpreter or len(interpreter) > MAX_SHEBANG_BYTES - len(FLAGS) - 4:
        raise EnvironmentLacks(f"the kernel cannot start a script by {interpreter!r}")
    with explained(f"cannot write {folder.path}/{TYPE}"):
        return folder.draft(TYPE, whole(interpreter), MODE)


def _interpreters() -> Iterator[str]:
    """Yield those of the node first; then the one below our virtual environment, if any."""
    own = getattr(sys, "_base_executable", sys.executable) or sys.executable
    for path in dict.fromkeys((*INTERPRETERS, own)):
        if path.startswith("/") and os.access(path, os.X_OK):
            yield path


def _said(text: bytes) -> str:
    """Return version and digest from a file's second line, and whether the rest agrees."""
    line, _, source = text.partition(b"\n")
    head = f"# {TYPE} "
    stamp = line.decode("utf-8", "replace")
    if not stamp.startswith(head):
        return "of another make"
    changed = not stamp.endswith(f"sha256:{sha256(source).hexdigest()[:16]}")
    return stamp.removeprefix(head) + (" with other contents" if changed else "")
