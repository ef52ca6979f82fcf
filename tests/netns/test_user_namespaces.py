"""A pod with users of its own (hostUsers: false): its namespace is not the node's to rule alone."""

import subprocess

import pytest

from agent.capture.apply import apply, remove
from agent.capture.check import check
from agent.kernel.netns import Netns
from agent.model.errors import EnvironmentLacks
from agent.model.settings import parse
from tests.support.capturing import EVERYTHING, command
from tests.support.netns import run

pytestmark = pytest.mark.netns

WANTED = {**EVERYTHING, "enable_ipv6": False}
FAR = "10.9.0.2"  # where nobody answers
DIAL = """
import os, socket
os.setgroups([])
os.setresgid({gid}, {gid}, {gid})
os.setresuid({uid}, {uid}, {uid})
with socket.socket() as sock:
    sock.settimeout(0.5)
    print(sock.connect_ex(("{far}", 80)))
"""
LISTEN = """
import socket
with socket.create_server(("127.0.0.1", 15001)):
    print("ready", flush=True)
    input()
"""


def enter(pid: int) -> tuple[str, ...]:
    return ("nsenter", f"--target={pid}", "--user", "--net", "--setuid=0", "--setgid=0", "--")


def reached(pid: int, uid: int) -> bool:
    code = DIAL.format(uid=uid, gid=uid, far=FAR)
    return run(*enter(pid), "/usr/bin/python3", "-I", "-S", "-c", code).strip() == "0"


@pytest.mark.parametrize("backend", ["iptables-nft", "iptables-legacy"])
def test_iptables_is_refused_in_words(user_namespace: int, backend: str) -> None:
    target = f"pid:{user_namespace}"
    code, out, err = command("apply", "--netns", target, "-b", "*", "--backend", backend)
    assert (code, out) == (3, "")
    assert "hostUsers: false" in err
    assert "nftables" in err
    with Netns.open(f"/proc/{user_namespace}/ns/net") as opened:
        with pytest.raises(EnvironmentLacks):
            apply(opened, parse(WANTED), backend=backend)
        assert apply(opened, parse(WANTED)).backend == "nftables"
        assert check(opened, parse(WANTED)).in_sync
        remove(opened)


def test_the_proxys_user_is_the_one_of_that_number_inside(user_namespace: int) -> None:
    for words in (
        ("link", "set", "lo", "up"),
        ("link", "add", "d0", "type", "veth", "peer", "name", "d1"),
        ("link", "set", "d1", "up"),
        ("addr", "add", "10.9.0.1/24", "dev", "d0"),
        ("link", "set", "d0", "up"),
    ):
        run(*enter(user_namespace), "ip", *words)
    listener = (*enter(user_namespace), "/usr/bin/python3", "-I", "-S", "-c", LISTEN)
    with (
        Netns.open(f"/proc/{user_namespace}/ns/net") as opened,
        subprocess.Popen(listener, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as proxy,
    ):
        try:
            assert proxy.stdout is not None
            proxy.stdout.readline()
            apply(opened, parse(WANTED), backend="nftables")
            assert reached(user_namespace, 1000)
            assert not reached(user_namespace, 1337)
        finally:
            proxy.kill()
