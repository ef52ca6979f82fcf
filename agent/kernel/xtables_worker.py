"""The helper process in which libiptc is used, and the client that talks to it.

python-iptables is kept in a process of its own because it is not thread-safe (four threads in four
namespaces crashed each time), caches tables by name across namespaces (a pod's rule landed in
another pod), moves file descriptor 1 about and may exit the process. Here it runs single-threaded:
one job enters a namespace, takes the xtables lock, refreshes, edits, commits once a table,
refreshes.

A compiled rule depends on its text and family alone, and pods hold the same rules, so the worker
keeps compiled rules: building one through ctypes costs about 0.2 ms, a copy nothing.
"""

import array
import atexit
import contextlib
import ctypes
import glob
import json
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from agent.kernel import locks
from agent.kernel.netns import Netns, enter_at
from agent.model.errors import EnvironmentLacks, KernelRejected

HEADER = struct.Struct("!I")
MAX_FRAME = 16 * 1024 * 1024
NFPROTO_IPV4 = 2
MAX_INTERFACE_NAME = 15
LOCK_TIMEOUT_S = 5.0
JOB_TIMEOUT_S = 20.0

# A job is a list of operations on tables; a value is JSON:
#   {"version": 4|6, "table": "nat", "ops": [["new", chain] | ["flush", chain] | ["drop", chain]
#     | ["delete", chain, RULE] | ["insert", chain, zero-based position or -1 for the end, RULE]]}
# RULE is {"matches": [[module, [[name, [values], negated], ...]], ...], "target": [name, goto,
# [..]]}
Job = list[dict[str, Any]]


