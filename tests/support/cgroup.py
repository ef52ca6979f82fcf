"""Throwaway cgroups, named `it-...`, and processes in them that dial."""

import contextlib
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path

from agent.kernel import bpf_pins
from tests.support.escape import OUTBOUND
from tests.support.netns import run

DIAL = """
import encodings.idna, os, socket
os.setgroups([]); os.setgid({uid}); os.setuid({uid})
for host, port in {targets}:
    try:
        with socket.create_connection((host, port), timeout={timeout_s}) as made:
            print(made.recv(32).decode())
    except OSError as error:
        print(type(error).__name__)
"""


@contextlib.contextmanager
def cgroup(label: str = "init") -> Iterator[str]:
    """Make a cgroup with one below it, yield its path from the root on, and remove both."""
    path = f"/it-{label}-{secrets.token_hex(3)}"
    (place(path) / "below").mkdir(parents=True)
    try:
        yield path
    finally:
        remove(path)


def place(path: str) -> Path:
    root = bpf_pins.cgroup_root()
    assert root is not None, "no cgroup2 is mounted here"
    return Path(root + path)


def remove(path: str) -> None:
    for found in (place(path) / "below", place(path)):
        with contextlib.suppress(FileNotFoundError):
            found.rmdir()


def dial_from(path: str, netns: str, uid: int) -> list[str]:
    """Dial the service outside, in both families, as a user in a cgroup; return who answered."""
    code = DIAL.format(uid=uid, targets=OUTBOUND, timeout_s=1.0)
    join = f"echo $$ > {place(path)}/cgroup.procs && exec nsenter --net=/run/netns/{netns} -- "
    command = f'{join} {sys.executable} -I -S -c "$CODE"'
    return run("env", f"CODE={code}", "sh", "-c", command).splitlines()
