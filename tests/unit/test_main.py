"""The command `intercept-agent` itself: its version, and errors that nobody foresaw."""

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from agent.cli import plan_command
from agent.cli.main import main
from agent.kernel import package


def test_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"intercept-agent {package.version()}\n"


def test_version_of_a_checkout_that_is_not_installed_is_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    assert package.version() == "unknown"


@pytest.mark.parametrize("flag", ["-v", "--verbose", None])
@pytest.mark.parametrize(
    "error", [KeyError("oops"), ExceptionGroup("two", [ValueError("oops")]), RecursionError("oops")]
)
def test_unexpected_error_is_one_sentence_and_a_code_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
    flag: str | None,
) -> None:
    def broken(arguments: object) -> int:
        raise error

    monkeypatch.setattr(plan_command, "run", broken)
    assert main(["plan", *([flag] if flag else [])]) == 70
    said = capsys.readouterr()
    assert said.out == ""
    last = said.err.splitlines()[-1]
    assert last.startswith("error: this is a bug in intercept-agent (")
    assert "report it" in last
    assert ("Traceback" in said.err) == bool(flag)
    assert flag or len(said.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("--istio-inbound-portz=80", "=80; did you mean --istio-inbound-ports? See `intercept-"),
        ("80", "unrecognized arguments: 80; see `intercept-agent plan --help`"),
    ],
)
def test_flag_that_is_misspelt_is_told_with_the_one_that_was_meant(
    word: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["plan", word])
    assert said in capsys.readouterr().err


def test_start_of_a_command_does_not_look_the_version_up() -> None:
    code = "import sys; from agent.cli.main import main; main(['plan'])"
    code += "; sys.exit('importlib.metadata' in sys.modules)"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