class XtablesClient:
    """Owns the worker process; starts it on first use and again after it died. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    def run(self, netns: Netns, job: Job, lock_fd: int | None = None) -> None:
        """Do a job in a namespace. Tables are committed in order, each as a whole.

        Raises: KernelRejected if a table was refused (those before it are applied),
        EnvironmentLacks if the xtables lock stays taken or the worker cannot be had.
        """
        with self._lock:
            sock = self._start()
            fds = [netns.fd] if lock_fd is None else [netns.fd, lock_fd]
            try:
                payload = json.dumps(job).encode()
                socket.send_fds(sock, [HEADER.pack(len(payload))], fds)
                sock.sendall(payload)
                reply = json.loads(_receive(sock))
            except (OSError, EOFError, ValueError) as error:
                self._end()
                raise KernelRejected(
                    f"the iptables-legacy helper died or hung ({error or type(error).__name__}); "
                    "its last job may be half done"
                ) from error
            except BaseException:
                self._end()  # interrupted: its job must not come after what the caller undoes
                raise
        if reply["status"] == "refused":
            raise KernelRejected(reply["message"], script=json.dumps(job))
        if reply["status"] == "lacks":
            raise EnvironmentLacks(reply["message"])

    def close(self) -> None:
        with self._lock:
            self._end()
        atexit.unregister(self.close)

    def _start(self) -> socket.socket:
        if self._process is not None and self._process.poll() is not None:
            self._end()
        if self._socket is None:
            ours, theirs = socket.socketpair()
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", __name__, str(theirs.fileno())],
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    env=_worker_environment(),
                    cwd="/",
                )
            ours.settimeout(JOB_TIMEOUT_S)
            self._socket = ours
            atexit.register(self.close)
        return self._socket

    def _end(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def _worker_environment() -> dict[str, str]:
    """Tell python-iptables where its libraries are; without, it starts gcc and ld to find out."""
    environment = {"PATH": os.environ.get("PATH", ""), "LC_ALL": "C"}
    environment["PYTHONPATH"] = str(Path(__file__).resolve().parents[2])
    plugins = sorted(glob.glob("/usr/lib/*/xtables/libxt_owner.so"))
    if plugins:
        folder = Path(plugins[0]).parent
        site = next((p for p in sys.path if glob.glob(f"{p}/libxtwrapper*.so")), "")
        environment["PYTHON_IPTABLES_XTABLES_VERSION"] = "12"
        environment["IPTABLES_LIBDIR"] = f"{folder.parent}:{site}" if site else str(folder.parent)
        environment["XTABLES_LIBDIR"] = str(folder)
    return environment


def _receive(sock: socket.socket) -> bytes:
    (size,) = HEADER.unpack(receive_exactly(sock, HEADER.size))
    return receive_exactly(sock, size)


def receive_exactly(sock: socket.socket, size: int) -> bytes:
    if size > MAX_FRAME:
        raise ValueError(f"a frame of {size} bytes is too large")
    data = b""
    while len(data) < size:
        chunk = sock.recv(size - len(data))
        if not chunk:
            raise EOFError("connection closed")
        data += chunk
    return data


# --- the worker's side ----------------------------------------------------------------------------


def serve(sock: socket.socket) -> None:
    """Do jobs until the other side is gone."""
    home = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    while True:
        size_of_fds = socket.CMSG_LEN(2 * array.array("i").itemsize)
        header, ancillary, _, _ = sock.recvmsg(HEADER.size, size_of_fds)
        if not header:
            return
        fds = array.array("i")
        for _, _, data in ancillary:
            fds.frombytes(data)
        try:
            job = json.loads(receive_exactly(sock, HEADER.unpack(header)[0]))
            reply = _do(fds[0], job)
        finally:
            enter_at(home, "its own namespace")  # staying, it would keep the pod's alive
            for fd in fds:
                os.close(fd)
        payload = json.dumps(reply).encode()
        sock.sendall(HEADER.pack(len(payload)) + payload)


def _do(netns_fd: int, job: Job) -> dict[str, str]:
    try:
        enter_at(netns_fd, "the namespace")
        with locks.xtables_lock(timeout_s=LOCK_TIMEOUT_S):
            for edit in job:
                _edit_table(edit)
    except EnvironmentLacks as error:
        return {"status": "lacks", "message": str(error)}
    except Exception as error:  # whatever libiptc says, the caller has to hear it
        return {"status": "refused", "message": f"iptables-legacy: {error}"}
    return {"status": "done"}


def _edit_table(edit: dict[str, Any]) -> None:
    import iptc

    kind = iptc.Table if edit["version"] == 4 else iptc.Table6
    try:
        table = kind(edit["table"], autocommit=False)
        table.refresh()  # the object is cached by name, with the namespace that it was made in
    except iptc.IPTCError as error:
        raise ValueError(f"table {edit['table']}: {error}") from error
    try:
        for op in edit["ops"]:
            _apply(table, edit["version"], op)
        table.commit()
    except Exception as error:
        raise ValueError(f"table {edit['table']}, IPv{edit['version']}: {error}") from error
    finally:
        table.close()  # drops what was not committed, and the socket into this namespace


def _apply(table: Any, version: int, op: Sequence[Any]) -> None:
    verb, chain = op[0], _Word(op[1])
    actions: dict[str, Callable[[], None]] = {
        "new": lambda: table.create_chain(chain),
        "flush": lambda: table.flush_entries(chain),
        "drop": lambda: table.delete_chain(chain),
        "delete": lambda: _delete(table, version, chain, op[2]),
        "insert": lambda: _insert(table, version, chain, op[2], op[3]),
    }
    actions[verb]()


def _insert(table: Any, version: int, chain: str, position: int, spec: Any) -> None:
    entry, _ = _compile(version, json.dumps(spec))
    buffer = (ctypes.c_ubyte * len(entry)).from_buffer_copy(entry)
    if position < 0:
        table.append_entry(chain, buffer)
    else:
        table.insert_entry(chain, buffer, position)


def _delete(table: Any, version: int, chain: str, spec: Any) -> None:
    entry, mask = _compile(version, json.dumps(spec))
    buffer = (ctypes.c_ubyte * len(entry)).from_buffer_copy(entry)
    mask_buffer = (ctypes.c_ubyte * len(mask)).from_buffer_copy(mask)
    table.delete_entry(chain, buffer, mask_buffer)


@lru_cache(maxsize=4096)
def _compile(version: int, text: str) -> tuple[bytes, bytes]:
    """Return the kernel's form of a rule and the mask that says which of its bytes identify it."""
    spec = json.loads(text)
    rule = _new_rule(version)
    for module, options in spec["matches"]:
        if module == "":
            for name, values, negated in options:
                _set_basic(rule, name, values[0], negated)
        else:
            _set_options(rule.create_match(module), options)
    if spec["target"] is None:
        rule.create_target("")
    else:
        name, goto, options = spec["target"]
        _set_target(rule, name, goto, options)
    for part in (*rule.matches, rule.target):
        if part._module:  # its public method also reads the words back, and as UTF-8
            part._final_check()
    return bytes(rule.rule), bytes(rule.mask)


