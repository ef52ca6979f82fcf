"""The command `intercept-agent`: finds the command, runs it, turns errors into words and codes."""

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import NoReturn

from agent.cli import output
from agent.kernel import package
from agent.model.errors import AgentError, EnvironmentLacks

COMMANDS = {
    "plan": "print what would be programmed",
    "apply": "capture a namespace",
    "check": "tell whether a namespace is captured as it should be",
    "remove": "take a capture out of a namespace",
    "trace": "walk one packet through the loaded rules",
    "explain": "tell on one page whether a pod is captured, why, and what to do",
    "flows": "watch connections of pods as they are made, and what becomes of them",
    "proxy": "ask the proxy of a pod: ready, listeners, clusters, certs",
    "validate": "lint manifests: decisions, settings and mistakes, without a cluster",
    "scan": "find what somebody left behind on this node",
    "clean": "take out what a scan finds, and put it back",
    "doctor": "tell what on this node keeps the agent from working, or may",
    "run": "run the agent of this node",
    "status": "show how the running agent is",
    "pods": "list the pods that the running agent knows",
    "events": "show what happened to pods",
    "cni": "install, remove or check the CNI plugin of this node",
}


WRITING = frozenset({"apply", "remove", "clean", "cni"})
VERBOSE = "say more on stderr"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        more = " See" if message.endswith("?") else "; see"
        self.exit(2, f"error: {message}{more} `{self.prog} --help`\n")

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        """Say which words are not understood, and what the first was probably meant to be."""
        from agent.formats.documents import nearest  # only a mistake waits for what reads YAML

        hint = nearest(unknown[0].partition("=")[0], self._option_string_actions)
        self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")


class _Version(argparse.Action):
    """Prints the version; an action of its own because looking it up takes a while."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        print(f"{package.NAME} {package.version()}")
        parser.exit()


def _parser(wanted: str) -> argparse.ArgumentParser:
    """Return the parser with the options of one command: only its module is imported."""
    parser = _Parser(
        prog=package.NAME,
        description="Steers the traffic of mesh pods into their sidecar proxy, and proves it.",
        epilog=f"`{package.NAME} COMMAND --help` shows the options of a command, with examples.",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", title="commands"
    )
    for name, summary in COMMANDS.items():
        if name != wanted:
            commands.add_parser(name, help=summary)
            continue
        module = importlib.import_module(f"agent.cli.{name}_command")
        sub = commands.add_parser(
            name,
            help=summary,
            description=module.__doc__,
            epilog=module.EXAMPLES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        module.add_options(sub)
        verbose = getattr(module, "VERBOSE", VERBOSE)
        sub.add_argument("-v", "--verbose", action="store_true", help=verbose)
        sub.set_defaults(run=module.run, parser=sub)
    return parser


def _refuse_first(word: str) -> None:
    """Refuse what does not begin a command line, and say what was probably meant."""
    if word.startswith("-") and word not in ("-h", "--help", "--version"):
        _parser("").error(f"{word} stands before the command, and options come behind it")
    if not word.startswith("-") and word not in COMMANDS:
        from agent.formats.documents import nearest

        _parser("").error(f"there is no command {word!r}{nearest(word, COMMANDS)}")


def _completed(command: str, words: list[str]) -> list[str]:
    """Return the words as the command's own parser takes them."""
    if command not in COMMANDS:
        return words
    module = importlib.import_module(f"agent.cli.{command}_command")
    return list(module.completed(words)) if hasattr(module, "completed") else words


def main(words: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 0 to 4 as the contract has them, 70 for a bug."""
    with output.speaking():
        return _main(list(sys.argv[1:] if words is None else words))


def _main(given: list[str]) -> int:
    first = given[0] if given else "--help"
    _refuse_first(first)
    command = "" if first.startswith("-") else first
    code: int | None = None
    try:
        with output.printing(late=command in WRITING):
            arguments, unknown = _parser(command).parse_known_args(_completed(command, given))
            if unknown:
                arguments.parser.refuse(unknown)
            code = int(arguments.run(arguments))
        return code or 0
    except output.Unwritable as error:
        failed = output.fail(error)
        # 3 would say that nothing was touched.
        return code if code is not None and command in WRITING else failed
    except AgentError as error:
        return output.fail(error)
    except OSError as error:  # no more files, processes or memory
        where = f"{error.filename}: " if error.filename else ""
        return output.fail(EnvironmentLacks(f"{where}{error.strerror or error}"))
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        return output.fail_unexpectedly(error, verbose=bool({"-v", "--verbose"} & set(given)))


if __name__ == "__main__":
    sys.exit(main())
