"""Rules for the whole run: where netns tests run, what may be skipped, what may be left over."""

import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings as hypothesis_settings

from tests.support.cni_program import Program, build
from tests.support.ebpf import own_pins
from tests.support.netns import PREFIX, namespace

# A child that is forked, as one for another user is, would die of gRPC's own handlers if a test has
# used gRPC before (grpc/grpc#43055). It looks at this when it is imported.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"

# Folders under tests/ in which every test needs root and a real kernel.
KERNEL_FOLDERS = frozenset({"netns", "containerd", "e2e"})

# What would change the language, the width or the colour of what is printed, and (by prefix) the
# settings that the agent takes from the environment.
INERT = {"LC_ALL": "C", "TZ": "UTC", "TERM": "dumb"}
DROPPED = (
    *("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "CLICOLOR_FORCE", "LANGUAGE"),
    *("KUBE_VIRT_INTERFACES", "REDIRECT_DNS", "CAPTURE_ALL_DNS", "DROP_INVALID", "INVALID_DROP"),
    "DUAL_STACK",
)
DROPPED_PREFIXES = ("INTERCEPT_", "ISTIO_", "INBOUND_", "OUTBOUND_", "PROXY_", "ENVOY_")

# How long a namespace may take to go away: one of a run that is about to end, for example.
GRACE_S = 3.0

# The same examples in every run of the tests; `make fuzz` looks for new ones.
hypothesis_settings.register_profile("steady", derandomize=True, deadline=None)
hypothesis_settings.register_profile("fuzz", max_examples=20_000, deadline=None)
hypothesis_settings.load_profile("steady")

IN_USER_NAMESPACE = """
import ctypes
if ctypes.CDLL(None).unshare(0x10000000 | 0x40000000):  # a user and a network namespace
    raise SystemExit("unshare")
print("ready", flush=True)
input()
"""

BEFORE = pytest.StashKey[frozenset[str]]()
RUNS = pytest.StashKey["Runs"]()


@pytest.fixture
def netns() -> Iterator[str]:
    """A fresh network namespace with lo up; the value is its name under /run/netns."""
    with namespace() as name:
        yield name


@pytest.fixture
def user_namespace() -> Iterator[int]:
    """A process in a network namespace of a user namespace whose ids begin at 100000."""
    command = (sys.executable, "-I", "-S", "-c", IN_USER_NAMESPACE)
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        for name in ("uid_map", "gid_map"):
            Path(f"/proc/{process.pid}/{name}").write_text("0 100000 65536")
        try:
            yield process.pid
        finally:
            process.kill()


@pytest.fixture(autouse=True, scope="session")
def inert_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Take from the tests whatever the caller's shell says about language, colour and settings.

    Records of captures and pins of programs go to folders of this run, not to those of an agent of
    this machine.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name in tuple(os.environ):
            if name in DROPPED or name.startswith((*DROPPED_PREFIXES, "LC_")):
                patch.delenv(name)
        for name, value in INERT.items():
            patch.setenv(name, value)
        patch.setenv("INTERCEPT_STATE_DIR", str(tmp_path_factory.mktemp("state")))
        with own_pins(tmp_path_factory.mktemp("bpf")) as pins:
            patch.setenv("INTERCEPT_BPF_DIR", str(pins))
            yield


@pytest.fixture(scope="session")
def static_cni(tmp_path_factory: pytest.TempPathFactory) -> Program:
    """The static CNI program, compiled for this run."""
    return build(tmp_path_factory.mktemp("cni"))


@pytest.fixture(autouse=True)
def turn(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run a test that is marked `alone` while no other one does, in whatever process."""
    if os.geteuid() != 0 or request.node.get_closest_marker("netns") is None:
        yield
        return
    with open("/run/intercept-agent-tests-turn.lock", "w") as lock:
        alone = request.node.get_closest_marker("alone") is not None
        fcntl.flock(lock, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield


# --- netns tests: skipped on a laptop without root, never in CI ----------------------------------


def in_ci() -> bool:
    return bool(os.environ.get("CI"))


def why_no_kernel() -> str | None:
    """Return why netns tests cannot run here, or None if they can."""
    if os.geteuid() != 0:
        return "netns tests need root"
    probe = ("unshare", "--net", "--mount", "true")
    done = subprocess.run(probe, capture_output=True, text=True, check=False)
    if done.returncode:
        return f"root cannot make a network namespace here: {done.stderr.strip()}"
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what uses the fixture or stands in a kernel folder; say what becomes of it here."""
    tests = Path(__file__).parent
    for item in items:
        folder = item.path.relative_to(tests).parts[0] if tests in item.path.parents else ""
        if folder in KERNEL_FOLDERS or "netns" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.netns)
    marked = [item for item in items if item.get_closest_marker("netns")]
    reason = why_no_kernel() if marked else None
    if reason is None:
        return
    for item in marked:
        # In CI too: the report hook below turns the skip into a failure.
        item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    expected_failure = hasattr(report, "wasxfail")
    if in_ci() and report.skipped and not expected_failure and item.get_closest_marker("netns"):
        report.outcome = "failed"
        report.longrepr = f"a netns test must not be skipped in CI: {report.longrepr}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """A module that skips itself as a whole hides its marks, so in CI none may."""
    report = yield
    if in_ci() and report.skipped:
        report.outcome = "failed"
        report.longrepr = f"no module may be skipped in CI: {report.longrepr}"
    return report


# --- nothing left over ---------------------------------------------------------------------------


class Runs:
    """Counts the runs of these tests on this machine by a lock that each of them shares.

    Only root can make namespaces, so only root's runs count.
    """

    def __init__(self) -> None:
        self._fd: int | None = None

    def enter(self) -> None:
        if os.geteuid() == 0:
            self._fd = os.open("/run/intercept-agent-tests.lock", os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(self._fd, fcntl.LOCK_SH)

    def alone(self) -> bool:
        if self._fd is None:
            return True
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def ours_in_run_netns() -> frozenset[str]:
    folder = Path("/run/netns")
    if not folder.is_dir():
        return frozenset()
    return frozenset(entry.name for entry in folder.iterdir() if entry.name.startswith(PREFIX))


def pytest_sessionstart(session: pytest.Session) -> None:
    runs = Runs()
    runs.enter()
    session.stash[RUNS] = runs
    session.stash[BEFORE] = ours_in_run_netns()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the run if it left namespaces behind.

    While another run is on this machine nobody can tell whose they are, so then it only says so. Of
    a run in several processes the last to end judges, which is the one that started the others.
    """
    if hasattr(session.config, "workerinput"):
        return
    before = session.stash[BEFORE]
    left = ours_in_run_netns() - before
    deadline = time.monotonic() + GRACE_S
    while left and time.monotonic() < deadline:
        time.sleep(0.1)
        left &= ours_in_run_netns()
    if not left:
        return
    names = " ".join(sorted(left))
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if in_ci() or session.stash[RUNS].alone():
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        message = f"ERROR: namespaces left over: {names}"
    else:
        message = f"Namespaces of this or of another run that is still going on: {names}"
    if reporter is not None:
        reporter.write_line("")
        reporter.write_line(message)
