"""What `scan` and `clean` look at: the namespaces, the node's processes, and what pods want."""

import argparse
import asyncio
import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping

from agent.cli import output
from agent.cli.agent_client import AgentClient, AgentSays, add_agent_options
from agent.cli.configuration import configuration
from agent.cli.pod_lookup import netns_of, runtime_view
from agent.kernel import namespaces, netns
from agent.kernel.namespaces import Place
from agent.kernel.netns import Netns, NetnsId, id_at
from agent.leftovers.cni import BIN_DIRS, CONF_DIR, Folders
from agent.leftovers.node import Node, PodFact
from agent.leftovers.scan import Progress, Subject
from agent.model.decision import decide
from agent.model.errors import EnvironmentLacks
from agent.model.pod import Namespace
from agent.node.config import Config
from agent.node.cri import endpoint
from agent.node.roster import model_of

OWN = "host"


def add_options(parser: argparse.ArgumentParser, *, many: bool) -> None:
    """Add where to look, by what configuration, and how the answer is shown."""
    where = parser.add_argument_group("where (default: --all)" if many else "where (one of these)")
    where.add_argument(
        "--netns",
        metavar="NS",
        action="extend",
        nargs="+" if many else 1,
        default=[],
        help="a name under /run/netns, a path, pid:N, container:ID, pod:NAMESPACE/NAME, self or "
        "host (that of process 1)",
    )
    where.add_argument(
        "--host",
        action="store_true",
        help="the namespace in which this command runs, as the node's own"
        if many
        else "the namespace in which this command runs, as the node's own; or allow --netns to be "
        "the node's",
    )
    where.add_argument("--all", action="store_true", help="every namespace of the node")
    add_agent_options(parser)
    parser.add_argument("--conf-dir", metavar="D", help=f"CNI configurations ({CONF_DIR})")
    parser.add_argument("--bin-dir", metavar="D", help=f"CNI plugins ({BIN_DIRS[0]})")


def require_root(what: str) -> None:
    if os.geteuid() != 0:
        raise EnvironmentLacks(f"{what} enters namespaces, which needs root; run this as root")


def folders(arguments: argparse.Namespace) -> Folders:
    """Return where CNI's files are: by option, by the agent's configuration, or the usual ones."""
    known = configuration(arguments.config)
    return Folders.of(
        arguments.conf_dir or known.cni_conf_dir, arguments.bin_dir or known.cni_bin_dir
    )


def gather(arguments: argparse.Namespace) -> tuple[tuple[Subject, ...], Node, tuple[str, ...]]:
    """Return the namespaces to look at, the node, and remarks about what is not known.

    Raises: NamespaceRefused for a target that is none.
    """
    known = configuration(arguments.config, arguments.socket)
    running = namespaces.processes()
    pods, remarks = _pods(known)
    found: dict[NetnsId, Subject] = {}
    if arguments.host:
        found |= _keyed([Subject(place=_own_place(), host=True)])
    if arguments.netns:
        found |= _keyed(_named(arguments.netns, known))
    elif not arguments.host or arguments.all:
        paths = [path for path, _ in pods]
        found = _keyed(_every(namespaces.places(running, paths))) | found
    facts = {identity: fact for path, fact in pods if (identity := id_at(path))}
    node = Node(processes=running, all_visible=namespaces.all_visible(), pods=facts)
    subjects = sorted(found.values(), key=lambda subject: not subject.host)
    return tuple(subjects), node, remarks


def _keyed(subjects: Iterable[Subject]) -> dict[NetnsId, Subject]:
    return {subject.place.id: subject for subject in subjects}


def _own_place() -> Place:
    return Place(netns.own_id(), f"/proc/{os.getpid()}/ns/net", OWN)


def _named(names: Iterable[str], known: Config) -> Iterator[Subject]:
    for name in names:
        found, is_self = netns.open_target(netns_of(name, known))
        with found:
            path = f"/proc/{os.getpid()}/ns/net" if is_self else found.path
            host = netns.node_reason(found, is_self=is_self) is not None
            yield Subject(
                place=Place(found.id, path, name), host=host and found.id == netns.own_id()
            )


def _every(places: Iterable[Place]) -> Iterator[Subject]:
    own = netns.own_id()
    for place in places:
        if place.id == own:
            yield Subject(place=_own_place(), host=True)
            continue
        with contextlib.suppress(EnvironmentLacks), Netns.open(place.path) as opened:
            host = netns.node_reason(opened, is_self=False) is not None
            yield Subject(place=place, host=host)


# --- what pods want -------------------------------------------------------------------------------

Told = tuple[str, PodFact]
"""The path of a pod's namespace, and what is known of the pod."""


def _pods(known: Config) -> tuple[list[Told], tuple[str, ...]]:
    """Ask the running agent, or else the runtime; without either, labels are not known."""
    try:
        with AgentClient(known.socket) as agent:
            return list(_told(agent.ask("pods"))), ()
    except (EnvironmentLacks, AgentSays):
        pass
    try:
        return _from_runtime(known), ()
    except EnvironmentLacks as error:
        return [], (f"no pod's labels are known: no agent answers, and {error}",)


def _told(rows: Iterable[Mapping[str, object]]) -> Iterator[Told]:
    for row in rows:
        if row["netns"]:
            title = "/".join(str(part) for part in (row["namespace"], row["name"]) if part)
            reason, text = str(row["reason"]), str(row["text"])
            fact = PodFact.of(title, reason, text, captured=bool(row["captured"]))
            yield str(row["netns"]), fact


def _from_runtime(known: Config) -> list[Told]:
    """Ask the runtime, if one listens: loading what that takes costs more than the scan.

    Raises: EnvironmentLacks.
    """
    if known.cri_endpoint == "none":
        raise EnvironmentLacks("no runtime is configured")
    paths = endpoint.candidates(known.cri_endpoint)
    if all(endpoint.unreachable(path) for path in paths):
        where = paths[0] if len(paths) == 1 else "any of the usual sockets"
        raise EnvironmentLacks(f"no container runtime answers on {where}")
    found = []
    for each in asyncio.run(runtime_view(known)).pods.values():
        if each.netns is None:
            continue
        pod = model_of(each)
        decision = decide(pod, Namespace(name=pod.namespace), known.policy())
        fact = PodFact.of(pod.title, decision.reason, decision.text, captured=decision.captured)
        found.append((each.netns, fact))
    return found


# --- progress -------------------------------------------------------------------------------------


@contextlib.contextmanager
def progress(arguments: argparse.Namespace, total: int) -> Iterator[Progress]:
    """Show how far it is where a person watches, on stderr, and nothing elsewhere."""
    if arguments.output != "table" or not output.watched():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("looking", total=total)
        yield lambda name: bar.update(task, advance=1, description=f"looking into {name}")
