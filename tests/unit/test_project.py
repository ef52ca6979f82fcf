"""What holds for the project as a whole: floors, imports, sizes, the locks and what git tracks."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
AGENT = ROOT / "agent"
MODULES = tuple(sorted(AGENT.rglob("*.py")))
LOCKS = ("requirements.lock", "requirements-build.lock", "requirements-runtime.lock")

FLOORS = {
    "model": 1,
    "formats": 2,
    "kernel": 2,
    "backends": 3,
    "proxy": 3,
    "capture": 4,
    "leftovers": 4,
    "explain": 4,
    "lint": 4,
    "node": 5,
    "api": 5,
    "cni": 5,
    "flows": 5,
    "observe": 5,
    "cli": 6,
}

MAX_FUNCTION_LINES = 60
MAX_MODULE_LINES = 400

# Audit events that mean "a process was started" or "something was reached". Importing iptc starts
# ldconfig and, where there is one, a compiler: so it may only be imported inside a function.
FORBIDDEN_AT_IMPORT = frozenset(
    {
        "os.exec",
        "os.fork",
        "os.forkpty",
        "os.posix_spawn",
        "os.putenv",
        "os.system",
        "socket.bind",
        "socket.connect",
        "subprocess.Popen",
    }
)


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def module_names() -> tuple[str, ...]:
    return tuple(module_name(path) for path in MODULES)


def imports_of(tree: ast.Module, path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and full name of everything imported anywhere in a module, relative ones too."""
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = (*above, *(node.module.split(".") if node.module else ()))
            yield from ((node.lineno, ".".join((*base, alias.name))) for alias in node.names)


def wrong_imports(path: Path) -> list[str]:
    """Return the imports of one module that do not go down, each as a sentence."""
    room = path.relative_to(AGENT).parts[0]
    wrong = []
    for line, name in imports_of(ast.parse(path.read_text()), path):
        parts = name.split(".")
        if parts[0] == "tests":
            wrong.append(f"{path.relative_to(ROOT)}:{line} imports {name}: tests are not shipped")
        if parts[0] != "agent" or len(parts) < 2 or parts[1] == room:
            continue
        there = FLOORS.get(parts[1])
        if there is None or there >= FLOORS[room]:
            wrong.append(f"{path.relative_to(ROOT)}:{line} (floor {FLOORS[room]}) imports {name}")
    return wrong


def test_every_module_stands_in_a_room_with_a_floor() -> None:
    homeless = [
        str(path.relative_to(ROOT))
        for path in MODULES
        if path != AGENT / "__init__.py" and path.relative_to(AGENT).parts[0] not in FLOORS
    ]
    assert not homeless, "\n".join(homeless)


def test_imports_go_down_only() -> None:
    rooms = [path for path in MODULES if path.relative_to(AGENT).parts[0] in FLOORS]
    wrong = [sentence for path in rooms for sentence in wrong_imports(path)]
    assert not wrong, "\n".join(wrong)


def test_the_package_itself_is_empty() -> None:
    assert (AGENT / "__init__.py").read_text() == ""


IMPORT_ALL = """
import importlib, sys
forbidden = frozenset(sys.argv[1].split(","))
current = ""
def watch(event, args):
    if event in forbidden and current:
        print(f"{current}: {event} {args[:2]!r}")
sys.addaudithook(watch)
for current in sys.argv[2:]:
    importlib.import_module(current)
current = ""
"""


