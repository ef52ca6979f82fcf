"""One process of the escape tests: answers connections with its name, or dials as fast as it can.

It is started inside a network namespace as a plain file, so it imports the standard library only.
It opens its listeners, becomes its user, prints `ready`, and obeys one JSON command a line on stdin
until that closes. A listener answers a connection with its own name and echoes what follows.
"""

import contextlib
import json
import os
import selectors
import socket
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

IP_TRANSPARENT, IPV6_TRANSPARENT, SOL_IPV6 = 19, 75, 41
RESET_ON_CLOSE = struct.pack("ii", 1, 0)
PAUSE_S = 0.001
NAME_BYTES = 32
SOURCE_PORTS = (16000, 65000)

Target = tuple[str, int]


def family_of(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


class Listeners:
    """Serves every listener in one thread and counts who came where."""

    def __init__(self, listeners: list[tuple[str, int, str]]) -> None:
        self.seen: Counter[str] = Counter()
        self._selector = selectors.DefaultSelector()
        for host, port, name in listeners:
            self._selector.register(_listener(host, port), selectors.EVENT_READ, name)

    def start(self) -> None:
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select():
                ours = key.fileobj
                assert isinstance(ours, socket.socket)
                with contextlib.suppress(OSError):
                    if key.data is None:
                        self._echo(ours)
                    else:
                        self._accept(ours, key.data)

    def _accept(self, listener: socket.socket, name: str) -> None:
        made, _ = listener.accept()
        self.seen[name] += 1
        made.setblocking(False)
        self._selector.register(made, selectors.EVENT_READ, None)
        made.send(name.encode())

    def _echo(self, made: socket.socket) -> None:
        try:
            data = made.recv(NAME_BYTES)
        except ConnectionError:
            data = b""
        if data:
            made.send(data)
        else:
            self._selector.unregister(made)
            made.close()


def _listener(host: str, port: int) -> socket.socket:
    made = socket.socket(family_of(host))
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if made.family == socket.AF_INET6:
        made.setsockopt(SOL_IPV6, socket.IPV6_V6ONLY, 1)
        made.setsockopt(SOL_IPV6, IPV6_TRANSPARENT, 1)
    else:
        made.setsockopt(socket.IPPROTO_IP, IP_TRANSPARENT, 1)
    made.bind((host, port))
    made.listen(512)
    made.setblocking(False)
    return made


def source_ports() -> Iterator[int]:
    """Yield ports to dial from, each once a minute at most.

    The kernel would choose one again after some thousand connections, and what conntrack remembers
    of the old connection then decides about the new one.
    """
    while True:
        yield from range(*SOURCE_PORTS)


_ports = source_ports()
_turn = threading.Lock()


def connect(target: Target, timeout_s: float) -> tuple[str, socket.socket | None]:
    """Return who answered, and the connection; without an answer what happened instead."""
    made = socket.socket(family_of(target[0]))
    with _turn:
        made.bind(("", next(_ports)))
    made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
    made.settimeout(timeout_s)
    try:
        made.connect(target)
        name = made.recv(NAME_BYTES).decode()
    except TimeoutError:
        name = "timeout"
    except OSError as error:
        name = error.__class__.__name__
    if name and name.islower() and name != "timeout":
        return name, made
    made.close()
    return name or "closed", None


class Dialler:
    """Opens connections in several threads, each as fast as it can, until told to stop."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._counts: list[Counter[str]] = []
        self._held: list[socket.socket] = []

    def flood(self, targets: list[Target], timeout_s: float) -> None:
        self._stop.clear()
        for target in targets:
            counts: Counter[str] = Counter()
            self._counts.append(counts)
            thread = threading.Thread(target=self._dial, args=(target, timeout_s, counts))
            self._threads.append(thread)
            thread.start()

    def _dial(self, target: Target, timeout_s: float, counts: Counter[str]) -> None:
        while not self._stop.is_set():
            name, made = connect(target, timeout_s)
            counts[name] += 1
            if made is not None:
                made.close()
            time.sleep(PAUSE_S)

    def stop(self) -> Counter[str]:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        total = sum(self._counts, Counter[str]())
        self._threads, self._counts = [], []
        return total

    def once(self, targets: list[Target], timeout_s: float, *, hold: bool) -> list[str]:
        """Dial all targets at the same time and return who answered each."""
        found = [""] * len(targets)

        def dial(at: int, target: Target) -> None:
            found[at], made = connect(target, timeout_s)
            if made is not None and hold:
                self._held.append(made)
            elif made is not None:
                made.close()

        threads = [threading.Thread(target=dial, args=each) for each in enumerate(targets)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found

    def ping(self, timeout_s: float) -> list[str]:
        """Send on every held connection and return what came back."""
        found = []
        for made in self._held:
            made.settimeout(timeout_s)
            try:
                made.send(b"still there?")
                found.append("alive" if made.recv(NAME_BYTES) == b"still there?" else "closed")
            except OSError as error:
                found.append(error.__class__.__name__)
        return found

    def release(self) -> None:
        for made in self._held:
            made.close()
        self._held = []


def obey(command: dict[str, Any], listeners: Listeners, dialler: Dialler) -> object:
    targets = [(str(host), int(port)) for host, port in command.get("targets", ())]
    timeout_s = float(command.get("timeout_s", 1.0))
    match command["op"]:
        case "flood":
            dialler.flood(targets, timeout_s)
        case "stop":
            return dialler.stop()
        case "dial" | "hold" as op:
            return dialler.once(targets, timeout_s, hold=op == "hold")
        case "ping":
            return dialler.ping(timeout_s)
        case "release":
            dialler.release()
        case "seen":
            return listeners.seen
    return None


def main() -> None:
    spec = json.loads(sys.argv[1])
    listeners = Listeners([(str(h), int(p), str(n)) for h, p, n in spec["listeners"]])
    os.setgroups([])
    os.setgid(spec["uid"])
    os.setuid(spec["uid"])
    listeners.start()
    dialler = Dialler()
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(obey(json.loads(line), listeners, dialler)), flush=True)
    os._exit(0)  # threads may hang in a connect


if __name__ == "__main__":
    main()
