"""Take out what a scan finds: shows it all, saves it, asks, removes it, and looks again."""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from agent.capture import record
from agent.cli import leftover_inputs, output
from agent.kernel import namespaces, netns
from agent.kernel.namespaces import Place
from agent.kernel.netns import Netns
from agent.leftovers import backup, clean
from agent.leftovers.backup import Saved
from agent.leftovers.clean import Planned
from agent.leftovers.finding import Kind
from agent.leftovers.node import Node
from agent.leftovers.scan import Subject
from agent.model.errors import Declined, InvalidSettings, NamespaceRefused
from agent.model.wanted import Known

EXAMPLES = """examples:
  intercept-agent clean --netns web --dry-run          show what would go
  intercept-agent clean --host --only kube-proxy       ask, then remove
  intercept-agent clean --all --yes -o json            every pod of the node, not the node itself
  intercept-agent clean --restore /var/lib/intercept-agent/backups/clean-20261130-120000-42.txt

What cannot be put back (others' eBPF, CNI files, what nobody can read) is shown by scan and left
by clean.

exit code: 0 done or nothing to do, 1 there is something, and --dry-run or the answer was no
"""

BACKUPS = Path("/var/lib/intercept-agent/backups")


def add_options(parser: argparse.ArgumentParser) -> None:
    leftover_inputs.add_options(parser, many=False)
    parser.add_argument(
        "--only",
        metavar="KIND",
        action="append",
        choices=[kind.value for kind in Kind],
        default=[],
        help=f"only findings of this kind, repeatable ({', '.join(Kind)})",
    )
    parser.add_argument("-n", "--dry-run", action="store_true", help="show the removal, make none")
    parser.add_argument("-y", "--yes", action="store_true", help="do not ask")
    parser.add_argument("--restore", metavar="FILE", help="put back what a backup holds")
    parser.add_argument(
        "--backup-dir", metavar="D", default=str(BACKUPS), help=f"where it is saved ({BACKUPS})"
    )


def run(arguments: argparse.Namespace) -> int:
    leftover_inputs.require_root("clean")
    if arguments.restore:
        return _restore(arguments)
    planned, node = _plan(arguments)
    lines = [
        f"{each.subject.place.name}: {line}" for each in planned for line in each.removal.lines()
    ]
    if not planned or arguments.dry_run:
        return _report(arguments, planned, lines)
    if arguments.output == "table":
        _show(planned)
    if _ask(arguments, lines):  # somebody took their time: what lives may be another thing now
        _, node, _ = leftover_inputs.gather(arguments)
    path = _backup_path(arguments)
    backup.write(path, [each.saved for each in planned])
    _perform(planned, node, _kinds(arguments), path)
    if arguments.output == "json":
        output.print_json({"removed": lines, "backup": str(path)})
    else:
        print(f"removed; {path} has it all: intercept-agent clean --restore {path}")
    return 0


def _perform(planned: Sequence[Planned], node: Node, kinds: frozenset[Kind], path: Path) -> None:
    """Make every removal; one that fails ends it, and what went before stays removed."""
    done = []
    try:
        for each in planned:
            clean.perform(each, node, kinds=kinds, known_of=_known)
            done.append(each.subject.place.name)
            if each.removal.capture:
                _forget(each)
    finally:
        if done and len(done) < len(planned):
            output.warn([f"{', '.join(done)}: cleaned before that; {path} has what was there"])


# --- what goes ------------------------------------------------------------------------------------


def _plan(arguments: argparse.Namespace) -> tuple[list[Planned], Node]:
    if not (arguments.netns or arguments.host or arguments.all):
        raise InvalidSettings(("say what to clean: --netns NS, --host or --all",))
    asked = arguments
    if arguments.netns:  # --host only allows it to be the node's then
        asked = argparse.Namespace(**{**vars(arguments), "host": False})
    subjects, node, remarks = leftover_inputs.gather(asked)
    output.warn(remarks if arguments.verbose else ())
    kinds = _kinds(arguments)
    planned = []
    with leftover_inputs.progress(arguments, len(subjects)) as progress:
        for subject in _allowed(subjects, arguments):
            progress(subject.place.name)
            try:
                found = clean.prepare(subject, node, kinds=kinds, known_of=_known)
            except NamespaceRefused:
                if arguments.netns:
                    raise
                continue  # it ended meanwhile
            if found is not None:
                planned.append(found)
    return planned, node


def _kinds(arguments: argparse.Namespace) -> frozenset[Kind]:
    return frozenset(map(Kind, arguments.only))


def _allowed(subjects: Sequence[Subject], arguments: argparse.Namespace) -> list[Subject]:
    """Return the namespaces that may be touched.

    The node's own is only with --host, and then it is the one in which the command runs, unless it
    is named. Raises: NamespaceRefused.
    """
    found = []
    for subject in subjects:
        reason = _node_reason(subject)
        if reason is None or (arguments.host and (subject.host or arguments.netns)):
            found.append(subject)
        elif arguments.netns:
            raise NamespaceRefused(
                f"{subject.place.name} is the node's own network namespace ({reason}); say --host "
                "to clean it all the same"
            )
    return found


