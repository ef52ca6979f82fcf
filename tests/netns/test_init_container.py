"""The commands in an init container: with the rights that Istio's has, on a root that is read-only.

With two capabilities it may neither enter namespaces nor mount anything, and there is no place for
locks, nor for a record of what was applied.
"""

import sys

import pytest

from tests.support.capturing import BACKENDS, ROOT, STATE_DIR
from tests.support.conformance import Ran, cli_process
from tests.support.netns import inside, path_of, run, snapshot

pytestmark = pytest.mark.netns

READ_ONLY = 'mount --make-rprivate / && mount -t tmpfs -o ro none /run && exec "$@"'
APART = (
    *("unshare", "--mount", "--pid", "--fork", "--mount-proc", "sh", "-c", READ_ONLY, "sh"),
    *("env", f"--unset={STATE_DIR}", f"PYTHONPATH={ROOT}"),
)
RIGHTS = ("setpriv", "--bounding-set=-all,+net_admin,+net_raw", "--inh-caps=-all")
FLAGS = ("-p", "15001", "-z", "15006", "-u", "1337", "-i", "*", "-b", "*", "-d", "15090,15021")
TWICE = """
from agent.kernel.locks import namespace_lock
from agent.kernel.netns import Netns
from agent.model.errors import EnvironmentLacks
with Netns.open("/proc/self/ns/net") as own, namespace_lock(own):
    try:
        with namespace_lock(own, timeout_s=0.1):
            print("both are in")
    except EnvironmentLacks as error:
        print(error)
"""


def container(netns: str) -> tuple[str, ...]:
    """Return what runs a command as the container does; its PID 1 is not the node's."""
    return ("nsenter", f"--net={path_of(netns)}", *APART, *RIGHTS)


def commanded(netns: str, *words: str) -> Ran:
    return cli_process(*words, "--netns", "self", within=container(netns))


@pytest.mark.parametrize("backend", BACKENDS)
def test_pod_is_captured_checked_and_left_as_before(netns: str, backend: str) -> None:
    inside(netns, "nft", "add", "table", "ip", "others")
    before = snapshot(netns)
    done = commanded(netns, "apply", *FLAGS, "--backend", backend)
    assert (done.code, done.stderr) == (0, "")
    done = commanded(netns, "check", *FLAGS, "--backend", backend)
    assert (done.code, done.stderr) == (0, "")
    done = commanded(netns, "remove")
    assert (done.code, done.stderr) == (0, "")
    after = snapshot(netns)
    if backend == "iptables-legacy":  # its tables stay, empty
        before = {**before, "legacy4": after["legacy4"], "legacy6": after["legacy6"]}
        assert "ISTIO" not in after["legacy4"] + after["legacy6"]
    assert after == before


@pytest.mark.parametrize("backend", BACKENDS)
def test_pod_with_users_of_its_own_is_captured_from_inside(backend: str) -> None:
    """As where hostUsers is false: from inside, rules about users are its own to write."""
    own = ("unshare", "--user", "--map-root-user", "--net", *APART)
    words = ("--netns", "self", "-u", "0", "-i", "*", "-b", "*", "--backend", backend)
    done = cli_process("apply", *words, within=own)
    assert (done.code, done.stderr) == (0, "")
    assert f"captured by {backend}" in done.stdout


def test_what_others_left_in_the_pod_is_cleaned(netns: str) -> None:
    """`self` is the pod, where PID 1 is not the node's."""
    inside(netns, "iptables-nft", "-t", "nat", "-N", "KUBE-SVC-TCOU7JCQXEZGVUNU")
    done = commanded(netns, "clean", "--dry-run")
    assert (done.code, done.stderr) == (1, "")
    assert "KUBE-SVC-TCOU7JCQXEZGVUNU" in done.stdout


def test_probe_says_which_right_it_lacks(netns: str) -> None:
    done = commanded(netns, "check", "--probe", *FLAGS)
    assert done.code == 3
    assert "CAP_SYS_ADMIN" in done.stderr


def test_one_run_at_a_time_where_no_lock_file_can_be_made(netns: str) -> None:
    assert "another run is changing this namespace" in run(
        *container(netns), sys.executable, "-c", TWICE
    )