def test_importing_starts_no_process_and_reaches_nothing() -> None:
    command = [sys.executable, "-c", IMPORT_ALL, ",".join(FORBIDDEN_AT_IMPORT), *module_names()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("", 0), done.stderr


def test_importing_leaves_no_thread_behind() -> None:
    code = "import importlib, sys, threading\n"
    code += "for name in sys.argv[1:]: importlib.import_module(name)\n"
    code += "sys.exit(threading.active_count() != 1 and str(threading.enumerate()))"
    command = [sys.executable, "-c", code, *module_names()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.stderr, done.returncode) == ("", 0)


def test_nothing_waits_by_wait_for() -> None:
    """Python 3.11's swallows a cancel that comes as it ends: take asyncio.timeout."""
    users = [str(path) for path in MODULES if "asyncio.wait_for(" in path.read_text()]
    assert not users


def test_functions_are_short() -> None:
    long = []
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                long.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {lines} lines")
    assert not long, "\n".join(long)


def test_modules_are_short() -> None:
    sizes = {path.relative_to(ROOT): path.read_text().count("\n") for path in MODULES}
    assert not {str(path): size for path, size in sizes.items() if size > MAX_MODULE_LINES}


# --- dependencies --------------------------------------------------------------------------------


def locked(lock: str) -> dict[str, str]:
    """Return the distributions that a lock pins, by normalised name."""
    pins = re.findall(r"(?m)^([A-Za-z0-9._-]+)==(\S+)", (ROOT / lock).read_text())
    return {normalised(name): version for name, version in pins}


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def declared() -> dict[str, set[str]]:
    """Return the normalised names that pyproject.toml asks for, `runtime` and each extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = {"runtime": project["dependencies"], **project["optional-dependencies"]}
    return {
        group: {normalised(re.split(r"[^A-Za-z0-9._-]", line)[0]) for line in lines}
        for group, lines in groups.items()
    }


@pytest.mark.parametrize("lock", LOCKS)
def test_lock_names_no_index_host_or_path(lock: str) -> None:
    requirement = re.compile(r"[a-z0-9._-]+==[A-Za-z0-9.!+]+( ; [a-z_]+ [<>=!]+ '[^']+')? \\")
    digest = re.compile(r"    --hash=sha256:[0-9a-f]{64}( \\)?")
    comment = re.compile(r"    #( +via)?( +([A-Za-z0-9._-]+|intercept-agent \(pyproject\.toml\)))?")
    lines = (ROOT / lock).read_text().splitlines()
    allowed = (requirement, digest, comment)
    assert not [line for line in lines if not any(form.fullmatch(line) for form in allowed)]


@pytest.mark.parametrize("lock", LOCKS)
def test_every_pin_of_a_lock_has_a_hash(lock: str) -> None:
    lines = (ROOT / lock).read_text().splitlines()
    bare = [a for a, b in pairwise(lines) if "==" in a and "--hash=sha256:" not in b]
    assert not bare


def test_lock_holds_everything_that_is_declared() -> None:
    assert set().union(*declared().values()) <= set(locked("requirements.lock"))


def test_locks_agree() -> None:
    known: dict[str, set[str]] = {}
    for lock in LOCKS:
        for name, version in locked(lock).items():
            known.setdefault(name, set()).add(version)
    assert not {name for name, versions in known.items() if len(versions) > 1}


def test_runtime_lock_holds_what_runs_and_nothing_of_the_tests() -> None:
    pinned = locked("requirements-runtime.lock").keys()
    assert declared()["runtime"] <= pinned
    assert not pinned & declared()["test"]
    assert pinned <= locked("requirements.lock").keys()
    assert not pinned & locked("requirements-build.lock").keys()  # `make install` takes those out


def test_bcc_is_not_asked_of_the_package_index() -> None:
    """What the index has under that name is another program."""
    names = set().union(*declared().values(), *(locked(lock) for lock in LOCKS))
    assert "bcc" not in names


def test_setuptools_is_not_needed_at_run_time() -> None:
    """Its stand-in for distutils doubles the memory of whoever imports iptc."""
    assert "setuptools" not in locked("requirements-runtime.lock")
    assert "setuptools" not in locked("requirements.lock")


# --- what git tracks -----------------------------------------------------------------------------


def files_of_the_repository() -> list[Path]:
    """Return what git tracks or would track; skips outside a checkout."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    # The checkout may belong to another user, as it does in CI.
    command = ["git", "-c", "safe.directory=*", "ls-files", "-coz", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    paths = [ROOT / name.decode() for name in done.stdout.split(b"\0") if name]
    return [path for path in paths if path.is_file()]


def test_no_file_names_a_path_of_the_machine_it_was_written_on() -> None:
    # Put together here, or this file would be the one that is found.
    checkout = re.escape(f"{ROOT}/") if len(ROOT.parts) > 2 else r"(?!)"
    homes = r"home/(?!kubernetes/bin)[a-z]\w*"  # that is where nodes of GKE have their plugins
    machine = re.compile(rf"(?<![\w.*}}-])/(?:work|{homes})/|{checkout}".encode())
    found = [
        f"{path.relative_to(ROOT)}: {hit.group().decode()}"
        for path in files_of_the_repository()
        if (hit := machine.search(path.read_bytes()))
    ]
    assert not found