def _new_rule(version: int) -> Any:
    """Return an empty rule that knows of no tables.

    A rule of python-iptables looks for its target in every table there may be, and looking creates
    the table in the namespace for good.
    """
    import iptc

    kind = iptc.Rule if version == 4 else iptc.Rule6
    return type("Rule", (kind,), {"tables": ()})()


BASIC_ATTRIBUTES = {"-s": "src", "-d": "dst", "-p": "protocol"}
INTERFACES = {"-i": ("iniface", "IN"), "-o": ("outiface", "OUT")}
# Names that iptables-save prints and python-iptables does not know.
PROTOCOLS = {"ipv6-icmp": "58", "icmpv6": "58", "ipv6-mh": "135", "mobility-header": "135"}


def _set_basic(rule: Any, name: str, value: str, negated: bool) -> None:
    if name in INTERFACES:
        _set_interface(rule.get_ip(), name, value, negated)
        return
    if name not in BASIC_ATTRIBUTES:
        raise ValueError(f"option {name} cannot be written")
    value = PROTOCOLS.get(value, value) if name == "-p" else value
    setattr(rule, BASIC_ATTRIBUTES[name], ("!" if negated else "") + value)
    if name == "-p" and rule.nfproto != NFPROTO_IPV4:
        # python-iptables 1.2.0 leaves this out for `! -p`, and the kernel then compares nothing.
        rule.get_ip().flags |= rule.get_ip().IP6T_F_PROTO


def _set_interface(ip: Any, name: str, value: str, negated: bool) -> None:
    """Write the interface as xtables_parse_interface does.

    python-iptables 1.2.0 fills the mask of IPv6 rules with 0x01 where the kernel wants 0xff: only
    the lowest bit of each letter would count, and `lo` would match `net1` as well.
    """
    raw = value.encode()
    if len(raw) > MAX_INTERFACE_NAME:
        raise ValueError(f"interface name {value} is too long")
    field, direction = INTERFACES[name]
    setattr(ip, field, raw)
    # A trailing + stands for any ending; without it the closing NUL is compared too.
    setattr(ip, f"{field}_mask", b"\xff" * (len(raw) - 1 if raw.endswith(b"+") else len(raw) + 1))
    if negated:
        kind = "IP6T" if hasattr(ip, "IP6T_F_PROTO") else "IPT"
        ip.invflags |= getattr(ip, f"{kind}_INV_VIA_{direction}")


class _Word(str):
    """A word of somebody's rule, which need not be UTF-8: python-iptables encodes it by itself."""

    __slots__ = ()

    def encode(self, encoding: str = "utf-8", errors: str = "surrogateescape") -> bytes:
        return super().encode(encoding, errors)


def _set_options(module: Any, options: Sequence[Any]) -> None:
    for name, values, negated in options:
        words = [_Word(value) for value in values]
        # A list, because of a single word an exclamation mark in front would be a negation.
        value = (["!", *words] if negated else words) if words else "!" * negated
        module.set_parameter(name.removeprefix("--"), value)


STANDARD = frozenset({"ACCEPT", "DROP", "RETURN", "QUEUE"})


def _set_target(rule: Any, name: str, goto: bool, options: Sequence[Any]) -> None:
    if name in STANDARD or goto or not _is_extension(rule, name):
        # A verdict or a jump: libiptc turns the name into the chain's offset when it commits.
        target = rule.create_target("", goto=goto)
        target.standard_target = _Word(name)
        return
    _set_options(rule.create_target(name), options)


def _is_extension(rule: Any, name: str) -> bool:
    """Tell a target extension (REDIRECT) from a chain to jump to: extensions have a plugin file."""
    folder = os.environ.get("XTABLES_LIBDIR", "/usr/lib/xtables")
    kinds = ("xt", "ipt" if rule.nfproto == NFPROTO_IPV4 else "ip6t")
    return any(os.path.exists(f"{folder}/lib{kind}_{name}.so") for kind in kinds)


def _main() -> None:
    sock = socket.socket(fileno=int(sys.argv[1]))
    os.dup2(2, 1)  # python-iptables writes to descriptor 1 when it reads a parameter
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError, KeyboardInterrupt):
        serve(sock)


if __name__ == "__main__":
    _main()
