"""The command `intercept-agent` itself: its version, and errors that nobody foresaw."""

import argparse
import importlib
import signal
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from agent.cli import plan_command
from agent.cli.main import COMMANDS, main
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


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("aply", "error: there is no command 'aply'; did you mean apply? See `intercept-agent --"),
        ("zzz", "error: there is no command 'zzz'; see `intercept-agent --help`"),
        ("", "error: there is no command ''; see"),
        ("-v", "error: -v stands before the command, and options come behind it; see `intercept"),
        ("--output=json", "error: --output=json stands before the command, and"),
    ],
)
def test_what_does_not_begin_a_command_line_is_told_with_what_was_meant(
    word: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([word, "--netns", "web"])
    assert capsys.readouterr().err.startswith(said)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_says_what_it_is_for(command: str) -> None:
    parser = argparse.ArgumentParser()
    importlib.import_module(f"agent.cli.{command}_command").add_options(parser)
    for action in parser._actions:
        hidden = action.help == argparse.SUPPRESS
        assert hidden or (action.help or "")[:1].isalnum(), action.option_strings or action.dest


@pytest.mark.parametrize("command", COMMANDS)
def test_who_takes_the_agents_configuration_takes_its_socket(command: str) -> None:
    parser = argparse.ArgumentParser()
    importlib.import_module(f"agent.cli.{command}_command").add_options(parser)
    names = {name for action in parser._actions for name in action.option_strings}
    at_the_agent = "--config" in names and command not in ("run", "cni")
    assert ("--socket" in names) == at_the_agent


def test_start_of_a_command_does_not_look_the_version_up() -> None:
    code = "import sys; from agent.cli.main import main; main(['plan'])"
    code += "; sys.exit('importlib.metadata' in sys.modules)"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


INTERRUPTED = """
import os, signal, sys
from agent.cli.start import main
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "agent.cli.output":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
sys.argv[1:] = ["plan"]
signal.signal(signal.SIGINT, {handler})
sys.exit(main())
"""


@pytest.mark.parametrize(
    ("handler", "code"),
    [("signal.default_int_handler", -signal.SIGINT), ("signal.SIG_IGN", 0)],
)
def test_command_that_is_interrupted_while_it_loads_shows_no_traceback(
    handler: str, code: int
) -> None:
    program = INTERRUPTED.format(handler=handler)
    root = Path(__file__).parents[2]
    words = (sys.executable, "-c", program)
    done = subprocess.run(words, cwd=root, capture_output=True, check=False, text=True)
    assert (done.returncode, done.stderr) == (code, "")
