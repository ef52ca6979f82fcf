"""Findings about the node's CNI configuration: plugins that are named and not there (report 19)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent.formats import cni_config
from agent.kernel import files
from agent.leftovers.finding import Finding, Kind, Severity, Where
from agent.leftovers.node import Node, running
from agent.model import catalogue
from agent.model.errors import InvalidSettings
from agent.model.owner import Owner, Role

CONF_DIR = Path("/etc/cni/net.d")
# The usual folder first; distributions that package the plugins have them in the others.
BIN_DIRS = (Path("/opt/cni/bin"), Path("/usr/lib/cni"), Path("/usr/libexec/cni"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Folders:
    """Where the runtime looks for configurations and for plugins."""

    conf_dir: Path = CONF_DIR
    bin_dirs: tuple[Path, ...] = BIN_DIRS

    @classmethod
    def of(cls, conf_dir: str | Path | None, bin_dir: str | Path | None) -> "Folders":
        """Return these folders; None stands for the usual ones."""
        return cls(
            conf_dir=Path(conf_dir) if conf_dir else CONF_DIR,
            bin_dirs=(Path(bin_dir),) if bin_dir else BIN_DIRS,
        )


def findings(folders: Folders, node: Node) -> Iterator[Finding]:
    """Yield the configurations that a runtime would fail with.

    The first valid file by name is the one in use; the others wait until it goes.
    """
    used = True
    valid: list[tuple[Path, tuple[Owner, ...]]] = []
    for path in _files(folders.conf_dir):
        try:
            found = cni_config.parse(path.name, files.read(path, cni_config.MAX_BYTES))
        except (InvalidSettings, OSError) as error:
            why = error.strerror if isinstance(error, OSError) else None
            yield _broken(path, why or str(error))
            continue
        missing = _missing(found.plugins, folders.bin_dirs)
        if missing:
            yield _without_binary(path, missing, folders.bin_dirs, used=used)
        used = False
        valid.append((path, () if missing else _gone(found.plugins, node)))
    if len(valid) > 1 and valid[0][1] and not valid[1][1]:
        yield _outlived(valid[0][0], valid[0][1], valid[1][0])


def _files(folder: Path) -> list[Path]:
    try:
        return sorted(p for p in folder.iterdir() if cni_config.is_configuration(p.name))
    except OSError:
        return []


def _missing(plugins: Sequence[Mapping[str, Any]], bin_dirs: Sequence[Path]) -> tuple[str, ...]:
    """Return the plugins, and those for addresses, that have no binary."""
    wanted: dict[str, None] = {}
    for plugin in plugins:
        wanted[str(plugin["type"])] = None
        ipam = plugin.get("ipam")
        if isinstance(ipam, Mapping) and isinstance(ipam.get("type"), str):
            wanted[ipam["type"]] = None
    return tuple(name for name in wanted if not any((d / name).is_file() for d in bin_dirs))


def _gone(plugins: Sequence[Mapping[str, Any]], node: Node) -> tuple[Owner, ...]:
    """Return the CNIs whose plugins are named and of which no process runs on the node."""
    if not node.all_visible:
        return ()
    owners = (catalogue.owner_of_plugin(str(plugin["type"])) for plugin in plugins)
    return tuple(o for o in owners if o and o.role is Role.CNI and running(o, node) is None)


def _outlived(path: Path, owners: Sequence[Owner], other: Path) -> Finding:
    titles = " and ".join(owner.title for owner in owners)
    names = " or ".join(owner.processes[0] for owner in owners)
    return Finding(
        kind=Kind.CNI_CONFIG,
        severity=Severity.CRITICAL,
        where=Where(),
        objects=(str(path),),
        owner=",".join(owner.name for owner in owners),
        evidence=(
            f"{path} is the first configuration, which the runtime uses, before {other}",
            f"no process {names} runs on this node",
        ),
        explanation=f"New pods are still given to {titles}, which is gone: they fail to start, or "
        f"have a network that nobody keeps. The configuration of what came after, {other.name}, "
        "waits behind it.",
        fix=f"remove {path}",
    )


def _without_binary(
    path: Path, missing: tuple[str, ...], bin_dirs: Sequence[Path], *, used: bool
) -> Finding:
    owners = [owner.name for name in missing if (owner := catalogue.owner_of_plugin(name))]
    chained = [
        name for name in missing if name in cni_config.CHAINED_ONLY or name == cni_config.TYPE
    ]
    if missing == (cni_config.TYPE,):
        fix = "intercept-agent cni uninstall (or install, to have the plugin again)"
    elif len(chained) == len(missing):
        fix = (
            f"take the entry of {' and '.join(missing)} out of {path}, or install the plugin again"
        )
    else:
        fix = f"install {' and '.join(missing)} in {bin_dirs[0]}, or remove {path}"
    folders = ", ".join(map(str, bin_dirs))
    return Finding(
        kind=Kind.CNI_CONFIG,
        severity=Severity.CRITICAL if used else Severity.WARNING,
        where=Where(),
        objects=(str(path), *missing),
        owner=",".join(dict.fromkeys(owners)) or "unknown",
        evidence=(
            f"{path} names {' and '.join(missing)}, of which no binary is in {folders}",
            "it is the first configuration, which the runtime uses"
            if used
            else "another configuration comes first",
        ),
        explanation="No pod can start on this node, and none can be stopped: the runtime fails at "
        "the missing plugin."
        if used
        else "If the configurations before it go, no pod can start or stop on this node.",
        fix=fix,
    )


def _broken(path: Path, why: str) -> Finding:
    return Finding(
        kind=Kind.CNI_CONFIG,
        severity=Severity.WARNING,
        where=Where(),
        objects=(str(path),),
        owner="unknown",
        evidence=(why,),
        explanation="A runtime passes this file over, or fails at it, depending on its version.",
        fix=f"mend or remove {path}",
    )
