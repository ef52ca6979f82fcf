"""YAML files that people write: settings, and the pod whose annotations are settings."""

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from agent.formats import pod as pod
from agent.formats import yaml_scalars, yaml_tree
from agent.model.errors import InvalidSettings
from agent.model.values import SIDECAR, shown

MAX_BYTES = 4 * 1024 * 1024


def load_mapping(path: str) -> Mapping[str, object]:
    """Return the one YAML mapping in a file.

    Raises: InvalidSettings, naming the file, the line and what was expected.
    """
    documents = load_all(path)
    if not documents:
        return {}
    if len(documents) > 1 or not isinstance(documents[0], dict):
        raise InvalidSettings((f"{path}: one YAML mapping of settings is expected",))
    return {str(key): value for key, value in documents[0].items()}


def pod_settings(path: str, mode: str = SIDECAR) -> Mapping[str, object]:
    """Return the settings of the one pod (or pod template) in a manifest.

    Raises: InvalidSettings with every mistake in it, each with its line.
    """
    for tree in _trees(path):
        for top, member in pod.members(_plain(tree, path)):
            place, found = pod.place_of_pod(member), pod.pod_of(member)
            if place is None or found is None:
                continue
            settings, mistakes = pod.settings(found, mode)
            if mistakes:
                lines = (
                    (yaml_tree.located(tree, (*top, *place, *note.at), key=note.key)[1], note.text)
                    for note in mistakes
                )
                said = tuple(f"{shown_path(path)}, line {line}: {text}" for line, text in lines)
                raise InvalidSettings(said)
            return settings
    raise InvalidSettings((f"{path}: there is no Pod and nothing with a pod template in it",))


def load_all(path: str) -> list[Any]:
    """Return what the documents of a file hold; those without content are left out.

    Raises: InvalidSettings, naming the file, the line and what is wrong.
    """
    found = (_plain(tree, path) for tree in _trees(path))
    return [document for document in found if document is not None]


def _trees(path: str) -> list[yaml_tree.Node]:
    """Return the documents of a file that have content. Raises: InvalidSettings."""
    try:
        text = yaml_tree.decoded(contents(path))
        trees = [yaml_tree.read(piece, line, tags=False) for piece, line in yaml_tree.pieces(text)]
    except yaml_tree.YamlError as error:
        raise InvalidSettings((f"{path}, line {error.line}: {error}",)) from error
    for tree in trees:
        for _, table in yaml_tree.tables(tree):
            for key, line, before in table.repeated:
                said = f"{shown(key)} is given twice, first on line {before}"
                raise InvalidSettings((f"{path}, line {line}: not YAML: {said}",))
    return [tree for tree in trees if tree is not None]


def _plain(tree: yaml_tree.Node, path: str) -> Any:
    try:
        return yaml_tree.plain(tree, yaml_scalars.documented)
    except ValueError as error:  # a number of thousands of digits
        raise InvalidSettings((f"{path}: not YAML: {error}",)) from error


def contents(path: str) -> bytes:
    """Return the bytes of a file; `-` is standard input.

    Raises: InvalidSettings if it cannot be read or is too large.
    """
    try:
        with Path("/dev/stdin" if path == "-" else path).open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        said = error.strerror if isinstance(error, OSError) else error
        raise InvalidSettings((f"cannot read {shown_path(path)}: {said}",)) from error
    if len(data) > MAX_BYTES:
        raise InvalidSettings((f"{path} is larger than {MAX_BYTES} bytes",))
    return data


def shown_path(path: str) -> str:
    return path if path.isprintable() else repr(path)


def nearest(word: str, known: Iterable[str]) -> str:
    """Return `; did you mean X?` or nothing."""
    found = difflib.get_close_matches(word, sorted(known), n=1)
    return f"; did you mean {found[0]}?" if found else ""
