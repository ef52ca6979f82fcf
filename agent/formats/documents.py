"""YAML files that people write: settings, and the pod whose annotations are settings."""

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from agent.formats import pod as pod
from agent.model.errors import InvalidSettings

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


def pod_settings(path: str) -> Mapping[str, object]:
    """Return the settings of the one pod (or pod template) in a manifest.

    Raises: InvalidSettings with every mistake in its annotations.
    """
    for document in load_all(path):
        found = pod.pod_of(document)
        if found is not None:
            return pod.settings(found)
    raise InvalidSettings((f"{path}: there is no Pod and nothing with a pod template in it",))


def load_all(path: str) -> list[Any]:
    import yaml  # 20 ms that most commands need not pay

    try:
        text = Path(path).read_bytes()
    except OSError as error:
        raise InvalidSettings((f"cannot read {path}: {error.strerror}",)) from error
    if len(text) > MAX_BYTES:
        raise InvalidSettings((f"{path} is larger than {MAX_BYTES} bytes",))
    try:
        return [found for found in yaml.safe_load_all(text) if found is not None]
    except (yaml.YAMLError, UnicodeDecodeError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        said = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise InvalidSettings((f"{path}{line}: not YAML: {said}",)) from error


def nearest(word: str, known: Iterable[str]) -> str:
    """Return `; did you mean X?` or nothing."""
    found = difflib.get_close_matches(word, sorted(known), n=1)
    return f"; did you mean {found[0]}?" if found else ""