def _node_reason(subject: Subject) -> str | None:
    if subject.host:
        return "this command runs in it"
    try:
        with Netns.open(subject.place.path) as opened:
            return netns.node_reason(opened, is_self=subject.place.name == "self")
    except NamespaceRefused:
        return None


def _known(opened: Netns) -> Known:
    found = record.load(opened)
    return found.known() if found else Known()


def _forget(planned: Planned) -> None:
    with Netns.open(planned.subject.place.path) as opened:
        record.drop(opened)


# --- what is said ---------------------------------------------------------------------------------


def _show(planned: Sequence[Planned]) -> None:
    for each in planned:
        kinds = ", ".join(dict.fromkeys(f.kind.value for f in each.findings if f.takes))
        print(output.paint(f"{each.subject.place.name}: {kinds}", output.BOLD))
        for line in each.removal.lines():
            print(f"  {line}")


def _report(arguments: argparse.Namespace, planned: Sequence[Planned], lines: list[str]) -> int:
    if arguments.output == "json":
        document: dict[str, object] = {"removed": [], "backup": None}
        if arguments.dry_run:
            document["would_remove"] = lines
        output.print_json(document)
    elif planned:
        _show(planned)
        print(f"{output.count(len(lines), 'step')}; nothing was removed")
    else:
        print("nothing that clean takes; intercept-agent scan shows what there is")
    return 1 if planned else 0


def _ask(arguments: argparse.Namespace, lines: list[str]) -> bool:
    """Return if the removal may be made: whether anybody was asked.

    Raises: InvalidSettings if nobody can be, Declined for a no.
    """
    if arguments.yes:
        return False
    if arguments.output == "json" or not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise InvalidSettings(
            (
                f"{output.count(len(lines), 'step')} would be made and nobody can be asked: say "
                "--yes, or --dry-run to see them",
            )
        )
    sys.stdout.flush()
    try:
        answer = input(f"Make these {output.count(len(lines), 'step')}? [y/N] ")
    except EOFError:
        answer = ""
    if answer.strip().lower() not in ("y", "yes"):
        raise Declined("nothing was removed: the answer was no")
    return True


def _backup_path(arguments: argparse.Namespace) -> Path:
    when = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    folder = Path(arguments.backup_dir)
    path = folder / f"clean-{when}-{os.getpid()}.txt"
    return path


# --- and back -------------------------------------------------------------------------------------


def _restore(arguments: argparse.Namespace) -> int:
    path = Path(arguments.restore)
    changed = []
    saved = backup.read(path)
    for each, subject in _targets(saved, arguments):
        if clean.restore(subject, each):
            changed.append(each.name)
    if arguments.output == "json":
        output.print_json({"restored": changed, "backup": str(path)})
    elif changed:
        print(f"put back in {', '.join(changed)}")
    else:
        print("everything is there already")
    return 0


def _targets(saved: Sequence[Saved], arguments: argparse.Namespace) -> list[tuple[Saved, Subject]]:
    """Return the parts of a backup that go back, each with the namespace that it goes to.

    Into one that is named goes what was taken from it, or the only part that there is.

    Raises: NamespaceRefused, InvalidSettings if nobody can tell which part is meant.
    """
    if not arguments.netns:
        places = namespaces.places(namespaces.processes())
        host = arguments.host and len(saved) == 1
        return [(each, _place_of(each, places, host=host)) for each in saved]
    name = arguments.netns[0]
    found, _ = netns.open_target(name)
    with found:
        there = Subject(place=Place(found.id, found.path, name))
        _allowed([there], arguments)
        same = [each for each in saved if each.is_of(found)]
    if not same and len(saved) > 1:
        parts = ", ".join(each.name for each in saved)
        raise InvalidSettings((f"the backup is of {parts}, and {name} is none of these",))
    return [(each, there) for each in same or saved]


def _place_of(saved: Saved, places: Sequence[Place], *, host: bool) -> Subject:
    """Return the namespace that a part of a backup is for: the one that it was taken from.

    With `host` it is the node's own. Raises: NamespaceRefused if that is gone.
    """
    own = netns.own_id()
    node = Subject(place=Place(own, f"/proc/{os.getpid()}/ns/net", "host"), host=True)
    if host:
        return node
    for place in places:
        if place.id == saved.id:
            with Netns.open(place.path) as found:
                if saved.is_of(found):
                    return node if place.id == own else Subject(place=place)
    gone = "is gone" if saved.birth else "cannot be told from one that was made later"
    raise NamespaceRefused(
        f"the namespace {saved.name} that this was taken from {gone}; name one by --netns to put "
        "it there"
    )
